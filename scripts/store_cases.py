"""Cases of bench_kernels.py for stores: a cache of rows over another memory, rows' lives."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from kernel_inputs import TABLES, Rows, Work, batch_keys, case, floats

from cupyrec import arrays
from cupyrec.ops import cache_rows, cache_sets, row_life


class _Cache:
    """A cache with 16 times the keys of a batch, its slots 90 % taken; half of them are dirty."""

    def __init__(self, xp: ModuleType, batch: int, known: bool) -> None:
        self.n, rng = len(batch_keys(batch).ids), np.random.default_rng(3)
        held = 16 * self.n
        ids = rng.integers(-(2**63), 2**63 - 1, held + self.n)
        tables = rng.integers(0, TABLES, len(ids)).astype(np.uint32)
        cpu, counts = cache_sets.CacheSets(held * 10 // 9), rng.integers(1, 99, held)
        slots = cpu.plan(tables[:held], ids[:held], 1, 1).slots
        cpu.put(slots, tables[:held], ids[:held], np.arange(held), counts, 1)
        cpu.mark(slots[::2])
        asked = rng.permutation(np.flatnonzero(slots >= 0))[: self.n]
        self.slots, self.rows = xp.asarray(slots[asked]), xp.asarray(asked)
        self.asked_sets = len(np.unique(slots[asked] // cache_sets.WAYS))
        asked = asked if known else np.arange(held, held + self.n)
        self.tables, self.ids = xp.asarray(tables[asked]), xp.asarray(ids[asked])
        self.counts = xp.asarray(rng.integers(1, 99, self.n))
        self.sets = cache_sets.CacheSets(1, xp)
        self.sets.words, self.sets._tags = xp.asarray(cpu.words), xp.asarray(cpu._tags)
        self.shape = f"N={self.n} of {self.sets.capacity}"

    def state(self) -> tuple:
        return self.sets.words, self.sets._tags


@case("cache_find")
def _cache_find(xp: ModuleType, batch: int, width: int) -> Work:
    it = _Cache(xp, batch, known=True)
    return Work(
        lambda: (it.sets.find(it.tables, it.ids, 2, it.counts), *it.state()),
        it.n * (28 + 12 + 12) + 64 * it.asked_sets, it.shape, keys=it.n, dtype="int64",
    )  # fmt: skip


@case("cache_plan")
def _cache_plan(xp: ModuleType, batch: int, width: int) -> Work:
    """What the host sorts is sent down."""
    it = _Cache(xp, batch, known=False)
    keys = it.tables, it.ids
    plan = it.sets.plan(*keys, 2, 2)
    sets, gone = len(np.unique(arrays.to_host(plan.slots) // cache_sets.WAYS)), len(plan.evicted)
    ideal = 8 * it.n + 8 * it.n + sets * (64 + 256) + gone * (12 + 17)
    return Work(lambda: tuple(it.sets.plan(*keys, 2, 2)), ideal, it.shape, dtype="int64")


@case("cache_put")
def _cache_put(xp: ModuleType, batch: int, width: int) -> Work:
    it = _Cache(xp, batch, known=False)

    def call() -> tuple:
        it.sets.put(it.slots, it.tables, it.ids, it.rows, it.counts, 2)
        return it.state()

    return Work(call, it.n * (36 + 34), it.shape, dtype="int64")


@case("cache_mark")
def _cache_mark(xp: ModuleType, batch: int, width: int) -> Work:
    it = _Cache(xp, batch, known=True)

    def call() -> tuple:
        it.sets.mark(it.slots)
        return (it.sets.words,)

    def plain() -> tuple:
        it.sets.words[it.slots, 3] = 1
        return (it.sets.words,)

    return Work(call, it.n * (8 + 4), it.shape, dtype="int64", naive=plain)


@case("cache_remove")
def _cache_remove(xp: ModuleType, batch: int, width: int) -> Work:
    it = _Cache(xp, batch, known=True)

    def call() -> tuple:
        it.sets.remove(it.slots)
        return it.state()

    def plain() -> tuple:
        it.sets.words[it.slots, 3] = 0
        it.sets._tags.reshape(-1)[it.slots] = 0
        return it.state()

    return Work(call, it.n * (8 + 4 + 2), it.shape, dtype="int64", naive=plain)


def _copied(xp: ModuleType, batch: int, width: int) -> tuple[_Cache, Rows, Any]:
    """A cache, rows for its slots, and payloads of a batch."""
    it = _Cache(xp, batch, known=True)
    held = Rows(xp, it.sets.capacity // 2, width, 2)
    return it, held, floats(xp, it.n, held.stride + 4).view(np.uint32)


@case("fill_rows", 128, 16)
def _fill_rows(xp: ModuleType, batch: int, width: int) -> Work:
    it, held, payloads = _copied(xp, batch, width)

    def call() -> tuple:
        cache_rows.fill_rows(held.memory, it.slots, payloads)
        return (held.flat,)

    def plain() -> tuple:
        held.flat[it.slots] = payloads.view(np.float32)[:, : held.stride]
        return (held.flat,)

    ideal = it.n * (8 + 8 * held.stride) + held.addresses
    return Work(call, ideal, f"N={it.n} D={width}", {"stride": held.stride}, naive=plain)


@case("take_rows", 128, 16)
def _take_rows(xp: ModuleType, batch: int, width: int) -> Work:
    it, held, payloads = _copied(xp, batch, width)

    def call() -> tuple:
        cache_rows.take_rows(held.memory, it.sets, it.slots, payloads)
        return (payloads,)

    def plain() -> tuple:
        words, stride = it.sets.words[it.slots], held.stride
        payloads[:, :stride] = held.flat[it.slots].view(np.uint32)
        payloads[:, stride:-1], payloads[:, -1] = words[:, :3], words[:, 4]
        return (payloads,)

    ideal = it.n * (8 + 8 * held.stride + 32) + held.addresses
    return Work(call, ideal, f"N={it.n} D={width}", {"stride": held.stride}, naive=plain)


@case("touch_rows", 128, 16)
def _touch_rows(xp: ModuleType, batch: int, width: int) -> Work:
    u = len(batch_keys(batch).ids)
    held, offsets = Rows(xp, u, width + 2, 1), xp.asarray(batch_keys(batch).offsets)
    words = held.flat.view(np.int32)

    def call() -> tuple:
        return row_life.touch_rows(held.memory, held.rows, offsets, width, 7), words

    def plain() -> tuple:
        words[held.rows, width] = 7
        counts = words[held.rows, width + 1] + (offsets[1:] - offsets[:-1])
        words[held.rows, width + 1] = xp.minimum(counts, 2**31 - 1)
        return words[held.rows, width + 1], words

    ideal = u * (8 + 4 + 8 + 4) + offsets.nbytes + held.addresses
    return Work(call, ideal, f"U={u} D={width}", dtype="int32", naive=plain)

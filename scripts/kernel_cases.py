"""What bench_kernels.py measures: for each kernel one function that makes inputs and counts bytes.

A case gets an array module, a batch B and a width D, and returns a `Work`. Ideal bytes: each byte
of input that is needed, once, plus each byte of output, once. Growth: a new kernel is a function
here, and where array functions can do the same, one in kernel_naive.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import exchange_cases  # noqa: F401 enters its cases
import interaction_cases  # noqa: F401 enters its cases
import kernel_naive as naive
import mlp_cases  # noqa: F401 enters its cases
import normalization_cases  # noqa: F401 enters its cases
import numpy as np
import store_cases  # noqa: F401 enters its cases
from kernel_inputs import (
    CASES,
    FEATURES,
    FULL_BATCH,
    TABLES,
    Rows,
    Work,
    bag_offsets,
    batch_keys,
    case,
    floats,
    normals,
    zipf_keys,
)
from optimizer_cases import HISTORY, OPTIMIZERS

from cupyrec.autograd import Tensor, unit_gradient
from cupyrec.ops import (
    bags,
    bce_with_logits,
    embedding_rows,
    hash_table,
    initial_vectors,
    int8_codec,
    move_rows,
    row_memory,
    segment_sum,
    stochastic_rounding,
    unique_keys,
)

__all__ = ["CASES", "HISTORY", "OPTIMIZERS"]


# Embedding


@case("gather_rows", 128, 16)
def _gather_rows(xp: ModuleType, batch: int, width: int, dtype: type = np.float32) -> Work:
    keys = batch_keys(batch)
    u, n = len(keys.ids), len(keys.inverse)
    held = Rows(xp, u, width, 2)
    inverse, unseen = xp.asarray(keys.inverse), xp.empty((0, width), np.float32)
    out = xp.empty((n, width), dtype)

    def call() -> tuple:
        embedding_rows.gather_rows(held.memory, held.rows, inverse, unseen, out)
        return (out,)

    ideal = 8 * n + u * (8 + 4 * width) + out.nbytes + held.addresses
    return Work(
        call, ideal, f"N={n} U={u} D={width}", dtype=str(out.dtype),
        naive=lambda: (held.flat[held.rows[inverse], :width].astype(dtype),),
    )  # fmt: skip


case("gather_rows_16", 128, 16)(functools.partial(_gather_rows, dtype=np.float16))


@case("gather_rows_int8", 128, 16)
def _gather_rows_int8(xp: ModuleType, batch: int, width: int) -> Work:
    keys = batch_keys(batch)
    u, n = len(keys.ids), len(keys.inverse)
    held = _int8_rows(xp, u, width)
    inverse, unseen = xp.asarray(keys.inverse), xp.empty((0, width), np.float32)
    out = xp.empty((n, width), np.float32)

    def call() -> tuple:
        embedding_rows.gather_rows(held.memory, held.rows, inverse, unseen, out)
        return (out,)

    ideal = 8 * n + u * (8 + 4 + width) + out.nbytes + held.addresses
    return Work(
        call, ideal, f"N={n} U={u} D={width}",
        naive=lambda: (naive.int8_vectors(held.flat[held.rows[inverse]], width),),
    )  # fmt: skip


def _int8_rows(xp: ModuleType, count: int, width: int) -> Rows:
    held = Rows(xp, count, row_memory.vector_words(width, row_memory.INT8), 1)
    held.memory = held.memory._replace(value=row_memory.INT8)
    return held


@case("write_rows", 128, 16)
def _write_rows(xp: ModuleType, batch: int, width: int) -> Work:
    u = batch * FEATURES // 4
    held, values = Rows(xp, u, width, 2), floats(xp, u, width)
    state = xp.zeros((1, width), np.float32)

    def call() -> tuple:
        embedding_rows.write_rows(held.memory, 5, values, state)
        return (held.flat,)

    ideal = 4 * u * (width + held.stride) + 4 * width + held.addresses
    return Work(
        call, ideal, f"N={u} D={width}",
        {"stride": held.stride}, naive=lambda: (naive.write_rows(held.flat, 5, values),),
    )  # fmt: skip


@case("move_rows", 128, 16)
def _move_rows(xp: ModuleType, batch: int, width: int) -> Work:
    u = batch * FEATURES // 4
    held = Rows(xp, u, width, 2)
    order = np.random.default_rng(0).permutation(2 * u)
    source, target = xp.asarray(order[:u]), xp.asarray(order[u:])

    def call() -> tuple:
        move_rows.move_rows(held.memory, source, target)
        return (held.flat,)

    def plain() -> tuple:
        held.flat[target] = held.flat[source]
        return (held.flat,)

    ideal = u * (16 + 8 * held.stride) + held.addresses
    return Work(call, ideal, f"N={u} D={width}", {"stride": held.stride}, naive=plain)


@case("round_rows", 128, 16)
def _round_rows(xp: ModuleType, batch: int, width: int) -> Work:
    keys = batch_keys(batch)
    n, half = len(keys.ids), stochastic_rounding.FLOAT16
    x, tables, ids = floats(xp, n, width), xp.asarray(keys.tables), xp.asarray(keys.ids)
    return Work(
        lambda: (stochastic_rounding.round_rows(x, tables, ids, 7, 3, half),),
        n * (12 + 6 * width), f"N={n} D={width}", dtype="uint16",
    )  # fmt: skip


def _initial_vectors(
    xp: ModuleType, batch: int, width: int, parameters: list[float], plain: Callable[..., Any]
) -> Work:
    keys = batch_keys(batch)
    tables, ids = xp.asarray(keys.tables), xp.asarray(keys.ids)
    of_all = initial_vectors.Distributions(
        xp.zeros(1, np.int32), xp.full(1, width, np.int32), xp.asarray(np.array([parameters]))
    )
    return Work(
        lambda: (initial_vectors.initial_vectors(tables, ids, width, 7, of_all),),
        len(ids) * (12 + 4 * width), f"N={len(ids)} D={width}",
        naive=lambda: (plain(xp, len(ids), width),),
    )  # fmt: skip


@case("initial_uniform", 128, 16)
def _initial_uniform(xp: ModuleType, batch: int, width: int) -> Work:
    parameters = [0.0, 0.0, -0.5, 1.0, -0.5, 0.5]
    return _initial_vectors(xp, batch, width, parameters, naive.initial_uniform)


@case("initial_normal", 128, 16)
def _initial_normal(xp: ModuleType, batch: int, width: int) -> Work:
    parameters = [0.0, 1.0, 0.0, 0.25, -9.0, 9.0]
    return _initial_vectors(xp, batch, width, parameters, naive.initial_normal)


@case("segment_sum", 128, 16)
def _segment_sums(xp: ModuleType, batch: int, width: int, dtype: type = np.float32) -> Work:
    keys = batch_keys(batch)
    u, n = len(keys.ids), len(keys.inverse)
    x = floats(xp, n, width).astype(dtype)
    offsets, positions = xp.asarray(keys.offsets), xp.asarray(keys.positions)
    inverse = xp.asarray(keys.inverse)
    ideal = x.nbytes + 8 * n + 8 * (u + 1) + 4 * u * width
    return Work(
        lambda: (segment_sum.segment_sum(x, offsets, positions),),
        ideal, f"N={n} U={u} D={width}",
        naive=lambda: (naive.segment_sum(xp, x, inverse, u),),
    )  # fmt: skip


case("segment_sum_16", 128, 16)(functools.partial(_segment_sums, dtype=np.float16))


class _Bags:
    """The keys of a batch in bags, with weights and a gradient."""

    def __init__(self, xp: ModuleType, batch: int, width: int, int8: bool = False) -> None:
        keys, cuts = batch_keys(batch), bag_offsets(batch)
        self.u, self.n, self.m = len(keys.ids), len(keys.inverse), len(cuts) - 1
        self.shape = f"N={self.n} M={self.m} D={width}"
        self.inverse, self.offsets = xp.asarray(keys.inverse), xp.asarray(cuts)
        self.numbers = xp.asarray(np.repeat(np.arange(self.m), np.diff(cuts)))
        self.segments = xp.asarray(keys.offsets), xp.asarray(keys.positions)
        self.weights, self.grad = floats(xp, self.n), floats(xp, self.m, width)
        held = _int8_rows(xp, self.u, width) if int8 else Rows(xp, self.u, width, 1)

        def vectors() -> Any:
            rows = held.flat[held.rows[self.inverse]]
            return naive.int8_vectors(rows, width) if int8 else rows[:, :width]

        self.vectors, vector = vectors, width + 4 if int8 else 4 * width
        self.looked_up = held.memory, held.rows, self.inverse, xp.empty((0, width), np.float32)
        self.moved = 8 * self.n + self.u * (8 + vector) + held.addresses  # by the look-up


@case("segment_sum_bags", 128, 16)
def _segment_sum_bags(xp: ModuleType, batch: int, width: int) -> Work:
    """The gradient of bags is shared by their values."""
    it = _Bags(xp, batch, width)
    shared = dict(index=it.numbers, weights=it.weights)
    return Work(
        lambda: (segment_sum.segment_sum(it.grad, *it.segments, **shared),),
        20 * it.n + 8 * (it.u + 1) + 4 * width * (it.m + it.u), it.shape,
        naive=lambda: (
            naive.segment_sum(xp, it.weights[:, None] * it.grad[it.numbers], it.inverse, it.u),
        ),
    )  # fmt: skip


@case("pool_rows", 128, 16)
def _pool_rows(xp: ModuleType, batch: int, width: int, int8: bool = False) -> Work:
    it = _Bags(xp, batch, width, int8)
    out = xp.empty((it.m, width), np.float32)

    def call() -> tuple:
        bags.pool_rows(*it.looked_up, it.offsets, it.weights, False, out)
        return (out,)

    ideal = it.moved + 4 * it.n + 8 * (it.m + 1) + 4 * it.m * width
    return Work(
        call, ideal, it.shape,
        naive=lambda: (naive.pool_rows(xp, it.vectors(), it.weights, it.numbers, it.m),),
    )  # fmt: skip


case("pool_rows_int8", 128, 16)(functools.partial(_pool_rows, int8=True))


@case("weight_gradient", 128, 16)
def _weight_gradient(xp: ModuleType, batch: int, width: int) -> Work:
    it = _Bags(xp, batch, width)
    return Work(
        lambda: (bags.weight_gradient(*it.looked_up, it.numbers, it.grad),),
        it.moved + 12 * it.n + 4 * it.m * width, it.shape,
        naive=lambda: ((it.vectors() * it.grad[it.numbers]).sum(axis=1),),
    )  # fmt: skip


@case("bag_numbers")
def _bag_numbers(xp: ModuleType, batch: int, width: int) -> Work:
    it = _Bags(xp, batch, 1)
    return Work(
        lambda: (bags.bag_numbers(it.offsets, it.n),),
        8 * (it.m + 1) + 8 * it.n, f"N={it.n} M={it.m}", dtype="int64",
        naive=lambda: (xp.searchsorted(it.offsets, xp.arange(it.n), side="right") - 1,),
    )  # fmt: skip


@case("int8_encode", 128, 16)
def _int8_encode(xp: ModuleType, batch: int, width: int) -> Work:
    n = batch * FEATURES
    x = floats(xp, n, width)
    return Work(
        lambda: int8_codec.int8_encode(x), n * (5 * width + 4), f"N={n} D={width}",
        naive=lambda: naive.int8_encode(xp, x),
    )  # fmt: skip


@case("int8_decode", 128, 16)
def _int8_decode(xp: ModuleType, batch: int, width: int) -> Work:
    n = batch * FEATURES
    codes, scales = int8_codec.int8_encode(floats(xp, n, width))
    return Work(
        lambda: (int8_codec.int8_decode(codes, scales),), n * (5 * width + 4), f"N={n} D={width}",
        naive=lambda: (naive.int8_decode(codes, scales),),
    )  # fmt: skip


@case("unique_keys")
def _unique(xp: ModuleType, batch: int, width: int) -> Work:
    tables, ids = map(xp.asarray, zipf_keys(batch))
    u, n = len(batch_keys(batch).ids), len(ids)
    ideal = 12 * n + 12 * u + 16 * n + 8 * (u + 1)

    def call() -> tuple:
        keys = unique_keys.unique_keys(tables, ids)
        return keys.tables, keys.ids, keys.inverse, keys.offsets, keys.positions

    return Work(
        call,
        ideal, f"N={n} U={u}", keys=n, dtype="int64",
        naive=lambda: naive.unique_keys(xp, tables, ids),
    )  # fmt: skip


class _Table:
    """A hash table with half of its slots taken, and a sixteenth as many keys to look up."""

    def __init__(self, xp: ModuleType, batch: int, new: int) -> None:
        count = len(batch_keys(batch).ids)
        size = max(1 << 13, 1 << (16 * count - 1).bit_length())
        rng = np.random.default_rng(3)
        ids = rng.integers(-(2**63), 2**63 - 1, size)
        tables = rng.integers(0, TABLES, size).astype(np.uint32)
        self.length = size // 2
        self.table = hash_table.HashTable(xp)
        self.held = xp.asarray(tables[: self.length]), xp.asarray(ids[: self.length])
        self.table.insert(*self.held)
        if xp is not np:
            self.table._slots.rebuild(self.table._chunks, size)
        known = rng.permutation(size // 2)[: count - count * new // 4]
        asked = rng.permutation(np.concatenate([known, np.arange(count * new // 4) + size // 2]))
        self.tables, self.ids = xp.asarray(tables[asked]), xp.asarray(ids[asked])


@case("hash_find")
def _hash_find(xp: ModuleType, batch: int, width: int) -> Work:
    it = _Table(xp, batch, new=0)
    n = len(it.ids)
    return Work(
        lambda: (it.table.find(it.tables, it.ids),),
        n * (12 + 8 + 12 + 8), f"N={n} load=.5", keys=n, dtype="int64",
    )  # fmt: skip


@case("hash_find_or_insert")
def _hash_find_or_insert(xp: ModuleType, batch: int, width: int) -> Work:
    """A quarter of the keys is new."""
    it = _Table(xp, batch, new=1)
    n = len(it.ids)
    return Work(
        lambda: (it.table.find_or_insert(it.tables, it.ids),),
        n * (12 + 8 + 12 + 8) + n // 4 * 8, f"N={n} load=.5", keys=n, dtype="int64",
        before=lambda: it.table.truncate(it.length),
    )  # fmt: skip


@case("hash_delete")
def _hash_delete(xp: ModuleType, batch: int, width: int) -> Work:
    """The slots of all other keys are taken anew."""
    it = _Table(xp, batch, new=0)
    n = len(it.ids)

    def call() -> tuple:
        moved = it.table.delete(it.tables, it.ids)
        return *moved, *it.table.keys(0, len(it.table))

    def before() -> None:
        it.table.truncate(0)
        it.table.insert(*it.held)

    return Work(
        call, n * (12 + 8 + 12 + 8) + (it.length - n) * (12 + 8), f"N={n} of {it.length}",
        dtype="int64", before=before,
    )  # fmt: skip


# Dense ops


def _logits(xp: ModuleType, batch: int, samples: int) -> tuple[Any, Any, str]:
    # One number a sample: few would be nothing.
    n = samples or (FULL_BATCH if batch > 16 else 1024 * batch)
    z = floats(xp, n, 1)
    return z, xp.asarray((np.resize(normals(), (n, 1)) > 0.7).astype(np.float32)), f"B={n}"


@case("bce")
def _bce(xp: ModuleType, batch: int, width: int, samples: int = 0) -> Work:
    z, y, shape = _logits(xp, batch, samples)
    return Work(
        lambda: (bce_with_logits.bce_with_logits(z, y),), 8 * z.size + 4, shape, {"N": FULL_BATCH},
        naive=lambda: (naive.bce(xp, z, y),),
    )  # fmt: skip


@case("bce_and_gradient")
def _bce_and_gradient(xp: ModuleType, batch: int, width: int, samples: int = 0) -> Work:
    z, y, shape = _logits(xp, batch, samples)

    def call() -> tuple:
        loss = bce_with_logits.bce_with_logits(Tensor(z, requires_grad=True), y)
        return loss.data, loss._node.backward(unit_gradient(loss.data))[0]

    return Work(
        call, 12 * z.size + 4, shape, {"N": FULL_BATCH},
        naive=lambda: (naive.bce(xp, z, y), naive.bce_backward(xp, z, y)),
    )  # fmt: skip


@case("bce_weighted_and_gradient")
def _bce_weighted_and_gradient(xp: ModuleType, batch: int, width: int, samples: int = 0) -> Work:
    z, y, shape = _logits(xp, batch, samples)
    w = abs(floats(xp, *z.shape))

    def call() -> tuple:
        loss = bce_with_logits.bce_with_logits(Tensor(z, requires_grad=True), y, w)
        return loss.data, loss._node.backward(unit_gradient(loss.data))[0]

    return Work(
        call, 16 * z.size + 4, shape, {"N": FULL_BATCH},
        naive=lambda: (naive.bce_weighted(xp, z, y, w), w * naive.bce_backward(xp, z, y)),
    )  # fmt: skip

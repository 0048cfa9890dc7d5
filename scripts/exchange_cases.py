"""Cases of bench_kernels.py for what ranks exchange."""

from __future__ import annotations

import functools
from types import ModuleType

import kernel_naive as naive
import numpy as np
from kernel_inputs import FEATURES, PARAMETERS, Work, case, floats, zipf_keys

from cupyrec.ops import messages, partition, rank_sum
from cupyrec.ops.row_memory import Rounding

RANKS = 8


@case("owners")
def _owners(xp: ModuleType, batch: int, width: int) -> Work:
    tables, ids = map(xp.asarray, zipf_keys(batch))
    return Work(
        lambda: (partition.owners(tables, ids, RANKS),), 16 * len(ids), f"U={len(ids)} R={RANKS}",
        dtype="int32", naive=lambda: (naive.owners(tables, ids, RANKS),),
    )  # fmt: skip


@case("partition")
def _partition(xp: ModuleType, batch: int, width: int) -> Work:
    tables, ids = map(xp.asarray, zipf_keys(batch))
    return Work(
        lambda: tuple(partition.partition(tables, ids, RANKS)), 20 * len(ids) + 8 * RANKS,
        f"U={len(ids)} R={RANKS}", dtype="int64",
        naive=lambda: naive.partition(xp, tables, ids, RANKS),
    )  # fmt: skip


@case("rank_sum")
def _rank_sum(xp: ModuleType, batch: int, width: int) -> Work:
    n = 1024 * batch
    parts = floats(xp, RANKS, n)
    return Work(
        lambda: (rank_sum.rank_sum(parts),), 4 * (RANKS + 1) * n, f"N={RANKS} L={n}",
        {"L": PARAMETERS}, naive=lambda: (parts.sum(axis=0),),
    )  # fmt: skip


class _Exchanged:
    """Rows in the order of their peers, who get about as many each."""

    def __init__(self, xp: ModuleType, batch: int, width: int) -> None:
        self.n = batch * FEATURES
        self.counts = np.diff(np.linspace(0, self.n, RANKS + 1).astype(np.int64)).tolist()
        self.rows = floats(xp, self.n, width)
        self.order = xp.asarray(np.random.default_rng(5).permutation(self.n))
        self.shape = f"U={self.n} D={width} N={RANKS}"

    def moved(self, sizes: np.ndarray) -> int:
        return self.rows.nbytes + 8 * self.n + 16 * int(sizes.sum()) + 16 * (RANKS + 1)


@case("encode_messages", 128, 16)
def _encode_messages(xp: ModuleType, batch: int, width: int, codec: str = "int8") -> Work:
    it = _Exchanged(xp, batch, width)
    return Work(
        lambda: (messages.encode(it.rows, it.counts, codec, order=it.order)[0],),
        it.moved(messages.sizes(it.counts, codec, width)), it.shape, dtype="uint8",
        naive=lambda: (naive.encode_messages(xp, it.rows[it.order], it.counts, codec),),
    )  # fmt: skip


case("encode_messages_16", 128, 16)(functools.partial(_encode_messages, codec="fp16"))


@case("encode_at_random", 128, 16)
def _encode_at_random(xp: ModuleType, batch: int, width: int) -> Work:
    it = _Exchanged(xp, batch, width)
    ids = xp.asarray(np.random.default_rng(6).integers(-(2**63), 2**63, it.n))
    by = Rounding(xp.zeros(it.n, np.uint32), ids, seed=7, step=3)
    return Work(
        lambda: (messages.encode(it.rows, it.counts, "int8", order=it.order, rounding=by)[0],),
        it.moved(messages.sizes(it.counts, "int8", width)) + 12 * it.n, it.shape, dtype="uint8",
    )  # fmt: skip


@case("decode_messages", 128, 16)
def _decode_messages(xp: ModuleType, batch: int, width: int, codec: str = "int8") -> Work:
    it = _Exchanged(xp, batch, width)
    given, sizes = messages.encode(it.rows, it.counts, codec)
    out = xp.empty(it.rows.shape, np.float32)

    def call() -> tuple:
        return (messages.decode(given, it.counts, codec, width, order=it.order, out=out),)

    def plain() -> tuple:
        out[it.order] = naive.decode_messages(
            xp, given, it.counts, sizes.tolist(), codec, width
        )  # fmt: skip
        return (out,)

    return Work(call, it.moved(sizes), it.shape, naive=plain)


case("decode_messages_16", 128, 16)(functools.partial(_decode_messages, codec="fp16"))

"""Cases of bench_kernels.py for what ranks exchange."""

from __future__ import annotations

from types import ModuleType

import kernel_naive as naive
from kernel_inputs import PARAMETERS, Work, case, floats, zipf_keys

from cupyrec.ops import partition, rank_sum

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

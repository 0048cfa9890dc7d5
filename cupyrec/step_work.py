"""What one training step asks of a rank: bytes, operations, reads, by resource."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cupyrec.dense_work import DenseWork
from cupyrec.embedding.row_layout import RowLayout
from cupyrec.embedding.tier import CachedSSD, Memory, Tier
from cupyrec.ops.row_memory import vector_words
from cupyrec.table_sizes import beside_cache, cache_slots, record_bytes
from cupyrec.zipf import asked, not_in_cache

__all__ = [
    "GroupWork", "Work", "batch_bytes", "exchange_bytes", "group_work", "message_bytes",
    "step_work",
]  # fmt: skip

WRITTEN_AGAIN = 2.1  # bytes of files written for a byte of new records, compaction included
_PAGES = 12 << 20  # of a dozen arrays each half a page
_BYTES_OF = {"none": (4, 0), "fp16": (2, 0), "bf16": (2, 0), "int8": (1, 4)}  # a number, a row


class GroupWork(NamedTuple):
    """What a step asks of a rank's tables of one width.

    Attributes
    ----------
    layout : RowLayout
    slots : float
        Of the device's cache; without one there is room for all rows.
    keys : float
        K, ids of the rank's batch.
    unique : float
        U, different ones of them.
    rows : float
        Q, different rows of this rank that any rank asks for.
    missing : float
        Those of them that the device's cache hasn't.
    absent : float
        Those of these that must be read from a file.
    moved : float
        Rows that an optimizer moves.

    Examples
    --------
    See `group_work`.
    """

    layout: RowLayout
    slots: float
    keys: float
    unique: float
    rows: float
    missing: float
    absent: float
    moved: float


class Work(NamedTuple):
    """What a step asks of a rank.

    Attributes
    ----------
    flops : float
        Operations.
    memory : float
        Bytes from and to its device's memory.
    lines : float
        Random places of it that are visited, but for the rest of what lies there.
    pcie : float
        Bytes in one direction between device and host.
    host_memory, host_lines : float
        The same of the host's, if that is not the device's.
    sent : float
        Bytes to other ranks.
    ssd_reads : float
        Records.
    ssd_writes : float
        Bytes.

    Examples
    --------
    See `step_work`.
    """

    flops: float
    memory: float
    lines: float
    pcie: float
    host_memory: float
    host_lines: float
    sent: float
    ssd_reads: float
    ssd_writes: float


def group_work(
    layout: RowLayout,
    tier: Tier,
    ids: Sequence[float],
    draws: Sequence[float],
    ranks: int,
    zipf: float,
    dense_updates: bool = False,
) -> GroupWork:
    """Return what a step asks of a rank's tables of one width.

    Parameters
    ----------
    layout : RowLayout
    tier : Memory, CachedHost or CachedSSD
    ids, draws : sequence of float
        Of each table: its ids on all ranks, and how many of them a batch of all ranks asks for.
    ranks : int
    zipf : float
        Exponent.
    dense_updates : bool
        Whether all rows are moved.

    Notes
    -----
    See `cupyrec.zipf`: U of the rank's draws, Q = unique(all draws) / ranks, as each rank owns its
    part of each table's ids, whether they come often or not. Caches are taken to hold the rows
    that are asked for most, of all ranks' caches together.

    Examples
    --------
    >>> work = group_work(RowLayout(4, 0, ()), Memory(), [1000, 1000], [100, 100], 2, 1.0)
    >>> work.keys, round(work.unique), round(work.rows)
    (100.0, 72, 63)
    """
    own = sum(asked(n, zipf, m / ranks).unique for n, m in zip(ids, draws, strict=True))
    every = [asked(n, zipf, m) for n, m in zip(ids, draws, strict=True)]
    unique, missing, absent = sum(table.unique for table in every), 0.0, 0.0
    row, slots = 4 * layout.stride, math.inf
    if not isinstance(tier, Memory):
        slots = cache_slots(row, tier.cache_mb, tier.cache_rows)
        missing = not_in_cache(every, slots * ranks)
    if isinstance(tier, CachedSSD):
        absent = missing
        if tier.host_cache_mb is not None or tier.host_cache_rows is not None:
            more = cache_slots(row + 16, tier.host_cache_mb, tier.host_cache_rows)
            absent = not_in_cache(every, (slots + more) * ranks)
    moved = sum(ids) if dense_updates else unique
    parts = sum(draws), unique, missing, absent, moved
    keys, unique, missing, absent, moved = (value / ranks for value in parts)
    return GroupWork(layout, slots, keys, own, unique, missing, absent, moved)


def message_bytes(codec: str, width: int) -> int:
    """Return bytes of a row between ranks: 4 D, 2 D, or D + 4 by int8.

    Examples
    --------
    >>> message_bytes("none", 16), message_bytes("int8", 16)
    (64, 20)
    """
    number, row = _BYTES_OF[codec]
    return number * width + row


def step_work(
    groups: Sequence[GroupWork],
    dense: DenseWork,
    states: int,
    samples: float,
    half: bool,
    device: str,
    ranks: int,
    codecs: tuple[str, str],
    table_bytes: int,
) -> Work:
    """Return what a step asks of a rank.

    Parameters
    ----------
    groups : sequence of GroupWork
    dense : DenseWork
    states : int
        Numbers of an optimizer's state a parameter.
    samples : float
        Of the rank's batch.
    half : bool
        Whether layers give each other 16 bits.
    device : {"cpu", "cuda"}
    ranks : int
    codecs : (str, str)
        Forward, backward.
    table_bytes : int
        Of a table's number between ranks.

    Notes
    -----
    V are bytes of a vector in its row, D numbers; a are 4 bytes, or 2 with `half`.

    memory  of each width: ids and their numbers 24 K; rows read and vectors written (V + 4 D) U,
            taken for each sample a D K, gradients of these a D K, summed 4 D U; rows updated 2 R a
            moved one and 4 D its gradient; missing rows 2 (R + 16) in and 2 (R + 16) out
            of layers: an activation is written, read by the next layer and for its gradient; so is
            its gradient: 6 a a number. A parameter is read forward and backward, its gradient
            written and read, itself and its state read and written: 4 (6 + 2 states)
    lines   of each key one, to tell the unique ones; of these a slot, a key, a row, and a row once
            more for its update: 4 Q
    pcie    (R + 16) a missing row, and as much back, as all rows that leave have changed
    host    2 (R + 16) in and 2 (R + 16) out a missing row, 3 lines
    sent    of N ranks (N - 1) / N of: U keys of 8 bytes and the table's number; as many rows and
            gradients by their codecs; twice the dense gradients, 4 bytes each
    ssd     a read a row that no cache has; as many records written, 2.1 times: files are 1.35 times
            what is needed, so that a file that is emptied is still needed by .52, u of
            1 / 1.35 = (u - 1) / ln u, and 1 / (1 - u) is written

    Examples
    --------
    >>> dense = DenseWork(parameters=10, room=64, buffers=0, flops=60, activations=8)
    >>> step_work([], dense, 1, 100, False, "cpu", 1, ("none", "none"), 1).flops
    6000
    """
    a = 2 if half else 4
    memory = 6 * a * samples * dense.activations + 4 * (6 + 2 * states) * dense.room
    lines = pcie = host_memory = host_lines = ssd_reads = ssd_writes = 0.0
    sent = 2 * 4 * dense.room
    for group in groups:
        width, row = group.layout.width, 4 * group.layout.stride
        vector = 4 * vector_words(width, group.layout.value)
        memory += 24 * group.keys + 2 * a * width * group.keys
        memory += (vector + 8 * width) * group.unique + (2 * row + 4 * width) * group.moved
        lines += group.keys + 4 * group.rows
        payload = row + 16
        crossed = 4 * payload * group.missing
        if device == "cpu":
            memory, lines = memory + crossed, lines + 3 * group.missing
        else:
            memory, host_memory = memory + crossed, host_memory + crossed
            host_lines += 3 * group.missing
            pcie += payload * group.missing
        messages = sum(message_bytes(codec, width) for codec in codecs)
        sent += group.unique * (8 + table_bytes + messages)
        ssd_reads += group.absent
        ssd_writes += WRITTEN_AGAIN * record_bytes(group.layout) * group.absent
    sent *= (ranks - 1) / ranks
    return Work(
        samples * dense.flops, memory, lines, pcie, host_memory, host_lines, sent, ssd_reads,
        ssd_writes,
    )  # fmt: skip


def batch_bytes(
    groups: Sequence[GroupWork], dense: DenseWork, samples: float, half: bool, device: str
) -> float:
    """Return bytes that a step's own arrays take on a rank's device, about.

    Activations and their gradients, 2 a each; of each width ids and their numbers 24 K, vectors of
    each sample and their gradients 2 a D K (counted among activations), those of unique ids 8 D U.
    With a cache: R + 16 a missing row, three times on its way, and rows that find no slot, see
    `cupyrec.table_sizes.beside_cache`. The CPU's arrays lie in whole pages of 2 MB: 12 MB more.

    Examples
    --------
    >>> dense = DenseWork(parameters=10, room=64, buffers=0, flops=60, activations=8)
    >>> batch_bytes([], dense, 100, half=False, device="cuda")
    6400.0
    """
    a = 2 if half else 4
    total = 2.0 * a * samples * dense.activations + (_PAGES if device == "cpu" else 0)
    for group in groups:
        row = 4 * group.layout.stride
        total += 24 * group.keys + 8 * group.layout.width * group.unique
        if group.slots < math.inf:
            total += 3 * (row + 16) * group.missing + beside_cache(
                int(group.slots), row, group.rows, device
            )
    return total


def exchange_bytes(
    groups: Sequence[GroupWork], dense: DenseWork, ranks: int, codecs: tuple[str, str]
) -> float:
    """Return bytes of what a rank sends and receives, about: none alone.

    Keys of 12 bytes, sent, received, and room for as many; rows and gradients by their codecs,
    sent and received; the dense gradients' slices of all ranks.

    Examples
    --------
    >>> exchange_bytes([], DenseWork(10, 64, 0, 60, 8), 1, ("none", "none"))
    0
    """
    if ranks == 1:
        return 0
    total = 4.0 * dense.room
    for group in groups:
        messages = sum(message_bytes(codec, group.layout.width) for codec in codecs)
        total += group.unique * (48 + 2 * messages)
    return total

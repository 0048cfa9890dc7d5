"""Bytes of a rank's tables of one width, by what they are for: what stores count, as formulas.

n are rows, R the bytes of one: vector and state in words of 4 bytes, up to a multiple of 4 words.
"""

from __future__ import annotations

import math

from cupyrec.embedding.row_layout import RowLayout
from cupyrec.embedding.row_log_compaction import BEGIN, BOUND
from cupyrec.embedding.row_log_files import PARTS
from cupyrec.embedding.tier import CachedHost, CachedSSD, Memory, Tier
from cupyrec.ops.cache_sets import WAYS

__all__ = [
    "TableBytes",
    "beside_cache",
    "cache_slots",
    "checkpoint_row",
    "record_bytes",
    "table_bytes",
]

TableBytes = dict[str, dict[str, float]]  # place -> what for -> bytes

KEY = 12  # id and table, in chunks of 2^14
_KEY_CHUNK = KEY << 14
_SPARE_KEYS = 1 + 1 / 128  # chunks come a 64th of them at a time
TAIL = 16  # id, table and count behind a payload
RECORD = 16  # checksum, number and sequence before it
ADDRESS = 5  # where a row's record lies
_ADDRESS_CHUNK = ADDRESS << 20
CACHED = 34  # a cached row's record of 32 bytes and its tag of 2
_FILES = 1 << 14  # files that a log may have; 36 bytes of each are in memory
_BUFFERS = 8 << 20  # of a log's two streams
_READERS = 16 * 260 * 1024 + (4 << 20)  # of its threads that read, and of compaction
_FILE_LEAST, _FILE_MOST = 1 << 20, 1 << 30
_CHUNK = 16 << 20  # of rows on a device, and of a cache


def _slots_a_key(load: float, growth: float) -> float:
    """Mean slots a key, of a table that fills to `load` and then grows `growth` times.

    Its size over its keys is 1 / load after as many steps of equal ratio: the mean over one is
    (growth - 1) / ln(growth) / load.
    """
    return (growth - 1) / math.log(growth) / load


_CPU_KEY = 8 * _slots_a_key(0.8, 1.2)  # 10.97: `cupyrec.ops.hash_segments`
_DEVICE_KEY = 8 * _slots_a_key(0.8, 0.8 / 0.71)  # 10.61: `cupyrec.ops.hash_table`
_PLACE = 8 * _slots_a_key(0.88, 1.1)  # 9.54: `cupyrec.ops.place_segments`


def checkpoint_row(layout: RowLayout) -> int:
    """Return bytes of a row in a checkpoint: table 4, id 8, vector 4 D, state 4 a word.

    Examples
    --------
    >>> from cupyrec.embedding import StatePart
    >>> checkpoint_row(RowLayout(16, 0, (StatePart("sum", 16, 0.0),)))
    140
    """
    return 12 + 4 * layout.width + 4 * sum(part.columns for part in layout.state)


def record_bytes(layout: RowLayout) -> int:
    """Return bytes of a row's record in a file: R + 32.

    Examples
    --------
    >>> record_bytes(RowLayout(16, 0, ()))
    96
    """
    return 4 * layout.stride + TAIL + RECORD


def cache_slots(row: int, mb: float | None, rows: int | None = None) -> int:
    """Return how many rows a cache has: whole sets of 32.

    Parameters
    ----------
    row : int
        Bytes that count against `mb`, 10^6 bytes.
    mb : float, optional
    rows : int, optional
        In place of `mb`.

    Examples
    --------
    >>> cache_slots(64, 1.0), cache_slots(64, None, 1)
    (15648, 32)
    """
    rows = int(mb * 1e6 / row) if rows is None else rows
    return -(-max(1, rows) // WAYS) * WAYS


def _chunk_rows(slots: int, row: int) -> int:
    """Rows of a chunk of a cache: of 16 MB, or of one that holds all."""
    return 1 << min(max(0, (_CHUNK // row).bit_length() - 1), (slots - 1).bit_length())


def _cache_bytes(slots: int, row: int) -> dict[str, float]:
    """Its rows in chunks, and its directory."""
    chunk = _chunk_rows(slots, row)
    return {"cache": -(-slots // chunk) * chunk * row, "cache directory": slots * CACHED}


def beside_cache(slots: int, row: int, in_flight: float, device: str) -> float:
    """Return bytes of a step's rows that find no slot, in chunks, with their keys: 39 a row.

    The rows in flight of a set are as good as drawn, 32 in_flight / slots on average, so by
    Poisson's law; those beyond 32 lie beside the cache.

    Parameters
    ----------
    slots : int
        Of the cache.
    row : int
        R.
    in_flight : float
        Different rows of a step.
    device : str
        On ``cpu`` chunks are addresses only, until they are written to.

    Examples
    --------
    >>> large = beside_cache(3200, 64, 6000.0, "cuda")
    >>> beside_cache(3200, 64, 100.0, "cuda"), large / (4096 * 64) > 1
    (0.0, True)
    """
    mean = WAYS * in_flight / slots
    chance, here = math.exp(-mean), 0.0
    for count in range(WAYS):  # E[min(X, 32)] = 32 - sum over x < 32 of (32 - x) P(x)
        here += (WAYS - count) * chance
        chance *= mean / (count + 1)
    rows = max(0.0, in_flight - slots / WAYS * (WAYS - here))
    chunk = 1 if device == "cpu" else _chunk_rows(slots, row)
    return math.ceil(round(rows) / chunk) * chunk * row + 39 * rows


def _index_bytes(n: float) -> float:
    """9.54 n, and of the n^2 / 2^43 keys that meet at one place their own table and row number."""
    segments = 128 if n < 1 << 29 else 16384
    return _PLACE * n + 24 * segments + n * n / 2**43 * (KEY + _CPU_KEY + 8)


def table_bytes(layout: RowLayout, tier: Tier, rows: float, device: str) -> TableBytes:
    """Return what tables of one width take on a rank.

    Parameters
    ----------
    layout : RowLayout
    tier : Memory, CachedHost or CachedSSD
    rows : float
        n.
    device : {"cpu", "cuda"}

    Returns
    -------
    dict of str to dict of str to float
        Of ``device``, ``host`` and ``files``: bytes by what they are for. On the CPU, ``device`` is
        part of the host's memory. ``files`` are what they come to; ``room for files`` comes on top,
        which compaction lets them take.

    Notes
    -----
    Memory      device: R n; keys: 12 n in chunks, and 10.97 n of slots (10.61 n on a GPU)
    CachedHost  device: the cache, (R + 34) slots; host: (R + 16) n, the index 9.54 n
    CachedSSD   device: the cache; host: the index, 5 n of addresses in chunks of 2^20, 9 MB of
                buffers and files' counts, 8 MB of readers, the second cache; files: 1.35 (R + 32) n
                and three files, of (R + 32) n / 128 each, as compaction begins there; at most 1.46
                times and four files

    Examples
    --------
    >>> from cupyrec.embedding import Memory
    >>> told = table_bytes(RowLayout(16, 0, ()), Memory(), 1e6, "cpu")["device"]
    >>> {name: round(value / 1e6, 2) for name, value in told.items()}
    {'rows': 64.0, 'keys': 23.16}
    """
    row, cpu = 4 * layout.stride, device == "cpu"
    if isinstance(tier, Memory):
        chunk = min(_up_to_power(rows), _up_to_power(_CHUNK // row + 1) // 2) * row
        reserved = row * rows if cpu else math.ceil(row * rows / chunk) * chunk
        chunks = max(math.ceil(KEY * rows / _KEY_CHUNK), KEY * rows * _SPARE_KEYS / _KEY_CHUNK)
        keys = chunks * _KEY_CHUNK + (_CPU_KEY if cpu else _DEVICE_KEY) * rows
        return {"device": {"rows": reserved, "keys": keys}}
    slots = cache_slots(row, tier.cache_mb, tier.cache_rows)
    told: TableBytes = {"device": _cache_bytes(slots, row), "host": {"index": _index_bytes(rows)}}
    if isinstance(tier, CachedHost):
        told["host"]["rows"] = (row + TAIL) * rows
        return told
    return told | _ssd_bytes(layout, tier, rows, told["host"])


def _ssd_bytes(
    layout: RowLayout, tier: CachedSSD, rows: float, host: dict[str, float]
) -> TableBytes:
    needed = record_bytes(layout) * rows
    file = min(max(needed / PARTS, _FILE_LEAST), _FILE_MOST)
    usual, most = (share * needed + files * file for share, files in (BEGIN, BOUND))
    host["addresses"] = math.ceil(ADDRESS * rows / _ADDRESS_CHUNK) * _ADDRESS_CHUNK
    host["buffers"] = _BUFFERS + 36 * _FILES
    host["readers"] = _READERS
    if tier.host_cache_mb is not None or tier.host_cache_rows is not None:
        payload = 4 * layout.stride + TAIL
        slots = cache_slots(payload, tier.host_cache_mb, tier.host_cache_rows)
        for name, value in _cache_bytes(slots, payload).items():
            host[f"second {name}"] = value
    return {"files": {"files": usual, "room for files": most - usual}, "host": host}


def _up_to_power(n: float) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(0, math.ceil(n) - 1).bit_length()

"""Which rank owns a key, and keys in the order of their owners. U keys, R ranks.

    owner = (upper 32 bits of the key's hash * R) >> 32
    order = the keys' numbers by owner, ascending within an owner
    counts[r] = how many keys rank r owns

The hash is Steele's SplitMix64 finalizer (variant 13 of Stafford's mixers) with a seed. It has
nothing in common with `hash_key`, by whose bits a rank's tables take their slots: else the keys of
a rank would crowd in a part of them.

Keys are sorted by counting, in tiles: count each tile's keys by owner, add up the counts, owner
after owner, then put each key where those of its owner in earlier tiles end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.hash_key import check_keys

__all__ = ["Partition", "owners", "partition", "shards_of"]

_MOST = 1024  # ranks, whose counts a block keeps in shared memory
_KEYS = 1 << 14  # a tile of the CPU loops
_TILE, _WARPS = 1024, 8  # keys and warps of a block, as in kernels/partition.cu
_1, _27, _30, _31, _32 = map(np.uint64, (1, 27, 30, 31, 32))


class Partition(NamedTuple):
    """Result of `partition`.

    Attributes
    ----------
    order : (U,) array of int64
        The keys' numbers by owner, ascending within an owner.
    counts : (R,) array of int64
        How many keys each rank owns.

    Examples
    --------
    See `partition`.
    """

    order: Any
    counts: Any


@cpu.exact_inline
def _owner(table, key, ranks):
    h = np.uint64(key) ^ np.uint64(0x5851F42D4C957F2D)
    h = (h ^ (h >> _30)) * np.uint64(0xBF58476D1CE4E5B9)
    h += (np.uint64(table) + _1) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> _27)) * np.uint64(0x94D049BB133111EB)
    h ^= h >> _31
    return ((h >> _32) * ranks) >> _32


@cpu.exact_loop
def _owners_cpu(tables, ids, ranks, owners):
    for u in range(ids.size):
        owners[u] = _owner(tables[u], ids[u], ranks)


@cpu.exact_loop
def _count_cpu(tables, ids, owners, counts):
    """One tile: the owner of each key, and how many keys each rank owns."""
    _owners_cpu(tables, ids, np.uint64(counts.size), owners)
    counts[:] = 0
    for u in range(owners.size):
        counts[owners[u]] += 1


@cpu.exact_loop
def _place_cpu(owners, first, places, order):
    """One tile, from key `first` on; `places` is where the next key of each rank goes."""
    for u in range(owners.size):
        r = owners[u]
        order[places[r]] = first + u
        places[r] += 1


_owners = Kernel(
    "partition.cu", "key_owners",
    "const uint32_t* tables, const int64_t* ids, int ranks, int32_t* owners, int64_t n",
    lambda U: Geometry(blocks(U, _TILE), 256),
)  # fmt: skip
_count = Kernel(
    "partition.cu", "count_owners",
    "const uint32_t* tables, const int64_t* ids, int ranks, uint16_t* owners, int* counts,"
    " int64_t n",
    lambda U, ranks: Geometry(blocks(U, _TILE), 256, 4 * ranks),
)  # fmt: skip
_place = Kernel(
    "partition.cu", "place_keys",
    "const uint16_t* owners, int ranks, const int64_t* ends, int64_t* order, int64_t* counts,"
    " int64_t n",
    lambda U, ranks: Geometry(blocks(U, _TILE), 256, 4 * _WARPS * ranks),
)  # fmt: skip


def _check(where: str, tables: Any, ids: Any, ranks: int) -> tuple[int, int]:
    """Numbers of keys and ranks."""
    count, ranks = check_keys(where, tables, ids), errors.positive(where, "ranks", ranks)
    if ranks > _MOST:
        raise ValueError(f"{where}: 'ranks' must be at most {_MOST}, got {ranks}.")
    if count >= 2**31:
        raise ValueError(f"{where}: N must be less than 2**31, got {count}.")
    return count, ranks


def owners(tables: Any, ids: Any, ranks: int) -> Any:
    """Return which rank owns each key; it depends on nothing but the key and `ranks`.

    Parameters
    ----------
    tables : (U,) array of uint32
    ids : (U,) array of int64
    ranks : int
        From 1 to 1024.

    Returns
    -------
    (U,) array of int32

    Raises
    ------
    ValueError, TypeError
        Keys of another shape or dtype, on several devices, or 2^31 and more; a number of ranks out
        of range.

    Notes
    -----
    The mixer is that of Steele, Lea and Flood 2014, the way to a range that of Lemire 2019: it is
    even for any number of ranks.

    Examples
    --------
    >>> owners(np.zeros(4, np.uint32), np.array([2, 0, 3, 1]), ranks=2)
    array([1, 0, 1, 0], dtype=int32)
    """
    count, ranks = _check("owners", tables, ids, ranks)
    xp = arrays.namespace("owners", tables, ids)
    tables, ids = xp.ascontiguousarray(tables), xp.ascontiguousarray(ids)
    out = (arrays.empty if xp is np else xp.empty)(count, np.int32)
    if xp is not np:
        _owners(tables, ids, ranks, out, count, U=count)
        return out

    def tile(i: int, j: int) -> None:
        _owners_cpu(tables[i:j], ids[i:j], np.uint64(ranks), out[i:j])

    cpu.parallel(tile, count, _KEYS)
    return out


def shards_of(rank: int, ranks: int, shards: int) -> range:
    """Return in which of so many shards, one of each owner of as many, a rank's keys may be.

    An owner has a range of hashes: these are the shards whose ranges meet the rank's, its own alone
    of as many shards as ranks.

    Examples
    --------
    >>> [shards_of(rank, 4, shards=6) for rank in range(4)]
    [range(0, 2), range(1, 3), range(3, 5), range(4, 6)]
    """
    first, stop = (-(-(r << 32) // ranks) for r in (rank, rank + 1))  # upper 32 bits of hashes
    return range(first * shards >> 32, ((stop - 1) * shards >> 32) + 1)


def partition(tables: Any, ids: Any, ranks: int) -> Partition:
    """Return the keys' numbers in the order of their owners, and how many keys each rank owns.

    Parameters
    ----------
    tables : (U,) array of uint32
    ids : (U,) array of int64
    ranks : int
        From 1 to 1024.

    Returns
    -------
    Partition
        Of arrays on the keys' device; nothing waits for it.

    Raises
    ------
    ValueError, TypeError
        As `owners`.

    Examples
    --------
    >>> partition(np.zeros(4, np.uint32), np.array([2, 0, 3, 1]), ranks=2)
    Partition(order=array([1, 3, 0, 2]), counts=array([2, 2]))
    """
    count, ranks = _check("partition", tables, ids, ranks)
    xp = arrays.namespace("partition", tables, ids)
    tables, ids = xp.ascontiguousarray(tables), xp.ascontiguousarray(ids)
    if count == 0:
        return Partition(xp.empty(0, np.int64), xp.zeros(ranks, np.int64))
    if xp is not np:
        return _on_device(xp, tables, ids, count, ranks)
    owned, order = arrays.empty(count, np.int32), arrays.empty(count, np.int64)
    of_tiles = np.empty((blocks(count, _KEYS), ranks), np.int64)

    def count_tile(i: int, j: int) -> None:
        _count_cpu(tables[i:j], ids[i:j], owned[i:j], of_tiles[i // _KEYS])

    cpu.parallel(count_tile, count, _KEYS)
    ends = np.cumsum(of_tiles.T).reshape(ranks, -1).T
    places = np.ascontiguousarray(ends - of_tiles)

    def place_tile(i: int, j: int) -> None:
        _place_cpu(owned[i:j], i, places[i // _KEYS], order)

    cpu.parallel(place_tile, count, _KEYS)
    return Partition(order, of_tiles.sum(axis=0))


def _on_device(xp: Any, tables: Any, ids: Any, count: int, ranks: int) -> Partition:
    order, counts = xp.empty(count, np.int64), xp.empty(ranks, np.int64)
    owned, of_tiles = xp.empty(count, np.uint16), xp.empty(ranks * blocks(count, _TILE), np.int32)
    _count(tables, ids, ranks, owned, of_tiles, count, U=count, ranks=ranks)
    ends = xp.cumsum(of_tiles, dtype=np.int64)
    _place(owned, ranks, ends, order, counts, count, U=count, ranks=ranks)
    return Partition(order, counts)

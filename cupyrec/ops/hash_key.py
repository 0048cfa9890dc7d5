"""Keys (table uint32, id int64) of embedding rows: their check and their hash."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors

__all__ = ["check_keys", "hash_key"]

_1, _33 = np.uint64(1), np.uint64(33)


@cpu.exact_loop
def hash_key(table, key) -> np.uint64:
    """64 bits of (table, id): MurmurHash3's finalizer of the id, the table added after its first
    round: added to the id itself, ids a constant apart in tables side by side would collide."""
    h = np.uint64(key)
    h = (h ^ (h >> _33)) * np.uint64(0xFF51AFD7ED558CCD)
    h += (np.uint64(table) + _1) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> _33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> _33)


def check_keys(where: str, tables: Any, ids: Any) -> int:
    """Return the number of keys after checking that they are (N,) uint32 and (N,) int64.

    Examples
    --------
    >>> check_keys("f", np.zeros(2, np.uint32), np.array([1, -1]))
    2
    """
    arrays.namespace(where, tables, ids)
    errors.dtype(where, "tables", tables, np.uint32)
    errors.dtype(where, "ids", ids, np.int64)
    return errors.axes(where, tables=(tables, "N"), ids=(ids, "N"))[0]

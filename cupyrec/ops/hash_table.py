"""Hash table from keys (table uint32, id int64) to row numbers. Every id is legal.

Open addressing with linear probing over a power of two of 64-bit slots. A slot is 0 where empty,
else (16 bits of the key's hash) << 48 | (row + 1); the key itself stands in `tables[row]`,
`ids[row]`, read only where the 16 bits agree. No value of a key is reserved. The n-th key inserted
has row n, so rows follow the order of insertion whatever the order of slots.
"""

from __future__ import annotations

import numpy as np

from cupyrec import arrays, cpu, errors

__all__ = ["HashTable", "check_keys", "hash_key"]

_KEYS = 4096  # keys a block of a look-up
_TAG, _ROW = np.uint64(0xFFFF << 48), np.uint64((1 << 48) - 1)
_1, _33 = np.uint64(1), np.uint64(33)


@cpu.exact_loop
def hash_key(table, key) -> np.uint64:
    """64 bits of (table, id): the finalizer of MurmurHash3 over id + table * odd constant."""
    h = np.uint64(key) + (np.uint64(table) + _1) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> _33)) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> _33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> _33)


@cpu.exact_loop
def _find_cpu(slots, row_tables, row_ids, tables, ids, rows):
    mask = np.uint64(slots.size - 1)
    hashes, firsts = np.empty(ids.size, np.uint64), np.empty(ids.size, np.uint64)
    for i in range(ids.size):  # nothing waits for a slot here, so that cache misses overlap
        hashes[i] = hash_key(tables[i], ids[i])
        firsts[i] = slots[hashes[i] & mask]
    for i in range(ids.size):
        h, slot = hashes[i], firsts[i]
        at = h & mask
        rows[i] = -1
        while slot != 0:
            if (slot ^ h) & _TAG == 0:
                row = np.int64((slot & _ROW) - _1)
                if row_ids[row] == ids[i] and row_tables[row] == tables[i]:
                    rows[i] = row
                    break
            at = (at + _1) & mask
            slot = slots[at]


@cpu.exact_loop
def _insert_cpu(slots, tables, ids, first, stop):
    """Give rows first .. stop - 1, whose keys are new, their slots."""
    mask = np.uint64(slots.size - 1)
    for row in range(first, stop):
        h = hash_key(tables[row], ids[row])
        at = h & mask
        while slots[at] != 0:
            at = (at + _1) & mask
        slots[at] = (h & _TAG) | np.uint64(row + 1)


def check_keys(where: str, tables: np.ndarray, ids: np.ndarray) -> int:
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


class HashTable:
    """Keys to row numbers 0, 1, 2, … in the order in which they are inserted.

    Attributes
    ----------
    tables : (len,) array of uint32
    ids : (len,) array of int64
        The keys by row number.

    Examples
    --------
    >>> index = HashTable()
    >>> index.insert(np.array([0, 0], np.uint32), np.array([-1, 5]))
    >>> index.find(np.array([0, 1, 0], np.uint32), np.array([5, 5, -1]))
    array([ 1, -1,  0])
    """

    def __init__(self) -> None:
        self._slots = np.zeros(1024, np.uint64)
        self._tables = np.empty(512, np.uint32)
        self._ids = np.empty(512, np.int64)
        self._len = 0

    tables = property(lambda self: self._tables[: self._len])
    ids = property(lambda self: self._ids[: self._len])

    def __len__(self) -> int:
        return self._len

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + self._tables.nbytes + self._ids.nbytes

    def find(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the row of each key, -1 where there is none.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64

        Returns
        -------
        (N,) array of int64

        Raises
        ------
        ValueError, TypeError
            Keys of another shape or dtype.

        Examples
        --------
        See the class.
        """
        n = check_keys("HashTable.find", tables, ids)
        rows = np.empty(n, np.int64)

        def block(i: int, j: int) -> None:
            _find_cpu(self._slots, self._tables, self._ids, tables[i:j], ids[i:j], rows[i:j])

        cpu.parallel(block, n, _KEYS)
        return rows

    def insert(self, tables: np.ndarray, ids: np.ndarray) -> None:
        """Add keys that are not there yet, each once; they get the next rows in order.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64

        Raises
        ------
        ValueError, TypeError
            Keys of another shape or dtype.

        Examples
        --------
        See the class.
        """
        first = self._len
        stop = first + check_keys("HashTable.insert", tables, ids)
        if stop > self._ids.size:
            capacity = max(stop, 2 * self._ids.size)
            self._tables = np.concatenate(
                [self._tables[:first], np.empty(capacity - first, np.uint32)]
            )
            self._ids = np.concatenate([self._ids[:first], np.empty(capacity - first, np.int64)])
        self._tables[first:stop], self._ids[first:stop] = tables, ids
        self._len = stop
        if stop > 0.6 * self._slots.size:
            size = 1 << int(stop / 0.3).bit_length()  # load between .15 and .3 after growth
            self._slots = np.zeros(size, np.uint64)
            first = 0
        _insert_cpu(self._slots, self._tables, self._ids, first, stop)

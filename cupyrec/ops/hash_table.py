"""Hash table from keys (table uint32, id int64) to row numbers. Every id is legal.

Open addressing with linear probing over a power of two of 64-bit slots. A slot is 0 where empty,
else (16 bits of the key's hash) << 48 | (row + 1); the key itself stands in `keys[row]` as
(id, table), read only where the 16 bits agree. No value of a key is reserved. The n-th key inserted
has row n, so rows follow the order of insertion whatever the order of slots.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks

__all__ = ["HashTable", "check_keys", "hash_key"]

_KEYS = 4096  # keys a block of a look-up on the CPU
_BLOCK = 256  # threads
_TAG, _ROW = np.uint64(0xFFFF << 48), np.uint64((1 << 48) - 1)
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


@cpu.exact_loop
def _find_cpu(slots, keys, tables, ids, rows):
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
                if keys[row, 0] == ids[i] and keys[row, 1] == np.int64(tables[i]):
                    rows[i] = row
                    break
            at = (at + _1) & mask
            slot = slots[at]


@cpu.exact_loop
def _insert_cpu(slots, keys, first, stop):
    """Give rows first .. stop - 1, whose keys are new, their slots."""
    mask = np.uint64(slots.size - 1)
    for row in range(first, stop):
        h = hash_key(keys[row, 1], keys[row, 0])
        at = h & mask
        while slots[at] != 0:
            at = (at + _1) & mask
        slots[at] = (h & _TAG) | np.uint64(row + 1)


def _per_key(n: int) -> Geometry:
    return Geometry(blocks(n, _BLOCK), _BLOCK)


_find = Kernel(
    "hash_table.cu", "hash_find",
    "const uint64_t* slots, uint64_t mask, const int64_t* keys, const uint32_t* tables,"
    " const int64_t* ids, int64_t* rows, int64_t n",
    _per_key,
)  # fmt: skip
_find_or_insert = Kernel(
    "hash_table.cu", "hash_find_or_insert",
    "uint64_t* slots, uint64_t mask, int64_t* keys, const uint32_t* tables, const int64_t* ids,"
    " int64_t* rows, int64_t n, int64_t first, uint64_t* status, int64_t* total",
    _per_key,
)  # fmt: skip
_insert = Kernel(
    "hash_table.cu", "hash_insert",
    "uint64_t* slots, uint64_t mask, const int64_t* keys, int64_t first, int64_t stop",
    _per_key,
)  # fmt: skip


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


class HashTable:
    """Keys to row numbers 0, 1, 2, … in the order in which they are inserted.

    Parameters
    ----------
    xp : module
        Array module of the device on which the table lies, `numpy` by default.

    Attributes
    ----------
    tables : (len,) array of uint32
    ids : (len,) array of int64
        The keys by row number; views, not contiguous.

    Examples
    --------
    >>> index = HashTable()
    >>> index.insert(np.array([0, 0], np.uint32), np.array([-1, 5]))
    >>> index.find(np.array([0, 1, 0], np.uint32), np.array([5, 5, -1]))
    array([ 1, -1,  0])
    """

    def __init__(self, xp: ModuleType = np) -> None:
        self._slots = xp.zeros(1024, np.uint64)
        self._keys = xp.empty((512, 2), np.int64)  # id, table
        self._len = 0

    xp = property(lambda self: arrays.namespace("HashTable", self._slots))
    tables = property(lambda self: self._keys.view(np.uint32)[: self._len, 2])
    ids = property(lambda self: self._keys[: self._len, 0])

    def __len__(self) -> int:
        return self._len

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes + self._keys.nbytes

    def _checked(self, where: str, tables: Any, ids: Any) -> tuple[int, Any, Any]:
        """Number of keys, and they as kernels take them."""
        n = check_keys(where, tables, ids)
        xp = arrays.namespace(where, tables, self._slots)
        if xp is not np:
            tables, ids = xp.ascontiguousarray(tables), xp.ascontiguousarray(ids)
        return n, tables, ids

    def find(self, tables: Any, ids: Any) -> Any:
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
            Keys of another shape, dtype or device.

        Examples
        --------
        See the class.
        """
        n, tables, ids = self._checked("HashTable.find", tables, ids)
        rows = self.xp.empty(n, np.int64)

        def block(i: int, j: int) -> None:
            _find_cpu(self._slots, self._keys, tables[i:j], ids[i:j], rows[i:j])

        if self.xp is np:
            cpu.parallel(block, n, _KEYS)
        else:
            _find(self._slots, self._slots.size - 1, self._keys, tables, ids, rows, n, n=n)
        return rows

    def find_or_insert(self, tables: Any, ids: Any) -> Any:
        """Return the row of each key; those not there yet get the next rows in order.

        On a device it waits once, for the number of new keys.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
            No key twice.

        Returns
        -------
        (N,) array of int64

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device; 2^31 and more on one that is not the CPU.

        Examples
        --------
        >>> index = HashTable()
        >>> index.insert(np.zeros(1, np.uint32), np.array([5]))
        >>> index.find_or_insert(np.zeros(3, np.uint32), np.array([-1, 5, 7]))
        array([1, 0, 2])
        """
        n, tables, ids = self._checked("HashTable.find_or_insert", tables, ids)
        xp, first = self.xp, self._len
        if xp is np:
            rows = self.find(tables, ids)
            new = np.flatnonzero(rows < 0)
            rows[new] = np.arange(first, first + new.size)
            self.insert(tables[new], ids[new])
            return rows
        if n >= 2**31:
            raise ValueError(f"HashTable.find_or_insert: N must be less than 2**31, got {n}.")
        self._reserve(first + n, load=0.8)  # most are known, as a rule: no need to grow for them
        rows = xp.empty(n, np.int64)
        if n:
            status, total = xp.zeros(blocks(n, _BLOCK) + 1, np.uint64), xp.empty(1, np.int64)
            _find_or_insert(
                self._slots, self._slots.size - 1, self._keys, tables, ids, rows, n, first,
                status, total, n=n,
            )  # fmt: skip
            self._len += int(total.item())
            self._reserve(self._len)
        return rows

    def insert(self, tables: Any, ids: Any) -> None:
        """Add keys that are not there yet, each once; they get the next rows in order.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device.

        Examples
        --------
        See the class.
        """
        n, tables, ids = self._checked("HashTable.insert", tables, ids)
        first, stop = self._len, self._len + n
        self._reserve(stop)
        self._keys[first:stop, 0] = ids
        self._keys[first:stop, 1] = tables
        self._len = stop
        self._take_slots(first, stop)

    def truncate(self, length: int) -> None:
        """Forget the keys from row `length` on.

        Examples
        --------
        >>> index = HashTable()
        >>> index.insert(np.zeros(2, np.uint32), np.array([7, 8]))
        >>> index.truncate(1)
        >>> index.find(np.zeros(2, np.uint32), np.array([7, 8]))
        array([ 0, -1])
        """
        self._len = min(length, self._len)
        self._slots.fill(0)
        self._take_slots(0, self._len)

    def _reserve(self, length: int, load: float = 0.6) -> None:
        """Make room for `length` keys; no more than `load` of the slots may be taken by them.

        On a device, what is replaced lives on until the launches that use it are over, since its
        memory goes back in the order of the stream.
        """
        if length > len(self._keys):
            keys = self.xp.empty((max(length, 2 * len(self._keys)), 2), np.int64)
            keys[: self._len] = self._keys[: self._len]
            self._keys = keys
        if length > load * self._slots.size:
            size = 1 << int(length / 0.3).bit_length()  # load between .15 and .3 after growth
            self._slots = self.xp.zeros(size, np.uint64)
            self._take_slots(0, self._len)

    def _take_slots(self, first: int, stop: int) -> None:
        if self.xp is np:
            _insert_cpu(self._slots, self._keys, first, stop)
        else:
            mask = self._slots.size - 1
            _insert(self._slots, mask, self._keys, first, stop, n=stop - first)

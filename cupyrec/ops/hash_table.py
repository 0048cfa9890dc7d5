"""Hash table from keys (table uint32, id int64) to row numbers. Every id is legal.

The n-th key inserted has row n, so rows follow the order of insertion whatever the order of slots.
Keys stand by row number, 12 bytes each, in chunks that never move. Slots are the CPU's, see
`cupyrec.ops.hash_segments`, or a device's: open addressing with linear probing over pairs of 64-bit
slots, of any number. A slot is 0 where empty, else (row + 1) << 16 | (the low 16 bits of the key's
hash), and the key is read only where these bits agree. No value of a key is reserved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.huge_pages import HugePages
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.hash_key import check_keys
from cupyrec.ops.hash_segments import CHUNK, Segments
from cupyrec.scratch import stamped

__all__ = ["HashTable"]

_BLOCK = 256  # threads
_MANY = 256  # chunks; further ones of the CPU lie in huge pages, whose spare is little beside them
_LEAST = 256  # slots
_LOAD, _LOAD_AFTER = 0.8, 0.71  # above the one slots grow, to the other


def _per_key(n: int) -> Geometry:
    return Geometry(blocks(n, _BLOCK), _BLOCK)


_find = Kernel(
    "hash_table.cu", "hash_find",
    "const uint64_t* slots, uint64_t size, const uint64_t* chunks, const uint32_t* tables,"
    " const int64_t* ids, int64_t* rows, int64_t n",
    _per_key,
)  # fmt: skip
_find_or_insert = Kernel(
    "hash_table.cu", "hash_find_or_insert",
    "uint64_t* slots, uint64_t size, const uint64_t* chunks, const uint32_t* tables,"
    " const int64_t* ids, int64_t* rows, int64_t n, int64_t first, uint64_t* status,"
    " uint64_t stamp, int64_t* total",
    _per_key,
)  # fmt: skip
_insert = Kernel(
    "hash_table.cu", "hash_insert",
    "uint64_t* slots, uint64_t size, const uint64_t* chunks, int64_t first, int64_t stop",
    _per_key,
)  # fmt: skip
_move = Kernel(
    "hash_table.cu", "hash_move",
    "const uint64_t* chunks, const int64_t* moved_from, const int64_t* moved_to, int64_t n",
    _per_key,
)  # fmt: skip


class _DeviceSlots:
    """Slots in a device's memory; a rebuild takes it milliseconds.

    What is replaced lives on until the launches that use it are over, since its memory goes back in
    the order of the stream.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._slots = xp.zeros(_LEAST, np.uint64)
        self._taken = 0

    xp = property(lambda self: arrays.namespace("HashTable", self._slots))
    size = property(lambda self: self._slots.size)
    nbytes = property(lambda self: 8 * self.size)

    def find(self, chunks: Any, tables: Any, ids: Any, rows: Any) -> None:
        _find(self._slots, self.size, chunks, tables, ids, rows, ids.size, n=ids.size)

    def insert(self, chunks: Any, first: int, stop: int) -> None:
        self.reserve(chunks, stop)
        _insert(self._slots, self.size, chunks, first, stop, n=stop - first)
        self._taken = stop

    def find_or_insert(self, chunks: Any, tables: Any, ids: Any, rows: Any) -> int:
        """Write the row of each key, among them new ones; return how many of these there are."""
        xp, n = self.xp, ids.size
        # Most are known, as a rule: no need to grow much for them.
        self.reserve(chunks, self._taken + n, load=0.95, after=0.9)
        total, status = xp.empty(1, np.int64), stamped(xp, blocks(n, _BLOCK) + 1)
        _find_or_insert(
            self._slots, self.size, chunks, tables, ids, rows, n, self._taken, *status, total, n=n
        )
        new = int(total.item())
        self._taken += new
        self.reserve(chunks, self._taken)
        return new

    def forget(self, chunks: Any, removed: Any, moved_from: Any, moved_to: Any) -> None:
        _move(chunks, moved_from, moved_to, moved_from.size, n=moved_from.size)
        self._taken -= removed.size
        self.rebuild(chunks, min(self.size, _enough(self._taken, _LOAD_AFTER / 4)))

    def reserve(
        self, chunks: Any, length: int, load: float = _LOAD, after: float = _LOAD_AFTER
    ) -> None:
        if length > load * self.size:
            self.rebuild(chunks, _enough(length, after))

    def rebuild(self, chunks: Any, size: int) -> None:
        """Take another number of slots."""
        xp, before, self._slots = self.xp, self.size, None  # free before the new ones are made
        try:
            self._slots = xp.zeros(size, np.uint64)
        except BaseException:
            self._slots = xp.zeros(before, np.uint64)
            raise
        finally:
            _insert(self._slots, self.size, chunks, 0, self._taken, n=self._taken)


def _enough(length: int, load: float) -> int:
    """Slots, in pairs."""
    return max(_LEAST, 2 * math.ceil(length / load / 2))


class HashTable:
    """Keys to row numbers 0, 1, 2, … in the order in which they are inserted.

    Nothing may be looked up while another thread inserts or deletes.

    Parameters
    ----------
    xp : module
        Array module of the device on which the table lies, `numpy` by default.

    Examples
    --------
    >>> index = HashTable()
    >>> index.insert(np.array([0, 0], np.uint32), np.array([-1, 5]))
    >>> index.find(np.array([0, 1, 0], np.uint32), np.array([5, 5, -1]))
    array([ 1, -1,  0])
    """

    def __init__(self, xp: ModuleType = np) -> None:
        self._slots = Segments() if xp is np else _DeviceSlots(xp)
        self._blocks: list[Any] = []  # keys (rows, 3): low and high word of the id, table
        self._pages = HugePages()  # of blocks beyond many; those before stay, as a move is a pause
        self._chunks = xp.empty(0, np.uint64)
        self._len = 0

    xp = property(lambda self: arrays.namespace("HashTable", self._chunks))

    def __len__(self) -> int:
        return self._len

    @property
    def nbytes(self) -> int:
        """Bytes of slots and keys, and of memory that waits for more of them."""
        return self._slots.nbytes + 12 * CHUNK * self._chunks.size + self._pages.spare

    @property
    def load(self) -> float:
        """Part of the slots that is taken."""
        return self._len / self._slots.size

    def keys(self, first: int, stop: int) -> tuple[Any, Any]:
        """Return copies of the keys of rows first .. stop - 1.

        Returns
        -------
        tables : (stop - first,) array of uint32
        ids : (stop - first,) array of int64

        Raises
        ------
        ValueError
            There are no such rows.

        Examples
        --------
        >>> index = HashTable()
        >>> index.insert(np.zeros(3, np.uint32), np.array([7, -1, 8]))
        >>> index.keys(1, 3)
        (array([0, 0], dtype=uint32), array([-1,  8]))
        """
        if not 0 <= first <= stop <= self._len:
            raise ValueError(
                f"HashTable.keys: 0 <= first <= stop <= {self._len} must hold, got {first}, {stop}."
            )
        xp = self.xp
        words = xp.concatenate([xp.empty((0, 3), np.uint32), *self._parts(first, stop)])
        ids = xp.ascontiguousarray(words[:, :2]).view(np.int64).reshape(-1)
        return xp.ascontiguousarray(words[:, 2]), ids

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
        self._slots.find(self._chunks, tables, ids, rows)
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
        if self.xp is np:
            rows = self.find(tables, ids)
            if rows.min(initial=0) == 0:
                return rows
            new = np.flatnonzero(rows < 0)
            rows[new] = np.arange(self._len, self._len + new.size)
            self.insert(tables[new], ids[new])
            return rows
        if n >= 2**31:
            raise ValueError(f"HashTable.find_or_insert: N must be less than 2**31, got {n}.")
        rows = self.xp.empty(n, np.int64)
        if n:
            self._reserve(self._len + n)
            self._len += self._slots.find_or_insert(self._chunks, tables, ids, rows)
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
        if n == 0:
            return
        first, stop = self._len, self._len + n
        self._reserve(stop)
        words, at = self.xp.ascontiguousarray(ids).view(np.uint32).reshape(n, 2), 0
        for part in self._parts(first, stop):
            for column, values in enumerate((words[:, 0], words[:, 1], tables)):
                part[:, column] = values[at : at + len(part)]
            at += len(part)
        self._slots.insert(self._chunks, first, stop)
        self._len = stop

    def delete(self, tables: Any, ids: Any) -> tuple[Any, Any]:
        """Remove keys, those that are there; the last rows take the numbers that become free.

        On a device it waits for the row numbers, and all slots are made anew.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64

        Returns
        -------
        moved_from, moved_to : (M,) array of int64
            Both ascend. The key of row moved_from[i] has row moved_to[i] now.

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device.

        Examples
        --------
        >>> index = HashTable()
        >>> index.insert(np.zeros(4, np.uint32), np.array([5, 6, 7, 8]))
        >>> index.delete(np.zeros(3, np.uint32), np.array([5, 7, 100]))
        (array([3]), array([0]))
        >>> index.find(np.zeros(4, np.uint32), np.array([5, 6, 7, 8]))
        array([-1,  1, -1,  0])
        """
        _, tables, ids = self._checked("HashTable.delete", tables, ids)
        rows = np.sort(arrays.to_host(self.find(tables, ids)))
        rows = rows[np.diff(rows, prepend=-1) > 0]  # each once, as np.unique would, slowly
        stop = self._len - rows.size
        moved_from = np.setdiff1d(np.arange(stop, self._len), rows, assume_unique=True)
        moved = [arrays.copy_to(self.xp, moves) for moves in (moved_from, rows[rows < stop])]
        self._forget(rows, *moved)
        return moved[0], moved[1]

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
        nothing = self.xp.empty(0, np.int64)
        self._forget(np.arange(length, self._len), nothing, nothing)

    def _forget(self, rows: Any, moved_from: Any, moved_to: Any) -> None:
        if rows.size == 0:
            return
        self._slots.forget(self._chunks, rows, moved_from, moved_to)
        self._len -= rows.size
        while (
            len(self._blocks) > 1 and CHUNK * self._chunks.size - len(self._blocks[-1]) >= self._len
        ):
            self._blocks.pop()
            self._locate()

    def _checked(self, where: str, tables: Any, ids: Any) -> tuple[int, Any, Any]:
        """Number of keys, and they as kernels take them."""
        n = check_keys(where, tables, ids)
        xp = arrays.namespace(where, tables, self._chunks)
        if xp is not np:
            tables, ids = xp.ascontiguousarray(tables), xp.ascontiguousarray(ids)
        return n, tables, ids

    def _reserve(self, length: int) -> None:
        """Make room for `length` keys: by a chunk, or 1 / 64 of what there is."""
        missing = blocks(length, CHUNK) - self._chunks.size
        if missing > 0:
            missing = max(missing, self._chunks.size // 64)
            empty = self.xp.empty
            if self.xp is np:
                many = self._chunks.size + missing >= _MANY
                empty = self._pages.zeros if many else arrays.pages
            self._blocks.append(empty((missing * CHUNK, 3), np.uint32))
            self._locate()

    def _locate(self) -> None:
        """Tell loops and kernels where the chunks lie, in a new array: launches have the old."""
        chunks = [
            arrays.address(block) + 12 * CHUNK * i
            for block in self._blocks
            for i in range(len(block) // CHUNK)
        ]
        self._chunks = arrays.copy_to(self.xp, np.array(chunks, np.uint64))

    def _parts(self, first: int, stop: int) -> Iterator[Any]:
        """Views of rows first .. stop - 1, which several blocks may hold."""
        start = 0
        for block in self._blocks:
            i, j = max(0, first - start), min(len(block), stop - start)
            if i < j:
                yield block[i:j]
            start += len(block)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._locate()  # a copy's keys lie elsewhere

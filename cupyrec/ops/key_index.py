"""Row numbers of keys (table uint32, id int64) that lie elsewhere, on disk: 9 to 10 bytes a key.

No key is in memory. A key's place is the top 42 bits of its hash, see `cupyrec.ops.place_segments`;
whoever asks compares the key of the row that is found, since n keys hold n / 2^42 of the places.
Keys that meet at one place are told apart: all but the first go to a small hash table with their
ids, which is asked as well.

Of 64 bits of a slot, 128 segments leave 29 for the row. The first row that needs more makes them
16,384, whose slots have 36: in one go, of at most 2^29 keys if rows are numbered without holes.

While an index grows to 100 million keys it takes 9.6 bytes a key on average, and never over 10.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.ops.hash_key import check_keys
from cupyrec.ops.hash_table import HashTable
from cupyrec.ops.place_segments import PlaceSegments

__all__ = ["KeyIndex"]

_ROW_BITS = 36


class KeyIndex:
    """Keys to row numbers, without the keys: who asks compares the key of the row.

    Nothing may be looked up while another thread changes the index.

    Examples
    --------
    >>> index = KeyIndex()
    >>> tables, ids = np.array([0, 0, 1], np.uint32), np.array([-1, 5, 5])
    >>> index.insert(tables, ids, np.array([7, 8, 9]))
    >>> index.replace(tables[:1], ids[:1], np.array([2**36 - 1]))
    >>> index.delete(tables[1:2], ids[1:2])
    >>> index.find(tables, ids), len(index)
    (array([68719476735,          -1,           9]), 2)
    """

    _PLACE_BITS = 42
    _SEGMENT_BITS = (7, _PLACE_BITS + _ROW_BITS - 64)  # of few rows, of all

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._segments) + len(self._met_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of slots, of memory that waits for more, and of keys that met at one place."""
        met = 0 if self._met is None else self._met.nbytes
        return self._segments.nbytes + self._met_rows.nbytes + met

    @property
    def load(self) -> float:
        """Part of the slots that is taken."""
        return len(self._segments) / self._segments.size

    def clear(self) -> None:
        """Forget all keys.

        Examples
        --------
        >>> index = KeyIndex()
        >>> index.insert(np.zeros(1, np.uint32), np.array([5]), np.array([0]))
        >>> index.clear()
        >>> len(index)
        0
        """
        self._segments = self._empty(self._SEGMENT_BITS[0])
        self._met: HashTable | None = None  # keys whose place is taken
        self._met_rows = np.empty(0, np.int64)

    def find(self, tables: Any, ids: Any) -> Any:
        """Return the row of each key that is there.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64

        Returns
        -------
        (N,) array of int64
            For a key that is not there -1, or rarely, about once in 2^42 / len(index), the row of
            another key.

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device.

        Examples
        --------
        See the class.
        """
        self._check("KeyIndex.find", tables, ids)
        rows = np.empty(ids.size, np.int64)
        self._segments.find(tables, ids, rows)
        if self._met:
            met = self._met.find(tables, ids)
            rows[met >= 0] = self._met_rows[met[met >= 0]]
        return rows

    def insert(self, tables: Any, ids: Any, rows: Any) -> None:
        """Add keys that are not there yet, each once.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
        rows : (N,) array of int64
            From 0 to 2^36 - 1; the same may stand twice.

        Raises
        ------
        ValueError, TypeError
            Arrays of another shape, dtype or device; rows out of range.
        MemoryError
            There is no room; the index is as before.

        Examples
        --------
        See the class.
        """
        self._check("KeyIndex.insert", tables, ids, rows)
        self._make_room(rows)
        places = self._segments.places(tables, ids)
        taken = self._segments.put(places, rows)
        if not taken.any():
            return
        try:
            met_rows = np.append(self._met_rows, rows[taken])
            self._met = HashTable() if self._met is None else self._met
            self._met.insert(tables[taken], ids[taken])
        except MemoryError:
            self._segments.remove(places[~taken])
            raise
        self._met_rows = met_rows

    def replace(self, tables: Any, ids: Any, rows: Any) -> None:
        """Give keys that are there other rows.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
        rows : (N,) array of int64
            From 0 to 2^36 - 1.

        Raises
        ------
        ValueError, TypeError
            Arrays of another shape, dtype or device; rows out of range; keys that are not there, as
            far as can be told. The index is as before.

        Examples
        --------
        See the class.
        """
        self._check("KeyIndex.replace", tables, ids, rows)
        self._check_there("KeyIndex.replace", tables, ids)
        self._make_room(rows)
        met = self._find_met(tables, ids)
        self._met_rows[met[met >= 0]] = rows[met >= 0]
        self._segments.replace(self._segments.places(tables, ids)[met < 0], rows[met < 0])

    def delete(self, tables: Any, ids: Any) -> None:
        """Remove keys that are there.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
            No key twice.

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device; keys that are not there, as far as can be told.
            The index is as before.

        Examples
        --------
        See the class.
        """
        self._check("KeyIndex.delete", tables, ids)
        self._check_there("KeyIndex.delete", tables, ids)
        met = self._find_met(tables, ids)
        self._segments.remove(self._segments.places(tables, ids)[met < 0])
        if self._met is not None:
            moved_from, moved_to = self._met.delete(tables, ids)
            self._met_rows[moved_to] = self._met_rows[moved_from]
            self._met_rows = self._met_rows[: len(self._met)].copy()

    def _empty(self, segment_bits: int) -> PlaceSegments:
        return PlaceSegments(
            self._PLACE_BITS, segment_bits, self._PLACE_BITS - max(self._SEGMENT_BITS)
        )

    def _find_met(self, tables: Any, ids: Any) -> Any:
        """Where among the keys that met others each key is, -1 where it is not."""
        return self._met.find(tables, ids) if self._met else np.full(ids.size, -1)

    def _make_room(self, rows: Any) -> None:
        """Take more segments if these have no room for such rows."""
        if rows.max(initial=0) >= self._segments.row_limit:
            segments = self._empty(self._SEGMENT_BITS[1])
            for part in self._segments.contents():
                segments.put(*part)
            self._segments = segments

    def _check(self, where: str, tables: Any, ids: Any, rows: Any = None) -> None:
        check_keys(where, tables, ids)
        arrays.namespace(where, tables, self._met_rows)
        if rows is not None:
            arrays.namespace(where, rows, self._met_rows)
            errors.dtype(where, "rows", rows, np.int64)
            errors.axes(where, ids=(ids, "N"), rows=(rows, "N"))
            if rows.size and not 0 <= rows.min() <= rows.max() < 1 << _ROW_BITS:
                raise ValueError(
                    f"{where}: rows must lie in 0 .. 2**{_ROW_BITS} - 1, "
                    f"got {rows.min()} .. {rows.max()}."
                )

    def _check_there(self, where: str, tables: Any, ids: Any) -> None:
        if missing := int((self.find(tables, ids) < 0).sum()):
            raise ValueError(f"{where}: keys must be there, {missing} of {ids.size} are not.")

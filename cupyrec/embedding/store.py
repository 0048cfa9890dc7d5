"""The interface between embedding tables and the place where their rows lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec.ops.embedding_rows import RowMemory

__all__ = ["LIFE", "Rows", "StatePart", "Store"]


class StatePart(NamedTuple):
    """One part of the optimizer's state beside a vector.

    Attributes
    ----------
    name : str
    columns : int
        Number of float32, or int32.
    initial : float
        Value in the row of an id just seen.
    dtype : type
        numpy.float32 or numpy.int32.

    Examples
    --------
    >>> StatePart("sum", 16, 0.0).name
    'sum'
    """

    name: str
    columns: int
    initial: float
    dtype: type = np.float32


# The step of an id's last look-up, and how many there were: no optimizer's, and the last part.
LIFE = StatePart("life", 2, 0, np.int32)


class Rows(NamedTuple):
    """Rows with their keys, as they are exported (to the host) and imported (from any device).

    Attributes
    ----------
    tables : (N,) array of uint32
    ids : (N,) array of int64
    vectors : (N, D) array of float32
        Whatever the store keeps them in.
    states : dict of str to (N, columns) array
        By name of the state part, of its dtype.

    Examples
    --------
    See `MemoryStore`.
    """

    tables: Any
    ids: Any
    vectors: Any
    states: dict[str, Any]


class Store(ABC):
    """Rows of one group of tables: equal width, equal optimizer.

    Keys are (table uint32, id int64). Within one call each key and each row occurs once. Rows are
    numbered from 0 without holes; a number is valid until the next `delete`. A place is where a row
    lies in memory; it is valid as long as `epoch` is what it was after the call that gave it. Keys,
    places and vectors are arrays of `xp`.

    Attributes
    ----------
    width : int
        D, floats of a vector.
    value : int
        Type of the vectors' values in memory, as `cupyrec.ops.embedding_rows.VALUES` codes it.
    state : tuple of StatePart
        What the optimizer keeps beside each vector.
    xp : module
        Array module of the device that looks up, gathers and updates.
    epoch : int
        Goes up where places may have become other rows'.
    """

    width: int
    value: int
    state: tuple[StatePart, ...]
    xp: ModuleType
    epoch: int = 0
    reads_ahead: bool = False  # whether `prefetch` does something

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that rows and keys take."""

    @property
    @abstractmethod
    def load(self) -> float:
        """Part of the slots that keys take."""

    @abstractmethod
    def find(self, tables: Any, ids: Any, again: bool = False) -> Any:
        """Return the place of each key's row as (N,) int64, -1 where there is none.

        No row, key or state changes. `again` tells that a look-up of this step has found them
        before.
        """

    @abstractmethod
    def find_or_insert(
        self, tables: Any, ids: Any, initial: Callable[[Any, Any], Any], offsets: Any = None
    ) -> Any:
        """Return the place of each key's row; new keys get rows in order, with `initial` vectors.

        Key i was asked for offsets[i + 1] - offsets[i] times, by default once.
        """

    @abstractmethod
    def places(self, first: int, stop: int) -> Any:
        """Return the places of rows number first to stop - 1."""

    @abstractmethod
    def read(self, places: Any, reader: Callable[[RowMemory, Any], Any]) -> Any:
        """Return ``reader(memory, places)``, which changes nothing; places may be negative."""

    @abstractmethod
    def update(self, places: Any, rule: Callable[[RowMemory, Any], None]) -> None:
        """Let ``rule(memory, places)`` change rows where they lie."""

    @abstractmethod
    def delete(self, tables: Any, ids: Any) -> None:
        """Forget keys and their rows; others are passed over. The last rows fill the holes."""

    @abstractmethod
    def keys(self, first: int, stop: int) -> tuple[Any, Any]:
        """Return copies of the tables and ids of rows number first to stop - 1."""

    @abstractmethod
    def table_counts(self, num_tables: int) -> np.ndarray:
        """Return how many rows each table has, (T,) int64."""

    @abstractmethod
    def new_counts(self, num_tables: int) -> np.ndarray:
        """Return how many of them the last `find_or_insert` made, (T,) int64."""

    @abstractmethod
    def set_state(self, state: tuple[StatePart, ...]) -> None:
        """Give every row this state, at its initial values, in place of what it had."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all rows; the state's parts stay."""

    @abstractmethod
    def to(self, xp: ModuleType) -> None:
        """Move all rows with their keys and state to another device; they keep their numbers."""

    @abstractmethod
    def export(self) -> Iterator[Rows]:
        """Yield all rows with their keys, some at a time, in any order; nothing changes meanwhile.

        They are copies in NumPy arrays.
        """

    @abstractmethod
    def export_rows(self, first: int, stop: int) -> Rows:
        """Return rows number first to stop - 1 with their keys, as copies in NumPy arrays."""

    @abstractmethod
    def import_rows(self, rows: Rows) -> None:
        """Append rows whose keys are new; state parts that are missing get their initial value."""

    # What tiers beyond memory need to be told; the others have nothing to do.

    def prefetch(self, tables: Any, ids: Any) -> None:
        """Read rows ahead that the next look-up asks for; insert and evict nothing."""
        return

    def end_step(self) -> None:
        """Tell that an optimizer has stepped: the rows of look-ups before may leave a cache."""
        return

    def save(self) -> None:
        """Make what the store holds last, so that it is found again after a crash."""
        return

    def close(self) -> None:
        """Let files and threads go."""
        return

    def metrics(self) -> dict[str, int]:
        """Return what caches have done so far, by name."""
        return {}

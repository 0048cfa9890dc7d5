"""The interface between embedding tables and the place where their rows lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cupyrec.ops.embedding_rows import RowMemory

__all__ = ["Rows", "StatePart", "Store"]


class StatePart(NamedTuple):
    """One part of the optimizer's state beside a vector.

    Attributes
    ----------
    name : str
    columns : int
        Number of float32.
    initial : float
        Value in the row of an id just seen.

    Examples
    --------
    >>> StatePart("sum", 16, 0.0).name
    'sum'
    """

    name: str
    columns: int
    initial: float


class Rows(NamedTuple):
    """Rows with their keys, as they are exported and imported.

    Attributes
    ----------
    tables : (N,) array of uint32
    ids : (N,) array of int64
    vectors : (N, D) array of float32
    states : dict of str to (N, columns) array of float32
        By name of the state part.

    Examples
    --------
    See `MemoryStore`.
    """

    tables: np.ndarray
    ids: np.ndarray
    vectors: np.ndarray
    states: dict[str, np.ndarray]


class Store(ABC):
    """Rows of one group of tables: equal width, equal optimizer.

    Keys are (table uint32, id int64). Within one call each key and each row occurs once. A row
    number is valid until the next `set_state`.

    Attributes
    ----------
    width : int
        D, floats of a vector.
    state : tuple of StatePart
        What the optimizer keeps beside each vector.
    """

    width: int
    state: tuple[StatePart, ...]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that rows and keys take."""

    @abstractmethod
    def find(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the row of each key as (N,) int64, -1 where there is none; change nothing."""

    @abstractmethod
    def find_or_insert(
        self,
        tables: np.ndarray,
        ids: np.ndarray,
        initial: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Return the row of each key; new keys get rows in order, with vectors of `initial`."""

    @abstractmethod
    def gather(
        self, rows: np.ndarray, inverse: np.ndarray, unseen: np.ndarray, out: np.ndarray
    ) -> None:
        """Write vectors to `out` (N, D): see `cupyrec.ops.embedding_rows.gather_rows`."""

    @abstractmethod
    def update(self, rows: np.ndarray, rule: Callable[[RowMemory, np.ndarray], None]) -> None:
        """Let an optimizer's rule change the rows in place, wherever they are."""

    @abstractmethod
    def set_state(self, state: tuple[StatePart, ...]) -> None:
        """Give every row this state; parts that it has already keep their values."""

    @abstractmethod
    def export_rows(self, first: int, stop: int) -> Rows:
        """Return rows number first to stop - 1 with their keys, as copies."""

    @abstractmethod
    def import_rows(self, rows: Rows) -> None:
        """Append rows whose keys are new; state parts that are missing get their initial value."""

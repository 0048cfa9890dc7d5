"""What a look-up finds."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.unique_keys import UniqueKeys
from cupyrec.parallel import Route

__all__ = ["Asked", "LookUp"]


class Asked(NamedTuple):
    """Keys whose rows are to be found; those of other ranks are on their way to them.

    Attributes
    ----------
    tables : (K,) array of uint32
        Of the K keys that are not padding.
    keys : UniqueKeys
    inverse : (N,) array of int64
    kept : (K,) array of int64, optional
        See `LookUp`.
    route : Future of Route, optional
    """

    tables: Any
    keys: UniqueKeys
    inverse: Any
    kept: Any
    route: Future[Route] | None


class LookUp(NamedTuple):
    """Where the vectors of N keys are: the plan by which they come, and their gradients go back.

    Attributes
    ----------
    keys : UniqueKeys
        Of the K keys that are not padding.
    inverse : (N,) array of int64
        Number of the unique key, -1 for padding.
    rows : (U,) array of int64
        Place of the row of each unique key, or -1 - j for vector j of `unseen`.
    unseen : (M, D) array of float32
    numbering : int
        The group's `numbering` when it was made.
    reached : (AdamHistory or None, int, int)
        The history, and its step, to which rows that catch up had been brought then; the group's
        `updates`.
    kept : (K,) array of int64, optional
        Numbers of the keys that are not padding, if there is any.
    epoch : int
        Of the store, when it was made.
    remote : (Route, LookUp), optional
        Where the unique keys' vectors came from: `unseen` has them all then. The look-up is of the
        keys that came here, in this rank's part of the tables.
    """

    keys: UniqueKeys
    inverse: Any
    rows: Any
    unseen: Any
    numbering: int
    reached: tuple[AdamHistory | None, int, int]
    kept: Any
    epoch: int
    remote: tuple[Route, LookUp] | None = None

    @property
    def positions(self) -> Any:
        """Positions of `keys` among all N, padding included: (K,) int64."""
        positions = self.keys.positions
        return positions if self.kept is None else self.kept[positions]

    def check_numbering(self, now: int) -> None:
        """Raise ValueError if the group's rows have got other numbers.

        Examples
        --------
        See `cupyrec.embedding.Group`.
        """
        if self.numbering != now:
            raise ValueError(
                "MultiTableEmbedding: ids must not be deleted, imported, loaded or moved to "
                "another device between a look-up and its backward pass, got such a look-up."
            )

    def check_reached(self, now: tuple[AdamHistory | None, int, int]) -> None:
        """Raise ValueError if rows may have changed.

        Examples
        --------
        See `cupyrec.embedding.Group`.
        """
        if self.reached != now:
            raise ValueError(
                "MultiTableEmbedding: no optimizer may step or be made between a look-up whose "
                "vectors are read from their rows and its backward pass, got such a look-up."
            )

"""Look-ups in tables whose rows lie on several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import timeline
from cupyrec.embedding.initializers import InitialVectors
from cupyrec.embedding.look_up import Asked, LookUp
from cupyrec.embedding.shard import Shard
from cupyrec.embedding.statistics import Statistics
from cupyrec.ops.unique_keys import unique_keys
from cupyrec.parallel import Exchange, Route, world

__all__ = ["LookUps"]


class LookUps(Shard):
    """This rank's rows, and how keys are looked up in those of all ranks.

    Parameters
    ----------
    initial, dtype
        See `Shard`.
    exchange : Exchange, optional
        With other ranks; by default one without codecs with all that the launcher started.

    Examples
    --------
    >>> from cupyrec.embedding import Uniform
    >>> look_ups = LookUps(InitialVectors(4, Uniform(), seed=1), "float32")
    >>> look_up = look_ups.look_up(np.zeros(2, np.uint32), np.array([5, 5]), insert=True)
    >>> look_ups.vectors(look_up).shape, len(look_ups.store)
    ((2, 4), 1)
    """

    def __init__(
        self, initial: InitialVectors, dtype: str, exchange: Exchange | None = None
    ) -> None:
        super().__init__(initial, dtype)
        self.statistics = Statistics()
        self.exchange = Exchange(world()) if exchange is None else exchange
        # Of the look-up after the next: ids as they were given, and as int64.
        self.following: tuple[Any, Any] | None = None
        self.ahead: tuple[Any, Asked] | None = None  # given ids, and where their keys have gone

    def ask(self, tables: Any, ids: Any, kept: Any = None) -> Asked:
        """Begin a look-up: send keys to the ranks that own them, before their rows may be read.

        Parameters
        ----------
        tables : (N,) array of uint32
        ids : (N,) array of int64
        kept : (K,) array of int64, optional
            Numbers of the keys that count, ascending; the others are padding: they have no row, and
            the vector zero.

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = LookUps(InitialVectors(2, Uniform(), seed=1), "float32")
        >>> group.ask(np.zeros(2, np.uint32), np.array([5, 5])).keys.ids
        array([5])
        """
        if kept is None:
            keys = unique_keys(tables, ids)
            inverse = keys.inverse
        else:
            tables = tables[kept]
            keys = unique_keys(tables, ids[kept])
            inverse = self.xp.full(ids.size, -1, np.int64)
            inverse[kept] = keys.inverse
        route = None if self.exchange.is_local else self.exchange.ask(keys.tables, keys.ids)
        return Asked(tables, keys, inverse, kept, route)

    def asked_ahead(self, ids: Any) -> Asked | None:
        """Return what was asked for these very ids ahead, if it was.

        Examples
        --------
        See `cupyrec.nn.MultiTableEmbedding.prepare`.
        """
        if self.ahead is None or self.ahead[0] is not ids:
            return None
        (_, asked), self.ahead = self.ahead, None
        return asked

    def read_ahead(self) -> None:
        """Let the store read rows of the look-up that was asked for ahead, if its keys are here.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> LookUps(InitialVectors(2, Uniform(), seed=1), "float32").read_ahead()
        """
        if self.ahead is None or not self.store.reads_ahead:
            return
        keys, route = self.ahead[1].keys, self.ahead[1].route
        if route is not None:
            if not route.done():
                return
            keys = unique_keys(route.result().tables, route.result().ids)
        self.store.prefetch(keys.tables, keys.ids)

    def look_up(self, tables: Any, ids: Any, insert: bool, kept: Any = None) -> LookUp:
        """Find the row of each key.

        Parameters
        ----------
        tables, ids, kept
            See `ask`.
        insert : bool
            Whether unseen ids get a row. If not, nothing changes: they get their initial vectors.

        Raises
        ------
        ValueError, TypeError
            Keys of another shape, dtype or device.

        Notes
        -----
        On a device it waits twice, for the numbers of unique and of unseen ids.

        Examples
        --------
        See the class.
        """
        return self.find(self.ask(tables, ids, kept), insert)

    @timeline.span("look-up")
    def find(self, asked: Asked, insert: bool) -> LookUp:
        """End a look-up: find the row of each key, as it is now.

        Examples
        --------
        >>> from cupyrec.embedding import Uniform
        >>> group = LookUps(InitialVectors(2, Uniform(), seed=1), "float32")
        >>> group.find(group.ask(np.zeros(2, np.uint32), np.array([5, 5])), insert=True).rows
        array([0])
        """
        tables, keys, inverse, kept, route = asked
        remote = None
        if route is None:
            rows, unseen = self._find(keys, insert)
        else:
            remote, unseen = self._find_remote(route.result(), insert)
            rows = -1 - self.xp.arange(len(keys.ids))
        if insert:
            self.statistics.looked_up(tables, keys.tables)
        now = self.numbering, self._reached, kept, self.store.epoch
        return LookUp(keys, inverse, rows, unseen, *now, remote)

    def _find_remote(self, route: Route, insert: bool) -> tuple[tuple[Route, LookUp], Any]:
        """The vectors (U, D) of the keys of a route, and where they and their gradients go."""
        asked = unique_keys(route.tables, route.ids)
        found = asked, asked.inverse, *self._find(asked, insert)
        own = LookUp(*found, self.numbering, self._reached, None, self.store.epoch)
        vectors = self.exchange.rows(route, self.unique_vectors(own), asked.inverse, insert)
        return (route, own), vectors

"""What each table of a group holds and how it is used."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.embedding.store import Store

__all__ = ["CacheUse", "Statistics"]


class Statistics:
    """Counts a table, made when they are asked for: a training step only keeps what to count.

    Examples
    --------
    See `cupyrec.nn.MultiTableEmbedding.statistics`.
    """

    def __init__(self) -> None:
        self.forget_look_up()

    def looked_up(self, tables: Any, unique_tables: Any) -> None:
        """Note a training look-up: the table of each key and of each unique key.

        Examples
        --------
        >>> Statistics().looked_up(np.zeros(2, np.uint32), np.zeros(1, np.uint32))
        """
        self._last = tables, unique_tables

    def forget_look_up(self) -> None:
        """Forget what was noted.

        Examples
        --------
        >>> Statistics().forget_look_up()
        """
        nothing = np.empty(0, np.uint32)
        self._last = nothing, nothing

    def report(self, store: Store, num_tables: int) -> dict[str, np.ndarray]:
        """Return arrays with one value a table, of the rows of this rank.

        Returns
        -------
        dict
            ``ids``, ``bytes``, ``load`` and ``inserted``: see `Tables.statistics`; ``keys`` and
            ``unique``, how many the last look-up in training had.

        Raises
        ------
        ValueError
            The store has rows of a table beyond `num_tables`.

        Examples
        --------
        >>> from cupyrec.embedding import MemoryStore
        >>> Statistics().report(MemoryStore(4), 2)["ids"]
        array([0, 0])
        """

        def count(tables: Any) -> np.ndarray:
            return np.bincount(arrays.to_host(tables), minlength=num_tables)

        ids, (tables, unique_tables) = store.table_counts(num_tables), self._last
        return {
            "ids": ids,
            "bytes": np.rint(ids * (store.nbytes / max(len(store), 1))).astype(np.int64),
            "load": np.full(num_tables, store.load),
            "keys": count(tables),
            "unique": count(unique_tables),
            "inserted": store.new_counts(num_tables),
        }


class CacheUse:
    """What the caches of tables have done since they were asked the last time.

    Examples
    --------
    >>> from cupyrec import models
    >>> CacheUse().told(models.DLRM(2, 3))
    {}
    """

    def __init__(self) -> None:
        self._before: Counter = Counter()

    def told(self, model: Any) -> dict[str, Any]:
        """Return ``cache``: the part of unique keys that a model's caches held, rows and bytes.

        They are of all ranks, which call this together.

        Examples
        --------
        See the class.
        """
        own = [group.store.metrics() for _, group in model.named_groups()]
        if not any(own):  # of no rank, as all have the same tiers
            return {}
        total: Counter = Counter()
        for metrics in itertools.chain(*model.ranks.all_gather_json("cache", own)):
            total.update(metrics)
        since = {name: total[name] - self._before[name] for name in total}
        self._before = total
        hits, misses = since.pop("hits"), since.pop("misses")
        return {"cache": {"hit_rate": hits / max(1, hits + misses)} | since}

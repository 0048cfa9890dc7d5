"""How often a batch asks for which ids, where these follow Zipf's law.

The id of rank k = 1 .. n comes with probability p(k) = k^-s / H, H = sum over k of k^-s. Of m draws

    unique(m) = sum over k of 1 - (1 - p(k))^m

are expected to be different. A cache of C rows that holds those that come most often has of them

    found(m, C) = sum over k <= C of 1 - (1 - p(k))^m

so its hit rate, of unique ids, is found / unique. The first 4,096 ranks are added up one by one,
further ones in bins, each 1 % of its rank wide, by integrals: the same for 10^4 ids as for 10^12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Asked", "asked", "not_in_cache"]

_EXACT, _WIDTH = 4096, 1.01


class Asked(NamedTuple):
    """What draws from a table ask for.

    Attributes
    ----------
    counts : (bins,) array of float64
        Ids of each bin, the most frequent first.
    chance : (bins,) array of float64
        That one of them is among the draws.

    Examples
    --------
    See `asked`.
    """

    counts: np.ndarray
    chance: np.ndarray

    @property
    def unique(self) -> float:
        """Different ids that are expected."""
        return float(self.counts @ self.chance)


def asked(ids: float, exponent: float, draws: float) -> Asked:
    """Return what so many draws from a table ask for.

    Parameters
    ----------
    ids : float
        n, at least 1.
    exponent : float
        s; 0 for ids that are all alike.
    draws : float
        m.

    Examples
    --------
    >>> round(asked(10, 0, 3).unique, 6)  # 10 (1 - .9^3)
    2.71
    >>> round(asked(1e12, 1.05, 65536).unique)
    36783
    """
    exact = np.arange(1, min(ids, _EXACT) + 1, dtype=np.float64)
    edges = np.empty(0)
    if ids > _EXACT:
        bins = max(1, int(np.ceil(np.log(ids / _EXACT) / np.log(_WIDTH))))
        edges = np.geomspace(_EXACT + 0.5, ids + 0.5, bins + 1)
    mass = np.concatenate([exact**-exponent, np.diff(_integral(edges, exponent))])
    counts = np.concatenate([np.ones(exact.size), np.diff(edges)])
    p = mass / mass.sum() / counts
    with np.errstate(divide="ignore"):  # of a single id p is 1
        return Asked(counts, -np.expm1(draws * np.log1p(-p)))


def _integral(x: np.ndarray, s: float) -> np.ndarray:
    """Of x^-s, up to a constant."""
    return np.log(x) if s == 1 else x ** (1 - s) / (1 - s)


def not_in_cache(tables: Sequence[Asked], rows: float) -> float:
    """Return how many of the unique ids that are asked for a cache lacks that tables share.

    It holds those that are asked for most, of all tables together: where all have room, exactly 0.

    Parameters
    ----------
    tables : sequence of Asked
    rows : float
        C.

    Examples
    --------
    >>> table = asked(1000, 1.0, 100)
    >>> not_in_cache([table], 1000)
    0.0
    >>> round(not_in_cache([table, table], 200) / 2 / table.unique, 3)  # but for 100 of each
    0.475
    """
    counts = np.concatenate([table.counts for table in tables])
    chance = np.concatenate([table.chance for table in tables])
    order = np.argsort(-chance, kind="stable")
    counts, chance = counts[order], chance[order]
    held = np.clip(rows - (np.cumsum(counts) - counts), 0, counts)
    return float((counts - held) @ chance)

"""Rows in a random order, drawn from a buffer while a dataset is read."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyrec import cpu, errors
from cupyrec.data.batch import Batch
from cupyrec.data.rank_slices import RankSlices
from cupyrec.ragged import Bags

__all__ = ["Shuffled"]


class Shuffled:
    """The rows of any dataset, each exactly once an epoch, in a random order.

    A buffer takes each batch in, and when it is full gives as many rows back, drawn at random: a
    row may come about `buffer` rows before its place, and any number behind it. With a buffer of
    all rows every order is as likely. For one dataset, batch size and number of ranks the order is
    told by seed and epoch.

    Parameters
    ----------
    dataset : dataset
        Whose batches are all of one length but the last.
    buffer : int
        Rows in memory, beside two batches.
    seed : int

    Attributes
    ----------
    num_dense, num_tables, task_names
        Of the dataset, where it has them.
    epoch : int
        0 until `at_epoch` tells another.

    Raises
    ------
    ValueError, TypeError
        `buffer` is not a positive integer, or `seed` not an integer of at least 0.

    Examples
    --------
    >>> from cupyrec.data import Arrays
    >>> data = Shuffled(Arrays(None, np.arange(6)[:, None]), buffer=6, seed=1)
    >>> rows = [batch.ids.ravel().tolist() for batch in data.batches(4)]
    >>> [len(ids) for ids in rows], sorted(sum(rows, []))
    ([4, 2], [0, 1, 2, 3, 4, 5])
    """

    def __init__(self, dataset: Any, buffer: int, seed: int = 0) -> None:
        self.dataset = dataset
        self.buffer = errors.positive("Shuffled", "buffer", buffer)
        self.seed, self.epoch = errors.count("Shuffled", "seed", seed), 0
        for name in ("num_dense", "num_tables", "task_names"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def at_epoch(self, epoch: int) -> Shuffled:
        """Return the dataset in the order of an epoch, from 0.

        Examples
        --------
        >>> from cupyrec.data import Arrays
        >>> Shuffled(Arrays(None, np.arange(6)[:, None]), buffer=6).at_epoch(3).epoch
        3
        """
        other = copy.copy(self)
        other.epoch = epoch
        return other

    def of_rank(self, rank: int, ranks: int) -> Shuffled:
        """Return the dataset for one of several ranks, with its share of the buffer.

        Each rank shuffles its own rows: which of them stand in a batch together depends on the
        number of ranks, but not how many, nor how many each has.

        Raises
        ------
        ValueError, TypeError
            No such rank.

        Examples
        --------
        >>> from cupyrec.data import Arrays
        >>> data = Shuffled(Arrays(None, np.arange(6)[:, None]), buffer=6).of_rank(1, 2)
        >>> [(batch.first, len(batch), batch.total) for batch in data.batches(4)]
        [(2, 2, 4), (1, 1, 2)]
        """
        other = copy.copy(self)
        of_rank = getattr(self.dataset, "of_rank", functools.partial(RankSlices, self.dataset))
        other.dataset = of_rank(rank, ranks)
        other.buffer = -(-self.buffer // ranks)
        return other

    def batches(self, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
        """Iterate once over all rows, in batches of `batch_size`; the last may be smaller.

        Parameters
        ----------
        batch_size : int
        skip : int
            Number of leading batches to pass over; their rows are read.

        Yields
        ------
        Batch
            Arrays of its own.
        """
        size = errors.positive("Shuffled.batches", "batch_size", batch_size)
        skip = errors.count("Shuffled.batches", "skip", skip)
        return self._shuffled(self.dataset.batches(size), size, skip)

    def _shuffled(self, batches: Iterator[Batch], size: int, skip: int) -> Iterator[Batch]:
        # A bit stream and not its Generator, whose draws another NumPy may change.
        stream = np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch]))
        room, places = None, collections.deque()  # of batches not given back yet
        numbers = itertools.count()

        def given_back() -> Iterator[Batch]:
            length, first, total = places.popleft()
            slots = room.draw(stream, length)
            if next(numbers) >= skip:
                yield room.take(slots, first, total)

        for batch in batches:
            if room is None:
                room = _Room(batch)
            room.put(batch)
            places.append((len(batch), batch.first, batch.total))
            while places and room.filled - places[0][0] >= self.buffer:
                yield from given_back()
        while places:
            yield from given_back()


class _Room:
    """Slots for rows, those that are filled and those that are free; more are made as needed.

    `_order` lists the filled slots, of which any may be drawn, and behind them the free ones.
    """

    def __init__(self, like: Batch) -> None:
        self._columns = {
            name: (_BagSlots if isinstance(column, Bags) else _Slots)(column)
            for name in ("dense", "ids", "labels", "weights")
            if (column := getattr(like, name)) is not None
        }
        self._order, self.filled = np.arange(0), 0

    def put(self, batch: Batch) -> None:
        needed, there = self.filled + len(batch), len(self._order)
        if needed > there:  # a buffer may be far larger than the data
            self._order = np.append(self._order, np.arange(there, 2 * needed))
            for column in self._columns.values():
                column.grow(2 * needed)
        slots = self._order[self.filled : needed]
        self.filled = needed
        for name, column in self._columns.items():
            column.put(slots, getattr(batch, name))

    def draw(self, stream: np.random.BitGenerator, count: int) -> np.ndarray:
        """Choose filled slots at random; they are free from now on, and good until `put`."""
        _draw(self._order, self.filled, stream.random_raw(count))
        self.filled -= count
        return self._order[self.filled : self.filled + count]

    def take(self, slots: np.ndarray, first: int, total: int) -> Batch:
        columns = {name: column.take(slots) for name, column in self._columns.items()}
        return Batch(**columns, first=first, total=total)


class _Slots:
    """Rows of one length."""

    def __init__(self, like: np.ndarray) -> None:
        self._rows = np.empty((0, *like.shape[1:]), like.dtype)

    def grow(self, count: int) -> None:
        self._rows = _grown(self._rows, count)

    def put(self, slots: np.ndarray, rows: np.ndarray) -> None:
        self._rows[slots] = rows

    def take(self, slots: np.ndarray) -> np.ndarray:
        return self._rows[slots]


class _BagSlots:
    """Rows of bags: their ids lie in one array, where each row begins in another.

    What was taken leaves a gap; when the array is full, rows move together, into one twice as large
    as they need, so that each id is moved a few times at most.
    """

    def __init__(self, like: Bags) -> None:
        self._ids = np.empty(0, np.int64)
        self._used = 0
        self._starts = np.zeros(0, np.int64)
        self._lengths = np.zeros((0, like.num_fields), np.int64)

    def grow(self, count: int) -> None:
        self._starts, self._lengths = _grown(self._starts, count), _grown(self._lengths, count)

    def put(self, slots: np.ndarray, rows: Bags) -> None:
        self._lengths[slots] = 0  # what they had need not move
        if self._used + len(rows.ids) > len(self._ids):
            every = np.arange(len(self._starts))
            kept, self._starts = self._gathered(every)
            self._ids = np.empty(2 * (len(kept) + len(rows.ids)), np.int64)
            self._ids[: len(kept)], self._used = kept, len(kept)
        self._ids[self._used : self._used + len(rows.ids)] = rows.ids
        self._starts[slots] = self._used + rows.offsets[: -1 : rows.num_fields]
        self._lengths[slots] = np.diff(rows.offsets).reshape(rows.shape)
        self._used += len(rows.ids)

    def take(self, slots: np.ndarray) -> Bags:
        lengths = self._lengths[slots]
        offsets = np.zeros(lengths.size + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Bags(self._gathered(slots)[0], offsets, lengths.shape[1])

    def _gathered(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of rows side by side, and where each begins."""
        lengths = self._lengths[slots].sum(axis=1)
        starts = np.cumsum(lengths) - lengths
        places = np.repeat(self._starts[slots] - starts, lengths)
        return self._ids[places + np.arange(len(places))], starts


def _grown(rows: np.ndarray, count: int) -> np.ndarray:
    out = np.zeros((count, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out


@cpu.exact_loop
def _draw(order, filled, bits):
    """Move randomly chosen ones of the first `filled` entries to their end (Fisher and Yates)."""
    for i in range(len(bits)):
        last = filled - 1 - i
        chance = float(bits[i] >> np.uint64(11)) * 2.0**-53
        chosen = int(chance * (last + 1))
        order[chosen], order[last] = order[last], order[chosen]

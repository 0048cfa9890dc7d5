"""Shuffled rows: each once, in an order that seed and epoch tell."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rebatched import batch_of, columns

from cupyrec.data import Arrays, RankSlices, Shuffled, shuffled
from cupyrec.ragged import Bags

sizes = st.integers(1, 9)


class Log:
    """Rows of which every column tells the number, as bags or not, with labels or without."""

    task_names = ("click",)

    def __init__(self, rows: int, bags: bool = False, known: bool = True) -> None:
        self.rows, self.bags, self.known = rows, bags, known

    def batches(self, size, *, skip=0):
        for first in range(skip * size, self.rows, size):
            rows = range(first, min(first + size, self.rows))
            yield batch_of(rows, self.bags, self.known)


def numbers(batches) -> list[int]:
    return [int(n) for batch in batches for n in batch.dense[:, 0]]


@pytest.mark.parametrize(("bags", "known"), [(False, True), (True, True), (True, False)])
@given(
    st.integers(0, 60), sizes, st.integers(1, 80), st.integers(0, 5), st.integers(0, 3),
    st.integers(1, 5), st.integers(0, 4),
)  # fmt: skip
def test_every_row_comes_once_and_whole(bags, known, rows, size, buffer, seed, epoch, ranks, skip):
    data = Shuffled(Log(rows, bags, known), buffer, seed).at_epoch(epoch)
    seen = []
    for rank in range(ranks):
        own = data.of_rank(rank, ranks)
        got = list(own.batches(size))
        for batch in got:  # the columns are still those of one row
            expected = [batch_of(range(n, n + 1), bags, known) for n in numbers([batch])]
            rows_of = [batch.part(i, i + 1) for i in range(len(batch))]
            assert list(map(columns, rows_of)) == list(map(columns, expected))
        inner = list(RankSlices(Log(rows, bags, known), rank, ranks).batches(size))
        places = [(len(b), b.first, b.total) for b in inner]
        assert [(len(b), b.first, b.total) for b in got] == places
        resumed = list(own.batches(size, skip=skip))
        assert list(map(columns, resumed)) == list(map(columns, got[skip:]))
        assert [b.first for b in resumed] == [b.first for b in got[skip:]]
        assert sorted(numbers(got)) == sorted(numbers(inner))
        seen += numbers(got)
    assert sorted(seen) == list(range(rows))


def test_another_order_each_epoch_and_seed():
    def order(seed: int, epoch: int) -> list[int]:
        return numbers(Shuffled(Log(200), 50, seed).at_epoch(epoch).batches(10))

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert orders == [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(map(tuple, orders))) == 6
    assert order(0, 0) == numbers(Shuffled(Log(200), 50).batches(10))


def test_rows_come_at_most_a_buffer_early():
    got = numbers(Shuffled(Log(1000), 100).batches(10))
    early = [n - place for place, n in enumerate(got)]
    assert 60 < max(early) < 110 + 10
    assert min(early) < -200  # and any number late


def test_with_a_buffer_of_all_rows_every_order_is_as_likely():
    count = np.zeros((4, 4))
    orders = set()
    for seed in range(2000):
        order = numbers(Shuffled(Log(4), 4, seed).batches(2))
        count[range(4), order] += 1
        orders.add(tuple(order))
    assert len(orders) == 24
    # chi square of 9 degrees of freedom: above 33.7 once in 10 000
    assert ((count - 500) ** 2 / 500).sum() < 33.7


def test_bags_take_memory_for_the_rows_that_are_there(monkeypatch):
    rooms = []

    class Noted(shuffled._BagSlots):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            rooms.append(self)

    monkeypatch.setattr(shuffled, "_BagSlots", Noted)
    for _ in Shuffled(Log(5000, bags=True), 100).batches(20):
        assert len(rooms[0]._ids) <= 2 * 3 * (100 + 3 * 20)


@pytest.mark.parametrize("bags", [False, True])
def test_a_buffer_far_larger_than_the_data_takes_no_memory(bags):
    assert sorted(numbers(Shuffled(Log(50, bags), 10**15).batches(7))) == list(range(50))


def test_arguments():
    data = Arrays(None, np.zeros((3, 1), np.int64))
    assert (Shuffled(data, 2).num_tables, Shuffled(Log(1), 2).task_names) == (1, ("click",))
    assert not isinstance(next(Shuffled(data, 2).batches(2)).ids, Bags)
    with pytest.raises(ValueError, match=r"Shuffled: 'buffer' must be at least 1, got 0"):
        Shuffled(data, 0)
    with pytest.raises(ValueError, match=r"Shuffled: 'seed' must be at least 0, got -1"):
        Shuffled(data, 1, -1)
    with pytest.raises(ValueError, match=r"Shuffled.batches: 'batch_size' must be at least 1"):
        Shuffled(data, 1).batches(0)
    with pytest.raises(ValueError, match=r"Shuffled.batches: 'skip' must be at least 0, got -1"):
        Shuffled(data, 1).batches(1, skip=-1)

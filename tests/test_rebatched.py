"""Batches of other lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyrec.data import Batch
from cupyrec.data.rebatched import rebatched
from cupyrec.ragged import Bags


def batch_of(rows: range, bags: bool, known: bool) -> Batch:
    """Rows that all their columns tell the number of."""
    numbers = np.array(rows, np.int64)
    ids = np.stack([numbers, -numbers], axis=1)
    if bags:  # row n has n % 3 ids in its first field, and one in the other
        bag = [[n] * (n % 3 if field == 0 else 1) for n in rows for field in range(2)]
        offsets = np.concatenate([[0], np.cumsum([len(b) for b in bag], dtype=np.int64)])
        ids = Bags(np.array([n for b in bag for n in b], np.int64), offsets.astype(np.int64), 2)
    column = numbers[:, None].astype(np.float32)
    return Batch(column, ids, column % 2 if known else None, weights=column / 2 if known else None)


def columns(batch: Batch) -> list[list]:
    ids = batch.ids
    told = [ids.ids, ids.offsets] if isinstance(ids, Bags) else [ids]
    told += [batch.dense, batch.labels, batch.weights]
    return [None if column is None else column.tolist() for column in told]


@pytest.mark.parametrize(("bags", "known"), [(False, True), (True, True), (True, False)])
@given(st.lists(st.integers(0, 7), max_size=6), st.integers(1, 6))
def test_rows_are_the_same_in_order(bags, known, lengths, size):
    parts, first = [], 0
    for length in lengths:
        parts.append(batch_of(range(first, first + length), bags, known))
        first += length
    got = list(rebatched(parts, size))
    for number, batch in enumerate(got):
        rows = range(number * size, min(first, (number + 1) * size))
        assert columns(batch) == columns(batch_of(rows, bags, known))
        assert (batch.first, batch.total) == (0, len(rows))
    assert sum(map(len, got)) == first

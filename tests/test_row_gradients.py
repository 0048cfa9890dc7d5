import numpy as np
import oracle
from hypothesis import given
from hypothesis import strategies as st

from cupyrec import arrays
from cupyrec.embedding.row_gradients import RowGradients, summed

ROWS = st.lists(st.lists(st.integers(0, 6), unique=True, max_size=5), max_size=4)


def part(xp, rows, seed):
    """Row r has the key (r % 2, -r)."""
    rows = np.array(rows, np.int64)
    values = oracle.integers((len(rows), 3), -9, 9, seed=seed)
    given = rows, values, (rows % 2).astype(np.uint32), -rows
    return RowGradients(*(arrays.copy_to(xp, a) for a in given))


@given(ROWS)
def test_each_row_once_with_the_sum_of_its_gradients(batches):
    parts = [part(np, rows, seed) for seed, rows in enumerate(batches)]
    total = summed(np, 3, parts)
    truth = {}
    for one in parts:
        for row, value in zip(one.rows.tolist(), np.float64(one.values), strict=True):
            truth[row] = truth.get(row, 0) + value
    assert total.rows.tolist() == list(truth)  # in the order in which they came
    assert total.values.shape == (len(truth), 3)
    for row, value in zip(total.rows.tolist(), total.values, strict=True):
        np.testing.assert_array_equal(value, truth[row])
    np.testing.assert_array_equal(total.tables, total.rows % 2)
    np.testing.assert_array_equal(total.ids, -total.rows)


def test_devices_agree(xp):
    batches = [[4, 1, 2], [], [2, 5], [1]]
    here, there = (
        summed(m, 3, [part(m, rows, seed) for seed, rows in enumerate(batches)]) for m in (np, xp)
    )
    for a, b in zip(here, there, strict=True):
        np.testing.assert_array_equal(arrays.to_host(b), a)

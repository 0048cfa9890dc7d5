"""Copies and sums of whole arrays: the same as NumPy's, in memory that no array holds yet."""

import numpy as np
import oracle
import pytest

from cupyrec import bulk

# Some of one thread and some of all.
SHAPES = [(0, 3), (3, 5), (1, 70_000), (500, 130), (70_001, 1), (300, 17, 18)]


def values(shape, seed=0):
    return oracle.normals(shape, seed=seed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpys_results_in_arrays_of_their_own(shape):
    a, b = values(shape), values(shape, seed=1)
    total, turned = bulk.add(a, b), bulk.contiguous(a.T)
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(turned, a.T)
    assert turned.flags.c_contiguous
    assert not np.shares_memory(total, a)
    assert not np.shares_memory(total, b)
    joined = bulk.concatenate([a, b, a], axis=-1)
    np.testing.assert_array_equal(joined, np.concatenate([a, b, a], axis=-1))
    assert joined.dtype == a.dtype


def test_what_is_side_by_side_stays():
    a = values((500, 200))
    assert bulk.contiguous(a) is a


def test_a_broadcast_array_is_added():
    a, one = values((500, 200)), np.broadcast_to(np.float32(1), (500, 200))
    np.testing.assert_array_equal(bulk.add(one, a), 1 + a)


@pytest.mark.parametrize("rows", [3, 500])
def test_parts_that_do_not_agree_are_numpys_to_refuse(rows):
    a, b = np.zeros((rows, 200), np.float32), np.zeros((rows + 1, 200), np.float32)
    with pytest.raises(ValueError, match="must match exactly"):
        bulk.concatenate([a, b], axis=1)


def test_parts_of_two_types_become_the_wider():
    a, b = np.ones((500, 200), np.float32), np.full((500, 200), 2.0)
    joined = bulk.concatenate([a, b], axis=1)
    assert joined.dtype == np.float64
    np.testing.assert_array_equal(joined, np.concatenate([a, b], axis=1))


@pytest.mark.parametrize("shape", [(4, 3, 5), (400, 30, 17)], ids=str)
def test_zeros_but_where_values_are_placed(shape):
    for cut in (slice(-1, None), slice(0, -1), slice(0, 0)):
        key = slice(None), slice(1, None), cut
        expected = np.zeros(shape, np.float32)
        part = values(expected[key].shape)
        expected[key] = part
        np.testing.assert_array_equal(bulk.placed(part, key, shape), expected)


@pytest.mark.parametrize("count", [0, 9, 30_000])
def test_rows_are_scattered(np_or_xp, count):
    rows = np.random.default_rng(1).permutation(count)[: count // 2]
    part, expected = values((len(rows), 17)), np.zeros((count, 17), np.float32)
    expected[rows] = part
    got = bulk.scattered(np_or_xp.asarray(part), np_or_xp.asarray(rows), count)
    np.testing.assert_array_equal(got if np_or_xp is np else got.get(), expected)

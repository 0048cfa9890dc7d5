import math

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hash_table import HIGH, LOW, adversarial_ids, arrays, table_numbers

from cupyrec.ops.initial_vectors import uniform_vectors

seeds = st.integers(0, 2**64 - 1)
IDS = np.array([LOW, -1, 0, 1, 2**32, HIGH])
TABLES = np.array([0, 2**32 - 1, 7, 7, 7, 0], np.uint32)


@pytest.mark.parametrize("width", [1, 3, 4, 10, 130])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.05, 0.05), (-1 / 3, 7.7), (2, 2)])
def test_every_bit_is_what_philox_says(width, seed, low, high):
    got = uniform_vectors(TABLES, IDS, width, seed, low, high)
    assert (got.dtype, got.shape) == (np.float32, (6, width))
    expected = oracle.uniform_vectors(TABLES, IDS, width, seed, low, high)
    assert got.tobytes() == expected.tobytes()


@given(st.lists(st.tuples(table_numbers, adversarial_ids), max_size=4), seeds)
def test_any_key_and_seed(batch, seed):
    tables, ids = arrays(batch)
    got = uniform_vectors(tables, ids, 5, seed, -0.05, 0.05)
    expected = oracle.uniform_vectors(tables, ids, 5, seed, -0.05, 0.05)
    assert got.tobytes() == expected.tobytes()


def test_wide_vectors_start_like_narrow_ones():
    wide = uniform_vectors(TABLES, IDS, 1025, 3, 0, 1)
    for width in (1, 3, 4, 130):
        np.testing.assert_array_equal(uniform_vectors(TABLES, IDS, width, 3, 0, 1), wide[:, :width])


def test_order_and_company_do_not_matter():
    ids = np.random.default_rng(0).integers(LOW, HIGH, 1025)
    tables = np.arange(1025, dtype=np.uint32)
    whole = uniform_vectors(tables, ids, 3, 5, 0, 1)
    order = np.random.default_rng(1).permutation(1025)
    shuffled = uniform_vectors(tables[order], ids[order], 3, 5, 0, 1)
    np.testing.assert_array_equal(shuffled, whole[order])
    np.testing.assert_array_equal(uniform_vectors(tables[9:10], ids[9:10], 3, 5, 0, 1), whole[9:10])


def test_is_uniform_and_unrelated_across_keys():
    n, width = 4096, 16
    x = uniform_vectors(np.zeros(n, np.uint32), np.arange(n), width, 1, -0.5, 0.5).astype(float)
    assert (x.min() >= -0.5) and (x.max() < 0.5)
    sigma = math.sqrt(1 / 12)
    assert abs(x.mean()) < 5 * sigma / math.sqrt(x.size)
    assert np.abs(x.mean(axis=0)).max() < 5 * sigma / math.sqrt(n)
    assert abs(x.var() * 12 - 1) < 5 * math.sqrt(0.8 / x.size)
    counts = np.histogram(x, 64, (-0.5, 0.5))[0]
    chi_square = ((counts - x.size / 64) ** 2 / (x.size / 64)).sum()
    assert abs(chi_square - 63) < 6 * math.sqrt(2 * 63)
    for other in (
        uniform_vectors(np.ones(n, np.uint32), np.arange(n), width, 1, -0.5, 0.5),  # table
        uniform_vectors(np.zeros(n, np.uint32), np.arange(n), width, 2, -0.5, 0.5),  # seed
        uniform_vectors(np.zeros(n, np.uint32), np.arange(n) + 2**32, width, 1, -0.5, 0.5),  # id
        np.roll(x, 1, axis=0),
        np.roll(x, 1, axis=1),
    ):
        correlation = (x * other).mean() / sigma**2
        assert abs(correlation) < 5 / math.sqrt(x.size)


def test_empty():
    none = uniform_vectors(np.empty(0, np.uint32), np.empty(0, np.int64), 3, 1, 0, 1)
    assert none.shape == (0, 3)


def test_same_bits():
    ids, tables = np.arange(10_000), np.zeros(10_000, np.uint32)
    oracle.check_same_bits(lambda: [uniform_vectors(tables, ids, 10, 1, -0.05, 0.05)])


@pytest.mark.parametrize(
    ("tables", "ids", "width", "error", "text"),
    [
        (TABLES, IDS, 0, ValueError, "'width' must be at least 1, got 0."),
        (TABLES, IDS, 2.0, TypeError, "'width' must be an integer, got 2.0."),
        (TABLES, IDS.astype(float), 2, TypeError, "'ids' must be int64, got float64."),
        (TABLES[:2], IDS, 2, ValueError, "'ids' must have N = 2 like 'tables', got shape (6,)."),
    ],
)
def test_refuses(tables, ids, width, error, text):
    with pytest.raises(error, match=oracle.sentence(f"uniform_vectors: {text}")):
        uniform_vectors(tables, ids, width, 1, 0, 1)

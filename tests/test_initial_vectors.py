import itertools
import math
import statistics

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hash_table import HIGH, LOW, adversarial_ids, arrays, table_numbers

from cupyrec.ops.initial_vectors import (
    Distributions,
    initial_vectors,
    normal_probability,
    normal_quantile,
)

seeds = st.integers(0, 2**64 - 1)
IDS = np.array([LOW, -1, 0, 1, 2**32, HIGH])
TABLES = np.array([0, 2**32 - 1, 7, 7, 7, 0], np.uint32)


def uniform(low, high):
    low, high = np.float32(low), np.float32(high)
    return 0, 0, low, high - low, low, high


def truncated_normal(mean, std, low, high):
    first, last = (normal_probability((x - mean) / std) for x in (low, high))
    return first, last - first, mean, std, low, high


def distributions(*tables):
    """Each table is a list of (stop, parameters)."""
    counts = np.cumsum([0, *map(len, tables)])
    stops, parameters = zip(*itertools.chain(*tables), strict=True)
    return Distributions(
        counts[:-1].astype(np.int32), np.array(stops, np.int32), np.array(parameters, float)
    )


def uniform_vectors(tables, ids, width, seed, low, high):
    return initial_vectors(tables, ids, width, seed, distributions([(width, uniform(low, high))]))


def normal_vectors(tables, ids, width, seed, *values):
    of_all = distributions([(width, truncated_normal(*values))])
    return initial_vectors(tables, ids, width, seed, of_all)


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


# Normal

NORMALS = [(0, 1, -9, 9), (0.5, 0.01, 0, 1), (1, 2, 0, 1.5), (-3, 0.5, -2, 7), (0, 1, -0.1, 0.1)]


@pytest.mark.parametrize("values", NORMALS)
@pytest.mark.parametrize("width", [1, 3, 17])
def test_normal_vectors_are_philoxs(values, width):
    tables, ids = np.tile(TABLES, 8), np.arange(48) - 24
    got = normal_vectors(tables, ids, width, 2**64 - 1, *values)
    assert (got.dtype, got.shape) == (np.float32, (48, width))
    truth = oracle.truncated_normal_vectors(tables, ids, width, 2**64 - 1, *values)
    mean, std, low, high = values
    assert (np.abs(got - truth) <= 1e-9 * np.abs(truth - mean) + 2**-24 * np.abs(truth)).all()
    assert np.float32(low) <= got.min() <= got.max() <= np.float32(high)
    naive = np.float32(mean) + np.float32(std) * ((truth - mean) / std).astype(np.float32)
    oracle.check_error(got, naive, truth)


def test_quantiles():
    middle = np.linspace(0.001, 0.999, 4999)
    tails = 2.0 ** -np.arange(1, 54)
    truth = statistics.NormalDist()
    for p in [*middle, *tails, *(1 - tails), 1e-15, 1e-100, 1e-250, 0.075, 0.925, math.exp(-25)]:
        expected = truth.inv_cdf(float(p))
        assert abs(normal_quantile(p) - expected) <= 3e-10 * abs(expected)


def test_probabilities():
    for x in [*np.linspace(-6, 6, 99), -37, -20.0, 0.0]:
        expected = math.erfc(-x / math.sqrt(2)) / 2
        assert normal_probability(x) == pytest.approx(expected, rel=3e-10 * max(1, x * x))
        if -37 < x < 5:
            assert normal_quantile(normal_probability(x)) == pytest.approx(x, abs=1e-9)
    assert normal_probability(-40.0) == normal_probability(-math.inf) < 1e-307
    assert normal_probability(40.0) == 1


@pytest.mark.parametrize("values", [*NORMALS, (0, 1, -9, -4), (0, 1, -31, -30), (0, 1, 1, 1.01)])
def test_normal_vectors_are_distributed_so(values):
    n = 2**16
    tables, ids, (mean, std, low, high) = np.zeros(n // 16, np.uint32), np.arange(n // 16), values
    x = normal_vectors(tables, ids, 16, 3, *values)
    assert np.float32(low) <= x.min() <= x.max() <= np.float32(high)

    def below(x):
        return math.erfc((mean - x) / std / math.sqrt(2)) / 2

    mass = below(high) - below(low)
    values = np.sort(x.astype(float), axis=None)
    ranks = np.array([(below(value) - below(low)) / mass for value in values])
    assert np.abs(ranks - (np.arange(n) + 0.5) / n).max() < 1.6 / math.sqrt(n)  # Kolmogorov, 1 %


def test_moments_and_tails_of_normal_vectors():
    n = 2**20
    x = normal_vectors(np.zeros(n // 64, np.uint32), np.arange(n // 64), 64, 1, 0, 1, -9, 9)
    x = x.astype(float)
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((x**power).mean() - moment) < 4 * math.sqrt(variance / n)
    assert np.abs((x[1:] * x[:-1]).mean(axis=0)).max() < 5 * math.sqrt(64 / n)
    assert x.max() > 4.5
    assert normal_quantile(2.0**-33) == -normal_quantile(1 - 2.0**-33) < -6.3  # words 0 and -1


# Tables and ranges of columns


def three_tables(width):
    """The second has up to four ranges, that begin and end anywhere."""
    drawn = truncated_normal(0, 1, -1, 3), uniform(-1, 1), uniform(5, 5), uniform(0, 1)
    stops = sorted({1, (width + 1) // 2, width - width // 5, width})
    return [(width, drawn[0])], [*zip(stops, drawn, strict=False)], [(width, drawn[1])]


@pytest.mark.parametrize("width", [1, 3, 17, 130, 4096])
def test_each_table_and_range_has_its_own(width):
    tables = np.array([1, 0, 2, 2**32 - 1, 1, 3], np.uint32)
    got = initial_vectors(tables, IDS, width, 7, distributions(*three_tables(width)))
    for i, table in enumerate(tables):
        start = 0
        for stop, parameters in three_tables(width)[min(table, 2)]:
            one = distributions([(width, parameters)])
            alone = initial_vectors(tables[i : i + 1], IDS[i : i + 1], width, 7, one)
            np.testing.assert_array_equal(got[i, start:stop], alone[0, start:stop])
            start = stop


def test_empty():
    none = uniform_vectors(np.empty(0, np.uint32), np.empty(0, np.int64), 3, 1, 0, 1)
    assert none.shape == (0, 3)


def test_same_bits():
    ids, tables = np.arange(10_000), np.zeros(10_000, np.uint32)
    oracle.check_same_bits(lambda: [normal_vectors(tables, ids, 10, 1, 0, 1, -2, 2)])


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
    with pytest.raises(error, match=oracle.sentence(f"initial_vectors: {text}")):
        initial_vectors(tables, ids, width, 1, distributions([(2, uniform(0, 1))]))


def test_refuses_distributions_of_other_shapes():
    first, stops, _ = distributions([(2, uniform(0, 1))])
    text = r"initial_vectors: 'parameters' must have R = 1 like 'stops', got shape \(2, 6\)\."
    with pytest.raises(ValueError, match=text):
        wrong = Distributions(first, stops, np.zeros((2, 6)))
        initial_vectors(TABLES, IDS, 2, 1, wrong)

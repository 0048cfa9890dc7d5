import json
import math

import numpy as np
import oracle
import pytest
from oracle import sentence

from cupyrec import arrays
from cupyrec.embedding import (
    Constant,
    InitialVectors,
    Normal,
    TruncatedNormal,
    Uniform,
    Xavier,
)

TABLES = np.array([0, 0, 1, 2**32 - 1], np.uint32)
IDS = np.array([-(2**63), 2**63 - 1, -1, 0])
SEED = 2**64 - 1
ALL = [Constant(0.3), Uniform(-1, 2), Normal(1, 0.1), TruncatedNormal(0, 1, -1, 2), Xavier(7)]


def vectors(width, initializers, seed=SEED):
    return InitialVectors(width, initializers, seed)(TABLES, IDS)


def many(initializer, width=4, n=20_000):
    initial = InitialVectors(width, initializer, seed=1)
    return initial(np.zeros(n, np.uint32), np.arange(n)).astype(float)


# Initializers


@pytest.mark.parametrize(("low", "high"), [(-0.05, 0.05), (0, 1), (-3.5, -3.25), (0.1, 0.1)])
def test_uniform_vectors_are_philoxs(low, high):
    expected = oracle.uniform_vectors(TABLES, IDS, 5, SEED, low, high)
    got = vectors(5, Uniform(low, high))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


def test_default_range_and_equality():
    x = many(Uniform())
    assert -0.05 <= x.min() < -0.0499
    assert 0.0499 < x.max() <= np.float32(0.05)
    assert Uniform() == Uniform(-0.05, 0.05) != Uniform(-0.05, 0.06)


@pytest.mark.parametrize("value", [0, 0.1, -3e38, 1e-40])
def test_constant(value):
    assert (vectors(5, Constant(value)) == np.float32(value)).all()


@pytest.mark.parametrize(("mean", "std"), [(0, 1), (-3, 0.25), (2, 0)])
def test_normal(mean, std):
    x = many(Normal(mean, std))
    assert abs(x.mean() - mean) <= 4 * std / math.sqrt(x.size)
    assert abs(x.std() - std) <= 4 * std / math.sqrt(2 * x.size)


@pytest.mark.parametrize(
    ("mean", "std", "low", "high"),
    [(0, 1, -2, 2), (1, 0.5, 0, 1.25), (0, 1, 6, 9), (0, 1, -9, -6), (5, 2, -3e38, 3e38)],
)
def test_truncated_normal(mean, std, low, high):
    """Mean and variance by Johnson, Kotz and Balakrishnan 1994, section 13.10.1."""
    x = many(TruncatedNormal(mean, std, low, high))
    assert np.float32(low) <= x.min() <= x.max() <= np.float32(high)
    a, b = (low - mean) / std, (high - mean) / std
    near, far = (a, b) if a > 0 else (-b, -a)  # so that no digits are lost
    mass = (math.erfc(near / math.sqrt(2)) - math.erfc(far / math.sqrt(2))) / 2
    density = [math.exp(-min(z * z, 1400) / 2) / math.sqrt(2 * math.pi) / mass for z in (a, b)]
    shift = density[0] - density[1]
    variance = 1 + a * density[0] - b * density[1] - shift**2
    assert abs(x.mean() - mean - std * shift) < 4 * std * math.sqrt(variance / x.size)
    assert x.var() / std**2 == pytest.approx(variance, rel=0.05)


def test_far_intervals_are_mirrors():
    above, below = (vectors(9, TruncatedNormal(0, 1, *bounds)) for bounds in [(30, 31), (-31, -30)])
    assert above.tobytes() == (-below).tobytes()
    assert many(TruncatedNormal(0, 1, 30, 31)).mean() - 30 == pytest.approx(1 / 30, rel=0.02)


@pytest.mark.parametrize(("num_ids", "width"), [(1, 1), (8, 4), (10**9, 128)])
def test_xavier(num_ids, width):
    x = many(Xavier(num_ids), width)
    bound = math.sqrt(6 / (num_ids + width))
    assert 0.999 * bound < np.abs(x).max() <= np.float32(bound)
    x = many(Xavier(num_ids, normal=True), width)
    assert x.std() == pytest.approx(math.sqrt(2 / (num_ids + width)), rel=0.02)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Constant(math.inf), "Constant: 'value' must be a finite float32, got inf."),
        (lambda: Uniform(math.nan, 1), "Uniform: 'low' must be a finite float32, got nan."),
        (lambda: Uniform(0, -math.inf), "Uniform: 'high' must be a finite float32, got -inf."),
        (lambda: Uniform(0, 1e39), "Uniform: 'high' must be a finite float32, got 1e+39."),
        (lambda: Normal(math.nan), "Normal: 'mean' must be a finite float32, got nan."),
        (lambda: Normal(0, -1), "Normal: 'std' must not be negative, got -1."),
        (lambda: TruncatedNormal(std=-1), "TruncatedNormal: 'std' must not be negative, got -1."),
        (lambda: Xavier(0), "Xavier: 'num_ids' must be at least 1, got 0."),
    ],
)
def test_values_that_are_none(make, text):
    with pytest.raises(ValueError, match=sentence(text)):
        make()


def test_values_that_are_no_numbers():
    with pytest.raises(TypeError, match=sentence("Normal: 'std' must be a number, got '1'.")):
        Normal(0, "1")
    with pytest.raises(TypeError, match=sentence("Xavier: 'num_ids' must be an integer, got 2.5.")):
        Xavier(2.5)


@pytest.mark.parametrize(("low", "high"), [(1, 0), (-3e38, 3e38)])
def test_uniform_of_no_width(low, high):
    text = "Uniform: 'high' - 'low' must be a finite float32, not negative, got "
    with pytest.raises(ValueError, match=sentence(f"{text}{float(high)} and {float(low)}.")):
        Uniform(low, high)


@pytest.mark.parametrize(
    ("mean", "std", "low", "high"),
    [
        (0, 1, 1, 0),
        (0, 1, 2, 2),
        (0, 0, -1, 1),
        (0, 1, 40, 50),
        (0, 1, -50, -38),
    ],
)
def test_truncated_normal_without_mass(mean, std, low, high):
    text = (
        "TruncatedNormal: the normal distribution must have mass between 'low' and 'high', got "
        f"mean {float(mean)}, std {float(std)}, low {float(low)} and high {float(high)}."
    )
    with pytest.raises(ValueError, match=sentence(text)):
        TruncatedNormal(mean, std, low, high)


# Of tables and ranges of columns


def test_every_table_and_range_has_its_own():
    got = vectors(17, [[(16, Normal()), (1, Constant(7))], Uniform(2, 3)])
    np.testing.assert_array_equal(got[:2, :16], vectors(17, Normal())[:2, :16])
    assert (got[:2, 16] == 7).all()
    np.testing.assert_array_equal(got[2:], vectors(17, Uniform(2, 3))[2:])  # the last speaks on


def test_fans_of_a_range_are_its_columns():
    got = vectors(17, [[(16, Xavier(9)), (1, Xavier(2))]])
    of_ranges = Uniform(-math.sqrt(6 / 25), math.sqrt(6 / 25)), Uniform(-math.sqrt(2), math.sqrt(2))
    expected = vectors(17, [[(16, of_ranges[0]), (1, of_ranges[1])]])
    np.testing.assert_array_equal(got, expected)


def test_tables_that_are_alike_share_ranges():
    split = [(3, Normal()), (1, Constant(0))]
    other = [split, Uniform()] * 500
    initial = InitialVectors(4, [*other, *[Uniform()] * 500], SEED)
    first, stops, parameters = initial.distributions
    assert first.tolist() == [0, 2] * 500
    assert stops.tolist() == [3, 4, 4]
    assert parameters.shape == (3, 6)
    assert initial == InitialVectors(4, other, SEED)
    assert InitialVectors(4, [Uniform()] * 26, 1) == InitialVectors(4, Uniform(), 1)
    assert InitialVectors(4, Uniform(), 1) != InitialVectors(4, Uniform(), 2)


def test_other_devices_draw_the_same(xp):
    initial = InitialVectors(17, [*ALL, [(16, Normal()), (1, Constant(0))]], SEED)
    moved = initial.to(xp)
    assert moved == initial
    tables, ids = np.arange(50, dtype=np.uint32) % 7, np.arange(50)
    got = moved(arrays.copy_to(xp, tables), arrays.copy_to(xp, ids))
    assert arrays.to_host(got).tobytes() == initial(tables, ids).tobytes()
    assert moved.to(np)(tables, ids).tobytes() == initial(tables, ids).tobytes()


@pytest.mark.parametrize(
    ("width", "initializers", "seed", "error", "text"),
    [
        (0, Uniform(), 1, ValueError, "'width' must be at least 1, got 0."),
        (4, Uniform(), -1, ValueError, "'seed' must lie in [0, 2**64), got -1."),
        (4, Uniform(), 2**64, ValueError, f"'seed' must lie in [0, 2**64), got {2**64}."),
        (4, Uniform(), 1.5, TypeError, "'seed' must be an integer, got 1.5."),
        (4, [], 1, ValueError, "there must be an initializer, got none."),
        (4, [Uniform(), [(3, Uniform())]], 1, ValueError,
         "columns of table 1 must add up to D = 4, got 3."),
        (4, [[(4, Uniform()), (0, Uniform())]], 1, ValueError,
         "'columns' must be at least 1, got 0."),
        (4, [Uniform(), [(4, "normal")]], 1, TypeError,
         "table 1 must have initializers, got 'normal'."),
        (4, "normal", 1, TypeError,
         "table 0 must have an initializer or pairs (columns, initializer), got 'normal'."),
        (4, [(4, Uniform())], 1, TypeError,
         "table 0 must have an initializer or pairs (columns, initializer), got "
         "(4, Uniform(low=-0.05, high=0.05))."),
        (4, [Uniform(), "normal"], 1, TypeError,
         "table 1 must have an initializer or pairs (columns, initializer), got 'normal'."),
        (4, [None], 1, TypeError,
         "table 0 must have an initializer or pairs (columns, initializer), got None."),
    ],
)  # fmt: skip
def test_refuses(width, initializers, seed, error, text):
    with pytest.raises(error, match=sentence(f"InitialVectors: {text}")):
        InitialVectors(width, initializers, seed)


# As JSON


def test_json_brings_all_back():
    initial = InitialVectors(17, [*ALL, [(16, Xavier(np.int64(3), True)), (1, Uniform())]], SEED)
    values = json.loads(json.dumps(initial.to_dict()))
    assert InitialVectors.from_dict(values, 17, SEED) == initial
    single = InitialVectors(2, Normal(np.float32(0.5), 1), SEED)
    assert json.loads(json.dumps(single.to_dict())) == {
        "tables": [[[2, {"name": "Normal", "mean": 0.5, "std": 1.0}]]]
    }


def test_json_of_an_unknown_initializer():
    text = (
        "InitialVectors: an initializer must be one of Constant, Uniform, Normal, TruncatedNormal, "
        "Xavier, got 'Zipf'."
    )
    with pytest.raises(ValueError, match=sentence(text)):
        InitialVectors.from_dict({"tables": [[[2, {"name": "Zipf"}]]]}, 2, 1)

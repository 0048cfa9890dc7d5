"""Rounding to 16 bits, on the CPU and on devices."""

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyrec import arrays
from cupyrec.ops.stochastic_rounding import (
    BFLOAT16,
    FLOAT16,
    round_rows,
    round_vector,
    widen_vector,
)

FORMATS = pytest.mark.parametrize("value", [FLOAT16, BFLOAT16])
SEED = 2**64 - 1  # column 0's key wraps around
words = st.integers(0, 2**32 - 1)


def keys(n):
    ids = np.random.default_rng(1).integers(-(2**63), 2**63, n)
    return np.random.default_rng(2).integers(2**32, size=n, dtype=np.uint32), ids


def wide(codes, value):
    """By NumPy's float16, and bfloat16 as the upper half of a float32."""
    if value == FLOAT16:
        return codes.view(np.float16).astype(np.float32)
    return (codes.astype(np.uint32) << 16).view(np.float32)


def special_values():
    """Neighbours of all that is special, of both signs."""
    edges = [0, 2**-149, 2**-126, 2**-41, 2**-25, 2**-24, 2**-15, 2**-14, 1, 65504, 65520, 65536]
    edges += [3.3895314e38, 3.4028235e38, np.inf]
    near = np.float32([(np.nextafter(np.float32(e), np.float32(0)), e) for e in edges]).ravel()
    near = np.append(near, np.nextafter(near[near < 1e38], np.float32(np.inf)))
    nans = np.uint32([0x7F800001, 0x7FC00000, 0x7FFFFFFF]).view(np.float32)
    return np.concatenate([near, -near, nans, -nans])


def spread(shape, seed=0):
    """Values of all float16's magnitudes and beyond."""
    exponents = np.random.default_rng(seed).integers(-45, 20, shape)
    return np.ldexp(oracle.normals(shape, seed=seed), exponents).astype(np.float32)


# On the CPU


@FORMATS
@pytest.mark.parametrize("width", [1, 3, 8, 9, 130])
def test_is_the_oracles(width, value):
    tables, ids = keys(6)
    x = spread((6, width))
    got = round_rows(x, tables, ids, SEED, 2**32 - 1, value)
    np.testing.assert_array_equal(got, oracle.round_rows(x, tables, ids, SEED, 2**32 - 1, value))


@FORMATS
def test_special_values_are_the_oracles(value):
    x = np.tile(special_values()[:, None], 17)
    tables, ids = keys(len(x))
    got = round_rows(x, tables, ids, 7, 5, value)
    np.testing.assert_array_equal(got, oracle.round_rows(x, tables, ids, 7, 5, value))
    np.testing.assert_array_equal(np.isnan(wide(got, value)), np.isnan(x))
    np.testing.assert_array_equal(np.isinf(wide(got, value)), np.isinf(x))
    np.testing.assert_array_equal(np.signbit(wide(got, value)), np.signbit(x) & ~np.isnan(x))


@FORMATS
def test_all_65536_numbers_stay_and_widen_exactly(value):
    codes = np.arange(2**16, dtype=np.uint16)
    x = np.empty(2**16, np.float32)
    widen_vector(codes, value, x)
    known = wide(codes, value)
    number = ~np.isnan(known)
    assert x[number].tobytes() == known[number].tobytes()
    assert np.isnan(x[~number]).all()
    tables, ids = keys(2**13)
    for step in (0, 1, 2):
        again = round_rows(x.reshape(-1, 8), tables, ids, 3, step, value).ravel()
        np.testing.assert_array_equal(again[number], codes[number])
        assert (again[~number] == (0x7E00 if value == FLOAT16 else 0x7FC0)).all()


@FORMATS
@pytest.mark.parametrize("x", [1.0003, -0.0123, 3e-6, -7e-8, 1e-9, 50000.5, 65519.0])
def test_is_unbiased(x, value):
    """The mean of n roundings is x within 5 sigma; both neighbours occur as is their due."""
    n = 1 << 17
    x = np.float32(x)
    codes = round_rows(np.full((n // 8, 8), x), *keys(n // 8), 1, 2, value)
    numbers, counts = np.unique(wide(codes, value).astype(float), return_counts=True)
    if value == FLOAT16 and abs(x) > 65504:
        assert numbers.tolist() == [65504]  # finite stays finite
        return
    low, high = numbers
    assert low < x < high
    p = (float(x) - low) / (high - low)
    assert abs(counts[1] / n - p) < 5 * np.sqrt(p * (1 - p) / n)


def test_chances_are_unrelated_across_keys_columns_and_steps():
    """Halfway between two numbers every one is a coin."""
    n, width = 2048, 24
    x = np.full((n, width), 1 + 2**-8, np.float32)
    zeros, ids = np.zeros(n, np.uint32), np.arange(n)

    def coins(tables=zeros, ids=ids, seed=1, step=0):
        return 2 * (round_rows(x, tables, ids, seed, step, BFLOAT16) & 1).astype(float) - 1

    first = coins()
    for other in (
        np.ones_like(first),
        coins(tables=zeros + np.uint32(1)), coins(ids=ids + 2**32), coins(seed=2), coins(step=1),
        np.roll(first, 1, axis=0), np.roll(first, 1, axis=1), np.roll(first, 8, axis=1),
    ):  # fmt: skip
        assert abs((first * other).mean()) < 5 / np.sqrt(first.size)


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63, 0])
def test_chances_do_not_depend_on_the_batch(seed):
    tables, ids = keys(1100)
    x = spread((1100, 10))
    whole = round_rows(x, tables, ids, seed, 4, FLOAT16)
    order = np.random.default_rng(3).permutation(1100)[:700]
    part = round_rows(x[order][:, :9], tables[order], ids[order], seed, 4, FLOAT16)
    np.testing.assert_array_equal(part, whole[order][:, :9])


@FORMATS
def test_many_small_updates_move_what_nearest_rounding_would_not(value):
    """1,000 steps of an eighth of a distance: to nearest, none would leave 1."""
    n, steps, distance = 512, 1000, 2.0**-10 if value == FLOAT16 else 2.0**-7
    tables, ids = keys(n)
    x = np.ones((n, 1), np.float32)
    for step in range(steps):
        codes = round_rows(x + np.float32(distance / 8), tables, ids, 1, step, value)
        x = wide(codes, value)
    moved = (x.astype(float) - 1).mean() / distance
    assert np.float32(np.float16(1 + 2.0**-13)) == 1
    assert abs(moved - steps / 8) < 5 * np.sqrt(steps * 7 / 64 / n)  # each goes up or stays


def test_round_vector_writes_its_columns_alone():
    codes = np.full(5, 9, np.uint16)
    zero = np.uint64(0)
    round_vector(np.ones(3, np.float32), np.uint32(1), -1, zero, zero, FLOAT16, codes)
    assert codes.tolist() == [0x3C00] * 3 + [9, 9]


def test_none():
    none = np.empty(0, np.uint32), np.empty(0, np.int64)
    assert round_rows(np.empty((0, 3), np.float32), *none, 0, 0, FLOAT16).shape == (0, 3)


def test_same_bits():
    x, rounding = spread((5000, 10)), keys(5000)
    oracle.check_same_bits(lambda: [round_rows(x, *rounding, 1, 2, FLOAT16)])


X, TABLES, IDS = np.zeros((3, 2), np.float32), np.zeros(3, np.uint32), np.zeros(3, np.int64)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((X.astype(float), TABLES, IDS, 0, 0), TypeError, "'x' must be float32, got float64."),
        ((X, IDS, IDS, 0, 0), TypeError, "'tables' must be uint32, got int64."),
        ((X, TABLES, TABLES, 0, 0), TypeError, "'ids' must be int64, got uint32."),
        ((X[:2], TABLES, IDS, 0, 0), ValueError,
         "'x' must have N = 3 like 'tables', got shape (2, 2)."),
        ((X[:, :0], TABLES, IDS, 0, 0), ValueError,
         "'x' must have D of at least 1, got shape (3, 0)."),
        ((X, TABLES, IDS, 2**64, 0), ValueError,
         "'seed' must lie in [0, 2**64), got 18446744073709551616."),
        ((X, TABLES, IDS, 0, -1), ValueError, "'step' must lie in [0, 2**32), got -1."),
    ],
)  # fmt: skip
def test_refuses(arguments, error, text):
    with pytest.raises(error, match=oracle.sentence(f"round_rows: {text}")):
        round_rows(*arguments, FLOAT16)


# On devices


def device_codes(xp, x, tables, ids, *rest):
    given = (arrays.copy_to(xp, array) for array in (x, tables, ids))
    return arrays.to_host(round_rows(*given, *rest))


@FORMATS
@pytest.mark.parametrize(("n", "width"), oracle.covering([0, 1, 17, 127], [1, 3, 4, 10, 130, 1025]))
def test_every_bit_is_the_cpus(xp, n, width, value):
    x, rounding = spread((n, width)), keys(n)
    got = device_codes(xp, x, *rounding, SEED, 2**32 - 1, value)
    np.testing.assert_array_equal(got, round_rows(x, *rounding, SEED, 2**32 - 1, value))


@FORMATS
def test_special_values_are_the_cpus(xp, value):
    x = np.tile(special_values()[:, None], 9)
    got = device_codes(xp, x, *keys(len(x)), 7, 5, value)
    np.testing.assert_array_equal(got, round_rows(x, *keys(len(x)), 7, 5, value))


@settings(max_examples=20)
@given(st.lists(words, min_size=4, max_size=4), words, st.integers(-(2**63), 2**63 - 1), words)
def test_any_float_and_key_sim(bits, table, key, step):
    x = np.array([bits], np.uint32).view(np.float32)
    given = x, np.array([table], np.uint32), np.array([key])
    for value in (FLOAT16, BFLOAT16):
        got = device_codes(arrays.module("sim"), *given, 5, step, value)
        np.testing.assert_array_equal(got, oracle.round_rows(*given, 5, step, value))


def test_views_are_copied(xp):
    x, (tables, ids) = spread((20, 6)), keys(20)
    xs, ts, ks = (arrays.copy_to(xp, array) for array in (x, tables, ids))
    got = arrays.to_host(round_rows(xs[::2, 1:4], ts[::2], ks[::2], 1, 2, FLOAT16))
    expected = round_rows(x[::2, 1:4], tables[::2], ids[::2], 1, 2, FLOAT16)
    np.testing.assert_array_equal(got, expected)


def test_thread_order(xp):
    given = [arrays.copy_to(xp, array) for array in (spread((60, 10)), *keys(60))]
    oracle.check_thread_order(xp, lambda: [round_rows(*given, 1, 2, FLOAT16)])


def test_bytes():
    sim = arrays.module("sim")
    n, width = 300, 128
    given = [sim.asarray(array) for array in (spread((n, width)), *keys(n))]
    with sim.record() as seen:
        round_rows(*given, 1, 2, BFLOAT16)
    counts = seen.launches[-1].result.counts
    ideal = n * (12 + 6 * width)
    assert counts["bytes_read"] + counts["bytes_written"] <= 1.1 * ideal
    assert counts["longest_warp"] <= 4 * counts["mean_warp"]

import numpy as np
import oracle
import pytest

from cupyrec.ops.segment_sum import segment_sum

SHAPES = oracle.covering(
    (1, 3, 17, 127, 1025), (1, 3, 4, 16, 128, 1025), (1, 3, 20, 1000), most=3_000_000
)


def segments(rows, different, seed=0):
    """(offsets, positions) of rows that belong to at most `different` keys, some to most rows."""
    key = np.random.default_rng(seed).zipf(1.3, rows) % different
    positions = np.argsort(key, kind="stable")
    counts = np.unique(key, return_counts=True)[1]
    return np.array([0, *np.cumsum(counts)]), positions


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact(shape):
    rows, width, different = shape
    x = oracle.integers((rows, width), -99, 99)
    offsets, positions = segments(rows, different)
    got = segment_sum(x, offsets, positions)
    assert got.dtype == np.float32
    oracle.check_exact(got, oracle.segment_sum(x, offsets, positions))


@pytest.mark.parametrize("width", [1, 3, 16, 130])
def test_error(width):
    x = oracle.normals((1025, width))
    offsets, positions = segments(1025, 20)
    naive = np.zeros((len(offsets) - 1, width), np.float32)
    np.add.at(naive, np.repeat(np.arange(len(naive)), np.diff(offsets)), x[positions])
    truth = oracle.segment_sum(x, offsets, positions)
    oracle.check_error(segment_sum(x, offsets, positions), naive, truth)


def shared(values, rows, width, draw=oracle.normals):
    """(x, offsets, positions, index, weights) of values that share rows; a third has no position.

    More values than rows, so that one mistaken for the other is seen.
    """
    x, weights = draw((rows, width)), draw(values, seed=1)
    index = np.random.default_rng(2).integers(rows, size=values)
    offsets, positions = segments(values - values // 3, 20)
    chosen = np.sort(np.random.default_rng(3).permutation(values)[: len(positions)])
    return x, offsets, chosen[positions], index, weights


def small(shape, seed=0):
    return oracle.integers(shape, -9, 9, seed=seed)


@pytest.mark.parametrize("given", [("index",), ("weights",), ("index", "weights")], ids="+".join)
@pytest.mark.parametrize(
    "shape", [(1, 1, 3), (17, 5, 1), (127, 50, 16), (1025, 40, 130)], ids=str
)  # fmt: skip
def test_values_that_share_rows(shape, given):
    values, rows, width = shape
    x, offsets, positions, index, weights = shared(values, rows, width, small)
    if "index" not in given:
        x = small((values, width))
    more = {
        name: array for name, array in dict(index=index, weights=weights).items() if name in given
    }
    got = segment_sum(x, offsets, positions, **more)
    oracle.check_exact(got, oracle.segment_sum(x, offsets, positions, **more))


def test_error_with_weights():
    x, offsets, positions, index, weights = shared(1025, 30, 16)
    naive = np.zeros((len(offsets) - 1, 16), np.float32)
    terms = weights[positions, None] * x[index[positions]]
    np.add.at(naive, np.repeat(np.arange(len(naive)), np.diff(offsets)), terms)
    truth = oracle.segment_sum(x, offsets, positions, index, weights)
    got = segment_sum(x, offsets, positions, index=index, weights=weights)
    oracle.check_error(got, naive, truth)


def test_adds_in_the_order_of_positions():
    x = np.array([[1e8], [1], [-1e8], [1]], np.float32)
    offsets = np.array([0, 4])
    for order, total in [([0, 1, 2, 3], 1), ([0, 2, 1, 3], 2), ([1, 3, 0, 2], 0)]:
        assert segment_sum(x, offsets, np.array(order)).item() == total


def test_a_segment_of_one_keeps_its_bits():
    x = np.array([[-0.0, np.nan, np.inf, 1e-45]], np.float32)
    assert segment_sum(x, np.array([0, 1]), np.array([0])).tobytes() == x.tobytes()


def test_nan_and_inf_stay_in_their_segment():
    x = np.array([[1], [np.nan], [np.inf], [2], [-np.inf], [np.inf]], np.float32)
    got = segment_sum(x, np.array([0, 2, 4, 6]), np.arange(6))
    np.testing.assert_array_equal(got, [[np.nan], [np.inf], [np.nan]])


def test_empty_and_views():
    assert segment_sum(np.empty((0, 3), np.float32), np.array([0]), np.arange(0)).shape == (0, 3)
    x = oracle.normals((17, 6))
    offsets, positions = segments(17, 5)
    expected = segment_sum(x[:, ::2].copy(), offsets, positions)
    np.testing.assert_array_equal(segment_sum(x[:, ::2], offsets, positions), expected)
    row = np.broadcast_to(np.float32(1), (17, 3))  # as the gradient of a sum comes
    np.testing.assert_array_equal(segment_sum(row, offsets, positions)[:, 0], np.diff(offsets))


def test_same_bits():
    x = oracle.normals((10_000, 16))
    offsets, positions = segments(10_000, 3000)
    oracle.check_same_bits(lambda: [segment_sum(x, offsets, positions)])
    x, offsets, positions, index, weights = shared(10_000, 300, 16)
    more = dict(index=index, weights=weights)
    oracle.check_same_bits(lambda: [segment_sum(x, offsets, positions, **more)])


@pytest.mark.parametrize(
    ("x", "positions", "error", "text"),
    [
        (np.zeros((2, 3)), np.arange(2), TypeError,
         "'x' must be float32 or float16 or bfloat16, got float64."),
        (np.zeros(2, np.float32), np.arange(2), ValueError,
         "'x' must have axes (N, D), got shape (2,)."),
        (np.zeros((2, 3), np.float32), np.arange(3), ValueError,
         "'positions' must be at most 2, one a value, got shape (3,)."),
        (None, np.arange(3), TypeError,
         "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got NoneType."),
    ],
)  # fmt: skip
def test_refuses(x, positions, error, text):
    with pytest.raises(error, match=oracle.sentence(f"segment_sum: {text}")):
        segment_sum(x, np.array([0, 2]), positions)


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        (dict(index=np.zeros(2, np.int32)), TypeError, "'index' must be int64, got int32."),
        (dict(weights=np.ones(2)), TypeError, "'weights' must be float32, got float64."),
        (dict(index=np.arange(3), weights=np.ones(2, np.float32)), ValueError,
         "'weights' must have values = 3 like 'index', got shape (2,)."),
        (dict(index=np.arange(1)), ValueError,
         "'positions' must be at most 1, one a value, got shape (2,)."),
        (dict(weights=[1.0]), TypeError,
         "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got list."),
    ],
)  # fmt: skip
def test_refuses_more(more, error, text):
    with pytest.raises(error, match=oracle.sentence(f"segment_sum: {text}")):
        segment_sum(np.zeros((2, 3), np.float32), np.array([0, 2]), np.arange(2), **more)


@pytest.mark.parametrize("name", ["offsets", "positions"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint64])
def test_refuses_other_integers(name, dtype):
    arrays = {"offsets": np.array([0, 2]), "positions": np.arange(2)}
    arrays[name] = arrays[name].astype(dtype)
    text = f"segment_sum: '{name}' must be int64, got {np.dtype(dtype)}."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        segment_sum(np.zeros((2, 3), np.float32), **arrays)

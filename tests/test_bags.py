from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
from test_embedding_rows import chunked

from cupyrec.ops.bags import (
    bag_numbers,
    check_offsets,
    mean_gradient,
    pad_bags,
    pool_rows,
    weight_gradient,
)
from cupyrec.ops.embedding_rows import BFLOAT16, FLOAT16, FLOAT32, gather_rows
from cupyrec.ops.segment_sum import segment_sum

SIZES = (1, 3, 17, 127), (1, 3, 4, 16, 130, 1025), (0, 1, 9, 60)
KINDS = ["sum", "mean", "weighted"]


class Bags(NamedTuple):
    """Values in bags, and what they are: rows, unseen vectors and padding."""

    stored: Any  # (rows, stride) words of float32
    vectors: Any  # (U, D), of the unique values
    rows: Any
    inverse: Any
    unseen: Any
    offsets: Any
    weights: Any

    def given(self, kind, to=lambda array: array):
        """What `pool_rows` takes between its memory and its output."""
        arrays = map(to, (self.rows, self.inverse, self.unseen, self.offsets))
        return *arrays, to(self.weights) if kind == "weighted" else None, kind == "mean"

    def truth(self, kind):
        weights = self.weights if kind == "weighted" else None
        return oracle.pool(self.vectors, self.inverse, self.offsets, weights, kind == "mean")


def small(shape, seed=0):
    return oracle.integers(shape, -9, 9, seed=seed)


def make(bags, width, most, draw=small, value=FLOAT32):
    """Bags of up to `most` values, some of them empty. Half of all rows are in the batch."""
    generator = np.random.default_rng(0)
    offsets = np.array([0, *np.cumsum(generator.integers(0, most + 1, bags))])
    n, unique = offsets[-1], offsets[-1] // 2 + 1
    kept, unseen = draw((2 * unique, width)), draw((5, width), seed=1)
    rows = generator.permutation(np.arange(-5, 2 * unique))[:unique]
    vectors = np.concatenate([kept, unseen[::-1]])[rows]  # -1 - j counts from the end
    inverse = generator.integers(-1, unique, n)
    return Bags(words(kept, value), vectors, rows, inverse, unseen, offsets, draw(n, seed=2))


def words(vectors, value):
    """(N, stride) words of rows with these vectors, NaN behind them; 16 bits must hold them."""
    n, width = vectors.shape
    rows = np.full((n, (width + 7) // 4 * 4), np.nan, np.float32)
    if value == FLOAT32:
        rows[:, :width] = vectors
    elif value == FLOAT16:
        rows.view(np.float16)[:, :width] = vectors
    else:
        codes = np.ascontiguousarray(vectors).view(np.uint32)
        rows.view(np.uint16)[:, :width] = codes >> 16
    return rows


def pooled(it, kind, value=FLOAT32):
    memory, _chunks = chunked(it.stored, 3, value)
    out = np.full((len(it.offsets) - 1, it.vectors.shape[1]), np.nan, np.float32)
    pool_rows(memory, *it.given(kind), out)
    return out


def rounded(truth):
    return truth.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("case", oracle.covering(*SIZES, (1, 2, 3), most=400_000), ids=str)
def test_integer_data_is_exact(case):
    it, kind = make(*case[:3]), KINDS[case[3] - 1]
    oracle.check_exact(pooled(it, kind), rounded(it.truth(kind)))


@pytest.mark.parametrize("value", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("width", [1, 10, 130])
def test_rows_of_16_bits(width, value):
    it = make(40, width, 9, value=value)
    oracle.check_exact(pooled(it, "weighted", value), it.truth("weighted"))
    memory, _chunks = chunked(it.stored, 3, value)
    bags, grad = bag_numbers(it.offsets, len(it.inverse)), small((40, width), seed=3)
    got = weight_gradient(memory, it.rows, it.inverse, it.unseen, bags, grad)
    oracle.check_exact(got, weights_truth(it, grad))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 16, 130])
def test_error(width, kind):
    it = make(20, width, 300, oracle.normals)
    values = np.where(it.inverse[:, None] >= 0, it.vectors[it.inverse], np.float32(0))
    terms = values * it.weights[:, None] if kind == "weighted" else values
    naive = np.zeros((20, width), np.float32)
    np.add.at(naive, bag_numbers(it.offsets, len(values)), terms)
    if kind == "mean":
        counts = oracle.pool(np.ones((len(it.rows), 1)), it.inverse, it.offsets)
        naive /= counts.astype(np.float32)
    oracle.check_error(pooled(it, kind), naive, it.truth(kind))


def test_adds_in_the_order_of_values():
    chunk = np.array([[1e8], [1], [-1e8]], np.float32) * np.ones(4, np.float32)
    memory, _chunks = chunked(chunk, 1)
    for order, total in [([0, 1, 2, 1], 1), ([0, 2, 1, 1], 2), ([1, 1, 0, 2], 0)]:
        out = np.empty((1, 1), np.float32)
        unseen = np.empty((0, 1), np.float32)
        pool_rows(memory, np.arange(3), np.array(order), unseen, np.array([0, 4]), None, False, out)
        assert out.item() == total


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_empty_bags_are_zeros_whatever_the_rows_hold(kind):
    memory, _chunks = chunked(np.full((4, 4), np.nan, np.float32), 1)
    out = np.full((3, 3), np.nan, np.float32)
    weights = np.full(2, np.inf, np.float32) if kind == "weighted" else None
    nothing = np.array([-1, -1]), np.empty((0, 3), np.float32), np.array([0, 0, 2, 2])
    pool_rows(memory, np.arange(4), *nothing, weights, kind == "mean", out)
    assert not out.any()
    bags, grad = bag_numbers(nothing[2], 2), np.full((3, 3), np.inf, np.float32)
    assert not weight_gradient(memory, np.arange(4), *nothing[:2], bags, grad).any()


def test_of_nothing():
    memory, _chunks = chunked(oracle.normals((4, 4)), 1)
    none, unseen = np.empty(0, np.int64), np.empty((0, 3), np.float32)
    pool_rows(memory, none, none, unseen, np.array([0]), None, False, unseen)
    assert weight_gradient(memory, none, none, unseen, none, unseen).shape == (0,)
    assert bag_numbers(np.array([0]), 0).shape == (0,)
    assert pad_bags(np.array([0]), 3).shape == (0, 3)


# Gradients


def weights_truth(it, grad):
    """One value after the other."""
    out = np.zeros(len(it.inverse))
    for m in range(len(it.offsets) - 1):
        for i in range(it.offsets[m], it.offsets[m + 1]):
            if it.inverse[i] >= 0:
                out[i] = np.float64(grad[m]) @ np.float64(it.vectors[it.inverse[i]])
    return out


def positions_of(inverse):
    """(unique values that occur, offsets, positions) as `unique_keys` gives them, padding apart."""
    positions = np.argsort(inverse, kind="stable")[np.count_nonzero(inverse < 0) :]
    found, counts = np.unique(inverse[inverse >= 0], return_counts=True)
    return found, np.array([0, *np.cumsum(counts)]), positions


@pytest.mark.parametrize("kind", ["sum", "weighted"])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_directional_derivative(width, kind):
    """The pooled vectors are linear in the rows, so on whole numbers their difference is exact."""
    it, grad = make(30, width, 9), small((30, width), seed=3)
    bags = bag_numbers(it.offsets, len(it.inverse))
    found, offsets, positions = positions_of(it.inverse)
    weights = it.weights if kind == "weighted" else None
    dvectors = segment_sum(grad, offsets, positions, index=bags, weights=weights)
    direction = np.float64(small((len(it.rows), width), seed=4))
    moved = it._replace(vectors=it.vectors + direction)
    change = (np.float64(grad) * (moved.truth(kind) - it.truth(kind))).sum()
    assert change == (np.float64(dvectors) * direction[found]).sum() != 0


def test_directional_derivative_of_the_mean():
    it, grad = make(30, 16, 9), oracle.normals((30, 16), seed=3)
    found, offsets, positions = positions_of(it.inverse)
    each = mean_gradient(grad, it.inverse, it.offsets)
    bags = bag_numbers(it.offsets, len(it.inverse))
    dvectors = segment_sum(each, offsets, positions, index=bags)
    direction = np.float64(small((len(it.rows), 16), seed=4))
    moved = it._replace(vectors=it.vectors + direction)
    change = (np.float64(grad) * (moved.truth("mean") - it.truth("mean"))).sum()
    np.testing.assert_allclose((np.float64(dvectors) * direction[found]).sum(), change, rtol=1e-5)


@pytest.mark.parametrize("shape", oracle.covering(*SIZES, most=140_000), ids=str)
def test_weight_gradient(shape):
    it, (bags, width, _) = make(*shape), shape
    memory, _chunks = chunked(it.stored, 3)
    grad = small((bags, width), seed=3)
    numbers = bag_numbers(it.offsets, len(it.inverse))
    got = weight_gradient(memory, it.rows, it.inverse, it.unseen, numbers, grad)
    oracle.check_exact(got, weights_truth(it, grad))
    direction = small(len(it.inverse), seed=4)
    moved = it._replace(weights=it.weights + direction)
    change = (grad * (moved.truth("weighted") - it.truth("weighted"))).sum()
    assert change == (np.float64(got) * direction).sum()


def test_error_of_the_weight_gradient():
    it, grad = make(50, 130, 20, oracle.normals), oracle.normals((50, 130), seed=3)
    memory, _chunks = chunked(it.stored, 3)
    numbers = bag_numbers(it.offsets, len(it.inverse))
    naive = np.zeros(len(it.inverse), np.float32)
    for d in range(130):
        naive += np.where(it.inverse < 0, 0, it.vectors[it.inverse, d]) * grad[numbers, d]
    got = weight_gradient(memory, it.rows, it.inverse, it.unseen, numbers, grad)
    oracle.check_error(got, naive, weights_truth(it, grad))


def test_same_bits():
    it, grad = make(2000, 10, 20, oracle.normals), oracle.normals((2000, 10), seed=3)
    memory, _chunks = chunked(it.stored, 3)
    numbers = bag_numbers(it.offsets, len(it.inverse))

    def call():
        given = memory, it.rows, it.inverse, it.unseen, numbers, grad
        return *(pooled(it, kind) for kind in KINDS), weight_gradient(*given)

    oracle.check_same_bits(call)


# Sequences


@pytest.mark.parametrize("keep_last", [True, False])
def test_sequences(keep_last):
    """Padded by a gather whose inverse is -1, back by the sum of the gradients at places."""
    it, length = make(20, 3, 9), 4
    at = pad_bags(it.offsets, length, keep_last=keep_last)
    places = np.where(at < 0, -1, it.inverse[at])
    memory, _chunks = chunked(it.stored, 3)
    out = np.full((20 * length, 3), np.nan, np.float32)
    gather_rows(memory, it.rows, places.reshape(-1), it.unseen, out)
    truth = np.zeros((20, length, 3))
    for m in range(20):
        sequence = it.inverse[it.offsets[m] : it.offsets[m + 1]]
        sequence = sequence[-length:] if keep_last else sequence[:length]
        for place, u in enumerate(sequence):
            truth[m, place] = it.vectors[u] if u >= 0 else 0
    oracle.check_exact(out.reshape(20, length, 3), truth)
    grad = small((20, length, 3), seed=3)
    found, offsets, positions = positions_of(places.reshape(-1))
    got = segment_sum(grad.reshape(-1, 3), offsets, positions)
    for u, row in zip(found, got, strict=True):
        oracle.check_exact(row, grad[places == u].sum(axis=0, dtype=np.float64))


# What is refused


@pytest.mark.parametrize(
    ("offsets", "error", "text"),
    [
        (np.array([0.0, 3.0]), TypeError, "'offsets' must be int64 or int32, got float64."),
        (np.array([[0, 3]]), ValueError, "'offsets' must have axes (M + 1), got shape (1, 2)."),
        (np.array([], int), ValueError, "'offsets' must have axes (M + 1), got shape (0,)."),
        (np.array([1, 3]), ValueError, "'offsets' must start at 0, got 1."),
        (np.array([0, 2]), ValueError, "'offsets' must end at N = 3, the values, got 2."),
        (np.array([0, 4]), ValueError, "'offsets' must end at N = 3, the values, got 4."),
        (np.array([0, 2, 1, 0, 3], np.int32), ValueError,
         "'offsets' must never decrease, got 1 after 2 at 2."),
    ],
)  # fmt: skip
def test_offsets_refused(offsets, error, text):
    with pytest.raises(error, match=oracle.sentence(f"f: {text}")):
        check_offsets("f", offsets, 3)


def test_offsets_are_widened():
    for dtype in (np.int32, np.int64):
        got = check_offsets("f", np.array([0, 9, 0, 9, 3, 9], dtype)[::2], 3)
        assert got.dtype == np.int64 and got.flags.c_contiguous
        np.testing.assert_array_equal(got, [0, 0, 3])


GOOD = dict(
    rows=np.array([0, -1]), inverse=np.array([0, 1, 0]), unseen=np.zeros((1, 3), np.float32),
    offsets=np.array([0, 1, 3]), weights=None, mean=False, out=np.zeros((2, 3), np.float32),
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(rows=np.zeros(2)), TypeError, "'rows' must be int64, got float64."),
        (dict(inverse=np.zeros(3, np.int32)), TypeError, "'inverse' must be int64, got int32."),
        (dict(unseen=np.zeros((1, 3))), TypeError, "'unseen' must be float32, got float64."),
        (dict(out=np.zeros((2, 3))), TypeError, "'out' must be float32, got float64."),
        (dict(offsets=np.array([0, 1, 3], np.int32)), TypeError,
         "'offsets' must be int64, got int32."),
        (dict(offsets=np.array([0, 3])), ValueError,
         "'offsets' must have M + 1 = 3 like 'out', got shape (2,)."),
        (dict(unseen=np.zeros((1, 2), np.float32)), ValueError,
         "'unseen' must have D = 3 like 'out', got shape (1, 2)."),
        (dict(unseen=np.zeros((0, 0), np.float32), out=np.zeros((2, 0), np.float32)), ValueError,
         "'out' must have D of at least 1, got shape (2, 0)."),
        (dict(unseen=np.zeros((0, 5), np.float32), out=np.zeros((2, 5), np.float32)), ValueError,
         "rows must have 5 words for 'out' (2, 5) and the state, got a stride of 4."),
        (dict(weights=np.zeros(3)), TypeError, "'weights' must be float32, got float64."),
        (dict(weights=np.zeros(2, np.float32)), ValueError,
         "'weights' must have N = 3 like 'inverse', got shape (2,)."),
        (dict(weights=np.zeros(3, np.float32), mean=True), ValueError,
         "'mean' must be False with 'weights', got True."),
    ],
)  # fmt: skip
def test_pool_refuses(wrong, error, text):
    memory, _chunks = chunked(oracle.normals((4, 4)), 1)
    with pytest.raises(error, match=oracle.sentence(f"pool_rows: {text}")):
        pool_rows(memory, **GOOD | wrong)


def test_gradients_refuse():
    memory, _chunks = chunked(oracle.normals((4, 4)), 1)
    rows, inverse, unseen = (GOOD[name] for name in ("rows", "inverse", "unseen"))
    bags, grad = np.array([0, 1, 1]), np.zeros((2, 3), np.float32)
    for changed, text in [
        ((bags[:2], grad), "'bags' must have N = 3 like 'inverse', got shape (2,)."),
        ((bags, grad[0]), "'grad' must have axes (M, D), got shape (3,)."),
    ]:
        with pytest.raises(ValueError, match=oracle.sentence(f"weight_gradient: {text}")):
            weight_gradient(memory, rows, inverse, unseen, *changed)
    with pytest.raises(TypeError, match=r"^weight_gradient: 'bags' must be int64, got int32\.$"):
        weight_gradient(memory, rows, inverse, unseen, bags.astype(np.int32), grad)
    text = "mean_gradient: 'offsets' must have M + 1 = 3 like 'grad', got shape (2,)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        mean_gradient(grad, inverse, np.array([0, 3]))
    for length, error in [(0, ValueError), (2.0, TypeError)]:
        with pytest.raises(error, match="pad_bags: 'length' must be "):
            pad_bags(np.array([0, 3]), length)

"""bags.cu."""

import numpy as np
import oracle
import pytest
import test_bags
from test_bags import KINDS, make, positions_of, rounded, small, weights_truth
from test_embedding_rows_kernels import chunked

from cupyrec import arrays
from cupyrec.ops.bags import (
    bag_numbers,
    check_offsets,
    mean_gradient,
    pad_bags,
    pool_rows,
    weight_gradient,
)
from cupyrec.ops.embedding_rows import BFLOAT16, FLOAT16, FLOAT32
from cupyrec.ops.segment_sum import segment_sum

SIZES = (1, 17, 127), (1, 3, 4, 16, 64, 130, 1025), (0, 1, 9, 60)


def pooled(xp, it, kind, value=FLOAT32):
    memory, _chunks = chunked(xp, it.stored, 3, value)
    out = xp.full((len(it.offsets) - 1, it.vectors.shape[1]), np.nan, np.float32)
    pool_rows(memory, *it.given(kind, xp.asarray), out)
    return out


def weights(xp, it, grad, value=FLOAT32):
    memory, _chunks = chunked(xp, it.stored, 3, value)
    numbers = bag_numbers(xp.asarray(it.offsets), len(it.inverse))
    there = map(xp.asarray, (it.rows, it.inverse, it.unseen))
    return weight_gradient(memory, *there, numbers, xp.asarray(grad))


@pytest.mark.parametrize("case", oracle.covering(*SIZES, (1, 2, 3), most=200_000), ids=str)
def test_pool_of_integers_is_exact(xp, case):
    it, kind = make(*case[:3]), KINDS[case[3] - 1]
    got = arrays.to_host(pooled(xp, it, kind))
    oracle.check_exact(got, rounded(it.truth(kind)))


@pytest.mark.parametrize("shape", oracle.covering(*SIZES, most=70_000), ids=str)
def test_weight_gradient_of_integers_is_exact(xp, shape):
    it = make(*shape)
    grad = small(shape[:2], seed=3)
    oracle.check_exact(arrays.to_host(weights(xp, it, grad)), weights_truth(it, grad))


@pytest.mark.parametrize("value", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("width", [1, 10, 64, 130])
def test_rows_of_16_bits(xp, width, value):
    it, grad = make(40, width, 9, value=value), small((40, width), seed=3)
    got = arrays.to_host(pooled(xp, it, "weighted", value))
    oracle.check_exact(got, it.truth("weighted"))
    oracle.check_exact(arrays.to_host(weights(xp, it, grad, value)), weights_truth(it, grad))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 16, 130])
def test_error(xp, width, kind):
    it = make(20, width, 100, oracle.normals)
    values = np.where(it.inverse[:, None] >= 0, it.vectors[it.inverse], np.float32(0))
    terms = values * it.weights[:, None] if kind == "weighted" else values
    naive = np.zeros((20, width), np.float32)
    np.add.at(naive, bag_numbers(it.offsets, len(values)), terms)
    if kind == "mean":
        counts = oracle.pool(np.ones((len(it.rows), 1)), it.inverse, it.offsets)
        naive /= counts.astype(np.float32)
    oracle.check_error(arrays.to_host(pooled(xp, it, kind)), naive, it.truth(kind))


def test_error_of_the_weight_gradient(xp):
    it, grad = make(50, 130, 20, oracle.normals), oracle.normals((50, 130), seed=3)
    numbers = bag_numbers(it.offsets, len(it.inverse))
    naive = np.zeros(len(it.inverse), np.float32)
    for d in range(130):
        naive += np.where(it.inverse < 0, 0, it.vectors[it.inverse, d]) * grad[numbers, d]
    oracle.check_error(arrays.to_host(weights(xp, it, grad)), naive, weights_truth(it, grad))


def test_plain_sums_have_the_cpus_bits(xp):
    """Both add up in the order of values."""
    it = make(60, 10, 70, oracle.normals)
    got = arrays.to_host(pooled(xp, it, "sum"))
    assert got.tobytes() == test_bags.pooled(it, "sum").tobytes()


def test_padding_and_empty_bags_are_zeros_whatever_the_rows_hold(xp):
    memory, _chunks = chunked(xp, np.full((4, 4), np.nan, np.float32), 1)
    rows, unseen = xp.arange(4), xp.empty((0, 3), np.float32)
    inverse, offsets = xp.asarray(np.array([-1, -1])), xp.asarray(np.array([0, 0, 2, 2]))
    for given, mean in [(None, False), (None, True), (xp.full(2, np.inf, np.float32), False)]:
        out = xp.full((3, 3), np.nan, np.float32)
        pool_rows(memory, rows, inverse, unseen, offsets, given, mean, out)
        assert not arrays.to_host(out).any()
    grad = xp.full((3, 3), np.inf, np.float32)
    got = weight_gradient(memory, rows, inverse, unseen, bag_numbers(offsets, 2), grad)
    assert not arrays.to_host(got).any()


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [0, 0, 3, 0], [1000], [*range(40)], [0] * 500 + [7] + [0] * 500],
    ids=lambda sizes: f"{len(sizes)} of {max(sizes, default=0)}",
)  # fmt: skip
def test_bag_numbers(xp, sizes):
    offsets = np.array([0, *np.cumsum(sizes, dtype=int)])
    got = bag_numbers(xp.asarray(offsets), int(offsets[-1]))
    np.testing.assert_array_equal(arrays.to_host(got), np.repeat(np.arange(len(sizes)), sizes))


def test_thread_order(xp):
    it, grad = make(100, 10, 20, oracle.normals), oracle.normals((100, 10), seed=3)
    oracle.check_thread_order(
        xp, lambda: (*(pooled(xp, it, kind) for kind in KINDS), weights(xp, it, grad))
    )


# What the array module's functions do, as the CPU's


def test_sequences_and_means(xp):
    it, grad = make(20, 3, 9), small((20, 3), seed=3)
    offsets, inverse = xp.asarray(it.offsets), xp.asarray(it.inverse)
    got = mean_gradient(xp.asarray(grad), inverse, offsets)
    expected = mean_gradient(grad, it.inverse, it.offsets)
    np.testing.assert_array_equal(arrays.to_host(got), expected)
    for keep_last in (True, False):
        got = pad_bags(offsets, 4, keep_last=keep_last)
        expected = pad_bags(it.offsets, 4, keep_last=keep_last)
        np.testing.assert_array_equal(arrays.to_host(got), expected)


def test_gradient_of_rows(xp):
    """By way of the bags' numbers, as a look-up comes back."""
    it, grad = make(40, 10, 9), small((40, 10), seed=3)
    found, offsets, positions = positions_of(it.inverse)
    numbers = bag_numbers(xp.asarray(it.offsets), len(it.inverse))
    there = map(xp.asarray, (grad, offsets, positions))
    got = segment_sum(*there, index=numbers, weights=xp.asarray(it.weights))
    truth = np.zeros((len(found), 10))
    for u, value in enumerate(found):
        for i in np.flatnonzero(it.inverse == value):
            bag = np.searchsorted(it.offsets, i, side="right") - 1
            truth[u] += np.float64(it.weights[i]) * grad[bag]
    oracle.check_exact(arrays.to_host(got), truth)


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([0, 2, 1, 0, 3], "'offsets' must never decrease, got 1 after 2 at 2."),
        ([0, 2], "'offsets' must end at N = 3, the values, got 2."),
        ([1, 3], "'offsets' must start at 0, got 1."),
    ],
)
def test_offsets_refused(xp, offsets, text):
    with pytest.raises(ValueError, match=oracle.sentence(f"f: {text}")):
        check_offsets("f", xp.asarray(np.array(offsets)), 3)


def test_offsets_are_checked_with_one_wait():
    sim = arrays.module("sim")
    with sim.record() as seen:
        got = check_offsets("f", sim.asarray(np.array([0, 1, 1, 3], np.int32)), 3)
    assert seen.syncs == 1
    np.testing.assert_array_equal(arrays.to_host(got), [0, 1, 1, 3])


def test_devices_do_not_mix(xp):
    memory, _chunks = chunked(xp, oracle.normals((4, 4)), 1)
    numbers, out = np.array([0, 1]), np.zeros((1, 3), np.float32)
    with pytest.raises(TypeError, match=r"^pool_rows: arguments must be arrays of one device, "):
        pool_rows(memory, numbers, numbers, out, np.array([0, 2]), None, False, out)
    with pytest.raises(TypeError, match=r"^weight_gradient: arguments must be arrays of one devi"):
        weight_gradient(memory, numbers, numbers, out, numbers, out)


# What they move: (B, F) = (256, 26) bags of up to 7 values of width 64, each another row


@pytest.mark.parametrize("value", [FLOAT32, BFLOAT16])
def test_distinct_rows_are_read_once(value):
    sim, bags = arrays.module("sim"), 256 * 6
    it = make(bags, 64, 7, value=value)
    n = len(it.inverse)
    stored = np.zeros((n, 32 if value else 64), np.float32)
    it = it._replace(stored=stored, rows=np.arange(n), inverse=np.arange(n)[::-1])
    with sim.record() as seen:
        pooled(sim, it, "weighted", value)
    counts = seen.launches[-1].result.counts
    ideal = stored.nbytes + 8 * n + 8 * n + 4 * n + 8 * (bags + 1) + 4 * 64 * bags
    assert counts["bytes_read"] + counts["bytes_written"] <= 1.1 * ideal
    assert counts["sectors"] * 32 <= 1.5 * ideal
    assert counts["longest_warp"] <= 4 * counts["mean_warp"]
    assert not counts["bank_conflicts"]

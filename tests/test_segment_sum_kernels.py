"""segment_sum.cu."""

import numpy as np
import oracle
import pytest
from test_segment_sum import segments, shared, small

from cupyrec import arrays
from cupyrec.ops.segment_sum import segment_sum

SHAPES = oracle.covering(
    (1, 17, 127, 1025), (1, 3, 4, 10, 16, 128, 130, 1025), (1, 20, 1000), most=10**7
)
SHAPES = [shape for shape in SHAPES if shape[0] * shape[1] <= 140_000]


def device_sum(xp, x, offsets, positions, index=None, weights=None):
    there = [a if a is None else arrays.copy_to(xp, a) for a in (index, weights)]
    given = (arrays.copy_to(xp, a) for a in (x, offsets, positions))
    return segment_sum(*given, index=there[0], weights=there[1])


def sums(xp, *given):
    return arrays.to_host(device_sum(xp, *given))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact(xp, shape):
    rows, width, different = shape
    x = oracle.integers((rows, width), -99, 99)
    offsets, positions = segments(rows, different)
    got = sums(xp, x, offsets, positions)
    assert got.dtype == np.float32
    oracle.check_exact(got, oracle.segment_sum(x, offsets, positions))


@pytest.mark.parametrize("lengths", [
    [32] * 40, [1] * 100, [31, 1, 32, 33, 64, 1, 1024, 1, 1023, 2], [2048], [1, 2047], [2047, 1],
    [16, 2000, 16], [1056, 1056], [1000, 24, 1024, 5], [40_000], [33_000, 7, 40], [*range(1, 70)],
], ids=lambda lengths: f"{len(lengths)} of {max(lengths)}")  # fmt: skip
@pytest.mark.parametrize("width", [1, 8])
def test_segments_that_end_at_borders_of_chunks(xp, lengths, width):
    rows = sum(lengths)
    x = oracle.integers((rows, width), -9, 9)
    positions = np.random.default_rng(0).permutation(rows)
    offsets = np.array([0, *np.cumsum(lengths)])
    truth = np.add.reduceat(np.float64(x[positions]), offsets[:-1])
    oracle.check_exact(sums(xp, x, offsets, positions), truth)


@pytest.mark.parametrize("width", [1, 3, 16, 130])
def test_error(xp, width):
    x = oracle.normals((1025, width))
    offsets, positions = segments(1025, 20)
    naive = np.zeros((len(offsets) - 1, width), np.float32)
    np.add.at(naive, np.repeat(np.arange(len(naive)), np.diff(offsets)), x[positions])
    truth = oracle.segment_sum(x, offsets, positions)
    oracle.check_error(sums(xp, x, offsets, positions), naive, truth)


@pytest.mark.parametrize("shape", [(17, 5, 1), (700, 50, 16), (1025, 40, 130)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_values_that_share_rows(xp, shape, weighted):
    *given, weights = shared(*shape, small)
    given.append(weights if weighted else None)
    oracle.check_exact(sums(xp, *given), oracle.segment_sum(*given))


def test_weights_alone(xp):
    weights, (offsets, positions) = small(700), segments(700, 40)
    given = small((700, 3), seed=1), offsets, positions, None, weights
    oracle.check_exact(sums(xp, *given), oracle.segment_sum(*given))


def test_a_segment_of_one_keeps_its_bits(xp):
    x = np.array([[-0.0, np.inf, 1e-45, -3.0]] * 70, np.float32)
    assert sums(xp, x, np.arange(71), np.arange(70)).tobytes() == x.tobytes()


def test_nan_and_inf_stay_in_their_segment(xp):
    x = np.zeros((200, 1), np.float32)
    x[[0, 101, 140], 0] = np.nan, np.inf, -np.inf
    offsets = np.array([0, 100, 140, 141, 150, 200])
    np.testing.assert_array_equal(
        sums(xp, x, offsets, np.arange(200)), [[np.nan], [np.inf], [-np.inf], [0], [0]]
    )


def test_empty_and_views(xp):
    none = np.empty((0, 3), np.float32), np.array([0]), np.arange(0)
    assert device_sum(xp, *none).shape == (0, 3)
    x = oracle.integers((170, 6), -9, 9)
    offsets, positions = segments(170, 5)
    view = arrays.copy_to(xp, x)[:, ::2]
    got = segment_sum(view, arrays.copy_to(xp, offsets), arrays.copy_to(xp, positions))
    oracle.check_exact(arrays.to_host(got), oracle.segment_sum(x[:, ::2], offsets, positions))


def test_thread_order(xp):
    x = oracle.normals((2000, 10))
    offsets, positions = segments(2000, 300)
    oracle.check_thread_order(xp, lambda: [device_sum(xp, x, offsets, positions)])
    x = oracle.normals((1500, 128))  # 6 blocks; segments that reach over several
    offsets, positions = segments(1500, 3)
    oracle.check_thread_order(xp, lambda: [device_sum(xp, x, offsets, positions)])
    given = shared(1500, 100, 10)
    oracle.check_thread_order(xp, lambda: [device_sum(xp, *given)])


def test_refuses(xp):
    x, offsets, positions = (
        arrays.copy_to(xp, a) for a in (np.ones((3, 2)), np.array([0, 3]), np.arange(3))
    )
    text = "segment_sum: 'x' must be float32 or float16 or bfloat16, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        segment_sum(x, offsets, positions)
    with pytest.raises(TypeError, match=r"segment_sum: arguments must be arrays of one device"):
        segment_sum(x.astype(np.float32), offsets, np.arange(3))


@pytest.mark.parametrize("device", ["cpu", None])
def test_rows_without_columns_are_refused(xp, device):
    xp = arrays.module(device) if device else xp
    text = "segment_sum: 'x' must have D of at least 1, got shape (3, 0)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        device_sum(xp, np.empty((3, 0), np.float32), np.array([0, 3]), np.arange(3))


# Zipf 1.2: what a batch of 256 samples with 27 features of width 128 moves


def zipf(rows):
    """(offsets, positions) of ids whose first is met in a fifth of all positions."""
    ids = np.random.default_rng(0).zipf(1.2, rows)
    key = np.unique(ids, return_inverse=True)[1]
    counts = np.bincount(key)
    assert counts.max() > rows / 7
    return np.array([0, *np.cumsum(counts)]), np.argsort(key, kind="stable")


@pytest.mark.parametrize("width", [128, 16])
def test_bytes_and_balance(width):
    sim, rows = arrays.module("sim"), 256 * 27
    offsets, positions = zipf(rows)
    x = oracle.integers((rows, width), -9, 9)
    with sim.record() as seen:
        got = sums(sim, x, offsets, positions)
    oracle.check_exact(got, np.add.reduceat(np.float64(x[positions]), offsets[:-1]))
    counts = [launch.result.counts for launch in seen.launches if launch.result]
    assert len(counts) == 1
    ideal = x.nbytes + offsets.nbytes + positions.nbytes + got.nbytes
    assert sum(c["bytes_read"] + c["bytes_written"] for c in counts) <= 1.5 * ideal
    assert sum(c["sectors"] for c in counts) * 32 <= 2 * ideal
    for c in counts:
        assert c["longest_warp"] <= 4 * c["mean_warp"]
    wavefronts = sum(c["shared_wavefronts"] for c in counts)
    assert sum(c["bank_conflicts"] for c in counts) <= 0.02 * wavefronts

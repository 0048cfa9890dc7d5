"""Embeddings that are given in 16 bits, and their gradients, on every device: rows stay float32."""

import numpy as np
import oracle
import pytest
from test_embedding_rows import chunked as chunked_cpu
from test_embedding_rows_kernels import case, chunked
from test_segment_sum import segments, shared

from cupyrec import arrays, nn
from cupyrec.ops.embedding_rows import BFLOAT16, FLOAT16, FLOAT32, gather_rows
from cupyrec.ops.segment_sum import segment_sum

HALVES = arrays.HALVES
both = pytest.mark.parametrize("dtype", HALVES, ids=str)


def gathered(xp, rows, unique, inverse, unseen, value, dtype):
    memory, _held = chunked_cpu(rows, 3, value) if xp is np else chunked(xp, rows, 3, value)
    out = xp.empty((len(inverse), unseen.shape[1]), dtype)
    gather_rows(memory, *(arrays.copy_to(xp, a) for a in (unique, inverse, unseen)), out)
    return out


@both
@pytest.mark.parametrize("value", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("width", [1, 3, 10, 16, 130])
def test_gather_rounds_to_the_nearest(np_or_xp, width, value, dtype):
    """What float32 would be, rounded once; ties to even, beyond the largest to infinity."""
    rows, unique, inverse, unseen = case(41, width, 127)
    inverse[::9] = -1
    if value == FLOAT32:
        special = 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 65520.0, 1e-7, 3.39e38, np.nan, -0.0
        rows[:, 0] = np.resize(np.float32(special), len(rows))
    else:
        rows.view(np.uint16)[:, 0] = np.random.default_rng(0).integers(2**16, size=len(rows))
    given = rows, unique, inverse, unseen, value
    exact = gathered(np, *given, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = exact.astype(dtype)
    got = arrays.to_host(gathered(np_or_xp, *given, dtype))
    assert got.dtype == dtype
    got, expected = got.astype(np.float32), expected.astype(np.float32)  # of which NaN is known
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[exact == 0]), np.signbit(exact[exact == 0]))


def summed(xp, x, offsets, positions, index=None, weights=None):
    there = [a if a is None else arrays.copy_to(xp, a) for a in (index, weights)]
    given = (arrays.copy_to(xp, a) for a in (x, offsets, positions))
    return arrays.to_host(segment_sum(*given, index=there[0], weights=there[1]))


@both
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (17, 130), (127, 1), (1025, 16)])
def test_segments_of_16_bits_are_summed_in_float32(np_or_xp, rows, width, dtype):
    """Sums that 16 bits don't hold."""
    x = oracle.integers((rows, width), -99, 99, dtype)
    offsets, positions = segments(rows, 5)
    got = summed(np_or_xp, x, offsets, positions)
    assert got.dtype == np.float32
    oracle.check_exact(got, oracle.segment_sum(x, offsets, positions))


@both
def test_error_of_segments(np_or_xp, dtype):
    x, *given, weights = shared(1025, 30, 16)
    x = x.astype(dtype)
    offsets, positions, index = given
    naive = np.zeros((len(offsets) - 1, 16), np.float32)
    terms = weights[positions, None] * x[index[positions]].astype(np.float32)
    np.add.at(naive, np.repeat(np.arange(len(naive)), np.diff(offsets)), terms)
    truth = oracle.segment_sum(x, *given, weights)
    oracle.check_error(summed(np_or_xp, x, *given, weights), naive, truth)


def test_same_bits_in_any_thread_order(xp):
    x = arrays.copy_to(xp, oracle.normals((1025, 10), HALVES[1]))
    offsets, positions = (arrays.copy_to(xp, a) for a in segments(1025, 300))
    oracle.check_thread_order(xp, lambda: [segment_sum(x, offsets, positions)])
    *given, unseen = case(41, 10, 127)
    oracle.check_thread_order(xp, lambda: [gathered(xp, *given, unseen, FLOAT32, HALVES[0])])


# The layer


def embeddings(xp, amp, *arguments, **options):
    """The same tables twice: one gives float32, one 16 bits."""
    made = [nn.MultiTableEmbedding(*arguments, seed=7, **options) for _ in range(2)]
    made[1].amp = str(amp)
    return [one.to(arrays.name(xp)) for one in made]


@pytest.mark.parametrize(
    ("training", "dtype"), [(False, HALVES[1]), *((True, dtype) for dtype in HALVES)], ids=str
)
@pytest.mark.parametrize(
    ("widths", "options", "shape"),
    [
        (6, {}, (17, 3)),
        (6, {"dtype": "bfloat16"}, (17, 3)),
        (6, {"padding_idx": 2}, (5, 3, 4)),
        ([4, 6, 4], {}, (17, 3)),
        (6, {"pooling": "sum"}, (5, 3, 4)),
    ],
    ids=str,
)
def test_the_layer_gives_and_takes_16_bits(np_or_xp, widths, options, shape, training, dtype):
    """Vectors are those of float32, rounded; gradients are summed up in float32."""
    wide, half = (e.train(training) for e in embeddings(np_or_xp, dtype, 3, widths, **options))
    ids = np.random.default_rng(0).integers(0, 5, shape)
    expected, got = (e(np_or_xp.asarray(ids)) for e in (wide, half))
    assert got.dtype == dtype
    rounded = arrays.to_host(expected.data).astype(dtype)
    np.testing.assert_array_equal(arrays.to_host(got.data), rounded)
    assert got.requires_grad == expected.requires_grad == training
    if not training:
        return
    grad = oracle.integers(got.shape, -99, 99, dtype)
    expected.backward(np_or_xp.asarray(grad.astype(np.float32)))
    got.backward(np_or_xp.asarray(grad))
    for a, b in zip(wide.groups.values(), half.groups.values(), strict=True):
        left, right = a.gradients().values, b.gradients().values
        assert right.dtype == np.float32
        np.testing.assert_array_equal(arrays.to_host(right), arrays.to_host(left))


@both
def test_no_launch_casts(sim, dtype):
    ids, names = sim.asarray(np.arange(6).reshape(2, 3)), []
    for embedding in embeddings(sim, dtype, 3, 8):
        embedding(ids)  # new rows are written
        with sim.record() as seen:
            vectors = embedding(ids)
            vectors.backward(sim.asarray(np.ones((2, 3, 8), vectors.dtype)))
        names.append([launch.name for launch in seen.launches])
    assert names[0] == names[1]
    assert names[1].count("gather_rows") == names[1].count("segment_sum") == 1

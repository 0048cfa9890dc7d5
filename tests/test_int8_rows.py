"""Rows of int8 codes behind a scale, on every device, against loops and float64."""

import numpy as np
import oracle
import pytest
from test_bags import KINDS, make
from test_embedding_rows import NO_STATE, keys
from test_embedding_rows import chunked as chunked_cpu
from test_embedding_rows_kernels import case, chunked, moved, unchunked
from test_int8_codec import TINY, decode_in_numpy

from cupyrec import arrays
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.bags import pool_rows, weight_gradient
from cupyrec.ops.catch_up_adam import catch_up_rows, caught_up_vectors
from cupyrec.ops.embedding_rows import FLOAT32, INT8, gather_rows, write_rows
from cupyrec.ops.sgd import sgd_rows

WIDTHS = 1, 3, 4, 10, 16, 128, 130, 1025


def memory_of(xp, rows, value=INT8):
    return chunked_cpu(rows, 3, value) if xp is np else chunked(xp, rows, 3, value)


def words(vectors, states, stride):
    """(N, stride) words that rows must have: a scale, codes, zeros up to a word, the state."""
    lines, width = np.zeros((len(vectors), stride), np.float32), vectors.shape[1]
    begin = 1 + -(-width // 4)
    for line, x in zip(lines, vectors, strict=True):
        line[0] = np.abs(x).max()
        t = (x / line[0] * np.float32(127)).astype(float)
        line.view(np.int8)[4 : 4 + width] = np.trunc(t + np.copysign(0.5, t))
    lines[:, begin : begin + states.shape[1]] = states
    return lines


def random_rows(n, width, seed=0):
    """Rows of any codes and scales; NaN behind them."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-127, 128, (n, width), dtype=np.int8)
    scales = np.float32(10.0) ** generator.integers(-36, 37, n).astype(np.float32)
    scales[:3] = 0, TINY, np.float32(1.5e-38)
    lines = np.full((n, (width + 11) // 16 * 4 + 4), np.nan, np.float32)
    lines[:, 0] = scales
    lines.view(np.int8)[:, 4 : 4 + width] = codes
    return lines, decode_in_numpy(codes, scales)


def gathered(xp, rows, unique, inverse, unseen, dtype=np.float32):
    memory, chunks = memory_of(xp, rows)
    out = xp.empty((len(inverse), unseen.shape[1]), dtype)
    gather_rows(memory, *moved(xp, unique, inverse, unseen), out)
    assert unchunked(chunks, len(rows)).tobytes() == rows.tobytes()
    return arrays.to_host(out)


@pytest.mark.parametrize(
    "shape", oracle.covering((0, 1, 17, 127, 1025), WIDTHS, most=40_000), ids=str
)
def test_gather_decodes_to_the_bit(np_or_xp, shape):
    outputs, width = shape
    rows, vectors = random_rows(41, width)
    _, unique, inverse, unseen = case(41, width, outputs)
    expected = np.concatenate([vectors, unseen[::-1]])[unique][inverse]
    inverse[::9], expected[::9] = -1, 0
    got = gathered(np_or_xp, rows, unique, inverse, unseen)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", arrays.HALVES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 16, 130])
def test_gather_rounds_once_to_16_bits(np_or_xp, width, dtype):
    rows, _ = random_rows(41, width)
    _, *given = case(41, width, 127)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gathered(np, rows, *given).astype(dtype)
    got = gathered(np_or_xp, rows, *given, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    "shape",
    oracle.covering((0, 1, 3, 17, 127),
                    ((1, 4, 0), (3, 8, 3), (4, 8, 4), (9, 12, 1), (10, 24, 20), (128, 36, 2),
                     (130, 296, 260), (1025, 260, 2)), (False, True)),
    ids=str,
)  # fmt: skip
def test_write_fills_its_rows_and_nothing_else(np_or_xp, shape):
    n, (width, stride, state), common = shape
    before = oracle.normals((n + 20, stride))
    memory, chunks = memory_of(np_or_xp, before)
    vectors = oracle.normals((n, width), seed=1)
    vectors[: n // 3] *= np.float32(1e-30)
    states = oracle.normals((1 if common else n, state), seed=2)
    write_rows(memory, 7, *moved(np_or_xp, vectors, states))
    after = unchunked(chunks, n + 20)
    assert after[7 : 7 + n].tobytes() == words(vectors, states, stride).tobytes()
    np.testing.assert_array_equal(after[:7], before[:7])
    np.testing.assert_array_equal(after[7 + n :], before[7 + n :])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_number_is_off_by_half_a_step_at_most(np_or_xp, width):
    vectors = oracle.normals((60, width)) * 10.0 ** np.linspace(-30, 30, 60)[:, None]
    vectors = vectors.astype(np.float32)
    lines = np.zeros((60, (width + 7) // 4 * 4), np.float32)
    memory, chunks = memory_of(np_or_xp, lines)
    write_rows(memory, 0, *moved(np_or_xp, vectors, NO_STATE))
    every, none = np.arange(60), np.empty((0, width), np.float32)
    got = gathered(np_or_xp, unchunked(chunks, 60), every, every, none).astype(float)
    scale = np.abs(vectors.astype(float)).max(axis=1, keepdims=True)
    rounding = 3 * 2.0**-24  # of quotient, product and step
    assert (np.abs(got - vectors) <= scale * (1 / 254 + rounding)).all()
    assert (np.abs(got).max(axis=1) >= (1 - rounding) * scale[:, 0]).all()  # the largest stays


# A kind a width; of words of one, two and four codes every kind.
BAGS = [(width, KINDS[i % 3]) for i, width in enumerate(WIDTHS[:-1])]
BAGS += [(3, "weighted"), (10, "mean"), (130, "weighted")]


@pytest.mark.parametrize(("width", "kind"), BAGS)
def test_bags_are_those_of_the_decoded_vectors(np_or_xp, width, kind):
    """Bit for bit; and whole numbers, whose scale is 127, come out exactly."""
    it, xp = make(40, width, 70), np_or_xp
    for whole in (False, True):
        n = len(it.stored)
        if whole:
            vectors = oracle.integers((n, width), -127, 127)
            vectors[:, 0] = 127
            lines = words(vectors, NO_STATE, (width + 7) // 4 * 4)
        else:
            lines, vectors = random_rows(n, width)
            vectors /= np.float32(1e10)  # so that sums stay finite
            lines[:, 0] /= np.float32(1e10)
            vectors = decode_in_numpy(lines.view(np.int8)[:, 4 : 4 + width], lines[:, 0])
        wide = np.full((n, (width + 3) // 4 * 4), np.nan, np.float32)
        wide[:, :width] = vectors
        results = []
        for rows, value in ((lines, INT8), (wide, FLOAT32)):
            memory, _chunks = memory_of(xp, rows, value)
            out = xp.full((40, width), np.nan, np.float32)
            pool_rows(memory, *it.given(kind, lambda a: arrays.copy_to(xp, a)), out)
            results.append(arrays.to_host(out))
        assert results[0].tobytes() == results[1].tobytes()
        if whole:
            own = np.concatenate([vectors, it.unseen[::-1]])[it.rows]
            truth = it._replace(vectors=own).truth(kind)
            oracle.check_exact(results[0], truth.astype(np.float32).astype(float))


@pytest.mark.parametrize("width", [3, 130])
def test_thread_order(xp, width):
    rows, _ = random_rows(100, width)
    _, *given = case(100, width, 300)
    vectors, it = oracle.normals((60, width), seed=2), make(20, width, 30)
    stored, _ = random_rows(len(it.stored), width)

    def call():
        memory, chunks = chunked(xp, rows, 4, INT8)
        write_rows(memory, 11, *moved(xp, vectors, NO_STATE))
        out = xp.empty((300, width), np.float32)
        gather_rows(memory, *moved(xp, *given), out)
        pooled = xp.empty((20, width), np.float32)
        memory, more = chunked(xp, stored, 4, INT8)
        pool_rows(memory, *it.given("weighted", xp.asarray), pooled)
        return out, pooled, *chunks, *more

    oracle.check_thread_order(xp, call)


def test_rows_do_not_learn(np_or_xp):
    rows, _ = random_rows(8, 3)
    rows = np.pad(rows, ((0, 0), (0, 8)))
    memory, chunks = memory_of(np_or_xp, rows)
    at, g = moved(np_or_xp, np.arange(2), np.zeros((2, 3), np.float32))
    history = AdamHistory(beta1=0.5, beta2=0.5, eps=1e-8, rates=[0.1])
    for name, call in [
        ("sgd_rows", lambda: sgd_rows(memory, at, g, lr=0.1)),
        ("catch_up_rows", lambda: catch_up_rows(memory, at, 3, history)),
        ("caught_up_vectors", lambda: caught_up_vectors(memory, at, 3, history)),
        ("weight_gradient", lambda: weight_gradient(memory, at, at, g[:0], at, g)),
    ]:
        text = f"{name}: rows must be of float32, float16 or bfloat16 to learn, got int8."
        with pytest.raises(ValueError, match=oracle.sentence(text)):
            call()
    text = "write_rows: 'rounding' must be None for rows of int8, got one of step 3."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        write_rows(memory, 0, g, np_or_xp.asarray(NO_STATE), keys(2))
    text = (
        "write_rows: rows must have 14 words for 'vectors' (2, 49) and the state, got a stride of"
    )
    with pytest.raises(ValueError) as told:
        write_rows(
            memory._replace(stride=12), 0, *moved(np_or_xp, np.zeros((2, 49), "f"), NO_STATE)
        )
    assert str(told.value).startswith(text)
    assert unchunked(chunks, 8).tobytes() == rows.tobytes()

import numpy as np
import oracle
import pytest
from test_embedding_rows import chunked, keys, unchunked

from cupyrec.ops.adam import adam_rows
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.catch_up_adam import catch_up_adam_rows, catch_up_rows, caught_up_vectors
from cupyrec.ops.row_memory import RowMemory, vector_words
from cupyrec.ops.stochastic_rounding import BFLOAT16, FLOAT16

f32 = np.float32
ADAM = dict(beta1=0.9, beta2=0.999, eps=1e-8)
every_decay = pytest.mark.parametrize("decay", [0.0, 0.3])


def parts(rows, width):
    return [rows[..., i * width : (i + 1) * width] for i in range(3)]


def reached(rows, width):
    """Their last step, an int32 behind v."""
    return rows[..., 3 * width : 3 * width + 1].view(np.int32)[..., 0]


def make_rows(n, width, last, seed=0):
    """Rows after some steps; weights of .05, gradients of 1e-4, and the padding is 9."""
    rows = np.full((n, 3 * width // 4 * 4 + 4), 9, f32)
    w, m, v = parts(rows, width)
    g = 1e-4 * oracle.normals((n, width), seed=seed)
    w[...], m[...] = 0.05 * oracle.normals((n, width), seed=seed + 1), 0.3 * g
    v[...] = 0.1 * g**2 + 1e-12
    reached(rows, width)[...] = last
    return rows


def naive_step(w, m, v, lr, t, history):
    """A step with gradient 0 in float32, one rounding an operation."""
    w *= f32(1 - lr * history.weight_decay)
    m *= f32(history.beta1)
    v *= f32(history.beta2)
    denominator = np.sqrt(v) / f32((1 - history.beta2**t) ** 0.5) + f32(history.eps)
    w -= f32(lr / (1 - history.beta1**t)) * (m / denominator)


def true_step(w, m, v, lr, t, history):
    oracle.adam(
        w, m, v, np.zeros_like(w), lr=lr, t=t, beta1=history.beta1, beta2=history.beta2,
        eps=history.eps, weight_decay=history.weight_decay,
    )  # fmt: skip


def replayed(rows, width, history, step=true_step, dtype=np.float64):
    """(w, m, v) of the rows at the last step, each step taken."""
    values, last = [part.astype(dtype) for part in parts(rows, width)], reached(rows, width)
    for t, lr in enumerate(history.rates, 1):
        moving = (last > 0) & (last < t)
        taken = [part[moving] for part in values]
        step(*taken, lr, t, history)
        for part, now in zip(values, taken, strict=True):
            part[moving] = now
    return values


# Exact


@pytest.mark.parametrize(("n", "width"), [(0, 4), (1, 1), (3, 17), (17, 3), (127, 10), (3, 1025)])
def test_moments_are_exact_and_rates_of_0_move_nothing(n, width):
    start = make_rows(n + 2, width, 0)
    w, m, v = parts(start, width)
    w[...], m[...] = oracle.integers(w.shape, -99, 99), 2.0**9 * oracle.integers(w.shape, -99, 99)
    v[...] = 4.0**9 * oracle.integers(w.shape, 1, 9)
    reached(start, width)[...] = np.arange(n + 2) % 10  # 0: never updated
    memory, chunks = chunked(start, 3)
    history = AdamHistory(beta1=0.5, beta2=0.25, eps=1e-8, rates=np.zeros(9))
    truth = replayed(start, width, history)
    rows = np.random.default_rng(0).permutation(n + 2)[:n]
    vectors = caught_up_vectors(memory, rows, width, history)
    np.testing.assert_array_equal(unchunked(chunks, n + 2), start)
    catch_up_rows(memory, rows, width, history)
    after = unchunked(chunks, n + 2)
    oracle.check_exact(vectors, truth[0][rows])
    for got, expected in zip(parts(after, width), truth, strict=True):
        oracle.check_exact(got[rows], expected[rows])
    at = reached(start, width)
    np.testing.assert_array_equal(reached(after, width)[rows], np.where(at, 9, 0)[rows])
    others = np.setdiff1d(np.arange(n + 2), rows)
    assert after[others].tobytes() == start[others].tobytes()
    assert (after[:, 3 * width + 1 :] == 9).all()


# Rounding


@every_decay
@pytest.mark.parametrize("width", [1, 10, 130])
def test_error(width, decay):
    start = make_rows(20, width, 0)
    reached(start, width)[...] = np.arange(20) * 4
    history = AdamHistory(**ADAM, weight_decay=decay, rates=np.full(100, 0.01))
    memory, chunks = chunked(start, 2)
    truth = replayed(start, width, history)
    naive = replayed(start, width, history, naive_step, f32)
    catch_up_rows(memory, np.arange(20), width, history)
    for a, b, c in zip(parts(unchunked(chunks, 20), width), naive, truth, strict=True):
        oracle.check_error(a, b, c)


@every_decay
def test_equals_dense_adam_over_300_steps(decay):
    """Ids by Zipf's law come, and go for long; rates warm up from 0, fall, and rise once more."""
    n, width, batch = 400, 8, 16
    generator = np.random.default_rng(0)
    start = make_rows(n, width, 0)
    for moment in parts(start, width)[1:]:
        moment[...] = 0
    memory, chunks = chunked(start, 5)
    truth, born = [np.float64(part) for part in parts(start, width)], np.zeros(n, bool)
    history = AdamHistory(**ADAM, weight_decay=decay)
    likely = np.arange(1, n + 1) ** -1.1
    longest, last = 0, np.zeros(n, int)
    for t in range(1, 301):
        rows = np.unique(generator.choice(n, batch, p=likely / likely.sum()))
        seen = caught_up_vectors(memory, rows, width, history)
        catch_up_rows(memory, rows, width, history)
        read = unchunked(chunks, n)[rows, :width]
        np.testing.assert_array_equal(seen, read)
        assert np.abs(read - truth[0][rows]).max() <= 1e-5 * np.abs(truth[0]).max()
        g = np.zeros((n, width), f32)
        g[rows] = 1e-3 * oracle.normals((len(rows), width), seed=t)
        lr = 0.01 * (t - 1) / 40 if t <= 40 else 0.01 / (1 + (t - 40) % 150)
        history.append(lr)
        catch_up_adam_rows(memory, rows, g[rows], history)
        longest = max(longest, *(t - last[rows])[last[rows] > 0], 0)
        born[rows], last[rows] = True, t
        values = [part[born] for part in truth]
        oracle.adam(*values, g[born], lr=lr, t=t, weight_decay=decay, **ADAM)
        for part, now in zip(truth, values, strict=True):
            part[born] = now
    assert longest > 200
    assert 0 < (~born).sum() < n / 2
    vectors = caught_up_vectors(memory, np.arange(n), width, history)
    assert np.abs(vectors - truth[0]).max() <= 1e-5 * np.abs(truth[0]).max()


# Where a replay ends

SCHEDULES = {
    "constant": np.full(1000, 1e-3),
    "warm-up from 0": np.minimum(1e-2, 1e-4 * np.maximum(0, np.arange(1000) - 40)),
    "step up": np.where(np.arange(1000) < 100, 1e-6, 0.1),
    "pauses": np.where(np.arange(1000) // 30 % 2, 1e-2, 0),
    "fall": 0.1 * 0.98 ** np.arange(1000),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("beta1", "beta2", "eps", "decay"),
    [
        (0.9, 0.999, 1e-8, 0.0), (0.9, 0.999, 1e-8, 0.1), (0.99, 0.999, 1e-8, 0.0),
        (0.9, 0.9, 1e-4, 0.0), (0.0, 0.999, 1e-8, 0.1), (0.9, 0.8, 1e-2, 0.0),
    ],
)  # fmt: skip
def test_replay_ends_where_nothing_moves(schedule, beta1, beta2, eps, decay):
    """Within 1e-6 of the largest weight, or nearer than dense Adam in float32; with steps of no or
    little movement in between."""
    history = AdamHistory(
        beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, rates=SCHEDULES[schedule]
    )
    start = make_rows(12, 7, 0)
    reached(start, 7)[...] = 1, 5, 20, 39, 41, 60, 80, 99, 100, 300, 800, 999
    memory, chunks = chunked(start, 5)
    truth = replayed(start, 7, history)
    catch_up_rows(memory, np.arange(12), 7, history)
    w, m, v = parts(unchunked(chunks, 12), 7)
    naive = replayed(start, 7, history, naive_step, f32)[0]
    bar = max(1e-6 * np.abs(truth[0]).max(), np.abs(naive - truth[0]).max())
    assert np.abs(w - truth[0]).max() <= bar
    np.testing.assert_allclose(m, truth[1], rtol=3e-7, atol=1e-37)
    np.testing.assert_allclose(v, truth[2], rtol=3e-7, atol=1e-37)


@every_decay
def test_long_absence_costs_no_more(decay):
    """What lies 400 steps ahead is never read; decay goes on to the end."""
    history = AdamHistory(**ADAM, weight_decay=decay, rates=np.full(10**5, 1e-3))
    start = make_rows(5, 16, 1000)
    memory, chunks = chunked(start, 3)
    short = AdamHistory(**ADAM, weight_decay=decay, rates=np.full(1400, 1e-3))
    now = replayed(start, 16, short)[0]
    history.for_loops()[0][1401:] = np.nan
    catch_up_rows(memory, np.arange(5), 16, history)
    w, m, _ = parts(unchunked(chunks, 5), 16)
    expected = now * (1 - 1e-3 * decay) ** (10**5 - 1400)
    np.testing.assert_allclose(w, expected, atol=1e-6 * np.abs(expected).max())
    assert not m.any()


def test_odd_values_stay_in_their_element():
    """v = 0 leaves eps; m and w may be 0, subnormal, infinite or NaN."""
    start = make_rows(1, 8, 3)
    w, m, v = parts(start, 8)
    w[0, 0] = 0
    w[0, 1], m[0, 1] = 0, 0
    m[0, 2], v[0, 2] = 1e-9, 0
    m[0, 3], v[0, 3] = 1e-40, 1e-40
    m[0, 4] = np.nan
    v[0, 5] = np.nan
    w[0, 6] = np.inf
    memory, chunks = chunked(start, 0)
    history = AdamHistory(**ADAM, rates=np.full(3000, 1e-3))
    with np.errstate(invalid="ignore"):
        truth = replayed(start, 8, history)[0]
    catch_up_rows(memory, np.arange(1), 8, history)
    after = parts(unchunked(chunks, 1), 8)[0]
    np.testing.assert_allclose(after, truth, rtol=1e-6)
    np.testing.assert_array_equal(np.isnan(after[0]), [0, 0, 0, 0, 1, 1, 0, 0])


# Look-ups


def test_looked_up_twice_and_evaluated_in_between():
    history = AdamHistory(**ADAM, weight_decay=0.1, rates=np.full(50, 1e-2))
    start = make_rows(6, 5, 10)
    memory, chunks = chunked(start, 1)
    rows = np.array([4, 0, 3])
    catch_up_rows(memory, rows, 5, history)
    once = unchunked(chunks, 6)
    catch_up_rows(memory, rows, 5, history)
    np.testing.assert_array_equal(unchunked(chunks, 6), once)
    history.extend([1e-2, 0.0])
    vectors = caught_up_vectors(memory, np.array([3, 3, 5]), 5, history)
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert unchunked(chunks, 6).tobytes() == once.tobytes()
    catch_up_rows(memory, np.arange(6), 5, history)
    after = unchunked(chunks, 6)
    np.testing.assert_array_equal(after[[3, 5], :5], vectors[1:])
    for got, expected in zip(parts(after, 5), replayed(start, 5, history), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())


def test_first_seen_in_evaluation():
    """Its row rests, undecayed, until its first update, which is that of lazy Adam."""
    history = AdamHistory(**ADAM, weight_decay=0.1, rates=np.full(50, 1e-2))
    start = make_rows(2, 5, 0)
    for moment in parts(start, 5)[1:]:
        moment[...] = 0
    memory, chunks = chunked(start, 1)
    vectors = caught_up_vectors(memory, np.arange(2), 5, history)
    np.testing.assert_array_equal(vectors, start[:, :5])
    catch_up_rows(memory, np.arange(2), 5, history)
    assert unchunked(chunks, 2).tobytes() == start.tobytes()
    g = oracle.normals((2, 5))
    history.append(3e-2)
    catch_up_adam_rows(memory, np.arange(2), g, history)
    lazy, expected = chunked(start, 1)
    adam_rows(lazy, np.arange(2), g, lr=3e-2, t=51, weight_decay=0.1, **ADAM)
    after = unchunked(chunks, 2)
    np.testing.assert_array_equal(after[:, :15], unchunked(expected, 2)[:, :15])
    np.testing.assert_array_equal(reached(after, 5), [51, 51])


def test_skipped_step_has_gradient_0():
    history = AdamHistory(**ADAM, rates=np.full(50, 1e-2))
    start = make_rows(2, 5, 50)
    memory, chunks = chunked(start, 1)
    history.append(1e-2)
    g = oracle.normals((2, 5))
    catch_up_adam_rows(memory, np.arange(2), g, history, scale=float("nan"))
    assert unchunked(chunks, 2).tobytes() == start.tobytes()
    catch_up_rows(memory, np.arange(2), 5, history)
    np.testing.assert_allclose(
        unchunked(chunks, 2)[:, :5], replayed(start, 5, history)[0], rtol=1e-6
    )


def short_rows(rows, width, value):
    """The same rows with vectors of 16 bits, and those vectors as float32."""
    begin, short = vector_words(width, value), np.full_like(rows, 9)
    codes = oracle.round_rows(rows[:, :width], *keys(len(rows)), value)
    short.view(np.uint16)[:, :width] = codes
    short[:, begin : begin + 2 * width + 1] = rows[:, width : 3 * width + 1]
    wide = codes.view(np.float16) if value == FLOAT16 else (codes.astype(np.uint32) << 16).view(f32)
    return short, wide.astype(f32)


@pytest.mark.parametrize(("value", "width"), [(FLOAT16, 5), (BFLOAT16, 6)])
def test_rows_of_16_bits_are_those_of_32_rounded(value, width):
    n, start = 30, make_rows(30, width, 10)
    short, start[:, :width] = short_rows(start, width, value)
    memory, chunks = chunked(short, 2, value)
    as_float32, expected = chunked(start, 2)
    history, rows = AdamHistory(**ADAM, rates=np.full(40, 1e-3)), np.arange(n)[::-1]
    vectors = caught_up_vectors(memory, rows, width, history)
    np.testing.assert_array_equal(vectors, caught_up_vectors(as_float32, rows, width, history))
    catch_up_rows(memory, rows, width, history, keys(n))
    catch_up_rows(as_float32, rows, width, history)
    after, expected, begin = (
        unchunked(chunks, n),
        unchunked(expected, n),
        vector_words(width, value),
    )
    codes = oracle.round_rows(expected[rows, :width], *keys(n), value)
    np.testing.assert_array_equal(after.view(np.uint16)[rows, :width], codes)
    state = slice(begin, begin + 2 * width + 1)
    assert after[:, state].tobytes() == expected[:, width : 3 * width + 1].tobytes()


def test_same_bits():
    start = make_rows(2000, 13, 0)
    reached(start, 13)[...] = np.arange(2000) % 90
    order = np.random.default_rng(0).permutation(2000)
    history = AdamHistory(**ADAM, weight_decay=0.1, rates=np.full(90, 1e-2))

    def call():
        memory, chunks = chunked(start, 6)
        vectors = caught_up_vectors(memory, order, 13, history)
        catch_up_rows(memory, order, 13, history)
        return vectors, unchunked(chunks, 2000)

    oracle.check_same_bits(call)


# Refusals


def test_update_refuses():
    memory, chunks = chunked(make_rows(2, 5, 1), 1)
    g, history = np.zeros((2, 5), f32), AdamHistory(**ADAM, rates=[0.1])
    for arguments, error, text in [
        ((np.arange(2.0), g, history), TypeError, "'rows' must be int64, got float64."),
        ((np.arange(2), np.zeros((2, 6), f32), history), ValueError,
         "rows must have 19 words for 'g' (2, 6) and the state, got a stride of 16."),
        ((np.arange(2), g, AdamHistory(**ADAM)), ValueError,
         "'history' must have at least 1 step, got 0."),
    ]:  # fmt: skip
        with pytest.raises(error, match=oracle.sentence(f"catch_up_adam_rows: {text}")):
            catch_up_adam_rows(memory, *arguments)
    np.testing.assert_array_equal(unchunked(chunks, 2), make_rows(2, 5, 1))
    catch_up_adam_rows(memory, np.arange(2), g, history)


@pytest.mark.parametrize("op", [catch_up_rows, caught_up_vectors])
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(rows=np.arange(2.0)), TypeError, "'rows' must be int64, got float64."),
        (dict(rows=np.zeros((1, 1), int)), ValueError,
         "'rows' must have axes (U), got shape (1, 1)."),
        (dict(width=0), ValueError, "'width' must be at least 1, got 0."),
        (dict(width=6), ValueError,
         "rows must have 19 words for a width of 6 and the state, got a stride of 16."),
    ],
)  # fmt: skip
def test_catch_up_refuses(op, wrong, error, text):
    start = make_rows(2, 5, 1)
    memory, chunks = chunked(start, 1)
    history = AdamHistory(**ADAM, rates=[0.1, 0.1])
    with pytest.raises(error, match=oracle.sentence(f"{op.__name__}: {text}")):
        op(memory, **dict(rows=np.arange(2), width=5, history=history) | wrong)
    np.testing.assert_array_equal(unchunked(chunks, 2), start)


def test_catch_up_refuses_other_roundings():
    memory = RowMemory(np.zeros(1, np.uint64), 0, 16, BFLOAT16)
    history = AdamHistory(**ADAM, rates=[0.1, 0.1])
    text = "catch_up_rows: 'rounding' must be given for rows of 16 bits, got None."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        catch_up_rows(memory, np.arange(1), 5, history)

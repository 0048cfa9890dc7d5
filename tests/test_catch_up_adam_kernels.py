import numpy as np
import oracle
import pytest
from test_catch_up_adam import (
    ADAM,
    every_decay,
    f32,
    make_rows,
    naive_step,
    parts,
    reached,
    replayed,
    short_rows,
)
from test_catch_up_adam import chunked as chunked_on_host
from test_embedding_rows import keys
from test_update_kernels import chunked, moved, unchunked

from cupyrec import arrays
from cupyrec.ops import catch_up_adam
from cupyrec.ops.adam import adam_rows
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.catch_up_adam import catch_up_adam_rows, catch_up_rows, caught_up_vectors
from cupyrec.ops.row_memory import vector_words
from cupyrec.ops.stochastic_rounding import BFLOAT16, FLOAT16


@pytest.mark.parametrize(
    ("n", "width"),
    [*oracle.covering([1, 3, 17, 127], [1, 3, 4, 10, 16, 128, 130], most=3000), (0, 4), (2, 1025)],
)
def test_moments_are_exact_and_rates_of_0_move_nothing(xp, n, width):
    start = make_rows(n + 2, width, 0)
    w, m, v = parts(start, width)
    w[...], m[...] = oracle.integers(w.shape, -99, 99), 2.0**9 * oracle.integers(w.shape, -99, 99)
    v[...] = 4.0**9 * oracle.integers(w.shape, 1, 9)
    reached(start, width)[...] = np.arange(n + 2) % 10  # 0: never updated
    memory, chunks = chunked(xp, start, 3)
    history = AdamHistory(beta1=0.5, beta2=0.25, eps=1e-8, rates=np.zeros(9))
    truth = replayed(start, width, history)
    rows = np.random.default_rng(0).permutation(n + 2)[:n]
    vectors = arrays.to_host(caught_up_vectors(memory, xp.asarray(rows), width, history))
    np.testing.assert_array_equal(unchunked(chunks, n + 2), start)
    catch_up_rows(memory, xp.asarray(rows), width, history)
    after = unchunked(chunks, n + 2)
    oracle.check_exact(vectors, truth[0][rows])
    for got, expected in zip(parts(after, width), truth, strict=True):
        oracle.check_exact(got[rows], expected[rows])
    at = reached(start, width)
    np.testing.assert_array_equal(reached(after, width)[rows], np.where(at, 9, 0)[rows])
    others = np.setdiff1d(np.arange(n + 2), rows)
    assert after[others].tobytes() == start[others].tobytes()
    assert (after[:, 3 * width + 1 :] == 9).all()


@every_decay
@pytest.mark.parametrize("width", [3, 16, 130])
def test_error_and_devices_agree(xp, width, decay):
    start = make_rows(9, width, 0)
    reached(start, width)[...] = 0, 1, 5, 20, 21, 30, 31, 39, 40
    history = AdamHistory(**ADAM, weight_decay=decay, rates=np.linspace(0, 0.02, 40))
    memory, chunks = chunked(xp, start, 2)
    truth = replayed(start, width, history)
    naive = replayed(start, width, history, naive_step, f32)
    on_host, host_chunks = chunked_on_host(start, 2)
    catch_up_rows(memory, xp.arange(9), width, history)
    catch_up_rows(on_host, np.arange(9), width, history)
    after, expected = unchunked(chunks, 9), unchunked(host_chunks, 9)
    for a, b, c, d in zip(parts(after, width), naive, truth, parts(expected, width), strict=True):
        oracle.check_error(a, b, c)
        np.testing.assert_allclose(a, d, rtol=1e-6, atol=1e-6 * np.abs(d).max())


def test_replay_ends_where_nothing_moves(xp):
    """Rates warm up from 0 after some rows have gone; what lies far ahead is not read."""
    rates = np.where(np.arange(1000) < 60, 0, 1e-2)
    start = make_rows(3, 8, 0)
    reached(start, 8)[...] = 10, 30, 59
    memory, chunks = chunked(xp, start, 2)
    history = AdamHistory(**ADAM, rates=rates)
    truth = replayed(start, 8, history)
    history.for_loops()[0][500:] = np.nan
    catch_up_rows(memory, xp.arange(3), 8, history)
    w, m, v = parts(unchunked(chunks, 3), 8)
    assert np.abs(w - truth[0]).max() <= 1e-6 * np.abs(truth[0]).max()
    np.testing.assert_allclose(m, truth[1], rtol=3e-7, atol=1e-37)
    np.testing.assert_allclose(v, truth[2], rtol=3e-7, atol=1e-37)


def test_updates_after_catch_up(xp):
    """They are lazy Adam's, and note the step; where `scale` is NaN nothing is written."""
    history = AdamHistory(**ADAM, weight_decay=0.1, rates=np.full(50, 1e-2))
    start, g = make_rows(6, 10, 49), oracle.normals((4, 10))
    rows = xp.asarray(np.array([4, 0, 3, 5]))
    memory, chunks = chunked(xp, start, 1)
    catch_up_adam_rows(memory, rows, xp.asarray(g), history, scale=xp.full(1, np.nan, f32))
    assert unchunked(chunks, 6).tobytes() == start.tobytes()
    catch_up_adam_rows(memory, rows, xp.asarray(g), history)
    lazy, expected = chunked(xp, start, 1)
    adam_rows(lazy, rows, xp.asarray(g), lr=1e-2, t=50, weight_decay=0.1, **ADAM)
    after = unchunked(chunks, 6)
    np.testing.assert_array_equal(reached(after, 10), [50, 49, 49, 50, 50, 50])
    reached(after, 10)[...] = 49
    np.testing.assert_array_equal(after, unchunked(expected, 6))


@pytest.mark.parametrize(("value", "width"), [(FLOAT16, 5), (BFLOAT16, 16)])
def test_rows_of_16_bits_are_those_of_32_rounded(xp, value, width):
    n, start = 30, make_rows(30, width, 10)
    short, start[:, :width] = short_rows(start, width, value)
    memory, chunks = chunked(xp, short, 2)
    memory, rounding = memory._replace(value=value), keys(n)
    on_device = rounding._replace(tables=xp.asarray(rounding.tables), ids=xp.asarray(rounding.ids))
    as_float32, expected = chunked(xp, start, 2)
    history, rows = AdamHistory(**ADAM, rates=np.full(20, 1e-3)), xp.arange(n)
    vectors, others = (
        arrays.to_host(caught_up_vectors(held, rows, width, history))
        for held in (memory, as_float32)
    )
    np.testing.assert_array_equal(vectors, others)
    catch_up_rows(memory, rows, width, history, on_device)
    catch_up_rows(as_float32, rows, width, history)
    after, expected, begin = (
        unchunked(chunks, n),
        unchunked(expected, n),
        vector_words(width, value),
    )
    codes = oracle.round_rows(expected[:, :width], *rounding, value)
    np.testing.assert_array_equal(after.view(np.uint16)[:, :width], codes)
    state = slice(begin, begin + 2 * width + 1)
    assert after[:, state].tobytes() == expected[:, width : 3 * width + 1].tobytes()


def test_same_bits_in_any_order(xp):
    start = make_rows(40, 10, 0)
    reached(start, 10)[...] = np.arange(40)
    order = np.random.default_rng(0).permutation(40)[:37]
    history = AdamHistory(**ADAM, weight_decay=0.1, rates=np.full(40, 1e-2))

    def call():
        memory, chunks = chunked(xp, start, 3)
        vectors = caught_up_vectors(memory, xp.asarray(order), 10, history)
        catch_up_rows(memory, xp.asarray(order), 10, history)
        return [vectors, *chunks]

    oracle.check_thread_order(xp, call)


@pytest.mark.parametrize("width", [16, 128])
def test_what_moves(sim, width):
    history = AdamHistory(**ADAM, rates=np.full(20, 1e-2))
    start = make_rows(300, width, 12)
    memory, _chunks = chunked(sim, start, 4)
    touched = sim.asarray(np.random.default_rng(0).permutation(300)[:256])
    read = 256 * (4 * (3 * width + 1) + 8)
    for op, written in [
        (caught_up_vectors, 256 * 4 * width), (catch_up_rows, 256 * 4 * (3 * width + 1)),
    ]:  # fmt: skip
        history.for_kernels(sim)
        with sim.record() as seen:
            op(memory, touched, width, history)
        assert [launch.name for launch in seen.launches] == [op.__name__]
        assert seen.syncs == 0
        distinct, sectors = moved(seen.launches[0])
        assert distinct <= 1.02 * (read + written)
        assert sectors <= 1.6 * (read + written)  # `last` and the history, from L1


def test_grids_fill_a_gpu():
    """132 SMs of 8 blocks, with the widths of OneFlow's DLRM at batch 65,536."""
    for kernel in (catch_up_adam._catch_up_rows, catch_up_adam._caught_up_vectors):
        assert kernel.geometry(U=100_000, lanes=32).grid >= 132 * 8
        assert kernel.geometry(U=100_000, lanes=4).grid >= 132 * 8


@pytest.mark.parametrize("op", [catch_up_rows, caught_up_vectors])
def test_what_is_refused(xp, op):
    memory, _ = chunked(xp, make_rows(3, 5, 1), 2)
    history = AdamHistory(**ADAM, rates=[0.1, 0.1])
    text = f"{op.__name__}: arguments must be arrays of one device, got "
    with pytest.raises(TypeError, match=text):
        op(memory, np.arange(3), 5, history)

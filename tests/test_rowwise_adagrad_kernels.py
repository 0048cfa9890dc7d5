import numpy as np
import oracle
import pytest
from test_embedding_rows import keys
from test_rowwise_adagrad import OPTIONS, exact_gradient, f32, naive, start_rows
from test_update_kernels import chunked, moved, unchunked

from cupyrec import arrays
from cupyrec.ops import rowwise_adagrad
from cupyrec.ops.embedding_rows import BFLOAT16, FLOAT16
from cupyrec.ops.rowwise_adagrad import rowwise_adagrad_rows


@pytest.mark.parametrize(
    ("n", "width"),
    [
        *oracle.covering([1, 3, 17, 127], [1, 3, 4, 10, 16, 128, 130], most=3000),
        (0, 4), (2, 514), (2, 516), (2, 1025), (1, 4096),
    ],
)  # fmt: skip
def test_is_exact_and_others_untouched(xp, n, width):
    rows = start_rows(n + 3, width, whole=True)
    memory, chunks = chunked(xp, rows, (n + width) % 5)
    touched, g = np.random.default_rng(0).permutation(n + 3)[:n], exact_gradient(n, width)
    options = dict(lr=2.0, eps=0.0, scale=0.5)
    rowwise_adagrad_rows(memory, xp.asarray(touched), xp.asarray(g), **options)
    truth = np.float64(rows)
    for row, x in zip(touched, g, strict=True):
        oracle.rowwise_adagrad(truth[row, :width], truth[row, width : width + 1], x, **options)
    oracle.check_exact(4 * unchunked(chunks, n + 3), 4 * truth)


@pytest.mark.parametrize("width", [3, 16, 130, 1025])
def test_error_over_steps(xp, width):
    n, start = 11, start_rows(11, width)
    memory, chunks = chunked(xp, start, 2)
    plain, truth = start.copy(), np.float64(start)
    generator = np.random.default_rng(0)
    for t in range(1, 9):
        touched = generator.permutation(n - 1)[: generator.integers(1, n)]
        g = oracle.normals((len(touched), width), seed=t)
        rowwise_adagrad_rows(memory, xp.asarray(touched), xp.asarray(g), **OPTIONS)
        for row, x in zip(touched, g, strict=True):
            for rows, rule in [(truth, oracle.rowwise_adagrad), (plain, naive)]:
                rule(rows[row, :width], rows[row, width : width + 1], x, **OPTIONS)
    after = unchunked(chunks, n)
    for part in (slice(width), slice(width, width + 1)):
        oracle.check_error(after[:, part], plain[:, part], truth[:, part])
    assert after[-1].tobytes() == start[-1].tobytes()
    assert (after[:, width + 1 :] == 9).all()


def test_agrees_with_the_cpu_and_nan_updates_nothing(xp):
    start, g = start_rows(9, 12), oracle.normals((9, 12), seed=1)
    results = []
    for device, scale in [(np, 0.7), (xp, 0.7), (xp, xp.full(1, 0.7, f32)), (xp, float("nan"))]:
        memory, chunks = chunked(device, start, 2)
        options = OPTIONS | dict(scale=scale)
        rowwise_adagrad_rows(memory, device.arange(9), device.asarray(g), **options)
        results.append(unchunked(chunks, 9))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(results[1], results[2])
    np.testing.assert_array_equal(results[3], start)


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("value", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("width", [1, 9, 16, 264])
def test_rows_of_16_bits_are_those_of_32_rounded(xp, device, value, width):
    """To the bit on their own device, at widths that as many threads share in both formats."""
    xp, n, begin = arrays.module(device) if device else xp, 9, (width + 1) // 2
    rows = start_rows(n, width)
    rows[:, :width] = oracle.integers((n, width), -99, 99)  # exact in 16 bits
    short = np.full((n, rows.shape[1]), 9, f32)
    short.view(np.uint16)[:, :width] = oracle.round_rows(rows[:, :width], *keys(n), value)
    short[:, begin] = rows[:, width]
    g, rounding = xp.asarray(oracle.normals((n, width), seed=1)), keys(n)
    on_device = rounding._replace(tables=xp.asarray(rounding.tables), ids=xp.asarray(rounding.ids))
    memory, chunks = chunked(xp, rows, 2)
    rowwise_adagrad_rows(memory, xp.arange(n), g, **OPTIONS)
    after, expected = unchunked(chunks, n), short.copy()
    codes = oracle.round_rows(after[:, :width], *rounding, value)
    expected.view(np.uint16)[:, :width] = codes
    expected[:, begin] = after[:, width]
    memory, chunks = chunked(xp, short, 2)
    memory = memory._replace(value=value)
    rowwise_adagrad_rows(memory, xp.arange(n), g, **OPTIONS, rounding=on_device)
    assert unchunked(chunks, n).tobytes() == expected.tobytes()


@pytest.mark.parametrize("width", [10, 128, 1025])
def test_same_bits_in_any_order(xp, width):
    start, g = start_rows(40, width), oracle.normals((37, width), seed=1)
    order = np.random.default_rng(0).permutation(40)[:37]

    def call():
        memory, chunks = chunked(xp, start, 3)
        rowwise_adagrad_rows(memory, xp.asarray(order), xp.asarray(g), **OPTIONS)
        return chunks

    oracle.check_thread_order(xp, call)


@pytest.mark.parametrize(("width", "most"), [(16, 1.55), (128, 1.15), (512, 1.1)])
def test_what_moves(width, most):
    """Of 16 columns the sum's own sector weighs as much as half a vector."""
    sim = arrays.module("sim")
    memory, _chunks = chunked(sim, start_rows(150, width), 4)
    touched = sim.asarray(np.random.default_rng(0).permutation(150)[:128])
    g = sim.asarray(oracle.normals((128, width)))
    options = OPTIONS | dict(scale=sim.full(1, 0.7, f32))
    with sim.record() as seen:
        rowwise_adagrad_rows(memory, touched, g, **options)
    assert len(seen.launches) == 1
    ideal = 128 * (12 * width + 16)
    distinct, sectors = moved(seen.launches[0])
    assert distinct <= 1.02 * ideal
    assert sectors <= most * ideal


def test_grids_fill_a_gpu():
    for width, vector in [(128, 4), (16, 4), (1025, 1)]:
        geometry = rowwise_adagrad._rows.geometry(U=100_000, D=width, vector=vector)
        assert geometry.grid >= 132 * 8

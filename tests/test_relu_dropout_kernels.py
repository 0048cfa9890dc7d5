import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays
from cupyrec.kernel import KernelFault
from cupyrec.ops.relu_dropout import (
    _WARP_ROWS,
    Dropout,
    _geometry,
    mask_words,
    relu_dropout,
    relu_dropout_backward,
)

f32 = np.float32
SHAPES = oracle.covering((0, 1, 3, 17, 127), (1, 3, 4, 16, 128, 130, 1025), most=20_000)
SHAPES += [(1025, 4), (17, 0), (33, 256)]
DROPOUT = Dropout(0.3, seed=2**63 + 5, step=7, layer=3)


def both(xp, x, bias, *options):
    """y, mask and dx = backward of x, of a device and of the CPU, as NumPy arrays."""
    results = []
    for module in (xp, np):
        ours = [arrays.copy_to(module, a) for a in (x, bias)]
        y, mask = relu_dropout(*ours, *options)
        dx = relu_dropout_backward(ours[0], mask, *options[:1])
        assert [arrays.device(a) for a in (y, mask, dx)] == [arrays.device(ours[0])] * 3
        results.append([arrays.to_host(a) for a in (y, mask, dx)])
    return results


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact(xp, shape):
    rows, columns = shape
    x, bias = oracle.integers(shape, -9, 9), oracle.integers(columns, -4, 4, seed=1)
    (y, mask, dx), expected = both(xp, x, bias)
    z = np.float64(x) + bias
    oracle.check_exact(y, z * (z > 0))
    oracle.check_exact(dx, np.float64(x) * (z > 0))
    assert (y.dtype, dx.dtype, mask.dtype) == (f32, f32, np.uint32)
    assert mask.shape == (rows, mask_words(columns))
    np.testing.assert_array_equal(mask, expected[1])


@pytest.mark.parametrize("rate", [0.3, 0.5, 1 - 2**-10, 1 - 2**-40, 2**-40])
@pytest.mark.parametrize("shape", [(17, 130), (5, 128), (1, 1)], ids=str)
def test_same_bits_as_the_cpu(xp, shape, rate):
    x, bias = oracle.normals(shape), oracle.normals(shape[1], seed=1)
    got, expected = both(xp, x, bias, DROPOUT._replace(rate=rate, first=1000))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_step_may_lie_in_an_array(xp):
    x, bias = (xp.asarray(oracle.normals(shape)) for shape in ((17, 130), 130))
    step = xp.asarray(np.array([DROPOUT.step], np.uint32))
    for got, expected in zip(
        relu_dropout(x, bias, DROPOUT._replace(step=step)), relu_dropout(x, bias, DROPOUT),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(arrays.to_host(got), arrays.to_host(expected))


@pytest.mark.parametrize("columns", [10, 132])
def test_keeps_the_units_that_philox_says(xp, columns):
    rows, first = 5, 2**32 - 2
    x = xp.asarray(oracle.integers((rows, columns), 1, 9))
    dropout = DROPOUT._replace(rate=0.5)
    y, _ = relu_dropout(x, xp.zeros(columns, f32), dropout._replace(first=10))
    kept = oracle.keep(rows, columns, 0.5, *dropout[1:-1], 10)
    np.testing.assert_array_equal(
        arrays.to_host(y), np.where(kept, 2 * oracle.integers((rows, columns), 1, 9), 0)
    )
    last, _ = relu_dropout(x[:1], xp.zeros(columns, f32), dropout._replace(first=first))
    kept = oracle.keep(1, columns, 0.5, *dropout[1:-1], first)
    np.testing.assert_array_equal(arrays.to_host(last) > 0, kept)


@pytest.mark.parametrize("threshold", [0, 1])
def test_a_unit_is_kept_from_its_word_on(xp, threshold):
    word = oracle.philox4x32((0, 0, 0, 0), (1, 0))[0]
    dropout = Dropout((word + threshold) / 2**32, seed=1)
    _, mask = relu_dropout(xp.ones((1, 1), f32), xp.zeros(1, f32), dropout)
    assert arrays.to_host(mask)[0, 0] == 1 - threshold


def test_nan_and_inf(xp):
    x = np.array([[np.nan, np.inf, -np.inf, 1, -0.0]], f32)
    for columns in (4, 5):
        got, expected = both(xp, x[:, :columns], np.zeros(columns, f32))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


def test_rows_off_16_bytes_and_views(xp):
    """A whole row of 4-byte steps, transposes, and every second element."""
    x, bias = oracle.normals((17, 129)), oracle.normals(256, seed=1)
    expected, mask = relu_dropout(x[:, 1:].copy(), bias[::2], DROPOUT)
    flat = xp.asarray(np.append(f32(0), x[:, 1:]))[1:].reshape(17, 128)
    views = flat, xp.asarray(x)[:, 1:], xp.asarray(np.asfortranarray(x[:, 1:]).T).T
    for view in views:
        y, ours = relu_dropout(view, xp.asarray(bias)[::2], DROPOUT)
        np.testing.assert_array_equal(arrays.to_host(y), expected)
        np.testing.assert_array_equal(arrays.to_host(ours), mask)
        dx = relu_dropout_backward(view, ours, DROPOUT)
        np.testing.assert_array_equal(
            arrays.to_host(dx), relu_dropout_backward(x[:, 1:].copy(), mask, DROPOUT)
        )


def test_gradients_are_those_of_the_cpu(xp):
    x, bias, dy = (oracle.normals(s, seed=i) for i, s in enumerate([(17, 130), 130, (17, 130)]))
    results = []
    for module in (xp, np):
        tensors = [Tensor(arrays.copy_to(module, a), requires_grad=True) for a in (x, bias)]
        y, _ = relu_dropout(*tensors, DROPOUT)
        y.backward(arrays.copy_to(module, dy))
        results.append([arrays.to_host(t.grad) for t in tensors])
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)


def test_error(xp):
    x, bias = oracle.normals((127, 130)), oracle.normals(130, seed=1)
    (y, mask, dx), _ = both(xp, x, bias, DROPOUT)
    live = np.unpackbits(mask.view(np.uint8), axis=1, count=130, bitorder="little")
    naive = np.maximum(x + bias, f32(0)) * live / f32(0.7)
    oracle.check_error(y, naive, np.maximum(np.float64(x) + bias, 0) * live / 0.7)
    oracle.check_error(dx, x * live / f32(0.7), np.float64(x) * live / 0.7)


@pytest.mark.parametrize("columns", [128, 130])
def test_thread_order(xp, columns):
    x, bias = xp.asarray(oracle.normals((9, columns))), xp.asarray(oracle.normals(columns, seed=1))

    def call():
        y, mask = relu_dropout(x, bias, DROPOUT)
        return y, mask, relu_dropout_backward(x, mask, DROPOUT)

    oracle.check_thread_order(xp, call)


def test_refuses_float64(xp):
    x, bias = xp.ones((2, 3), float), xp.ones(3, float)
    text = "relu_dropout: 'x' must be float32 or float16 or bfloat16, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        relu_dropout(x, bias)
    text = "relu_dropout_backward: 'dy' must be float32 or float16 or bfloat16, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        relu_dropout_backward(x, xp.ones((2, 4), np.uint32))


def test_refuses_other_devices(xp):
    with pytest.raises(TypeError, match="relu_dropout: arguments must be arrays of one device"):
        relu_dropout(xp.ones((2, 3), f32), np.ones(3, f32))


# What it costs


@pytest.fixture
def sim():
    pytest.importorskip("cupy", reason="pip install cupyrec[sim]")
    return arrays.module("sim")


def test_costs(sim):
    """Every byte once; 264 warp instructions a row of 128 columns are what Philox takes."""
    rows, columns = 64, 256
    x, bias = sim.asarray(oracle.normals((rows, columns))), sim.zeros(columns, f32)
    with sim.record() as seen:
        _, mask = relu_dropout(x, bias, DROPOUT)
        relu_dropout_backward(x, mask, DROPOUT)
    forward, backward = (launch.result.counts for launch in seen.launches if launch.result)
    words = 4 * rows * mask_words(columns)
    for counts, extra, instructions in ((forward, 4 * columns, 270), (backward, 0, 75)):
        ideal = 8 * rows * columns + words + extra
        assert counts["bytes_read"] + counts["bytes_written"] == ideal
        assert 32 * counts["sectors"] < 1.2 * ideal
        assert counts["bank_conflicts"] == 0
        assert counts["instructions"] < instructions * rows * columns / 128
        assert counts["longest_warp"] < 1.1 * counts["mean_warp"]
    assert seen.syncs == 0


@pytest.mark.parametrize("columns", [128, 512])
def test_geometry_fills_a_gpu(columns):
    """At batch 65,536: a full wave on 132 SMs of 2,048 threads, 64 bytes of loads each."""
    grid, block, _ = _geometry(B=65_536, N=columns)
    assert grid * block >= 132 * 2048
    resident = 65_536 // (64 * block) * block  # of the registers of an SM, 64 a thread are plenty
    assert resident * _WARP_ROWS * 16 >= 32 << 10


def test_words_beyond_the_last_column_are_not_read(sim):
    mask = sim.empty((3, 4), np.uint32)
    mask[:, 0] = np.uint32(0xFFFFFFFF)  # of 13 columns, as cublasLt may leave it
    dx = relu_dropout_backward(sim.ones((3, 13), f32), mask)
    assert (dx.get() == 1).all()
    with pytest.raises(KernelFault):
        relu_dropout_backward(sim.ones((3, 33), f32), mask)

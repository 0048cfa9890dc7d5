"""`factorization_machine` against the sum over pairs, on every device."""

import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays, factorization_machine, nvrtc
from cupyrec.testing import gradcheck

f32 = np.float32
TYPES = np.dtype(f32), *arrays.HALVES

# B, F with `dense` among them, D
SHAPES = oracle.covering((0, 1, 3, 17), (1, 2, 27, 64, 130), (1, 3, 10, 16, 130, 1025), most=70_000)
BATCHES = [(127, 3, 17), (1025, 2, 3)]


def case(make, batch, features, width, dtype=f32):
    shapes = (batch, width), (batch, features - 1, width)
    dense, sparse = (make(shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    return dense, sparse, make((batch, 1), seed=2)


def small(shape, dtype=f32, seed=0):
    return oracle.integers(shape, -2, 2, dtype, seed)


def run(xp, dense, sparse, grad):
    """(output, gradient of dense, gradient of sparse), on the device."""
    dense = None if dense is None else Tensor(arrays.copy_to(xp, dense), requires_grad=True)
    sparse = Tensor(arrays.copy_to(xp, sparse), requires_grad=True)
    out = factorization_machine(dense, sparse)
    out.backward(arrays.copy_to(xp, grad))
    return out.data, None if dense is None else dense.grad, sparse.grad


def home(results):
    return [None if a is None else arrays.to_host(a) for a in results]


@pytest.mark.parametrize("shape", SHAPES + BATCHES, ids=str)
def test_integer_data_is_exact(np_or_xp, shape):
    """Sums are exact in float32; gradients of 16 bits are the numbers that are nearest."""
    dtype = TYPES[SHAPES.index(shape) % 3 if shape in SHAPES else 0]
    inputs = case(small, *shape, dtype)
    out, *gradients = home(run(np_or_xp, *inputs))
    expected, *exact = oracle.factorization_machine(*inputs)
    assert (out.dtype, out.shape) == (f32, (shape[0], 1))
    oracle.check_exact(out, expected)
    for got, truth in zip(gradients, exact, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, truth.astype(dtype))


def test_few_enough_cases_of_every_type():
    assert len(SHAPES + BATCHES) <= 40


@pytest.mark.parametrize("features", [0, 1, 5, 64])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_without_dense(np_or_xp, features, dtype):
    _, sparse, grad = case(small, 5, features + 1, 10, dtype)
    out, none, dsparse = home(run(np_or_xp, None, sparse, grad))
    expected, _, exact = oracle.factorization_machine(None, sparse, grad)
    oracle.check_exact(out, expected)
    assert none is None
    np.testing.assert_array_equal(dsparse, exact.astype(dtype))


@pytest.mark.parametrize("width", [16, 130])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_error(np_or_xp, width, dtype):
    """Against half of the square of the sum less the sum of squares, in float32."""
    dense, sparse, grad = case(oracle.normals, 33, 27, width, dtype)
    x = np.concatenate([dense[:, None], sparse], axis=1).astype(f32)
    total = x.sum(axis=1)
    naive = f32(0.5) * (total**2 - (x**2).sum(axis=1)).sum(axis=1, keepdims=True)
    naive_dx = (grad[:, :, None] * (total[:, None] - x)).astype(dtype)
    got = home(run(np_or_xp, dense, sparse, grad))
    expected = oracle.factorization_machine(dense, sparse, grad)
    oracle.check_error(got[0], naive, expected[0])
    oracle.check_error(got[1], naive_dx[:, 0], expected[1])
    oracle.check_error(got[2], naive_dx[:, 1:], expected[2])


def test_nothing_cancels(np_or_xp):
    """One feature outweighs the others: the difference of squares would lose their product."""
    sparse = np.array([[[1e4], [1e-4], [1.0]]], f32)
    out = arrays.to_host(factorization_machine(None, np_or_xp.asarray(sparse)))
    np.testing.assert_allclose(out, 1 + 1e4 + 1e-4, rtol=1e-7)


def test_directional_derivative():
    dense, sparse, _ = case(oracle.normals, 5, 6, 7, np.float64)
    assert gradcheck(factorization_machine, [dense, sparse])
    assert gradcheck(lambda x: factorization_machine(None, x), [sparse])
    assert factorization_machine(dense, sparse).dtype == np.float64


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_same_bits_on_the_cpu(dtype):
    inputs = case(oracle.normals, 257, 27, 17, dtype)
    oracle.check_same_bits(lambda: run(np, *inputs))


@pytest.mark.parametrize("shape", [(5, 27, 128), (9, 64, 3), (3, 130, 10)], ids=str)
def test_same_bits_in_any_thread_order(xp, shape):
    inputs = case(oracle.normals, *shape, TYPES[shape[0] % 3])
    oracle.check_thread_order(xp, lambda: run(xp, *inputs))


def test_nan_and_inf_stay_in_their_sample(np_or_xp):
    dense, sparse, grad = case(oracle.normals, 3, 5, 10)
    sparse[1, 2, 4] = np.inf
    sparse[2, 0, 0] = np.nan
    out, ddense, dsparse = home(run(np_or_xp, dense, sparse, grad))
    np.testing.assert_array_equal(np.isfinite(out[:, 0]), [True, False, False])
    assert np.isfinite(dsparse[0]).all()
    assert not np.isfinite(ddense[1, 4])
    assert np.isnan(ddense[2, 0])


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_views_give_what_copies_give(xp, shift):
    """An address that is no multiple of 16: the loads change, the bits do not."""
    for dtype in TYPES:
        dense, sparse, grad = case(small, 3, 5, 16, dtype)
        expected = home(run(xp, dense, sparse, grad))
        shifted = arrays.copy_to(xp, np.append(np.zeros(shift, dtype), sparse))[shift:]
        turned = arrays.copy_to(xp, np.ascontiguousarray(sparse.T)).T
        for other in shifted.reshape(sparse.shape), turned:
            for a, b in zip(home(run(xp, dense, other, grad)), expected, strict=True):
                np.testing.assert_array_equal(a, b)


def test_arrays_give_an_array_and_tensors_a_tensor():
    dense, sparse, _ = case(oracle.normals, 3, 4, 10)
    out = factorization_machine(dense, sparse)
    assert isinstance(out, np.ndarray)
    mixed = factorization_machine(dense, Tensor(sparse, requires_grad=True))
    assert mixed.requires_grad
    np.testing.assert_array_equal(mixed.data, out)
    assert not factorization_machine(Tensor(dense), sparse).requires_grad


# Costs


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("features", "width"), [(27, 128), (64, 16)])
def test_cost(sim, dtype, features, width):
    """One launch each way that moves no byte twice and asks for whole sectors; nothing spills."""
    inputs = case(oracle.normals, 16, features, width, dtype)
    with sim.record() as seen:
        run(sim, *inputs)
    kernels = [launch for launch in seen.launches if launch.result]
    names = ["factorization_machine_forward", "factorization_machine_backward"]
    assert [kernel.name for kernel in kernels] == names
    x = 16 * features * width * dtype.itemsize
    for launch, ideal in zip(kernels, (x + 64, 2 * x + 64), strict=True):
        counts = launch.result.counts
        assert counts["bytes_read"] + counts["bytes_written"] == ideal
        assert 32 * counts["sectors"] <= 1.1 * ideal
        found = nvrtc.ptxas(launch.ptx, 90)[launch.name]
        assert (found.spills, found.warnings) == (0, ())


@pytest.mark.parametrize(
    ("dense", "sparse", "error", "text"),
    [
        (
            np.ones((4, 16), f32), np.ones((4, 3, 8), f32), ValueError,
            "factorization_machine: 'sparse' must have D = 16 like 'dense', got shape (4, 3, 8).",
        ),
        (
            None, np.ones((4, 16), f32), ValueError,
            "factorization_machine: 'sparse' must have axes (B, F, D), got shape (4, 16).",
        ),
        (
            None, np.ones((4, 3, 0), f32), ValueError,
            "factorization_machine: D must be at least 1, got shape (4, 3, 0).",
        ),
        (
            np.ones((4, 16)), np.ones((4, 3, 16), f32), TypeError,
            "factorization_machine: 'dense' must be float32, got float64.",
        ),
        (
            None, np.ones((4, 3, 16), int), TypeError,
            "factorization_machine: 'sparse' must be float32 or float64 or float16 or bfloat16, "
            "got int64.",
        ),
        (
            [[1.0]], np.ones((1, 1, 1), f32), TypeError,
            "factorization_machine: arguments must be arrays of NumPy, CuPy or cupyrec.sim, got "
            "list.",
        ),
    ],
)  # fmt: skip
def test_refuses(dense, sparse, error, text):
    with pytest.raises(error, match=oracle.sentence(text)):
        factorization_machine(dense, sparse)


def test_refuses_float64_on_a_device(xp):
    text = (
        "factorization_machine on a device: 'sparse' must be float32 or float16 or bfloat16, "
        "got float64."
    )
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        factorization_machine(None, xp.asarray(np.ones((4, 3, 2))))

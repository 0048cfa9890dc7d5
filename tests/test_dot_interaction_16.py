"""`dot_interaction` in float16 and bfloat16, on the CPU and by its kernels on tensor cores."""

import numpy as np
import oracle
import pytest
from test_dot_interaction import OPTIONS, truth
from test_dot_interaction_kernels import home, run

from cupyrec import Tensor, arrays, dot_interaction, nvrtc
from cupyrec.ops import dot_interaction_16
from cupyrec.ops.dot_interaction import dot_interaction_width

HALF, BRAIN = arrays.HALVES

# B, F with `dense` among them, D
SHAPES = oracle.covering((0, 1, 3), (1, 2, 17, 27, 64), (1, 16, 17, 128, 130, 256))
SHAPES.append((5, 64, 1024))  # more samples than a block has warps, columns in chunks

both = pytest.mark.parametrize("dtype", arrays.HALVES, ids=str)


def integers(batch, features, width, dtype, **options):
    columns = dot_interaction_width(features, width, **options)
    shapes = (batch, width), (batch, features - 1, width), (batch, columns)
    return [oracle.integers(s, -2, 2, dtype, seed=i) for i, s in enumerate(shapes)]


def normals(batch, features, width, dtype, **options):
    columns = dot_interaction_width(features, width, **options)
    shapes = (batch, width), (batch, features - 1, width), (batch, columns)
    return [oracle.normals(s, dtype, seed=i) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_rounded_once(xp, shape):
    """Sums are exact in float32: on every device the result is the number that is nearest."""
    number = SHAPES.index(shape)
    dtype, options = arrays.HALVES[number % 2], OPTIONS[number // 2 % 4]
    inputs = integers(*shape, dtype, **options)
    expected = truth(*inputs, **options)
    for module in np, xp:
        for got, exact in zip(home(run(module, *inputs, **options)), expected, strict=True):
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, exact.astype(dtype))


def test_few_enough_cases():
    assert len(SHAPES) <= 45


@both
@pytest.mark.parametrize("features", [0, 1, 16, 33])
def test_without_dense(xp, features, dtype):
    options = dict(self_interaction=features == 33, output_concat=False, output_padding=2)
    _, sparse, _ = integers(5, features + 1, 10, dtype)
    columns = dot_interaction_width(features, 10, **options)
    grad = oracle.integers((5, columns), -2, 2, dtype, seed=2)
    out, _, dsparse = truth(None, sparse, grad, **options)
    for module in np, xp:
        got = home(run(module, None, sparse, grad, **options))
        np.testing.assert_array_equal(got[0], out.astype(dtype))
        np.testing.assert_array_equal(got[2], dsparse.astype(dtype))


@both
@pytest.mark.parametrize("width", [16, 130])
def test_error(xp, width, dtype):
    """Against sums in float32, by NumPy, rounded once."""
    options = OPTIONS[1]
    dense, sparse, grad = normals(9, 27, width, dtype, **options)
    x = np.concatenate([dense[:, None], sparse], axis=1).astype(np.float32)
    rows, cols = np.tril_indices(27)
    pairs = slice(width, -5)
    s = np.zeros((9, 27, 27), np.float32)
    s[:, rows, cols] = grad[:, pairs]
    dx = np.matmul(s + s.transpose(0, 2, 1), x)
    dx[:, 0] += grad[:, :width].astype(np.float32)
    products = np.matmul(x, x.transpose(0, 2, 1))[:, rows, cols]
    expected = truth(dense, sparse, grad, **options)
    for module in np, xp:
        got = home(run(module, dense, sparse, grad, **options))
        oracle.check_error(got[0][:, pairs], products.astype(dtype), expected[0][:, pairs])
        oracle.check_error(got[1], dx[:, 0].astype(dtype), expected[1])
        oracle.check_error(got[2], dx[:, 1:].astype(dtype), expected[2])
        np.testing.assert_array_equal(got[0][:, :width], dense)


@both
def test_same_bits_on_the_cpu(dtype):
    inputs = normals(130, 7, 17, dtype)
    oracle.check_same_bits(lambda: run(np, *inputs))


# Whole rows; scalar copies; rows in chunks
@pytest.mark.parametrize("shape", [(5, 27, 128), (3, 17, 3), (2, 64, 256)], ids=str)
def test_same_bits_in_any_thread_order(xp, shape):
    inputs = normals(*shape, arrays.HALVES[shape[0] % 2])
    oracle.check_thread_order(xp, lambda: run(xp, *inputs))


@both
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_reach_every_product_of_their_feature(xp, value, dtype):
    dense, sparse, _ = normals(3, 5, 10, dtype)
    sparse[1, 2, 4] = value  # feature 3 of sample 1
    grad = np.zeros((3, 20), dtype)
    grad[1, 3] = value  # of `dense`
    grad[1, 10 + 2] = np.nan  # pair (2, 1)
    rows, cols = np.tril_indices(5, -1)
    touched = (rows == 3) | (cols == 3)
    others = np.ones((3, 4), bool)
    others[1] = False
    for module in np, xp:
        out, ddense, dsparse = home(run(module, dense, sparse, grad))
        np.testing.assert_array_equal(np.isfinite(out[1, 10:]), ~touched)
        assert np.isfinite(out[[0, 2]]).all()
        assert np.isnan(dsparse[1, :2]).all()  # features 1 and 2
        assert np.isfinite(dsparse[others]).all()
        assert np.isfinite(ddense[[0, 2]]).all()
        np.testing.assert_array_equal(np.isfinite(ddense[1]), ~np.isin(range(10), (3, 4)))


def test_beyond_float16_is_infinite(xp):
    dense, sparse = np.full((2, 16), -300, HALF), np.full((2, 2, 16), 300, HALF)
    grad = np.zeros((2, 19), HALF)
    grad[:, 16] = 300  # pair (1, 0)
    for module in np, xp:
        out, ddense, dsparse = home(run(module, dense, sparse, grad))
        np.testing.assert_array_equal(out[:, 16:], [[-np.inf, -np.inf, np.inf]] * 2)
        assert (ddense == np.inf).all()
        assert (dsparse[:, 0] == -np.inf).all()
        assert not dsparse[:, 1].any()


def test_a_self_pair_doubles_its_gradient_before_it_multiplies(xp):
    """What float16 can't hold twice is infinite by the kernels, and in bfloat16 by nobody."""
    sparse = np.full((1, 1, 2), 0.5, HALF)
    options = dict(self_interaction=True, output_concat=False)
    for g, expected in ((32752, 32752), (32768, np.inf)):
        _, _, dsparse = home(run(xp, None, sparse, np.full((1, 1), g, HALF), **options))
        assert (dsparse == expected).all()
    grad = np.full((1, 1), 65536, BRAIN)
    _, _, dsparse = home(run(xp, None, sparse.astype(BRAIN), grad, **options))
    assert (dsparse == 65536).all()


def test_gradient_of_the_padding_is_ignored(xp):
    dense, sparse, _ = normals(3, 5, 10, HALF)
    grad = np.zeros((3, 20 + 2), HALF)
    grad[:, 20:] = np.nan
    _, ddense, dsparse = home(run(xp, dense, sparse, grad, output_padding=2))
    assert not ddense.any()
    assert not dsparse.any()


@both
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_views_give_what_copies_give(xp, shift, dtype):
    """An address that is no multiple of 16: the loads change, the bits do not."""
    dense, sparse, grad = normals(3, 5, 16, dtype)
    expected = home(run(xp, dense, sparse, grad))
    shifted = arrays.copy_to(xp, np.append(np.zeros(shift, dtype), sparse))[shift:]
    got = home(run(xp, dense, shifted.reshape(sparse.shape), grad))
    turned = arrays.copy_to(xp, np.ascontiguousarray(sparse.T)).T
    for others in got, home(run(xp, dense, turned, grad)):
        for a, b in zip(others, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@both
def test_tensors_give_a_tensor(dtype):
    dense, sparse, _ = normals(3, 4, 10, dtype)
    out = dot_interaction(dense, Tensor(sparse, requires_grad=True))
    assert (out.dtype, out.requires_grad) == (dtype, True)
    np.testing.assert_array_equal(out.data, dot_interaction(dense, sparse))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(("a", "b"), [(HALF, BRAIN), (BRAIN, HALF), (np.float32, HALF)], ids=str)
def test_refuses_mixed_types(device, a, b):
    if device == "sim":
        pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    dense, sparse = np.ones((2, 4), a), np.ones((2, 3, 4), b)
    xp = arrays.module(device)
    text = f"dot_interaction: 'dense' must be {np.dtype(b)}, got {np.dtype(a)}."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        dot_interaction(arrays.copy_to(xp, dense), arrays.copy_to(xp, sparse))


# Costs


def launches(sim, batch, features, width, dtype, **options):
    """Forward and backward, with the bytes that each must move."""
    inputs = normals(batch, features, width, dtype, **options)
    with sim.record() as seen:
        run(sim, *inputs, **options)
    kernels = [launch for launch in seen.launches if launch.result]
    x, out = 2 * batch * features * width, 2 * inputs[2].size
    names = ["dot_interaction_16_forward", "dot_interaction_16_backward"]
    assert [kernel.name for kernel in kernels] == names
    return kernels, (x + out, 2 * x + out)


@both
def test_cost(sim, dtype):
    """No byte is moved twice, whole sectors are asked for, few banks conflict."""
    kernels, ideals = launches(sim, 16, 27, 128, dtype, output_padding=1)
    for launch, ideal in zip(kernels, ideals, strict=True):
        counts = launch.result.counts
        assert counts["bytes_read"] + counts["bytes_written"] <= 1.01 * ideal
        assert 32 * counts["sectors"] <= 1.01 * ideal
        assert counts["bank_conflicts"] <= 0.02 * counts["shared_wavefronts"]
        assert counts["longest_warp"] <= 1.1 * counts["mean_warp"]


@both
@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ((4, 27, 128), 8 * (2 + 4), 8 * 2 * 2 * 2),
        ((1, 64, 256), 16 * (2 + 4 + 6 + 8), 16 * 2 * 4 * 4),
        ((3, 17, 17), 2 * (2 + 2), 2 * 2 * 2 * 2),  # columns 16 and on are of nobody's pairs
    ],
    ids=str,
)
def test_tensor_cores_make_all_products(sim, shape, forward, backward, dtype):
    """Tiles of 16 x 16 x 8 a sample; no other instruction multiplies floats."""
    kernels, _ = launches(sim, *shape, dtype)
    kind = "bf16" if dtype == BRAIN else "f16"
    for launch, tiles in zip(kernels, (forward, backward), strict=True):
        assert launch.result.classes["mma"] == shape[0] * tiles
        assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" in launch.ptx
        assert not any(name in launch.ptx for name in ("fma.rn.f32", "mul.f32", "mul.rn.f32"))


@both
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_registers(sim, arch, dtype):
    """No warning, nothing spills, and two blocks of each fit on a multiprocessor."""
    for shape in ((1, 27, 128), (1, 64, 256)):
        with sim.schedule(arch):
            kernels, _ = launches(sim, *shape, dtype)
        for launch in kernels:
            found = nvrtc.ptxas(launch.ptx, arch)[launch.name]
            assert (found.spills, found.warnings) == (0, ())
            assert 2 * launch.block * found.registers <= 65_536


@pytest.mark.parametrize("features", range(1, 65))
def test_blocks_fit(features):
    for width in [1, 15, 16, 17, 128, 130, 256, 1000, 1024, 4096]:
        chunk = dot_interaction_16._chunk(features, width)
        assert chunk % 16 == 0
        assert chunk - 16 < width
        geometry = dot_interaction_16._forward.geometry
        for nbytes in dot_interaction_16._bytes(features, chunk):
            assert geometry(B=9, shared=nbytes).shared <= 96 << 10
            assert nbytes % 16 == 0

"""The kernels of `dot_interaction` against the formulas, the CPU and their bars of cost."""

import math

import numpy as np
import oracle
import pytest
from test_dot_interaction import OPTIONS, case, truth

from cupyrec import Tensor, arrays, dot_interaction, nvrtc
from cupyrec.ops import dot_interaction as op
from cupyrec.ops.dot_interaction import dot_interaction_width

f32 = np.float32

# B, F with `dense` among them, D
SHAPES = oracle.covering(
    (1, 3, 127, 1025), (2, 27, 64), (1, 4, 10, 16, 128, 130, 1025), most=28_000
)
SHAPES.append((1, 64, 1025))


def run(xp, dense, sparse, grad, **options):
    """(output, gradient of dense, gradient of sparse), on the device."""
    dense = None if dense is None else Tensor(arrays.copy_to(xp, dense), requires_grad=True)
    sparse = Tensor(arrays.copy_to(xp, sparse), requires_grad=True)
    out = dot_interaction(dense, sparse, **options)
    out.backward(arrays.copy_to(xp, grad))
    return out.data, None if dense is None else dense.grad, sparse.grad


def home(results):
    return [None if a is None else arrays.to_host(a) for a in results]


def integer_case(batch, features, width, **options):
    dense = oracle.integers((batch, width), -4, 4)
    sparse = oracle.integers((batch, features - 1, width), -4, 4, seed=1)
    columns = dot_interaction_width(features, width, **options)
    return dense, sparse, oracle.integers((batch, columns), -4, 4, seed=2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact(xp, shape):
    options = OPTIONS[sum(shape) % len(OPTIONS)]
    inputs = integer_case(*shape, **options)
    for got, expected in zip(
        home(run(xp, *inputs, **options)), truth(*inputs, **options), strict=True
    ):
        assert got.dtype == f32
        oracle.check_exact(got, expected)


def test_few_enough_cases_and_all_options():
    assert len(SHAPES) <= 40
    assert {sum(shape) % 4 for shape in SHAPES} == {0, 1, 2, 3}


@pytest.mark.parametrize("shape", [(0, 27, 16), (5, 1, 10), (0, 1, 4)], ids=str)
@pytest.mark.parametrize("concat", [False, True])
def test_no_samples_and_no_pairs(xp, shape, concat):
    options = dict(self_interaction=False, output_concat=concat, output_padding=3)
    inputs = integer_case(*shape, **options)
    for got, expected in zip(
        home(run(xp, *inputs, **options)), truth(*inputs, **options), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("features", [0, 1, 5, 16, 33])
def test_without_dense(xp, features):
    options = dict(self_interaction=features % 2 == 1, output_concat=False, output_padding=2)
    _, sparse, grad = integer_case(7, features + 1, 10, **options)
    grad = grad[:, : dot_interaction_width(features, 10, **options)]
    got, expected = (
        home(run(xp, None, sparse, grad, **options)),
        truth(None, sparse, grad, **options),
    )
    oracle.check_exact(got[0], expected[0])
    oracle.check_exact(got[2], expected[2])


@pytest.mark.parametrize("width", [16, 130])
def test_error_and_agreement_with_cpu(xp, width):
    dense, sparse = case(17, 27, width)
    x, options = np.concatenate([dense[:, None], sparse], axis=1), OPTIONS[1]
    columns = dot_interaction_width(27, width, **options)
    grad = oracle.normals((17, columns), seed=2)
    rows, cols = np.tril_indices(27)
    pairs = slice(width, columns - 5)
    s = np.zeros((17, 27, 27), f32)
    s[:, rows, cols] = grad[:, pairs]
    naive_dx = np.matmul(s + s.transpose(0, 2, 1), x)
    naive_dx[:, 0] += grad[:, :width]
    naive = np.matmul(x, x.transpose(0, 2, 1))[:, rows, cols]
    got, cpu = (
        home(run(xp, dense, sparse, grad, **options)),
        run(np, dense, sparse, grad, **options),
    )
    expected = truth(dense, sparse, grad, **options)
    oracle.check_error(got[0][:, pairs], naive, expected[0][:, pairs])
    oracle.check_error(got[1], naive_dx[:, 0], expected[1])
    oracle.check_error(got[2], naive_dx[:, 1:], expected[2])
    np.testing.assert_array_equal(got[0][:, :width], dense)
    for a, b in zip(got, cpu, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


# Pairs behind the rows and X staged; pairs over the rows; rows in chunks
@pytest.mark.parametrize("shape", [(17, 7, 16), (3, 27, 128), (2, 33, 260)], ids=str)
def test_same_bits_in_any_thread_order(xp, shape):
    batch, features, width = shape
    dense, sparse = case(*shape)
    grad = oracle.normals((batch, dot_interaction_width(features, width)), seed=2)
    oracle.check_thread_order(xp, lambda: run(xp, dense, sparse, grad))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_reach_every_product_of_their_feature(xp, value):
    dense, sparse = case(3, 5, 10)
    sparse[1, 2, 4] = value  # feature 3 of sample 1
    grad = np.zeros((3, 20), f32)
    grad[1, 10 + 2] = np.nan  # pair (2, 1)
    out, ddense, dsparse = home(run(xp, dense, sparse, grad))
    rows, cols = np.tril_indices(5, -1)
    touched = (rows == 3) | (cols == 3)
    np.testing.assert_array_equal(np.isfinite(out[1, 10:]), ~touched)
    assert np.isfinite(out[[0, 2]]).all()
    others = np.ones((3, 4), bool)
    others[1] = False
    assert np.isnan(dsparse[1, :2]).all()  # features 1 and 2
    assert np.isfinite(dsparse[others]).all()
    assert np.isfinite(ddense[[0, 2]]).all()


def test_gradient_of_the_padding_is_ignored(xp):
    dense, sparse = case(3, 5, 10)
    grad = np.zeros((3, 20 + 2), f32)
    grad[:, 20:] = np.nan
    _, ddense, dsparse = home(run(xp, dense, sparse, grad, output_padding=2))
    assert not ddense.any()
    assert not dsparse.any()


def test_views_give_what_copies_give(xp):
    dense, sparse = case(5, 5, 10)
    expected = arrays.to_host(dot_interaction(*(arrays.copy_to(xp, a) for a in (dense, sparse))))
    turned = [arrays.copy_to(xp, np.ascontiguousarray(a.T)).T for a in (dense, sparse)]
    np.testing.assert_array_equal(arrays.to_host(dot_interaction(*turned)), expected)
    # An address that is no multiple of 8: the loads change, the bits do not.
    shifted = arrays.copy_to(xp, np.append(f32(0), sparse))[1:].reshape(sparse.shape)
    out = dot_interaction(arrays.copy_to(xp, dense), shifted)
    np.testing.assert_array_equal(arrays.to_host(out), expected)


def test_refuses(xp):
    def refuses(error, text, *inputs):
        with pytest.raises(error, match=oracle.sentence(f"dot_interaction{text}")):
            dot_interaction(*inputs)

    dense, sparse = (arrays.copy_to(xp, a) for a in case(2, 65, 4))
    refuses(
        ValueError,
        ": on a device there must be at most 64 features, 'dense' among them, got 65.",
        dense, sparse,
    )  # fmt: skip
    double = [arrays.copy_to(xp, a) for a in case(2, 3, 4, np.float64)]
    text = " on a device: 'sparse' must be float32 or float16 or bfloat16, got float64."
    refuses(TypeError, text, *double)
    with pytest.raises(TypeError, match="^dot_interaction: arguments must be arrays of one device"):
        dot_interaction(np.ones((2, 4), f32), sparse)


def launches(batch, features, width, **options):
    """Of the simulator: forward and backward, with the bytes that each must move."""
    sim = arrays.module("sim")
    dense, sparse = case(batch, features, width)
    columns = dot_interaction_width(features, width, **options)
    with sim.record() as seen:
        run(sim, dense, sparse, oracle.normals((batch, columns), seed=2), **options)
    kernels = [launch for launch in seen.launches if launch.result]
    x, out = 4 * batch * features * width, 4 * batch * columns
    assert [k.name for k in kernels] == ["dot_interaction_forward", "dot_interaction_backward"]
    return kernels, (x + out, 2 * x + out)


@pytest.mark.parametrize(
    ("shape", "padding", "most_conflicts"),
    [
        ((16, 27, 128), 0, 0.02),
        ((16, 27, 128), 1, 0.02),
        ((32, 27, 16), 1, 0.02),
        # 367 columns of output: warps that read from row 0 and from pairs at once meet in a bank.
        # No strides avoid that and keep tiles and pairs apart, see *Tried* in the .cu.
        ((32, 27, 16), 0, 0.025),
    ],
    ids=str,
)
def test_cost(xp, shape, padding, most_conflicts):
    """No byte is read twice, whole sectors are asked for, few banks conflict."""
    if xp is not arrays.module("sim"):
        pytest.skip("the simulator counts")
    for launch, ideal in zip(*launches(*shape, output_padding=padding), strict=True):
        counts = launch.result.counts
        assert counts["bytes_read"] + counts["bytes_written"] <= 1.01 * ideal
        # Behind padding, which is not read, a row of the gradient starts within a sector.
        most_sectors = 1.07 if padding and launch.name.endswith("backward") else 1.01
        assert 32 * counts["sectors"] <= most_sectors * ideal
        assert counts["bank_conflicts"] <= most_conflicts * counts["shared_wavefronts"]
        assert counts["longest_warp"] <= 1.1 * counts["mean_warp"]


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_registers(xp, arch):
    """No warning, nothing spills, and two blocks of each fit on a multiprocessor."""
    if xp is not arrays.module("sim"):
        pytest.skip("the compiler counts")
    with xp.schedule(arch):
        kernels, _ = launches(2, 27, 128)
    for launch in kernels:
        found = nvrtc.ptxas(launch.ptx, arch)[launch.name]
        assert (found.spills, found.warnings) == (0, ())
        assert 2 * launch.block * found.registers <= 65_536
        assert 2 * (launch.shared + 1024) <= 164 << 10  # bytes of an A100's


@pytest.mark.parametrize("features", range(1, 65))
def test_blocks_fit(features):
    for width in [1, 2, 3, 4, 6, 8, 10, 16, 32, 64, 128, 130, 256, 1025, 4096]:
        pairs = features * (features + 1) // 2
        for head in (0, width):
            forward = op._cut_forward(features, width, pairs, head)
            backward = op._cut_backward(features, width, pairs, head, math.gcd(width, 4))
            floats = forward["STRIDE"] + forward["PAIRS_STRIDE"]
            assert 4 * floats * forward["SAMPLES"] <= 96 << 10
            floats = backward["S_STRIDE"] + backward["GRAD_STRIDE"] + backward["STRIDE"]
            assert 4 * floats * backward["SAMPLES"] <= 96 << 10
            for cut in (forward, backward):
                assert cut["THREADS"] <= 320
                assert cut["THREADS"] % 32 == 0

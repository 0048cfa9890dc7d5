"""The perceptron in mixed precision, on the CPU and on devices."""

import numpy as np
import oracle
import pytest
from test_fused_mlp import flat, small, truth
from test_fused_mlp_kernels import DROPOUTS, data, launched, odd

from cupyrec import Tensor, arrays, fused_mlp, nn
from cupyrec.nn import EmbeddingMLP, MultiTableEmbedding
from cupyrec.ops.cast import cast_matrices
from cupyrec.ops.relu_dropout import Dropout

f32 = np.float32
HALVES = [dtype.name for dtype in arrays.HALVES]
SHAPES = oracle.covering((0, 1, 3, 17, 127), (1, 8, 13), (1, 10, 16), (1, 3, 8))


def run(xp, x, weights, biases, dy, amp, **options):
    """Output, then the gradients of x, weights and biases, as NumPy arrays of float32."""
    x, *both = (Tensor(arrays.copy_to(xp, a), requires_grad=True) for a in (x, *weights, *biases))
    weights, biases = both[: len(weights)], both[len(weights) :]
    y = fused_mlp(x, weights, biases, amp=amp, **options)
    linear = options.get("linear_output", False)
    assert y.dtype.name == ("float32" if linear else amp)
    y.backward(arrays.copy_to(xp, dy.astype(y.dtype)))
    assert [p.grad.dtype for p in both] == [f32] * len(both)
    assert x.grad.dtype == x.dtype
    return [arrays.to_host(a).astype(f32) for a in (y.data, x.grad, *(p.grad for p in both))]


@pytest.mark.parametrize("amp", HALVES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact_but_for_one_rounding(np_or_xp, shape, amp):
    """Numbers of few bits: what lies between is exact, the gradient of x is rounded."""
    x, weights, biases, dy = data(small, shape[0], shape[1:])
    biases = [b + f32(0.5) ** (i + 1) for i, b in enumerate(biases)]  # no sum is 0
    for linear_output in (False, True):
        got = run(np_or_xp, x, weights, biases, dy, amp, linear_output=linear_output)
        expected = flat(truth(x, weights, biases, dy, linear_output=linear_output))
        for a, b in zip(got, expected, strict=True):
            assert a.shape == b.shape
            if np.abs(b).max(initial=0) <= 128:
                oracle.check_exact(a, b)


@pytest.mark.parametrize("amp", HALVES)
@pytest.mark.parametrize("linear_output", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_dropout_is_applied_where_philox_says(np_or_xp, rows, linear_output, amp):
    case = data(odd, rows, (3, 5, 3, 5))
    options = dict(dropouts=DROPOUTS, linear_output=linear_output)
    got, expected = run(np_or_xp, *case, amp, **options), flat(truth(*case, **options))
    np.testing.assert_array_equal(got[0] == 0, expected[0] == 0)
    for a, b in zip(got, expected, strict=True):
        atol = np.finfo(np.float16).eps * 8 * 4 * np.abs(b).max(initial=0)
        np.testing.assert_allclose(a, b, atol=atol)


def rounded(x, amp):
    return x.astype(arrays.HALVES[HALVES.index(amp)]).astype(f32)


@pytest.mark.parametrize("amp", HALVES)
@pytest.mark.parametrize("sizes", [(130, 64), (13, 128, 64, 16), (479, 33, 1)], ids=str)
def test_error_is_that_of_rounding_in_between(np_or_xp, sizes, amp):
    x, weights, biases, dy = case = data(oracle.normals, 127, sizes)
    naive_w = [rounded(w, amp) for w in weights]
    layers = [rounded(x, amp)]
    for i, (weight, bias) in enumerate(zip(naive_w, biases, strict=True)):
        linear = i == len(weights) - 1
        z = layers[-1] @ weight.T + (bias if linear else rounded(bias, amp))
        layers.append(z if linear else rounded(np.maximum(z, f32(0)), amp))
    single = sizes[-1] == 1
    dweights, dbiases, grad = [], [], dy if single else rounded(dy, amp)
    for i in reversed(range(len(weights))):
        dweights.insert(0, grad.T @ layers[i])
        dbiases.insert(0, grad.sum(axis=0))
        grad = grad @ naive_w[i]
        grad = rounded(grad * (layers[i] > 0) if i else grad, amp)
    naive = [layers[-1], grad, *dweights, *dbiases]
    got = run(np_or_xp, *case, amp, linear_output=True)
    for a, b, c in zip(got, naive, flat(truth(*case, linear_output=True)), strict=True):
        oracle.check_error(a, b, c)


@pytest.mark.parametrize("amp", HALVES)
@pytest.mark.parametrize("linear_output", [False, True])
@pytest.mark.parametrize("last", [(130, 5), (64, 1), (130, 1)], ids=str)
def test_devices_agree_within_rounding(xp, last, linear_output, amp):
    case = data(oracle.normals, 127, (13, 64, *last))
    case = (rounded(case[0], amp).astype(arrays.HALVES[HALVES.index(amp)]), *case[1:])
    options = dict(dropouts=DROPOUTS, linear_output=linear_output)
    eps = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[amp]
    for a, b in zip(run(xp, *case, amp, **options), run(np, *case, amp, **options), strict=True):
        assert np.linalg.norm(a - b) <= 2 * eps * np.linalg.norm(b)  # a unit at 0 may go either way


@pytest.mark.parametrize("amp", HALVES)
@pytest.mark.parametrize("sizes", [(8, 1), (13, 1), (3, 16, 1), (3, 13, 1)], ids=str)
def test_a_single_output_rounds_no_dz(np_or_xp, sizes, amp):
    """Its own, and that below before its sum, of whole numbers that 16 bits don't hold."""
    x, weights, biases, _ = data(small, 33, sizes)
    biases = [b + f32(0.5) ** (i + 1) for i, b in enumerate(biases)]  # no sum is 0
    dy = oracle.integers((33, 1), 2049, 2300, seed=3)
    assert (rounded(dy, amp) != dy).any()
    got = run(np_or_xp, x, weights, biases, dy, amp, linear_output=True)
    expected = flat(truth(x, weights, biases, dy, linear_output=True))
    oracle.check_exact(got[0], expected[0])
    layers = len(weights)
    for i in (2 + layers - 1, *range(2 + layers, 2 + 2 * layers)):  # last weight, all biases
        oracle.check_exact(got[i], expected[i])


@pytest.mark.parametrize("amp", HALVES)
@pytest.mark.parametrize("sizes", [(13, 16, 3), (13, 1)], ids=str)
def test_zero_columns_may_fill_rows_up(np_or_xp, sizes, amp):
    """They change no bit, and their gradient is 0."""
    x, weights, biases, dy = data(oracle.normals, 33, sizes)
    x = x.astype(arrays.HALVES[HALVES.index(amp)])
    filled = np.pad(x, ((0, 0), (0, 3)))
    got, expected = (
        run(np_or_xp, a, weights, biases, dy, amp, linear_output=True) for a in (filled, x)
    )
    expected[1] = np.pad(expected[1], ((0, 0), (0, 3)))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_same_bits(np_or_xp):
    case = data(oracle.normals, 65, (13, 64, 3))
    dropouts = [Dropout(0.3, 1, 2, layer) for layer in range(2)]
    first, second = (run(np_or_xp, *case, "float16", dropouts=dropouts) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_thread_order(xp):
    case = data(oracle.normals, 9, (10, 33, 4))

    def call():
        got = run(xp, *case, "bfloat16", dropouts=DROPOUTS[:2])
        return [xp.asarray(a) for a in got]

    oracle.check_thread_order(xp, call)


def test_a_gradient_that_overflows_is_infinite(np_or_xp):
    x, weights, biases, dy = data(oracle.normals, 17, (8, 16, 8))
    dy = np.clip(dy * f32(1e6), -6e4, 6e4)  # what float16 still holds
    with np.errstate(invalid="ignore"):
        _, dx, *gradients = run(np_or_xp, x, weights, biases, dy, "float16")
    assert not np.isfinite(gradients[0]).all()
    assert np.isfinite(gradients[1]).all()
    assert not np.isfinite(dx).all()


@pytest.mark.parametrize(("width", "last"), [(5, "cast_rows"), (1, "single_output_backward")])
def test_launches(sim, width, last):
    """A cast forward; a matmul, or two, a layer; but one kernel does all of a single output."""
    sizes = (13, 64, 128, width)
    forward, backward = launched(sim, sizes, linear_output=True, amp="float16")
    gemm = "cublaslt.matmul"
    assert forward == ["cast_matrices", gemm, "relu_dropout", gemm, gemm]
    assert sorted(backward) == sorted([last, *[gemm] * (6 if width > 1 else 4)])


@pytest.mark.parametrize("amp", HALVES)
def test_layers_read_what_their_model_says(amp):
    x = oracle.normals((5, 6))
    mlp = nn.FusedMLP(6, [7], 3)
    plain = mlp(x).data
    mlp.amp = amp
    y = mlp(x)
    assert y.dtype.name == amp
    np.testing.assert_allclose(y.numpy().astype(f32), plain, atol=0.02)
    assert mlp.after_first(np.zeros((2, 7), f32)).dtype.name == amp
    embedding = MultiTableEmbedding(8, 32)
    layer = EmbeddingMLP(embedding, [16], 1, skip_final_activation=True)
    ids = np.arange(64).reshape(8, 8)
    plain = layer(ids).numpy()
    layer.amp = amp
    got = layer(ids).numpy()
    assert (got != plain).any()
    np.testing.assert_allclose(got, plain, atol=0.02)


def test_refuses_halves_of_something_else(xp):
    x, weights, biases, _ = data(oracle.normals, 3, (2, 3))
    x, weight, bias = (xp.asarray(a) for a in (x, weights[0], biases[0]))
    halves = cast_matrices([weight, bias], "bfloat16")
    for amp, got in (("float16", halves), ("bfloat16", halves[::-1]), ("bfloat16", halves[:1])):
        said = " ".join(f"bfloat16{a.shape}" for a in got)
        text = (
            "fused_mlp: 'halves' must be what cast_matrices makes of weights and biases, "
            f"{amp}(8, 8) {amp}(8,), got {said}."
        )
        with pytest.raises(ValueError, match=oracle.sentence(text)):
            fused_mlp(x, [weight], [bias], amp=amp, halves=got)


def test_refuses():
    x, weights, biases, _ = data(oracle.normals, 3, (2, 3))
    text = "fused_mlp: 'amp' must be None, 'float16' or 'bfloat16', got 'float32'."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        fused_mlp(x, weights, biases, amp="float32")
    text = "fused_mlp: 'x' must be float32 or float16, got bfloat16."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        fused_mlp(x.astype(arrays.HALVES[1]), weights, biases, amp="float16")
    filled = np.zeros((3, 8), arrays.HALVES[1])
    text = "fused_mlp: 'x' must have N = 2 like 'weights[0]', got shape (3, {})."
    for wide in (filled.astype(f32), filled[:, :7]):
        with pytest.raises(ValueError, match=oracle.sentence(text.format(wide.shape[1]))):
            fused_mlp(wide, weights, biases, amp="bfloat16")
    with pytest.raises(ValueError, match=oracle.sentence(text.format(8))):
        fused_mlp(np.zeros((3, 8)), [np.ones((1, 2))], [np.ones(1)])
    text = "fused_mlp: 'weights[0]' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        fused_mlp(x, [weights[0].astype(float)], biases, amp="float16")

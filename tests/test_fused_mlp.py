import numpy as np
import oracle
import pytest

import cupyrec
from cupyrec import Tensor, arrays, fused_mlp, nn, no_grad, optim
from cupyrec.ops.fused_mlp import blocks_of, row_block
from cupyrec.ops.relu_dropout import Dropout
from cupyrec.testing import gradcheck

f32 = np.float32

# rows, and columns of input, hidden layer and output
SHAPES = oracle.covering((0, 1, 3, 17, 127, 1025), (1, 4, 13, 530), (1, 10, 128, 257), (1, 3, 16))


def parameters(sizes, make, dtype=f32):
    pairs = list(zip(sizes[:-1], sizes[1:], strict=True))
    weights = [make((m, n), dtype, seed=i) for i, (n, m) in enumerate(pairs)]
    biases = [make((m,), dtype, seed=100 + i) for i, (_, m) in enumerate(pairs)]
    return weights, biases


def small(shape, dtype, seed):
    return oracle.integers(shape, -1, 1, dtype, seed)


def run(x, weights, biases, dy, **options):
    """Output, then the gradients of x, weights and biases, as arrays."""
    x, *flat = (Tensor(a, requires_grad=True) for a in (x, *weights, *biases))
    weights, biases = flat[: len(weights)], flat[len(weights) :]
    y = fused_mlp(x, weights, biases, **options)
    y.backward(dy)
    return y.data, x.grad, [w.grad for w in weights], [b.grad for b in biases]


def truth(x, weights, biases, dy, dropouts=None, linear_output=False):
    """The same by the oracle."""
    dropouts = dropouts or [Dropout()] * len(weights)
    keeps = [oracle.keep(len(x), len(w), *d) for d, w in zip(dropouts, weights, strict=True)]
    rates = [d.rate for d in dropouts]
    layers = oracle.mlp(x, weights, biases, keeps, rates, linear_output)
    return layers[-1], *oracle.mlp_gradient(dy, layers, weights, rates, linear_output)


def flat(result):
    y, dx, dweights, dbiases = result
    return [y, dx, *dweights, *dbiases]


@pytest.mark.parametrize("shape", [*SHAPES, (70_000, 130, 3, 1)], ids=str)
def test_integer_data_is_exact(shape):
    rows, *sizes = shape
    x, dy = oracle.integers((rows, sizes[0]), -1, 1), oracle.integers((rows, sizes[-1]), -1, 1)
    weights, biases = parameters(sizes, small)
    for linear_output in (False, True):
        got = run(x, weights, biases, dy, linear_output=linear_output)
        expected = truth(x, weights, biases, dy, linear_output=linear_output)
        for a, b in zip(flat(got), flat(expected), strict=True):
            assert (a.dtype, a.shape) == (f32, b.shape)
            oracle.check_exact(a, b)


@pytest.mark.parametrize("rows", [1, 8191, 70_000, 10**6, 10**7 + 1])
@pytest.mark.parametrize("columns", [1, 130, 4096])
def test_blocks_have_few_weight_gradients(rows, columns):
    assert rows <= 64 * row_block(rows, columns)


def test_blocks_are_what_they_are_told_to_be():
    sizes = [(rows, n) for rows in (1, 64, 10**6) for n in (1, 130, 10**6)]
    with blocks_of(64):
        assert {row_block(*size) for size in sizes} == {64}
    assert {row_block(*size) for size in sizes} != {64}


@pytest.mark.parametrize("linear_output", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 127])
def test_dropout_is_exact_and_applied_where_philox_says(rows, linear_output):
    sizes = (3, 10, 17, 5)
    dropouts = [Dropout(0.5, 7, 11, 0), Dropout(0.75, 7, 11, 1), Dropout(0.5, 2**40, 11, 2)]
    x, dy = oracle.integers((rows, 3), 0, 3), oracle.integers((rows, 5), -2, 2)
    weights, biases = parameters(sizes, small)
    options = dict(dropouts=dropouts, linear_output=linear_output)
    got, expected = (f(x, weights, biases, dy, **options) for f in (run, truth))
    for a, b in zip(flat(got), flat(expected), strict=True):
        oracle.check_exact(a, b)
    dry = run(x, weights, biases, dy, linear_output=linear_output)
    assert rows < 2 or (dry[0] != got[0]).any()


@pytest.mark.parametrize("sizes", [(130, 64), (13, 128, 64, 16), (10, 33, 17)], ids=str)
@pytest.mark.parametrize("rows", [127, 1025])
def test_error(rows, sizes):
    x, dy = oracle.normals((rows, sizes[0])), oracle.normals((rows, sizes[-1]), seed=1)
    weights, biases = parameters(sizes, oracle.normals)
    layers, z = [x], x
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        z = layers[-1] @ weight.T + bias
        layers.append(z if i == len(weights) - 1 else np.maximum(z, f32(0)))
    naive_dw, naive_db, grad = [], [], dy
    for i in reversed(range(len(weights))):
        if i < len(weights) - 1:
            grad = grad * (layers[i + 1] > 0)
        naive_dw.insert(0, grad.T @ layers[i])
        naive_db.insert(0, grad.sum(axis=0))
        grad = grad @ weights[i]
    naive = [layers[-1], grad, *naive_dw, *naive_db]
    got = flat(run(x, weights, biases, dy, linear_output=True))
    expected = flat(truth(x, weights, biases, dy, linear_output=True))
    for a, b, c in zip(got, naive, expected, strict=True):
        oracle.check_error(a, b, c)


@pytest.mark.parametrize("linear_output", [False, True])
def test_directional_derivative(linear_output):
    x = oracle.normals((17, 3), np.float64, seed=9)
    weights, biases = parameters((3, 10, 4), oracle.normals, np.float64)
    dropouts = [Dropout(0.3, 1), Dropout(0.2, 1, layer=1)]

    def f(x, w0, b0, w1, b1):
        return fused_mlp(x, [w0, w1], [b0, b1], dropouts=dropouts, linear_output=linear_output)

    assert gradcheck(f, [x, weights[0], biases[0], weights[1], biases[1]])


def test_against_the_operators():
    x = Tensor(oracle.normals((17, 3), np.float64), requires_grad=True)
    weights, biases = parameters((3, 10, 4), oracle.normals, np.float64)
    fused_mlp(x, weights, biases, linear_output=True).sum().backward()
    by_op, x.grad = x.grad, None
    (cupyrec.relu(x @ weights[0].T + biases[0]) @ weights[1].T + biases[1]).sum().backward()
    np.testing.assert_allclose(by_op, x.grad, rtol=1e-12)


@pytest.mark.parametrize("rows", [65, 1025])
def test_same_bits(rows):
    sizes = (130, 257, 64, 3)
    x, dy = oracle.normals((rows, 130)), oracle.normals((rows, 3), seed=1)
    weights, biases = parameters(sizes, oracle.normals)
    dropouts = [Dropout(0.3, 1, 2, layer) for layer in range(3)]
    oracle.check_same_bits(lambda: flat(run(x, weights, biases, dy, dropouts=dropouts)))


def test_arrays_give_an_array_and_tensors_a_tensor():
    x, (weights, biases) = np.ones((2, 3), f32), parameters((3, 4), oracle.normals)
    y = fused_mlp(x, weights, biases)
    assert isinstance(y, np.ndarray)
    tracked = fused_mlp(x, [Tensor(weights[0], requires_grad=True)], biases)
    assert tracked.requires_grad
    np.testing.assert_array_equal(tracked.data, y)
    with no_grad():
        assert not fused_mlp(x, [Tensor(weights[0], requires_grad=True)], biases).requires_grad
    assert not fused_mlp(Tensor(x), weights, biases).requires_grad


def test_gradient_of_the_input_is_left_out_where_nobody_wants_it():
    x, (weights, biases) = np.ones((2, 3), f32), parameters((3, 4), oracle.normals)
    tensors = Tensor(x), Tensor(weights[0], requires_grad=True)
    fused_mlp(tensors[0], [tensors[1]], biases).sum().backward()
    assert tensors[0].grad is None
    assert tensors[1].grad.shape == (4, 3)


def test_views_give_what_copies_give():
    x, dy = oracle.normals((17, 6)), oracle.normals((17, 3), seed=1)
    weights, biases = parameters((3, 4, 3), oracle.normals)
    views = (
        x[:, ::2],
        [np.asfortranarray(w) for w in weights],
        [np.repeat(b, 2)[::2] for b in biases],
        np.asfortranarray(dy),
    )
    got = flat(run(*views))
    for a, b in zip(got, flat(run(x[:, ::2].copy(), weights, biases, dy)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    y = fused_mlp(x[:, :3], weights, biases)
    np.testing.assert_array_equal(x, oracle.normals((17, 6)))  # inputs stay as they are
    assert not np.shares_memory(y, x)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.filterwarnings("error")
def test_nan_and_inf_in_one_row_reach_its_output_alone(value):
    x = oracle.normals((17, 3))
    weights, biases = parameters((3, 10, 10, 2), oracle.normals)
    x[5, 1] = value
    y = fused_mlp(x, weights, biases, linear_output=True)
    assert not np.isfinite(y[5]).any()
    assert np.isfinite(np.delete(y, 5, axis=0)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("width", [10, 300])
@pytest.mark.filterwarnings("error")  # a skipped step of loss scaling is no news
def test_gradients_that_overflow_are_passed_on(value, width):
    weights, biases = parameters((3, width, width, 2), oracle.normals)
    dy = np.zeros((17, 2), f32)
    dy[5] = value, -value
    result = run(oracle.normals((17, 3)), weights, biases, dy, linear_output=True)
    assert all(not np.isfinite(g).all() for g in flat(result)[1:])


def test_nan_in_a_parameter_reaches_every_output():
    x = oracle.normals((17, 3))
    for kind in (0, 1):
        both = parameters((3, 10, 2), oracle.normals)
        both[kind][0].flat[4] = np.nan
        assert np.isnan(fused_mlp(x, *both)).all()


def refusals():
    x, (weights, biases) = np.ones((2, 3), f32), parameters((3, 4, 5), oracle.normals)
    return [
        (
            (x[0], weights, biases), {}, ValueError,
            "'x' must have axes (B, N), got shape (3,).",
        ),
        (
            (x.astype(int), weights, biases), {}, TypeError,
            "'x' must be float32, got int64.",
        ),
        (
            (x, [], []), {}, ValueError,
            "'weights' and 'biases' must be equally many, at least one, got 0 and 0.",
        ),
        (
            (x, weights, biases[:1]), {}, ValueError,
            "'weights' and 'biases' must be equally many, at least one, got 2 and 1.",
        ),
        (
            (x, [weights[0], weights[0]], biases), {}, ValueError,
            "'weights[1]' must have axes (N, 4), got shape (4, 3).",
        ),
        (
            (x, weights, [biases[0], biases[0]]), {}, ValueError,
            "'biases[1]' must have N = 5 like 'weights[1]', got shape (4,).",
        ),
        (
            (x, [weights[0], weights[1].astype(float)], biases), {}, TypeError,
            "'weights[1]' must be float32, got float64.",
        ),
        (
            (x, weights, [biases[0].astype(float), biases[1]]), {}, TypeError,
            "'biases[0]' must be float32, got float64.",
        ),
        (
            (x, weights, biases), {"dropouts": [Dropout()]}, ValueError,
            "'dropouts' must be one a layer (2), got 1.",
        ),
        (
            (x, weights, biases), {"dropouts": [Dropout(), Dropout(1.0)]}, ValueError,
            "'dropouts[1].rate' must lie in [0, 1), got 1.0.",
        ),
        (
            (None, weights, biases), {}, TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got NoneType.",
        ),
    ]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "error", "text"), refusals())
def test_refuses(arguments, options, error, text):
    with pytest.raises(error, match=oracle.sentence(f"fused_mlp: {text}")):
        fused_mlp(*arguments, **options)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_go_to_the_optimizers_buffer_even_of_shared_weights(device, passes):
    """One weight in two layers of an op, and the op twice: all four gradients add up."""
    xp = arrays.module(device)
    results = []
    for taken in (True, False):
        weight = nn.Parameter(xp.asarray(oracle.integers((3, 3), -2, 3)))
        bias = nn.Parameter(xp.asarray(oracle.integers((3,), -2, 3, seed=1)))
        if taken:
            optim.SGD([weight, bias], lr=1.0)
        x = xp.asarray(oracle.integers((5, 3), -2, 3, seed=2))
        for _ in range(passes):
            y = fused_mlp(x, [weight, weight], [bias, bias], linear_output=True)
            (y + fused_mlp(x, [weight], [bias])).backward(xp.ones((5, 3), np.float32))
        assert (weight.grad is weight.grad_buffer) == taken
        results.append([arrays.to_host(p.grad) for p in (weight, bias)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.abs(a).max() > 0

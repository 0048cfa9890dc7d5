import numpy as np
import oracle
import pytest
from test_fused_mlp import flat, parameters, small, truth

from cupyrec import Tensor, arrays, cublaslt, fused_mlp, no_grad
from cupyrec.ops.relu_dropout import Dropout

f32 = np.float32
SHAPES = oracle.covering((0, 1, 3, 17, 127), (1, 4, 13, 130), (1, 10, 128, 257), (1, 3, 16))
DROPOUTS = [Dropout(0.5, 7, 11, 0), Dropout(0.0), Dropout(0.75, 2**40, 11, 2)]


def run(xp, x, weights, biases, dy, **options):
    """Output, then the gradients of x, weights and biases, as NumPy arrays."""
    x, *both = (Tensor(arrays.copy_to(xp, a), requires_grad=True) for a in (x, *weights, *biases))
    weights, biases = both[: len(weights)], both[len(weights) :]
    y = fused_mlp(x, weights, biases, **options)
    y.backward(arrays.copy_to(xp, dy))
    grads = [t.grad for t in (x, *weights, *biases)]
    assert {arrays.device(a) for a in (y.data, *grads)} == {arrays.device(x.data)}
    return [arrays.to_host(a) for a in (y.data, *grads)]


def odd(shape, dtype, seed):
    """Even weights and odd biases: no sum is 0, where cublasLt's mask may be what it likes."""
    return 2 * small(shape, dtype, seed) + dtype(len(shape) == 1)


def data(make, rows, sizes):
    x, dy = make((rows, sizes[0]), f32, seed=8), make((rows, sizes[-1]), f32, seed=9)
    return x, *parameters(sizes, make), dy


@pytest.fixture(autouse=True)
def nothing_is_refused(request):
    cublaslt.refused.clear()
    yield
    assert "cuda" in request.node.name or not cublaslt.refused


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact(xp, shape):
    case = data(odd, *(shape[0], shape[1:]))
    for linear_output in (False, True):
        got = run(xp, *case, linear_output=linear_output)
        for a, b in zip(got, flat(truth(*case, linear_output=linear_output)), strict=True):
            assert (a.dtype, a.shape) == (f32, b.shape)
            oracle.check_exact(a, b)


@pytest.mark.parametrize("linear_output", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_dropout_is_exact_and_applied_where_philox_says(xp, rows, linear_output):
    case = data(odd, rows, (3, 10, 17, 5))
    options = dict(dropouts=DROPOUTS, linear_output=linear_output)
    for a, b in zip(run(xp, *case, **options), flat(truth(*case, **options)), strict=True):
        oracle.check_exact(a, b)


@pytest.mark.parametrize("linear_output", [False, True])
def test_agrees_with_the_cpu(xp, linear_output):
    case = data(oracle.normals, 127, (13, 64, 130, 5))
    options = dict(dropouts=DROPOUTS, linear_output=linear_output)
    for a, b in zip(run(xp, *case, **options), run(np, *case, **options), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * np.abs(b).max())
        assert ((a == 0) == (b == 0)).mean() > 0.999  # but for sums that come out as zero


@pytest.mark.parametrize("sizes", [(130, 64), (13, 128, 64, 16), (10, 33, 17)], ids=str)
def test_error(xp, sizes):
    x, weights, biases, dy = case = data(oracle.normals, 127, sizes)
    layers = [x]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        z = layers[-1] @ weight.T + bias
        layers.append(z if i == len(weights) - 1 else np.maximum(z, f32(0)))
    dweights, dbiases, grad = [], [], dy
    for i in reversed(range(len(weights))):
        if i < len(weights) - 1:
            grad = grad * (layers[i + 1] > 0)
        dweights.insert(0, grad.T @ layers[i])
        dbiases.insert(0, grad.sum(axis=0))
        grad = grad @ weights[i]
    naive = [layers[-1], grad, *dweights, *dbiases]
    got, expected = run(xp, *case, linear_output=True), flat(truth(*case, linear_output=True))
    for a, b, c in zip(got, naive, expected, strict=True):
        oracle.check_error(a, b, c)


def test_thread_order(xp):
    x, weights, biases, dy = data(oracle.normals, 9, (10, 33, 4))

    def call():
        return [xp.asarray(a) for a in run(xp, x, weights, biases, dy, dropouts=DROPOUTS[:2])]

    oracle.check_thread_order(xp, call)


def test_gradient_of_the_input_is_left_out_where_nobody_wants_it(xp):
    x, (weights, biases) = xp.ones((2, 3), f32), parameters((3, 4), oracle.normals)
    weight, bias = (arrays.copy_to(xp, a[0]) for a in (weights, biases))
    tensors = Tensor(x), Tensor(weight, requires_grad=True)
    fused_mlp(tensors[0], [tensors[1]], [bias]).backward(xp.ones((2, 4), f32))
    assert tensors[0].grad is None
    assert tensors[1].grad.shape == (4, 3)
    with no_grad():
        assert not fused_mlp(x, [tensors[1]], [bias]).requires_grad


def test_views_give_what_copies_give(xp):
    x, weights, biases, dy = data(oracle.normals, 17, (6, 4, 3))
    expected = run(xp, x, weights, biases, dy)
    twice = [
        xp.asarray(np.repeat(x, 2, axis=1))[:, ::2],
        [xp.asarray(w.T.copy()).T for w in weights],
        [xp.asarray(np.repeat(b, 2))[::2] for b in biases],
        xp.asarray(dy.T.copy()).T,
    ]
    for a, b in zip(run(xp, *twice), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_at_any_multiple_of_4_bytes(xp):
    """Views of one flat buffer, as an optimizer keeps them."""
    x, weights, biases, dy = data(oracle.normals, 17, (6, 5, 3))
    expected = run(xp, x, weights, biases, dy)
    flat_buffer = xp.asarray(np.concatenate([p.ravel() for p in (*weights, *biases)], dtype=f32))
    at, views = 0, []
    for p in (*weights, *biases):
        views.append(flat_buffer[at : at + p.size].reshape(p.shape))
        at += p.size
    for a, b in zip(run(xp, x, views[:2], views[2:], dy), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_in_one_row_reach_its_output_alone(xp, value):
    x, weights, biases, _ = data(oracle.normals, 17, (3, 10, 10, 2))
    x[5, 1] = value
    x, *both = (xp.asarray(a) for a in (x, *weights, *biases))
    y = arrays.to_host(fused_mlp(x, both[:3], both[3:], linear_output=True))
    if xp is arrays.module("sim"):  # what cublasLt's ReLU makes of NaN is not documented
        assert not np.isfinite(y[5]).any()
    assert np.isfinite(np.delete(y, 5, axis=0)).all()


def test_refuses_float64(xp):
    x, weight, bias = (xp.ones(s, float) for s in ((2, 3), (4, 3), 4))
    text = "fused_mlp: 'weights[0]' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        fused_mlp(x, [weight], [bias])


def test_plain_gemms_give_the_same(xp, monkeypatch):
    case = data(odd, 17, (3, 10, 17, 5))
    monkeypatch.setattr(cublaslt, "_simulate", lambda *arguments: False)
    monkeypatch.setattr(cublaslt, "_run", lambda *arguments: False)
    for a, b in zip(
        run(xp, *case, dropouts=DROPOUTS), flat(truth(*case, dropouts=DROPOUTS)), strict=True
    ):
        oracle.check_exact(a, b)
    assert cublaslt.refused
    cublaslt.refused.clear()


def test_tf32_only_where_asked(xp):
    """2049 has 12 bits: TF32 takes it for 2048 or 2050."""
    x, weight, dy = np.array([[2049]], f32), np.array([[1], [0]], f32), np.array([[2049, 0]], f32)
    for tf32 in (False, True):
        got = run(xp, x, [weight], [np.zeros(2, f32)], dy, linear_output=True, tf32=tf32)
        for value in (got[0][0, 0], got[1][0, 0]):
            assert abs(value - 2049) == tf32
        assert (got[2][0, 0] != 2049**2) == tf32


# What it asks of the device


def launched(sim, sizes, **options):
    """Names of what a step launches forward and backward; it neither waits nor allocates."""
    x, weights, biases, dy = data(oracle.normals, 33, sizes)
    x, dy, *both = (sim.asarray(a) for a in (x, dy, *weights, *biases))
    x, *both = (Tensor(a, requires_grad=True) for a in (x, *both))
    for _ in range(3):
        with sim.record() as seen:
            y = fused_mlp(x, both[:3], both[3:], dropouts=DROPOUTS, **options)
            forward = [launch.name for launch in seen.launches]
            node = y._node
            grads = node.backward(dy)
            backward = [launch.name for launch in seen.launches[len(forward) :]]
            del y, node, grads
    assert (seen.syncs, seen.allocations) == (0, 0)
    return forward, backward


@pytest.mark.parametrize("linear_output", [False, True])
def test_launches(sim, linear_output):
    forward, backward = launched(sim, (13, 64, 130, 5), linear_output=linear_output)
    gemm, last = "cublaslt.matmul", [] if linear_output else ["relu_dropout"]
    assert forward == [gemm, "relu_dropout", gemm, gemm, *last]
    assert backward == [*(["relu_dropout_backward"] if last else []), *[gemm] * 6]


def test_one_output_or_row_goes_without_what_cublaslt_refuses(sim):
    """Its bias gradients of one row or column, its masked matmul of one term."""
    for rows, sizes, sums in [(17, (5, 4, 1), 0), (1, (5, 4, 3), 1), (17, (5, 1, 3), 1)]:
        case = data(odd, rows, sizes)
        with sim.record() as seen:
            got = run(sim, *case, linear_output=True)
        for a, b in zip(got, flat(truth(*case, linear_output=True)), strict=True):
            oracle.check_exact(a, b)
        names = [launch.name for launch in seen.launches]
        assert names.count("sum") == sums
        assert names.count("single_output_backward") == (1 in sizes)
        assert names.count("cublaslt.matmul") == 6 - 2 * (1 in sizes)


def test_weight_gradients_go_to_the_second_stream(sim, monkeypatch):
    main, seen = sim.cuda.get_current_stream(), []
    submit = sim.cuda.submit

    def spy(work, *given):
        seen.append(sim.cuda.get_current_stream() is main)
        submit(work, *given)

    x, weights, biases, dy = data(oracle.normals, 17, (13, 64, 130, 5))
    monkeypatch.setattr(sim.cuda, "submit", spy)
    run(sim, x, weights, biases, dy, linear_output=True)
    assert seen == [True] * 3 + [False, True] * 3
    assert sim.cuda.get_current_stream() is main

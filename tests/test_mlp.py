import math

import numpy as np
import oracle
import pytest
from oracle import sentence

import cupyrec
from cupyrec import arrays, nn, random
from cupyrec.nn.mlp import cast_together
from cupyrec.testing import gradcheck


def seeded(*arguments, **options):
    cupyrec.manual_seed(5)
    return nn.FusedMLP(*arguments, **options)


@pytest.mark.parametrize("hidden", [[], [7], [5, 1, 6]])
@pytest.mark.parametrize("linear", [False, True])
def test_values_and_gradients_against_loops(hidden, linear):
    mlp = seeded(3, hidden, 4, skip_final_activation=linear)
    x = oracle.normals((9, 3))
    weights, biases = [w.data for w in mlp.weights], [b.data for b in mlp.biases]
    ones, zeros = [1] * len(weights), [0] * len(weights)
    layers = oracle.mlp(x, weights, biases, ones, zeros, linear)
    tensor = cupyrec.Tensor(x, requires_grad=True)
    y = mlp(tensor)
    np.testing.assert_allclose(y.numpy(), layers[-1], rtol=1e-5, atol=1e-6)
    dy = oracle.normals(y.shape, seed=1)
    y.backward(dy)
    dx, dweights, dbiases = oracle.mlp_gradient(dy, layers, weights, zeros, linear)
    np.testing.assert_allclose(tensor.grad, dx, rtol=1e-4, atol=1e-5)
    for got, expected in zip([*mlp.weights, *mlp.biases], [*dweights, *dbiases], strict=True):
        np.testing.assert_allclose(got.grad, expected, rtol=1e-4, atol=1e-5)


def test_names_and_true_shapes():
    state = seeded(13, [5, 6], 1).state_dict()
    assert {name: array.shape for name, array in state.items()} == {
        "weights.0": (5, 13), "weights.1": (6, 5), "weights.2": (1, 6),
        "biases.0": (5,), "biases.1": (6,), "biases.2": (1,),
    }  # fmt: skip
    assert {array.dtype for array in state.values()} == {np.dtype(np.float32)}


def test_first_values_are_uniform_in_fan_in():
    mlp = seeded(100, [400], 300)
    for array, fan_in in zip((mlp.weights[0].data, mlp.weights[1].data), (100, 400), strict=True):
        bound = 1 / math.sqrt(fan_in)
        assert 0.99 * bound < np.abs(array).max() <= bound
        assert abs(array.mean()) < 0.02 * bound
        assert array.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert 0.9 / 10 < np.abs(mlp.biases[0].data).max() <= 1 / 10
    again, other = seeded(100, [400], 300), nn.FusedMLP(100, [400], 300)
    assert (
        again.weights[0].data.tobytes()
        == mlp.weights[0].data.tobytes()
        != other.weights[0].data.tobytes()
    )
    assert again.dropout_seed == mlp.dropout_seed != other.dropout_seed


def test_dropout_keeps_what_philox_says_and_only_in_training():
    mlp = seeded(4, [70, 33], 5, hidden_dropout_rate=[0.25, 0.5], out_dropout_rate=0.1)
    x, step = oracle.normals((6, 4)), 11
    random.set_step(step)
    try:
        got = mlp(x).numpy()
        again = mlp(x).numpy()
        random.set_step(step + 1)
        assert not np.array_equal(mlp(x).numpy(), got)
    finally:
        random.set_step(0)
    rates = [0.25, 0.5, 0.1]
    keeps = [
        oracle.keep(6, width, rate, mlp.dropout_seed, step, layer)
        for layer, (width, rate) in enumerate(zip([70, 33, 5], rates, strict=True))
    ]
    weights, biases = [w.data for w in mlp.weights], [b.data for b in mlp.biases]
    expected = oracle.mlp(x, weights, biases, keeps, rates, False)[-1]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(got, again)
    ones, zeros = [1] * 3, [0] * 3
    expected = oracle.mlp(x, weights, biases, ones, zeros, False)[-1]
    np.testing.assert_allclose(mlp.eval()(x).numpy(), expected, rtol=1e-4, atol=1e-6)


def test_one_rate_is_for_all_hidden_layers_and_none_for_a_linear_end():
    assert seeded(2, [3, 3], 1, 0.5).dropout_rates == [0.5, 0.5, 0.0]
    assert seeded(2, [], 1, 0.5).dropout_rates == [0.0]
    mlp = seeded(2, [], 3, out_dropout_rate=0.9, skip_final_activation=True)
    x = oracle.normals((5, 2))
    np.testing.assert_array_equal(mlp(x).numpy(), mlp.eval()(x).numpy())
    assert mlp(x[:0]).shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((0, [], 1), {}, ValueError, "'in_features' must be at least 1, got 0."),
        ((1, [2, -1], 1), {}, ValueError, "'hidden_features' must be at least 1, got -1."),
        ((1, [2], 1.5), {}, TypeError, "'out_features' must be an integer, got 1.5."),
        (
            (1, [2], 1, [0.1, 0.2]), {}, ValueError,
            "'hidden_dropout_rate' must be one a hidden layer (1), got 2.",
        ),
        ((1, [2], 1, 1.0), {}, ValueError, "'hidden_dropout_rate' must lie in [0, 1), got 1.0."),
        ((1, [2], 1, "x"), {}, TypeError, "'hidden_dropout_rate' must be a number, got 'x'."),
        (
            (1, [2], 1), {"out_dropout_rate": -0.1}, ValueError,
            "'out_dropout_rate' must lie in [0, 1), got -0.1.",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, options, error, text):
    with pytest.raises(error, match=sentence(f"FusedMLP: {text}")):
        nn.FusedMLP(*arguments, **options)


def test_an_input_of_another_width():
    text = "fused_mlp: 'x' must have N = 3 like 'weights[0]', got shape (2, 4)."
    with pytest.raises(ValueError, match=sentence(text)):
        seeded(3, [], 1)(np.zeros((2, 4), np.float32))


@pytest.mark.parametrize("amp", [None, "float16", "bfloat16"])
def test_what_is_cast_together_changes_no_bit(np_or_xp, amp):
    mlps = [seeded(13, [16], 5).to(arrays.name(np_or_xp)), seeded(5, [], 1)]
    mlps[1].to(arrays.name(np_or_xp))
    for mlp in mlps:
        mlp.amp = amp
    x = np_or_xp.asarray(oracle.normals((9, 13)))
    for given in (x, cupyrec.Tensor(x), cupyrec.Tensor(x, requires_grad=True)):
        results = []
        for together in (False, True):
            own, halves = cast_together(given, mlps) if together else (given, [None, None])
            y = mlps[1](mlps[0](own, halves[0]), halves[1])
            y.backward(np_or_xp.ones(y.shape, y.dtype))
            leaves = [p for mlp in mlps for p in mlp.parameters()]
            leaves += [given] if isinstance(given, cupyrec.Tensor) and given.requires_grad else []
            made = y.data, *(p.grad for p in leaves)
            results.append([arrays.to_host(a).tobytes() for a in made])
            for p in leaves:
                p.zero_grad()
        assert results[0] == results[1]


def test_cast_together_takes_one_launch_and_sees_changes(sim):
    mlps = [seeded(13, [16], 5).to("sim"), seeded(5, [], 1).to("sim")]
    for mlp in mlps:
        mlp.amp = "float16"
    x = sim.asarray(oracle.normals((9, 13)))
    for value in (1.0, 2.0):
        mlps[1].biases[0].data[0] = value
        with sim.record() as seen:
            own, halves = cast_together(x, mlps)
        assert [launch.name for launch in seen.launches] == ["cast_matrices"]
        assert (own.shape, own.dtype) == ((9, 16), np.float16)
        assert [len(h) for h in halves] == [4, 2]
        assert halves[1][1].get()[0] == value
    assert cast_together(None, mlps)[0] is None


def test_cast_together_leaves_what_does_not_fit(sim):
    """Numbers of columns that are filled up to as many must not pass for one another."""
    mlps = [seeded(13, [16], 5).to("sim"), seeded(5, [], 1).to("sim")]
    mlps[0].amp = mlps[1].amp = "bfloat16"
    x = sim.asarray(oracle.normals((9, 14)))
    own, (halves, _) = cast_together(x, mlps)
    text = "fused_mlp: 'x' must have N = 13 like 'weights[0]', got shape (9, 14)."
    with pytest.raises(ValueError, match=sentence(text)):
        mlps[0](own, halves)
    mlps[1].amp = "float16"
    assert cast_together(x, mlps) == (x, [None, None])


@pytest.mark.parametrize("linear", [False, True])
def test_layers_are_normalized_before_their_relu(np_or_xp, linear):
    mlp = seeded(4, [70, 33], 5, [0.25, 0.5], 0.1, linear, batch_norm=True)
    assert len(mlp.norms) == 3 - linear  # a linear end isn't
    for seed, norm in enumerate(mlp.norms):
        norm.weight.data[...] = oracle.normals(norm.weight.shape, seed=seed)
        norm.bias.data[...] = oracle.normals(norm.bias.shape, seed=9 + seed)
    mlp.to(arrays.name(np_or_xp))
    given, rates = oracle.normals((6, 4)), [0.25, 0.5, 0.1]
    x, means, running = np.float64(given), [], 0.9
    for layer, (weight, bias) in enumerate(zip(mlp.weights, mlp.biases, strict=True)):
        x = x @ np.float64(weight.numpy()).T + bias.numpy()
        if layer < len(mlp.norms):
            norm = mlp.norms[layer]
            means.append((1 - running) * x.mean(axis=0))
            x = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + norm.eps)
            x = np.maximum(x * norm.weight.numpy() + norm.bias.numpy(), 0)
            keep = oracle.keep(6, x.shape[1], rates[layer], mlp.dropout_seed, 0, layer)
            x = x * keep / (1 - rates[layer])
    given = np_or_xp.asarray(given)
    np.testing.assert_allclose(mlp(given).numpy(), x, rtol=1e-3, atol=1e-4)
    for norm, mean in zip(mlp.norms, means, strict=True):
        np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-3, atol=1e-5)
    alone = mlp.eval()(given[:1]).numpy()  # a row's output is its own, and has no dropout
    np.testing.assert_allclose(alone, mlp(given).numpy()[:1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("linear", [False, True])
def test_what_comes_after_the_first_layer_is_normalized_too(linear):
    mlp = seeded(4, [7, 6], 2, skip_final_activation=linear, batch_norm=True)
    x = oracle.normals((9, 4))
    mlp(x)  # for running statistics
    first = nn.FusedMLP(4, [], 7, batch_norm=True)
    first.weights, first.biases, first.norms = mlp.weights[:1], mlp.biases[:1], mlp.norms[:1]
    whole, parts = mlp.eval()(x), mlp.after_first(first.eval()(x))
    np.testing.assert_array_equal(parts.numpy(), whole.numpy())
    assert first.after_first(x) is x


def test_gradient_of_normalized_layers():
    mlp = seeded(4, [7, 6], 2, skip_final_activation=True, batch_norm=True)
    for _, buffer in mlp.named_buffers():
        buffer.data = np.float64(buffer.data)
    weights, biases, norms = mlp.weights, mlp.biases, mlp.norms
    held = [*weights, *biases, *(p for norm in norms for p in (norm.weight, norm.bias))]

    def forward(x, *values):
        mlp.weights, mlp.biases = list(values[:3]), list(values[3:6])
        for i, norm in enumerate(norms):
            norm.weight, norm.bias = values[6 + 2 * i : 8 + 2 * i]
        return mlp(x)

    inputs = [oracle.normals((9, 4), np.float64), *(np.float64(p.data) for p in held)]
    assert gradcheck(forward, inputs)

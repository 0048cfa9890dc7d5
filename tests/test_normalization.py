import copy

import numpy as np
import oracle
import pytest

from cupyrec import arrays, nn, optim


def move(xp, x):
    return arrays.copy_to(xp, x)


def test_layer_norm_is_the_op_with_its_parameters(np_or_xp):
    layer = nn.LayerNorm(5, eps=0.25).to(arrays.name(np_or_xp))
    assert {n: p.shape for n, p in layer.named_parameters()} == {"weight": (5,), "bias": (5,)}
    x, ones, zeros = oracle.normals((2, 3, 5)), np.ones(5), np.zeros(5)
    first = layer(move(np_or_xp, x)).numpy()
    expected = oracle.layer_norm(x.reshape(6, 5), ones, zeros, 0.25).reshape(x.shape)
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)
    weight, bias = oracle.normals(5, seed=1), oracle.normals(5, seed=2)
    layer.load_state_dict({"weight": weight, "bias": bias})
    got = copy.deepcopy(layer).eval()(move(np_or_xp, x)).numpy()  # the same in evaluation
    expected = oracle.layer_norm(x.reshape(6, 5), weight, bias, 0.25).reshape(x.shape)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_layer_norm_learns():
    layer, x = nn.LayerNorm(3), oracle.normals((50, 3))
    target = oracle.layer_norm(x, np.array([2, -1, 0.5]), np.array([1, 0, -3]), 1e-5)
    optimizer = optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(200):
        ((layer(x) - target.astype(np.float32)) ** 2).mean().backward()
        optimizer.step()
    np.testing.assert_allclose(layer.weight.data, [2, -1, 0.5], atol=0.01)
    np.testing.assert_allclose(layer.bias.data, [1, 0, -3], atol=0.01)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0,), ValueError, "'features' must be at least 1, got 0."),
        ((2.5,), TypeError, "'features' must be an integer, got 2.5."),
        ((2, -1e-5), ValueError, "'eps' must be finite and at least 0, got -1e-05."),
    ],
)
def test_layer_norm_refuses(arguments, error, text):
    with pytest.raises(error, match=oracle.sentence(f"LayerNorm: {text}")):
        nn.LayerNorm(*arguments)

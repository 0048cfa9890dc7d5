import itertools

import numpy as np
import oracle
import pytest
from oracle import sentence

import cupyrec
from cupyrec import arrays, nn


@pytest.mark.parametrize("self_interaction", [False, True])
@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("features", [1, 5])
def test_columns_stand_as_the_formula_says(features, self_interaction, concat, padding):
    layer = nn.FusedDotInteraction(self_interaction, concat, padding)
    dense, sparse = oracle.normals((3, 4)), oracle.normals((3, features, 4), seed=1)
    expected = oracle.dot_interaction(dense, sparse, self_interaction, concat, padding)
    inputs = [cupyrec.Tensor(x, requires_grad=True) for x in (dense, sparse)]
    got = layer(*inputs)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert layer.width(features + 1, 4) == expected.shape[1]
    grad = oracle.normals(expected.shape, seed=2)
    got.backward(grad)
    truth = oracle.dot_interaction_gradient(grad, dense, sparse, self_interaction, concat)
    for tensor, gradient in zip(inputs, truth, strict=True):
        np.testing.assert_allclose(tensor.grad, gradient, rtol=1e-4, atol=1e-5)


def test_without_dense():
    sparse = oracle.normals((3, 4, 2))
    layer = nn.FusedDotInteraction(output_concat=False)
    expected = oracle.dot_interaction(None, sparse, concat=False)
    np.testing.assert_allclose(layer(None, sparse), expected, rtol=1e-5, atol=1e-6)
    assert layer.width(4, 2) == 6


@pytest.mark.parametrize("features", [1, 2, 6])
@pytest.mark.parametrize("with_dense", [False, True])
def test_sum_pooling_adds_up_all_pairs(features, with_dense):
    dense = oracle.normals((5, 3), np.float64) if with_dense else None
    sparse = oracle.normals((5, features, 3), np.float64, seed=1)
    layer = nn.FusedDotInteraction(output_concat=False, pooling="sum")
    stacked = [sparse[:, f] for f in range(features)] + ([dense] if with_dense else [])
    expected = np.zeros((5, 1))
    for a, b in itertools.combinations(stacked, 2):
        expected += (a * b).sum(axis=1, keepdims=True)
    got = layer(dense, sparse)
    assert got.shape == (5, 1)
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)
    assert layer.width(features + with_dense, 3) == 1
    assert layer(dense, cupyrec.Tensor(sparse)).shape == (5, 1)


def test_gradient_of_sum_pooling():
    layer = nn.FusedDotInteraction(output_concat=False, pooling="sum")
    inputs = [oracle.normals((4, 3), np.float64), oracle.normals((4, 2, 3), np.float64, seed=1)]
    assert cupyrec.testing.gradcheck(layer, inputs)


@pytest.mark.parametrize("pooling", ["none", "sum"])
def test_no_rows(pooling):
    layer = nn.FusedDotInteraction(output_concat=pooling == "none", pooling=pooling)
    dense, sparse = np.zeros((0, 4), np.float32), np.zeros((0, 3, 4), np.float32)
    assert layer(dense, sparse).shape == (0, layer.width(4, 4))


def test_what_is_refused():
    text = "FusedDotInteraction: 'pooling' must be 'none' or 'sum', got 'mean'."
    with pytest.raises(ValueError, match=sentence(text)):
        nn.FusedDotInteraction(pooling="mean")
    for options in ((True, False, 0), (False, True, 0), (False, False, 2)):
        text = (
            "FusedDotInteraction: pooling='sum' takes no self_interaction, output_concat or "
            f"output_padding, got {options[0]}, {options[1]}, {options[2]}."
        )
        with pytest.raises(ValueError, match=sentence(text)):
            nn.FusedDotInteraction(*options, pooling="sum")
    with pytest.raises(
        ValueError, match=r"^dot_interaction: 'sparse' must have D = 4 like 'dense'"
    ):
        nn.FusedDotInteraction()(np.zeros((2, 4), np.float32), np.zeros((2, 3, 5), np.float32))


@pytest.mark.parametrize("padding", [0, 1, 6])
def test_rows_are_whole_with_amp(np_or_xp, padding):
    plain, layer = (nn.FusedDotInteraction(True, True, padding, whole_rows=w) for w in (0, 1))
    inputs = [
        np_or_xp.asarray(oracle.integers(shape, -2, 2).astype(np.float16))
        for shape in ((3, 4), (3, 3, 4))
    ]
    expected = arrays.to_host(plain(*inputs))
    assert layer.width(4, 4) == plain.width(4, 4) == expected.shape[1] == 14 + padding
    np.testing.assert_array_equal(arrays.to_host(layer(*inputs)), expected)
    plain.amp = layer.amp = "float16"
    assert plain(*inputs).shape[1] == 14 + padding
    got = arrays.to_host(layer(*inputs))
    assert got.shape[1] == (16 if padding < 6 else 24)
    np.testing.assert_array_equal(got[:, : 14 + padding], expected)
    assert not got[:, 14 + padding :].any()


@pytest.mark.parametrize("dtype", arrays.HALVES, ids=str)
@pytest.mark.parametrize("pooling", ["none", "sum"])
def test_amp_casts_what_is_not_of_16_bits(np_or_xp, pooling, dtype):
    """On whole numbers the cast loses nothing; gradients have the types of the inputs."""
    layer = nn.FusedDotInteraction(output_concat=pooling == "none", pooling=pooling)
    dense, sparse = oracle.integers((3, 4), -2, 2), oracle.integers((3, 5, 4), -2, 2, seed=1)
    expected = np.asarray(layer(dense, sparse))
    layer.amp = str(dtype)
    mixed = [np_or_xp.asarray(x) for x in (dense, sparse.astype(dtype))]
    inputs = [cupyrec.Tensor(x, requires_grad=True) for x in mixed]
    got = layer(*inputs)
    assert got.dtype == (dtype if pooling == "none" else np.float32)
    np.testing.assert_array_equal(got.numpy(), expected)
    got.backward(np_or_xp.asarray(np.ones(got.shape, got.dtype)))
    assert [x.grad.dtype for x in inputs] == [np.float32, dtype]
    if pooling == "none":
        half = np_or_xp.asarray(sparse.astype(dtype))
        layer = nn.FusedDotInteraction(output_concat=False)
        layer.amp = str(dtype)
        assert layer(None, half).dtype == dtype


@pytest.mark.parametrize("mode", ["matrix", "vector"])
def test_cross_interaction(mode):
    cupyrec.manual_seed(3)
    layer = nn.FusedCrossInteraction(5, mode)
    x, x0 = oracle.normals((4, 5)), oracle.normals((4, 5), seed=1)
    weight = np.float64(layer.weight.data)
    assert np.abs(weight).max() <= 1 / np.sqrt(5)
    assert weight.std() > 0.1
    assert not layer.bias.data.any()
    layer.bias.data[...] = bias = oracle.normals(5, seed=2)
    if mode == "vector":
        expected = x0 * (x @ weight)[:, None] + bias + x
    else:
        expected = x0 * (x @ weight.T + bias) + x
    np.testing.assert_allclose(layer(x, x0).numpy(), expected, rtol=1e-5, atol=1e-6)
    layer.amp = "float16"
    rounded = layer(x, x0).numpy()
    assert np.array_equal(rounded, layer(x, x0).numpy())
    np.testing.assert_allclose(rounded, expected, rtol=1e-2, atol=1e-2)
    assert (np.abs(rounded - expected).max() > 1e-5) == (mode == "matrix")


def test_cross_interaction_refuses():
    text = "FusedCrossInteraction: 'features' must be at least 1, got 0."
    with pytest.raises(ValueError, match=sentence(text)):
        nn.FusedCrossInteraction(0)
    text = "FusedCrossInteraction: 'mode' must be 'matrix' or 'vector', got 'v'."
    with pytest.raises(ValueError, match=sentence(text)):
        nn.FusedCrossInteraction(3, "v")

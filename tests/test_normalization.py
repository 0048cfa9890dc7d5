import copy

import numpy as np
import oracle
import pytest

import cupyrec
from cupyrec import Tensor, arrays, checkpoint, nn, optim


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


def test_batch_norm_learns_running_statistics(np_or_xp):
    layer = nn.BatchNorm1d(4, eps=0.25, momentum=0.5).to(arrays.name(np_or_xp))
    mean, variance = np.zeros(4), np.ones(4)
    for seed in range(3):
        x = oracle.normals((50, 4), seed=seed) * np.float32(3) + np.arange(4, dtype=np.float32)
        y = layer(move(np_or_xp, x)).numpy()
        expected = oracle.layer_norm(x.T, np.ones(50), np.zeros(50), 0.25).T
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        mean = 0.5 * mean + 0.5 * x.mean(axis=0, dtype=float)
        variance = 0.5 * variance + 0.5 * x.var(axis=0, ddof=1, dtype=float)
    np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.running_var.numpy(), variance, rtol=1e-5)
    one = layer.eval()(move(np_or_xp, x[:1])).numpy()
    np.testing.assert_allclose(one, (x[:1] - mean) / np.sqrt(variance + 0.25), rtol=1e-4, atol=1e-5)
    assert layer.train()(move(np_or_xp, x[:0])).shape == (0, 4)
    np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-5, atol=1e-6)


def test_running_statistics_are_state_but_no_parameters(sim):
    layer = nn.BatchNorm1d(3)
    names = ["weight", "bias", "running_mean", "running_var"]
    assert list(layer.state_dict()) == names
    assert [name for name, _ in layer.named_parameters()] == names[:2]
    assert [name for name, _ in layer.named_buffers()] == names[2:]
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    layer(oracle.normals((9, 3))).sum().backward()
    before = layer.running_mean.numpy().copy()
    optimizer.step()
    np.testing.assert_array_equal(layer.running_mean.numpy(), before)
    other = copy.deepcopy(layer)
    layer(oracle.normals((9, 3), seed=1))
    np.testing.assert_array_equal(other.running_mean.numpy(), before)
    assert (layer.running_mean.numpy() != before).all()
    other.load_state_dict(layer.state_dict())
    moved = copy.deepcopy(other.to("sim"))
    assert {arrays.device(array) for array in moved.state_dict().values()} == {"sim"}
    for name, array in moved.to("cpu").state_dict().items():
        np.testing.assert_array_equal(array, layer.state_dict()[name])


class Normalized(nn.Module):
    def __init__(self):
        self.table = nn.MultiTableEmbedding(1, 2)
        self.layers = [nn.BatchNorm1d(3), nn.FusedMLP(3, [4], 5), nn.LayerNorm(5)]
        self.top = nn.FusedMLP(5, [], 1, skip_final_activation=True)

    def forward(self, dense, ids):
        x = cupyrec.concatenate([dense, self.table(ids).sum(axis=(1, 2)).reshape(-1, 1)], axis=1)
        for layer in self.layers:
            x = layer(x)
        return self.top(x)


def trained(model, optimizer, steps):
    for seed in steps:
        dense, ids = oracle.normals((20, 2), seed=seed), np.arange(20)[:, None] % 7
        labels = (dense[:, :1] > 0).astype(np.float32)
        cupyrec.train_step(model, cupyrec.data.Batch(dense, ids, labels), optimizer)


def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path):
    model = Normalized()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    trained(model, optimizer, range(3))
    checkpoint.save(tmp_path / "c", model, optimizer)
    other = Normalized()
    resumed = optim.Adam(other.parameters(), lr=0.1)
    checkpoint.load(tmp_path / "c", other, resumed)
    for name in ("running_mean", "running_var"):
        assert (
            getattr(other.layers[0], name).numpy() != getattr(nn.BatchNorm1d(3), name).data
        ).all()
    for run in ((model, optimizer), (other, resumed)):
        trained(*run, range(3, 6))
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[name], array)


def test_a_running_statistic_that_is_not_finite_is_not_saved(tmp_path):
    model = Normalized()
    model.layers[0].running_var.data[1] = np.nan
    rule = "parameter/layers.0.running_var must be finite, got 1 of 3 values that are not."
    with pytest.raises(FloatingPointError, match=oracle.sentence(f"checkpoint.save: {rule}")):
        checkpoint.save(tmp_path / "c", model)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0,), ValueError, "'features' must be at least 1, got 0."),
        ((2, -1e-5), ValueError, "'eps' must be finite and at least 0, got -1e-05."),
        ((2, 1e-5, 2), ValueError, "'momentum' must lie in [0, 1], got 2."),
        ((2, 1e-5, "x"), TypeError, "'momentum' must be a number, got 'x'."),
    ],
)
def test_batch_norm_refuses(arguments, error, text):
    with pytest.raises(error, match=oracle.sentence(f"BatchNorm1d: {text}")):
        nn.BatchNorm1d(*arguments)


def test_a_batch_of_one_is_refused_in_training_alone():
    layer, x = nn.BatchNorm1d(3), Tensor(oracle.normals((1, 3)))
    text = "batch_norm: 'x' must have B of at least 2 in training, got shape (1, 3)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        layer(x)
    assert layer.eval()(x).shape == (1, 3)

import copy
import math

import numpy as np
import oracle
import pytest
from oracle import sentence

import cupyrec
from cupyrec import models, nn, optim, random
from cupyrec.embedding import Uniform
from cupyrec.optim import SGD, Adagrad, Adam

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]
OPTIONS = {
    SGD: {},
    Adagrad: {"eps": 1e-3, "initial_accumulator": 0.5},
    Adam: {"betas": (0.8, 0.95), "eps": 1e-4},
}


class Truth:
    """The same parameters in float64, moved by the loops of the formulas."""

    def __init__(self, optimizer_class, lr, clip_norm, schedule):
        self.kind, self.lr, self.clip, self.schedule = optimizer_class, lr, clip_norm, schedule
        self.values, self.states, self.t = {}, {}, 0

    def add(self, key, value):
        self.values[key] = np.array(value, np.float64)
        start = 0.5 if self.kind is Adagrad else 0.0
        self.states[key] = [np.full(np.shape(value), start) for _ in "mv"]

    def step(self, gradients):
        """Of all dense parameters, and of the rows that were looked up."""
        self.t += 1
        lr = self.lr * (self.schedule(self.t) if self.schedule else 1)
        norm = math.sqrt(sum(float((np.float64(g) ** 2).sum()) for g in gradients.values()))
        scale = min(1, self.clip / norm) if self.clip and norm else 1
        for key, g in gradients.items():
            g, w, m, v = (np.ravel(a) for a in (g, self.values[key], *self.states[key]))  # views
            if self.kind is SGD:
                oracle.sgd(w, g, lr=lr, scale=scale)
            elif self.kind is Adagrad:
                oracle.adagrad(w, m, g, lr=lr, eps=1e-3, scale=scale)
            else:
                oracle.adam(
                    w, m, v, g, lr=lr, beta1=0.8, beta2=0.95, eps=1e-4, t=self.t, scale=scale
                )


@pytest.mark.parametrize("schedule", [None, lambda step: 1 / (1 + step)])
@pytest.mark.parametrize("clip_norm", [None, 2.0, 1e9])
@pytest.mark.parametrize("optimizer_class", OPTIONS)
def test_against_loops(optimizer_class, clip_norm, schedule):
    """Dense parameters, two groups, several look-ups and backward() calls a step, some without."""
    parameters = [nn.Parameter(oracle.normals(s, seed=i)) for i, s in enumerate(SHAPES)]
    wide, narrow = nn.MultiTableEmbedding(2, 3, seed=1), nn.MultiTableEmbedding(1, 1, seed=2)
    groups = wide.group, narrow.group
    optimizer = optimizer_class(
        [parameters[0], wide.group, *parameters[1:], narrow.group],
        0.1, clip_norm=clip_norm, schedule=schedule, **OPTIONS[optimizer_class],
    )  # fmt: skip
    truth = Truth(optimizer_class, 0.1, clip_norm, schedule)
    for i, parameter in enumerate(parameters):
        truth.add(i, parameter.data)
    generator = np.random.default_rng(0)
    for step in range(8):
        gradients = {i: np.zeros(shape) for i, shape in enumerate(SHAPES)}
        for call in range(step % 3 + 1):  # gradients add up
            loss = 0
            for i, parameter in enumerate(parameters):
                if (step + i) % 4:  # one of them has no gradient
                    c = oracle.normals(SHAPES[i], seed=100 * step + 10 * call + i)
                    loss = loss + (parameter * c).sum()
                    gradients[i] += c
            for number, (layer, group) in enumerate(zip((wide, narrow), groups, strict=True)):
                for _ in range(step % 2 + 1):  # look-ups of one table
                    ids = generator.integers(-3, 4, (5, layer.num_tables))
                    vectors = layer(ids)
                    c = generator.normal(size=vectors.shape).astype(np.float32)
                    loss = loss + (vectors * c).sum()
                    for b, table in np.ndindex(ids.shape):
                        key = number, table, int(ids[b, table])
                        if key not in truth.values:
                            keyed, seed = ([table], [ids[b, table]]), group.initial.seed
                            initial = oracle.uniform_vectors(*keyed, c.shape[2], seed, -0.05, 0.05)
                            truth.add(key, initial[0])
                        gradients[key] = gradients.get(key, 0) + np.float64(c[b, table])
            loss.backward()
        optimizer.step()
        truth.step(gradients)
        assert optimizer.t == truth.t == random.step() == optimizer.ranks.step == step + 1
        assert all(parameter.grad is None for parameter in parameters)
    for i, parameter in enumerate(parameters):
        np.testing.assert_allclose(parameter.data, truth.values[i], rtol=1e-4, atol=1e-5)
    for number, group in enumerate(groups):
        rows = group.store.export_rows(0, len(group.store))
        assert len(rows.ids) == sum(isinstance(k, tuple) and k[0] == number for k in truth.values)
        for table, key, vector in zip(rows.tables, rows.ids, rows.vectors, strict=True):
            expected = truth.values[number, int(table), int(key)]
            np.testing.assert_allclose(vector, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer_class", OPTIONS)
def test_only_rows_of_the_batch_move(optimizer_class):
    layer = nn.MultiTableEmbedding(1, 4)
    optimizer = optimizer_class(layer.parameters(), 0.1)
    layer(np.arange(10)[:, None]).sum().backward()
    optimizer.step()
    before = layer.group.store.export_rows(0, 10)
    for _ in range(3):
        layer(np.array([[3], [12]])).sum().backward()
        layer(np.array([[5]]))  # looked up, but nothing came of it
        optimizer.step()
    after = layer.group.store.export_rows(0, 10)
    rest = np.delete(np.arange(10), 3)
    for got, expected in zip((after.vectors, *after.states.values()),
                             (before.vectors, *before.states.values()), strict=True):  # fmt: skip
        assert got[rest].tobytes() == expected[rest].tobytes()
        assert (got[3] != expected[3]).all()


def test_clipping_is_by_the_norm_of_dense_and_rows_together():
    parameter = nn.Parameter([0.0])
    layer = nn.MultiTableEmbedding(1, 1, initializer=Uniform(0, 0))
    optimizer = SGD([parameter, *layer.parameters()], 1.0, clip_norm=1.0)
    for _ in range(2):  # 1.5 + 1.5 and 2 + 2: (3, 4), of norm 5
        ((parameter * 1.5).sum() + (layer(np.array([[7]])) * 2.0).sum()).backward()
    optimizer.step()
    np.testing.assert_allclose(parameter.data, [-0.6], rtol=1e-6)
    np.testing.assert_allclose(layer.group.store.export_rows(0, 1).vectors, [[-0.8]], rtol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["dense", "rows"])
def test_a_norm_that_is_not_finite_changes_nothing(where, value):
    parameter, layer = nn.Parameter([1.0, 2.0]), nn.MultiTableEmbedding(1, 2)
    optimizer = Adam([parameter, *layer.parameters()], 0.1, clip_norm=1.0)
    rows = layer(np.array([[7]]))
    before = parameter.data.tobytes(), rows.numpy().tobytes()
    factor = np.float32([1, value])
    loss = (parameter * factor).sum() if where == "dense" else (rows * factor).sum()
    (loss + rows.sum() + parameter.sum()).backward()
    what = {"dense": "1 of 2 values of a parameter (2,)", "rows": "those of 1 id of table 0"}
    text = f"Adam.step: gradients must be finite, got {what[where]} not in step 1."
    with pytest.raises(FloatingPointError, match=sentence(text)):
        optimizer.step()
    assert (parameter.data.tobytes(), layer(np.array([[7]])).numpy().tobytes()) == before
    assert optimizer.t == 0
    optimizer.zero_grad()
    optimizer.step()
    assert parameter.data.tobytes() == before[0]


def test_norms_that_float32_could_not_hold():
    parameter = nn.Parameter(np.zeros(4, np.float32))
    optimizer = SGD([parameter], 1.0, clip_norm=3.0)
    (parameter * np.full(4, 1e38, np.float32)).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(parameter.data, np.full(4, -1.5), rtol=1e-6)


def test_parameters_lie_in_one_buffer_and_keep_their_values():
    values = [oracle.normals(shape, seed=i) for i, shape in enumerate(SHAPES)]
    parameters = [nn.Parameter(value.copy()) for value in values]
    optimizer = Adagrad([*parameters, parameters[1], parameters[0]], 0.1)  # each counts once
    assert len(optimizer.parameters) == 4
    for parameter, value in zip(parameters, values, strict=True):
        np.testing.assert_array_equal(parameter.data, value)
        assert np.shares_memory(parameter.data, optimizer.parameter_groups[0].data)
    addresses = [parameter.data.ctypes.data for parameter in parameters]
    room = [-(-4 * value.size // 256) * 256 for value in values]  # each begins a line of its own
    starts = np.cumsum([0, *room])[:-1]
    assert [a - addresses[0] for a in addresses] == starts.tolist()
    for view, parameter in zip(optimizer.state_arrays()["sum"], parameters, strict=True):
        assert view.shape == parameter.shape
        view[...] = 7  # what a checkpoint does
    (share,) = optimizer.parameter_groups
    assert np.count_nonzero(share.state["sum"] == 7) == sum(v.size for v in values)


def test_a_shared_parameter_is_moved_once():
    parameter = nn.Parameter([1.0])
    optimizer = SGD([parameter, parameter], 1.0)
    (parameter * 2).sum().backward()
    optimizer.step()
    assert parameter.data.tolist() == [-1.0]


def test_gradients_set_by_hand_and_forgotten():
    parameter, layer = nn.Parameter([1.0, 2.0]), nn.MultiTableEmbedding(1, 2)
    optimizer = SGD([parameter, *layer.parameters()], 0.5)
    parameter.grad = np.array([2.0, 4.0], np.float32)
    optimizer.step()
    assert parameter.data.tolist() == [0.0, 0.0]
    (parameter.sum() + layer(np.array([[3]])).sum()).backward()
    optimizer.zero_grad()
    before = layer(np.array([[3]])).numpy().copy()
    optimizer.step()
    assert parameter.data.tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(layer(np.array([[3]])).numpy(), before)


def test_another_optimizer_takes_over():
    model = cupyrec.models.DLRM(1, 2, embedding_dim=2, bottom=[2], top=[2])
    inputs = np.ones((3, 1), np.float32), np.ones((3, 2), np.int64)
    first = SGD(model.parameters(), 0.1)
    model(*inputs).sum().backward()
    first.step()
    before = model(*inputs).numpy().copy()
    second = Adam(model.parameters(), 0.1)
    np.testing.assert_array_equal(model(*inputs).numpy(), before)
    model(*inputs).sum().backward()
    second.step()
    assert (model(*inputs).numpy() < before).all()
    assert [part.name for part in model.embedding.group.store.state] == ["m", "v"]


def test_another_optimizer_keeps_gradients():
    """As one of PyTorch's does: between backward and step, or while they are accumulated."""
    first, second = nn.Parameter([1.0, 2.0]), nn.Parameter([4.0])
    SGD([first, second], 1.0)
    (first.sum() * 3).backward()
    optimizer = SGD([second, first], 0.5)
    assert (first.grad.tolist(), second.grad) == ([3.0, 3.0], None)
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert (first.data.tolist(), second.data.tolist()) == ([-1.0, 0.0], [3.5])


def test_the_rate_of_the_next_step():
    parameter = nn.Parameter([0.0])
    optimizer = SGD([parameter], 8.0, schedule=optim.WarmupPolynomial(4))
    seen = []
    for _ in range(5):
        seen.append(optimizer.current_lr())
        parameter.sum().backward()
        optimizer.step()
    assert seen == [2.0, 4.0, 6.0, 8.0, 8.0]
    assert parameter.data.tolist() == [-28.0]


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (
            lambda p: SGD([p], -0.1), ValueError,
            "SGD: 'lr' must be finite and not negative, got -0.1.",
        ),
        (
            lambda p: Adam([p], math.nan), ValueError,
            "Adam: 'lr' must be finite and not negative, got nan.",
        ),
        (
            lambda p: SGD([p], 1, clip_norm=0), ValueError,
            "SGD: 'clip_norm' must be positive, got 0.",
        ),
        (
            lambda p: Adagrad([p], 1, clip_norm=math.nan), ValueError,
            "Adagrad: 'clip_norm' must be positive, got nan.",
        ),
        (
            lambda p: Adam([p], 1, betas=(0.9, 1.0)), ValueError,
            "Adam: 'betas' must be two numbers in [0, 1), got (0.9, 1.0).",
        ),
        (
            lambda p: Adam([p], 1, betas=(0.9,)), ValueError,
            "Adam: 'betas' must be two numbers in [0, 1), got (0.9,).",
        ),
        (
            lambda p: SGD(nn.FusedMLP(2, (2,), 1), 1), TypeError,
            "SGD: 'parameters' must be a list such as model.parameters(), got FusedMLP.",
        ),
        (lambda p: SGD([], 1), ValueError, "SGD: 'parameters' must not be empty, got none."),
        (
            lambda p: SGD([nn.Parameter(np.zeros(2))], 1), TypeError,
            "SGD: 'parameters' must be float32, got float64.",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(build, error, text):
    with pytest.raises(error, match=sentence(text)):
        build(nn.Parameter([1.0]))
    SGD([nn.Parameter([1.0])], 0.0).step()  # a learning rate of 0 is one


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (SGD, {"lr": "0.1"}, "lr"), (SGD, {"lr": None}, "lr"), (SGD, {"lr": True}, "lr"),
        (SGD, {"clip_norm": "1"}, "clip_norm"), (SGD, {"momentum": None}, "momentum"),
        (SGD, {"weight_decay": "0"}, "weight_decay"), (SGD, {"l2": [0]}, "l2"),
        (Adam, {"betas": 0.9}, "betas"), (Adam, {"betas": ("a", 0.9)}, "betas"),
        (Adam, {"eps": "a"}, "eps"), (optim.FTRL, {"lambda1": "a"}, "lambda1"),
        (Adagrad, {"initial_accumulator": None}, "initial_accumulator"),
        (SGD, {"schedule": lambda step: "a"}, "schedule"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_named(kind, options, name):
    with pytest.raises(TypeError, match=f"^{kind.__name__}: '{name}' must be a?.*number"):
        kind([nn.Parameter([1.0])], **({"lr": 0.1} | options)).step()
    with pytest.raises(TypeError, match="^SGD: 'lr' must be a number, got 'x'"):
        SGD([{"params": [nn.Parameter([1.0])], "lr": "x"}], 0.1)


@pytest.mark.parametrize("later", [optim.SGD, optim.Adam])
def test_an_optimizer_that_lost_its_parameters_refuses_to_step(later):
    model = models.DLRM(2, 3, embedding_dim=2, bottom=[], top=[4])
    first = optim.Adagrad(model.parameters(), 0.1)
    later(model.parameters(), 0.1)
    model(np.ones((4, 2), np.float32), np.arange(12).reshape(4, 3)).sum().backward()
    before = [p.data.copy() for _, p in model.named_parameters()]
    rows = model.embedding.group.store.export_rows(0, 12)
    with pytest.raises(ValueError, match=r"^Adagrad.step: its parameters must not belong to a "):
        first.step()
    assert all(
        (p.data == b).all() for (_, p), b in zip(model.named_parameters(), before, strict=True)
    )
    assert (model.embedding.group.store.export_rows(0, 12).vectors == rows.vectors).all()


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"eps": math.nan}, {"initial_accumulator": -1}])
def test_adagrad_refuses_what_divides_by_zero(options):
    with pytest.raises(ValueError, match="^Adagrad: '.*' must be finite and "):
        optim.Adagrad([cupyrec.Tensor([1.0], requires_grad=True)], 0.1, **options)


def test_it_may_be_copied():
    optimizer = Adam([nn.Parameter([1.0, 2.0])], 0.1)
    optimizer.t = 7
    assert copy.deepcopy(optimizer).t == 7

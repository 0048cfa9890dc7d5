import numpy as np
import oracle
import pytest
from oracle import sentence

import cupyrec
from cupyrec import nn, optim
from cupyrec.testing import gradcheck


class Linear(nn.Module):
    def __init__(self, n=2, m=3):
        self.weight = nn.Parameter(oracle.normals((n, m)))
        self.bias = nn.Parameter(np.zeros(m, np.float32))

    def forward(self, x):
        return x @ self.weight + self.bias


class Zoo(nn.Module):
    """Everything by which a Module may hold a part."""

    def __init__(self):
        self.first = nn.Parameter([1.0])
        self.layers = [Linear(), (Linear(), nn.Parameter([2.0, 3.0]))]
        self.named = {"b": Linear(), "a": {"deep": [nn.Parameter([[4.0]])]}, 7: nn.Parameter([7.0])}
        self.shared = self.layers[0]
        self.tied = self.first
        self.table = nn.MultiTableEmbedding(1, 2)
        self.same_table = self.table
        self.array, self.number, self.nothing = np.ones(3), 3, None
        self.tensor = cupyrec.Tensor([1.0], requires_grad=True)  # no Parameter: not learned


NAMES = [
    "first",
    "layers.0.weight", "layers.0.bias",
    "layers.1.0.weight", "layers.1.0.bias",
    "layers.1.1",
    "named.b.weight", "named.b.bias",
    "named.a.deep.0",
    "named.7",
]  # fmt: skip


def test_parts_are_found_in_order_and_once():
    zoo = Zoo()
    assert [name for name, _ in zoo.named_parameters()] == NAMES
    assert list(zoo.state_dict()) == NAMES
    assert [name for name, _ in zoo.named_groups()] == ["table.groups.2"]
    parts = list(zoo.parameters())
    assert len(parts) == len(set(map(id, parts))) == len(NAMES) + 1
    assert sum(isinstance(part, nn.Parameter) for part in parts) == len(NAMES)
    modules = list(zoo.modules())
    assert modules == [zoo, zoo.layers[0], zoo.layers[1][0], zoo.named["b"], zoo.table]


def test_buffers_are_state_and_no_parameters():
    linear = Linear()
    linear.steps = [nn.Buffer([1.0]), nn.Buffer(np.zeros(2))]
    assert [name for name, _ in linear.named_buffers()] == ["steps.0", "steps.1"]
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]
    assert list(linear.state_dict()) == ["weight", "bias", "steps.0", "steps.1"]
    assert repr(linear.steps[0]) == "Buffer([1.], dtype=float32)"
    linear.load_state_dict(linear.state_dict() | {"steps.0": np.array([7.0])})
    assert linear.steps[0].item() == 7
    with pytest.raises(ValueError, match=r"missing \['steps.1'\], unknown \[\]"):
        linear.load_state_dict(dict(list(linear.state_dict().items())[:3]))


def test_modules_may_hold_each_other():
    a, b = Linear(), nn.Module()
    b.parent, a.child = a, b
    assert [name for name, _ in a.named_parameters()] == ["weight", "bias"]
    assert list(b.modules()) == [b, a]


def test_train_and_eval_reach_all_parts():
    zoo = Zoo()
    assert zoo.eval() is zoo
    assert [module.training for module in zoo.modules()] == [False] * 5
    zoo.train()
    assert [module.training for module in zoo.modules()] == [True] * 5
    zoo.layers[0].eval()
    assert [module.training for module in zoo.modules()] == [True, False, True, True, True]


def test_super_init_is_optional():
    class Called(Linear):
        def __init__(self):
            super().__init__()
            nn.Module.__init__(self)
            self.more = nn.Parameter([1.0])

    class Without(nn.Module):
        def forward(self, x, *, scale=1):
            return x * scale

    assert [name for name, _ in Called().named_parameters()] == ["weight", "bias", "more"]
    assert Without()(3, scale=2) == 6
    assert list(Without().parameters()) == []
    with pytest.raises(NotImplementedError, match=r"^Module: a Module must define forward\(\)\.$"):
        nn.Module()(1)


def test_state_comes_back():
    zoo, other = Zoo(), Zoo()
    for i, array in enumerate(zoo.state_dict().values()):
        array += i + 1
    state = {name: array.copy() for name, array in zoo.state_dict().items()}
    assert other.state_dict()["first"] != state["first"]
    other.load_state_dict(state)
    for name, array in other.state_dict().items():
        np.testing.assert_array_equal(array, state[name])
        assert array is not state[name]
    other.load_state_dict({name: np.float64(array) for name, array in reversed(state.items())})
    assert {array.dtype for array in other.state_dict().values()} == {np.dtype(np.float32)}
    other.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(other.named["b"].weight.data, state["named.b.weight"])


def test_a_loaded_state_reaches_an_optimizer_that_holds_the_parameters():
    linear = Linear()
    optimizer = optim.SGD(linear.parameters(), lr=1.0)
    linear.load_state_dict(
        {"weight": np.full((2, 3), 5, np.float32), "bias": np.ones(3, np.float32)}
    )
    linear(np.ones((1, 2), np.float32)).sum().backward()
    optimizer.step()
    np.testing.assert_array_equal(linear.weight.data, np.full((2, 3), 4))
    np.testing.assert_array_equal(linear.bias.data, np.zeros(3))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"bias": None}, ValueError,
            "names must be the model's, got missing ['bias'], unknown [].",
        ),
        (
            {"bias": None, "bais": np.zeros(3)}, ValueError,
            "names must be the model's, got missing ['bias'], unknown ['bais'].",
        ),
        ({"bias": np.zeros(4)}, ValueError, "'bias' must have shape (3,), got (4,)."),
        ({"bias": np.zeros((1, 3))}, ValueError, "'bias' must have shape (3,), got (1, 3)."),
        ({"bias": np.zeros(3, complex)}, TypeError, "'bias' must be float32, got complex128."),
        ({"bias": np.array(["x"] * 3)}, TypeError, "'bias' must be float32, got <U1."),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_changes_nothing(changes, error, text):
    linear = Linear()
    before = {name: array.copy() for name, array in linear.state_dict().items()}
    state = {"weight": np.zeros((2, 3), np.float32), "bias": np.ones(3, np.float32)} | changes
    state = {name: array for name, array in state.items() if array is not None}
    with pytest.raises(error, match=sentence(f"load_state_dict: {text}")):
        linear.load_state_dict(state)
    for name, array in linear.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_parameter_prints_as_one_and_adds_up_gradients():
    parameter = nn.Parameter(np.array([1.0, 2.0], np.float32))
    assert repr(parameter) == "Parameter([1., 2.], dtype=float32, requires_grad=True)"
    gradient = np.array([1.0, -1.0], np.float32)
    for buffer in (None, np.full(2, 9, np.float32)):
        parameter.grad, parameter.grad_buffer = None, buffer
        (parameter * gradient).sum().backward()
        np.testing.assert_array_equal(parameter.grad, gradient)
        (parameter * gradient).sum().backward()
        np.testing.assert_array_equal(parameter.grad, 2 * gradient)
        assert parameter.grad is buffer or buffer is None
        gradient += 1  # the tape's array is not kept
        np.testing.assert_array_equal(parameter.grad, 2 * (gradient - 1))
    with pytest.raises(TypeError, match="only floating data may require a gradient, got int64"):
        nn.Parameter(np.arange(3))


class Factors(nn.Module):
    """A model of one's own: operators, a layer, tables, a parameter used twice."""

    def __init__(self, dense=3, dtype=np.float32):
        self.embedding = nn.MultiTableEmbedding(2, 4)
        self.mlp = nn.FusedMLP(dense, [6], 4, skip_final_activation=True)
        self.scale = nn.Parameter(np.ones(4, dtype))
        self.layers = {"out": [nn.Parameter(oracle.normals((4, 1), dtype))]}

    def head(self, x, rows):
        user, item = rows[:, 0], rows[:, 1]
        mixed = (user * item + x) * self.scale + cupyrec.tanh(x) / (1 + (self.scale**2).sum())
        return (mixed - mixed.mean(axis=1).reshape(-1, 1)) @ self.layers["out"][0]

    def forward(self, dense, ids):
        return self.head(self.mlp(dense), self.embedding(ids))


def test_a_model_of_ones_own_passes_gradcheck():
    def head(x, rows, scale, out):
        model = Factors(dtype=np.float64)
        model.scale, model.layers["out"][0] = scale, out
        return model.head(x, rows)

    shapes = (5, 4), (5, 2, 4), (4,), (4, 1)
    inputs = [oracle.normals(shape, np.float64, seed=i) for i, shape in enumerate(shapes)]
    assert gradcheck(head, inputs)


def test_a_model_of_ones_own_learns():
    generator = np.random.default_rng(0)
    ids = generator.integers(-5, 5, (500, 2))
    dense = generator.normal(size=(500, 3)).astype(np.float32)
    labels = ((ids.sum(axis=1) + dense[:, 0]) > 0).astype(np.float32)[:, None]
    cupyrec.manual_seed(0)
    model = Factors()
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        losses.append(cupyrec.bce_with_logits(model(dense, ids), labels))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1].item() < 0.3 * losses[0].item()
    assert len(model.embedding.group.store) == 20


def test_amp_reaches_the_modules_below():
    outer = nn.Module()
    outer.inner = [nn.Module()]
    outer.amp = "float16"
    assert (outer.amp, outer.inner[0].amp) == ("float16", "float16")
    outer.amp = None
    assert outer.inner[0].amp is None
    with pytest.raises(ValueError, match=r"amp: must be one of .*'bfloat16'\], got 'half'"):
        outer.amp = "half"

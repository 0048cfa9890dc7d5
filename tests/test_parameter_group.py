import functools
import math
import threading

import numpy as np
import oracle
import pytest

from cupyrec import arrays, nn, optim
from cupyrec.optim import SGD, Adam
from cupyrec.parallel import world


def test_each_has_its_own_rates():
    a, b, c = (nn.Parameter([1.0, -2.0]) for _ in range(3))
    optimizer = SGD(
        [{"params": [a], "lr": 0.5}, {"params": b, "weight_decay": 0.25}, {"params": (c,)}],
        lr=0.125, schedule=lambda step: 1 / step,
    )  # fmt: skip
    for parameter in (a, b, c):
        parameter.grad = np.ones(2, np.float32)
    optimizer.step()
    assert a.data.tolist() == [0.5, -2.5]
    assert b.data.tolist() == [1 - 0.125 / 4 - 0.125, -2 + 0.25 / 4 - 0.125]
    assert c.data.tolist() == [0.875, -2.125]
    assert [optimizer.current_lr(g) for g in optimizer.parameter_groups] == [0.25, 0.0625, 0.0625]
    optimizer.parameter_groups[0].lr = 0.0
    optimizer.lr = 2.0
    for parameter in (a, b, c):
        parameter.grad = np.ones(2, np.float32)
    optimizer.step()
    assert a.data.tolist() == [0.5, -2.5]
    assert c.data.tolist() == [-0.125, -3.125]
    assert [p.shape for p in optimizer.parameters] == [(2,)] * 3


@pytest.mark.ranks
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_ranks_add_up_the_gradients_of_all_groups_at_once(device, monkeypatch):
    ranks, xp = world(), arrays.module(device)
    parameters = [nn.Parameter(xp.zeros(size, np.float32)) for size in (3, 70, 1)]
    groups = [{"params": p, "lr": lr} for p, lr in zip(parameters, (1.0, 0.5, 2.0), strict=True)]
    optimizer = SGD(groups, lr=1.0)
    own = [
        [oracle.normals(p.shape, seed=10 * rank + i) for i, p in enumerate(parameters)]
        for rank in range(ranks.size)
    ]
    for p, grad in zip(parameters, own[ranks.rank], strict=True):
        p.grad = arrays.copy_to(xp, grad)
    calls, submit = [], ranks.submit

    def spy(what, *given):
        if threading.current_thread() is threading.main_thread():
            calls.append(what)
        return submit(what, *given)

    monkeypatch.setattr(ranks, "submit", spy)
    optimizer.step(xp.ones(1, np.float32))
    assert calls == (["dense gradients", "norm"] if ranks.size > 1 else ["dense gradients"])
    for i, (p, lr) in enumerate(zip(parameters, (1.0, 0.5, 2.0), strict=True)):
        total = functools.reduce(np.add, [gradients[i] for gradients in own])
        np.testing.assert_array_equal(arrays.to_host(p.data), -np.float32(lr) * total)


def test_tables_have_rates_too():
    layers = [nn.MultiTableEmbedding(1, 2, seed=s) for s in (1, 1)]
    parameter = nn.Parameter([1.0])
    optimizer = SGD(
        [
            {"params": layers[0].parameters(), "lr": 0.0},
            {"params": [*layers[1].parameters(), parameter]},
        ],
        lr=1.0,
    )
    before = layers[0](np.array([[7]])).numpy().copy()
    for layer in layers:
        layer(np.array([[7]])).backward(np.ones((1, 1, 2), np.float32))
    optimizer.step()
    assert optimizer.groups == [layers[0].group, layers[1].group]
    np.testing.assert_array_equal(layers[0](np.array([[7]])).numpy(), before)
    np.testing.assert_array_equal(layers[1](np.array([[7]])).numpy(), before - np.float32(1))


def test_l2_is_part_of_gradient_and_norm():
    """The gradient is 1 + 0.5 * 4 = 3 and 0.5 * 8 = 4: of norm 5."""
    parameter = nn.Parameter([4.0, 8.0])
    optimizer = SGD([{"params": [parameter], "l2": 0.5}], lr=1.0, clip_norm=1.0)
    parameter.grad = np.array([1, 0], np.float32)
    optimizer.step()
    np.testing.assert_allclose(parameter.data, [4 - 0.6, 8 - 0.8], rtol=1e-6)


def test_none_stands_for_the_optimizers_own():
    given = {"params": nn.Parameter([4.0]), "lr": None, "weight_decay": None, "l2": None}
    (group,) = SGD([given], 0.1, weight_decay=0.5, l2=0.25).parameter_groups
    assert (group.lr, group.weight_decay, group.l2) == (None, 0.5, 0.25)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -1.0, 1e39])
def test_a_schedule_that_is_out_of_bounds_moves_nothing(factor):
    parameter = nn.Parameter([4.0])
    optimizer = SGD([parameter], 0.5, schedule=lambda step: factor)
    parameter.grad = np.ones(1, np.float32)
    text = (
        "SGD: the learning rate must be a finite float32 and not negative, "
        f"got {0.5 * factor} in step 1."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        optimizer.step()
    assert (optimizer.t, parameter.data[0], parameter.grad[0]) == (0, 4, 1)


def test_a_step_that_is_refused_leaves_l2_out_of_the_gradient():
    parameter = nn.Parameter([4.0])
    optimizer = SGD([parameter], 0.5, l2=0.5)
    (parameter * 3.0).sum().backward()
    with pytest.raises(FloatingPointError, match="the loss must be finite"):
        optimizer.step(np.array([math.nan], np.float32))
    assert parameter.grad == 3
    optimizer.step()
    assert parameter.data == 4 - 0.5 * (3 + 0.5 * 4)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("l2", [1e38, 1e39])
def test_what_l2_makes_overflow_is_named(l2):
    layer, parameter = nn.MultiTableEmbedding(1, 1, dense_updates=True), nn.Parameter([4.0, 0.5])
    layer.import_table(0, np.array([7]), np.full((1, 1), 4, np.float32))
    optimizer = SGD([*layer.parameters(), parameter], 0.1, l2=l2)
    count = 1 if l2 == 1e38 else 2
    text = (
        "SGD.step: gradients + l2 * weight must be finite, got those of 1 id of table 0 not, "
        f"{count} of 2 values of a parameter (2,) not in step 1."
    )
    with pytest.raises(FloatingPointError, match=oracle.sentence(text)):
        optimizer.step()
    assert parameter.data.tolist() == [4, 0.5]


@pytest.mark.parametrize(
    ("parameters", "options", "error", "text"),
    [
        ([{"params": [], "learning_rate": 1}], {}, ValueError,
         "SGD: a parameter group must have keys of ['l2', 'lr', 'params', 'weight_decay'], "
         "got ['learning_rate']."),
        ([{"lr": 1}], {}, ValueError, "SGD: a parameter group must have 'params', got {'lr': 1}."),
        ([{"params": [], "lr": -1.0}], {}, ValueError,
         "SGD: 'lr' must be finite and not negative, got -1.0."),
        ([{"params": [], "l2": math.nan}], {}, ValueError,
         "SGD: 'l2' must be finite and not negative, got nan."),
        ([{"params": []}], {"weight_decay": math.inf}, ValueError,
         "SGD: 'weight_decay' must be finite and not negative, got inf."),
        ([{"params": []}], {}, ValueError, "SGD: 'parameters' must not be empty, got none."),
        ([{"params": []}, nn.Parameter([1.0])], {}, TypeError,
         "SGD: 'parameters' must be all dicts or none, got a mixture."),
        ([[nn.Parameter([1.0])]], {}, TypeError,
         "SGD: 'parameters' must be Tensors and Groups, as Module.parameters yields them, "
         "got list."),
        ([nn.Parameter([1.0])], {"schedule": 3}, TypeError,
         "SGD: 'schedule' must be callable or None, got 3."),
    ],
)  # fmt: skip
def test_what_is_refused(parameters, options, error, text):
    with pytest.raises(error, match=oracle.sentence(text)):
        SGD(parameters, 0.1, **options)


def test_a_parameter_belongs_to_one_group():
    parameter = nn.Parameter([1.0])
    text = "SGD: a parameter must be in one parameter group, got it in two."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        SGD([{"params": [parameter]}, {"params": [parameter]}], 0.1)


@pytest.mark.parametrize("optimizer", [SGD, Adam, optim.FTRL])
def test_lazy_tables_refuse_dense_l2(optimizer):
    layer = nn.MultiTableEmbedding(1, 2)
    with pytest.raises(ValueError, match="'l2' must be 0 for tables whose rows are updated lazily"):
        optimizer(layer.parameters(), 0.1, l2=0.01)
    optimizer(nn.MultiTableEmbedding(1, 2, dense_updates=True).parameters(), 0.1, l2=0.01)

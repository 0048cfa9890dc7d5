"""Optimizers whose parameters and groups are on a device."""

import math

import numpy as np
import oracle
import pytest

from cupyrec import arrays, nn, random
from cupyrec.embedding import Group, InitialVectors, Uniform
from cupyrec.optim import SGD, Adagrad, Adam

f32 = np.float32
SHAPES = [(3, 4), (5,), (), (2, 1, 3), (0, 2)]
OPTIONS = {
    SGD: {},
    Adagrad: {"eps": 1e-3, "initial_accumulator": 0.5},
    Adam: {"betas": (0.8, 0.95), "eps": 1e-4},
}
every_class = pytest.mark.parametrize("kind", OPTIONS)


def parameters_on(xp):
    made = [nn.Parameter(oracle.normals(s, seed=i)) for i, s in enumerate(SHAPES)]
    for p in made:
        p.data = arrays.copy_to(xp, p.data)
    return made


def groups_on(xp):
    groups = [Group(InitialVectors(width, Uniform(), seed=width)) for width in (3, 1)]
    for group in groups:
        group.to(xp)
    return groups


def give_gradients(xp, parameters, groups, step):
    """As backward() does; a parameter and, at times, a group have none; look-ups repeat ids."""
    for i, p in enumerate(parameters):
        if (step + i) % 4:
            p.add_grad(xp.asarray(oracle.normals(SHAPES[i], seed=10 * step + i)))
    for number, group in enumerate(groups):
        for call in range((step + number) % 3):
            ids = np.random.default_rng(7 * step + call).integers(-3, 4, 6)
            tables = xp.asarray(np.arange(6, dtype=np.uint32) % 2)
            plan = group.look_up(tables, xp.asarray(ids), insert=True)
            width = group.store.width
            group.add_gradient(plan, xp.asarray(oracle.normals((6, width), seed=step + call)))


def values(optimizer):
    """All that an optimizer changes, on the host."""
    held = [p.data for p in optimizer.parameters]
    held += [view for views in optimizer.state_arrays().values() for view in views]
    for group in optimizer.groups:
        rows = group.store.export_rows(0, len(group.store))
        held += [rows.ids, rows.vectors, *rows.states.values()]
    return [arrays.to_host(a) for a in held]


@pytest.mark.parametrize(
    ("kind", "clip_norm"), [(SGD, None), (SGD, 2.0), (Adagrad, None), (Adam, 2.0)]
)
def test_devices_agree(xp, kind, clip_norm):
    """Of what the CPU does the loops of test_optimizer.py are the oracle."""
    runs = []
    for module in (np, xp):
        parameters, groups = parameters_on(module), groups_on(module)
        optimizer = kind(
            [*parameters, *groups], 0.1, clip_norm=clip_norm, schedule=lambda t: 1 / t,
            **OPTIONS[kind],
        )  # fmt: skip
        for step in range(1, 5):
            give_gradients(module, parameters, groups, step)
            optimizer.step(module.full((), 0.5, f32) if step % 2 else None)
            assert optimizer.t == random.step() == step
            assert all(p.grad is None for p in parameters)
        assert {arrays.device(p.data) for p in parameters} == {arrays.name(module)}
        runs.append(values(optimizer))
    for cpu, got in zip(*runs, strict=True):
        np.testing.assert_allclose(got, cpu, rtol=1e-5, atol=1e-6)


# One kernel looks for what is not finite, and tells each optimizer's.
@pytest.mark.parametrize(
    ("kind", "wrong", "value"),
    [
        (SGD, "loss", math.inf), (SGD, "dense", math.nan), (SGD, "rows", math.inf),
        (Adagrad, "dense", math.nan), (Adam, "loss", math.inf),
    ],
)  # fmt: skip
def test_what_is_not_finite_updates_nothing(xp, kind, wrong, value):
    parameters, groups = parameters_on(xp), groups_on(xp)
    optimizer = kind(
        [*parameters, *groups], 0.1, clip_norm=None if wrong == "loss" else 1.0, **OPTIONS[kind]
    )
    give_gradients(xp, parameters, groups, 1)
    optimizer.step()
    give_gradients(xp, parameters, groups, 1)
    before = [a.tobytes() for a in values(optimizer)]
    if wrong == "dense":
        parameters[1].grad[2] = value
    elif wrong == "rows":
        groups[1].gradients()[1][0] = value
    optimizer.step(xp.full((), value, f32) if wrong == "loss" else xp.ones((), f32))
    assert [a.tobytes() for a in values(optimizer)] == before
    give_gradients(xp, parameters, groups, 1)
    optimizer.step(xp.ones((), f32))
    assert [a.tobytes() for a in values(optimizer)] != before


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("loss", [math.nan, -math.inf, np.full((), math.inf, f32)])
def test_cpu_says_that_a_loss_is_not_finite(loss, clip_norm):
    parameter = nn.Parameter([1.0, 2.0])
    optimizer = SGD([parameter], 1.0, clip_norm=clip_norm)
    parameter.grad = np.ones(2, f32)
    text = f"SGD.step: the loss must be finite, got {loss} in step 1."
    with pytest.raises(FloatingPointError, match=oracle.sentence(text)):
        optimizer.step(loss)
    assert (parameter.data.tolist(), optimizer.t) == ([1.0, 2.0], 0)
    parameter.grad = np.ones(2, f32)
    optimizer.step(0.5)
    assert optimizer.t == 1
    assert (parameter.data < [1.0, 2.0]).all()


@every_class
def test_launches_of_a_step(kind):
    """One for all dense parameters, one a group; the host doesn't wait, and after the first steps
    no memory is new."""
    sim = arrays.module("sim")
    parameters, groups = parameters_on(sim), groups_on(sim)
    optimizer = kind([*parameters, *groups], 0.1, clip_norm=1.0, **OPTIONS[kind])
    loss, name = sim.ones((), f32), kind.__name__.lower()
    for _ in range(3):
        for p in parameters:
            p.add_grad(sim.ones(p.shape, f32))
        give_gradients(sim, [], groups, 4)
        for group in groups:
            group.gradients()
        with sim.record() as seen:
            optimizer.step(loss)
    names = [launch.name for launch in seen.launches]
    assert names == ["clip_scale", f"{name}_dense", *[f"{name}_rows"] * 2]
    assert (seen.syncs, seen.allocations) == (0, 0)


def test_state_and_parameters_are_views_of_flat_buffers(xp):
    parameters = parameters_on(xp)
    expected = [arrays.to_host(p.data) for p in parameters]
    optimizer = Adagrad(parameters, 0.1)
    for p, value in zip(parameters, expected, strict=True):
        np.testing.assert_array_equal(arrays.to_host(p.data), value)
    for view, p in zip(optimizer.state_arrays()["sum"], parameters, strict=True):
        assert (arrays.namespace("", view), view.shape) == (xp, p.shape)
        view[...] = 7.0  # what a checkpoint does
    filled = np.count_nonzero(arrays.to_host(optimizer.parameter_groups[0].state["sum"]) == 7)
    assert filled == sum(p.size for p in parameters)
    parameters[0].grad = xp.ones(SHAPES[0], f32)  # set by hand
    optimizer.step()
    np.testing.assert_allclose(
        arrays.to_host(parameters[0].data), expected[0] - 0.1 / math.sqrt(8), rtol=1e-6
    )


def test_groups_alone_and_steps_without_gradients(xp):
    groups = groups_on(xp)
    optimizer = Adam(groups, 0.1, clip_norm=1.0)
    optimizer.step()
    optimizer.step(xp.ones((), f32))
    give_gradients(xp, [], groups, 1)
    optimizer.step()
    assert optimizer.t == 3


def test_a_later_optimizer_and_a_move_are_seen(xp):
    parameters, groups = parameters_on(xp), groups_on(xp)
    first = SGD([*parameters, *groups], 0.1)
    later = Adam(parameters, 0.1)
    rule = "SGD.step: its parameters must not belong to a later optimizer or have moved to another"
    with pytest.raises(ValueError, match=rf"^{rule} device since, got parameter 0 of shape"):
        first.step()
    assert first.t == 0
    later.step()
    of_groups = SGD(groups, 0.1)
    of_groups.step()
    groups[1].to(np)
    with pytest.raises(ValueError, match=rf"^{rule} device since, got Group\("):
        of_groups.step()


def test_one_device_for_all(xp):
    (group, _), parameters = groups_on(np), parameters_on(xp)
    names = " and ".join(sorted(["cpu", arrays.name(xp)]))
    text = f"SGD: 'parameters' must be on one device, got {names}."
    for mixed in ([*parameters, group], [nn.Parameter([1.0]), *parameters]):
        with pytest.raises(ValueError, match=oracle.sentence(text)):
            SGD(mixed, 0.1)

import logging
import math

import numpy as np
import oracle
import pytest
import trial

import cupyrec
from cupyrec import Tensor, arrays, checkpoint, models, nn, optim
from cupyrec.data import Batch
from cupyrec.optim import GradientScaler

f32 = np.float32
KINDS = [optim.SGD, optim.Adagrad, optim.Adam, optim.CatchUpAdam]
GRADIENTS = [oracle.normals(70, seed=i) for i in range(4)]


def run(xp, kind, gradients, scaler, **options):
    """The parameter after steps of such gradients, times the scale; None: one that overflows."""
    p = nn.Parameter(oracle.normals(70, seed=9))
    p.data = arrays.copy_to(xp, p.data)
    optimizer = kind([{"params": [p], **options}], 0.1, clip_norm=2.0, scaler=scaler)
    for g in gradients:
        scale = 1.0 if scaler is None else scaler.loss_scale
        p.grad = xp.asarray(np.full(70, math.inf, f32) if g is None else g * f32(scale))
        optimizer.step()
    return arrays.to_host(p.data), optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"l2": 0.25}])
def test_a_skipped_step_is_none(np_or_xp, kind, options):
    """Gradients are clipped, and l2 added, as without a scaler, to the bit."""
    expected, _ = run(np_or_xp, kind, GRADIENTS, GradientScaler(8), **options)
    a, b, c, d = GRADIENTS
    scaler = GradientScaler(2.0**10)
    got, optimizer = run(np_or_xp, kind, [None, a, b, None, c, d], scaler, **options)
    np.testing.assert_array_equal(got, expected)
    assert (optimizer.t, scaler.skipped, scaler.loss_scale) == (6, 2, 2.0**8)
    plain, _ = run(np_or_xp, kind, GRADIENTS, None, **options)
    if issubclass(kind, optim.Adam):  # lr times a correction is rounded once more
        np.testing.assert_allclose(got, plain, rtol=2e-6, atol=1e-7)
    else:
        np.testing.assert_array_equal(got, plain)


def test_cpu_and_devices_have_the_same_state(xp):
    states = []
    for module in (np, xp):
        scaler = GradientScaler(4, interval=2)
        run(module, optim.Adam, [*GRADIENTS, None, *GRADIENTS[:3]], scaler)
        states.append(scaler.state_dict())
    assert states[0] == states[1]
    assert states[0] | {"powers": 0} == dict(scale=16.0, good_steps=1, skipped=1, powers=0)


def dlrm(device="cpu", kind=optim.Adam, **options):
    cupyrec.manual_seed(3)
    model = models.DLRM(1, 2, embedding_dim=4, bottom=[8], top=[8], dropout=0.0).to(device)
    return model, kind(model.parameters(), 0.1, **options)


def batch():
    dense, ids, labels = trial.planted(16)
    return Batch(dense, ids, labels[:, None])


def planting(model, optimizer, at):
    """Let gradients overflow in these steps."""
    step = optimizer.step

    def planted(loss):
        if optimizer.t + 1 in at:
            model.top.biases[-1].grad[...] = math.inf
        step(loss)

    optimizer.step = planted


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_overflow_in_training_is_recovered_from(device):
    model, optimizer = dlrm(device, scaler=GradientScaler(interval=2))
    planting(model, optimizer, {3})
    held, seen = batch(), []
    for _ in range(6):
        cupyrec.train_step(model, held, optimizer)
        weights = arrays.to_host(optimizer.parameter_groups[0].data).tobytes()
        seen.append((math.log2(optimizer.scaler.loss_scale), weights))
    scales, weights = zip(*seen, strict=True)
    assert scales == (16, 17, 16, 16, 17, 17)
    assert weights[2] == weights[1]
    assert len(set(weights)) == 5


def test_steps_do_not_wait_or_allocate(sim):
    model, optimizer = dlrm("sim", scaler=GradientScaler(1024))
    held = batch().to("sim")
    for _ in range(3):
        cupyrec.train_step(model, held, optimizer)
    loss = Tensor(sim.ones((), f32), requires_grad=True)
    with sim.record() as seen:
        loss.backward(optimizer.loss_gradient(loss))
    assert (seen.syncs, seen.allocations) == (0, 0)
    for p in optimizer.parameters:
        p.grad = p.grad_buffer
    with sim.record() as seen:
        optimizer.step(loss)
    assert (seen.syncs, seen.allocations) == (0, 0)


def test_several_groups_share_the_scale():
    a, b = nn.Parameter([1.0]), nn.Parameter([2.0])
    groups = [{"params": [a], "lr": 0.5}, {"params": [b], "l2": 0.5}]
    optimizer = optim.SGD(groups, 0.25, scaler=GradientScaler(8))
    loss = (a * 0.5).sum() + (b * 3.0).sum()
    loss.backward(optimizer.loss_gradient(loss))
    optimizer.step(loss)
    assert (a.data.item(), b.data.item()) == (0.75, 1.0)


def test_cpu_raises_at_scale_one(caplog):
    p = nn.Parameter([1.0])
    optimizer = optim.SGD([p], 0.5, scaler=GradientScaler(2))
    p.grad = f32([np.inf])
    with caplog.at_level(logging.DEBUG, "cupyrec"):
        optimizer.step()
    assert "step 1: skipped, gradients overflow; loss scale now 1" in caplog.text
    before = optimizer.state_dict()
    p.grad = f32([np.inf])
    with pytest.raises(FloatingPointError, match="gradients must be finite, got 1 of 1 .* step 2"):
        optimizer.step()
    p.grad = f32([1])
    with pytest.raises(FloatingPointError, match="the loss must be finite, got inf in step 2"):
        optimizer.step(np.inf)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_fit_logs_the_scale(device):
    lines = []
    model, optimizer = dlrm(device, scaler=GradientScaler(64, interval=2))
    cupyrec.fit(
        model, trial.planted(30), optimizer=optimizer, batch_size=10, callbacks=[lines.append]
    )
    (line,) = (line for line in lines if "loss" in line)
    assert (line["loss_scale"], line["skipped"]) == (128.0, 0)


def test_fit_says_that_no_scale_is_small_enough(sim):
    model, optimizer = dlrm("sim", scaler=GradientScaler(1))
    planting(model, optimizer, {1, 2})
    text = (
        "fit: gradients must be finite at a loss scale of 1, got 2 steps up to step 2 where they "
        "were not, which updated nothing. Try a smaller learning rate than 0.1, or clip_norm."
    )
    with pytest.raises(FloatingPointError, match=oracle.sentence(text)):
        cupyrec.fit(model, trial.planted(20), optimizer=optimizer, batch_size=10)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_checkpoints_go_on_to_the_same_bits(device, tmp_path):
    def steps(model, optimizer, count):
        for _ in range(count):
            cupyrec.train_step(model, batch(), optimizer)

    model, optimizer = dlrm(device, scaler=GradientScaler(64, interval=3))
    steps(model, optimizer, 4)
    checkpoint.save(tmp_path / "c", model, optimizer)
    again, other = dlrm(device, scaler=GradientScaler(2, interval=3))
    checkpoint.load(tmp_path / "c", again, other)
    for pair in (model, optimizer), (again, other):
        steps(*pair, 3)
    assert other.state_dict() == optimizer.state_dict()
    assert other.scaler.loss_scale == 256
    for key, array in model.state_dict().items():
        np.testing.assert_array_equal(
            arrays.to_host(array), arrays.to_host(again.state_dict()[key])
        )


def test_checkpoints_with_and_without(tmp_path):
    model, optimizer = dlrm()
    cupyrec.train_step(model, batch(), optimizer)
    checkpoint.save(tmp_path / "without", model, optimizer)
    model, optimizer = dlrm(scaler=GradientScaler(64, interval=1))
    checkpoint.load(tmp_path / "without", model, optimizer)
    assert optimizer.scaler.state_dict() == dict(
        scale=64.0, good_steps=0, skipped=0, powers=[0.9, 0.999]
    )
    checkpoint.save(tmp_path / "with", model, optimizer)
    model, optimizer = dlrm()
    checkpoint.load(tmp_path / "with", model, optimizer)
    assert optimizer.t == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"initial": 0.5}, "'initial' must lie in [1, 2^24], got 0.5."),
        ({"initial": math.nan}, "'initial' must lie in [1, 2^24], got nan."),
        ({"growth": 1}, "'growth' must lie in (1, 2^24], got 1."),
        ({"backoff": 1.0}, "'backoff' must lie in (0, 1), got 1.0."),
        ({"interval": 0}, "'interval' must be at least 1, got 0."),
    ],
)
def test_refuses(options, text):
    with pytest.raises(ValueError, match=oracle.sentence(f"GradientScaler: {text}")):
        GradientScaler(**options)


def test_belongs_to_one_optimizer():
    p, scaler = nn.Parameter([1.0, 2.0]), GradientScaler()
    optimizer = optim.SGD([p], 0.1, scaler=scaler)
    with pytest.raises(ValueError, match=oracle.sentence(
        "GradientScaler: must belong to one optimizer, got a second one."
    )):  # fmt: skip
        optim.SGD([p], 0.1, scaler=scaler)
    text = "SGD: 'scaler' must be a GradientScaler or None, got 8.0."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        optim.SGD([p], 0.1, scaler=8.0)
    text = "SGD.loss_gradient: 'loss' must be one number, got shape (2,)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        optimizer.loss_gradient(p)

import numpy as np
import oracle
import pytest

from cupyrec import Tensor, arrays, bce_with_logits
from cupyrec.autograd import unit_gradient
from cupyrec.ops import bce_with_logits as op

f32 = np.float32


def case(batch, seed=0):
    labels = oracle.integers((batch, 1), 0, 1, seed=seed + 1)
    return 4 * oracle.normals((batch, 1), seed=seed), labels


def run(xp, logits, labels, grad=None, **options):
    """(loss, gradient) on the device, from arrays of the host or the device."""
    z = Tensor(arrays.copy_to(xp, logits), requires_grad=True)
    loss = bce_with_logits(z, arrays.copy_to(xp, labels), **options)
    loss.backward(grad)
    return loss.data, z.grad


def on_host(results):
    return [arrays.to_host(a) for a in results]


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 17, 127, 255, 256, 257, 1025])
@pytest.mark.parametrize("total", [None, 2048])
def test_against_the_formula_and_the_cpu(xp, batch, total):
    logits, labels = case(batch)
    held = run(xp, logits, labels, total=total)
    loss, gradient = on_host(held)
    assert {arrays.namespace("", a) for a in held} == {xp}
    assert (loss.shape, loss.dtype) == ((), f32)
    assert (gradient.shape, gradient.dtype) == (logits.shape, f32)
    truth, slope = oracle.bce_with_logits(logits, labels, batch if total is None else total)
    epsilon = np.finfo(f32).eps
    np.testing.assert_allclose(loss, truth, rtol=4 * epsilon)
    np.testing.assert_allclose(gradient, slope, rtol=8 * epsilon, atol=epsilon / 1e3)
    cpu_loss, cpu_gradient = run(np, logits, labels, total=total)
    np.testing.assert_allclose(loss, cpu_loss, rtol=4 * epsilon)
    np.testing.assert_allclose(gradient, cpu_gradient, rtol=8 * epsilon, atol=epsilon / 1e3)


def test_integer_data_is_exact(xp):
    """Logits so large that the loss is max(z, 0) - z y and the gradient 0 or +-1."""
    logits = 64 * oracle.integers((1025, 1), 1, 9) * (2 * oracle.integers((1025, 1), 0, 1) - 1)
    labels = oracle.integers((1025, 1), 0, 1, seed=1)
    loss, gradient = on_host(run(xp, logits, labels, total=1))
    z, y = np.float64(logits), np.float64(labels)
    oracle.check_exact(loss, (np.maximum(z, 0) - z * y).sum())
    np.testing.assert_allclose(gradient, (z > 0) - y, atol=1e-27)


@pytest.mark.parametrize("seed", range(3))
def test_error(xp, seed):
    logits, labels = case(1025, seed)
    labels = labels if seed else np.abs(labels - f32(0.3))  # soft ones
    truth, slope = oracle.bce_with_logits(logits, labels, 1025)
    e = np.exp(-np.abs(logits))
    probability = np.where(logits > 0, 1, e) / (1 + e)
    loss, gradient = on_host(run(xp, logits, labels))
    assert abs(float(loss) - truth) <= np.spacing(loss)
    oracle.check_error(gradient, (probability - labels) / f32(1025), slope)
    each = np.array([on_host(run(xp, z, y))[0] for z, y in zip(logits[:40], labels, strict=False)])
    terms = [oracle.bce_with_logits(z, y, 1)[0] for z, y in zip(logits[:40], labels, strict=False)]
    naive = np.maximum(logits, 0) - logits * labels + np.log1p(e)
    oracle.check_error(each, naive[:40, 0], np.float64(terms))


@pytest.mark.parametrize(("batch", "tasks"), [(0, 2), (1, 1), (17, 3), (128, 2), (343, 3)])
def test_tasks_and_weights_against_the_formula_and_the_cpu(xp, batch, tasks):
    labels = oracle.integers((batch, tasks), 0, 1, seed=1)
    logits = 4 * oracle.normals((batch, tasks))
    for weights in (None, np.abs(oracle.normals((batch, tasks), seed=2))):
        there = None if weights is None else xp.asarray(weights)
        loss, gradient = on_host(run(xp, logits, labels, weights=there))
        truth, slope = oracle.bce_with_logits(logits, labels, batch, weights)
        cpu_loss, cpu_gradient = run(np, logits, labels, weights=weights)
        epsilon = np.finfo(f32).eps
        for expected, dz in ((truth, slope), (cpu_loss, cpu_gradient)):
            np.testing.assert_allclose(loss, expected, rtol=4 * epsilon)
            np.testing.assert_allclose(gradient, dz, rtol=8 * epsilon, atol=epsilon / 1e3)


def test_weights_lie_as_they_do(xp):
    logits, labels = case(300)
    weights = np.abs(oracle.normals((300, 1), seed=2))
    expected = on_host(run(xp, logits, labels, weights=xp.asarray(weights)))
    spread = xp.asarray(np.repeat(weights, 2, axis=1))[:, :1]
    larger = xp.asarray(np.concatenate([weights[:1], weights]))[1:]  # not aligned to 8 bytes
    for there in (spread, larger):
        got = on_host(run(xp, logits, labels, weights=there))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    ones = on_host(run(xp, logits, labels, weights=xp.ones((300, 1), f32)))
    for one, other in zip(ones, on_host(run(xp, logits, labels)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradient_of_what_comes_after(xp):
    logits, labels = case(17)
    _, plain = on_host(run(xp, logits, labels))
    _, scaled = on_host(run(xp, logits, labels, grad=xp.full((), 8.0, f32)))
    np.testing.assert_array_equal(scaled, 8 * plain)


def test_vectors_views_and_labels_that_are_tensors(xp):
    logits, labels = case(300)
    expected = [a.ravel().tobytes() for a in on_host(run(xp, logits, labels))]
    labels_there = Tensor(xp.asarray(labels), requires_grad=True)
    z = Tensor(xp.asarray(logits), requires_grad=True)
    loss = bce_with_logits(z, labels_there)
    loss.backward()
    assert labels_there.grad is None
    larger = xp.asarray(np.concatenate([labels[:1], logits])[:, 0])
    spread = xp.asarray(np.repeat(logits, 2, axis=1))
    for got in (
        (loss.data, z.grad),
        run(xp, logits[:, 0], labels[:, 0]),
        run(xp, larger[1:], labels[:, 0]),  # not aligned to 8 bytes
        run(xp, spread[:, :1], labels),
    ):
        assert [a.ravel().tobytes() for a in on_host(got)] == expected


@pytest.mark.parametrize("y", [0, 1, 0.25])
def test_extreme_logits_are_as_on_the_cpu(xp, y):
    values = [-np.inf, -1e30, -1e9, -1e3, -88.0, 0.0, 88.0, 1e3, 1e9, 1e30, np.inf, np.nan]
    for z in values:
        logits, labels = np.array([[z]], f32), np.array([[y]], f32)
        with np.errstate(invalid="ignore"):
            expected = run(np, logits, labels)
        for got, cpu in zip(on_host(run(xp, logits, labels)), expected, strict=True):
            np.testing.assert_allclose(got, cpu, rtol=3e-7, atol=1e-37)
    logits = np.array(values, f32)
    _, together = on_host(run(xp, logits, np.full_like(logits, y), total=1))
    with np.errstate(invalid="ignore"):
        _, cpu = run(np, logits, np.full_like(logits, y), total=1)
    np.testing.assert_allclose(together, cpu, rtol=3e-7, atol=1e-37)


@pytest.mark.parametrize("where", [0, 1])
def test_nan_reaches_loss_and_gradient(xp, where):
    inputs = case(300)
    inputs[where][270] = np.nan
    loss, gradient = on_host(run(xp, *inputs))
    assert np.isnan(loss)
    assert np.flatnonzero(np.isnan(gradient)).tolist() == [270]


def test_same_bits_in_any_order(xp):
    logits, labels = (xp.asarray(a) for a in case(1025))
    oracle.check_thread_order(xp, lambda: run(xp, logits, labels))


def test_one_launch_gives_loss_and_gradient(sim):
    for batch in (256, 4096):
        logits, labels = (sim.asarray(a) for a in case(batch))
        for _ in range(2):  # the first makes the counter, and the gradient to begin with
            with sim.record() as both:
                loss = bce_with_logits(Tensor(logits, requires_grad=True), labels)
                loss._node.backward(unit_gradient(loss.data))
        with sim.record() as loss_alone:
            bce_with_logits(logits, labels)
        for seen, ideal in ((both, 12 * batch + 4), (loss_alone, 8 * batch + 4)):
            (launch,) = seen.launches
            assert (launch.name, seen.syncs) == ("bce_with_logits", 0)
            counts = launch.result.counts
            assert counts["bytes_read"] + counts["bytes_written"] <= 1.02 * ideal
            assert 32 * counts["sectors"] <= 1.10 * ideal
            assert counts["bank_conflicts"] <= 0.02 * counts["shared_wavefronts"]
    assert op._kernel.geometry(N=65_536).grid == 256


@pytest.mark.parametrize("batch", [0, 17, 1025])
def test_gradient_scale_is_of_the_gradient_alone(np_or_xp, batch):
    logits, labels = case(batch)
    loss, gradient = on_host(run(np_or_xp, logits, labels))
    scale = np_or_xp.asarray(np.array([2.0**16], f32))
    same, scaled = on_host(run(np_or_xp, logits, labels, gradient_scale=scale))
    np.testing.assert_array_equal(same, loss)
    np.testing.assert_array_equal(scaled, gradient * f32(2.0**16))


def test_gradient_scale_takes_no_launch(sim):
    logits, labels = (sim.asarray(a) for a in case(17))
    scale = sim.full(1, 2.0**16, f32)
    for _ in range(2):
        with sim.record() as seen:
            z = Tensor(logits, requires_grad=True)
            loss = bce_with_logits(z, labels, gradient_scale=scale)
            loss._node.backward(unit_gradient(loss.data))
    assert [launch.name for launch in seen.launches] == ["bce_with_logits"]


def test_another_gradient_takes_one_launch_more(sim):
    logits, labels = (sim.asarray(a) for a in case(17))
    loss = bce_with_logits(Tensor(logits, requires_grad=True), labels)
    scale = sim.full((), 2.0**16, f32)
    with sim.record() as seen:
        loss._node.backward(scale)
    assert [launch.name for launch in seen.launches] == ["mul"]


def test_refuses(xp):
    logits, labels = (xp.asarray(a) for a in case(3))
    for arguments, error, text in [
        ((logits.astype(float), labels), TypeError, "'logits' must be float32, got float64."),
        ((logits, labels.astype(float)), TypeError, "'labels' must be float32, got float64."),
        (
            (logits, labels[:2]), ValueError,
            "'labels' must have B = 3 like 'logits', got shape (2, 1).",
        ),
        (
            (logits, arrays.to_host(labels)), TypeError,
            f"arguments must be arrays of one device, got {arrays.name(xp)}, cpu.",
        ),
    ]:  # fmt: skip
        with pytest.raises(error, match=oracle.sentence(f"bce_with_logits: {text}")):
            bce_with_logits(*arguments)
    text = "bce_with_logits: 'gradient_scale' must have axes (1), got shape (2,)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        bce_with_logits(logits, labels, gradient_scale=xp.ones(2, f32))
    text = "bce_with_logits: 'gradient_scale' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        bce_with_logits(logits, labels, gradient_scale=xp.ones(1))

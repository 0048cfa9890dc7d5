import numpy as np
import oracle
import pytest

from cupyrec import Tensor, bce_with_logits
from cupyrec.ops.bce_with_logits import bce_terms
from cupyrec.testing import gradcheck

f32 = np.float32


def case(batch, dtype=f32):
    labels = oracle.integers((batch, 1), 0, 1, dtype, seed=1)
    return 4 * oracle.normals((batch, 1), dtype), labels


def run(logits, labels, **options):
    """(loss, gradient) of arrays."""
    z = Tensor(logits, requires_grad=True)
    loss = bce_with_logits(z, labels, **options)
    loss.backward()
    return loss.data, z.grad


@pytest.mark.parametrize("batch", [0, 1, 3, 17, 127, 1025])
@pytest.mark.parametrize("total", [None, 2048])
@pytest.mark.parametrize("dtype", [f32, np.float64])
def test_against_the_formula(batch, total, dtype):
    logits, labels = case(batch, dtype)
    loss, gradient = run(logits, labels, total=total)
    truth, slope = oracle.bce_with_logits(logits, labels, batch if total is None else total)
    assert (loss.shape, loss.dtype, gradient.dtype) == ((), dtype, dtype)
    assert isinstance(bce_with_logits(logits, labels), np.ndarray)
    epsilon = np.finfo(dtype).eps
    np.testing.assert_allclose(loss, truth, rtol=8 * epsilon)
    np.testing.assert_allclose(gradient, slope, rtol=8 * epsilon, atol=epsilon / 1e3)


def weighted_case(batch, tasks, dtype=f32):
    labels = oracle.integers((batch, tasks), 0, 1, dtype, seed=1)
    weights = np.abs(oracle.normals((batch, tasks), dtype, seed=2))
    return 4 * oracle.normals((batch, tasks), dtype), labels, weights


@pytest.mark.parametrize("batch", [0, 1, 17, 1025])
@pytest.mark.parametrize("tasks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [f32, np.float64])
def test_tasks_and_weights_against_the_formula(batch, tasks, dtype):
    logits, labels, weights = weighted_case(batch, tasks, dtype)
    weights[:1] = 0
    for options in ({}, {"weights": weights}, {"weights": Tensor(weights, requires_grad=True)}):
        loss, gradient = run(logits, labels, **options)
        truth, slope = oracle.bce_with_logits(logits, labels, batch, weights if options else None)
        assert (loss.dtype, gradient.dtype, gradient.shape) == (dtype, dtype, logits.shape)
        epsilon = np.finfo(dtype).eps
        np.testing.assert_allclose(loss, truth, rtol=8 * epsilon)
        np.testing.assert_allclose(gradient, slope, rtol=8 * epsilon, atol=epsilon / 1e3)
        assert not options or not gradient[:1].any()
    assert options["weights"].grad is None


def test_directional_derivative_with_weights():
    logits, labels, weights = weighted_case(17, 3, np.float64)
    assert gradcheck(lambda z: bce_with_logits(z * 2, labels, weights, total=5) * 3, [logits])


def test_weights_of_one_change_no_bit():
    logits, labels = case(1025)
    loss, gradient = run(logits, labels)
    same = run(logits, labels, weights=np.ones_like(logits))
    assert same[0] == loss
    np.testing.assert_array_equal(same[1], gradient)


def test_integer_data_is_exact():
    """Logits so large that the loss is max(z, 0) - z y and the gradient 0 or +-1."""
    logits = 64 * oracle.integers((1025, 1), 1, 9) * (2 * oracle.integers((1025, 1), 0, 1) - 1)
    labels = oracle.integers((1025, 1), 0, 1, seed=1)
    loss, gradient = run(logits, labels, total=1)
    z, y = np.float64(logits), np.float64(labels)
    oracle.check_exact(loss, (np.maximum(z, 0) - z * y).sum())
    np.testing.assert_allclose(gradient, (z > 0) - y, atol=1e-27)


def test_error():
    logits, labels = case(1025)
    truth, slope = oracle.bce_with_logits(logits, labels, 1025)
    e = np.exp(-np.abs(logits))
    probability = np.where(logits > 0, 1, e) / (1 + e)
    loss, gradient = run(logits, labels)
    assert abs(float(loss) - truth) <= np.spacing(loss)
    oracle.check_error(gradient, (probability - labels) / f32(1025), slope)


def test_directional_derivative():
    logits, labels = case(17, np.float64)
    assert gradcheck(lambda z: bce_with_logits(z, labels, total=5), [logits])
    soft = np.full((17, 1), 0.25)
    assert gradcheck(lambda z: bce_with_logits(z * 2, soft) * 3, [logits])


@pytest.mark.parametrize("dtype", [f32, np.float64])
def test_vectors_and_labels_that_are_tensors(dtype):
    logits, labels = case(17, dtype)
    loss, gradient = run(logits, labels)
    flat_loss, flat_gradient = run(logits[:, 0], labels[:, 0])
    assert flat_loss == loss
    np.testing.assert_array_equal(flat_gradient, gradient[:, 0])
    truths = Tensor(labels, requires_grad=True)
    got = run(logits, truths)
    assert got[0] == loss
    np.testing.assert_array_equal(got[1], gradient)
    assert truths.grad is None


def test_terms_are_those_of_each_sample():
    logits, labels = case(17)
    terms = bce_terms(logits, labels)
    assert (terms.shape, terms.dtype) == ((17, 1), np.float64)
    truth = [oracle.bce_with_logits(logits[[i]], labels[[i]], 1)[0] for i in range(17)]
    np.testing.assert_allclose(terms[:, 0], truth, rtol=1e-12)


@pytest.mark.parametrize("z", [-1e30, -1e3, 1e3, 1e30])
@pytest.mark.parametrize("y", [0, 1])
def test_extreme_logits_neither_overflow_nor_lose_the_gradient(z, y):
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss, gradient = run(np.array([[z]], f32), np.array([[y]], f32))
    assert loss == max(f32(z), 0) - f32(z) * y
    assert gradient[0, 0] == (z > 0) - y


@pytest.mark.parametrize("where", [0, 1])
def test_nan_reaches_loss_and_gradient(where):
    arrays = case(3)
    arrays[where][1] = np.nan
    loss, gradient = run(*arrays)
    assert np.isnan(loss)
    np.testing.assert_array_equal(np.isnan(gradient), [[False], [True], [False]])


def test_parts_of_a_global_batch_add_up():
    logits, labels = case(127, np.float64)
    whole, gradient = run(logits, labels)
    parts = [run(logits[i:j], labels[i:j], total=127) for i, j in [(0, 50), (50, 50), (50, 127)]]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole, rtol=1e-14)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), gradient, rtol=1e-14)


def test_same_bits_and_other_layouts():
    logits, labels = case(1025)
    oracle.check_same_bits(lambda: run(logits, labels))
    spread = np.repeat(logits, 2, axis=1)[:, :1]
    assert run(spread, labels)[0] == run(logits, labels)[0]


@pytest.mark.parametrize(
    ("logits", "labels", "error", "text"),
    [
        (
            np.ones(3, f32), np.ones((3, 1), f32), ValueError,
            "'labels' must have axes (B), got shape (3, 1).",
        ),
        (
            np.ones((3, 1), f32), np.ones(3, f32), ValueError,
            "'labels' must have axes (B, T), got shape (3,).",
        ),
        (
            np.ones((3, 2), f32), np.ones((3, 1), f32), ValueError,
            "'labels' must have T = 2 like 'logits', got shape (3, 1).",
        ),
        (
            np.ones((3, 1), f32), np.ones((2, 1), f32), ValueError,
            "'labels' must have B = 3 like 'logits', got shape (2, 1).",
        ),
        (
            np.ones((3, 1), f32), np.ones((3, 1), int), TypeError,
            "'labels' must be float32, got int64.",
        ),
        (
            np.ones((3, 1), int), np.ones((3, 1), f32), TypeError,
            "'logits' must be float32 or float64, got int64.",
        ),
        (
            np.ones((3, 1), f32), None, TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got NoneType.",
        ),
        (
            3.0, np.ones((3, 1), f32), TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got float.",
        ),
    ],
)  # fmt: skip
def test_refuses(logits, labels, error, text):
    with pytest.raises(error, match=oracle.sentence(f"bce_with_logits: {text}")):
        bce_with_logits(logits, labels)


def test_refuses_weights_of_another_kind():
    logits, labels = case(3)
    text = "bce_with_logits: 'weights' must have T = 1 like 'logits', got shape (3, 2)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        bce_with_logits(logits, labels, np.ones((3, 2), f32))
    text = "bce_with_logits: 'weights' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        bce_with_logits(logits, labels, np.ones((3, 1)))

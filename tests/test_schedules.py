import json
import math
from fractions import Fraction

import numpy as np
import pytest
from oracle import sentence

from cupyrec.optim.schedules import Cosine, Plateau, StepDecay, WarmupPolynomial


def factor(step, warmup, start, steps, power, end):
    """The rule in whole numbers, for whole powers."""
    if step <= warmup:
        return Fraction(step, warmup)
    if steps == 0 or step <= start:
        return Fraction(1)
    left = max(Fraction(0), 1 - Fraction(step - start, steps))
    return end + (1 - end) * left**power


@pytest.mark.parametrize(
    ("warmup", "start", "steps", "power", "end"),
    [
        (0, 0, 0, 2, 0), (5, 0, 0, 2, 0), (0, 0, 7, 1, 0), (3, 3, 4, 2, 0), (4, 9, 11, 3, 0),
        (1, 1, 1, 2, 0), (3, 8, 5, 1, Fraction(1, 4)), (2750, 49315, 27772, 2, 0),
    ],
)  # fmt: skip
def test_against_the_rule(warmup, start, steps, power, end):
    schedule = WarmupPolynomial(warmup, start, steps, power, float(end))
    borders = {warmup, start, start + steps}
    numbers = {max(1, border + i) for border in borders for i in range(-2, 3)} | {1, 10**9}
    for step in sorted(numbers):
        expected = float(factor(step, warmup, start, steps, power, end))
        assert schedule(step) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_its_shape():
    factors = [WarmupPolynomial(4, 10, 6, 2.0)(step) for step in range(1, 30)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[3:10] == [1.0] * 7
    assert all(a > b for a, b in zip(factors[9:15], factors[10:16], strict=True))
    assert factors[15:] == [0.0] * 14


@pytest.mark.parametrize("name", ["warmup_steps", "decay_start", "decay_steps"])
def test_negative_steps(name):
    with pytest.raises(
        ValueError, match=f"^WarmupPolynomial: steps must not be negative, .*{name}=-1"
    ):
        WarmupPolynomial(**{name: -1})


def test_a_decay_within_the_warm_up():
    text = "WarmupPolynomial: 'decay_start' must not lie within the warm-up, got 4 < 5."
    with pytest.raises(ValueError, match=sentence(text)):
        WarmupPolynomial(5, 4, 1)
    assert WarmupPolynomial(5, 4, 0)(9) == 1.0


@pytest.mark.parametrize(("size", "gamma"), [(1, 0.5), (3, 0.1), (7, 1.0), (1000, 0.25)])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_step_decay_is_pytorchs(size, gamma, warmup):
    """Chainable form of StepLR: after each size-th step the rate is multiplied by gamma."""
    schedule, expected = StepDecay(size, gamma=gamma, warmup_steps=warmup), 1.0
    assert [schedule(step) for step in range(1, warmup + 1)] == [
        step / warmup for step in range(1, warmup + 1)
    ]
    for taken in range(30):
        if taken and taken % size == 0:
            expected *= gamma
        assert schedule(warmup + taken + 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("milestones", [(1,), (2, 3, 9), [5, 20]])
@pytest.mark.parametrize("warmup", [0, 4])
def test_milestones_are_pytorchs(milestones, warmup):
    """Chainable form of MultiStepLR."""
    schedule, expected = StepDecay(milestones=milestones, gamma=0.3, warmup_steps=warmup), 1.0
    assert schedule.milestones == tuple(milestones)
    for taken in range(30):
        if taken in milestones:
            expected *= 0.3
        assert schedule(warmup + taken + 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("steps", "end", "warmup"), [(1, 0, 0), (10, 0.25, 0), (33, 0.01, 5)])
def test_cosine_is_pytorchs(steps, end, warmup):
    """Recursive form of CosineAnnealingLR, section 2 of its documentation."""
    schedule, expected = Cosine(steps, end, warmup), 1.0
    assert [schedule(step) for step in range(1, warmup + 1)] == [
        step / warmup for step in range(1, warmup + 1)
    ]
    for taken in range(steps + 1):
        if taken:
            wave = 1 + math.cos(math.pi * (taken - 1) / steps)
            expected = end + (expected - end) * (1 + math.cos(math.pi * taken / steps)) / wave
        assert schedule(warmup + taken + 1) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert schedule(warmup + steps + 1) == schedule(10**9) == pytest.approx(end, abs=1e-15)


def reduce_on_plateau(metrics, factor, patience, threshold, min_factor):
    """ReduceLROnPlateau.step of PyTorch, mode "max", threshold mode "abs", without cooldown."""
    lr, best, bad_epochs, rates = 1.0, -math.inf, 0, []
    for metric in metrics:
        if metric > best + threshold:
            best, bad_epochs = metric, 0
        else:
            bad_epochs += 1
        if bad_epochs > patience:
            lr, bad_epochs = max(lr * factor, min_factor), 0
        rates.append(lr)
    return rates


AUCS = np.random.default_rng(0).normal(0.75, 0.01, 60)


@pytest.mark.parametrize(
    ("factor", "patience", "threshold", "min_factor"),
    [(0.1, 0, 1e-4, 0.0), (0.5, 2, 0.0, 0.0), (0.3, 1, 0.005, 0.01), (0.9, 9, 1e-4, 0.95)],
)
def test_plateau_is_pytorchs_and_resumes_in_the_same_bits(factor, patience, threshold, min_factor):
    options = factor, patience, threshold, min_factor
    schedule, factors = Plateau(*options), []
    for step, auc in enumerate(AUCS, 1):
        schedule.observe(np.float32(auc))
        factors.append(schedule(step))
        state = json.loads(json.dumps(schedule.state_dict(), allow_nan=False))
        resumed = Plateau(*options)
        resumed.load_state_dict(state)
        assert resumed == schedule
        schedule = resumed
    expected = reduce_on_plateau(np.float64(np.float32(AUCS)), *options)
    assert factors == expected
    assert len(set(expected)) > 1


def test_plateau_at_first_and_without_news():
    schedule = Plateau()
    assert [schedule(step) for step in (1, 10**9)] == [1.0, 1.0]
    schedule.observe(0.5)
    schedule.observe(math.nan)  # of a validation set of one class
    assert schedule.state_dict() == {"current": 1.0, "best": 0.5, "waited": 0}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: StepDecay(), ValueError,
         "StepDecay: there must be one of 'step_size' and 'milestones', got 0 and ()."),
        (lambda: StepDecay(2, milestones=[3]), ValueError,
         "StepDecay: there must be one of 'step_size' and 'milestones', got 2 and (3,)."),
        (lambda: StepDecay(-1), ValueError, "StepDecay: 'step_size' must be at least 1, got -1."),
        (lambda: StepDecay(2.5), TypeError,
         "StepDecay: 'step_size' must be an integer, got 2.5."),
        (lambda: StepDecay(milestones=[0]), ValueError,
         "StepDecay: 'milestones' must be at least 1, got 0."),
        (lambda: StepDecay(milestones=[2, 2]), ValueError,
         "StepDecay: 'milestones' must increase, got (2, 2)."),
        (lambda: StepDecay(2, gamma=0), ValueError,
         "StepDecay: 'gamma' must lie in (0, 1], got 0."),
        (lambda: StepDecay(2, warmup_steps=-1), ValueError,
         "StepDecay: 'warmup_steps' must not be negative, got -1."),
        (lambda: Cosine(0), ValueError, "Cosine: 'steps' must be at least 1, got 0."),
        (lambda: Cosine(1, end=math.nan), ValueError, "Cosine: 'end' must lie in [0, 1], got nan."),
        (lambda: Cosine(1, warmup_steps=-2), ValueError,
         "Cosine: 'warmup_steps' must not be negative, got -2."),
        (lambda: Plateau(1.0), ValueError, "Plateau: 'factor' must lie in (0, 1), got 1.0."),
        (lambda: Plateau(patience=-1), ValueError,
         "Plateau: 'patience' must not be negative, got -1."),
        (lambda: Plateau(threshold=math.inf), ValueError,
         "Plateau: 'threshold' must be finite and not negative, got inf."),
        (lambda: Plateau(min_factor=2), ValueError,
         "Plateau: 'min_factor' must lie in [0, 1], got 2."),
        (lambda: Plateau().load_state_dict({"best": 1.0}), ValueError,
         "Plateau.load_state_dict: 'state' must have current, best and waited, got best."),
    ],
)  # fmt: skip
def test_bad_arguments(make, error, text):
    with pytest.raises(error, match=sentence(text)):
        make()

from fractions import Fraction

import pytest
from oracle import sentence

from cupyrec.optim import WarmupPolynomial


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

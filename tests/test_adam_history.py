import copy

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops.adam_history import AdamHistory

OPTIONS = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
RATES = np.linspace(0, 0.3, 3000)


def test_appended_and_given_at_once_are_the_same_bits():
    """Across two growths; a checkpoint keeps the rates alone."""
    grown = AdamHistory(**OPTIONS)
    for lr in RATES:
        grown.append(lr)
    given = AdamHistory(**OPTIONS, rates=grown.rates)
    assert len(grown) == len(given) == 3000
    np.testing.assert_array_equal(grown.rates, RATES)
    for a, b in zip(grown.for_loops(), given.for_loops(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_steps_and_decay():
    steps, kept, t, *_ = AdamHistory(**OPTIONS, rates=RATES).for_loops()
    assert t == 3000
    for s in (1, 2, 1023, 1024, 3000):
        lr = RATES[s - 1]
        expected = lr, 1 / (1 - 0.9**s), (1 - 0.999**s) ** -0.5, 0.1 * lr
        np.testing.assert_array_equal(steps[s], np.float32(expected))
        np.testing.assert_allclose(np.exp(kept[s]), np.prod(1 - 0.1 * RATES[:s]), rtol=1e-12)


def test_devices_get_what_is_new(xp):
    """However far apart the looks, and whatever grew meanwhile; a copy goes its own way."""
    history = AdamHistory(**OPTIONS)
    for length in (0, 1, 5, 5, 1500, 1501):
        history.extend(RATES[len(history) : length])
        steps, kept, t, *_ = history.for_kernels(xp)
        assert t == length
        on_host = history.for_loops()
        for got, expected in [(steps, on_host[0]), (kept, on_host[1])]:
            np.testing.assert_array_equal(arrays.to_host(got)[: t + 1], expected[: t + 1])
    other = copy.deepcopy(history)
    other.append(0.25)
    history.append(0.125)
    assert float(arrays.to_host(other.for_kernels(xp)[0])[1502, 0]) == 0.25
    assert float(arrays.to_host(history.for_kernels(xp)[0])[1502, 0]) == 0.125


def test_constants_of_kernels(xp):
    _, kept, _, b, b_rest, r, r_rest, eps, bound, rooted = AdamHistory(
        beta1=0.9, beta2=0.999, eps=1e-8, rates=[0.5, 0.25]
    ).for_kernels(xp)
    assert kept is None  # nothing decays
    assert abs(float(b) + float(b_rest) - 0.9) < 1e-15
    assert abs(float(r) + float(r_rest) - 0.999**0.5) < 1e-15
    rho = 0.9 / 0.999**0.5
    assert (eps, rooted) == (1e-8, 1)
    np.testing.assert_allclose(bound, 0.5 * rho / (1 - rho) * 2**25)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.81])
def test_where_moments_shrink_as_fast_as_the_mean_their_root_bounds_nothing(beta2):
    history = AdamHistory(beta1=0.9, beta2=beta2, eps=1e-8, rates=[0.5])
    bound, rooted = history.for_loops()[-2:]
    assert rooted == 0
    np.testing.assert_allclose(bound, 0.5 * 9 * 2**25)


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf")])
def test_refuses_rates(lr):
    history = AdamHistory(**OPTIONS, rates=[1.0])
    text = f"AdamHistory: 'lr' must be finite and not negative, got {lr}."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        history.append(lr)
    assert len(history) == 1


def test_refuses_decay_to_nothing():
    text = "AdamHistory: lr * weight_decay must be less than 1, got 10.0 * 0.1."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        AdamHistory(**OPTIONS, rates=[9.9, 10])

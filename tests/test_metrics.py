import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import sentence

from cupyrec import metrics
from cupyrec.metrics import auc, calibration, gauc, logloss, normalized_entropy


def auc_oracle(labels, scores):
    """The share of (positive, negative) pairs in the right order, pair by pair; a tie is a half."""
    won = pairs = 0
    for i, positive in enumerate(labels):
        for j, negative in enumerate(labels):
            if positive and not negative:
                pairs += 1
                won += 1 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0
    return won / pairs


few = st.sampled_from([-math.inf, -1e30, -1.0, -0.0, 0.0, 1e-40, 0.5, 1.0, math.inf])


@given(st.lists(st.tuples(st.booleans(), few), min_size=2, max_size=60), st.sampled_from("fd"))
def test_auc_against_all_pairs(samples, dtype):
    labels, scores = np.array([s[0] for s in samples]), np.array([s[1] for s in samples], dtype)
    if labels.all() or not labels.any():
        assert math.isnan(auc(labels, scores))
    else:
        assert auc(labels, scores) == pytest.approx(auc_oracle(labels, scores), abs=1e-15)
        assert auc(~labels, -scores) == pytest.approx(auc(labels, scores), abs=1e-15)


def test_auc_without_ties_in_any_order():
    generator = np.random.default_rng(0)
    scores, labels = generator.normal(size=300).astype(np.float32), generator.random(300) < 0.2
    expected = auc_oracle(labels, scores)
    for _ in range(3):
        order = generator.permutation(300)
        assert auc(labels[order].astype(np.float32), scores[order]) == pytest.approx(
            expected, abs=1e-15
        )
    assert auc(labels, scores.astype(np.float64) ** 3) == pytest.approx(expected, abs=1e-15)


def test_auc_at_its_ends():
    labels = np.array([0, 0, 1, 1, 1])
    assert auc(labels, np.array([1, 2, 3, 4, 5])) == 1
    assert auc(labels, np.array([5, 4, 3, 2, 1])) == 0
    assert auc(labels, np.zeros(5)) == 0.5
    assert auc(np.array([1, 0]), np.array([1e-45, 0], np.float32)) == 1


def test_auc_is_exact_for_many_samples():
    n = 300_000  # more than 2^32 pairs, a quarter of them in ties
    labels, scores = np.arange(n) % 2, np.arange(n) // 4
    # Of 4 samples in a tie 2 are positive; each beats the 2 negative ones of every lower tie.
    ties = n // 4
    won = 2 * 2 * ties * (ties - 1) / 2 + ties * 4 * 0.5
    assert auc(labels, scores) == won / (n / 2) ** 2


@pytest.mark.parametrize(("labels", "positives"), [([], 0), ([1, 1], 2), ([0.0], 0)])
def test_auc_of_one_class_is_nan_with_a_warning(labels, positives, caplog):
    assert math.isnan(auc(np.array(labels), np.arange(len(labels), dtype=np.float32)))
    assert caplog.messages == [
        f"auc: labels are all of one class ({positives} of {len(labels)} positive)"
    ]


def test_auc_of_nan_and_of_other_lengths():
    text = sentence("auc: scores must not be NaN, got 2 of 3.")
    with pytest.raises(ValueError, match=text):
        auc(np.array([0, 1, 1]), np.array([math.nan, 1, math.nan]))
    text = sentence("auc: 'scores' must have N = 2 like 'labels', got shape (3,).")
    with pytest.raises(ValueError, match=text):
        auc(np.array([0, 1]), np.zeros(3))


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.floats(-30, 30)), min_size=1))
def test_logloss_against_the_formula(samples):
    terms = []
    for y, z in samples:
        p = 1 / (1 + math.exp(-z))
        terms.append(-(y * math.log(p) + (1 - y) * math.log1p(-p)) if p < 1 else (1 - y) * z)
    labels, logits = np.array(samples).T
    got = logloss(labels, logits)
    assert got == pytest.approx(math.fsum(terms) / len(terms), rel=1e-3, abs=1e-12)


def test_logloss_of_extreme_logits():
    big = np.float32(3e38)
    assert logloss(np.array([1.0, 0.0]), np.array([big, -big])) == 0
    assert logloss(np.array([0.0]), np.array([big])) == float(big)
    assert logloss(np.array([1.0]), np.array([-1e4], np.float32)) == 1e4
    assert logloss(np.array([1.0]), np.array([40.0])) == pytest.approx(math.exp(-40), rel=1e-12)
    assert math.isnan(logloss(np.array([]), np.array([])))
    text = sentence("logloss: 'logits' must have N = 1 like 'labels', got shape (2,).")
    with pytest.raises(ValueError, match=text):
        logloss(np.zeros(1), np.zeros(2))


def test_logloss_is_summed_in_float64():
    logits = np.full(1_000_000, 0.1, np.float32)
    logits[0] = 1e8  # in float32 the rest would be lost in it
    expected = (1e8 + 999_999 * math.log1p(math.exp(float(logits[1])))) / 1e6
    assert logloss(np.zeros(1_000_000), logits) == pytest.approx(expected, rel=1e-13)


@given(
    st.lists(st.tuples(st.booleans(), few, st.integers(-3, 3)), max_size=60),
    st.sampled_from(["i8", "f8", "U2"]),
)
def test_gauc_against_all_pairs_of_each_group(samples, kind):
    labels, scores = np.array([s[0] for s in samples], bool), np.array([s[1] for s in samples], "d")
    groups = np.array([s[2] for s in samples], "i8").astype(kind)
    total = weight = 0
    for group in np.unique(groups):
        own = groups == group
        if 0 < labels[own].sum() < own.sum():
            total += own.sum() * auc_oracle(labels[own], scores[own])
            weight += own.sum()
    if weight:
        assert gauc(labels, scores, groups) == pytest.approx(total / weight, abs=1e-14)
    else:
        assert math.isnan(gauc(labels, scores, groups))


def test_gauc_of_one_group_is_auc():
    generator = np.random.default_rng(0)
    labels, scores = generator.random(3000) < 0.2, generator.normal(size=3000).round(2)
    assert gauc(labels, scores, np.full(3000, -(2**63))) == pytest.approx(auc(labels, scores))


def test_gauc_refuses():
    with pytest.raises(ValueError, match=sentence("gauc: scores must not be NaN, got 1 of 2.")):
        gauc(np.zeros(2), np.array([np.nan, 0]), np.zeros(2))
    with pytest.raises(
        ValueError, match=sentence("gauc: 'groups' must have N = 2 like 'labels', got shape (3,).")
    ):
        gauc(np.zeros(2), np.zeros(2), np.zeros(3))


def test_normalized_entropy_is_one_of_the_best_constant():
    labels = np.repeat([1.0, 0.0], [30, 70])
    best = math.log(0.3 / 0.7)
    assert normalized_entropy(labels, np.full(100, best)) == pytest.approx(1, abs=1e-15)
    expected = -(0.3 * math.log(0.5) + 0.7 * math.log(0.5))
    entropy = -(0.3 * math.log(0.3) + 0.7 * math.log(0.7))
    assert normalized_entropy(labels, np.zeros(100)) == pytest.approx(expected / entropy)
    for same in (np.zeros(3), np.ones(3), np.zeros(0)):
        assert math.isnan(normalized_entropy(same, np.zeros(len(same))))


def test_calibration_is_what_is_expected_over_what_is_seen():
    logits = np.array([-1000, -2, 0, 3, 1000], np.float32)
    labels = np.array([0, 1, 0.5, 0, 1])
    expected = math.fsum([0, 1 / (1 + math.exp(2)), 0.5, 1 / (1 + math.exp(-3)), 1]) / 2.5
    assert calibration(labels, logits) == pytest.approx(expected, rel=1e-14)
    assert math.isnan(calibration(np.zeros(2), np.zeros(2)))
    assert math.isnan(calibration(np.zeros(0), np.zeros(0)))


@pytest.mark.parametrize("n", [0, 1, 9, 10, 103])
def test_reliability_against_loops(n):
    generator = np.random.default_rng(n)
    logits = generator.integers(-4, 5, n).astype(np.float32) * 300  # with ties, and overflow
    labels = (generator.random(n) < 0.3).astype(np.float32)
    rows, at = metrics.reliability(labels, logits), 0
    assert rows.shape == (min(n, 10), 3)
    order = sorted(range(n), key=lambda i: logits[i])
    for samples, predicted, observed in rows:
        group = order[at : at + int(samples)]
        at += int(samples)
        exact = [1 / (1 + math.exp(-float(logits[i]))) if logits[i] > -700 else 0 for i in group]
        assert predicted == pytest.approx(sum(exact) / len(group), rel=1e-12, abs=1e-300)
        assert observed == pytest.approx(sum(float(labels[i]) for i in group) / len(group))
    assert at == n
    assert np.ptp(rows[:, 0]) <= 1 if n else True


def test_reliability_of_no_group():
    with pytest.raises(ValueError, match="reliability: 'bins' must be at least 1, got 0"):
        metrics.reliability(np.zeros(3), np.zeros(3), 0)

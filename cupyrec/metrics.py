"""Exact metrics over all samples, in float64."""

from __future__ import annotations

import logging

import numpy as np

from cupyrec import errors
from cupyrec.ops.bce_with_logits import bce_terms

__all__ = ["auc", "calibration", "gauc", "logloss", "normalized_entropy", "reliability"]

logger = logging.getLogger("cupyrec")


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the area under the ROC curve; ties count half, as in `sklearn.metrics.roc_auc_score`.

    Parameters
    ----------
    labels : (N,) array
        Positive where > 0.5.
    scores : (N,) array of floats
        Any monotone score: logits or probabilities.

    Returns
    -------
    float
        NaN, with a warning, if the labels are all of one class or there are none.

    Raises
    ------
    ValueError
        Lengths differ, or a score is NaN.

    Examples
    --------
    >>> auc(np.array([0, 1, 1, 0]), np.array([0.1, 0.4, 0.35, 0.35]))
    0.875
    """
    (n,) = errors.axes("auc", labels=(labels, "N"), scores=(scores, "N"))
    if np.isnan(scores).any():
        raise ValueError(f"auc: scores must not be NaN, got {int(np.isnan(scores).sum())} of {n}.")
    positive = labels > 0.5
    positives = int(positive.sum())
    if positives in (0, n):
        logger.warning("auc: labels are all of one class (%d of %d positive)", positives, n)
        return float("nan")
    order = np.argsort(scores, kind="stable")
    return float(_aucs(positive[order], scores[order], np.zeros(1, np.int64))[0])


def gauc(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> float:
    """Return the mean of the AUC of each group, of a user say, weighted by its samples.

    Groups whose labels are all of one class have none and no part in it.

    Parameters
    ----------
    labels : (N,) array
        Positive where > 0.5.
    scores : (N,) array of floats
        Any monotone score: logits or probabilities.
    groups : (N,) array
        What a sample belongs to: ids, for example.

    Returns
    -------
    float
        NaN, with a warning, if no group has both classes.

    Raises
    ------
    ValueError
        Lengths differ, or a score is NaN.

    Notes
    -----
    Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction", equation 6.

    Examples
    --------
    >>> gauc(np.array([0, 1, 1, 0]), np.array([0.1, 0.4, 0.3, 0.3]), np.array([7, 7, 8, 8]))
    0.75
    """
    (n,) = errors.axes("gauc", labels=(labels, "N"), scores=(scores, "N"), groups=(groups, "N"))
    if np.isnan(scores).any():
        raise ValueError(f"gauc: scores must not be NaN, got {int(np.isnan(scores).sum())} of {n}.")
    order = np.lexsort((scores, groups))
    groups = groups[order]
    firsts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]][:n])
    if n:
        aucs = _aucs(labels[order] > 0.5, scores[order], firsts)
        has_both = ~np.isnan(aucs)
        if has_both.any():
            sizes = np.diff(np.r_[firsts, n])
            return float(np.average(aucs[has_both], weights=sizes[has_both]))
    logger.warning("gauc: no group has labels of both classes, of %d", len(firsts))
    return float("nan")


def _aucs(positive: np.ndarray, scores: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """The AUC of each group, NaN for one class; groups begin at `firsts`, sorted by score each."""
    n = len(scores)
    begins = np.r_[True, scores[1:] != scores[:-1]]
    begins[firsts] = True
    starts = np.flatnonzero(begins)  # of runs of equal scores
    first_runs = np.searchsorted(starts, firsts)
    in_group = starts - np.repeat(firsts, np.diff(np.r_[first_runs, len(starts)]))
    # A run's mean rank, counted from 1, is exact in half units, and integers up to 2^63 are exact.
    twice_mean = 2 * in_group + np.diff(np.r_[starts, n]) + 1
    in_run = np.add.reduceat(positive.astype(np.int64), starts)
    twice_ranks = np.add.reduceat(in_run * twice_mean, first_runs)
    positives = np.add.reduceat(in_run, first_runs)
    pairs = positives * (np.diff(np.r_[firsts, n]) - positives)
    with np.errstate(invalid="ignore"):
        return (twice_ranks - positives * (positives + 1)) / 2 / pairs


def logloss(labels: np.ndarray, logits: np.ndarray) -> float:
    """Return the mean binary cross-entropy of logits, NaN if there are none.

    Parameters
    ----------
    labels : (N,) array
        In [0, 1].
    logits : (N,) array of floats

    Raises
    ------
    ValueError
        Lengths differ.

    Examples
    --------
    >>> round(logloss(np.array([1.0, 0.0]), np.array([0.0, 0.0])), 6)
    0.693147
    """
    (n,) = errors.axes("logloss", labels=(labels, "N"), logits=(logits, "N"))
    return float(bce_terms(logits, labels).sum() / n) if n else float("nan")


def normalized_entropy(labels: np.ndarray, logits: np.ndarray) -> float:
    """Return the logloss over that of the labels' mean: below 1 for a model that knows more.

    Parameters
    ----------
    labels : (N,) array
        In [0, 1].
    logits : (N,) array of floats

    Returns
    -------
    float
        NaN if the labels' mean is 0 or 1, or there are none.

    Raises
    ------
    ValueError
        Lengths differ.

    Notes
    -----
    He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", equation 3.

    Examples
    --------
    >>> round(normalized_entropy(np.array([1.0, 0.0]), np.array([0.0, 0.0])), 6)
    1.0
    """
    loss = logloss(labels, logits)
    mean = float(np.mean(labels, dtype=np.float64)) if len(labels) else 0.0
    if not 0 < mean < 1:
        return float("nan")
    return loss / -float(mean * np.log(mean) + (1 - mean) * np.log1p(-mean))


def calibration(labels: np.ndarray, logits: np.ndarray) -> float:
    """Return the sum of the probabilities over that of the labels: 1 where neither is too high.

    Parameters
    ----------
    labels : (N,) array
        In [0, 1].
    logits : (N,) array of floats

    Returns
    -------
    float
        NaN if all labels are 0.

    Raises
    ------
    ValueError
        Lengths differ.

    Notes
    -----
    He et al. 2014, see `normalized_entropy`.

    Examples
    --------
    >>> calibration(np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4))
    2.0
    """
    errors.axes("calibration", labels=(labels, "N"), logits=(logits, "N"))
    total = float(np.sum(labels, dtype=np.float64))
    if not total:
        return float("nan")
    return float(_probabilities(logits).sum()) / total


def reliability(labels: np.ndarray, logits: np.ndarray, bins: int = 10) -> np.ndarray:
    """Return what was predicted and what happened, by groups of samples with near predictions.

    Parameters
    ----------
    labels : (N,) array
        In [0, 1].
    logits : (N,) array of floats
    bins : int
        K, at most; each group has as many samples as the others, or one more.

    Returns
    -------
    (K, 3) array of float64
        Samples, mean probability and mean label of each group, from the lowest probabilities on;
        fewer than K rows if there are fewer samples.

    Raises
    ------
    ValueError, TypeError
        Lengths differ, or `bins` is not a positive integer.

    Notes
    -----
    The reliability diagram of DeGroot and Fienberg 1983, "The Comparison and Evaluation of
    Forecasters", with groups of equal size.

    Examples
    --------
    >>> reliability(np.array([0.0, 1.0, 1.0, 1.0]), np.array([-1.0, 0.0, 0.0, 9.0]), bins=2)
    array([[2.        , 0.38447071, 0.5       ],
           [2.        , 0.7499383 , 1.        ]])
    """
    errors.axes("reliability", labels=(labels, "N"), logits=(logits, "N"))
    bins = min(errors.positive("reliability", "bins", bins), len(logits))
    order = np.argsort(logits, kind="stable")
    groups = np.array_split(order, bins) if bins else []
    probabilities = _probabilities(logits)
    told = [(len(g), probabilities[g].mean(), np.mean(labels[g], dtype=np.float64)) for g in groups]
    return np.array(told, np.float64).reshape(-1, 3)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(-np.abs(logits.astype(np.float64)))  # of the less likely, which can't overflow
    return np.where(logits >= 0, 1, odds) / (1 + odds)

"""Exact metrics over all samples, in float64."""

from __future__ import annotations

import logging

import numpy as np

from cupyrec import errors
from cupyrec.ops.bce_with_logits import bce_terms

__all__ = ["auc", "calibration", "gauc", "logloss", "normalized_entropy"]

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
    negatives = n - positives
    if not positives or not negatives:
        logger.warning("auc: labels are all of one class (%d of %d positive)", positives, n)
        return float("nan")
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])  # of runs of equal scores
    ends = np.r_[starts[1:], n]
    positives_in_run = np.add.reduceat(positive[order].astype(np.int64), starts)
    # Mean rank of a run, times its positives; ranks count from 1, so a run's mean is exact in
    # half units, and integers up to 2^53 are exact.
    rank_sum = float((positives_in_run * (starts + 1 + ends)).sum()) / 2
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


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
    scores, groups, positive = scores[order], groups[order], labels[order] > 0.5
    other = np.r_[True, groups[1:] != groups[:-1]][:n]
    firsts = np.flatnonzero(other)  # of groups
    starts = np.flatnonzero(other | np.r_[True, scores[1:] != scores[:-1]][:n])  # of equal scores
    sizes = np.diff(np.r_[firsts, n])
    positives, ranks = np.zeros((2, len(firsts)))
    if n:
        group = np.cumsum(other)[starts] - 1  # of each run of equal scores
        in_run = np.add.reduceat(positive.astype(np.int64), starts)
        twice_mean = starts + np.r_[starts[1:], n] + 1 - 2 * firsts[group]  # ranks count from 1
        positives = np.bincount(group, in_run)
        ranks = np.bincount(group, in_run * twice_mean) / 2
    both = (positives > 0) & (positives < sizes)
    if not both.any():
        logger.warning("gauc: no group has labels of both classes, of %d", len(firsts))
        return float("nan")
    p, size, rank = positives[both], sizes[both], ranks[both]
    return float(np.average((rank - p * (p + 1) / 2) / (p * (size - p)), weights=size))


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
    odds = np.exp(-np.abs(logits.astype(np.float64)))  # of the less likely, which can't overflow
    probabilities = np.where(logits >= 0, 1, odds) / (1 + odds)
    return float(probabilities.sum()) / total

"""Exact metrics over all samples, in float64."""

from __future__ import annotations

import logging

import numpy as np

from cupyrec import errors
from cupyrec.ops.bce_with_logits import bce_terms

__all__ = ["auc", "logloss"]

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

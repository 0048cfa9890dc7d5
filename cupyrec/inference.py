"""What a trained model says: evaluation and prediction, without a change to any table."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, metrics
from cupyrec.autograd import no_grad
from cupyrec.data import Arrays, Batch, RankSlices, prefetch
from cupyrec.nn import Module
from cupyrec.ops.elementwise import sigmoid
from cupyrec.parallel import Communicator, Transfer

__all__ = ["dataset_of", "evaluate", "logits_of", "predict"]

_BATCHES = 1 << 10  # whose logits ranks send each other at a time


def evaluate(model: Module, data: Any, *, batch_size: int = 4096) -> dict[str, float]:
    """Return AUC and logloss of a model; no table changes, unseen ids get initial vectors.

    Parameters
    ----------
    model : Module
    data : dataset, or (dense, ids, labels) arrays
    batch_size : int

    Returns
    -------
    dict
        ``auc``, ``logloss``, ``samples``.

    Raises
    ------
    FloatingPointError
        A logit is not finite.
    ValueError
        A row has no label.

    Examples
    --------
    >>> from cupyrec import models
    >>> arrays = np.zeros((2, 1), "f"), np.array([[5], [5]]), np.array([0, 1], "f")
    >>> evaluate(models.DLRM(1, 1), arrays)["auc"]
    0.5
    """
    with contextlib.closing(prefetch(dataset_of(model, data).batches(batch_size))) as batches:
        scores, labels = logits_of(model, batches)
    if labels.size < scores.size:
        raise ValueError(
            f"evaluate: every row must have a label, got {labels.size} for {scores.size} rows."
        )
    return {
        "auc": metrics.auc(labels, scores),
        "logloss": metrics.logloss(labels, scores),
        "samples": scores.size,
    }


def predict(model: Module, data: Any, *, batch_size: int = 4096) -> np.ndarray:
    """Return the probability of each sample; no table changes.

    Parameters
    ----------
    model : Module
    data : dataset, or (dense, ids) arrays
    batch_size : int

    Returns
    -------
    (N,) array of float32

    Raises
    ------
    FloatingPointError
        A logit is not finite.

    Examples
    --------
    >>> from cupyrec import models
    >>> predict(models.DLRM(1, 1), (np.zeros((3, 1), "f"), np.array([[1], [2], [3]]))).shape
    (3,)
    """
    data = dataset_of(model, data)
    consecutive = getattr(data, "consecutive", False)
    with contextlib.closing(prefetch(data.batches(batch_size))) as batches:
        scores, _ = logits_of(model, batches, consecutive=consecutive)
    return sigmoid(scores.astype(np.float64)).astype(np.float32)


def logits_of(
    model: Module, batches: Iterable[Batch], *, consecutive: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of all samples, of all ranks and in order, and the labels there are.

    Parameters
    ----------
    model : Module
    batches : iterable of Batch
        Of `dataset_of`; each rank has its own rows, of as many batches.
    consecutive : bool
        Whether all rows of a rank come before those of the next one, not batch by batch.

    Returns
    -------
    (N,) array of float32, (N or 0,) array of float32

    Raises
    ------
    FloatingPointError
        A logit is not finite.

    Examples
    --------
    >>> from cupyrec import models
    >>> batch = Batch(np.zeros((3, 1), np.float32), np.zeros((3, 1), np.int64))
    >>> logits, labels = logits_of(models.DLRM(1, 1), [batch])
    >>> logits.shape, labels.shape
    ((3,), (0,))
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    none = np.empty(0, np.float32)
    logits, labels = [none], [none]
    try:
        with no_grad():
            for batch in batches:
                moved = batch.to(model.device)
                logits.append(model(moved.dense, moved.ids).numpy()[:, 0])
                if batch.labels is not None:
                    labels.append(arrays.to_host(batch.labels)[:, 0])
    finally:
        for module, mode in modes:  # some may be frozen
            module.training = mode
    if model.ranks.size > 1:
        logits, labels = (
            [*_in_order(model.ranks, parts, consecutive)] for parts in (logits, labels)
        )
    logits, labels = np.concatenate(logits), np.concatenate(labels)
    finite = int(np.isfinite(logits).sum())
    if finite < logits.size:
        raise FloatingPointError(
            f"logits: must be finite, got {logits.size - finite} of {logits.size} that are not."
        )
    return logits, labels


def _in_order(
    ranks: Communicator, parts: list[np.ndarray], consecutive: bool = False
) -> Iterator[np.ndarray]:
    """The parts of all ranks, those of a batch in order of rank, some batches in an array; or all
    of a rank in its batches' order, rank after rank."""
    at_once = len(parts) if consecutive else _BATCHES
    for first in range(0, len(parts), at_once):
        some = parts[first : first + at_once]
        lengths = ranks.all_gather("lengths", np.array([len(part) for part in some]))
        values = np.empty(int(lengths.sum()), np.float32)
        own = np.concatenate(some)
        ranks.all_to_all("logits", Transfer(own, None, values, lengths.sum(axis=1)))
        if not consecutive:
            ordered = np.empty_like(values)
            _put_in_order(values, lengths, ordered)
            values = ordered
        yield values


@cpu.exact_loop
def _put_in_order(values, lengths, ordered):
    """From batch after batch of one rank after the other to rank after rank of the batches."""
    places, place, at = np.empty(len(lengths), np.int64), 0, 0
    for rank in range(len(lengths)):
        places[rank] = place
        place += lengths[rank].sum()
    for batch in range(lengths.shape[1]):
        for rank in range(len(lengths)):
            for i in range(places[rank], places[rank] + lengths[rank, batch]):
                ordered[at] = values[i]
                at += 1
            places[rank] += lengths[rank, batch]


def _kind(data: Any) -> str:
    if isinstance(data, Batch):
        return "a Batch (of whose dense, ids and labels a tuple can be made)"
    if isinstance(data, (str, os.PathLike)):
        return f"a path, '{data}'"
    return type(data).__name__


def dataset_of(model: Module, data: Any) -> Any:
    """Return data as a dataset, of whose batches this rank gets its rows.

    Parameters
    ----------
    model : Module
        Whose ranks share the rows.
    data : dataset, or (dense, ids) or (dense, ids, labels) arrays

    Raises
    ------
    TypeError
        Something else.

    Examples
    --------
    >>> from cupyrec import models
    >>> dataset_of(models.DLRM(1, 1), (np.zeros((3, 1), "f"), np.zeros((3, 1), int))).num_tables
    1
    """
    if isinstance(data, (tuple, list)) and 2 <= len(data) <= 3:
        data = Arrays(*data)
    if not hasattr(data, "batches"):
        raise TypeError(
            "data: must be a dataset such as cupyrec.data.TSV(path, schema), or arrays "
            f"(dense, ids, labels), got {_kind(data)}."
        )
    ranks = model.ranks
    if ranks.size == 1:
        return data
    of_rank = getattr(data, "of_rank", functools.partial(RankSlices, data))
    return of_rank(ranks.rank, ranks.size)

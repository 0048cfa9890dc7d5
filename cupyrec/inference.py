"""What a trained model says: evaluation and prediction, without a change to any table.

A matmul may add up in another order where it has other sizes. So predictions are made of blocks of
rows that are all of one size, the last one filled up: then a row's bits depend on the row alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors, metrics
from cupyrec.autograd import Tensor, no_grad
from cupyrec.data import Arrays, Batch, RankSlices, prefetch
from cupyrec.kernel import blocks
from cupyrec.nn import Module
from cupyrec.ops import thin_matmul
from cupyrec.ops.elementwise import sigmoid
from cupyrec.ops.fused_mlp import blocks_of
from cupyrec.parallel import Communicator, Transfer
from cupyrec.ragged import Bags

__all__ = [
    "BLOCK", "dataset_of", "evaluate", "logits_of", "pass_rows", "predict", "probabilities",
]  # fmt: skip

BLOCK = 64  # rows that a prediction is made among
_ROWS = 4096  # of a forward pass, where a model works block by block itself

_MISSING = np.iinfo(np.int64).min  # what readers make of an empty field
_MEASURES = "auc", "logloss", "normalized_entropy", "calibration"
_BATCHES = 1 << 10  # whose logits ranks send each other at a time


def evaluate(
    model: Module, data: Any, *, batch_size: int = 4096, group: int | None = None, bins: int = 0
) -> dict[str, Any]:
    """Return what the metrics say of a model; no table changes, unseen ids get initial vectors.

    Weights of samples have no part in it.

    Parameters
    ----------
    model : Module
    data : dataset, or (dense, ids, labels) arrays
    batch_size : int
    group : int, optional
        The field of `ids` by which `metrics.gauc` groups samples: that of users, say. Of bags it
        is the first id.
    bins : int
        Of how many groups `metrics.reliability` tells, 0 for none.

    Returns
    -------
    dict
        ``auc``, ``logloss``, ``normalized_entropy``, ``calibration``, ``gauc`` where `group` is
        given, and ``samples``. Of several tasks each is the mean over those that have it, NaN if
        none has: the AUC of labels of one class is NaN. Each task's own is then there too, as
        ``auc_<task>`` and so on, by the data's `task_names`, or else numbers from 0 on. With
        `bins` there is ``reliability`` too, or ``reliability_<task>`` of each: a list of
        [samples, mean probability, share of positive labels].

    Raises
    ------
    FloatingPointError
        A logit is not finite.
    ValueError, TypeError
        The model returns no logits (B, T), a row has no label, logits and labels are not of as many
        tasks, or there is no such field.

    Examples
    --------
    >>> from cupyrec import models
    >>> arrays = np.zeros((2, 1), "f"), np.array([[5], [5]]), np.array([0, 1], "f")
    >>> evaluate(models.DLRM(1, 1), arrays)["auc"]
    0.5
    """
    data = dataset_of(model, data)
    with contextlib.closing(prefetch(data.batches(batch_size))) as batches:
        scores, labels, groups = _outputs(model, batches, False, group)
    if len(labels) < len(scores):
        raise ValueError(
            f"evaluate: every row must have a label, got {len(labels)} for {len(scores)} rows."
        )
    if len(labels) and labels.shape != scores.shape:
        raise ValueError(
            f"evaluate: labels must be of {scores.shape[1]} tasks, as logits are, "
            f"got {labels.shape[1]}."
        )
    tasks = scores.shape[1]
    names = list(getattr(data, "task_names", ())) or [str(task) for task in range(tasks)]
    measures = {name: getattr(metrics, name) for name in _MEASURES}
    if group is not None:
        measures["gauc"] = functools.partial(metrics.gauc, groups=groups)
    result = {}
    for measure, function in measures.items():
        of_tasks = [function(labels[:, task], scores[:, task]) for task in range(tasks)]
        known = [value for value in of_tasks if not math.isnan(value)]
        result[measure] = sum(known) / len(known) if known else math.nan
        if tasks > 1:
            result |= {f"{measure}_{name}": v for name, v in zip(names, of_tasks, strict=True)}
    for task, name in enumerate(names if bins else []):
        groups_told = metrics.reliability(labels[:, task], scores[:, task], bins).tolist()
        result[f"reliability_{name}" if tasks > 1 else "reliability"] = groups_told
    return result | {"samples": len(scores)}


def predict(model: Module, data: Any, *, batch_size: int = 4096) -> np.ndarray:
    """Return the probability of each sample, of each task; no table changes.

    It has the same bits whatever other samples there are, and whatever the size of batches.

    Parameters
    ----------
    model : Module
    data : dataset, or (dense, ids) arrays
    batch_size : int
        Rows that are read, and of several ranks ordered, at a time.

    Returns
    -------
    (N,) array of float32, of several tasks (N, T)

    Raises
    ------
    FloatingPointError
        A logit is not finite.
    ValueError, TypeError
        The model returns no logits (B, T).

    Examples
    --------
    >>> from cupyrec import models
    >>> predict(models.DLRM(1, 1), (np.zeros((3, 1), "f"), np.array([[1], [2], [3]]))).shape
    (3,)
    """
    data, ranks, parts = dataset_of(model, data), model.ranks, []
    with contextlib.closing(prefetch(data.batches(batch_size))) as batches:
        for batch in batches:
            passes = None
            if ranks.size > 1:  # their rows may differ in number
                own = np.array([blocks(len(batch), pass_rows(model))])
                passes = int(ranks.all_gather("passes", own).max())
            parts.append(probabilities(model, batch.dense, batch.ids, passes))
    found = _together(ranks, parts, getattr(data, "consecutive", False))
    _check_finite(found)
    return found if found.shape[1] > 1 else found[:, 0]


def pass_rows(model: Module) -> int:
    """Return how many rows a forward pass of `probabilities` takes: a block, or some.

    Examples
    --------
    >>> from cupyrec import models
    >>> class Mine(models.LR):  # may do anything with a batch
    ...     pass
    >>> pass_rows(models.LR(1, 1)) > pass_rows(Mine(1, 1)) == 64
    True
    """
    by_blocks = vars(type(model)).get("by_blocks", False)  # of the class itself
    if not by_blocks or model.device != "cpu":
        return BLOCK
    return thin_matmul.FEW_ROWS or _ROWS  # products of so many rows have bits of their own


def probabilities(model: Module, dense: Any, ids: Any, passes: int | None = None) -> np.ndarray:
    """Return the probability of each sample, of each task, by blocks of `BLOCK` rows.

    No table changes. A row has the same bits wherever it stands, and whatever stands beside it.

    Parameters
    ----------
    model : Module
    dense : (B, N) array of float32
    ids : (B, F) array of int64, or Bags
        In the host's memory, as `dense` is.
    passes : int, optional
        How many forward passes there are at least, of `pass_rows` each; those beyond the rows are
        of none. Of several ranks all must make as many.

    Returns
    -------
    (B, T) array of float32
        NaN where a logit is not finite.

    Raises
    ------
    ValueError, TypeError
        The model returns no logits (B, T).

    Examples
    --------
    >>> from cupyrec import models
    >>> probabilities(models.DLRM(1, 1), np.zeros((3, 1), "f"), np.array([[1], [2], [3]])).shape
    (3, 1)
    """
    xp, count, parts = arrays.module(model.device), len(dense), []
    size = pass_rows(model)
    with _evaluating(model), blocks_of(BLOCK):
        for start in range(0, max(count, size * (passes or 0), 1), size):
            some, own = _blocks(dense, ids, start, start + size)
            own = own.to(xp) if isinstance(own, Bags) else arrays.copy_to(xp, own)
            parts.append(_logits(model, arrays.copy_to(xp, some), own).numpy())
    logits = np.concatenate(parts)[:count].astype(np.float64)
    return np.where(np.isfinite(logits), sigmoid(logits), np.nan).astype(np.float32)


def _blocks(dense: Any, ids: Any, start: int, stop: int) -> tuple[Any, Any]:
    """Some rows, filled up to whole blocks: with the last one's ids, which are looked up anyway, or
    empty bags. None stay none."""
    stop = min(stop, len(dense))
    some = _filled(dense[start:stop])
    if not isinstance(ids, Bags):
        return some, _filled(ids[start:stop])
    own = ids.part(min(start, stop), stop)
    offsets = np.full(len(some) * ids.num_fields + 1, own.offsets[-1])
    offsets[: len(own.offsets)] = own.offsets
    return some, Bags(np.require(own.ids, None, "CW"), offsets, ids.num_fields)


def _filled(rows: np.ndarray) -> np.ndarray:
    count = len(rows)
    if count % BLOCK == 0:  # loops would be compiled anew for arrays of another kind
        return np.require(rows, None, "CW")
    filled = np.empty((-(-count // BLOCK) * BLOCK, *rows.shape[1:]), rows.dtype)
    filled[:count], filled[count:] = rows, rows[-1]
    return filled


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
    (N, T) array of float32, (N or 0, T) array of float32

    Raises
    ------
    FloatingPointError
        A logit is not finite.
    ValueError, TypeError
        The model returns no logits (B, T).

    Examples
    --------
    >>> from cupyrec import models
    >>> batch = Batch(np.zeros((3, 1), np.float32), np.zeros((3, 1), np.int64))
    >>> logits, labels = logits_of(models.DLRM(1, 1), [batch])
    >>> logits.shape, labels.shape
    ((3, 1), (0, 1))
    """
    logits, labels, _ = _outputs(model, batches, consecutive, None)
    return logits, labels


def _outputs(
    model: Module, batches: Iterable[Batch], consecutive: bool, group: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `logits_of` returns, and the ids of a field."""
    logits, labels, groups = [], [], []
    with _evaluating(model):
        for batch in batches:
            moved = batch.to(model.device)
            logits.append(_logits(model, moved.dense, moved.ids).numpy())
            if batch.labels is not None:
                labels.append(arrays.to_host(batch.labels))
            if group is not None:
                groups.append(_field(batch.ids, group))
    logits, labels = (_together(model.ranks, parts, consecutive) for parts in (logits, labels))
    if group is not None:
        groups = [part[:, None] for part in groups]
        groups = _together(model.ranks, groups, consecutive, np.int64)[:, 0]
    _check_finite(logits)
    return logits, labels, groups


@contextlib.contextmanager
def _evaluating(model: Module) -> Iterator[None]:
    """Within this context the model evaluates, and nothing is recorded."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with no_grad():
            yield
    finally:
        for module, mode in modes:  # some may be frozen
            module.training = mode


def _logits(model: Module, dense: Any, ids: Any) -> Tensor:
    output = model(dense, ids)
    if not isinstance(output, Tensor):
        raise TypeError(f"model: must return a Tensor of logits, got {type(output).__name__}.")
    errors.axes("model", dense=(dense, "B N"), logits=(output, "B T"))
    return output


def _check_finite(logits: np.ndarray) -> None:
    """Raise unless logits are finite, or the probabilities that came of them."""
    finite = int(np.isfinite(logits).sum())
    if finite < logits.size:
        raise FloatingPointError(
            f"logits: must be finite, got {logits.size - finite} of {logits.size} that are not."
        )


def _field(ids: Any, field: int) -> np.ndarray:
    """The id of each sample in one field, of a bag its first; (B,)."""
    if errors.count("evaluate", "group", field) >= ids.shape[1]:
        raise ValueError(f"evaluate: 'group' must be one of {ids.shape[1]} fields, got {field}.")
    one = ids.first_of(field, _MISSING) if isinstance(ids, Bags) else ids[:, field]
    return arrays.to_host(one)


def _together(
    ranks: Communicator, parts: list[np.ndarray], consecutive: bool, dtype: type = np.float32
) -> np.ndarray:
    """The rows of all batches, of all ranks and in order, (N, T); (0, 1) of no batch."""
    tasks = parts[0].shape[1] if parts else 1
    flat = [np.empty(0, dtype), *(part.ravel() for part in parts)]
    if ranks.size > 1:
        flat = [*_in_order(ranks, flat, consecutive)]
    return np.concatenate(flat).reshape(-1, tasks)


def _in_order(
    ranks: Communicator, parts: list[np.ndarray], consecutive: bool = False
) -> Iterator[np.ndarray]:
    """The parts of all ranks, those of a batch in order of rank, some batches in an array; or all
    of a rank in its batches' order, rank after rank."""
    at_once = len(parts) if consecutive else _BATCHES
    for first in range(0, len(parts), at_once):
        some = parts[first : first + at_once]
        lengths = ranks.all_gather("lengths", np.array([len(part) for part in some]))
        own = np.concatenate(some)
        values = np.empty(int(lengths.sum()), own.dtype)
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
            "data: must be a dataset such as cupyrec.data.TSV(path, schema) or, of a data frame, "
            f"cupyrec.data.Frame(frame, schema), or arrays (dense, ids, labels), got {_kind(data)}."
        )
    ranks = model.ranks
    if ranks.size == 1:
        return data
    of_rank = getattr(data, "of_rank", functools.partial(RankSlices, data))
    return of_rank(ranks.rank, ranks.size)

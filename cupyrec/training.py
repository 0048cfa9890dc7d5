"""Training: one step top to bottom, and fit, evaluate and predict around it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from cupyrec import arrays, checkpoint, errors, random, timeline
from cupyrec.autograd import Tensor
from cupyrec.data import Batch, prefetch
from cupyrec.embedding import CacheUse, Tables
from cupyrec.inference import dataset_of, evaluate, logits_of
from cupyrec.interruption import Interrupted, interruption
from cupyrec.nn import Module
from cupyrec.ops.bce_with_logits import bce_with_logits
from cupyrec.optim import Adagrad, Optimizer
from cupyrec.parallel import Communicator, Exchange
from cupyrec.progress import Clock, Progress
from cupyrec.run_folder import RunFolder

__all__ = ["fit", "train_step"]

logger = logging.getLogger("cupyrec")

_LOG_EVERY = 20  # steps a line of metrics
_BINS = 10  # groups of samples in which predictions are compared with labels


def train_step(model: Module, batch: Batch, optimizer: Optimizer) -> Tensor:
    """Train on one batch, wherever it lies; return its loss, on the model's device.

    Of several ranks each is called with its rows, see `Batch.of_rank`, and returns its part of the
    loss; a rank may have no rows.

    A loss or a gradient that is not finite updates nothing, though unseen ids have got their rows.
    On the CPU it raises on all ranks, and forgets the gradients, unless it is a gradient and the
    optimizer's `scaler` can lower its scale; a GPU is not waited for: `fit` sees it when it reads
    the losses.

    Raises
    ------
    FloatingPointError
        On the CPU: the loss or a gradient is not finite.
    ValueError
        The batch has no labels, or not as many as the model has tasks; on the CPU: the loss is not
        finite for its dense values aren't.

    Examples
    --------
    >>> from cupyrec import models, optim
    >>> model = models.DLRM(num_dense=1, num_tables=2)
    >>> batch = Batch(np.zeros((4, 1), "f"), np.zeros((4, 2), np.int64), np.ones((4, 1), "f"))
    >>> optimizer = optim.SGD(model.parameters(), lr=0.1)
    >>> train_step(model, batch, optimizer).item() > train_step(model, batch, optimizer).item()
    True
    """
    if batch.labels is None:
        raise ValueError("train_step: 'batch' must have labels, got none.")
    if optimizer.t == 0 and optimizer.ranks.size > 1:
        _check_shares(batch, optimizer.ranks)
    batch = batch.to(model.device)
    random.set_first_sample(batch.first)
    scale = None if optimizer.scaler is None else optimizer.scaler.factor
    with timeline.span("forward"):
        logits = model(batch.dense, batch.ids)  # ids travel, rows come back; unseen ids get rows
        loss = bce_with_logits(  # mean over the rows of all ranks
            logits, batch.labels, batch.weights, total=batch.total, gradient_scale=scale
        )
    if model.device == "cpu" and optimizer.ranks.size == 1:  # else `step` raises on all ranks
        _check_finite(loss, batch, model, optimizer)
    with timeline.span("backward"):
        loss.backward()  # dense gradients; one a row looked up travels
    with timeline.span("update"):
        try:
            optimizer.step(loss)  # sum the ranks' gradients, clip by the norm of both, update both
        except FloatingPointError:
            optimizer.zero_grad()  # or they would spoil the next step too
            _check_finite(loss, batch, model, optimizer)  # of this rank: says more
            raise
    return loss


def fit(
    model: Module,
    train: Any,
    valid: Any = None,
    *,
    optimizer: Optimizer | None = None,
    epochs: int = 1,
    batch_size: int = 1024,
    eval_every: int = 0,
    patience: int = 0,
    min_delta: float = 0.0,
    save_every: int = 0,
    run: RunFolder | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Callable[[dict[str, Any]], None]] = (),
    task_weights: Sequence[float] = (),
    positive_weight: float = 1.0,
    group: int | None = None,
) -> dict[str, Any]:
    """Train a model; it ends as at its best step with `valid` and `run`, else as at the last one.

    Parameters
    ----------
    model : Module
        Called as ``model(dense, ids)``, returns logits (B, T) of T tasks, most often one.
    train, valid : dataset, or (dense, ids, labels) arrays
        A dataset with a method ``at_epoch``, such as `cupyrec.data.Shuffled`, tells by it what it
        is in each epoch, the first of which is 0.
    optimizer : Optimizer, optional
        Adagrad with learning rate .02 by default.
    epochs, batch_size : int
    eval_every : int
        Evaluate on `valid` every so many steps, besides at each epoch's end; 0: only there.
    patience : int
        Stop after so many evaluations in a row without a better AUC; 0: never.
    min_delta : float
        By more than this an AUC must lie above the best one to be better.
    save_every : int
        Save every so many steps, besides at each evaluation and epoch's end; 0: only there.
    run : RunFolder, optional
        Where metrics and checkpoints go; nothing is written without it.
    progress : Progress, optional
        Of the checkpoint that `model` and `optimizer` were loaded from.
    callbacks : sequence of callable
        Each is called with every line of metrics.
    task_weights : sequence of float
        Factor of each task's loss; none: 1.
    positive_weight : float
        Factor of the losses of samples whose label is 1.
    group : int, optional
        Field by which evaluations group samples, see `evaluate`.

    Returns
    -------
    dict
        ``steps``, ``samples``, ``samples_per_second`` (from the second step on, evaluations and
        checkpoints apart; None if there was but one), and with `valid` ``valid_auc`` and
        ``best_step``: the AUC of the model as it ends, of several tasks the mean, and the step that
        it is of.

    Raises
    ------
    FloatingPointError
        The loss, a gradient, a logit of `valid` or a value to be saved is not finite; with a
        scaler a gradient may, until its scale is 1. No checkpoint is written. Losses of a GPU are
        read every 20 steps.
    Interrupted
        A KeyboardInterrupt, after SIGINT, SIGTERM or SIGUSR1: the step in progress, with its
        evaluation if it has one, was finished and a checkpoint saved.

    Examples
    --------
    >>> from cupyrec import models
    >>> arrays = np.zeros((8, 1), "f"), np.arange(8)[:, None], np.array([0, 1] * 4, "f")
    >>> fit(models.DLRM(1, 1), arrays, batch_size=3)["steps"]
    3
    """
    for name, value in [("epochs", epochs), ("batch_size", batch_size)]:
        errors.positive("fit", name, value)
    for name, value in [
        ("eval_every", eval_every), ("patience", patience), ("save_every", save_every),
    ]:  # fmt: skip
        errors.count("fit", name, value)
    weights = [errors.at_least_0("fit", "task_weights", weight) for weight in task_weights]
    positive_weight = errors.at_least_0("fit", "positive_weight", positive_weight)
    errors.at_least_0("fit", "min_delta", min_delta)
    if group is not None:
        errors.count("fit", "group", group)
    if run is not None and not isinstance(run, RunFolder):
        raise TypeError(f"fit: 'run' must be a RunFolder, got {type(run).__name__}.")
    ranks = model.ranks
    train, valid = dataset_of(model, train), None if valid is None else dataset_of(model, valid)
    optimizer = Adagrad(model.parameters(), lr=0.02) if optimizer is None else optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"fit: 'optimizer' must be one of cupyrec.optim, got {type(optimizer).__name__}."
        )
    progress = Progress() if progress is None else progress
    progress.ranks = ranks.size
    if not {id(p) for p in model.parameters()} & {
        id(p) for p in [*optimizer.parameters, *optimizer.groups]
    }:
        raise ValueError("fit: 'optimizer' must update parameters of 'model', got none of them.")
    job = _Job(model, optimizer, valid, run, progress, callbacks, min_delta, group)
    clock = Clock()
    random.set_step(optimizer.t)  # whatever was trained before in this process
    if not model.training:
        model.train()

    quiet = ranks.rank or logger.level > logging.INFO  # whose lines the bar stands below
    with interruption() as interrupted, logging_redirect_tqdm(), tqdm(
        initial=progress.step, unit="step", disable=True if quiet else None, desc="train"
    ) as bar:  # fmt: skip
        while progress.epoch < epochs and not job.stopped(patience):
            epoch, trained = progress.epoch, False
            rows = train.at_epoch(epoch) if hasattr(train, "at_epoch") else train
            batches = rows.batches(batch_size, skip=progress.batch)
            if weights or positive_weight != 1:
                batches = (batch.weighted(weights, positive_weight) for batch in batches)
            clock.start()
            with contextlib.closing(prefetch(batches)) as batches:
                for batch, following in _with_following(_moved(batches, model.device)):
                    last = following is None
                    wished = ranks.any("interruption", bool(interrupted))
                    ranks.step = progress.step + 1
                    job.begin_step(last)
                    if following is not None:
                        model.prepare(following.ids)
                    job.losses.append(train_step(model, batch, optimizer).data)
                    progress.count(last)
                    logging_now = last or progress.step % _LOG_EVERY == 0
                    evaluating = last or (eval_every and progress.step % eval_every == 0)
                    saving = save_every and progress.step % save_every == 0
                    stopping = wished.result() or (interrupted if ranks.size == 1 else False)
                    if logging_now or evaluating or saving or stopping:
                        job.read_losses()  # a GPU is waited for here
                    clock.stop(batch.total)
                    bar.update()
                    trained = True
                    if logging_now:
                        bar.set_postfix_str(f"loss {job.last_loss:.4f}")
                        job.log_loss(epoch)
                    if evaluating or saving or stopping:
                        job.check_point(batch, evaluating)
                    if stopping:
                        saved = f", saved in {run.path}" if run is not None else ""
                        by = interrupted[0] if interrupted else "a signal to another rank"
                        told = f"{by}: stopped after step {progress.step}{saved}"
                        # Several ranks end with one code, whichever was told.
                        raise Interrupted(by if ranks.size == 1 else "a signal", told)
                    if job.stopped(patience):
                        break
                    clock.start()
            if not trained:
                logger.warning("epoch %d: no rows to train on", epoch)
                progress.epoch, progress.batch = epoch + 1, 0
    if run is not None and valid is not None and progress.best_step not in (0, progress.step):
        checkpoint.load(run.best, model, optimizer)
    result = {"steps": progress.step, "samples": clock.samples, "samples_per_second": clock.rate()}
    if valid is not None and run is not None:
        result |= {"valid_auc": progress.best_auc, "best_step": progress.best_step}
    elif valid is not None:
        result |= {"valid_auc": job.last_auc, "best_step": progress.step}
    return result


@dataclasses.dataclass
class _Job:
    """What happens between the steps of `fit`: metrics, evaluations, checkpoints."""

    model: Module
    optimizer: Optimizer
    valid: Any
    run: RunFolder | None
    progress: Progress
    callbacks: Sequence[Callable[[dict[str, Any]], None]]
    min_delta: float
    group: int | None
    losses: list[Any] = dataclasses.field(default_factory=list)  # not read yet
    last_loss: float = 0.0
    scaling: dict[str, Any] = dataclasses.field(default_factory=dict)  # for lines of metrics
    last_auc: float | None = None
    caches: CacheUse = dataclasses.field(default_factory=CacheUse)
    bytes_sent: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def log(self, **line: Any) -> None:
        if self.run is not None:
            self.run.log(**line)
        for callback in self.callbacks:
            callback(line)

    def begin_step(self, last: bool) -> None:
        """Let the exchanges measure what codecs lose in a step of which metrics tell."""
        if last or (self.progress.step + 1) % _LOG_EVERY == 0:
            for exchange in self.exchanges:
                exchange.measure()

    @property
    def exchanges(self) -> list[Exchange]:
        """Those of the model's tables that have something to do."""
        groups = (group for _, group in self.model.named_groups())
        return [group.exchange for group in groups if not group.exchange.is_local]

    def told_by_exchanges(self) -> dict[str, Any]:
        """Bytes that all ranks have sent to others since the last time, and errors of codecs."""
        if not self.exchanges:
            return {}
        everyone = self.model.ranks.all_gather_json("bytes", self.model.ranks.bytes_sent)
        total = sum(map(collections.Counter, everyone), collections.Counter())
        since = {what: total[what] - self.bytes_sent[what] for what in sorted(total)}
        self.bytes_sent = total
        errors = [exchange.errors() for exchange in self.exchanges]
        worst = {what: max(e[what] for e in errors) for what in errors[0]}
        return {"bytes_sent": since, "quantization_error": worst}

    def read_losses(self) -> None:
        """Add the losses of the steps since the last time to the progress."""
        if not self.losses:
            return
        xp, scaler = arrays.namespace("fit", *self.losses), self.optimizer.scaler
        losses, stuck = xp.stack(self.losses), 0
        if scaler is None:
            losses = arrays.to_host(losses).astype(np.float64).tolist()
        else:  # in one transfer
            values = xp.concatenate([losses.astype(np.float64), scaler.scaling.state])
            *losses, scale, _, skipped, stuck, _, _ = arrays.to_host(values).tolist()
            self.scaling = dict(loss_scale=scale, skipped=int(skipped))
        losses = self.model.ranks.all_gather("losses", np.array(losses)).sum(axis=0).tolist()
        first = self.progress.step - len(losses) + 1
        self.losses.clear()
        for step, loss in enumerate(losses, first):
            if not math.isfinite(loss):  # of a GPU: the CPU's step has raised
                raise FloatingPointError(
                    f"fit: the loss must be finite, got {loss} in step {step}, which updated "
                    f"nothing. Try a smaller learning rate than {self.optimizer.lr:g}, or "
                    "clip_norm."
                )
            self.progress.loss_sum += loss
        if stuck:  # of a GPU again
            raise FloatingPointError(
                f"fit: gradients must be finite at a loss scale of 1, got {stuck:g} steps up to "
                f"step {self.progress.step} where they were not, which updated nothing. Try a "
                f"smaller learning rate than {self.optimizer.lr:g}, or clip_norm."
            )
        self.progress.loss_count += len(losses)
        self.last_loss = losses[-1]

    def log_loss(self, epoch: int) -> None:
        """Log the mean loss since the last time."""
        progress, optimizer = self.progress, self.optimizer
        mean = progress.loss_sum / progress.loss_count
        progress.loss_sum, progress.loss_count = 0.0, 0
        lr = optimizer.lr * (optimizer.schedule(optimizer.t) if optimizer.schedule else 1.0)
        told = self.scaling | self.told_by_exchanges()
        told |= self.caches.told(self.model)
        self.log(step=progress.step, epoch=epoch, loss=mean, lr=lr, **told)

    def check_point(self, batch: Batch, evaluating: bool) -> None:
        """Evaluate if it is time to and there is `valid`; save."""
        _check_update(self.model, batch, self.progress.step)
        better = self._evaluate() if evaluating and self.valid is not None else False
        if evaluating:
            self.log_tables()
        if self.run is not None:
            progress = dataclasses.asdict(self.progress)
            self.run.save(self.model, self.optimizer, progress, best=better)

    def log_tables(self) -> None:
        """Log what each embedding table holds and how it is used."""
        for name, module in self.model.named_modules():
            if isinstance(module, Tables):
                told = {
                    key: [None if math.isnan(value) else value for value in values.tolist()]
                    for key, values in module.statistics().items()
                }
                self.log(step=self.progress.step, tables={name: told})

    def _evaluate(self) -> bool:
        """Evaluate on `valid`; return whether the model was never better."""
        result = evaluate(self.model, self.valid, group=self.group, bins=_BINS)
        progress = self.progress
        # An AUC of NaN, where `valid` has one class, tells nothing: the last step is kept then.
        self.last_auc = auc = None if math.isnan(result["auc"]) else result["auc"]
        if auc is not None and hasattr(self.optimizer.schedule, "observe"):
            self.optimizer.schedule.observe(auc)
        best = progress.best_auc
        better = best is None or auc is None or auc > best + self.min_delta
        if better:
            progress.best_auc, progress.best_step = auc, progress.step
        progress.evaluations_since_best = 0 if better else progress.evaluations_since_best + 1
        told = {f"valid_{name}": value for name, value in result.items() if name != "samples"}
        self.log(step=progress.step, **told)
        logger.info(
            "step %d: valid AUC %.5f%s, logloss %.5f",
            progress.step, result["auc"], " (best)" if better else "", result["logloss"],
        )  # fmt: skip
        return better

    def stopped(self, patience: int) -> bool:
        """Whether `patience` evaluations in a row were no better."""
        return 0 < patience <= self.progress.evaluations_since_best


def _moved(batches: Iterator[Batch], device: str) -> Iterator[Batch]:
    return (batch.to(device) for batch in batches)


def _with_following(batches: Iterator[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Yield each batch, and the one that follows: what an epoch's end asks for is done at once
    with its last step, so that a checkpoint never stands between the two."""
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch, following
        batch = following


def _check_shares(batch: Batch, ranks: Communicator) -> None:
    """Say so if all ranks train on the same rows, or each takes its own for all of the step's."""
    told = ranks.all_gather("shares", np.array([len(batch), batch.total]))
    rows = int(told[:, 0].sum())
    if (told[:, 1] != rows).any() and ranks.rank == 0:
        logger.warning(
            "train_step: the ranks' batches have %d rows together, but their totals are %s: each "
            "should be given its rows by Batch.of_rank, or they count too much",
            rows, ", ".join(map(str, dict.fromkeys(told[:, 1].tolist()))),
        )  # fmt: skip


def _check_finite(loss: Tensor, batch: Batch, model: Module, optimizer: Optimizer) -> None:
    if math.isfinite(loss.item()):
        return
    strange = np.argwhere(~np.isfinite(batch.dense))
    if len(strange):
        row, column = strange[0].tolist()
        raise ValueError(
            f"train_step: 'batch.dense' must be finite, got {batch.dense[row, column]} in row "
            f"{row}, column {column}."
        )
    largest = np.max([0, *(np.abs(p.data).max(initial=0) for _, p in model.named_parameters())])
    raise FloatingPointError(
        f"train_step: the loss must be finite, got {loss.item()} in step {optimizer.t + 1}, where "
        f"the largest parameter is {largest:g} and the largest dense feature "
        f"{np.abs(batch.dense).max(initial=0):g}. Try a smaller learning rate than "
        f"{optimizer.lr:g}, or clip_norm."
    )


def _check_update(model: Module, batch: Batch, step: int) -> None:
    """A model that an update has spoilt must not replace a checkpoint."""
    try:
        logits_of(model, [batch])
    except FloatingPointError as error:
        raise FloatingPointError(
            f"fit: step {step} must leave a model that gives finite logits, but {error} "
            "Try a smaller learning rate, or clip_norm."
        ) from None

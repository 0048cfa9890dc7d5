"""Probabilities from a checkpoint, for any number of threads, while newer ones take its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, errors, inference
from cupyrec.checkpoint_files import find_checkpoint
from cupyrec.data import Schema
from cupyrec.embedding import Memory, Tier
from cupyrec.kernel import blocks
from cupyrec.nn import Module, MultiTableEmbedding
from cupyrec.parallel import world
from cupyrec.ragged import Bags
from cupyrec.serving.chain import Chain
from cupyrec.serving.served_model import Rules, ServedModel, Update, without_rows
from cupyrec.serving.unseen import check_unseen

__all__ = ["Predictor", "check_agreed"]


class Predictor:
    """The model of a checkpoint, which answers and never learns: no row is ever inserted.

    Any number of threads may call it. They take turns; another checkpoint takes over between two
    calls, so that each answer is of one version. Of several ranks each reads its share of the rows;
    they make, update and ask it together.

    Parameters
    ----------
    checkpoint : path
        A checkpoint, or a run's folder: its best, else its last. Optimizer state is left aside.
    device : str
    model : Module, optional
        Such as was saved, of a checkpoint that tells no settings since it was not written by
        ``cupyrec train``. It is copied without its rows.
    schema : Schema, optional
        Of the log, which such a checkpoint doesn't tell either.
    tier : Memory, CachedHost or CachedSSD, optional
        Where rows are kept, by default in the device's memory. The files of `CachedSSD` lie in a
        folder of their own below its path, which is removed in the end.
    dtype : str, optional
        Of the vectors in memory, by default the checkpoint's. They are rounded to the nearest.
    unseen : str, int or sequence of int
        What ids without a row get: "initial", as in evaluation: their initial vectors; "zero"; or
        the row of an id: of this one in all tables, or of one of each.

    Attributes
    ----------
    name : str
        Of the model.
    task_names : list of str
        Empty without a schema.
    num_dense : int
        -1 without a schema.
    num_tables : int
    has_bags : bool

    Raises
    ------
    FileNotFoundError, ValueError
        There is no such checkpoint, it is damaged or of another model, a vector is more than
        `dtype` holds, a default id has no row, or an argument is none of those above.
    TypeError
        `model`, `schema` or `tier` is something else, or `unseen` neither text nor ids.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec import checkpoint, models
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(folder + "/c", models.DLRM(1, 2))
    ...     predictor = Predictor(folder + "/c", model=models.DLRM(1, 2))
    >>> values, version = predictor.probabilities(np.zeros((3, 1), "f"), np.zeros((3, 2), int))
    >>> values.shape, version == predictor.version
    ((3, 1), True)
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike,
        *,
        device: str = "cpu",
        model: Module | None = None,
        schema: Schema | None = None,
        tier: Tier | None = None,
        dtype: str | None = None,
        unseen: Any = "initial",
    ) -> None:
        self._on_gpu = arrays.current_gpu(device)
        _check_type("model", model, "a Module", Module)
        _check_type("schema", schema, "a Schema", Schema)
        _check_type("tier", tier, "a Tier", Tier)
        template = None if model is None else without_rows(model).to("cpu")
        tier = Memory() if tier is None else tier
        self._rules = Rules(device, tier, dtype, check_unseen(unseen), template, schema)
        self._lock, self._updating = threading.Lock(), threading.Lock()
        self._served: ServedModel | None = None
        self._closed = False
        self._ranks = world() if template is None else template.ranks
        self.take(self._read_together(checkpoint))
        made, schema = self.model, self.schema
        settings = self._now().config.get("settings", {})
        self.name = settings.get("model", {}).get("name", type(made).__name__.lower())
        layers = [m for m in made.modules() if isinstance(m, MultiTableEmbedding)]
        if schema is None:
            self.num_dense, self.num_tables = -1, len(layers[0].fields) if layers else -1
            self.has_bags = any(m.pooling or m.max_length for m in layers)
            self.task_names: list[str] = []
        else:
            self.num_dense, self.num_tables = schema.num_dense, schema.num_tables
            self.has_bags, self.task_names = schema.has_bags, schema.task_names

    @property
    def is_open(self) -> bool:
        """Whether there is a checkpoint to answer by; else an update may bring one."""
        return self._served is not None

    def _now(self) -> ServedModel:
        if self._served is None:
            raise RuntimeError("Predictor: it must be open and have a checkpoint, got neither.")
        return self._served

    model = property(lambda self: self._now().model, doc="What is served now, in evaluation.")
    path = property(lambda self: self._now().path, doc="Of the checkpoint served now, resolved.")
    version = property(lambda self: self._now().version, doc="8 hex digits of that checkpoint's.")
    schema = property(lambda self: self._now().schema, doc="Of the log, None if it isn't told.")

    def probabilities(self, dense: Any, ids: Any) -> tuple[np.ndarray, str]:
        """Return the probability of each sample, of each task, and the version that all are of.

        Parameters
        ----------
        dense : (B, N) array of float32
        ids : (B, F) array of int64, or Bags

        Returns
        -------
        (B, T) array of float32
            NaN where a logit is not finite.
        str

        Raises
        ------
        ValueError, TypeError
            Shapes and dtypes that don't agree.
        RuntimeError
            It is closed.

        Examples
        --------
        See the class.
        """
        self.check(dense, ids)
        with self._lock, self._on_gpu():
            served = self._now()
            return inference.probabilities(served.model, dense, ids), served.version

    def check(self, dense: Any, ids: Any) -> None:
        """Raise unless these are arguments for `probabilities`.

        Raises
        ------
        ValueError, TypeError
            Shapes and dtypes that don't agree.

        Examples
        --------
        See the class.
        """
        errors.dtype("Predictor", "dense", dense, np.float32)
        if not isinstance(ids, Bags):
            errors.dtype("Predictor", "ids", ids, np.int64)
        n, f = self.num_dense, self.num_tables
        given = np.broadcast_to(0, ids.shape)  # Bags have no axes themselves
        axes = f"B {f if f >= 0 else 'F'}", f"B {n if n >= 0 else 'N'}"
        errors.axes("Predictor", ids=(given, axes[0]), dense=(dense, axes[1]))

    def passes(self, rows: int) -> int:
        """Return how many forward passes `probabilities` makes of so many rows.

        Examples
        --------
        See `cupyrec.serving.sharded`.
        """
        return blocks(rows, inference.pass_rows(self.model))

    def take_part(self, passes: int, num_dense: int, num_tables: int, has_bags: bool) -> None:
        """Look up what another rank needs, which has such rows where this one has none.

        Examples
        --------
        See `cupyrec.serving.sharded`.
        """
        ids: Any = np.empty((0, num_tables), np.int64)
        if has_bags:
            ids = Bags(np.empty(0, np.int64), np.zeros(1, np.int64), num_tables)
        with self._lock, self._on_gpu():
            model = self._now().model
            inference.probabilities(model, np.empty((0, num_dense), np.float32), ids, passes)

    def predict(self, data: Any, *, batch_size: int = 4096) -> np.ndarray:
        """Return what `cupyrec.predict` does, of one version: an update waits until it is done.

        Raises
        ------
        FloatingPointError, ValueError, TypeError
            As `cupyrec.predict`.
        RuntimeError
            It is closed.

        Examples
        --------
        See docs/serving.md.
        """
        with self._lock, self._on_gpu():
            return inference.predict(self._now().model, data, batch_size=batch_size)

    def update(self, checkpoint: str | os.PathLike) -> bool:
        """Serve another checkpoint of the same shapes and schema; False if it is the one served.

        It is read and checked while the other one is served, and takes over between two calls. If
        it is based on that one, no more than what has changed is read, and changed in place; else
        both are in memory until it does.

        Raises
        ------
        FileNotFoundError, ValueError, OSError
            As for the class, and for another model; the checkpoint before is served on.

        Examples
        --------
        See docs/serving.md.
        """
        with self._updating:
            return self.take(self._read_together(checkpoint))

    def _read_together(self, checkpoint: str | os.PathLike) -> Update | ServedModel | None:
        """What `read` returns; of several ranks all get rank 0's checkpoint, or an error."""
        found, staged = str(find_checkpoint(checkpoint).resolve()), None
        path = self._ranks.all_gather_json("checkpoint", found)[0]  # a run's best may change

        def read() -> None:
            nonlocal staged
            staged = self.read(path)

        try:
            self._ranks.together("Predictor", read)
            versions = self._ranks.all_gather_json("version", self.version_of(staged))
            check_agreed(path, versions)
        except BaseException:
            self.drop(staged)
            raise
        return staged

    def read(self, checkpoint: str | os.PathLike) -> Update | ServedModel | None:
        """Return what `take` takes: the first half of an update, which changes nothing.

        Raises
        ------
        FileNotFoundError, ValueError, OSError
            As `update`.

        Examples
        --------
        See `update`.
        """
        chain, served = Chain.found(find_checkpoint(checkpoint).resolve()), self._served
        with self._on_gpu():
            if served is None:
                return ServedModel(chain, self._rules)
            if chain.crc32s[-1] == served.crc32:
                return None
            served.check_like(chain)
            return served.update(chain) or ServedModel(chain, self._rules)

    def take(self, staged: Update | ServedModel | None) -> bool:
        """Serve from now on what `read` returned: the second half of an update.

        Raises
        ------
        RuntimeError
            It was read before another update, or the predictor is closed.
        OSError, MemoryError
            The tier is full, say; the checkpoint before is served on, loaded anew. If it can't be,
            none is: see `is_open`.

        Examples
        --------
        See `update`.
        """
        if staged is None:
            return False
        before = None
        with self._lock, self._on_gpu():
            if self._closed:
                self.drop(staged)
                self._now()
            if isinstance(staged, ServedModel):
                before, self._served = self._served, staged
            else:
                self._change(staged)
        if before is not None:  # answers don't wait until many rows and files are gone
            before.close()
        return True

    def _change(self, update: Update) -> None:
        served = self._now()
        served.check_follows(update)
        try:
            served.take(update)
        except BaseException:  # some rows are as they were, some are not
            self._served = None
            served.close()
            self._served = ServedModel(Chain.found(served.path), self._rules)
            raise

    def version_of(self, staged: Update | ServedModel | None) -> str:
        """Return the version that would be served by what `read` returned.

        Examples
        --------
        See `check_agreed`.
        """
        return self.version if staged is None else staged.version

    def drop(self, staged: Update | ServedModel | None) -> None:
        """Let go what `read` returned, which is not taken.

        Examples
        --------
        See `update`.
        """
        if isinstance(staged, ServedModel):
            staged.close()

    def close(self) -> None:
        """Let rows and their files go; nothing is answered any more, and what is read meanwhile
        is not taken.

        Examples
        --------
        See docs/serving.md.
        """
        with self._lock:
            served, self._served, self._closed = self._served, None, True
            if served is not None:
                served.close()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _check_type(name: str, given: Any, told: str, kind: Any) -> None:
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"Predictor: '{name}' must be {told}, got {type(given).__name__}.")


def check_agreed(path: str | os.PathLike, versions: Sequence[str]) -> None:
    """Raise ValueError unless all ranks have read the same version of a checkpoint.

    Examples
    --------
    >>> check_agreed("c", ["1f2e3d4c", "1f2e3d4c"])
    """
    if len({*versions}) > 1:
        raise ValueError(
            f"Predictor: all ranks must read one version of '{path}', got {', '.join(versions)}: "
            "it was replaced meanwhile."
        )

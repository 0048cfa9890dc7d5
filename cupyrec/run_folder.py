"""The folder of a training run: metrics, and the last and the best checkpoint.

config.toml             the resolved configuration
data.json               names and sizes of the files to train on
metrics.jsonl           one JSON object a line
checkpoints/step-N/     checkpoints; only those that a link points to are kept
report.html             what `cupyrec report` draws of all this
last, best              links to checkpoints, switched atomically
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cupyrec import checkpoint, checkpoint_files, errors
from cupyrec.checkpoint_deltas import links
from cupyrec.nn import Module
from cupyrec.optim import Optimizer
from cupyrec.parallel import Communicator, world

__all__ = ["RunFolder", "json_line"]

logger = logging.getLogger("cupyrec")

_LOCK = ".lock"
_BEGUN = {"config.toml", "data.json"}  # what there is before the first metrics or checkpoint
_OURS = ("config.toml", "data.json", "metrics.jsonl", "last", "best", "report.html")


def json_line(values: dict[str, Any]) -> str:
    """Return a JSON object on one line; NaN and infinities, which JSON lacks, become null.

    Examples
    --------
    >>> json_line({"auc": float("nan"), "step": 3})
    '{"auc": null, "step": 3}'
    """
    return json.dumps(json.loads(json.dumps(values), parse_constant=lambda _: None))


class RunFolder:
    """Folder of one run.

    Parameters
    ----------
    path : path
        Made if it doesn't exist.
    overwrite : bool
        Whether what an earlier run left there is removed; anything else is left alone.
    ranks : Communicator, optional
        Those of the run, by default all that the launcher started: rank 0 writes, and each its part
        of checkpoints. They must see the same folder.

    Raises
    ------
    FileExistsError
        The folder is not empty, and neither `resume` nor `overwrite` is given. One in which a run
        has failed before its first metrics counts as empty.
    BlockingIOError
        Another process writes there.
    OtherRankError
        Rank 0 has raised one of these.
    NotADirectoryError, ValueError
        There is a file at `path`; or a link there was turned into a copy.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = RunFolder(folder + "/run")
    ...     run.log(step=1, loss=0.5)
    ...     run.metrics()
    [{'step': 1, 'loss': 0.5}]
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        resume: bool = False,
        overwrite: bool = False,
        ranks: Communicator | None = None,
    ) -> None:
        self.path, self._ranks = Path(path), ranks or world()
        self._metrics = self.path / "metrics.jsonl"
        self.config: dict[str, Any] = {}
        self.deltas = 0  # checkpoints from one that holds all to the next that does
        self.base: Path | None = None  # what the next checkpoint may be based on
        self._on_first("open", lambda: self._open(resume, overwrite))

    def _on_first(self, what: str, work: Callable[[], None]) -> None:
        """Let rank 0 do it; the others go on when it has."""
        ranks = self._ranks
        ranks.together(f"RunFolder: {what}", work if ranks.rank == 0 else lambda: None)

    def _open(self, resume: bool, overwrite: bool) -> None:
        path = self.path
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"RunFolder: '{path}' must be a folder, got a file.")
        for link in (self.last, self.best):
            if link.exists() and not link.is_symlink():
                raise ValueError(f"RunFolder: '{link}' must be a link, got a file or folder.")
        entries = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        entries -= {_LOCK}
        if entries and entries != _BEGUN and not (resume or overwrite):
            raise FileExistsError(
                f"RunFolder: '{path}' must be empty unless a run is resumed or overwritten, "
                f"got {len(entries)} entries."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / _LOCK, "w")  # as long as we live
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise BlockingIOError(
                f"RunFolder: '{path}' must have one writer, got another process at work there."
            ) from None
        if overwrite and not resume:
            for name in _OURS:
                (self.path / name).unlink(missing_ok=True)
            self._remove_checkpoints(keep=())

    last = property(lambda self: self.path / "last")
    best = property(lambda self: self.path / "best")

    def log(self, **line: Any) -> None:
        """Append a line to metrics.jsonl.

        Examples
        --------
        See the class.
        """
        if self._ranks.rank == 0:
            with errors.naming(self._metrics), open(self._metrics, "a") as stream:
                stream.write(json_line(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; one cut short by a crash is left out.

        Examples
        --------
        See the class.
        """
        return self.read_metrics(self._metrics) if self._metrics.exists() else []

    @staticmethod
    def read_metrics(path: Path) -> list[dict[str, Any]]:
        """Return the lines of a metrics.jsonl, whoever writes there.

        Examples
        --------
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "metrics.jsonl")
        ...     _ = path.write_text('{"step": 1}\\n{"st')
        ...     RunFolder.read_metrics(path)
        [{'step': 1}]
        """
        lines = []
        for line in path.read_text("utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        return lines

    def forget_after(self, step: int) -> None:
        """Drop metrics of later steps, and the result: a resumed run will write them again.

        Examples
        --------
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunFolder(folder)
        ...     run.log(step=1)
        ...     run.log(step=2)
        ...     run.forget_after(1)
        ...     run.metrics()
        [{'step': 1}]
        """
        self._on_first("forget_after", lambda: self._forget_after(step))

    def _forget_after(self, step: int) -> None:
        kept = [line for line in self.metrics() if line.get("step", step + 1) <= step]
        temporary = self._metrics.with_suffix(".tmp")
        with errors.naming(self._metrics):
            temporary.write_text("".join(json_line(line) + "\n" for line in kept))
        temporary.replace(self._metrics)

    def save(
        self, model: Module, optimizer: Optimizer, progress: dict[str, Any], *, best: bool = False
    ) -> None:
        """Save a checkpoint as `last`, and as `best` if it is; remove what no link points to.

        Examples
        --------
        >>> import tempfile
        >>> from cupyrec import models, optim
        >>> model = models.DLRM(1, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunFolder(folder)
        ...     run.save(model, optim.SGD(model.parameters(), 0.1), {"step": 7})
        ...     run.last.resolve().name
        'step-7'
        """
        target = self.path / "checkpoints" / f"step-{progress['step']}"
        while target.exists():  # saved by a run that was killed before it switched the link, say
            target = target.with_name(target.name + "+")
        base = self._next_base()
        with self._ranks.busy("saving"):
            checkpoint.save(
                target, model, optimizer,
                base=base, config=self.config, progress=progress, ranks=self._ranks,
            )  # fmt: skip
        self.base = target
        self._on_first("save", lambda: self._switch(target, best))

    def _next_base(self) -> Path | None:
        """What the next checkpoint is based on, None if it is to hold all."""
        if not self.deltas or self.base is None:
            return None
        told = False
        if self._ranks.rank == 0:  # others might see sooner or later that it is gone
            try:
                told = len(links(self.base)) <= self.deltas
            except (FileNotFoundError, ValueError) as error:
                logger.warning("the next checkpoint holds all rows: %s", error)
        return self.base if self._ranks.all_gather_json("RunFolder: base", told)[0] else None

    def _switch(self, target: Path, best: bool) -> None:
        """Let the links point to a checkpoint."""
        for link in [self.best, self.last] if best else [self.last]:  # `last` says which is best
            temporary = self.path / ".link.tmp"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target.relative_to(self.path))
            temporary.replace(link)
        checkpoint_files.sync(self.path)  # the links, before what they pointed to goes
        kept = {self.last.resolve(), self.best.resolve()}
        try:
            chains = [links(path) for path in kept if path.exists()]
        except (FileNotFoundError, ValueError) as error:  # whoever has it may put it back
            logger.warning("no checkpoint is removed: %s", error)
            return
        bases = {link.folder.resolve() for chain in chains for link in chain}
        self._remove_checkpoints(keep=kept | bases)

    def _remove_checkpoints(self, keep: Iterable[Path]) -> None:
        """Remove all checkpoints but those to keep, and what killed processes left of others."""
        folder = self.path / "checkpoints"
        for entry in folder.glob(".step-*.tmp"):
            shutil.rmtree(entry)
        for entry in folder.glob("step-*"):
            if entry.resolve() not in keep:  # killed meanwhile, half of one is none by its name
                shutil.rmtree(entry.rename(entry.with_name(f".{entry.name}.tmp")))


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never there by half: under another name first.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "a"), "text")
    ...     Path(folder, "a").read_text()
    'text'
    """
    temporary = path.with_name(f".{path.stem}.tmp")
    try:
        with errors.naming(path):
            temporary.write_text(text, "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

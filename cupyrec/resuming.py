"""What a run goes on from, its own last checkpoint or another run's, and what must stay."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import cupyrec
from cupyrec import checkpoint, optim
from cupyrec.checkpoint_deltas import links
from cupyrec.checkpoint_fits import check_fits
from cupyrec.cli import UsageError
from cupyrec.data import Schema
from cupyrec.data.open_dataset import kind_of
from cupyrec.from_settings import default_settings
from cupyrec.parallel import world
from cupyrec.progress import Progress
from cupyrec.run_folder import RunFolder

__all__ = [
    "DATA", "begin", "check_ranks", "check_start", "config_of", "is_finished", "resume", "sizes",
    "warn_of_other_data", "why_not_resumed",
]  # fmt: skip

logger = logging.getLogger("cupyrec")

DATA = "data.json"  # in a run's folder, what it trained on


def sizes(data: Any) -> list[list]:
    """Name and bytes of each file: enough for a resumed run to tell that its data are others."""
    return [[path.name, path.stat().st_size] for path in data.paths]


def warn_of_other_data(folder: Path, data: Any) -> None:
    """Say so if a run's training data are not what it began with."""
    if not (folder / DATA).exists():  # runs before version 0.3 don't say
        return
    before, now = json.loads((folder / DATA).read_text("utf-8"))["train"], sizes(data)
    if before != now:

        def told(files: list[list]) -> str:
            return ", ".join(f"{name} of {size} bytes" for name, size in files)

        logger.warning(
            "the run goes on with other data to train on than it had: %s; before, %s",
            told(now), told(before),
        )  # fmt: skip


def why_not_resumed(folder: Path) -> str:
    """Return what is missing of a run that is to be resumed, and what can be done."""
    if not (folder / "config.toml").exists():
        return f"train: --resume must name a run's folder, got '{folder}'."
    return (
        f"train: --resume must name a run that has saved a checkpoint, got '{folder}', which ended "
        f"before its first. Start it anew with --out '{folder}' --overwrite; "
        "--set training.save_every=N saves one every N steps."
    )


def is_finished(progress: Progress, training: dict[str, Any]) -> bool:
    """Return whether a run has nothing left to train, by its settings of training."""
    stopped = 0 < training["patience"] <= progress.evaluations_since_best
    return stopped or progress.epoch >= training["epochs"]


def check_start(
    path: Path,
    out: str | None,
    schema: Schema,
    model: cupyrec.nn.Module,
    optimizer: optim.Optimizer,
) -> None:
    """Refuse a checkpoint that `begin` could not load, before --out is overwritten."""
    if config_of(path)["schema"] != schema.to_dict():
        raise UsageError(f"train: --schema must be that of '{path}', got another.")
    for link in links(path):
        if out and link.folder.resolve().is_relative_to(Path(out).resolve()):
            raise UsageError(f"train: --out must be another run's than --from, got '{out}'.")
    try:
        check_fits(path, link.manifest, model, optimizer)
    except ValueError as error:
        raise UsageError(error) from None


def begin(
    path: Path, run: RunFolder | None, model: cupyrec.nn.Module, optimizer: optim.Optimizer
) -> Progress:
    """Load what a checkpoint has learnt: tables, optimizer and schedule go on, by other data."""
    try:
        step = checkpoint.load(path, model, optimizer)["progress"]["step"]
    except (ValueError, TypeError) as error:
        raise UsageError(error) from None
    if run is not None:
        run.base = path.resolve()
    return Progress(step=step)


def resume(
    path: Path,
    settings: dict[str, dict[str, Any]],
    schema: Schema,
    model: cupyrec.nn.Module,
    optimizer: optim.Optimizer,
) -> Progress:
    """Load model and optimizer as a run left them; return where it stands."""
    configuration = config_of(path)
    before = configuration["settings"]
    if configuration["schema"] != schema.to_dict():
        raise UsageError(f"train: --schema must stay that of '{path.parent}', got another.")
    model_before = default_settings(before["model"]["name"])["model"] | before["model"]
    if model_before != settings["model"]:  # of what an older version didn't have, the default
        raise UsageError(f"train: [model] must stay {model_before}, got {settings['model']}.")
    seed, now = before["training"]["seed"], settings["training"]["seed"]
    if seed != now:
        raise UsageError(f"train: --seed must stay {seed}, got {now}.")
    progress = Progress(**checkpoint.load(path, model, optimizer)["progress"])
    size, now = before["training"]["batch_size"], settings["training"]["batch_size"]
    if progress.batch and size != now:
        raise UsageError(f"train: --batch-size must stay {size} within an epoch, got {now}.")
    rows, now = before["data"].get("shuffle", 0), settings["data"]["shuffle"]
    if progress.batch and rows != now:
        raise UsageError(f"train: data.shuffle must stay {rows} within an epoch, got {now}.")
    return progress


def check_ranks(progress: Progress, settings: dict[str, dict[str, Any]], data: Any) -> None:
    """Which rows an epoch has had hangs on the number of ranks where each shuffles its own, or has
    its own part of a Parquet log."""
    shared = settings["data"]["shuffle"] or kind_of(data.paths[0]) == "parquet"
    before, now = progress.ranks, world().size
    if progress.batch and shared and before not in (0, now):  # older checkpoints don't say
        raise UsageError(
            f"train: ranks must stay {before} within an epoch of these data, got {now}."
        )


def config_of(path: Path) -> dict[str, Any]:
    """Return the settings and the schema that a run saved with a checkpoint."""
    configuration = checkpoint.read_manifest(path, delta=True)["config"]
    if not {"settings", "schema"} <= configuration.keys():
        raise ValueError(f"checkpoint: '{path}' must be written by `cupyrec train`, got no config.")
    return configuration

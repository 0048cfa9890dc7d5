"""What the subcommands of ``cupyrec`` do. Results go to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

import cupyrec
from cupyrec import (
    checkpoint,
    config,
    errors,
    inference,
    interruption,
    optim,
    timeline,
    training,
)
from cupyrec.checkpoint_files import find_checkpoint
from cupyrec.cli import UsageError
from cupyrec.data import Schema, Shuffled, criteo_schema, open_dataset
from cupyrec.data.open_dataset import kind_of
from cupyrec.device_flags import log_device, set_device
from cupyrec.embedding import CachedSSD
from cupyrec.from_settings import (
    MODELS,
    OPTIMIZERS,
    build_model,
    build_optimizer,
    default_settings,
    fit_options,
    group_field,
    keep_tables,
    tier_of,
)
from cupyrec.parallel import Communicator, world
from cupyrec.progress import Progress
from cupyrec.report import write_report
from cupyrec.resuming import (
    DATA,
    begin,
    check_ranks,
    check_start,
    config_of,
    is_finished,
    resume,
    sizes,
    warn_of_other_data,
    why_not_resumed,
)
from cupyrec.run_folder import RunFolder, json_line, write_whole
from cupyrec.tensorboard import TensorBoard

__all__ = ["evaluate", "predict", "report", "train"]

logger = logging.getLogger("cupyrec")

_AMPS = "float32", "float16", "bfloat16"

# flag -> section and key of the configuration
_FLAGS = {
    "model": ("model", "name"),
    "embedding_dim": ("model", "embedding_dim"),
    "seed": ("training", "seed"),
    "epochs": ("training", "epochs"),
    "batch_size": ("training", "batch_size"),
    "amp": ("training", "amp"),
    "lr": ("optimizer", "lr"),
    "optimizer": ("optimizer", "name"),
}


def train(options: argparse.Namespace) -> None:
    """Train a model by the flags of ``cupyrec train``; print the result as a JSON line."""
    began = time.perf_counter()
    Communicator.stall_timeout = options.stall_timeout
    set_device(options)
    if options.trace:
        timeline.start(world().size)
    if options.start and options.resume:
        raise UsageError("train: --from must come without --resume, got both.")
    if options.resume and (options.out or options.overwrite):
        raise UsageError("train: --resume must come without --out and --overwrite, got both.")
    if options.resume and not (Path(options.resume) / "last").exists():
        raise UsageError(why_not_resumed(Path(options.resume)))
    if options.out == "":
        raise UsageError("train: --out must name a folder, got ''.")
    boards = [TensorBoard(options.tensorboard)] if options.tensorboard else []
    settings = _settings(options)
    train_data = _dataset(options.train, _schema(options, settings), settings)
    schema = train_data.schema
    valid, test = (_dataset(files, schema, settings) for files in (options.valid, options.test))
    model, optimizer, fitting = _build(settings, schema, options.device)
    progress = Progress()
    if options.resume:
        _keep_tables(options, settings, model)
        progress = resume(Path(options.resume) / "last", settings, schema, model, optimizer)
        check_ranks(progress, settings, train_data)
        warn_of_other_data(Path(options.resume), train_data)
    start = find_checkpoint(options.start).resolve() if options.start else None
    if start is not None:
        check_start(start, options.out, schema, model, optimizer)
    run = _run_folder(options, settings, schema)  # all is well: now something may be overwritten
    if run is not None and world().rank == 0:
        write_whole(run.path / "config.toml", config.to_toml(settings))
        write_whole(run.path / DATA, json.dumps({"train": sizes(train_data)}, indent=1))
    if options.resume:
        run.forget_after(progress.step)
    else:
        _keep_tables(options, settings, model)
    if start is not None:
        progress = begin(start, run, model, optimizer)
    if run is None and world().rank == 0:
        logger.warning("without --out neither model nor metrics are kept")
    log_device(options)
    if options.resume and progress.step and is_finished(progress, settings["training"]):
        logger.info(
            "'%s' is finished already, at step %d: nothing to train", run.path, progress.step
        )
    result = training.fit(
        model, _shuffled(train_data, settings), valid,
        optimizer=optimizer, run=run, progress=progress, callbacks=boards, **fitting,
    )  # fmt: skip
    if test is not None:
        result |= _of_test(inference.evaluate(model, test, group=fitting["group"]))
    result["seconds"] = time.perf_counter() - began
    if run is not None:
        run.log(**result)
    _print(result)
    if options.trace:
        told = world().all_gather_json("trace", timeline.events(world().rank))
        if world().rank == 0:
            with errors.naming(options.trace):
                timeline.write(options.trace, told)


def evaluate(options: argparse.Namespace) -> None:
    """Measure a checkpoint by the flags of ``cupyrec evaluate``; print a JSON line."""
    start = time.perf_counter()
    set_device(options)
    with _loaded(options, labels=True) as (model, data, group):
        log_device(options)
        loaded = time.perf_counter()
        measured = inference.evaluate(model, data, batch_size=options.batch_size, group=group)
    end = time.perf_counter()
    speed = {"samples_per_second": measured["samples"] / (end - loaded), "seconds": end - start}
    _print(_of_test(measured) | speed)


def _of_test(measured: dict[str, float]) -> dict[str, float]:
    return {f"test_{name}": value for name, value in measured.items() if name != "samples"}


def predict(options: argparse.Namespace) -> None:
    """Write probabilities by the flags of ``cupyrec predict``, one a row of the data.

    A malformed line is an error whatever ``data.on_error`` the run was trained with: were it
    skipped, the probabilities would no longer stand beside their rows.
    """
    set_device(options)
    output = Path(options.output)
    if output.suffix not in (".npy", ".parquet", ".csv"):
        raise UsageError(f"predict: --output must end in .npy, .parquet or .csv, got '{output}'.")
    if output.exists() and not options.overwrite:
        raise UsageError(f"predict: '{output}' must not exist without --overwrite.")
    with _loaded(options, labels=False) as (model, data, _):
        log_device(options)
        probabilities = inference.predict(model, data, batch_size=options.batch_size)
    if world().rank == 0:
        _write(probabilities, data.schema.task_names, output)
    _print({"rows": len(probabilities), "output": str(output)})


def _write(probabilities: np.ndarray, tasks: list[str], output: Path) -> None:
    """A column for each of several tasks; an array has it without a name."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.stem}.tmp{output.suffix}")
    try:
        with errors.naming(output), world().busy("writing"):
            if output.suffix == ".npy":
                np.save(temporary, probabilities)
            else:
                columns = {"probability": probabilities}
                if probabilities.ndim > 1:
                    names = (f"probability_{task}" for task in tasks)
                    columns = dict(zip(names, probabilities.T, strict=True))
                table = pa.table(columns)
                write = parquet.write_table if output.suffix == ".parquet" else csv.write_csv
                write(table, temporary)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def report(options: argparse.Namespace) -> None:
    """Draw a run's metrics as report.html in its folder; print the path as a JSON line."""
    _print({"report": str(write_report(options.folder))})


def _print(result: dict[str, Any]) -> None:
    if world().rank == 0:
        print(json_line(result), flush=True)  # a closed pipe shows here, not at the end


def _settings(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Defaults, then the resumed run's, then --config, then --set, then flags."""
    files = [Path(options.resume) / "config.toml"] if options.resume else []
    begun = [_settings_of(find_checkpoint(options.start))] if options.start else []
    files += [options.config] if options.config else []
    flags = [
        {section: {key: getattr(options, flag)}}
        for flag, (section, key) in _FLAGS.items()
        if getattr(options, flag) is not None
    ]
    if options.codec is not None:
        flags.append({"exchange": {"forward": options.codec, "backward": options.codec}})
    try:
        changes = [
            *begun,
            *map(config.read, files),
            *map(config.parse_setting, options.set),
            *flags,
        ]
        models = [change["model"] for change in changes if "model" in change]
        names = [model["name"] for model in models if isinstance(model, dict) and "name" in model]
        name = names[-1] if names else config.DEFAULTS["model"]["name"]
        if (options.resume or options.start) and name != names[0]:
            kept = "--resume" if options.resume else "--from"
            raise UsageError(f"train: --model must be that of {kept}, '{names[0]}', got '{name}'.")
        if name not in MODELS:
            raise UsageError(f"train: --model must be one of {sorted(MODELS)}, got '{name}'.")
        settings = config.override(default_settings(name), changes)
        errors.positive("train", "batch_size", settings["training"]["batch_size"])
    except (ValueError, TypeError) as error:
        raise UsageError(error) from None
    if settings["optimizer"]["name"] not in OPTIMIZERS:
        raise UsageError(
            f"train: --optimizer must be one of {sorted(OPTIMIZERS)}, "
            f"got '{settings['optimizer']['name']}'."
        )
    if settings["training"]["amp"] not in _AMPS:
        raise UsageError(
            f"train: --amp must be one of {list(_AMPS)}, got '{settings['training']['amp']}'."
        )
    return settings


def _settings_of(path: Path) -> dict[str, dict[str, Any]]:
    """Another run's settings, but for the place of its tables, which stay its own."""
    settings = config_of(path)["settings"]
    settings.get("embedding", {}).pop("path", None)  # from version 0.4 on
    return settings


def _schema(options: argparse.Namespace, settings: dict[str, dict[str, Any]]) -> Schema | None:
    """The schema of the logs, None if their files are to tell."""
    text = kind_of(options.train[0]) == "text"
    buckets = settings["data"]["buckets"]
    if options.schema or not text:
        changes = map(config.parse_setting, options.set)
        told = any("buckets" in change.get("data", ()) for change in changes)
        if told or not buckets:  # true, the default, stands in every saved config.toml: no harm
            raise UsageError(
                f"train: data.buckets must be left to the columns of --schema, got {buckets}."
            )
    if options.schema:
        return Schema.load(options.schema)
    if options.resume or options.start:
        path = Path(options.resume) / "last" if options.resume else find_checkpoint(options.start)
        return Schema.from_dict(config_of(path)["schema"])
    return criteo_schema(buckets=buckets) if text else None


def _dataset(files: list[str] | None, schema: Schema | None, settings: dict) -> Any:
    on_error = settings["data"]["on_error"]
    return open_dataset(files, schema, on_error=on_error) if files else None


def _shuffled(data: Any, settings: dict) -> Any:
    rows, seed = settings["data"]["shuffle"], settings["training"]["seed"]
    return Shuffled(data, rows, seed) if rows else data


def _run_folder(
    options: argparse.Namespace, settings: dict[str, dict[str, Any]], schema: Schema
) -> RunFolder | None:
    folder = options.resume or options.out
    if not folder:
        return None
    try:
        run = RunFolder(folder, resume=bool(options.resume), overwrite=options.overwrite)
    except FileExistsError as error:
        ways = "--resume or --overwrite" if (Path(folder) / "last").exists() else "--overwrite"
        raise UsageError(f"{error} Give {ways}.") from None
    run.config = {"settings": settings, "schema": schema.to_dict()}
    run.deltas, run.base = settings["training"]["deltas"], None
    if options.resume:
        run.base = run.last.resolve()
    return run


def _build(
    settings: dict[str, dict[str, Any]], schema: Schema, device: str
) -> tuple[cupyrec.nn.Module, optim.Optimizer, dict[str, Any]]:
    """The model, its optimizer, and further arguments of `fit`."""
    try:
        fitting = fit_options(settings, schema)
        tier_of(settings, "tables")
        model = build_model(settings, schema, device)
        return model, build_optimizer(settings, model), fitting
    except (ValueError, TypeError) as error:
        raise UsageError(error) from None


def _keep_tables(
    options: argparse.Namespace, settings: dict[str, dict[str, Any]], model: cupyrec.nn.Module
) -> None:
    """Keep a run's tables where [embedding] tells; a checkpoint has them too, so none are there."""
    folder = options.resume or options.out
    tier = tier_of(settings, Path(folder or "", "tables"))
    if isinstance(tier, CachedSSD) and not (folder or settings["embedding"]["path"]):
        raise UsageError("train: embedding.path must name a folder without --out, got ''.")
    keep_tables(tier, model)
    rows = sum(len(group.store) for _, group in model.named_groups())
    if rows and not (options.resume or options.overwrite):
        raise UsageError(
            f"train: embedding.path '{tier.path}' must hold no rows without --overwrite, "
            f"got {rows}."
        )
    for _, group in model.named_groups():
        group.clear()


@contextlib.contextmanager
def _loaded(
    options: argparse.Namespace, *, labels: bool
) -> Iterator[tuple[cupyrec.nn.Module, Any, int | None]]:
    """Build the model of a checkpoint, or of a run's best or last, and open the data; the number
    of the field whose groups are measured stands last."""
    path = find_checkpoint(options.checkpoint)
    configuration = config_of(path)
    settings, schema = configuration["settings"], Schema.from_dict(configuration["schema"])
    model = build_model(settings, schema, options.device)
    on_error = settings["data"]["on_error"] if labels else "raise"
    data = open_dataset(options.data, schema, labels=labels, on_error=on_error)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interruption.ending())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cupyrec-tables-"))
        tier = tier_of(settings, folder)
        if isinstance(tier, CachedSSD):  # the run's own may be at work
            tier = dataclasses.replace(tier, path=folder)
        keep_tables(tier, model)
        for _, group in model.named_groups():
            stack.callback(group.store.close)
        checkpoint.load(path, model)
        yield model, data, group_field(settings, schema)

"""What ``cupyrec checkpoint`` does: text on stderr, a JSON line on stdout.

CKPT is a checkpoint's folder, or a run's, whose best checkpoint is meant, else its last.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from cupyrec import (
    checkpoint_checks,
    checkpoint_deltas,
    checkpoint_diff,
    checkpoint_export,
    checkpoint_import,
    checkpoint_reshard,
)
from cupyrec.checkpoint_deltas import links
from cupyrec.checkpoint_files import find_checkpoint, read_manifest
from cupyrec.checkpoint_shards import count_ids, row_bytes, served_groups
from cupyrec.cli import UsageError
from cupyrec.migrate.hugectr import read_sparse_model
from cupyrec.migrate.oneembedding import read_snapshot
from cupyrec.migrate.weights import read_weight
from cupyrec.run_folder import json_line

__all__ = ["compact", "diff", "export", "import_table", "inspect", "reshard", "verify"]

logger = logging.getLogger("cupyrec")

_READERS = {  # of each system: what reads it, and its options
    "oneembedding": (read_snapshot, ("snapshot", "storage_dim", "states", "key_type")),
    "hugectr": (read_sparse_model, ("slot", "key_type")),
    "weights": (read_weight, ("weight", "vocabulary")),
}
_NEEDED = {"snapshot", "weight"}


def inspect(options: argparse.Namespace) -> None:
    """Tell what is in a checkpoint: its model, tables, shards, optimizer and progress."""
    path = find_checkpoint(options.checkpoint)
    manifest = read_manifest(path, delta=True)
    groups = [_group(path, entry) for entry in manifest["groups"]]
    told = {
        "checkpoint": str(path),
        **{key: manifest[key] for key in ("format", "cupyrec", "model", "optimizer", "progress")},
        "base": manifest.get("base"),
        "parameters": _parameters(path),
        "files": len(manifest["files"]),
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "groups": groups,
        "config": manifest["config"],
    }
    logger.info(
        "%s: %s, format %d, written by cupyrec %s", path, told["model"], told["format"],
        told["cupyrec"],
    )  # fmt: skip
    sizes = told["files"], told["bytes"], told["parameters"]
    logger.info("%d files, %d bytes; %d parameters", *sizes)
    logger.info("config %s", told["config"])
    logger.info("optimizer %s", told["optimizer"])
    logger.info("progress %s", told["progress"])
    for group in groups:
        logger.info(
            "%s: width %d, %s, state %s, shards of %s rows", group["name"], group["width"],
            group["dtype"], ", ".join(group["state"]) or "none", group["shards"],
        )  # fmt: skip
        logger.info("%10s %14s %16s", "table", "ids", "bytes")
        for table, numbers in group["tables"].items():
            logger.info("%10s %14d %16d", table, numbers["ids"], numbers["bytes"])
    _print(told)


def _group(path: Path, entry: dict[str, Any]) -> dict[str, Any]:
    ids = count_ids(path, entry)
    size = row_bytes(entry)
    return {
        "name": entry["name"],
        "width": entry["width"],
        "dtype": entry["dtype"],
        "state": [name for name, *_ in entry["state"]],
        "rows": entry["rows"],
        "bytes": entry["rows"] * size,
        "shards": [shard["rows"] for shard in entry["shards"]],
        "tables": {str(t): {"ids": ids[t], "bytes": ids[t] * size} for t in ids},
    }


def _parameters(path: Path) -> int:
    with safe_open(path / "dense.safetensors", "numpy") as dense:
        return sum(
            int(np.prod(dense.get_slice(name).get_shape()))
            for name in dense.keys()
            if name.startswith("parameter/")
        )


def verify(options: argparse.Namespace) -> None:
    """Check every file, every number of rows, and that each key is there once; of a delta, what it
    is based on too."""
    start = time.perf_counter()
    path = find_checkpoint(options.checkpoint)
    chain = links(path)
    manifests = [checkpoint_checks.check(link.folder, delta=True) for link in chain]
    _print(
        {
            "checkpoint": str(path),
            "chain": [str(link.folder) for link in chain],
            "files": sum(len(manifest["files"]) for manifest in manifests),
            "bytes": sum(f["bytes"] for manifest in manifests for f in manifest["files"].values()),
            "rows": sum(entry["rows"] for entry in served_groups(manifests[-1])),
            "seconds": time.perf_counter() - start,
        }
    )


def compact(options: argparse.Namespace) -> None:
    """Write what a chain of deltas says as a checkpoint that holds all rows."""

    def work(path: Path) -> dict[str, Any]:
        manifest = checkpoint_deltas.compact(path, options.out, overwrite=options.overwrite)
        return {"rows": sum(entry["rows"] for entry in served_groups(manifest))}

    _write(options, work)


def reshard(options: argparse.Namespace) -> None:
    """Write a checkpoint anew in another number of shards."""

    def work(path: Path) -> dict[str, Any]:
        checkpoint_reshard.reshard(path, options.out, options.shards, overwrite=options.overwrite)
        return {"shards": options.shards}

    _write(options, work)


def diff(options: argparse.Namespace) -> int:
    """Tell how two checkpoints differ; return 0 if they don't, else 1."""
    a, b = find_checkpoint(options.a), find_checkpoint(options.b)
    told = checkpoint_diff.diff(a, b, scratch=options.scratch)
    tables = {
        name: found
        for name, found in told["tables"].items()
        if found["only_a"] or found["only_b"] or found["differ"]
    }
    logger.info("%d of %d tables with ids differ", len(tables), len(told["tables"]))
    for name, found in tables.items():
        logger.info(
            "%s: %d ids in both, %d only in %s, %d only in %s", name, found["common"],
            found["only_a"], a, found["only_b"], b,
        )  # fmt: skip
        for part, count in found["differ"].items():
            logger.info("    %s: %d rows, by up to %g", part, count, found["largest"][part])
    for name, largest in told["dense"].items():
        logger.info("%s: %s", name, "not in both" if largest is None else f"by up to {largest:g}")
    for name in told["settings"]:
        logger.info("%s: not the same", name)
    _print(told | {"tables": tables})
    return 0 if told["equal"] else 1


def export(options: argparse.Namespace) -> None:
    """Write ids and vectors of tables as Parquet or .npy."""
    _write(
        options,
        lambda path: checkpoint_export.export(
            path, options.out, format=options.format, tables=options.table,
            states=options.states, overwrite=options.overwrite,
        ),
    )  # fmt: skip


def import_table(options: argparse.Namespace) -> None:
    """Write a checkpoint anew with vectors of a file in one of its tables."""
    read = _reader(options)
    _write(
        options,
        lambda path: checkpoint_import.import_table(
            options.file, path, options.out, options.table, read=read,
            ids=options.ids and range(*options.ids), offset=options.offset,
            overwrite=options.overwrite,
        ),
    )  # fmt: skip


def _reader(options: argparse.Namespace) -> Callable | None:
    """What reads FILE, by the options that its system has; None: it is an export."""
    read, known = _READERS.get(options.system, (None, ()))
    every = {name for _, names in _READERS.values() for name in names}
    given = {name: value for name in every if (value := getattr(options, name)) is not None}
    for name in sorted(given.keys() - set(known) | (_NEEDED & set(known)) - given.keys()):
        rule = "must be given" if name in known else "is not known"
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"import: {flag} {rule} with --from {options.system or 'left out'}.")
    if "vocabulary" in given:
        given["vocabulary"] = np.load(given["vocabulary"], mmap_mode="r")
    return read and partial(read, **given)


def _write(options: argparse.Namespace, work: Callable[[Path], dict[str, Any]]) -> None:
    """Let `work` write something from a checkpoint to OUT, and tell what lies there."""
    start, out = time.perf_counter(), Path(options.out)
    if out.exists() and not options.overwrite:
        raise UsageError(f"checkpoint: '{out}' must not exist without --overwrite.")
    told = work(find_checkpoint(options.checkpoint))
    sizes = [file.stat().st_size for file in out.iterdir()]
    _print(
        {
            "out": str(out),
            **told,
            "files": len(sizes),
            "bytes": sum(sizes),
            "seconds": time.perf_counter() - start,
        }
    )


def _print(result: dict[str, Any]) -> None:
    print(json_line(result), flush=True)  # a closed pipe shows here, not at the interpreter's end

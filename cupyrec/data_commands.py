"""What the subcommands of ``cupyrec data`` do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cupyrec.cli import UsageError
from cupyrec.data import Schema
from cupyrec.data.inspect import inspect
from cupyrec.data.movielens import write_movielens_100k
from cupyrec.data.synthetic import write_synthetic
from cupyrec.run_folder import json_line, write_whole

__all__ = ["data_inspect", "data_movielens_100k", "data_synthetic"]


def data_inspect(options: argparse.Namespace) -> None:
    """Write what a log's columns seem to be as a schema, with comments that say why."""
    out = None if options.out is None else Path(options.out)
    if out is not None and out.exists() and (out.is_dir() or not options.overwrite):
        raise UsageError(f"data: '{out}' must not exist without --overwrite, nor be a folder.")
    text = Schema.to_toml(*inspect(options.file, options.rows))
    if out is None:
        print(text, end="", flush=True)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text)


def data_movielens_100k(options: argparse.Namespace) -> None:
    """Write MovieLens-100k as click logs; print the numbers of rows as a JSON line."""
    _print(write_movielens_100k(options.wheel, options.out))


def data_synthetic(options: argparse.Namespace) -> None:
    """Write a synthetic click log; print its best reachable AUC as a JSON line."""
    if Path(options.out).exists() and not options.overwrite:
        raise UsageError(f"data: '{options.out}' must not exist without --overwrite.")
    try:
        written = write_synthetic(
            options.out, options.rows, seed=options.seed,
            ids_per_table=options.ids_per_table, zipf=options.zipf, missing=options.missing,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise UsageError(error) from None
    _print(written)


def _print(result: dict[str, Any]) -> None:
    print(json_line(result), flush=True)

"""Files of any kind as a dataset."""

from __future__ import annotations

import os
from pathlib import Path

from cupyrec.data.log_files import Paths
from cupyrec.data.numpy_files import NumPyFiles
from cupyrec.data.parquet import Parquet
from cupyrec.data.schema import Schema, criteo_schema
from cupyrec.data.tsv import TSV

__all__ = ["kind_of", "open_dataset"]


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return what a file is by its name: "parquet", "npy" (also of a prefix) or "text".

    Examples
    --------
    >>> [kind_of(name) for name in ("a.parquet", "day_0_sparse.npy", "clicks.csv.gz")]
    ['parquet', 'npy', 'text']
    """
    path = Path(path)
    if path.suffix in (".parquet", ".pq"):
        return "parquet"
    if path.suffix == ".npy" or (not path.exists() and Path(f"{path}_dense.npy").exists()):
        return "npy"
    return "text"


def open_dataset(
    paths: Paths, schema: Schema | None = None, *, labels: bool = True, on_error: str = "raise"
) -> TSV | Parquet | NumPyFiles:
    """Return files as a dataset: Parquet, NumPy's or text, all of one kind.

    Parameters
    ----------
    paths : path or sequence of paths
        Names end in ``.parquet``, or in ``_dense.npy``, ``_sparse.npy`` or ``_labels.npy``, which
        may be left away; all others are text.
    schema : Schema, optional
        Needed by Parquet; else None is Criteo's layout, of .npy files whatever columns they have.
    labels : bool
        Whether batches carry labels; if not, files may lack them.
    on_error : {"raise", "skip"}
        What to do at a malformed line of text; other files are always read whole.

    Raises
    ------
    ValueError
        The files are of several kinds, or Parquet without a schema. And what else their class
        raises: see `TSV`, `Parquet` and `NumPyFiles`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "clicks.tsv")
    ...     _ = path.write_text("1" + 39 * "\\t" + "\\n")
    ...     open_dataset(path).num_tables
    39
    """
    several = not isinstance(paths, (str, os.PathLike))
    paths = list(paths) if several else [paths]
    kinds = [kind_of(path) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(f"{path}: must be {kinds[0]} as '{paths[0]}' is, got {kind}.")
    if kinds[:1] == ["npy"]:
        return NumPyFiles(paths, schema, labels=labels)
    if kinds[:1] == ["parquet"]:
        if schema is None:
            raise ValueError(
                f"{paths[0]}: must come with a schema, got none. "
                f"`cupyrec data inspect '{paths[0]}' --out schema.toml` writes one to look over."
            )
        return Parquet(paths, schema, labels=labels)
    schema = criteo_schema() if schema is None else schema
    return TSV(paths, schema, labels=labels, on_error=on_error)

"""Tables of NVIDIA's HugeCTR: a sparse model, as ``Model.save_params_to_files`` writes it.

A folder:

key           (N,) int64
emb_vector    (N, D) float32
slot_id       (N,) uint64, of a localized embedding: the slot whose key it is

Numbers are little-endian. Which row is of which key their order says. The optimizer's state is a
file beside the folder whose order it doesn't say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cupyrec import errors
from cupyrec.embedding.transfer import check_vectors

__all__ = ["read_sparse_model"]

_WHERE = "hugectr"


def read_sparse_model(
    path: str | os.PathLike,
    width: int,
    most: int = 65536,
    *,
    slot: int | None = None,
    key_type: str = "int64",
) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    """Yield ids and vectors of a sparse model in the order of its files; no states.

    Parameters
    ----------
    path : path
        The folder, ``…_sparse_N.model``.
    width : int
        D, numbers of a vector: ``embedding_vec_size`` there.
    most : int
        Rows at a time.
    slot : int, optional
        Whose keys are read of a localized embedding; those of all slots by default.
    key_type : {"int64", "uint32"}
        HugeCTR writes int64, whatever it was trained on; others write uint32 too.

    Yields
    ------
    ids : (N,) array of int64
    vectors : (N, D) array of float32
    states : dict
        Empty.

    Raises
    ------
    ValueError
        Files whose sizes don't fit, or a number that is not finite.
    FileNotFoundError
        A file is missing.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.array([7, 8]).tofile(folder + "/key")
    ...     np.ones((2, 1), np.float32).tofile(folder + "/emb_vector")
    ...     list(read_sparse_model(folder, 1))
    [(array([7, 8]), array([[1.], [1.]], dtype=float32), {})]
    """
    errors.positive(_WHERE, "width", width)
    if key_type not in ("int64", "uint32"):
        raise ValueError(f"{_WHERE}: 'key_type' must be int64 or uint32, got {key_type!r}.")
    key_file, vector_file, slot_file = (Path(path) / n for n in ("key", "emb_vector", "slot_id"))
    key, number, vector = np.dtype(key_type).newbyteorder("<"), np.dtype("<u8"), np.dtype("<f4")
    rows = _rows(vector_file, width * vector.itemsize)
    sizes = {key_file: key.itemsize}
    if slot is not None or slot_file.exists():
        sizes[slot_file] = number.itemsize
    for file, size in sizes.items():
        if (got := _rows(file, size)) != rows:
            raise ValueError(
                f"{_WHERE}: '{file}' must have {rows} rows of {size} bytes like '{vector_file}' "
                f"of width {width}, got {got}."
            )
    for first in range(0, rows, most):
        count = min(most, rows - first)
        ids = np.fromfile(key_file, key, count, offset=first * key.itemsize).astype(np.int64)
        at = first * width * vector.itemsize
        vectors = np.fromfile(vector_file, vector, count * width, offset=at).astype(np.float32)
        vectors = vectors.reshape(count, width)
        if slot is not None:
            slots = np.fromfile(slot_file, number, count, offset=first * number.itemsize)
            ids, vectors = ids[slots == slot], vectors[slots == slot]
        check_vectors(f"{_WHERE}: '{vector_file}'", vectors, "float32")
        yield ids, vectors, {}


def _rows(file: Path, size: int) -> int:
    """How many rows of so many bytes a file has."""
    rows, rest = divmod(file.stat().st_size, size)
    if rest:
        raise ValueError(f"{_WHERE}: '{file}' must have {size} bytes a row, got {rest} more.")
    return rows

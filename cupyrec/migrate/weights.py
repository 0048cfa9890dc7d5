"""Tables that are a matrix: ``nn.Embedding.weight`` of a model of PyTorch, whose row i is index i.

As DeepCTR-Torch, FuxiCTR and TorchRec have them in their ``state_dict``, written as .safetensors by
``safetensors.torch.save_file`` or as .npz by ``numpy.savez``. What index stands for which id of the
log their preprocessing knew: the vocabulary.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from cupyrec import errors
from cupyrec.embedding import widened
from cupyrec.embedding.transfer import check_vectors

__all__ = ["read_weight"]

_WHERE = "weights"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_weight(
    path: str | os.PathLike,
    width: int,
    most: int = 65536,
    *,
    weight: str | Sequence[str],
    vocabulary: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    """Yield ids and vectors of a matrix, or of several side by side, row after row; no states.

    Parameters
    ----------
    path : path
        FILE.safetensors or FILE.npz.
    width : int
        D, numbers of a vector.
    most : int
        Rows at a time.
    weight : str or sequence of str
        The name of the matrix, (N, D) float32; or of several, whose rows are put side by side: a
        factorization machine's vectors and weights, say, which are one row here.
    vocabulary : (N,) array of int64, uint64, int32 or uint32, optional
        The id that each row is of; i itself of row i by default.

    Yields
    ------
    ids : (N,) array of int64
    vectors : (N, D) array of float32
    states : dict
        Empty.

    Raises
    ------
    ValueError, TypeError
        A file of another kind or cut short, no such matrix, another shape or dtype, or a number
        that is not finite.
    FileNotFoundError
        There is no such file.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(folder + "/w.npz", **{"C1.weight": np.ones((2, 1), np.float32)})
    ...     list(read_weight(folder + "/w.npz", 1, weight="C1.weight", vocabulary=np.array([7, 8])))
    [(array([7, 8]), array([[1.], [1.]], dtype=float32), {})]
    """
    errors.positive(_WHERE, "width", width)
    readers = {".safetensors": _from_safetensors, ".npz": _from_npz}
    if (read := readers.get((file := Path(path)).suffix)) is None:
        raise ValueError(f"{_WHERE}: 'path' must end in .safetensors or .npz, got '{file}'.")
    names = [weight] if isinstance(weight, str) else list(weight)
    sources = [read(file, name, most) for name in names]
    shapes = [next(source) for source in sources]
    rows = {rows for rows, _ in shapes}
    if len(rows) != 1 or sum(columns for _, columns in shapes) != width:
        raise ValueError(
            f"{_WHERE}: 'weight' must name matrices of '{file}' with as many rows and {width} "
            f"columns together, got {names} of shapes {shapes}."
        )
    if vocabulary is not None:
        errors.axes(_WHERE, vocabulary=(vocabulary, str(*rows)))
        vocabulary = widened(np, vocabulary)
    first = 0
    for parts in zip(*sources, strict=True):
        vectors = np.concatenate(parts, axis=1)
        check_vectors(f"{_WHERE}: {names} of '{file}'", vectors, "float32")
        stop = first + len(vectors)
        ids = np.arange(first, stop) if vocabulary is None else np.array(vocabulary[first:stop])
        yield ids, vectors, {}
        first = stop


def _from_safetensors(file: Path, weight: str, most: int) -> Iterator[Any]:
    """Yield a matrix' shape, then its rows."""
    try:
        with safe_open(file, "numpy") as source:
            _find(file, weight, source.keys())
            matrix = source.get_slice(weight)
            shape = _checked(file, weight, matrix.get_shape(), matrix.get_dtype())
            yield shape
            for first in range(0, shape[0], most):
                yield matrix[first : min(first + most, shape[0])]
    except SafetensorError as error:
        raise ValueError(f"{_WHERE}: '{file}' must be safetensors, got: {error}.") from None


def _from_npz(file: Path, weight: str, most: int) -> Iterator[Any]:
    """Yield a matrix' shape, then its rows."""
    try:
        with zipfile.ZipFile(file) as archive:
            _find(file, weight, [name.removesuffix(".npy") for name in archive.namelist()])
            with archive.open(weight + ".npy") as stream:
                shape, by_columns, dtype = _header(file, weight, stream)
                yield _checked(file, weight, shape, dtype)
                if by_columns:
                    raise ValueError(
                        f"{_WHERE}: '{weight}' of '{file}' must be stored by rows, got by columns."
                    )
                left, width = shape
                while left:
                    rows = min(most, left)
                    content = stream.read(size := rows * width * dtype.itemsize)
                    if len(content) < size:
                        raise EOFError(f"{size - len(content)} bytes missing")
                    yield np.frombuffer(content, dtype).reshape(rows, width).astype(np.float32)
                    left -= rows
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{_WHERE}: '{file}' must be .npz, got: {error}.") from None


def _header(file: Path, weight: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        return _HEADERS[np.lib.format.read_magic(stream)](stream)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{_WHERE}: '{weight}' of '{file}' must be .npy, got {error!r}.") from None


def _find(file: Path, weight: str, names: Iterable[str]) -> None:
    if weight not in (names := sorted(names)):
        some = ", ".join(names[:6]) + ", ..." * (len(names) > 6)
        raise ValueError(f"{_WHERE}: 'weight' must be one of '{file}', {some}, got '{weight}'.")


def _checked(file: Path, weight: str, shape: Sequence[int], dtype: object) -> tuple[int, ...]:
    """The shape of what is a matrix of float32."""
    if dtype not in ("F32", np.dtype(np.float32)):
        raise TypeError(f"{_WHERE}: '{weight}' of '{file}' must be float32, got {dtype}.")
    if len(shape) != 2:
        raise ValueError(
            f"{_WHERE}: '{weight}' of '{file}' must have axes (N, D), got shape {tuple(shape)}."
        )
    return tuple(shape)

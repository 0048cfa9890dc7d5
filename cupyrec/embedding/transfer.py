"""Rows of a group in and out as NumPy arrays, and a digest of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.embedding.group import Group
from cupyrec.embedding.life import LIFE, looked_up_once
from cupyrec.embedding.store import Rows
from cupyrec.ops.partition import owners
from cupyrec.ops.row_digest import row_digest
from cupyrec.ops.unique_keys import unique_keys

__all__ = ["check_vectors", "digest", "export_rows", "exported", "import_vectors"]

_ROWS = 1 << 16  # rows at a time
_LARGEST = {"float16": float(np.finfo(np.float16).max), "int8": 2.0**127}


def export_rows(group: Group, first: int, stop: int) -> Rows:
    """Return rows number first to stop - 1 as NumPy arrays, their vectors up to date.

    Raises
    ------
    ValueError
        No such rows.

    Examples
    --------
    >>> from cupyrec.embedding import Constant, InitialVectors
    >>> group = Group(InitialVectors(2, Constant(3.0), seed=1))
    >>> _ = group.look_up(np.zeros(1, np.uint32), np.array([5]), insert=True)
    >>> export_rows(group, 0, 1).vectors
    array([[3., 3.]], dtype=float32)
    """
    rows = group.store.export_rows(first, stop)
    if group.history is None or first == stop:
        return rows
    current = group.current_vectors(group.store.places(first, stop))
    return rows._replace(vectors=arrays.to_host(current))


def exported(group: Group) -> Iterator[Rows]:
    """Yield all rows as `export_rows` does, 65,536 at a time.

    Raises
    ------
    RuntimeError
        Ids were deleted or imported meanwhile, so that rows have other numbers.

    Examples
    --------
    >>> from cupyrec.embedding import InitialVectors, Uniform
    >>> list(exported(Group(InitialVectors(2, Uniform(), seed=1))))
    []
    """
    numbering = group.numbering
    for first in range(0, len(group.store), _ROWS):
        if group.numbering != numbering:
            raise RuntimeError(
                "iterate: ids must not be deleted, imported, loaded or moved to another device "
                "meanwhile, got a table where they were."
            )
        yield export_rows(group, first, min(first + _ROWS, len(group.store)))


def check_vectors(where: str, vectors: np.ndarray, dtype: str) -> None:
    """Raise unless vectors (N, D) are such that rows of this type can hold them.

    Raises
    ------
    ValueError
        A number is not finite, or for float16 or int8 too large.

    Examples
    --------
    >>> check_vectors("f", np.array([[1e5]]), "float16")
    Traceback (most recent call last):
        ...
    ValueError: f: 'vectors' must lie within float16, up to 65504, got 100000.
    """
    if bad := int((~np.isfinite(vectors).all(axis=1)).sum()):
        raise ValueError(f"{where}: 'vectors' must be finite, got {bad} of {len(vectors)} not.")
    most, largest = _LARGEST.get(dtype, np.inf), np.abs(vectors).max(initial=0)
    if largest > most:
        raise ValueError(
            f"{where}: 'vectors' must lie within {dtype}, up to {most:g}, got {largest:g}."
        )


def import_vectors(group: Group, tables: Any, ids: Any, vectors: Any) -> None:
    """Give keys these vectors, and the state of new rows; what a key had before is forgotten.

    Nothing changes if the input is refused. This step's gradients are forgotten. Of several ranks
    each takes the keys that it owns, and passes over the others.

    Parameters
    ----------
    tables : (N,) array of uint32
    ids : (N,) array of int64
    vectors : (N, D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, a vector that is not finite, or a key twice.

    Examples
    --------
    >>> from cupyrec.embedding import InitialVectors, Uniform
    >>> group = Group(InitialVectors(1, Uniform(), seed=1))
    >>> import_vectors(group, np.zeros(1, np.uint32), np.array([5]), np.ones((1, 1), np.float32))
    >>> export_rows(group, 0, 1).vectors
    array([[1.]], dtype=float32)
    """
    where = "import_vectors"
    errors.dtype(where, "tables", tables, np.uint32)
    errors.dtype(where, "ids", ids, np.int64)
    errors.dtype(where, "vectors", vectors, np.float32)
    errors.axes(where, tables=(tables, "N"), ids=(ids, "N"), vectors=(vectors, f"N {group.width}"))
    tables, ids, vectors = map(arrays.to_host, (tables, ids, vectors))
    check_vectors(where, vectors, group.dtype)
    keys = unique_keys(tables, ids)
    if len(keys.ids) < len(ids):
        u = int(np.flatnonzero(np.diff(keys.offsets) > 1)[0])
        raise ValueError(
            f"{where}: a key must occur once, got id {keys.ids[u]} of table {keys.tables[u]} "
            f"{keys.offsets[u + 1] - keys.offsets[u]} times."
        )
    if (ranks := group.exchange.ranks).size > 1:  # on another rank nobody would ask for them
        own = owners(tables, ids, ranks.size) == ranks.rank
        tables, ids, vectors = tables[own], ids[own], vectors[own]
    group.delete(*(arrays.copy_to(group.xp, a) for a in (tables, ids)))
    states = {}
    if group.life is not None:
        states = {LIFE.name: looked_up_once(len(ids), group.clock + 1)}  # the step to come
    group.store.import_rows(Rows(tables, ids, vectors, states))


def digest(group: Group) -> np.ndarray:
    """Return (2,) uint64 that tell all keys, vectors and states, whatever the order of the rows.

    Examples
    --------
    >>> from cupyrec.embedding import InitialVectors, Uniform
    >>> digest(Group(InitialVectors(2, Uniform(), seed=1)))
    array([0, 0], dtype=uint64)
    """
    total = np.zeros(2, np.uint64)
    for rows in group.store.export():
        words = [rows.vectors, *(state.view(np.float32) for state in rows.states.values())]
        total += row_digest(rows.tables, rows.ids, np.concatenate(words, axis=1))
    return total

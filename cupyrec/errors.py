"""Checks of arrays and axes, and the sentences they fail with: *where: rule, values.*"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

__all__ = [
    "at_least_0", "axes", "columns", "count", "dtype", "few", "naming", "number", "positive",
    "rank", "rate", "vectors",
]  # fmt: skip


def at_least_0(where: str, name: str, value: Any) -> float:
    """Return a finite number of at least 0 as a float; ValueError or TypeError otherwise.

    Examples
    --------
    >>> at_least_0("layer_norm", "eps", -1)
    Traceback (most recent call last):
        ...
    ValueError: layer_norm: 'eps' must be finite and at least 0, got -1.
    """
    if not 0 <= number(where, name, value) < math.inf:
        raise ValueError(f"{where}: '{name}' must be finite and at least 0, got {value}.")
    return float(value)


def axes(where: str, **arrays: tuple[Any, str]) -> tuple[int, ...]:
    """Bind named axes over several arrays and return their lengths, in order of first appearance.

    Parameters
    ----------
    where : str
        Name of the function that checks, the start of the error sentence.
    **arrays : (array, str)
        Argument name -> (array, its axes in words), e.g. ``sparse=(x, "B F D")``. An axis that is a
        number must have just that length; a name must have one length wherever it appears.

    Returns
    -------
    tuple of int
        One length per name, in order of first appearance.

    Raises
    ------
    ValueError
        The number of axes or a length is not what the rule says.

    Examples
    --------
    >>> axes("f", dense=(np.zeros((2, 4)), "B D"), sparse=(np.zeros((2, 3, 4)), "B F D"))
    (2, 4, 3)
    >>> axes("f", dense=(np.zeros((2, 4)), "B D"), sparse=(np.zeros((2, 3, 5)), "B F D"))
    Traceback (most recent call last):
        ...
    ValueError: f: 'sparse' must have D = 4 like 'dense', got shape (2, 3, 5).
    """
    bound: dict[str, tuple[int, str]] = {}
    for name, (array, spec) in arrays.items():
        words = spec.split()
        if array.ndim != len(words):
            raise ValueError(
                f"{where}: '{name}' must have axes ({', '.join(words)}), got shape {array.shape}."
            )
        for word, length in zip(words, array.shape, strict=True):
            if word.isdigit():
                if length != int(word):
                    raise ValueError(
                        f"{where}: '{name}' must have axes ({', '.join(words)}), "
                        f"got shape {array.shape}."
                    )
            elif bound.setdefault(word, (length, name))[0] != length:
                expected, other = bound[word]
                raise ValueError(
                    f"{where}: '{name}' must have {word} = {expected} like '{other}', "
                    f"got shape {array.shape}."
                )
    return tuple(length for length, _ in bound.values())


def columns(where: str, name: str, array: Any) -> None:
    """Raise ValueError unless the rows of `array` have a column.

    Examples
    --------
    >>> columns("f", "x", np.zeros((2, 0)))
    Traceback (most recent call last):
        ...
    ValueError: f: 'x' must have D of at least 1, got shape (2, 0).
    """
    if array.shape[1] == 0:
        raise ValueError(f"{where}: '{name}' must have D of at least 1, got shape {array.shape}.")


def count(where: str, name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int of at least `least`; ValueError or TypeError otherwise.

    Examples
    --------
    >>> count("dot_interaction", "output_padding", -1)
    Traceback (most recent call last):
        ...
    ValueError: dot_interaction: 'output_padding' must be at least 0, got -1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where}: '{name}' must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{where}: '{name}' must be at least {least}, got {value}.")
    return int(value)


def dtype(where: str, name: str, array: Any, *allowed: Any) -> None:
    """Raise TypeError unless `array` has one of the allowed dtypes.

    Examples
    --------
    >>> dtype("f", "ids", np.zeros(3), np.int64)
    Traceback (most recent call last):
        ...
    TypeError: f: 'ids' must be int64, got float64.
    """
    if not hasattr(array, "dtype"):
        raise TypeError(f"{where}: '{name}' must be an array, got {type(array).__name__}.")
    if array.dtype not in [np.dtype(d) for d in allowed]:
        names = " or ".join(np.dtype(d).name for d in allowed)
        raise TypeError(f"{where}: '{name}' must be {names}, got {array.dtype}.")


def few(names: Iterable[str], most: int = 12) -> str:
    """Return names for a sentence, of many the first.

    Examples
    --------
    >>> few(["click", "user", "city"], most=2)
    'click, user, …'
    """
    names = list(names)
    return ", ".join(names[:most] + ["…"] * (len(names) > most))


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Let an OSError in this context name a file: "No space left on device" alone says too little.

    Examples
    --------
    >>> with naming("a.npy"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
        ...
    OSError: [Errno 28] No space left on device: 'a.npy'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def number(where: str, name: str, value: Any) -> float:
    """Return a number as a float; TypeError where it is none.

    Examples
    --------
    >>> number("SGD", "lr", "0.1")
    Traceback (most recent call last):
        ...
    TypeError: SGD: 'lr' must be a number, got '0.1'.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise TypeError(f"{where}: '{name}' must be a number, got {value!r}.")
    return float(value)


def same_dtype(where: str, *allowed: Any, **arrays: Any) -> None:
    """Raise TypeError unless the first array has one of the allowed dtypes, and all others its own.

    Examples
    --------
    >>> same_dtype("f", np.float32, x=np.zeros(3, np.float32), weight=np.zeros(3))
    Traceback (most recent call last):
        ...
    TypeError: f: 'weight' must be float32, got float64.
    """
    for name, array in arrays.items():
        dtype(where, name, array, *allowed)
        allowed = (array.dtype,)


def positive(where: str, name: str, value: Any) -> int:
    """Return `value` as an int of at least 1; ValueError or TypeError otherwise.

    Examples
    --------
    >>> positive("FusedMLP", "in_features", 0)
    Traceback (most recent call last):
        ...
    ValueError: FusedMLP: 'in_features' must be at least 1, got 0.
    """
    return count(where, name, value, least=1)


def rank(where: str, rank: Any, ranks: Any) -> tuple[int, int]:
    """Return the number of a rank, and how many there are, as ints; ValueError or TypeError else.

    Examples
    --------
    >>> rank("TSV.of_rank", 2, 2)
    Traceback (most recent call last):
        ...
    ValueError: TSV.of_rank: 'rank' must be less than 2, got 2.
    """
    rank, ranks = count(where, "rank", rank), positive(where, "ranks", ranks)
    if rank >= ranks:
        raise ValueError(f"{where}: 'rank' must be less than {ranks}, got {rank}.")
    return rank, ranks


def rate(where: str, name: str, value: Any) -> float:
    """Return a dropout rate as a float in [0, 1).

    Examples
    --------
    >>> rate("FusedMLP", "out_dropout_rate", 1.5)
    Traceback (most recent call last):
        ...
    ValueError: FusedMLP: 'out_dropout_rate' must lie in [0, 1), got 1.5.
    """
    if not 0 <= number(where, name, value) < 1:
        raise ValueError(f"{where}: '{name}' must lie in [0, 1), got {value}.")
    return float(value)


def vectors(where: str, **arrays: Any) -> None:
    """Raise TypeError or ValueError unless all arrays are float32 of one axis and length.

    Examples
    --------
    >>> vectors("f", w=np.zeros(3, np.float32), g=np.zeros(2, np.float32))
    Traceback (most recent call last):
        ...
    ValueError: f: 'g' must have N = 3 like 'w', got shape (2,).
    """
    for name, array in arrays.items():
        dtype(where, name, array, np.float32)
    axes(where, **{name: (array, "N") for name, array in arrays.items()})

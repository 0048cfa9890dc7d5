"""Initial vectors of ids that a table has not seen."""

from __future__ import annotations

import copy
import itertools
import math
import numbers
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.ops.initial_vectors import Distributions, initial_vectors, normal_probability

__all__ = ["Constant", "InitialVectors", "Normal", "TruncatedNormal", "Uniform", "Xavier"]

_LARGEST = float(np.finfo(np.float32).max)


def _keep_floats(initializer: Initializer) -> None:
    """Check an initializer's values, which become Python's floats: JSON takes no others."""
    name = type(initializer).__name__
    for key, value in asdict(initializer).items():
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name}: '{key}' must be a number, got {value!r}.")
        if not abs(value) <= _LARGEST:  # NaN neither
            raise ValueError(f"{name}: '{key}' must be a finite float32, got {value}.")
        if key == "std" and value < 0:
            raise ValueError(f"{name}: 'std' must not be negative, got {value}.")
        object.__setattr__(initializer, key, float(value))


@dataclass(frozen=True)
class Constant:
    """All columns equal.

    Raises
    ------
    ValueError
        `value` is not a finite float32.

    Examples
    --------
    >>> InitialVectors(2, Constant(0.5), seed=1)(np.zeros(1, np.uint32), np.array([42]))
    array([[0.5, 0.5]], dtype=float32)
    """

    value: float = 0.0

    __post_init__ = _keep_floats

    def _parameters(self, columns: int) -> tuple[float, ...]:
        return Uniform(self.value, self.value)._parameters(columns)


@dataclass(frozen=True)
class Uniform:
    """Uniform in [low, high).

    Raises
    ------
    ValueError
        A bound or the distance between them is not a finite float32, or low > high.

    Examples
    --------
    >>> initial = InitialVectors(4, Uniform(-0.1, 0.1), seed=1)
    >>> bool((abs(initial(np.zeros(1, np.uint32), np.array([42]))) <= 0.1).all())
    True
    """

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _keep_floats(self)
        low, high = float(np.float32(self.low)), float(np.float32(self.high))
        if not (self.low <= self.high and high - low <= _LARGEST):
            raise ValueError(
                "Uniform: 'high' - 'low' must be a finite float32, not negative, "
                f"got {self.high} and {self.low}."
            )

    def _parameters(self, columns: int) -> tuple[float, ...]:
        low, high = np.float32(self.low), np.float32(self.high)
        return 0.0, 0.0, float(low), float(high - low), self.low, self.high


@dataclass(frozen=True)
class Normal:
    """Normal; `std` is the standard deviation.

    Raises
    ------
    ValueError
        A value is not a finite float32, or std < 0.

    Examples
    --------
    >>> initial = InitialVectors(100, Normal(std=0.01), seed=1)
    >>> round(float(initial(np.zeros(100, np.uint32), np.arange(100)).std()), 3)
    0.01
    """

    mean: float = 0.0
    std: float = 0.05

    __post_init__ = _keep_floats

    def _parameters(self, columns: int) -> tuple[float, ...]:
        return 0.0, 1.0, self.mean, self.std, -_LARGEST, _LARGEST


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal, given that it lies in [low, high]; both are values, not multiples of `std`.

    Raises
    ------
    ValueError
        A value is not a finite float32, or the normal distribution has no mass in [low, high]: std
        is 0, low >= high, or both lie more than 37 `std` to one side of the mean.

    Examples
    --------
    >>> initial = InitialVectors(100, TruncatedNormal(std=0.1, low=-0.1, high=0.2), seed=1)
    >>> vectors = initial(np.zeros(100, np.uint32), np.arange(100))
    >>> bool(vectors.min() >= -0.1), bool(vectors.max() <= np.float32(0.2))
    (True, True)
    """

    mean: float = 0.0
    std: float = 0.05
    low: float = -0.1
    high: float = 0.1

    def __post_init__(self) -> None:
        _keep_floats(self)
        if not (self.std > 0 and self._parameters(1)[1] > 0):
            raise ValueError(
                "TruncatedNormal: the normal distribution must have mass between 'low' and 'high', "
                f"got mean {self.mean}, std {self.std}, low {self.low} and high {self.high}."
            )

    def _parameters(self, columns: int) -> tuple[float, ...]:
        # Mirrored where the interval lies above the mean: small probabilities have more digits than
        # those near 1.
        low, high, std = self.low - self.mean, self.high - self.mean, self.std
        if low + high > 0:
            low, high, std = -high, -low, -std
        first, last = (normal_probability(x / self.std) for x in (low, high))
        return first, last - first, self.mean, std, self.low, self.high


@dataclass(frozen=True)
class Xavier:
    """Glorot and Bengio 2010, whose fans are a table's expected ids and the columns D.

    Uniform within sqrt(6 / (num_ids + D)) of 0, or normal of variance 2 / (num_ids + D).

    Raises
    ------
    ValueError, TypeError
        `num_ids` is no integer of at least 1.

    Examples
    --------
    >>> initial = InitialVectors(4, Xavier(num_ids=20), seed=1)
    >>> bool((abs(initial(np.zeros(1, np.uint32), np.array([42]))) <= 0.5).all())
    True
    """

    num_ids: int
    normal: bool = False

    def __post_init__(self) -> None:
        num_ids = errors.positive("Xavier", "num_ids", self.num_ids)
        object.__setattr__(self, "num_ids", num_ids)
        object.__setattr__(self, "normal", bool(self.normal))

    def _parameters(self, columns: int) -> tuple[float, ...]:
        fans = self.num_ids + columns
        if self.normal:
            return Normal(0.0, math.sqrt(2 / fans))._parameters(columns)
        bound = math.sqrt(6 / fans)
        return Uniform(-bound, bound)._parameters(columns)


Initializer = Constant | Uniform | Normal | TruncatedNormal | Xavier
_BY_NAME = {c.__name__: c for c in (Constant, Uniform, Normal, TruncatedNormal, Xavier)}


@dataclass(frozen=True)
class InitialVectors:
    """Vectors of ids that a table has not seen: each column is a function of (seed, table, id).

    Parameters
    ----------
    width : int
        D, columns of a vector.
    initializers : initializer or sequence
        Of all tables, or one of each table; the last one holds for all tables after it. In place of
        a table's initializer may stand pairs (columns, initializer), which split its columns.
    seed : int
        0 <= seed < 2**64.

    Attributes
    ----------
    distributions : Distributions
        The same as arrays, on the device whose keys a call takes.

    Raises
    ------
    ValueError, TypeError
        No positive width, a seed out of range, or columns of a table that don't add up to `width`.

    Examples
    --------
    >>> factors, weight = Normal(std=0.01), Constant(0)
    >>> initial = InitialVectors(17, [[(16, factors), (1, weight)]], seed=1)
    >>> vectors = initial(np.zeros(2, np.uint32), np.array([42, -1]))
    >>> vectors.shape, vectors[:, 16]
    ((2, 17), array([0., 0.], dtype=float32))
    """

    width: int
    initializers: Initializer | Sequence[Initializer | Sequence[tuple[int, Initializer]]]
    seed: int
    distributions: Distributions = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        width = errors.positive("InitialVectors", "width", self.width)
        if not isinstance(self.seed, (int, np.integer)):
            raise TypeError(f"InitialVectors: 'seed' must be an integer, got {self.seed!r}.")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"InitialVectors: 'seed' must lie in [0, 2**64), got {self.seed}.")
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "seed", int(self.seed))
        given = self.initializers
        given = list(given) if isinstance(given, (list, tuple)) else [given]
        if not given:
            raise ValueError("InitialVectors: there must be an initializer, got none.")
        tables = [_ranges(t, own, self.width) for t, own in enumerate(given)]
        while tables[-2:-1] == tables[-1:]:  # the last one speaks for those after it
            tables.pop()
        object.__setattr__(self, "initializers", tuple(tables))
        object.__setattr__(self, "distributions", _distributions(tables))

    def to(self, xp: ModuleType) -> InitialVectors:
        """Return the same for keys of another array module."""
        moved = copy.copy(self)
        held = (arrays.copy_to(xp, array) for array in self.distributions)
        object.__setattr__(moved, "distributions", Distributions(*held))
        return moved

    def __call__(self, tables: Any, ids: Any) -> Any:
        """Return the (N, D) float32 vectors of (N,) uint32 tables and (N,) int64 ids."""
        return initial_vectors(tables, ids, self.width, self.seed, self.distributions)

    def to_dict(self) -> dict[str, Any]:
        """Return the initializers as JSON takes them.

        Examples
        --------
        >>> InitialVectors(4, Constant(0.5), seed=1).to_dict()
        {'tables': [[[4, {'name': 'Constant', 'value': 0.5}]]]}
        """
        return {
            "tables": [
                [[columns, {"name": type(own).__name__} | asdict(own)] for columns, own in table]
                for table in self.initializers
            ]
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], width: int, seed: int) -> InitialVectors:
        """Return what `to_dict` was called on.

        Raises
        ------
        ValueError, TypeError
            There is no such initializer, or it takes no such values.

        Examples
        --------
        >>> values = InitialVectors(4, Constant(0.5), seed=1).to_dict()
        >>> InitialVectors.from_dict(values, width=4, seed=1).initializers
        (((4, Constant(value=0.5)),),)
        """
        return cls(width, [[(n, _named(**own)) for n, own in t] for t in values["tables"]], seed)


def _named(name: str, **values: Any) -> Initializer:
    if name not in _BY_NAME:
        raise ValueError(
            f"InitialVectors: an initializer must be one of {', '.join(_BY_NAME)}, got {name!r}."
        )
    return _BY_NAME[name](**values)


def _ranges(table: int, given: Any, width: int) -> tuple[tuple[int, Initializer], ...]:
    """Pairs (columns, initializer), checked."""
    if isinstance(given, Initializer):
        return ((width, given),)
    if not isinstance(given, Sequence) or not all(
        isinstance(pair, Sequence) and len(pair) == 2 for pair in given
    ):
        raise TypeError(
            f"InitialVectors: table {table} must have an initializer or pairs "
            f"(columns, initializer), got {given!r}."
        )
    pairs = tuple((errors.positive("InitialVectors", "columns", n), own) for n, own in given)
    for _, initializer in pairs:
        if not isinstance(initializer, Initializer):
            raise TypeError(
                f"InitialVectors: table {table} must have initializers, got {initializer!r}."
            )
    if (total := sum(columns for columns, _ in pairs)) != width:
        raise ValueError(
            f"InitialVectors: columns of table {table} must add up to D = {width}, got {total}."
        )
    return pairs


def _distributions(tables: Sequence[tuple[tuple[int, Initializer], ...]]) -> Distributions:
    """Tables that are alike share their ranges."""
    first, stops, parameters = {}, [], []
    for ranges in dict.fromkeys(tables):
        first[ranges] = len(stops)
        stops += itertools.accumulate(columns for columns, _ in ranges)
        parameters += [initializer._parameters(columns) for columns, initializer in ranges]
    return Distributions(
        np.array([first[ranges] for ranges in tables], np.int32),
        np.array(stops, np.int32),
        np.array(parameters, np.float64),
    )

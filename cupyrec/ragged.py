"""Bags of ids: any number of them a sample and field."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, errors

__all__ = ["Bags"]


@dataclasses.dataclass(frozen=True, eq=False)
class Bags:
    """Ids of B samples and F fields, any number in each bag: what `ids` is where one isn't enough.

    Attributes
    ----------
    ids : (N,) array of int64
        Those of all bags side by side: of the first sample's fields in order, then the second's.
    offsets : (B * F + 1,) array of int64
        Bag b * F + f begins at ids[offsets[b * F + f]] and ends where the next one begins.
    num_fields : int
        F.

    Raises
    ------
    ValueError, TypeError
        `num_fields` is not a positive integer, or doesn't divide the number of bags.

    Examples
    --------
    >>> bags = Bags(np.array([7, 1, 2, 8]), np.array([0, 1, 3, 4, 4]), num_fields=2)
    >>> len(bags), bags.shape  # the second sample has no id in its last field
    (2, (2, 2))
    """

    ids: Any
    offsets: Any
    num_fields: int

    def __post_init__(self) -> None:
        errors.positive("Bags", "num_fields", self.num_fields)
        for name in ("ids", "offsets"):
            errors.dtype("Bags", name, getattr(self, name), np.int64)
        errors.axes("Bags", ids=(self.ids, "N"), offsets=(self.offsets, "M"))
        if (len(self.offsets) - 1) % self.num_fields:
            raise ValueError(
                f"Bags: 'offsets' must have B * {self.num_fields} + 1 numbers, "
                f"got shape {self.offsets.shape}."
            )

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.num_fields

    @property
    def shape(self) -> tuple[int, int]:
        """(B, F)."""
        return len(self), self.num_fields

    def to(self, xp: ModuleType) -> Bags:
        """Return them on the device of an array module.

        Examples
        --------
        >>> Bags(np.array([7]), np.array([0, 1]), 1).to(np).ids
        array([7])
        """
        ids, offsets = (arrays.copy_to(xp, array) for array in (self.ids, self.offsets))
        return Bags(ids, offsets, self.num_fields)

    def part(self, start: int, stop: int) -> Bags:
        """Return the bags of samples from `start` on and before `stop`.

        Examples
        --------
        >>> bags = Bags(np.array([7, 1, 2, 8]), np.array([0, 1, 3, 4, 4]), num_fields=2)
        >>> part = bags.part(1, 2)
        >>> part.ids, part.offsets
        (array([8]), array([0, 1, 1]))
        """
        offsets = self.offsets[start * self.num_fields : stop * self.num_fields + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return Bags(self.ids[first:last], offsets - first, self.num_fields)

    @classmethod
    def joined(cls, parts: Sequence[Bags]) -> Bags:
        """Return the bags of all samples of some, one after the other.

        Examples
        --------
        >>> bags = Bags(np.array([7, 1]), np.array([0, 1, 2]), num_fields=1)
        >>> joined = Bags.joined([bags, bags.part(1, 2)])
        >>> joined.ids, joined.offsets
        (array([7, 1, 1]), array([0, 1, 2, 3]))
        """
        xp = arrays.namespace("Bags", *(part.ids for part in parts))
        ids, lengths = (
            xp.concatenate(some)
            for some in ([part.ids for part in parts], [xp.diff(part.offsets) for part in parts])
        )
        offsets = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(lengths)])
        return cls(ids, offsets, parts[0].num_fields)

    def first_of(self, field: int, missing: int) -> Any:
        """Return the first id of each bag of a field, (B,); `missing` for an empty one.

        Examples
        --------
        >>> bags = Bags(np.array([7, 1, 2, 8]), np.array([0, 1, 3, 4, 4]), num_fields=2)
        >>> bags.first_of(1, missing=-1)
        array([ 1, -1])
        """
        xp = arrays.namespace("Bags", self.ids)
        starts, ends = self.offsets[:-1], self.offsets[1:]
        starts, ends = starts[field :: self.num_fields], ends[field :: self.num_fields]
        padded = xp.concatenate([self.ids, xp.full(1, missing, self.ids.dtype)])
        return padded[xp.where(ends > starts, starts, len(self.ids))]

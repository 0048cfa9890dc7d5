"""What a row of a store is made of, and how it is written and taken apart."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, errors
from cupyrec.embedding.store import LIFE, Rows, StatePart
from cupyrec.ops.embedding_rows import (
    FLOAT32,
    Rounding,
    RowMemory,
    gather_rows,
    vector_words,
    write_rows,
)  # fmt: skip
from cupyrec.ops.row_memory import is_half

__all__ = ["RowLayout", "lines_as_memory"]


def lines_as_memory(lines: Any, value: int = FLOAT32) -> RowMemory:
    """Return the lines of a contiguous array of 4-byte words, of any device, as rows of a memory.

    Parameters
    ----------
    lines : (N, stride) array
    value : int
        Type of the vectors in them.

    Examples
    --------
    >>> lines_as_memory(np.zeros((5, 8), np.uint32)).stride
    8
    """
    xp = arrays.namespace("lines_as_memory", lines)
    address = np.array([arrays.address(lines)], np.uint64)
    k = max(0, len(lines) - 1).bit_length()
    return RowMemory(arrays.copy_to(xp, address), k, lines.shape[1], value)


class RowLayout(NamedTuple):
    """The words of a row: its vector, the parts of the state, padding.

    Attributes
    ----------
    width : int
        D, numbers of a vector.
    value : int
        Type of the numbers: FLOAT32, FLOAT16, BFLOAT16 or INT8.
    state : tuple of StatePart

    Examples
    --------
    >>> layout = RowLayout(5, FLOAT32, (StatePart("sum", 5, 0.0),))
    >>> layout.words, layout.stride
    (10, 12)
    """

    width: int
    value: int
    state: tuple[StatePart, ...]

    @property
    def words(self) -> int:
        """Words of vector and state."""
        return vector_words(self.width, self.value) + sum(part.columns for part in self.state)

    @property
    def stride(self) -> int:
        """Words a row: a multiple of 4."""
        return -(-self.words // 4) * 4

    def kept(self, former: RowLayout) -> tuple[slice, slice]:
        """Return which words of rows of a former layout stay, here and there: an id's life.

        Examples
        --------
        >>> RowLayout(4, FLOAT32, (LIFE,)).kept(RowLayout(4, FLOAT32, (LIFE,)))
        (slice(4, 6, None), slice(4, 6, None))
        """
        count = LIFE.columns if LIFE in self.state and LIFE in former.state else 0
        return slice(self.words - count, self.words), slice(former.words - count, former.words)

    def write(
        self,
        memory: RowMemory,
        first: int,
        tables: Any,
        ids: Any,
        vectors: Any,
        states: dict[str, Any],
    ) -> None:
        """Write rows number `first` on; state parts that aren't given get their initial values.

        Vectors that 16 bits hold, as they come from a group or a checkpoint, stay as they are;
        others are rounded as if in step 0. So do those that int8 rows held; others are rounded to
        the nearest.

        Examples
        --------
        >>> lines = np.empty((1, 4), np.float32)
        >>> layout, key = RowLayout(2, FLOAT32, ()), (np.zeros(1, np.uint32), np.array([7]))
        >>> layout.write(lines_as_memory(lines), 0, *key, np.ones((1, 2), np.float32), {})
        >>> lines
        array([[1., 1., 0., 0.]], dtype=float32)
        """
        xp = arrays.namespace("RowLayout.write", memory.chunks)
        words = self.initial_state(xp, len(vectors) if states else 1, states)
        rounding = Rounding(tables, ids, seed=0, step=0) if is_half(self.value) else None
        write_rows(memory, first, vectors, words, rounding)

    def initial_state(self, xp: ModuleType, lines: int, given: dict[str, Any]) -> Any:
        """Return states (lines, words) as float32: what is given, else initial values.

        Examples
        --------
        >>> layout = RowLayout(5, FLOAT32, (StatePart("sum", 2, 0.5),))
        >>> layout.initial_state(np, 1, {})
        array([[0.5, 0.5]], dtype=float32)
        """
        words = [xp.empty((lines, 0), np.float32)]
        for part in self.state:
            values = given.get(part.name)
            if values is None:
                values = xp.full((lines, part.columns), part.initial, part.dtype)
            words.append(xp.ascontiguousarray(values).view(np.float32))
        return xp.concatenate(words, axis=1)

    def received(self, rows: Rows, xp: ModuleType) -> Rows:
        """Return rows on the device of an array module, if they are such as this layout has.

        Raises
        ------
        ValueError, TypeError
            Shapes or dtypes that don't agree.

        Examples
        --------
        >>> key = np.zeros(1, np.uint32), np.array([7])
        >>> RowLayout(2, FLOAT32, ()).received(Rows(*key, np.zeros((1, 3)), {}), np)
        Traceback (most recent call last):
            ...
        ValueError: import_rows: 'vectors' must have axes (N, 2), got shape (1, 3).
        """
        where = "import_rows"
        wanted = f"N {self.width}"
        errors.axes(
            where, tables=(rows.tables, "N"), ids=(rows.ids, "N"), vectors=(rows.vectors, wanted)
        )
        tables, ids, vectors = (arrays.copy_to(xp, a) for a in rows[:3])
        states = {name: arrays.copy_to(xp, a) for name, a in rows.states.items()}
        for part in self.state:
            if (given := states.get(part.name)) is not None:
                axes = {"ids": (ids, "N"), part.name: (given, f"N {part.columns}")}
                errors.axes(where, **axes)
                errors.dtype(where, part.name, given, part.dtype)
        return Rows(tables, ids, vectors, states)

    def taken_apart(self, lines: Any) -> tuple[Any, dict[str, Any]]:
        """Return vectors (N, D) and states of rows (N, stride or more) of float32, partly as views.

        Examples
        --------
        >>> layout = RowLayout(1, FLOAT32, (StatePart("sum", 2, 0.5),))
        >>> layout.taken_apart(np.arange(4, dtype=np.float32)[None])
        (array([[0.]], dtype=float32), {'sum': array([[1., 2.]], dtype=float32)})
        """
        xp = arrays.namespace("RowLayout", lines)
        at = vector_words(self.width, self.value)
        vectors = lines[:, :at]
        if self.value != FLOAT32:
            vectors, every = xp.empty((len(lines), self.width), np.float32), xp.arange(len(lines))
            unseen = xp.empty((0, self.width), np.float32)
            gather_rows(lines_as_memory(lines, self.value), every, every, unseen, vectors)
        states = {}
        for part in self.state:
            states[part.name] = lines[:, at : at + part.columns].view(part.dtype)
            at += part.columns
        return vectors, states

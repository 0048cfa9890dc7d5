"""Where embedding rows lie in memory, and how loops reach them.

A row is a whole number of 4-byte words: its vector of D numbers, of 32 or 16 bits, or a scale in
float32 and D numbers of 8 bits, padded to words; then the optimizer's state, a word (float32 or
int32) each; then padding to `stride` words, a multiple of 4. Rows lie in chunks of 2^k rows that
never move: row r is row r % 2^k of chunk r // 2^k.

Vectors of 16 bits are widened to float32 on reading, and rounded at random on writing: see
`cupyrec.ops.stochastic_rounding`. Those of 8 bits are `cupyrec.ops.int8_codec`'s: written once,
rounded to the nearest, then only read. Kernels reach rows by kernels/row_memory.cuh.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec import cpu, errors
from cupyrec.ops.int8_codec import decoded, step_of
from cupyrec.ops.stochastic_rounding import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    check_counters,
    round_vector,
    widen_vector,
)
from cupyrec.ops.vector_sums import vector_at

__all__ = [
    "INT8", "Rounding", "RowMemory", "check_learns", "check_room", "check_rounding", "is_half",
    "read_vector", "rounding_arguments", "rounding_block", "row_address", "row_addresses", "row_at",
    "row_of", "scratch", "state_at", "vector_words", "write_vector",
]  # fmt: skip

INT8 = 3  # beside FLOAT32, FLOAT16, BFLOAT16, as in kernels/row_memory.cuh

_AHEAD = 32  # rows


class RowMemory(NamedTuple):
    """What a loop or kernel needs to reach rows.

    Attributes
    ----------
    chunks : (number of chunks,) array of uint64
        Addresses of the chunks, on their device; there they are multiples of 16.
    k : int
        A chunk holds 2^k rows.
    stride : int
        Words a row, state and padding included; a multiple of 4.
    value : int
        Format of the vectors: FLOAT32, FLOAT16, BFLOAT16 or INT8.

    Examples
    --------
    >>> chunk = np.zeros((4, 8), np.float32)
    >>> RowMemory(np.array([chunk.ctypes.data], np.uint64), k=2, stride=8).stride
    8
    """

    chunks: Any
    k: int
    stride: int
    value: int = FLOAT32


class Rounding(NamedTuple):
    """What vectors of 16 bits are rounded by; others need none.

    Attributes
    ----------
    tables : (U,) array of uint32
    ids : (U,) array of int64
        The rows' keys.
    seed : int
        0 <= seed < 2**64.
    step : int
        0 <= step < 2**32; 0 for initial vectors.

    Examples
    --------
    >>> Rounding(np.zeros(1, np.uint32), np.array([7]), seed=1, step=0).step
    0
    """

    tables: Any
    ids: Any
    seed: int
    step: int


def vector_words(width: int, value: int = FLOAT32) -> int:
    """Return how many words of a row its vector takes; the state begins behind them.

    Examples
    --------
    >>> vector_words(5), vector_words(5, value=BFLOAT16), vector_words(5, value=INT8)
    (5, 3, 3)
    """
    if value == INT8:
        return 1 + (width + 3) // 4
    return width if value == FLOAT32 else (width + 1) // 2


_words = cpu.exact_inline(vector_words)


def is_half(value: int) -> bool:
    """Return whether vectors of this format are of 16 bits, and rounded at random.

    Examples
    --------
    >>> is_half(FLOAT16), is_half(INT8)
    (True, False)
    """
    return value in (FLOAT16, BFLOAT16)


# What CPU loops reach a row by: read_vector, change it and state_at, write_vector. What None means
# is known when a loop is compiled, so that nothing of 16 bits burdens rows of float32.


def scratch(memory: RowMemory, width: int) -> np.ndarray | None:
    """Return where a loop widens vectors to; None where they are float32.

    Examples
    --------
    >>> scratch(RowMemory(np.empty(0, np.uint64), k=0, stride=4), width=3) is None
    True
    """
    return None if memory.value == FLOAT32 else np.empty(width, np.float32)


@cpu.exact_loop
def row_address(memory, row) -> int:
    """Address of row number `row`, as uint64."""
    at = (row & ((1 << memory.k) - 1)) * memory.stride * 4
    return memory.chunks[row >> memory.k] + np.uint64(at)


@cpu.exact_loop
def row_at(memory, row) -> np.ndarray:
    """Row number `row`: its words, an array of `stride` float32."""
    return vector_at(row_address(memory, row), memory.stride)


@cpu.exact_loop
def row_addresses(memory, rows) -> np.ndarray:
    """Address of each row, as uint64: what a loop goes over by `row_of`.

    Noted beforehand: loops that work them out on their way take up to twice as long, since then
    asking for a row waits for what is left to do on rows before it.
    """
    addresses = np.empty(rows.size, np.uint64)
    for u in range(rows.size):
        addresses[u] = row_address(memory, rows[u])
    return addresses


@cpu.exact_loop
def row_of(memory, addresses, u) -> np.ndarray:
    """The row at addresses[u], as `row_at` gives it, in a loop over all of `addresses`.

    Meanwhile memory is asked for the row of 32 turns later, into L2: a batch's rows lie here and
    there, and without it a loop like Adam's takes twice as long. For four lines of it, spread
    evenly, the processor goes on by itself: a loop over all would make this function too large to
    be inlined.
    """
    if u + _AHEAD < addresses.size:
        address, third = addresses[u + _AHEAD], np.uint64(4 * memory.stride // 3)
        cpu.prefetch_far(address)
        cpu.prefetch_far(address + third)
        cpu.prefetch_far(address + third + third)
        cpu.prefetch_far(address + np.uint64(4 * memory.stride - 4))
    return vector_at(addresses[u], memory.stride)


@cpu.exact_loop
def read_vector(memory, words, width, scratch) -> np.ndarray:
    """The vector of a row: if float32 the row's own, else widened into `scratch`.

    Parameters
    ----------
    memory : RowMemory
    words : (stride,) array of float32
        From `row_at`.
    width : int
    scratch : (width,) array of float32, or None
        From `scratch`.

    Examples
    --------
    See `cupyrec.ops.sgd`.
    """
    if scratch is None:
        return words[:width]
    if memory.value == INT8:
        codes, step = words.view(np.int8), step_of(words[0])
        for d in range(width):
            scratch[d] = decoded(codes[4 + d], step)
    else:
        widen_vector(words.view(np.uint16), memory.value, scratch)
    return scratch


@cpu.exact_loop
def write_vector(memory, words, vector, rounding, u) -> None:
    """Round a vector that `read_vector` gave, and a loop changed, into its row.

    Parameters
    ----------
    memory : RowMemory
    words : (stride,) array of float32
        From `row_at`.
    vector : (D,) array of float32
    rounding : Rounding or None
        None where rows are float32: then the row has changed already.
    u : int
        Number of the row's key in `rounding`.

    Examples
    --------
    See `cupyrec.ops.sgd`.
    """
    if rounding is not None:
        round_vector(
            vector, rounding.tables[u], rounding.ids[u], rounding.seed, rounding.step,
            memory.value, words.view(np.uint16),
        )  # fmt: skip


@cpu.exact_loop
def state_at(memory, words, width) -> np.ndarray:
    """The words of a row behind its vector of `width`, as float32; their `view` gives int32."""
    return words[_words(width, memory.value) :]


def check_room(where: str, memory: RowMemory, name: str, array: Any, state: int) -> None:
    """Raise unless rows hold vectors as wide as those of `array`, and `state` words.

    Examples
    --------
    >>> memory = RowMemory(np.empty(0, np.uint64), k=0, stride=4, value=1)
    >>> check_room("f", memory, "g", np.zeros((1, 3)), state=3)
    Traceback (most recent call last):
        ...
    ValueError: f: rows must have 5 words for 'g' (1, 3) and the state, got a stride of 4.
    """
    errors.dtype(where, "memory.chunks", memory.chunks, np.uint64)
    errors.columns(where, name, array)
    words = vector_words(array.shape[1], memory.value) + state
    if words > memory.stride:  # the loops would write into the next row
        raise ValueError(
            f"{where}: rows must have {words} words for '{name}' {array.shape} and the state, "
            f"got a stride of {memory.stride}."
        )


def check_learns(where: str, value: int) -> None:
    """Raise unless vectors of this format may learn.

    Examples
    --------
    >>> check_learns("f", INT8)
    Traceback (most recent call last):
        ...
    ValueError: f: rows must be of float32, float16 or bfloat16 to learn, got int8.
    """
    if value == INT8:
        raise ValueError(
            f"{where}: rows must be of float32, float16 or bfloat16 to learn, got int8."
        )


def check_rounding(where: str, memory: RowMemory, rounding: Rounding | None, count: int) -> tuple:
    """Return the arrays of `rounding`, which must be there just where rows are of 16 bits.

    Examples
    --------
    >>> memory = RowMemory(np.empty(0, np.uint64), k=0, stride=4, value=1)
    >>> check_rounding("f", memory, None, 3)
    Traceback (most recent call last):
        ...
    ValueError: f: 'rounding' must be given for rows of 16 bits, got None.
    """
    if rounding is None:
        if is_half(memory.value):
            raise ValueError(f"{where}: 'rounding' must be given for rows of 16 bits, got None.")
        return ()
    tables, ids, seed, step = rounding
    if not is_half(memory.value):
        name = "int8" if memory.value == INT8 else "float32"
        raise ValueError(
            f"{where}: 'rounding' must be None for rows of {name}, got one of step {step}."
        )
    errors.dtype(where, "rounding.tables", tables, np.uint32)
    errors.dtype(where, "rounding.ids", ids, np.int64)
    for name, keys in [("tables", tables), ("ids", ids)]:
        if keys.shape != (count,):
            raise ValueError(
                f"{where}: 'rounding.{name}' must have shape {(count,)}, a key a row, "
                f"got {keys.shape}."
            )
    check_counters(where, seed, step)
    return tables, ids


def rounding_arguments(xp: ModuleType, rounding: Rounding | None) -> tuple:
    """Return what a kernel gets: tables, ids, seed, step.

    Examples
    --------
    >>> rounding_arguments(np, None)
    (None, None, 0, 0)
    """
    if rounding is None:
        return None, None, 0, 0
    tables, ids, seed, step = rounding
    return xp.ascontiguousarray(tables), xp.ascontiguousarray(ids), seed, step


def rounding_block(rounding: Rounding | None, i: int, j: int) -> Rounding | None:
    """Return what a CPU loop gets for keys number i to j - 1.

    Examples
    --------
    >>> rounding = Rounding(np.zeros(3, np.uint32), np.arange(3), seed=1, step=2)
    >>> rounding_block(rounding, 1, 3).ids
    array([1, 2])
    """
    if rounding is None:
        return None
    tables, ids, seed, step = rounding
    return Rounding(tables[i:j], ids[i:j], np.uint64(seed), np.uint64(step))

"""Gather, write and update rows of embedding tables. U rows, N outputs, D width, S words of state.

    out[i] = vector of row rows[inverse[i]]; a row of -1 - j is vector j of `unseen`,
             an inverse of -1 stands for zeros

`cupyrec.ops.row_memory` says where rows lie. An op that updates them stands on `check_rows`, and on
`row_kernel` with `update_rows` on devices, `update_rows_cpu` with a loop: see `cupyrec.ops.sgd`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numba import carray

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.halves import in_float32, value_macros
from cupyrec.ops.int8_codec import int8_encode
from cupyrec.ops.row_memory import (
    INT8,
    Rounding,
    RowMemory,
    check_learns,
    check_room,
    check_rounding,
    read_vector,
    rounding_arguments,
    rounding_block,
    row_address,
    row_addresses,
    row_at,
    row_of,
    scratch,
    state_at,
    vector_words,
    write_vector,
)  # fmt: skip
from cupyrec.ops.stochastic_rounding import BFLOAT16, FLOAT16, FLOAT32
from cupyrec.ops.vector_sums import AHEAD, ask_far, vector_at, vector_of

__all__ = [
    "BFLOAT16", "FLOAT16", "FLOAT32", "INT8", "Rounding", "RowMemory", "check_rows", "gather_rows",
    "read_vector", "row_at", "row_kernel", "row_of", "scratch", "state_at", "update_rows",
    "update_rows_cpu", "value_addresses", "value_vector", "vector_words", "write_rows",
    "write_vector",
]  # fmt: skip

_ROWS = 4096  # rows a block of a CPU loop
_WARPS = 8  # a block of a kernel
_0, _1 = np.uint64(0), np.uint64(1)


@cpu.exact_loop
def value_addresses(memory, rows, inverse, unseen, scratch) -> np.ndarray:
    """Address of the vector of each value, 0 for padding, then AHEAD zeros.

    That of a vector of `unseen`, which is contiguous, is made odd where rows are not of float32.
    """
    width = unseen.shape[1]
    start = np.uint64(unseen.ctypes.data) + (_0 if scratch is None else _1)
    addresses = np.zeros(inverse.size + AHEAD, np.uint64)
    for i in range(inverse.size):
        if inverse[i] >= 0:
            row = rows[inverse[i]]
            if row >= 0:
                addresses[i] = row_address(memory, row)
            else:
                addresses[i] = start + np.uint64((-1 - row) * width * 4)
    return addresses


@cpu.exact_loop
def value_vector(memory, address, width, scratch) -> np.ndarray:
    """The vector at an address of `value_addresses`, in `scratch` if it had to be widened."""
    if scratch is None:
        return vector_at(address, width)
    if address & _1:
        return vector_at(address - _1, width)
    words = carray(cpu.pointer(address), (memory.stride,), np.float32)
    return read_vector(memory, words, width, scratch)


@cpu.exact_loop
def _gather_cpu(memory, rows, inverse, unseen, scratch, out):
    width = out.shape[1]
    addresses = value_addresses(memory, rows, inverse, unseen, scratch)
    for i in range(inverse.size):
        ask_far(addresses[i + AHEAD], width)
        to = vector_of(out, i)
        if addresses[i] == 0:
            for d in range(width):
                to[d] = np.float32(0)
        else:
            vector = value_vector(memory, addresses[i], width, scratch)
            for d in range(width):
                to[d] = vector[d]


@cpu.exact_loop
def _write_cpu(memory, first_row, vectors, states, rounding):
    width, each = vectors.shape[1], len(states) > 1
    for i in range(len(vectors)):
        words = row_at(memory, first_row + i)
        state = state_at(memory, words, width)
        if rounding is None:
            for d in range(width):
                words[d] = vectors[i, d]
        else:
            words[words.size - state.size - 1] = np.float32(0)  # of an odd width half is padding
            write_vector(memory, words, vectors[i], rounding, i)
        line = i if each else 0
        for d in range(states.shape[1]):
            state[d] = states[line, d]
        for d in range(states.shape[1], state.size):
            state[d] = np.float32(0)


def _tile(pieces: int) -> int:
    """Vectors of `pieces` loads that a warp gathers: so many that each lane has 16 loads to do."""
    return min(32, max(4, 512 // pieces // 4 * 4))


_ROUNDING = "const uint32_t* tables, const int64_t* ids, uint64_t seed, uint32_t step"
_gather = Kernel(
    "embedding_rows.cu", "gather_rows",
    "const uint64_t* chunks, int k, int stride, const int64_t* rows, const int64_t* inverse,"
    " const float* unseen, value_t* out, int64_t n",
    lambda N, tile: Geometry(blocks(N, tile * _WARPS), 32 * _WARPS),
)  # fmt: skip
_write = Kernel(
    "embedding_rows.cu", "write_rows",
    "const uint64_t* chunks, int k, int64_t first_row, const float* vectors, const float* states,"
    f" int64_t states_stride, {_ROUNDING}, int64_t n",
    lambda N, stride: Geometry(blocks(N * (stride // 4), 4 * 256), 256), optional="tables ids",
)  # fmt: skip


# Updates


def check_rows(
    where: str,
    memory: RowMemory,
    rows: Any,
    g: Any,
    rounding: Rounding | None,
    parts: int = 0,
    words: int = 0,
) -> ModuleType:
    """Return the array module of an update's arguments, if they are what updates take.

    Whether the rows are there is not looked at: they come from the store.

    Parameters
    ----------
    where : str
    memory : RowMemory
    rows : (U,) array of int64
    g : (U, D) array of float32
    rounding : Rounding or None
    parts, words : int
        The state has `parts` * D + `words` words.

    Raises
    ------
    ValueError, TypeError
        They are not, or the rows are of int8, which don't learn.

    Examples
    --------
    >>> memory = RowMemory(np.empty(0, np.uint64), k=0, stride=4)
    >>> check_rows("f", memory, np.array([0]), np.zeros((1, 3), np.float32), None, parts=1)
    Traceback (most recent call last):
        ...
    ValueError: f: rows must have 6 words for 'g' (1, 3) and the state, got a stride of 4.
    """
    check_learns(where, memory.value)
    errors.dtype(where, "rows", rows, np.int64)
    errors.dtype(where, "g", g, np.float32)
    errors.axes(where, rows=(rows, "U"), g=(g, "U D"))
    check_room(where, memory, "g", g, parts * g.shape[1] + words)
    keys = check_rounding(where, memory, rounding, len(rows))
    return arrays.namespace(where, memory.chunks, rows, g, *keys)


def row_kernel(
    file: str,
    name: str,
    constants: str,
    lanes: Callable[[int, int], int] = lambda D, vector: D // vector,
    optional: str = "",
) -> Kernel:
    """Declare the kernel of an update of rows, which `update_rows` launches.

    Parameters
    ----------
    file, name : str
    constants : str
        Parameters between the gradient and the pointer `scale`.
    lanes : callable
        D and the columns that one instruction moves, to the threads of a row.
    optional : str
        Names of pointers among the constants that may be null.

    Examples
    --------
    >>> kernel = row_kernel("sgd.cu", "sgd_rows", "float rate")
    >>> kernel.geometry(U=100, D=128, vector=4)
    Geometry(grid=13, block=256, shared=0)
    """
    return Kernel(
        file, name,
        "const uint64_t* chunks, int k, int stride, const int64_t* rows, const float* g,"
        f" {constants}, const float* scale, {_ROUNDING}, int64_t row_count",
        lambda U, D, vector: Geometry(blocks(U * lanes(D, vector), 256), 256),
        optional=f"scale tables ids {optional}",
    )  # fmt: skip


def update_rows(
    xp: ModuleType,
    kernel: Kernel,
    memory: RowMemory,
    rows: Any,
    g: Any,
    rounding: Rounding | None,
    *constants: Any,
) -> None:
    """Launch a `row_kernel` on what `check_rows` has passed; `scale` is the last constant.

    Examples
    --------
    See `cupyrec.ops.sgd.sgd_rows`.
    """
    rows, g = xp.ascontiguousarray(rows), xp.ascontiguousarray(g)
    count, width = g.shape
    aligned = math.gcd(width, vector_words(width, memory.value))  # vector and state
    vector = vector_width(aligned, g)
    kernel(
        *memory[:3], rows, g, *constants, *rounding_arguments(xp, rounding), count,
        macros={"DIM": width, "VECTOR": vector, "VALUE": memory.value},
        U=count, D=width, vector=vector,
    )  # fmt: skip


def update_rows_cpu(
    loop: Any, memory: RowMemory, rows: Any, g: Any, rounding: Rounding | None, *constants: Any
) -> None:
    """Spread ``loop(memory, addresses, g, scratch, rounding, *constants)`` over blocks of the rows.

    Examples
    --------
    See `cupyrec.ops.sgd.sgd_rows`.
    """
    g = np.ascontiguousarray(g)

    def block(i: int, j: int) -> None:
        addresses, by = row_addresses(memory, rows[i:j]), rounding_block(rounding, i, j)
        loop(memory, addresses, g[i:j], scratch(memory, g.shape[1]), by, *constants)

    cpu.parallel(block, len(rows), _ROWS)


# Gather, write


def _encoded(xp: ModuleType, vectors: Any) -> Any:
    """The words of vectors in rows of int8: the scale, then the codes."""
    codes, scales = int8_encode(vectors)
    words = xp.zeros((len(vectors), vector_words(vectors.shape[1], INT8)), np.float32)
    words[:, 0] = scales
    words.view(np.int8)[:, 4 : 4 + vectors.shape[1]] = codes
    return words


def gather_rows(memory: RowMemory, rows: Any, inverse: Any, unseen: Any, out: Any) -> None:
    """Write the vectors of rows to `out`, by the formula above.

    Parameters
    ----------
    memory : RowMemory
        Its chunks lie on the device of the other arrays.
    rows : (U,) array of int64
    inverse : (N,) array of int64
        -1: a zero vector.
    unseen : (M, D) array of float32
    out : (N, D) array of float32, float16 or bfloat16
        Of 16 bits it gets the numbers that are nearest.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree, D = 0. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.arange(8, dtype=np.float32).reshape(2, 4)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> out = np.empty((3, 2), np.float32)
    >>> unseen = np.array([[8, 9]], np.float32)
    >>> gather_rows(memory, np.array([1, -1]), np.array([0, 1, 0]), unseen, out)
    >>> out
    array([[4., 5.],
           [8., 9.],
           [4., 5.]], dtype=float32)
    """
    errors.dtype("gather_rows", "rows", rows, np.int64)
    errors.dtype("gather_rows", "inverse", inverse, np.int64)
    errors.dtype("gather_rows", "unseen", unseen, np.float32)
    errors.dtype("gather_rows", "out", out, np.float32, *arrays.HALVES)
    errors.axes(
        "gather_rows", rows=(rows, "U"), inverse=(inverse, "N"), out=(out, "N D"),
        unseen=(unseen, "M D"),
    )  # fmt: skip
    check_room("gather_rows", memory, "out", out, 0)
    xp = arrays.namespace("gather_rows", memory.chunks, rows, inverse, unseen, out)
    if xp is not np:
        count, width = out.shape
        rows, inverse, unseen = map(xp.ascontiguousarray, (rows, inverse, unseen))
        vector = vector_width(width, unseen, out)
        tile = _tile(width // vector)
        _gather(
            *memory[:3], rows, inverse, unseen, arrays.bits(out), count,
            macros={"DIM": width, "VECTOR": vector, "VALUE": memory.value, "TILE": tile}
            | value_macros(out.dtype),
            N=count, tile=tile,
        )  # fmt: skip
        return
    loop, unseen = functools.partial(_gather_cpu, memory, rows), np.ascontiguousarray(unseen)

    def block(i: int, j: int) -> None:
        options = [scratch(memory, out.shape[1])]
        in_float32(loop, [inverse[i:j], unseen], options, [out[i:j]])

    cpu.parallel(block, len(inverse), _ROWS)


def write_rows(
    memory: RowMemory, first_row: int, vectors: Any, states: Any, rounding: Rounding | None = None
) -> None:
    """Write vectors and states to consecutive rows from `first_row` on, and zeros behind them.

    Parameters
    ----------
    memory : RowMemory
    first_row : int
    vectors : (N, D) array of float32
    states : (N, S) or (1, S) array of float32
        Words: int32 ones as float32 of the same bits. One line is every row's.
    rounding : Rounding, optional
        Needed just where rows are of 16 bits.

    Raises
    ------
    ValueError, TypeError
        Other shapes, dtypes or devices, D = 0. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.ones((2, 4), np.float32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> write_rows(memory, 1, np.array([[5, 6]], np.float32), np.array([[7]], np.float32))
    >>> chunk[1]
    array([5., 6., 7., 0.], dtype=float32)
    """
    errors.dtype("write_rows", "vectors", vectors, np.float32)
    errors.dtype("write_rows", "states", states, np.float32)
    errors.axes("write_rows", vectors=(vectors, "N D"))
    errors.axes("write_rows", states=(states, "N S"))
    (count, width), (lines, state) = vectors.shape, states.shape
    if lines not in (1, count):
        raise ValueError(f"write_rows: 'states' must have N = 1 or {count}, got {lines}.")
    check_room("write_rows", memory, "vectors", vectors, state)
    keys = check_rounding("write_rows", memory, rounding, count)
    xp = arrays.namespace("write_rows", memory.chunks, vectors, states, *keys)
    if memory.value == INT8:  # words like those of float32, once they are encoded
        vectors, memory = _encoded(xp, vectors), memory._replace(value=FLOAT32)
        width = vectors.shape[1]
    vectors, states = xp.ascontiguousarray(vectors), xp.ascontiguousarray(states)
    if xp is not np:
        aligned = math.gcd(state, vector_words(width, memory.value))
        macros = {
            "DIM": width, "VECTOR": vector_width(width, vectors), "VALUE": memory.value,
            "STATE": state, "STATE_VECTOR": vector_width(aligned, states), "STRIDE": memory.stride,
        }  # fmt: skip
        _write(
            *memory[:2], first_row, vectors, states, state if lines > 1 else 0,
            *rounding_arguments(xp, rounding), count, macros=macros, N=count, stride=memory.stride,
        )  # fmt: skip
        return

    def block(i: int, j: int) -> None:
        here = states[i:j] if lines > 1 else states
        _write_cpu(memory, first_row + i, vectors[i:j], here, rounding_block(rounding, i, j))

    cpu.parallel(block, count, _ROWS)

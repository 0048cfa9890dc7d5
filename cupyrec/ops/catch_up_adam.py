"""Adam on embedding rows that equals Adam on a dense table, though only a batch's rows are touched.

A row without a gradient still moves. Step s of Adam is then

    m = beta1 * m
    v = beta2 * v
    w -= lr_s * weight_decay * w
    w -= lr_s / (1 - beta1^s) * m / (sqrt(v) / sqrt(1 - beta2^s) + eps)

A row is [w (D), m (D), v (D), last (1)]. `last`, an int32, is the step that the row has reached; 0
before its first update, until which it rests. Steps last + 1 to t are replayed one by one until all
that are left together move no weight by half an ulp: those after s move it by at most

    L / (1 - beta1^s) * |m| / (sqrt(v) + eps) * rho / (1 - rho),  rho = beta1 / sqrt(beta2),

with L the largest learning rate so far, or, where rho >= 1, by L / (1 - beta1^s) * |m| / eps *
beta1 / (1 - beta1). What is left then are powers of beta and the decay. With beta1 = 0.9 that is
after some 150 steps, in general after some 20 / (1 - rho), however long the row was away.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.adam import update_adam_rows
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.ops.row_memory import (
    Rounding,
    RowMemory,
    check_learns,
    check_rounding,
    read_vector,
    rounding_arguments,
    rounding_block,
    row_addresses,
    row_of,
    scratch,
    state_at,
    vector_words,
    write_vector,
)  # fmt: skip
from cupyrec.ops.vector_sums import vector_of

__all__ = ["catch_up_adam_rows", "catch_up_rows", "caught_up_vectors"]

_ROWS = 64  # a block: a row may take microseconds
_CHECKED = 8  # steps between two looks at whether the rest still moves anything


@cpu.exact_loop
def _power(x, n):
    """x^n by squaring."""
    power = 1.0
    while n:
        if n & 1:
            power *= x
        x *= x
        n >>= 1
    return power


@cpu.exact_loop
def _settled(w, m, root, moved, kept, bound, share, eps):
    """Whether steps to come move no weight; NaN and inf are what they stay."""
    for d in range(w.size):
        if abs(m[d]) * bound > abs(kept * w[d] - moved[d]) * (share * root[d] + eps):
            return False
    return True


@cpu.exact_loop
def _room(width):
    """Three arrays: loops over rows of one are not vectorised."""
    return np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)


@cpu.exact_loop
def _replay(w, m, v, last, history, room, out):
    """Write the weights of step t to `out`, which may be `w`; those of step `last` are given."""
    steps, logs, t, beta1, beta2, eps, bound, rooted = history
    root, moved, lately = room
    for d in range(w.size):
        root[d] = np.sqrt(v[d])
        moved[d] = 0
    power1, power2, kept = 1.0, 1.0, np.float32(1)  # of beta1, of sqrt(beta2), of the weights
    bound *= steps[last + 1, 1]
    s = last
    while s < t:
        gone = np.float32(0)  # of the weights
        lately[:] = 0  # summed apart: float32 would round each small step against all before
        pause = min(s + _CHECKED, t)
        while s < pause:
            s += 1
            power1 *= beta1
            power2 *= np.sqrt(beta2)
            rate = np.float32(steps[s, 0] * steps[s, 1] * power1)
            inverse_root, decay = np.float32(steps[s, 2] * power2), steps[s, 3]
            for d in range(w.size):
                lately[d] += rate * m[d] / (inverse_root * root[d] + eps) - decay * lately[d]
            gone += decay * (np.float32(1) - gone)
        for d in range(w.size):
            moved[d] += lately[d] - gone * moved[d]
        kept -= gone * kept
        share = np.float32(rooted * power2)
        if _settled(w, m, root, moved, kept, np.float32(bound * power1), share, eps):
            break
    kept, rest = np.float32(math.exp(logs[t] - logs[last])), np.float32(math.exp(logs[t] - logs[s]))
    for d in range(w.size):
        out[d] = kept * w[d] - rest * moved[d]


@cpu.exact_loop
def _catch_up(memory, addresses, width, history, scratch, rounding):
    t, beta1, beta2 = history[2:5]
    room = _room(width)
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        state = state_at(memory, words, width)
        m, v = state[:width], state[width : 2 * width]
        last = state[2 * width : 2 * width + 1].view(np.int32)
        if 0 < last[0] < t:
            w = read_vector(memory, words, width, scratch)
            _replay(w, m, v, last[0], history, room, w)
            power1 = np.float32(_power(beta1, t - last[0]))
            power2 = np.float32(_power(beta2, t - last[0]))
            for d in range(width):
                m[d] *= power1
                v[d] *= power2
            write_vector(memory, words, w, rounding, u)
            last[0] = t


@cpu.exact_loop
def _caught_up(memory, addresses, history, scratch, out):
    t, width = history[2], out.shape[1]
    room = _room(width)
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        state = state_at(memory, words, width)
        m, v = state[:width], state[width : 2 * width]
        last = state[2 * width : 2 * width + 1].view(np.int32)[0]
        w = read_vector(memory, words, width, scratch)
        if 0 < last < t:
            _replay(w, m, v, last, history, room, vector_of(out, u))
        else:
            vector_of(out, u)[:] = w


_ROWS_AT = "const uint64_t* chunks, int k, int stride, const int64_t* rows"
_HISTORY = (
    "const float* steps, const double* kept, int t, float beta1, float beta1_rest, float root2,"
    " float root2_rest, float eps, float bound, float rooted"
)


def _per_row(U: int, lanes: int) -> Geometry:
    return Geometry(blocks(U * lanes, 256), 256)


_catch_up_rows = Kernel(
    "catch_up_adam.cu", "catch_up_rows",
    f"{_ROWS_AT}, {_HISTORY}, const uint32_t* tables, const int64_t* ids, uint64_t seed,"
    " uint32_t step, int64_t row_count",
    _per_row, optional="kept tables ids",
)  # fmt: skip
_caught_up_vectors = Kernel(
    "catch_up_adam.cu", "caught_up_vectors",
    f"{_ROWS_AT}, {_HISTORY}, float* out, int64_t row_count",
    _per_row, optional="kept",
)  # fmt: skip


def _check(where: str, memory: RowMemory, rows: Any, width: int) -> None:
    check_learns(where, memory.value)
    errors.dtype(where, "rows", rows, np.int64)
    errors.axes(where, rows=(rows, "U"))
    errors.dtype(where, "memory.chunks", memory.chunks, np.uint64)
    words = vector_words(errors.positive(where, "width", width), memory.value) + 2 * width + 1
    if words > memory.stride:
        raise ValueError(
            f"{where}: rows must have {words} words for a width of {width} and the state, got a "
            f"stride of {memory.stride}."
        )


def _launch(
    kernel: Kernel, xp: ModuleType, memory: RowMemory, rows: Any, width: int,
    history: AdamHistory, *others: Any,
) -> None:  # fmt: skip
    vector = vector_width(math.gcd(width, vector_words(width, memory.value)))
    lanes = min(32, 1 << (width // vector - 1).bit_length())
    macros = {"DIM": width, "VECTOR": vector, "VALUE": memory.value, "LANES": lanes}
    kernel(
        *memory[:3], xp.ascontiguousarray(rows), *history.for_kernels(xp), *others, len(rows),
        macros=macros, U=len(rows), lanes=lanes,
    )  # fmt: skip


def catch_up_rows(
    memory: RowMemory,
    rows: Any,
    width: int,
    history: AdamHistory,
    rounding: Rounding | None = None,
) -> None:
    """Bring rows to the last step of the history, before they are read for the next one.

    Parameters
    ----------
    memory : RowMemory
    rows : (U,) array of int64
        No row twice.
    width : int
        D.
    history : AdamHistory
    rounding : Rounding, optional
        Needed just where rows are of 16 bits.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree. Row numbers are not checked.

    Examples
    --------
    With m = v = 1 and beta1 = beta2 = 0.5 steps 2 and 3 of 0.1 move by 0.082 and 0.053.

    >>> chunk = np.array([[1, 1, 1, 0]], np.float32)
    >>> chunk[0, 3:].view(np.int32)[0] = 1  # step 1 was its last
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=0, stride=4)
    >>> history = AdamHistory(beta1=0.5, beta2=0.5, eps=1e-8, rates=[0.1, 0.1, 0.1])
    >>> catch_up_rows(memory, np.array([0]), 1, history)
    >>> chunk[0, :3], chunk[0, 3:].view(np.int32)
    (array([0.8648981, 0.25     , 0.25     ], dtype=float32), array([3], dtype=int32))
    """
    _check("catch_up_rows", memory, rows, width)
    keys = check_rounding("catch_up_rows", memory, rounding, len(rows))
    xp = arrays.namespace("catch_up_rows", memory.chunks, rows, *keys)
    if xp is not np:
        _launch(_catch_up_rows, xp, memory, rows, width, history, *rounding_arguments(xp, rounding))
        return
    past = history.for_loops()

    def block(i: int, j: int) -> None:
        by = rounding_block(rounding, i, j)
        _catch_up(memory, row_addresses(memory, rows[i:j]), width, past, scratch(memory, width), by)

    cpu.parallel(block, len(rows), _ROWS)


def caught_up_vectors(memory: RowMemory, rows: Any, width: int, history: AdamHistory) -> Any:
    """Return the vectors that rows would have if brought to the last step; no row changes.

    Parameters
    ----------
    memory : RowMemory
    rows : (U,) array of int64
    width : int
        D.
    history : AdamHistory

    Returns
    -------
    (U, D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.array([[5, 1, 1, 0]], np.float32)  # never updated
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=0, stride=4)
    >>> history = AdamHistory(beta1=0.9, beta2=0.999, eps=1e-8, rates=[0.1, 0.1])
    >>> caught_up_vectors(memory, np.array([0]), 1, history)
    array([[5.]], dtype=float32)
    """
    _check("caught_up_vectors", memory, rows, width)
    xp = arrays.namespace("caught_up_vectors", memory.chunks, rows)
    out = xp.empty((len(rows), width), np.float32)
    if xp is not np:
        _launch(_caught_up_vectors, xp, memory, rows, width, history, out)
        return out
    past = history.for_loops()

    def block(i: int, j: int) -> None:
        _caught_up(memory, row_addresses(memory, rows[i:j]), past, scratch(memory, width), out[i:j])

    cpu.parallel(block, len(rows), _ROWS)
    return out


def catch_up_adam_rows(
    memory: RowMemory,
    rows: Any,
    g: Any,
    history: AdamHistory,
    *,
    scale: Any = 1.0,
    rounding: Rounding | None = None,
) -> None:
    """Make the last step of the history on rows that have reached the step before.

    Parameters
    ----------
    memory : RowMemory
    rows : (U,) array of int64
        No row twice.
    g : (U, D) array of float32
    history : AdamHistory
    scale : float, or (1,) array of float32 on the device of `g`
        Where it is NaN, nothing is updated: for these rows the step had gradient 0.
    rounding : Rounding, optional
        Needed just where rows are of 16 bits.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree. Row numbers are not checked.

    Examples
    --------
    >>> chunk = np.array([[1, 0, 0, 0]], np.float32)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=0, stride=4)
    >>> history = AdamHistory(beta1=0.9, beta2=0.999, eps=1e-8, rates=[0.25])
    >>> catch_up_adam_rows(memory, np.array([0]), np.array([[2.0]], np.float32), history)
    >>> chunk[0, :3].round(4), chunk[0, 3:].view(np.int32)
    (array([0.75 , 0.2  , 0.004], dtype=float32), array([1], dtype=int32))
    """
    if not (t := len(history)):
        raise ValueError("catch_up_adam_rows: 'history' must have at least 1 step, got 0.")
    update_adam_rows(
        "catch_up_adam_rows", memory, rows, g, scale, rounding, last=t, lr=history._rates[t],
        beta1=history.beta1, beta2=history.beta2, eps=history.eps, t=t,
        weight_decay=history.weight_decay,
    )  # fmt: skip

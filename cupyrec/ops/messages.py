"""Rows as messages, one a peer: what ranks send each other. N peers, U rows, D columns.

Row i of a message is row order[first + i] of `rows`, where `first` counts the rows of the peers
before. A message of n rows is, by codec,

    none    n * D float32
    fp16    n * D float16           rounded to the nearest, ties to even; too large ones are inf
    bf16    n * D bfloat16
    int8    n float32, the rows' scales, then n * D int8: see `cupyrec.ops.int8_codec`

and zeros up to a multiple of 16 bytes. Messages lie one behind the other. NaN stays NaN, in 16 bits
0x7FFF. Decoding puts row i of a message to row order[first + i] of its result.

Gradients may be rounded at random instead, by their keys, so that their mean is right: see
`cupyrec.ops.stochastic_rounding`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.int8_codec import decode_rows, encode_rows, rows_of_block
from cupyrec.ops.row_memory import Rounding, rounding_arguments, rounding_block
from cupyrec.ops.stochastic_rounding import (
    BFLOAT16,
    FLOAT16,
    check_counters,
    round_vector,
    widened,
)  # fmt: skip
from cupyrec.ops.vector_sums import ask_ahead

__all__ = ["CODECS", "UNIT", "decode", "encode", "sizes"]

UNIT = 16  # bytes
CODECS = ("none", "fp16", "bf16", "int8")  # as in kernels/messages.cu
_DTYPES = dict(zip(CODECS, (np.float32, np.uint16, np.uint16, np.int8), strict=True))
_VALUES = {"fp16": FLOAT16, "bf16": BFLOAT16}
_SIGN, _INFINITE, _NAN = np.uint32(0x80000000), np.uint32(0x7F800000), np.uint32(0x7FFF)
_NORMAL = np.uint32(0x38800000)  # bits of float16's least normal number
_HALF, _HALF_BITS = np.float32(0.5), np.uint32(0x3F000000)


# The CPU's loops; those of int8 are in int8_codec.py


@cpu.exact_inline
def _float16(x, bits):
    """The bits of x as float16, without its sign; an addition rounds what is below 2^-14."""
    a = bits & ~_SIGN
    code = np.uint32(a + np.uint32(0xFFF) + (a >> np.uint32(13) & np.uint32(1)))
    code = min(np.uint32((code >> np.uint32(13)) - np.uint32(112 << 10)), np.uint32(0x7C00))
    small = np.float32(abs(x) + _HALF).view(np.uint32) - _HALF_BITS
    return np.uint32(code if a >= _NORMAL else small)


@cpu.exact_inline
def _bfloat16(bits):
    a = bits & ~_SIGN
    return np.uint32(a + np.uint32(0x7FFF) + (a >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


@cpu.exact_loop
def _encode_halves(x, order, rounding, value, codes):
    bits = x.view(np.uint32)
    for i in range(codes.shape[0]):
        at = i if order is None else order[i]
        ask_ahead(x, order, i)
        if rounding is not None:
            tables, ids, seed, step = rounding
            round_vector(x[at], tables[at], ids[at], seed, step, value, codes[i])
        elif value == FLOAT16:
            for d in range(codes.shape[1]):
                code = _float16(x[at, d], bits[at, d]) | (bits[at, d] & _SIGN) >> np.uint32(16)
                codes[i, d] = code if bits[at, d] & ~_SIGN <= _INFINITE else _NAN
        else:
            for d in range(codes.shape[1]):
                code = _bfloat16(bits[at, d]) | (bits[at, d] & _SIGN) >> np.uint32(16)
                codes[i, d] = code if bits[at, d] & ~_SIGN <= _INFINITE else _NAN


@cpu.exact_loop
def _decode_halves(codes, order, value, out):
    bits = out.view(np.uint32)
    for i in range(codes.shape[0]):
        to = i if order is None else order[i]
        ask_ahead(out, order, i)
        for d in range(codes.shape[1]):
            bits[to, d] = widened(codes[i, d], value)


@cpu.exact_loop
def _copy_rows(source, source_order, target, target_order):
    for i in range(target.shape[0] if target_order is None else target_order.size):
        at = i if source_order is None else source_order[i]
        to = i if target_order is None else target_order[i]
        ask_ahead(source, source_order, i)
        ask_ahead(target, target_order, i)
        for d in range(source.shape[1]):
            target[to, d] = source[at, d]


_encode = Kernel(
    "messages.cu", "encode_messages",
    "const float* x, const int64_t* order, const uint32_t* tables, const int64_t* ids,"
    " uint64_t seed, uint32_t step, const int64_t* peers, int count, uint8_t* bytes, int64_t n",
    lambda U, lanes, rows: Geometry(blocks(U, 256 // lanes * rows), 256),
    optional="order tables ids",
)  # fmt: skip
_decode = Kernel(
    "messages.cu", "decode_messages",
    "const uint8_t* bytes, const int64_t* peers, int count, const int64_t* order, float* out,"
    " int64_t n",
    lambda U, lanes, rows: Geometry(blocks(U, 256 // lanes * rows), 256),
    optional="order",
)  # fmt: skip


class _Layout:
    """Where the messages of some peers lie, and their rows."""

    def __init__(self, where: str, counts: Any, codec: str, width: int) -> None:
        if codec not in CODECS:
            raise ValueError(
                f"{where}: 'codec' must be 'none', 'fp16', 'bf16' or 'int8', got {codec!r}."
            )
        if arrays.device(counts) in ("cuda", "sim"):
            raise TypeError(
                f"{where}: 'counts' must be on the host, got an array of device "
                f"'{arrays.device(counts)}'."
            )
        counts = np.asarray(counts)
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or min(counts, default=-1) < 0:
            raise ValueError(
                f"{where}: 'counts' must be an integer of at least 0 a peer, got {counts.tolist()}."
            )
        self.codec, self.width = codec, width
        self.counts = counts.astype(np.int64)
        row = width * np.dtype(_DTYPES[codec]).itemsize + (4 if codec == "int8" else 0)
        self.sizes = -(-self.counts * row // UNIT)
        #: Of each peer the number of its first row and the byte where its message starts, and the
        #: ends of all.
        self.peers = np.zeros((len(counts) + 1, 2), np.int64)
        np.cumsum(self.counts, out=self.peers[1:, 0])
        np.cumsum(self.sizes * UNIT, out=self.peers[1:, 1])

    rows = property(lambda self: int(self.peers[-1, 0]))
    nbytes = property(lambda self: int(self.peers[-1, 1]))

    def blocks(self, messages: np.ndarray, fill: bool) -> list[tuple[int, int, Any, Any]]:
        """What the CPU's loops work on at a time: rows from i to j, their numbers and scales.

        With `fill` zeros are written to the ends of messages.
        """
        found, step = [], rows_of_block(self.width)
        for (first, start), (last, end) in itertools.pairwise(self.peers.tolist()):
            message, count, scales = messages[start:end], last - first, None
            if self.codec == "int8":
                scales, message = message[: 4 * count].view(np.float32), message[4 * count :]
            dtype = np.dtype(_DTYPES[self.codec])
            used = count * self.width * dtype.itemsize
            numbers = message[:used].view(dtype).reshape(count, self.width)
            if fill:
                message[used:] = 0
            for i in range(0, count, step):
                own = slice(i, i + step)
                of_rows = first + i, min(first + i + step, last)
                found.append((*of_rows, numbers[own], scales if scales is None else scales[own]))
        return found

    def launch(self, kernel: Kernel, vector: int, *given: Any, **macros: int) -> None:
        """One launch; of what the kernel takes `given` lacks the number of rows."""
        pieces = self.width // vector
        lanes = min(32, 1 << (pieces - 1).bit_length())
        # Loads that a lane has in flight, as its registers allow.
        loads = min(2, vector) if macros.get("AT_RANDOM") else 4
        rows = max(1, loads // blocks(pieces, lanes))
        macros = {
            "DIM": self.width, "VECTOR": vector, "LANES": lanes, "ROWS": rows,
            "CODEC": CODECS.index(self.codec), "BRAIN": int(self.codec == "bf16"),
            "VALUE": _VALUES.get(self.codec, 0), **macros,
        }  # fmt: skip
        kernel(*given, self.rows, macros=macros, U=self.rows, lanes=lanes, rows=rows)


def _check_bytes(where: str, name: str, array: Any, layout: _Layout) -> None:
    errors.dtype(where, name, array, np.uint8)
    errors.axes(where, **{name: (array, "M")})
    if len(array) < layout.nbytes or not array.flags.c_contiguous or arrays.address(array) % UNIT:
        raise ValueError(
            f"{where}: '{name}' must be at least {layout.nbytes} contiguous bytes from a multiple "
            f"of {UNIT} on, got {len(array)} from {arrays.address(array) % UNIT} on."
        )


def _check_order(where: str, order: Any, layout: _Layout, rows: int, name: str = "rows") -> None:
    """Raise unless the counts are those of the order, or without one of the rows."""
    if order is not None:
        errors.dtype(where, "order", order, np.int64)
        errors.axes(where, order=(order, "U"))
        rows, name = len(order), "order"
    if layout.rows != rows:
        raise ValueError(
            f"{where}: 'counts' must add up to {rows}, the length of '{name}', got {layout.rows}."
        )


def sizes(counts: Sequence[int], codec: str, width: int) -> np.ndarray:
    """Return how large the messages of so many rows are, in units of 16 bytes.

    Parameters
    ----------
    counts : (N,) ints
        Rows of each message.
    codec : str
        ``"none"``, ``"fp16"``, ``"bf16"`` or ``"int8"``.
    width : int
        D.

    Returns
    -------
    (N,) array of int64

    Raises
    ------
    ValueError, TypeError
        Another codec, counts that are none.

    Examples
    --------
    >>> sizes([2, 0, 5], "int8", 16)
    array([3, 0, 7])
    """
    width = errors.positive("messages.sizes", "width", width)
    return _Layout("messages.sizes", counts, codec, width).sizes


def encode(
    rows: Any,
    counts: Sequence[int],
    codec: str,
    *,
    order: Any = None,
    rounding: Rounding | None = None,
    out: Any = None,
) -> tuple[Any, np.ndarray]:
    """Return messages of rows, and how large they are.

    On a device that is one launch, however many peers there are.

    Parameters
    ----------
    rows : (V, D) array of float32
    counts : (N,) ints
        How many rows each peer gets; on the host.
    codec : str
        ``"none"``, ``"fp16"``, ``"bf16"`` or ``"int8"``.
    order : (U,) array of int64, optional
        The rows in the order of their peers; by default all as they are. Not checked.
    rounding : Rounding, optional
        The rows' keys (V,), a seed and a step, to round at random by.
    out : (M or more,) array of uint8, optional
        Contiguous, from a multiple of 16 on.

    Returns
    -------
    messages : (M,) array of uint8
    sizes : (N,) array of int64
        Units of 16 bytes.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree, another codec, an `out` too small.

    Examples
    --------
    >>> rows = np.array([[1, -0.5], [8, 8], [2, 4]], np.float32)
    >>> messages, sizes = encode(rows, [1, 2], "int8", order=np.array([2, 0, 1]))
    >>> sizes, messages[:4].view(np.float32), messages[4:8].view(np.int8)
    (array([1, 1]), array([4.], dtype=float32), array([ 64, 127,   0,   0], dtype=int8))
    """
    where = "messages.encode"
    errors.dtype(where, "rows", rows, np.float32)
    errors.axes(where, rows=(rows, "V D"))
    errors.columns(where, "rows", rows)
    layout = _Layout(where, counts, codec, rows.shape[1])
    _check_order(where, order, layout, len(rows))
    keys = _check_rounding(where, codec, rows, rounding)
    xp = arrays.namespace(where, *(a for a in (rows, order, *keys, out) if a is not None))
    if out is None:
        out = (arrays.empty if xp is np else xp.empty)(layout.nbytes, np.uint8)
    _check_bytes(where, "out", out, layout)
    rows = xp.ascontiguousarray(rows)
    order = None if order is None else xp.ascontiguousarray(order)
    out = out[: layout.nbytes]
    if xp is np:
        _encode_cpu(layout, rows, order, rounding_block(rounding, 0, len(rows)), out)
    elif layout.rows:
        layout.launch(
            _encode, vector_width(layout.width, rows), rows, order,
            *rounding_arguments(xp, rounding), arrays.copy_to(xp, layout.peers), len(layout.counts),
            out, ENCODE=1, AT_RANDOM=int(rounding is not None),
        )  # fmt: skip
    return out, layout.sizes


def _check_rounding(where: str, codec: str, rows: Any, rounding: Rounding | None) -> tuple:
    if rounding is None:
        return ()
    if codec == "none":
        raise ValueError(f"{where}: 'rounding' must be None for codec 'none', got {rounding!r}.")
    tables, ids, seed, step = rounding
    errors.dtype(where, "rounding.tables", tables, np.uint32)
    errors.dtype(where, "rounding.ids", ids, np.int64)
    keys = {"rounding.tables": (tables, "V"), "rounding.ids": (ids, "V")}
    errors.axes(where, rows=(rows, "V D"), **keys)
    check_counters(where, seed, step)
    return tables, ids


def _encode_cpu(layout: _Layout, rows: Any, order: Any, rounding: Any, out: Any) -> None:
    found = layout.blocks(out, fill=True)

    def block(k: int, _: int) -> None:
        i, j, numbers, scales = found[k]
        source, index, by = rows, order, rounding
        if order is None:
            source, by = rows[i:j], rounding_block(rounding, i, j)
        else:
            index = order[i:j]
        if layout.codec == "none":
            _copy_rows(source, index, numbers, None)
        elif layout.codec == "int8":
            encode_rows(source, index, by, numbers, scales)
        else:
            _encode_halves(source, index, by, _VALUES[layout.codec], numbers)

    cpu.parallel(block, len(found), 1)


def decode(
    messages: Any,
    counts: Sequence[int],
    codec: str,
    width: int,
    *,
    order: Any = None,
    out: Any = None,
) -> Any:
    """Return the rows of messages.

    On a device that is one launch, however many peers there are.

    Parameters
    ----------
    messages : (M or more,) array of uint8
        Contiguous, from a multiple of 16 on.
    counts : (N,) ints
        How many rows came from each peer; on the host.
    codec : str
        That of `encode`.
    width : int
        D.
    order : (U,) array of int64, optional
        Where in the result the rows go, no two of them to one place; by default as they come. Not
        checked.
    out : (U, D) array of float32, with `order` (V, D), optional
        Contiguous.

    Returns
    -------
    (U, D) array of float32, or `out`

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree, another codec, messages that are too short.

    Examples
    --------
    >>> rows = np.array([[1, -0.5], [8, 8], [2, 4]], np.float32)
    >>> order = np.array([2, 0, 1])
    >>> messages, _ = encode(rows, [1, 2], "bf16", order=order)
    >>> decode(messages, [1, 2], "bf16", 2, order=order)
    array([[ 1. , -0.5],
           [ 8. ,  8. ],
           [ 2. ,  4. ]], dtype=float32)
    """
    where = "messages.decode"
    width = errors.positive(where, "width", width)
    layout = _Layout(where, counts, codec, width)
    _check_bytes(where, "messages", messages, layout)
    if order is not None:
        _check_order(where, order, layout, 0)
    xp = arrays.namespace(where, *(a for a in (messages, order, out) if a is not None))
    if out is None:
        out = (arrays.empty if xp is np else xp.empty)((layout.rows, width), np.float32)
    errors.dtype(where, "out", out, np.float32)
    errors.axes(where, out=(out, f"U {width}"))
    if order is None:
        _check_order(where, None, layout, len(out), "out")
    if not out.flags.c_contiguous:
        raise ValueError(f"{where}: 'out' must be C-contiguous, got strides {out.strides}.")
    order = None if order is None else xp.ascontiguousarray(order)
    if xp is np:
        _decode_cpu(layout, messages, order, out)
    elif layout.rows:
        layout.launch(
            _decode, vector_width(width, out), messages, arrays.copy_to(xp, layout.peers),
            len(layout.counts), order, out,
        )  # fmt: skip
    return out


def _decode_cpu(layout: _Layout, messages: Any, order: Any, out: Any) -> None:
    found = layout.blocks(messages, fill=False)

    def block(k: int, _: int) -> None:
        i, j, numbers, scales = found[k]
        target, index = (out[i:j], None) if order is None else (out, order[i:j])
        if layout.codec == "none":
            _copy_rows(numbers, None, target, index)
        elif layout.codec == "int8":
            decode_rows(numbers, scales, index, target)
        else:
            _decode_halves(numbers, index, _VALUES[layout.codec], target)

    cpu.parallel(block, len(found), 1)

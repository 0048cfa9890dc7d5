"""Sums of vectors that lie here and there in memory, in CPU loops.

A loop first notes the address of each vector of its block, then adds up: so memory is asked for a
vector some turns ahead, and four are added at a time, in order, between a load and a store of their
sum. Addresses rather than views of arrays, since views are counted, by atomics: these wait until
all that was stored before has reached the cache.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from cupyrec import cpu

__all__ = [
    "AHEAD", "add_vectors", "ask_ahead", "ask_far", "ask_for", "vector_at", "vector_of",
    "write_sum",
]  # fmt: skip

AHEAD = 16  # vectors; there must be so many addresses, of anything, behind those of a block
_ASKED = 1024  # bytes of a vector or row; the processor goes on by itself


@cpu.exact_inline
def ask_for(address, words) -> None:
    """Ask memory for the words from an address on, without waiting for them."""
    for at in range(0, min(4 * words, _ASKED), 64):
        cpu.prefetch(address + np.uint64(at))


@cpu.exact_inline
def ask_far(address, words) -> None:
    """The same by `cpu.prefetch_far`: for vectors of tables larger than the caches."""
    for at in range(0, min(4 * words, _ASKED), 64):
        cpu.prefetch_far(address + np.uint64(at))


@cpu.exact_inline
def vector_at(address, width) -> np.ndarray:
    """The vector of `width` float32 at an address."""
    return carray(cpu.pointer(address), (width,), np.float32)


@cpu.exact_inline
def vector_of(vectors, i) -> np.ndarray:
    """vectors[i] of a contiguous (N, D) array of float32, not counted."""
    width = vectors.shape[1]
    return vector_at(np.uint64(vectors.ctypes.data + 4 * i * width), width)


_LANES = 16
_FLOATS = cgutils.ir.VectorType(cgutils.ir.FloatType(), _LANES)


@intrinsic
def _write_lanes(_context, vectors, out, at):
    """Write the sum of the lanes `at` bytes behind the addresses `vectors` to those of `out`."""

    def generate(context, builder, _signature, arguments):
        def place(address):
            return builder.inttoptr(builder.add(address, arguments[2]), _FLOATS.as_pointer())

        first, *others = cgutils.unpack_tuple(builder, arguments[0])
        total = builder.load(place(first), align=4)
        for address in others:
            total = builder.fadd(total, builder.load(place(address), align=4))
        builder.store(total, place(arguments[1]), align=4)
        return context.get_dummy_value()

    return types.void(vectors, types.uint64, types.uint64), generate


@cpu.exact_inline
def write_sum(vectors, out, width) -> None:
    """Write the sum of the vectors at some addresses, in order, to `out`, which may be one of them.

    In a plain loop the compiler would have to ask whether it is, and then go number by number.
    """
    rest = width % _LANES
    for k in range(0, width - rest, _LANES):
        _write_lanes(vectors, out, np.uint64(4 * k))
    for k in range(width - rest, width):
        total = vector_at(vectors[0], width)[k]
        for vector in vectors[1:]:
            total += vector_at(vector, width)[k]
        vector_at(out, width)[k] = total


@cpu.exact_inline
def ask_ahead(x, order, i) -> None:
    """Ask for the row x[order[i + AHEAD]] of a contiguous (N, D) array of float32.

    Without an order rows come one after the other, and the processor asks for them itself.
    """
    if order is not None:
        row = order[min(i + AHEAD, order.size - 1)]
        ask_for(np.uint64(x.ctypes.data + 4 * row * x.shape[1]), x.shape[1])


@cpu.exact_inline
def add_vectors(addresses, weights, first, stop, sums) -> None:
    """Add weights[i] * vector(i) to `sums`, for i = first .. stop - 1 in this order.

    Parameters
    ----------
    addresses : (stop + AHEAD or more,) array of uint64
    weights : (stop,) array of float32, or None
    first, stop : int
    sums : (D,) array of float32
    """
    width, i = sums.size, first
    one = np.float32(1)
    while i + 4 <= stop:
        for j in range(i + AHEAD - 4, i + AHEAD):
            ask_for(addresses[j], width)
        a, b = vector_at(addresses[i], width), vector_at(addresses[i + 1], width)
        c, d = vector_at(addresses[i + 2], width), vector_at(addresses[i + 3], width)
        p, q = (one, one) if weights is None else (weights[i], weights[i + 1])
        r, s = (one, one) if weights is None else (weights[i + 2], weights[i + 3])
        for k in range(width):
            sums[k] = sums[k] + p * a[k] + q * b[k] + r * c[k] + s * d[k]
        i += 4
    while i < stop:
        ask_for(addresses[i + AHEAD - 4], width)
        vector, weight = vector_at(addresses[i], width), one if weights is None else weights[i]
        for k in range(width):
            sums[k] += weight * vector[k]
        i += 1

"""`dot_interaction` in floats of 16 bits: sums are float32, rounded once, ties to even.

The CPU widens a block of samples to float32 for the loops of float32. Kernels multiply on tensor
cores, S, the matrix of the pairs' gradients, in 16 bits too: what a self pair adds to it, twice its
gradient, is infinite in float16 from a gradient of 32768 on.
"""

from __future__ import annotations

import math
from typing import Any

from cupyrec import arrays
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.halves import value_macros
from cupyrec.ops.row_vectors import OPTIONAL, PARAMETERS

__all__ = ["backward", "forward"]

_PIECE = 8  # numbers of 16 bytes
# Rows of a tile lie in banks of their own, those of the triangle that lanes walk through in most.
_S_STRIDES = {16: 40, 32: 40, 48: 104, 64: 120}
_WARPS = 4  # a block; each has a sample
_MAX_SHARED = 24 << 10  # bytes a warp: two blocks share a multiprocessor


# Kernels


def _padded(n: int) -> int:
    """The least multiple of 16, the side of a tile, from `n` on."""
    return blocks(n, 16) * 16


def _bytes(features: int, chunk: int, gathered: int = 0) -> tuple[int, int]:
    """Of shared memory a warp, forward and backward: x and s of the .cu, and addresses of rows."""
    rows, sources = _padded(features), blocks(features, 2) * 16 if gathered else 0
    s = rows * _S_STRIDES[rows]
    return 2 * max(features * chunk, s) + sources, 2 * ((rows + 1) * chunk + s) + sources


def _chunk(features: int, width: int) -> int:
    """Columns that a warp holds at once: about as many each time."""
    parts = 1
    while max(_bytes(features, _padded(blocks(width, parts)))) > _MAX_SHARED:
        parts += 1
    return _padded(blocks(width, parts))


def _geometry(B: int, shared: int) -> Geometry:
    """`shared` is a warp's."""
    return Geometry(blocks(B, _WARPS), 32 * _WARPS, _WARPS * shared)


_forward = Kernel(
    "dot_interaction_16.cu", "dot_interaction_16_forward",
    f"const uint16_t* dense, const uint16_t* sparse, {PARAMETERS}, uint16_t* out, int64_t batch",
    _geometry, optional=OPTIONAL,
)  # fmt: skip
_backward = Kernel(
    "dot_interaction_16.cu", "dot_interaction_16_backward",
    f"const uint16_t* grad, const uint16_t* dense, const uint16_t* sparse, {PARAMETERS},"
    " uint16_t* ddense, uint16_t* dsparse, int64_t batch",
    _geometry, optional=OPTIONAL,
)  # fmt: skip


def _vector(width: int, *x: Any) -> int:
    """How many numbers of a row one instruction may move: 8, 4, 2 or 1."""
    return math.gcd(_PIECE, width, *(arrays.address(a) // a.itemsize for a in x))


def _macros(dense: Any, macros: dict[str, int], vector: int) -> dict[str, int]:
    return macros | {
        "VECTOR": vector, "CHUNK": _chunk(macros["FEATURES"], macros["WIDTH"]),
        "S_STRIDE": _S_STRIDES[_padded(macros["FEATURES"])], "THREADS": 32 * _WARPS,
    } | value_macros(dense.dtype)  # fmt: skip


def forward(dense: Any, sparse: tuple, aligned: Any, macros: dict[str, int], out: Any) -> None:
    """Launch on contiguous arrays of a device.

    Parameters
    ----------
    dense : (B, D) array, or (B, 0) where there is none
    sparse, aligned
        From `kernel_source`.
    macros : dict
        FEATURES, WIDTH, DENSE, SELF, CONCAT and PADDING of the .cu, and those of `kernel_source`.
    out : (B, columns) array
        Is written.
    """
    macros = _macros(dense, macros, _vector(macros["WIDTH"], dense, aligned))
    shared, _ = _bytes(macros["FEATURES"], macros["CHUNK"], macros["GATHERED"])
    dense, to = map(arrays.bits, (dense, out))
    _forward(dense, *sparse, to, len(dense), macros=macros, B=len(dense), shared=shared)


def backward(
    grad: Any, dense: Any, sparse: tuple, aligned: Any, macros: dict[str, int], ddense: Any,
    dsparse: Any,
) -> None:  # fmt: skip
    """Launch as `forward` does; `ddense` and `dsparse` are written."""
    vector = _vector(macros["WIDTH"], dense, aligned, ddense, dsparse)
    macros = _macros(dense, macros, vector)
    _, shared = _bytes(macros["FEATURES"], macros["CHUNK"], macros["GATHERED"])
    grad, dense, *to = map(arrays.bits, (grad, dense, ddense, dsparse))
    _backward(grad, dense, *sparse, *to, len(dense), macros=macros, B=len(dense), shared=shared)

"""The sum of what each rank has, in the order of ranks. N ranks, L numbers.

    out = ((parts[0] + parts[1]) + parts[2]) + ...        each addition rounded

That order is part of the result: all who add the same parts up have the same bits, on any device,
but for those of a NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width

__all__ = ["rank_sum"]

_NUMBERS = 1 << 14  # a block of the CPU loop
_STRIP = 2048  # what of it stays in the L1 cache


@cpu.exact_loop
def _rank_sum_cpu(parts, out, first, end):
    for start in range(first, end, _STRIP):
        stop = min(start + _STRIP, end)
        strip = out[start:stop]
        strip[:] = parts[0, start:stop]
        for n in range(1, parts.shape[0]):
            part = parts[n, start:stop]
            for i in range(strip.size):
                strip[i] += part[i]


_sum = Kernel(
    "rank_sum.cu", "rank_sum", "const float* parts, int ranks, float* out, int64_t n",
    lambda L, vector: Geometry(blocks(L, 256 * vector), 256),
)  # fmt: skip


def rank_sum(parts: Any, out: Any = None) -> Any:
    """Return parts[0] + parts[1] + ..., from left to right.

    Parameters
    ----------
    parts : (N, L) array of float32
        At least one.
    out : (L,) array of float32, optional
        Contiguous; may be parts[0].

    Returns
    -------
    (L,) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree, N = 0.

    Examples
    --------
    >>> rank_sum(np.array([[1, 2], [3, 4], [5, 6]], np.float32))
    array([ 9., 12.], dtype=float32)
    """
    errors.dtype("rank_sum", "parts", parts, np.float32)
    ranks, length = errors.axes("rank_sum", parts=(parts, "N L"))
    if ranks == 0:
        raise ValueError(
            f"rank_sum: 'parts' must have N of at least 1, got shape {tuple(parts.shape)}."
        )
    xp = arrays.namespace("rank_sum", parts)
    if out is None:
        out = (arrays.empty if xp is np else xp.empty)(length, np.float32)
    errors.dtype("rank_sum", "out", out, np.float32)
    errors.axes("rank_sum", parts=(parts, "N L"), out=(out, "L"))
    arrays.namespace("rank_sum", parts, out)
    if xp is not np:
        parts = xp.ascontiguousarray(parts)
        vector = vector_width(length, parts, out)
        _sum(parts, ranks, out, length, macros={"VECTOR": vector}, L=length, vector=vector)
    else:
        cpu.parallel(lambda i, j: _rank_sum_cpu(parts, out, i, j), length, _NUMBERS)
    return out

"""Floats of 16 bits in loops and kernels: widened to float32, and rounded once to the nearest.

NumPy's float16 and ml_dtypes' bfloat16, `cupyrec.arrays.HALVES`. Loops get float32; kernels get the
bits, and reach them by kernels/halves.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyrec import arrays

__all__ = ["half_type", "in_float32", "value_macros"]


def in_float32(
    loops: Callable, inputs: Sequence[Any], options: Sequence[Any], outputs: Sequence[Any]
) -> None:
    """Call loops for float32 or float64 on arrays, those of 16 bits widened and rounded once.

    Examples
    --------
    >>> def total(x, out):
    ...     out[0] = x.sum()
    >>> out = np.zeros(1, np.float16)
    >>> in_float32(total, [np.full(3, 0.1, np.float16)], [], [out])
    >>> out
    array([0.2998], dtype=float16)
    """
    wide = [np.empty(x.shape, np.float32) if x.dtype in arrays.HALVES else x for x in outputs]
    inputs = [x.astype(np.float32) if x.dtype in arrays.HALVES else x for x in inputs]
    loops(*inputs, *options, *wide)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN say it
        for out, values in zip(outputs, wide, strict=True):
            if out is not values:
                out[...] = values


def half_type(where: str, amp: str | None) -> np.dtype | None:
    """Return the dtype of 16 bits that an argument `amp` names.

    Raises
    ------
    ValueError
        It is neither None, "float16" nor "bfloat16".

    Examples
    --------
    >>> half_type("f", "float16")
    dtype('float16')
    """
    found = [dtype for dtype in arrays.HALVES if dtype.name == amp]
    if amp is not None and not found:
        raise ValueError(f"{where}: 'amp' must be None, 'float16' or 'bfloat16', got {amp!r}.")
    return found[0] if found else None


def value_macros(dtype: Any) -> dict[str, object]:
    """Return the macros of halves.cuh for arrays of a dtype.

    Examples
    --------
    >>> value_macros(np.dtype(np.float16))
    {'value_t': 'uint16_t', 'BRAIN': 0}
    """
    half = dtype in arrays.HALVES
    return {"value_t": "uint16_t" if half else "float", "BRAIN": int(dtype == arrays.HALVES[1])}

"""The factor that clips gradients to a global norm, or says that nothing may be updated.

    scale = min(1, clip_norm / sqrt(sum of squares)), 1 without `clip_norm`
    NaN where the norm or the loss is not finite

On a device it stays there: update kernels read it, and update nothing where it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.kernel import Geometry, Kernel

__all__ = ["clip_scale", "scale_pointer", "scale_value"]

_clip = Kernel(
    "clip_scale.cu", "clip_scale",
    "const double* squares, int count, double clip_norm, const float* loss, float* scale",
    lambda: Geometry(1, 32), optional="squares loss",
)  # fmt: skip


def clip_scale(squares: Sequence[Any], clip_norm: float | None, loss: Any = None) -> Any:
    """Return the factor of all gradients, NaN where nothing may be updated.

    Parameters
    ----------
    squares : sequence of float, or of (1,) arrays of float64 on one device
        Sums of squares, see `sum_squares`; none where the loss alone is looked at.
    clip_norm : float or None
        Largest norm, above 0.
    loss : float, or () or (1,) array of float32, optional
        On the CPU of any floating dtype.

    Returns
    -------
    float, or (1,) array of float32 on the device of the arguments
        The host doesn't wait for it.

    Raises
    ------
    ValueError, TypeError
        `clip_norm` is not above 0; arrays of another shape or dtype, or of several devices.

    Examples
    --------
    >>> clip_scale([9.0, 16.0], clip_norm=1.0)
    0.2
    >>> clip_scale([9.0], clip_norm=None, loss=np.float32(np.inf))
    nan
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_scale: 'clip_norm' must be positive, got {clip_norm}.")
    given = [*squares, *([] if loss is None else [loss])]
    limit = math.inf if clip_norm is None else float(clip_norm)
    if all(arrays.device(x) in (None, "cpu") for x in given):
        norm = math.sqrt(sum(squares))
        finite = math.isfinite(norm) and (loss is None or np.isfinite(loss).all())
        return (min(1.0, limit / norm) if norm else 1.0) if finite else math.nan
    xp = arrays.namespace("clip_scale", *given)
    for x in squares:
        errors.dtype("clip_scale", "squares", x, np.float64)
        errors.axes("clip_scale", squares=(x, "1"))
    if loss is not None:
        errors.dtype("clip_scale", "loss", loss, np.float32)
        if loss.size != 1:
            raise ValueError(f"clip_scale: 'loss' must be one number, got shape {loss.shape}.")
    every = xp.concatenate(squares) if len(squares) > 1 else next(iter(squares), None)
    scale = xp.empty(1, np.float32)
    _clip(every, len(squares), limit, loss, scale)
    return scale


def scale_pointer(xp: ModuleType, scale: Any) -> Any:
    """Return `scale` as update kernels take it: None for 1, else an array of one float32.

    Raises
    ------
    ValueError
        An array of more than one number.

    Examples
    --------
    >>> scale_pointer(np, 1.0)
    >>> scale_pointer(np, 0.5)
    array([0.5], dtype=float32)
    """
    if arrays.device(scale) is None or isinstance(scale, np.generic):
        return None if scale == 1 else xp.full(1, scale, np.float32)
    if scale.size != 1:  # kernels would read the first alone
        raise ValueError(f"scale: must be one number, got shape {scale.shape}.")
    return scale


def scale_value(scale: Any) -> float:
    """Return `scale`, a number or an array of one, as CPU loops take it.

    Examples
    --------
    >>> scale_value(np.array([0.5], np.float32))
    0.5
    """
    return float(np.asarray(scale).item())

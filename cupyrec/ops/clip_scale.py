"""The factor that clips gradients to a global norm, or says that nothing may be updated.

    norm = sqrt(sum over all elements of all arrays of x^2) / loss scale, in float64
    scale = min(1, clip_norm / norm) / loss scale, without `clip_norm` 1 / loss scale
    NaN where the norm or the loss is not finite

On a device it stays there: update kernels read it, and update nothing where it is NaN. The loss
scale is 1 without `scaling`; with it, it changes as `cupyrec.ops.loss_scaling` says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.loss_scaling import LossScaling, advance
from cupyrec.scratch import counters

__all__ = ["clip_scale", "scale_pointer", "scale_value", "sum_squares", "sum_squares_cpu"]

_ELEMENTS = 65536  # elements a block of the CPU
_TILE, _MOST_BLOCKS = 2048, 2048  # of the kernel: elements at a time, blocks an array
_ARRAYS = 4  # a launch
_NO_SCALING = LossScaling(None, None, 1.0, 1.0, 1, 0.0, 0.0)


@cpu.loop
def sum_squares_cpu(x) -> float:
    """Sum of squares of one (N,) array, on this thread: for who has it in the cache."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


_clip = Kernel(
    "clip_scale.cu", "clip_scale",
    ", ".join(f"const float* x{k}, int64_t n{k}, int end{k}" for k in range(_ARRAYS))
    + ", double* parts, int first, int count, uint32_t* counter, double clip_norm,"
    " const float* loss, float* scale, double* state, float* factors, double growth,"
    " double backoff, int interval, double beta1, double beta2",
    lambda grid: Geometry(grid, 256), optional="x0 x1 x2 x3 counter loss state factors",
)  # fmt: skip


def clip_scale(
    gradients: Sequence[Any],
    clip_norm: float | None = None,
    loss: Any = None,
    *,
    scaling: LossScaling | None = None,
    elsewhere: np.ndarray | None = None,
) -> Any:
    """Return the factor of all gradients, NaN where nothing may be updated.

    Parameters
    ----------
    gradients : sequence of arrays of float32
        At least one, all on one device.
    clip_norm : float, optional
        Largest norm, above 0.
    loss : float, or () or (1,) array of float32, optional
        On the CPU of any floating dtype.
    scaling : LossScaling, optional
        By whose scale the gradients are too large. It makes its step, but not on the CPU where the
        loss is not finite, or gradients are not though the scale is 1: the caller raises.
    elsewhere : (K,) array of float64 in the host's memory, optional
        Sums of squares of further gradients, see `sum_squares`.

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
    >>> gradients = np.array([3.0], np.float32), np.array([4.0], np.float32)
    >>> clip_scale(gradients, clip_norm=1.0)
    0.2
    >>> clip_scale(gradients, loss=np.float32(np.inf))
    nan
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_scale: 'clip_norm' must be positive, got {clip_norm}.")
    limit = math.inf if clip_norm is None else float(clip_norm)
    xp = arrays.namespace("clip_scale", *gradients)
    for x in gradients:
        errors.dtype("clip_scale", "gradients", x, np.float32)
    elsewhere = np.empty(0) if elsewhere is None else elsewhere
    if xp is np:
        return _on_cpu(gradients, limit, loss, scaling, elsewhere)
    if loss is not None:
        errors.dtype("clip_scale", "loss", loss, np.float32)
        if loss.size != 1:
            raise ValueError(f"clip_scale: 'loss' must be one number, got shape {loss.shape}.")
    scale = xp.empty(1, np.float32)
    last = limit, loss, scale, *(scaling or _NO_SCALING)
    _launch(xp, gradients, *last, elsewhere=arrays.copy_to(xp, elsewhere))
    return scale


def sum_squares(gradients: Sequence[Any]) -> Any:
    """Return sums of squares of gradients, to be added up: (K,) float64 on their device.

    Parameters
    ----------
    gradients : sequence of arrays of float32
        At least one, all on one device.

    Examples
    --------
    >>> float(sum_squares([np.array([3.0], np.float32), np.array([4.0], np.float32)]).sum())
    25.0
    """
    xp = arrays.namespace("sum_squares", *gradients)
    for x in gradients:
        errors.dtype("sum_squares", "gradients", x, np.float32)
    if xp is np:
        return np.array([_sum_on_cpu(x) for x in gradients])
    return _launch(xp, gradients, math.inf, None, xp.empty(1, np.float32), *_NO_SCALING)


def _on_cpu(
    gradients: Sequence[np.ndarray], limit: float, loss: Any, scaling: LossScaling | None,
    elsewhere: np.ndarray,
) -> float:  # fmt: skip
    loss_scale = 1.0 if scaling is None else float(scaling.state[0])
    norm = math.sqrt(sum(map(_sum_on_cpu, gradients)) + float(elsewhere.sum())) / loss_scale
    sound = loss is None or bool(np.isfinite(loss).all())
    finite = sound and math.isfinite(norm)
    if scaling is not None and (finite or (sound and loss_scale > 1)):
        advance(scaling, finite)
    return (min(1.0, limit / norm) if norm else 1.0) / loss_scale if finite else math.nan


def _sum_on_cpu(x: np.ndarray) -> float:
    flat = x.reshape(-1)
    parts = np.zeros(blocks(flat.size, _ELEMENTS))

    def block(i: int, j: int) -> None:
        parts[i // _ELEMENTS] = sum_squares_cpu(flat[i:j])

    cpu.parallel(block, flat.size, _ELEMENTS)
    return float(parts.sum())


def _launch(xp: ModuleType, gradients: Sequence[Any], *last: Any, elsewhere: Any = None) -> Any:
    """Launch once for every four arrays; the last launch finishes what the others began, unless
    sums of squares alone, which are returned, are asked for."""
    held = [xp.ascontiguousarray(x) for x in gradients if x.size]
    fours = [held[i : i + _ARRAYS] for i in range(0, len(held), _ARRAYS)] or [[]]
    ends = [
        list(itertools.accumulate(min(blocks(x.size, _TILE), _MOST_BLOCKS) for x in four))
        for four in fours
    ]
    grids = [four[-1] if four else 1 for four in ends]
    launched = sum(grids)
    parts = xp.empty(launched + (0 if elsewhere is None else elsewhere.size), np.float64)
    if parts.size > launched:
        parts[launched:] = elsewhere
    none = [(None, 0)] * _ARRAYS
    for i, (four, grid) in enumerate(zip(fours, grids, strict=True)):
        table = [*((x, x.size) for x in four), *none][:_ARRAYS]
        stops = [*ends[i], *[grid] * _ARRAYS]
        flat = [value for (x, n), end in zip(table, stops, strict=False) for value in (x, n, end)]
        first, final = sum(grids[:i]), elsewhere is not None and i == len(fours) - 1
        _clip(
            *flat, parts, first, parts.size, counters(xp, 1) if final else None, *last,
            macros={"VECTOR": vector_width(4, *four)}, grid=grid,
        )  # fmt: skip
    return parts


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

"""Updates of dense parameters: N of them, their state and their gradient, each a vector.

What stands around an optimizer's loop and kernel, which work on one number after the other.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.clip_scale import scale_pointer, scale_value

__all__ = ["check_dense", "dense_kernel", "update_dense"]

_ELEMENTS = 65536  # a block


def check_dense(where: str, **vectors: Any) -> ModuleType:
    """Return the array module of an update's vectors, if they are float32 of one length.

    Raises
    ------
    ValueError, TypeError
        They are not, or lie on several devices.

    Examples
    --------
    >>> check_dense("f", w=np.zeros(3, np.float32), g=np.zeros(2, np.float32))
    Traceback (most recent call last):
        ...
    ValueError: f: 'g' must have N = 3 like 'w', got shape (2,).
    """
    errors.vectors(where, **vectors)
    return arrays.namespace(where, *vectors.values())


def dense_kernel(file: str, name: str, vectors: str, constants: str, optional: str = "") -> Kernel:
    """Declare the kernel of an update of dense parameters, which `update_dense` launches.

    Parameters
    ----------
    file, name : str
    vectors : str
        Names of the parameters and their state; the gradient follows.
    constants : str
        Parameters between the gradient and the pointer `scale`.
    optional : str
        Names of pointers among the constants that may be null.

    Examples
    --------
    >>> kernel = dense_kernel("adagrad.cu", "adagrad_dense", "w s", "float lr, float eps")
    >>> kernel.geometry(N=10_000)
    Geometry(grid=10, block=256, shared=0)
    """
    pointers = ", ".join(f"float* {vector}" for vector in vectors.split())
    return Kernel(
        file, name, f"{pointers}, const float* g, {constants}, const float* scale, int64_t count",
        lambda N: Geometry(blocks(N, 1024), 256), optional=f"scale {optional}",
    )  # fmt: skip


def update_dense(
    xp: ModuleType,
    kernel: Kernel,
    loop: Any,
    vectors: tuple,
    scale: Any,
    *constants: Any,
    pointers: tuple = (),
) -> None:
    """Launch a `dense_kernel`, or spread ``loop(*vectors, (*constants, scale))`` over blocks.

    Parameters
    ----------
    xp : module
        From `check_dense`.
    vectors : tuple of (N,) arrays
        Parameters, state, and last the gradient.
    scale : float, or (1,) array of float32
        Where it is NaN, nothing is updated.
    *constants : numpy scalars
    pointers : tuple
        What the kernel takes behind the constants.

    Examples
    --------
    See `cupyrec.ops.sgd.sgd_dense`.
    """
    *own, g = vectors
    if xp is not np:
        vectors = *own, xp.ascontiguousarray(g)
        kernel(
            *vectors, *constants, *pointers, scale_pointer(xp, scale), g.size,
            macros={"VECTOR": vector_width(4, *vectors)}, N=g.size,
        )  # fmt: skip
    elif not np.isnan(scale := scale_value(scale)):
        c = *constants, np.float32(scale)
        cpu.parallel(lambda i, j: loop(*(v[i:j] for v in vectors), c), g.size, _ELEMENTS)

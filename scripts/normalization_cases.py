"""Cases of bench_kernels.py for layer and batch normalization."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import kernel_naive as naive
import numpy as np
from kernel_inputs import Work, case, floats

from cupyrec.autograd import Tensor
from cupyrec.ops.batch_norm import batch_norm
from cupyrec.ops.layer_norm import layer_norm

EPS = 1e-5


def _rows(batch: int) -> int:
    """Few would be one block."""
    return batch if batch > 16 else 16 * batch


@case("layer_norm_forward", 1024, 128)
def _layer_norm_forward(xp: ModuleType, batch: int, width: int) -> Work:
    rows = _rows(batch)
    x, weight, bias = floats(xp, rows, width), floats(xp, width), floats(xp, width)
    return Work(
        lambda: (layer_norm(x, weight, bias, eps=EPS),),
        8 * rows * width + 8 * width + 8 * rows, f"B={rows} N={width}",
        naive=lambda: (naive.layer_norm(x, weight, bias, EPS),),
    )  # fmt: skip


@case("layer_norm_backward", 1024, 128)
def _layer_norm_backward(xp: ModuleType, batch: int, width: int) -> Work:
    rows = _rows(batch)
    shapes = (rows, width), (width,), (width,)
    tensors = [Tensor(floats(xp, *shape), requires_grad=True) for shape in shapes]
    node, grad = layer_norm(*tensors, eps=EPS)._node, floats(xp, rows + 1, width)[1:]
    return Work(
        lambda: tuple(node.backward(grad)),
        12 * rows * width + 12 * width + 8 * rows, f"B={rows} N={width}",
        naive=lambda: naive.layer_norm_backward(grad, tensors[0].data, tensors[1].data, EPS),
    )  # fmt: skip


# Statistics of a batch stand before its outputs, sums over it before gradients: x, or x and dy, are
# read twice.


@case("batch_norm_forward", 1024, 128)
def _batch_norm_forward(
    xp: ModuleType, batch: int, width: int, gather: Callable | None = None
) -> Work:
    rows = _rows(batch)
    x, weight, bias = floats(xp, rows, width), floats(xp, width), floats(xp, width)
    mean, variance = xp.zeros(width, np.float32), xp.ones(width, np.float32)

    def call() -> tuple:
        y = batch_norm(x, weight, bias, mean, variance, training=True, eps=EPS, gather=gather)
        return y, mean, variance

    return Work(
        call, 12 * rows * width + 24 * width, f"B={rows} N={width}",
        naive=lambda: naive.batch_norm(x, weight, bias, mean, variance, EPS),
    )  # fmt: skip


@case("batch_norm_of_a_rank", 1024, 128)
def _batch_norm_of_a_rank(xp: ModuleType, batch: int, width: int) -> Work:
    return _batch_norm_forward(xp, batch, width, gather=lambda own: own[None])


@case("batch_norm_backward", 1024, 128)
def _batch_norm_backward(xp: ModuleType, batch: int, width: int) -> Work:
    rows = _rows(batch)
    shapes = (rows, width), (width,), (width,)
    tensors = [Tensor(floats(xp, *shape), requires_grad=True) for shape in shapes]
    running = xp.zeros(width, np.float32), xp.ones(width, np.float32)
    node = batch_norm(*tensors, *running, training=True, eps=EPS)._node
    grad = floats(xp, rows + 1, width)[1:]
    return Work(
        lambda: tuple(node.backward(grad)),
        20 * rows * width + 20 * width, f"B={rows} N={width}",
        naive=lambda: naive.batch_norm_backward(grad, tensors[0].data, tensors[1].data, EPS),
    )  # fmt: skip

"""What the dense part of a model takes in a step: parameters, operations, activations."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cupyrec.models.lr import FirstOrder
from cupyrec.nn import (
    CompressedInteraction,
    FusedCrossInteraction,
    FusedDotInteraction,
    FusedMLP,
    Module,
)

__all__ = ["DenseWork", "dense_work"]

_ALIGNED = 64  # parameters that an optimizer begins at a multiple of


class DenseWork(NamedTuple):
    """Of a model without its tables.

    Attributes
    ----------
    parameters : int
        Numbers that it learns.
    room : int
        Their numbers with what aligns them.
    buffers : int
        Numbers that are saved but not learnt.
    flops : int
        Floating-point operations of matmuls and products a sample, forward and backward.
    activations : int
        Numbers a sample that one layer writes for the next.

    Examples
    --------
    See `dense_work`.
    """

    parameters: int
    room: int
    buffers: int
    flops: int
    activations: int


def dense_work(model: Module, num_dense: int, num_tables: int, width: int) -> DenseWork:
    """Return what a model's dense part takes.

    Parameters
    ----------
    model : Module
    num_dense, num_tables : int
        Numeric features, and tables.
    width : int
        D, of a table.

    Notes
    -----
    Each weight of a layer is multiplied once a sample forward and twice backward: 6 operations. Of
    a compressed interaction it is once a column, D times as often. F features have F (F - 1) / 2
    dot products of D, so 3 F (F - 1) D operations.

    Activations are the numeric features, the vectors and each layer's outputs; the features and
    vectors side by side, if a layer takes them so; and of rows that hold a weight of the first
    order too, which is cut off, twice the vectors: a copy and its gradient, and two gradients that
    are filled up with zeros, at two arrays an activation.

    Examples
    --------
    >>> from cupyrec import models
    >>> dense_work(models.DLRM(2, 3, 4, bottom=[8], top=[8]), 2, 3, 4)
    DenseWork(parameters=157, room=576, buffers=0, flops=960, activations=45)
    """
    features, vectors = num_tables + (num_dense > 0), num_tables * width
    flops, outputs, side_by_side = 0, num_dense + vectors, False
    for module in model.modules():
        match module:
            case FusedMLP():
                flops += 6 * sum(weight.size for weight in module.weights)
                outputs += sum(bias.size for bias in module.biases)
                side_by_side |= module.weights[0].shape[1] >= vectors
            case FirstOrder() if width > 1:
                outputs += 2 * vectors
            case FusedCrossInteraction():
                flops += 6 * module.weight.size
                outputs += module.bias.size
            case CompressedInteraction():
                flops += 6 * width * sum(weight.size for weight in module.weights)
                outputs += width * sum(bias.size for bias in module.biases)
            case FusedDotInteraction() if module.pooling == "none":
                flops += 3 * features * (features - 1) * width
                outputs += features * (features - 1) // 2 + width
    outputs += side_by_side * (num_dense + vectors)
    sizes = [_size(parameter) for _, parameter in model.named_parameters()]
    room = sum(math.ceil(size / _ALIGNED) * _ALIGNED for size in sizes)
    buffers = sum(_size(buffer) for _, buffer in model.named_buffers())
    return DenseWork(sum(sizes), room, buffers, flops, outputs)


def _size(array: Any) -> int:
    return math.prod(array.shape)

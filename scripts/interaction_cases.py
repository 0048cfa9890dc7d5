"""Cases of bench_kernels.py for interactions, in floats of 32 and of 16 bits."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import kernel_naive as naive
import numpy as np
from kernel_inputs import FEATURES, Work, case, floats

from cupyrec.autograd import Tensor
from cupyrec.ops.dot_interaction import dot_interaction, dot_interaction_width
from cupyrec.ops.factorization_machine import factorization_machine


def _inputs(xp: ModuleType, batch: int, width: int, features: int, dtype: type) -> tuple[Any, ...]:
    """dense, sparse, and a gradient with a column of padding."""
    columns = dot_interaction_width(features, width, output_padding=1)
    shapes = (batch, width), (batch, features - 1, width), (batch, columns)
    return tuple(floats(xp, *shape).astype(dtype) for shape in shapes)


@case("dot_interaction_forward", 128, 16)
def _forward(
    xp: ModuleType, batch: int, width: int, features: int = FEATURES, dtype: type = np.float32
) -> Work:
    dense, sparse, out = _inputs(xp, batch, width, features, dtype)
    return Work(
        lambda: (dot_interaction(dense, sparse, output_padding=1),),
        dense.nbytes + sparse.nbytes + out.nbytes,
        f"B={batch} F={features} D={width}", dtype=str(dense.dtype),
        naive=lambda: (naive.dot_interaction(xp, dense, sparse, 1),),
    )  # fmt: skip


@case("dot_interaction_backward", 128, 16)
def _backward(
    xp: ModuleType, batch: int, width: int, features: int = FEATURES, dtype: type = np.float32
) -> Work:
    *inputs, grad = _inputs(xp, batch, width, features, dtype)
    tensors = [Tensor(x, requires_grad=True) for x in inputs]
    node = dot_interaction(*tensors, output_padding=1)._node
    ideal = sum(2 * x.nbytes for x in inputs) + grad[:, 1:].nbytes  # nobody needs the padding's
    # The node, for the tape would copy what it gives.
    return Work(
        lambda: tuple(node.backward(grad)), ideal, f"B={batch} F={features} D={width}",
        naive=lambda: naive.dot_interaction_backward(xp, grad, *inputs), dtype=str(grad.dtype),
    )  # fmt: skip


case("dot_interaction_16_forward", 128)(functools.partial(_forward, dtype=np.float16))
case("dot_interaction_16_backward", 128)(functools.partial(_backward, dtype=np.float16))


@case("factorization_machine_forward", 128, 16)
def _machine_forward(
    xp: ModuleType, batch: int, width: int, features: int = FEATURES, dtype: type = np.float32
) -> Work:
    dense, sparse, _ = _inputs(xp, batch, width, features, dtype)
    return Work(
        lambda: (factorization_machine(dense, sparse),),
        dense.nbytes + sparse.nbytes + 4 * batch,
        f"B={batch} F={features} D={width}", dtype=str(dense.dtype),
        naive=lambda: (naive.factorization_machine(xp, dense, sparse),),
    )  # fmt: skip


@case("factorization_machine_backward", 128, 16)
def _machine_backward(
    xp: ModuleType, batch: int, width: int, features: int = FEATURES, dtype: type = np.float32
) -> Work:
    *inputs, _ = _inputs(xp, batch, width, features, dtype)
    grad = floats(xp, batch, 1)
    tensors = [Tensor(x, requires_grad=True) for x in inputs]
    node = factorization_machine(*tensors)._node
    return Work(
        lambda: tuple(node.backward(grad)),
        sum(2 * x.nbytes for x in inputs) + grad.nbytes,
        f"B={batch} F={features} D={width}", dtype=str(inputs[0].dtype),
        naive=lambda: naive.factorization_machine_backward(xp, grad, *inputs),
    )  # fmt: skip


case("factorization_machine_16_forward", 128)(functools.partial(_machine_forward, dtype=np.float16))
case("factorization_machine_16_backward", 128)(
    functools.partial(_machine_backward, dtype=np.float16)
)

"""Cases of bench_kernels.py for interactions, in floats of 32 and of 16 bits."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import kernel_naive as naive
import numpy as np
from kernel_inputs import FEATURES, Rows, Work, batch_keys, case, floats

from cupyrec.autograd import Function, Tensor
from cupyrec.ops.dot_interaction import dot_interaction, dot_interaction_width
from cupyrec.ops.factorization_machine import factorization_machine
from cupyrec.ops.row_vectors import RowVectors


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


class _InRows:
    """The same, with vectors in the rows of a batch's keys."""

    def __init__(self, xp: ModuleType, batch: int, width: int, dtype: type) -> None:
        dense, _, self.grad = _inputs(xp, batch, width, FEATURES, dtype)
        keys = batch_keys(batch)
        self.rows, u = Rows(xp, len(keys.ids), width, 2), len(keys.ids)
        inverse = xp.asarray(keys.inverse).reshape(batch, -1)
        self.vectors = lambda: self.rows.flat[self.rows.rows[inverse], :width].astype(dtype)
        self.given = Tensor(dense, requires_grad=True), RowVectors(
            lambda reader: reader(self.rows.memory, self.rows.rows), inverse,
            xp.empty((0, width), np.float32), dtype, Function(),
        )  # fmt: skip
        self.read = dense.nbytes + inverse.nbytes + u * (8 + 4 * width) + self.rows.addresses
        self.shape = f"B={batch} U={u} D={width}"


@case("dot_interaction_rows_forward", 128, 16)
def _rows_forward(xp: ModuleType, batch: int, width: int, dtype: type = np.float32) -> Work:
    it = _InRows(xp, batch, width, dtype)
    dense = it.given[0].data
    return Work(
        lambda: (dot_interaction(*it.given, output_padding=1).data,), it.read + it.grad.nbytes,
        it.shape, dtype=str(dense.dtype),
        naive=lambda: (naive.dot_interaction(xp, dense, it.vectors(), 1),),
    )  # fmt: skip


@case("dot_interaction_rows_backward", 128, 16)
def _rows_backward(xp: ModuleType, batch: int, width: int, dtype: type = np.float32) -> Work:
    it = _InRows(xp, batch, width, dtype)
    node, (dense, vectors) = dot_interaction(*it.given, output_padding=1)._node, it.given
    written = dense.data.nbytes + vectors.size * dense.data.itemsize
    return Work(
        lambda: tuple(node.backward(it.grad)), it.read + it.grad[:, 1:].nbytes + written,
        it.shape, dtype=str(dense.dtype),
        naive=lambda: naive.dot_interaction_backward(xp, it.grad, dense.data, it.vectors()),
    )  # fmt: skip


case("dot_interaction_rows_16_forward", 128)(functools.partial(_rows_forward, dtype=np.float16))
case("dot_interaction_rows_16_backward", 128)(functools.partial(_rows_backward, dtype=np.float16))


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

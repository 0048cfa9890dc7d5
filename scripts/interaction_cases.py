"""Cases of bench_kernels.py for interactions, in floats of 32 and of 16 bits."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import kernel_naive as naive
import numpy as np
from kernel_inputs import FEATURES, Rows, Work, batch_keys, case, floats

from cupyrec.autograd import Function, Tensor
from cupyrec.ops.compressed_interaction import compressed_products, compressed_sums
from cupyrec.ops.cross_matrix import combine, combine_backward
from cupyrec.ops.cross_vector import cross_vector
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


# Of 39 fields of 16, a cross network's width, or the least of rows that a warp has.


@case("cross_vector_forward", 624, 128)
def _cross_forward(xp: ModuleType, batch: int, width: int) -> Work:
    rows = batch if batch > 16 else 16 * batch  # few would be one block
    x, x0, weight, bias = (floats(xp, *s) for s in [(rows, width)] * 2 + [(width,)] * 2)
    return Work(
        lambda: (cross_vector(x, x0, weight, bias),),
        12 * rows * width + 8 * width + 4 * rows, f"B={rows} N={width}",
        naive=lambda: (naive.cross_vector(x, x0, weight, bias),),
    )  # fmt: skip


@case("cross_vector_backward", 624, 128)
def _cross_backward(xp: ModuleType, batch: int, width: int) -> Work:
    rows = batch if batch > 16 else 16 * batch
    shapes = [(rows, width)] * 2 + [(width,)] * 2
    tensors = [Tensor(floats(xp, *shape), requires_grad=True) for shape in shapes]
    node, grad = cross_vector(*tensors)._node, floats(xp, rows + 1, width)[1:]
    x, x0, weight = (t.data for t in tensors[:3])
    return Work(
        lambda: tuple(node.backward(grad)),
        20 * rows * width + 12 * width + 4 * rows, f"B={rows} N={width}",
        naive=lambda: naive.cross_vector_backward(grad, x, x0, weight),
    )  # fmt: skip


# What a cross network does besides matmuls.


@case("cross_matrix_forward", 624, 128)
def _combine(xp: ModuleType, batch: int, width: int) -> Work:
    z, x0, x = (floats(xp, batch, width) for _ in range(3))
    return Work(
        lambda: (combine(z, x0, x),), 16 * batch * width, f"B={batch} N={width}",
        naive=lambda: (x0 * z + x,),
    )  # fmt: skip


@case("cross_matrix_backward", 624, 128)
def _combine_backward(xp: ModuleType, batch: int, width: int, dtype: type = np.float32) -> Work:
    grad, z, x0 = (floats(xp, batch, width) for _ in range(3))
    amp = None if dtype is np.float32 else np.dtype(dtype)
    return Work(
        lambda: combine_backward(grad, z, x0, amp),
        (16 + np.dtype(dtype).itemsize) * batch * width, f"B={batch} N={width}",
        naive=lambda: ((grad * x0).astype(dtype), grad * z), dtype=np.dtype(dtype).name,
    )  # fmt: skip


case("cross_matrix_16_backward", 624)(functools.partial(_combine_backward, dtype=np.float16))


# What xDeepFM's network does besides matmuls: rows are samples' columns.


def _compressed(xp: ModuleType, batch: int, width: int) -> tuple[Any, Any, str]:
    x, x0 = floats(xp, batch, width), floats(xp, batch, 39)
    return x, x0, f"R={batch} H={width} M=39"


@case("compressed_products", 128, 39)
def _compressed_products(xp: ModuleType, batch: int, width: int, dtype: type = np.float32) -> Work:
    x, x0, shape = _compressed(xp, batch, width)
    made = x.shape[1] * x0.shape[1]
    filled = made if dtype is np.float32 else -(-made // 8) * 8

    def naive_products() -> tuple:
        p = (x[:, :, None] * x0[:, None, :]).reshape(batch, made).astype(dtype)
        return (np.pad(p, ((0, 0), (0, filled - made))) if xp is np else p,)

    return Work(
        lambda: (compressed_products(x, x0, dtype),),
        x.nbytes + x0.nbytes + batch * filled * np.dtype(dtype).itemsize, shape,
        naive=naive_products, dtype=np.dtype(dtype).name,
    )  # fmt: skip


case("compressed_products_16", 128)(functools.partial(_compressed_products, dtype=np.float16))


@case("compressed_sums", 128, 39)
def _compressed_sums(xp: ModuleType, batch: int, width: int) -> Work:
    x, x0, shape = _compressed(xp, batch, width)
    dp = floats(xp, batch, width * 39)
    dx, dx0 = xp.empty(x.shape, np.float32), xp.empty(x0.shape, np.float32)

    def call() -> tuple:
        compressed_sums(dp, x, x0, dx, dx0)
        return dx, dx0

    def naive_sums() -> tuple:
        cube = dp.reshape(batch, width, 39)
        return (cube * x0[:, None, :]).sum(axis=2), (cube * x[:, :, None]).sum(axis=1)

    return Work(call, dp.nbytes + 2 * (x.nbytes + x0.nbytes), shape, naive=naive_sums)

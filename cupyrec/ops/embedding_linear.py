"""A linear layer on embeddings side by side, by unique vectors. B batch, F fields, D width.

    z[b] = bias + sum over f of W[:, f D : (f + 1) D] v(f, b)   W (H, F D); U unique keys
    y[b] = ReLU and dropout of z[b], or z[b] if `linear_output`

Clicks repeat ids: of N = B F vectors only U differ. So the products are taken once a key, U D H
multiply-adds instead of N D H, and rows of the products are added up; neither the (B, F D) array
nor its gradient is ever written. Keys are numbered field after field, in a field as they first
occur: those of field f are starts[f] to starts[f + 1] - 1.

    p[u] = W_f v[u]             z[b] = bias + sum over f of p[inverse[f, b]]
    dp[u] = sum of dz[b] over the b that key u occurs in, in their order
    dv[u] = W_f^T dp[u]         dW_f = sum over the u of field f of dp[u] v[u]^T

dp is made one field after the other, and used while it is in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import blocks
from cupyrec.ops.clip_scale import sum_squares_cpu
from cupyrec.ops.relu_dropout import (
    Dropout,
    bias_relu_dropout_cpu,
    check_dropout,
    relu_dropout_backward_cpu,
)
from cupyrec.ops.thin_matmul import thin_matmul
from cupyrec.ops.vector_sums import ask_for, write_sum

__all__ = ["embedding_linear", "embedding_linear_backward", "pays"]

_ROWS = 1024  # of y a block
_NEAR = 4  # rows from the one being worked on to the one whose products are asked for
_NO_DROPOUT = Dropout()


def pays(width: int, columns: int) -> bool:
    """Return whether a layer of so many columns H gains on vectors of `width` D.

    What is saved are multiply-adds, about N D H; what is added is the traffic of N rows of H.

    Examples
    --------
    >>> pays(width=32, columns=64), pays(width=16, columns=1000)
    (True, False)
    """
    return columns <= 4 * width


@cpu.exact_loop
def _add_products_cpu(products, inverse, first, y):
    """One block of samples, the first of which is number `first`."""
    fields, width, start = inverse.shape[0], y.shape[1], np.uint64(products.ctypes.data)
    for b in range(y.shape[0]):
        i, near = first + b, min(first + b + _NEAR, inverse.shape[1] - 1)
        for f in range(fields):
            ask_for(start + np.uint64(4 * inverse[f, near] * width), width)
        row = np.uint64(y.ctypes.data + 4 * b * width)
        y[b] = -np.float32(0)  # to which a vector is added without changing its bits
        whole = fields - fields % 4
        for f in range(0, whole, 4):  # four between a load and a store
            p = start + np.uint64(4 * inverse[f, i] * width)
            q = start + np.uint64(4 * inverse[f + 1, i] * width)
            r = start + np.uint64(4 * inverse[f + 2, i] * width)
            s = start + np.uint64(4 * inverse[f + 3, i] * width)
            write_sum((row, p, q, r, s), row, width)
        for f in range(whole, fields):
            write_sum((row, start + np.uint64(4 * inverse[f, i] * width)), row, width)


@cpu.exact_loop
def _add_gradients_cpu(dy, inverse, first, zeros, dproducts):
    """Sum up the rows of dy for each of one field's keys, the first of which is number `first`.

    Where a key first occurs, which then is the next one, zeros are added to: that saves a pass.
    """
    width, new = dy.shape[1], first
    start = np.uint64(dproducts.ctypes.data) - np.uint64(4 * first * width)
    nothing, grad = np.uint64(zeros.ctypes.data), np.uint64(dy.ctypes.data)
    for b in range(inverse.size):
        near = inverse[min(b + _NEAR, inverse.size - 1)]
        ask_for(start + np.uint64(4 * near * width), width)
        place, is_new = start + np.uint64(4 * inverse[b] * width), inverse[b] == new
        write_sum((nothing if is_new else place, grad), place, width)
        grad += np.uint64(4 * width)
        new += np.int64(is_new)


def embedding_linear(
    vectors: Any, starts: Any, inverse: Any, weight: Any, bias: Any, *,
    dropout: Dropout = _NO_DROPOUT, linear_output: bool = False,
) -> Any:  # fmt: skip
    """Return y (B, H) float32 of the formula above.

    Parameters
    ----------
    vectors : (U, D) array of float32
    starts : (F + 1,) array of int64
        From 0 to U, ascending. Not checked.
    inverse : (F, B) array of int64
        From starts[f] to starts[f + 1] - 1, in each row ascending where one first occurs. Not
        checked.
    weight : (H, F * D) array of float32
    bias : (H,) array of float32
    dropout : Dropout
        Not applied if `linear_output`.
    linear_output : bool
        Whether the layer goes without ReLU and dropout.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, arrays of another device than the CPU, or a rate not in
        [0, 1).

    Examples
    --------
    >>> vectors, weight = np.array([[1], [2], [4]], np.float32), np.array([[1, 10]], np.float32)
    >>> layer = np.array([0, 1, 3]), np.array([[0, 0], [1, 2]]), weight, np.ones(1, np.float32)
    >>> embedding_linear(vectors, *layer)
    array([[22.],
           [42.]], dtype=float32)
    """
    _check("embedding_linear", vectors, starts, inverse, weight)
    errors.dtype("embedding_linear", "bias", bias, np.float32)
    errors.axes("embedding_linear", weight=(weight, "H columns"), bias=(bias, "H"))
    check_dropout("embedding_linear", "dropout", dropout, inverse.shape[1])
    (fields, samples), width, bias = inverse.shape, vectors.shape[1], np.ascontiguousarray(bias)
    products = arrays.empty((len(vectors), len(weight)), np.float32)
    y = arrays.empty((samples, len(weight)), np.float32)

    def multiply(f: int, _: int) -> None:
        own = slice(starts[f], starts[f + 1])
        thin_matmul(vectors[own], weight[:, f * width : (f + 1) * width].T, products[own])

    def add(i: int, j: int) -> None:
        _add_products_cpu(products, inverse, i, y[i:j])
        if linear_output:
            y[i:j] += bias
        else:
            bias_relu_dropout_cpu(
                y[i:j], bias, *dropout.loop_arguments(bias.dtype), dropout.first + i
            )

    with cpu.serial_blas(), np.errstate(over="ignore", invalid="ignore"):  # inf and NaN stay
        cpu.parallel(multiply, fields, 1)
        cpu.parallel(add, samples, _ROWS)
    return y


def embedding_linear_backward(
    dy: Any, y: Any, vectors: Any, starts: Any, inverse: Any, weight: Any, *,
    dropout: Dropout = _NO_DROPOUT, linear_output: bool = False,
) -> tuple[Any, Any, Any, float]:  # fmt: skip
    """Return the gradients of `vectors`, `weight` and `bias`, and the first one's squares.

    Parameters
    ----------
    dy, y : (B, H) arrays of float32
        y as `embedding_linear` returned it.
    vectors, starts, inverse, weight, dropout, linear_output
        As `embedding_linear` took them.

    Returns
    -------
    dvectors : (U, D) array of float32
    dweight : (H, F * D) array of float32
    dbias : (H,) array of float32
    squares : float
        Sum of the squares of `dvectors`, taken while they are in the cache: the norm asks for it.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree.

    Examples
    --------
    >>> vectors, weight = np.array([[1], [2], [4]], np.float32), np.array([[1, 10]], np.float32)
    >>> layer = vectors, np.array([0, 1, 3]), np.array([[0, 0], [1, 2]]), weight
    >>> y = embedding_linear(*layer, np.ones(1, np.float32))
    >>> embedding_linear_backward(np.ones_like(y), y, *layer)
    (array([[ 2.], [10.], [10.]], dtype=float32), array([[2., 6.]], dtype=float32),
     array([2.], dtype=float32), 204.0)
    """
    _check("embedding_linear_backward", vectors, starts, inverse, weight)
    for name, array in [("dy", dy), ("y", y)]:
        errors.dtype("embedding_linear_backward", name, array, np.float32)
    errors.axes("embedding_linear_backward", dy=(dy, "B H"), y=(y, "B H"),
                inverse=(inverse, "F B"), weight=(weight, "H columns"))  # fmt: skip
    fields, width = len(inverse), vectors.shape[1]
    dz, dvectors, dweight = (arrays.empty(a.shape, np.float32) for a in (dy, vectors, weight))
    sums = np.zeros((blocks(len(dy), _ROWS), len(weight)), np.float32)
    squares = np.zeros(fields)
    spare: list[np.ndarray] = []  # for dp of one field: one a thread
    largest = int(np.diff(starts).max(initial=0))
    zeros = np.full(len(weight), -0.0, np.float32)  # adding them changes no bit

    def deactivate(i: int, j: int) -> None:
        np.copyto(dz[i:j], dy[i:j])
        if linear_output:
            np.sum(dz[i:j], axis=0, out=sums[i // _ROWS])
        else:
            scale = np.float32(dropout.scale)
            relu_dropout_backward_cpu(dz[i:j], y[i:j], scale, sums[i // _ROWS])

    def multiply(f: int, _: int) -> None:
        own, columns = slice(starts[f], starts[f + 1]), slice(f * width, (f + 1) * width)
        try:
            room = spare.pop()
        except IndexError:
            room = arrays.empty((largest, len(weight)), np.float32)
        dproducts = room[: own.stop - own.start]
        _add_gradients_cpu(dz, inverse[f], starts[f], zeros, dproducts)
        thin_matmul(dproducts, weight[:, columns], dvectors[own])  # while they are in the cache
        squares[f] = sum_squares_cpu(dvectors[own].reshape(-1))
        thin_matmul(dproducts.T, vectors[own], dweight[:, columns])
        spare.append(room)

    cpu.parallel(deactivate, len(dy), _ROWS)
    with cpu.serial_blas():
        cpu.parallel(multiply, fields, 1)
    return dvectors, dweight, sums.sum(axis=0), float(squares.sum())


def _check(where: str, vectors: Any, starts: Any, inverse: Any, weight: Any) -> None:
    if arrays.namespace(where, vectors, starts, inverse, weight) is not np:
        raise TypeError(f"{where}: arrays must be on the CPU, got {arrays.device(vectors)}.")
    for name, array in [("vectors", vectors), ("weight", weight)]:
        errors.dtype(where, name, array, np.float32)
    for name, array in [("starts", starts), ("inverse", inverse)]:
        errors.dtype(where, name, array, np.int64)
    errors.axes(where, starts=(starts, "fields"), inverse=(inverse, "F B"))
    columns = len(inverse) * vectors.shape[1]
    errors.axes(where, vectors=(vectors, "U D"), weight=(weight, f"H {columns}"))
    if len(starts) != len(inverse) + 1:
        raise ValueError(
            f"{where}: 'starts' must have F + 1 = {len(inverse) + 1} numbers, "
            f"got shape {starts.shape}."
        )

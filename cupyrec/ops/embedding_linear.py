"""A linear layer on embeddings side by side, by unique vectors. B batch, F fields, D width.

    y[b] = sum over f of W[:, f D : (f + 1) D] v(b, f)          W (H, F D); U unique keys

Clicks repeat ids: of N = B F vectors only U differ. So the products are taken once a key, U D H
multiply-adds instead of N D H, and rows of the products are added up; neither the (B, F D) array
nor its gradient is ever written. Keys are numbered field after field: those of field f are
starts[f] to starts[f + 1] - 1.

    p[u] = W_f v[u]             y[b] = sum over f of p[inverse[b, f]]
    dp[u] = sum of dy[b] over the b that key u occurs in
    dv[u] = W_f^T dp[u]         dW_f = sum over the u of field f of dp[u] v[u]^T
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.ops.bags import pool_rows
from cupyrec.ops.embedding_rows import RowMemory
from cupyrec.ops.segment_sum import segment_sum

__all__ = ["embedding_linear", "embedding_linear_backward", "pays"]

_NOWHERE = RowMemory(np.empty(0, np.uint64), 0, 1 << 20)  # of rows that all lie in `unseen`


def pays(width: int, columns: int) -> bool:
    """Return whether a layer of so many columns H gains on vectors of `width` D.

    What is saved are multiply-adds, about N D H; what is added is the traffic of N rows of H.

    Examples
    --------
    >>> pays(width=32, columns=64), pays(width=16, columns=1000)
    (True, False)
    """
    return columns <= 4 * width


def embedding_linear(vectors: Any, starts: Any, inverse: Any, weight: Any) -> Any:
    """Return y (B, H) float32 of the formula above.

    Parameters
    ----------
    vectors : (U, D) array of float32
    starts : (F + 1,) array of int64
    inverse : (B, F) array of int64
    weight : (H, F * D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, or arrays of another device than the CPU.

    Examples
    --------
    >>> vectors, weight = np.array([[1], [2], [4]], np.float32), np.array([[1, 10]], np.float32)
    >>> embedding_linear(vectors, np.array([0, 1, 3]), np.array([[0, 1], [0, 2]]), weight)
    array([[21.],
           [41.]], dtype=float32)
    """
    _check("embedding_linear", vectors, starts, inverse, weight)
    width, columns = vectors.shape[1], len(weight)
    products = arrays.empty((len(vectors), columns), np.float32)

    def block(first: int, stop: int) -> None:
        for f in range(first, stop):
            own = slice(starts[f], starts[f + 1])
            np.matmul(vectors[own], weight[:, f * width : (f + 1) * width].T, out=products[own])

    with cpu.serial_blas():
        cpu.parallel(block, inverse.shape[1], 1)
    y = arrays.empty((len(inverse), columns), np.float32)
    rows, offsets = -1 - np.arange(len(vectors)), np.arange(len(inverse) + 1) * inverse.shape[1]
    flat = np.ascontiguousarray(inverse).reshape(-1)
    pool_rows(_NOWHERE, rows, flat, products, offsets, None, False, y)
    return y


def embedding_linear_backward(
    dy: Any, vectors: Any, starts: Any, inverse: Any, weight: Any, offsets: Any, positions: Any
) -> tuple[Any, Any]:
    """Return the gradients of `vectors` and `weight`.

    Parameters
    ----------
    dy : (B, H) array of float32
    vectors, starts, inverse, weight
        As `embedding_linear` took them.
    offsets, positions
        Of the keys' occurrences f * B + b, as `cupyrec.ops.unique_keys` gives them.

    Returns
    -------
    dvectors : (U, D) array of float32
    dweight : (H, F * D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree.

    Examples
    --------
    >>> vectors, weight = np.array([[1], [2], [4]], np.float32), np.array([[1, 10]], np.float32)
    >>> forward = vectors, np.array([0, 1, 3]), np.array([[0, 1], [0, 2]]), weight
    >>> dy, places = np.ones((2, 1), np.float32), (np.array([0, 2, 3, 4]), np.array([0, 1, 2, 3]))
    >>> embedding_linear_backward(dy, *forward, *places)
    (array([[ 2.], [10.], [10.]], dtype=float32), array([[2., 6.]], dtype=float32))
    """
    _check("embedding_linear_backward", vectors, starts, inverse, weight)
    errors.dtype("embedding_linear_backward", "dy", dy, np.float32)
    errors.axes("embedding_linear_backward", dy=(dy, "B H"), inverse=(inverse, "B F"),
                weight=(weight, "H columns"))  # fmt: skip
    (samples, fields), width = inverse.shape, vectors.shape[1]
    index = np.tile(np.arange(samples), fields)
    dproducts = segment_sum(dy, offsets, positions, index=index)
    dvectors = arrays.empty(vectors.shape, np.float32)
    dweight = arrays.empty(weight.shape, np.float32)

    def block(first: int, stop: int) -> None:
        for f in range(first, stop):
            own, columns = slice(starts[f], starts[f + 1]), slice(f * width, (f + 1) * width)
            np.matmul(dproducts[own], weight[:, columns], out=dvectors[own])
            np.matmul(dproducts[own].T, vectors[own], out=dweight[:, columns])

    with cpu.serial_blas():
        cpu.parallel(block, fields, 1)
    return dvectors, dweight


def _check(where: str, vectors: Any, starts: Any, inverse: Any, weight: Any) -> None:
    if arrays.namespace(where, vectors, starts, inverse, weight) is not np:
        raise TypeError(f"{where}: arrays must be on the CPU, got {arrays.device(vectors)}.")
    for name, array in [("vectors", vectors), ("weight", weight)]:
        errors.dtype(where, name, array, np.float32)
    for name, array in [("starts", starts), ("inverse", inverse)]:
        errors.dtype(where, name, array, np.int64)
    errors.axes(where, starts=(starts, "fields"), inverse=(inverse, "B F"))
    columns = inverse.shape[1] * vectors.shape[1]
    errors.axes(where, vectors=(vectors, "U D"), weight=(weight, f"H {columns}"))
    if len(starts) != inverse.shape[1] + 1:
        raise ValueError(
            f"{where}: 'starts' must have F + 1 = {inverse.shape[1] + 1} numbers, "
            f"got shape {starts.shape}."
        )

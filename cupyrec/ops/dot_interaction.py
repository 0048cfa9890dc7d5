"""Dot products between all pairs of features. B batch, F features, D width, C = D if concat else 0.

    X = [dense, sparse]  (B, F, D)
    out[b] = [ dense[b] if `output_concat` | X[b, r] . X[b, c], rows r, c < r (c <= r with
               `self_interaction`) | zeros(`output_padding`) ]

    S[r, c] = S[c, r] = grad of pair (r, c); S[r, r] = 2 x grad of (r, r), or 0
    dX[b] = S[b] @ X[b]; the concatenated part of the gradient is added to row 0

Pairs are the lower triangle in row-major order, as in DLRM (Naumov et al. 2019) and OneFlow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.autograd import Function, Tensor

__all__ = ["dot_interaction", "dot_interaction_width"]

_SAMPLES = 64  # samples a block


@cpu.loop
def _load(dense, sparse, b, x):
    """Copy sample b's features to the rows of the scratch array x, whose further rows are zero."""
    top = dense.shape[1] > 0
    if top:
        x[0] = dense[b]
    for f in range(sparse.shape[1]):
        for d in range(sparse.shape[2]):
            x[f + top, d] = sparse[b, f, d]


@cpu.loop
def _forward_cpu(dense, sparse, self_interaction, concat, out):
    """One block of samples. Tiles of 4 x 2 dot products keep their sums in registers."""
    batch, features, width = sparse.shape
    features += dense.shape[1] > 0
    x = np.zeros(((features + 3) // 4 * 4, width), sparse.dtype)
    s = np.empty((x.shape[0], x.shape[0]), sparse.dtype)
    zero = sparse.dtype.type(0)
    for b in range(batch):
        _load(dense, sparse, b, x)
        for r in range(0, features, 4):
            for c in range(0, r + 4, 2):
                s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = zero
                for d in range(width):
                    left, right = x[c, d], x[c + 1, d]
                    s00 += x[r, d] * left
                    s01 += x[r, d] * right
                    s10 += x[r + 1, d] * left
                    s11 += x[r + 1, d] * right
                    s20 += x[r + 2, d] * left
                    s21 += x[r + 2, d] * right
                    s30 += x[r + 3, d] * left
                    s31 += x[r + 3, d] * right
                s[r, c], s[r, c + 1] = s00, s01
                s[r + 1, c], s[r + 1, c + 1] = s10, s11
                s[r + 2, c], s[r + 2, c + 1] = s20, s21
                s[r + 3, c], s[r + 3, c + 1] = s30, s31
        at = 0
        if concat:
            for d in range(width):
                out[b, d] = x[0, d]
            at = width
        for r in range(features):
            for c in range(r + self_interaction):
                out[b, at] = s[r, c]
                at += 1
        out[b, at:] = zero


@cpu.loop
def _store(r, y, b, ddense, dsparse):
    """Write the gradient of sample b's feature r."""
    top = ddense.shape[1] > 0
    if r == 0 and top:
        for d in range(y.size):
            ddense[b, d] = y[d]
    else:
        for d in range(y.size):
            dsparse[b, r - top, d] = y[d]


@cpu.loop
def _backward_cpu(grad, dense, sparse, self_interaction, concat, ddense, dsparse):
    """One block of samples. Four features a turn are added to two rows of dX, y and z."""
    batch, features, width = sparse.shape
    top = 1 if dense.shape[1] > 0 else 0
    features += top
    padded = (features + 3) // 4 * 4
    x = np.zeros((padded, width), sparse.dtype)
    y, z = np.empty(width, sparse.dtype), np.empty(width, sparse.dtype)
    s = np.zeros((padded, padded), sparse.dtype)
    for b in range(batch):
        _load(dense, sparse, b, x)
        at = width if concat else 0
        for r in range(features):
            for c in range(r):
                s[r, c] = s[c, r] = grad[b, at]
                at += 1
            if self_interaction:
                s[r, r] = 2 * grad[b, at]
                at += 1
        for r in range(0, features, 2):
            for d in range(width):
                y[d] = grad[b, d] if r == 0 and concat else 0
                z[d] = 0
            for c in range(0, features, 4):
                s0, s1, s2, s3 = s[r, c], s[r, c + 1], s[r, c + 2], s[r, c + 3]
                t0, t1, t2, t3 = s[r + 1, c], s[r + 1, c + 1], s[r + 1, c + 2], s[r + 1, c + 3]
                x0, x1, x2, x3 = x[c], x[c + 1], x[c + 2], x[c + 3]
                for d in range(width):
                    y[d] += s0 * x0[d] + s1 * x1[d] + s2 * x2[d] + s3 * x3[d]
                    z[d] += t0 * x0[d] + t1 * x1[d] + t2 * x2[d] + t3 * x3[d]
            _store(r, y, b, ddense, dsparse)
            if r + 1 < features:
                _store(r + 1, z, b, ddense, dsparse)


class _DotInteraction(Function):
    def forward(self, dense, sparse, self_interaction, output_concat, output_padding):
        if dense is None:  # the loops know it by its width of 0
            dense = np.empty((sparse.shape[0], 0), sparse.dtype)
        self.dense, self.sparse = np.ascontiguousarray(dense), np.ascontiguousarray(sparse)
        self.options = bool(self_interaction), bool(output_concat)
        batch, features, width = sparse.shape
        columns = dot_interaction_width(
            features + (self.dense.shape[1] > 0), width, self_interaction=self_interaction,
            output_concat=output_concat, output_padding=output_padding,
        )  # fmt: skip
        out = arrays.empty((batch, columns), sparse.dtype)

        def block(i: int, j: int) -> None:
            _forward_cpu(self.dense[i:j], self.sparse[i:j], *self.options, out[i:j])

        cpu.parallel(block, batch, _SAMPLES)
        return out

    def backward(self, grad):
        grad = np.ascontiguousarray(grad)
        ddense, dsparse = (arrays.empty(a.shape, a.dtype) for a in (self.dense, self.sparse))

        def block(i: int, j: int) -> None:
            _backward_cpu(
                grad[i:j], self.dense[i:j], self.sparse[i:j], *self.options,
                ddense[i:j], dsparse[i:j],
            )  # fmt: skip

        cpu.parallel(block, len(grad), _SAMPLES)
        return ddense, dsparse


def dot_interaction_width(
    features: int,
    width: int,
    *,
    self_interaction: bool = False,
    output_concat: bool = True,
    output_padding: int = 0,
) -> int:
    """Return the number of output columns for `features` features (dense included) of `width`.

    Examples
    --------
    >>> dot_interaction_width(27, 128)
    479
    """
    pairs = features * (features + 1 if self_interaction else features - 1) // 2
    return (width if output_concat else 0) + pairs + output_padding


def dot_interaction(
    dense: Any,
    sparse: Any,
    *,
    self_interaction: bool = False,
    output_concat: bool = True,
    output_padding: int = 0,
) -> Any:
    """Return the pairwise dot products of all features of a sample.

    Parameters
    ----------
    dense : (B, D) array or Tensor of float32 or float64, or None
        The first feature. Without it `output_concat` must be False.
    sparse : (B, F, D) array or Tensor of the same dtype
        The other features.
    self_interaction : bool
        Whether a feature's product with itself is among the pairs.
    output_concat : bool
        Whether `dense` is put before the products.
    output_padding : int
        Number of zero columns at the end.

    Returns
    -------
    (B, `dot_interaction_width`) array or Tensor

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree.

    Examples
    --------
    >>> dense, sparse = np.array([[1.0, 2.0]]), np.array([[[3.0, 4.0], [5.0, 6.0]]])
    >>> dot_interaction(dense, sparse)
    array([[ 1.,  2., 11., 17., 39.]])
    """
    where = "dot_interaction"
    raw = [a.data if isinstance(a, Tensor) else a for a in (dense, sparse)]
    arrays.namespace(where, raw[1])
    errors.dtype(where, "sparse", raw[1], np.float32, np.float64)
    if raw[0] is None:
        errors.axes(where, sparse=(raw[1], "B F D"))
        if output_concat:
            raise ValueError(f"{where}: 'output_concat' needs 'dense', got None.")
    else:
        arrays.namespace(where, raw[0])
        errors.dtype(where, "dense", raw[0], raw[1].dtype)
        errors.axes(where, dense=(raw[0], "B D"), sparse=(raw[1], "B F D"))
    if raw[1].shape[2] == 0:
        raise ValueError(f"{where}: D must be at least 1, got shape {raw[1].shape}.")
    if output_padding < 0:
        raise ValueError(f"{where}: 'output_padding' must be at least 0, got {output_padding}.")
    return _DotInteraction.apply(
        dense, sparse, self_interaction=self_interaction, output_concat=output_concat,
        output_padding=output_padding,
    )  # fmt: skip

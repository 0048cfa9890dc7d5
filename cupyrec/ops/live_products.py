"""Weighted sums of the products of a CIN layer, of what ReLU has let through of x alone.

The names are those of compressed_interaction.py; M' and O' are M and O filled with zeros.

Where x[r, i] is 0 so are M products. For each column of x the rows where it is not are taken
together, half of all in a new network: their products, gradients and those of weights are thin
matmuls, of M terms or columns. Rows are padded with zeros to whole tiles.
"""

from __future__ import annotations

import numpy as np

from cupyrec import cpu
from cupyrec.ops.thin_matmul import THIN_ROWS, thin_matmul_cpu

__all__ = ["live_products_cpu", "live_sums_cpu"]


@cpu.loop
def _live_products(x, x0, i, live, p):
    """Write products of column i to p, and their rows' numbers to `live`; return both counts."""
    count, zero = 0, x.dtype.type(0)
    for r in range(x.shape[0]):
        live[count] = r
        count += x[r, i] != zero
    for k in range(count):
        r = live[k]
        factor = x[r, i]
        for j in range(x0.shape[1]):
            p[k, j] = factor * x0[r, j]
    whole = -(-count // THIN_ROWS) * THIN_ROWS
    p[count:whole] = 0
    return count, whole


@cpu.loop
def live_products_cpu(x, x0, weight, terms, z):
    """Add the weighted sums of a block of rows to z. x (R, H), x0 (R, M'), weight (H, M', O').

    Of the M' terms of a column `terms` are not padding.
    """
    most = x.shape[0] + THIN_ROWS
    live = np.empty(most, np.int64)
    p, sums = np.empty((most, x0.shape[1]), x.dtype), np.empty((most, z.shape[1]), x.dtype)
    for i in range(x.shape[1]):
        count, whole = _live_products(x, x0, i, live, p)
        thin_matmul_cpu(p[:whole, :terms], weight[i, :terms], sums[:whole], False)
        for k in range(count):
            r = live[k]
            for o in range(z.shape[1]):
                z[r, o] += sums[k, o]


@cpu.loop
def live_sums_cpu(dz, x, x0, turned, terms, dx, dx0, dweight):
    """Write dx, and add to dx0 and dweight. turned (H, O', M'), dweight (H, M', O')."""
    most, tiles = x.shape[0] + THIN_ROWS, -(-terms // THIN_ROWS) * THIN_ROWS
    live = np.empty(most, np.int64)
    p, dp = np.empty((most, x0.shape[1]), x.dtype), np.empty((most, x0.shape[1]), x.dtype)
    own = np.empty((most, dz.shape[1]), x.dtype)
    dx[:] = 0
    for i in range(x.shape[1]):
        count, whole = _live_products(x, x0, i, live, p)
        for k in range(count):
            r = live[k]
            for o in range(dz.shape[1]):
                own[k, o] = dz[r, o]
        own[count:whole] = 0
        thin_matmul_cpu(p[:whole, :tiles].T, own[:whole], dweight[i, :tiles], True)
        thin_matmul_cpu(own[:whole], turned[i], dp[:whole], False)
        for k in range(count):
            r = live[k]
            total, factor = x.dtype.type(0), x[r, i]
            for j in range(x0.shape[1]):
                total += dp[k, j] * x0[r, j]
                dx0[r, j] += dp[k, j] * factor
            dx[r, i] = total

"""Dot products between all pairs of features. B batch, F features, D width, C = D if concat else 0.

    X = [dense, sparse]  (B, F, D)
    out[b] = [ dense[b] if `output_concat` | X[b, r] . X[b, c], rows r, c < r (c <= r with
               `self_interaction`) | zeros(`output_padding`) ]

    S[r, c] = S[c, r] = grad of pair (r, c); S[r, r] = 2 x grad of (r, r), or 0
    dX[b] = S[b] @ X[b]; the concatenated part of the gradient is added to row 0

Pairs are the lower triangle in row-major order, as in DLRM (Naumov et al. 2019) and OneFlow.
Floats of 16 bits have kernels of their own, in dot_interaction_16.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.autograd import Function, Tensor
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops import dot_interaction_16
from cupyrec.ops.halves import in_float32
from cupyrec.ops.row_vectors import OPTIONAL, PARAMETERS, RowVectors, kernel_source

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


# Kernels: how they are cut depends on sizes alone, and with it the order of summation

_MAX_FEATURES = 64
_MAX_TILE = 8  # 9 x 9 sums and what they are made of leave room for 12 warps a multiprocessor
_MAX_ROW = 32 << 10  # bytes of a sample that a block of the forward kernel holds at once
_MAX_SHARED = 96 << 10  # bytes of a block: two of them share a multiprocessor
_BANKS = 32


def _padded(least: int, residue: int) -> int:
    """The least number from `least` on that is `residue` modulo the banks of shared memory."""
    return least + (residue - least) % _BANKS


def _sources(features: int, gathered: int) -> int:
    """Floats of shared memory a sample for the addresses of rows: an even number of them."""
    return blocks(features, 2) * 4 if gathered else 0


def _cut_forward(
    features: int, width: int, pairs: int, head: int, sources: int = 0
) -> dict[str, int]:
    """Macros of the forward kernel; its .cu says what they mean."""
    # A tile of T x T products takes T * T multiplications and 2 T loads, each as dear as four.
    tile = min(
        range(1, min(features, _MAX_TILE) + 1),
        key=lambda t: blocks(features, t) * (blocks(features, t) + 1) * (t * t + 8 * t),
    )
    tiles = blocks(features, tile) * (blocks(features, tile) + 1) // 2
    lane = math.gcd(width, 4)
    pieces, split = width // lane, 1
    # Twice as many lanes a tile: while each has two pieces to add up, and few lanes have none.
    while (
        2 * split * lane <= _BANKS
        and 2 * split * tiles <= 320
        and 2 * split < pieces
        and blocks(pieces, 2 * split) * 2 * split <= 1.25 * pieces
    ):
        split *= 2
    chunk = width
    if 4 * features * width > _MAX_ROW:
        unit = split * lane
        parts = blocks(width, _MAX_ROW // 4 // features // unit * unit)
        chunk = blocks(blocks(width, parts), unit) * unit
    if split >= 8 or chunk < width:  # the pairs are written over the features, in `dense`'s wake
        behind = head if chunk == width else 0
        stride, pairs_stride = _padded(max(features * chunk, behind + pairs), 16), 0
        fits = 8 * (stride + sources) <= _MAX_SHARED and 2 * tiles * split <= 256
        samples = 2 if chunk == width and fits else 1
    else:  # lanes of a warp take several samples, which the two strides keep in different banks
        stride = _padded(features * chunk, split * lane % _BANKS)
        pairs_stride = _padded(pairs, split)
        samples = 32 // split
        each = 4 * (stride + pairs_stride + sources)
        while samples > 1 and (samples * each > _MAX_SHARED or samples * tiles * split > 320):
            samples //= 2
    threads = blocks(samples * tiles * split, 32) * 32
    # Where rows come in chunks, what the loop over them keeps takes registers too.
    resident = 1 if tile == _MAX_TILE else 640 if chunk == width else 512
    return {
        "TILE": tile, "SPLIT": split, "LANE": lane, "CHUNK": chunk, "STRIDE": stride,
        "PAIRS_STRIDE": pairs_stride, "SAMPLES": samples, "THREADS": threads,
        "BLOCKS": max(1, resident // threads),
    }  # fmt: skip


def _cut_backward(
    features: int, width: int, pairs: int, head: int, vector: int, sources: int = 0
) -> dict[str, int]:
    """Macros of the backward kernel."""
    groups = 1 if features <= 16 else 2 if features <= 32 else 4
    if width <= 32 and features > 16:  # shared memory bounds the samples: more threads for each
        groups *= 2
    pieces = width // vector
    rounds = min(4 // vector, pieces)
    team = min(blocks(pieces, rounds), 128 // groups)
    rows = blocks(features, groups)
    s_stride = _padded(features * groups * blocks(rows, 4) * 4, 4)
    grad_stride = blocks(head + pairs, 4) * 4
    # Rows that are no whole sectors, or few of them, are read and written all at once.
    staged = team * rounds >= pieces and (
        width < 64 or (width % 8 != 0 and 4 * features * width <= _MAX_ROW)
    )
    stride = _padded(features * width, team * vector % _BANKS) if staged else 0
    each = 4 * (s_stride + grad_stride + stride + sources)
    samples = max(1, min(128 // groups // team, _MAX_SHARED // each))
    return {
        "GROUPS": groups, "PER_THREAD": rounds * vector, "TEAM": team, "S_STRIDE": s_stride,
        "GRAD_STRIDE": grad_stride, "STAGED": int(staged), "STRIDE": stride, "CHUNK": width,
        "SAMPLES": samples, "THREADS": blocks(samples * team, 32 // groups) * 32,
    }  # fmt: skip


def _geometry(B: int, samples: int, threads: int, floats: int) -> Geometry:
    """`floats` are those of shared memory a sample."""
    return Geometry(blocks(B, samples), threads, 4 * samples * floats)


_forward = Kernel(
    "dot_interaction.cu", "dot_interaction_forward",
    f"const float* dense, const float* sparse, {PARAMETERS}, float* out, int64_t batch",
    _geometry, optional=OPTIONAL,
)  # fmt: skip
_backward = Kernel(
    "dot_interaction.cu", "dot_interaction_backward",
    f"const float* grad, const float* dense, const float* sparse, {PARAMETERS}, float* ddense,"
    " float* dsparse, int64_t batch",
    _geometry, optional=OPTIONAL,
)  # fmt: skip


class _Sizes(NamedTuple):
    features: int  # `dense` among them
    width: int
    pairs: int
    head: int  # columns of the output before the pairs


def _sizes(dense, sparse, self_interaction: bool, concat: bool) -> _Sizes:
    features, width = sparse.shape[1] + (dense.shape[1] > 0), sparse.shape[2]
    pairs = dot_interaction_width(
        features, width, self_interaction=self_interaction, output_concat=False
    )
    return _Sizes(features, width, pairs, width if concat else 0)


def _macros(dense, sizes: _Sizes, options: tuple[bool, bool, int]) -> dict[str, int]:
    self_interaction, concat, padding = options
    return {
        "FEATURES": sizes.features, "WIDTH": sizes.width, "DENSE": int(dense.shape[1] > 0),
        "SELF": int(self_interaction), "CONCAT": int(concat), "PADDING": padding,
    }  # fmt: skip


def _forward_device(dense, sparse, options: tuple[bool, bool, int], out) -> None:
    sizes = _sizes(dense, sparse, *options[:2])
    given, gathered, aligned = kernel_source(sparse)
    macros = _macros(dense, sizes, options) | gathered
    if sparse.dtype in arrays.HALVES:
        dot_interaction_16.forward(dense, given, aligned, macros, out)
        return
    sources = _sources(sizes.features, macros["GATHERED"])
    cut = _cut_forward(*sizes, sources)
    macros |= {"VECTOR": vector_width(sizes.width, dense, aligned)} | cut
    _forward(
        dense, *given, out, len(sparse), macros=macros, B=len(sparse), samples=cut["SAMPLES"],
        threads=cut["THREADS"], floats=cut["STRIDE"] + cut["PAIRS_STRIDE"] + sources,
    )  # fmt: skip


def _backward_device(grad, dense, sparse, options: tuple[bool, bool, int], ddense, dsparse) -> None:
    sizes = _sizes(dense, sparse, *options[:2])
    given, gathered, aligned = kernel_source(sparse)
    macros = _macros(dense, sizes, options) | gathered
    if sparse.dtype in arrays.HALVES:
        dot_interaction_16.backward(grad, dense, given, aligned, macros, ddense, dsparse)
        return
    vector = vector_width(sizes.width, dense, aligned, ddense, dsparse)
    sources = _sources(sizes.features, macros["GATHERED"])
    cut = _cut_backward(*sizes, vector, sources)
    floats = cut["S_STRIDE"] + cut["GRAD_STRIDE"] + cut["STRIDE"] + sources
    _backward(
        grad, dense, *given, ddense, dsparse, len(sparse),
        macros=macros | {"VECTOR": vector} | cut, B=len(sparse), samples=cut["SAMPLES"],
        threads=cut["THREADS"], floats=floats,
    )  # fmt: skip


class _DotInteraction(Function):
    @staticmethod
    def operand(x):
        in_rows = isinstance(x, RowVectors) and arrays.device(x.held) != "cpu"
        return x if in_rows else Function.operand(x)

    def forward(self, dense, sparse, self_interaction, output_concat, output_padding):
        in_rows = isinstance(sparse, RowVectors)
        xp = arrays.namespace("dot_interaction", sparse.held if in_rows else sparse)
        if dense is None:  # loops and kernels know it by its width of 0
            dense = xp.empty((sparse.shape[0], 0), sparse.dtype)
        self.dense = xp.ascontiguousarray(dense)
        self.sparse = sparse if in_rows else xp.ascontiguousarray(sparse)
        self.options = bool(self_interaction), bool(output_concat), int(output_padding)
        batch, features, width = sparse.shape
        features += self.dense.shape[1] > 0
        columns = dot_interaction_width(
            features, width, self_interaction=self_interaction, output_concat=output_concat,
            output_padding=output_padding,
        )  # fmt: skip
        if xp is np:
            out = arrays.empty((batch, columns), sparse.dtype)

            def block(i: int, j: int) -> None:
                inputs = self.dense[i:j], self.sparse[i:j]
                in_float32(_forward_cpu, inputs, self.options[:2], [out[i:j]])

            cpu.parallel(block, batch, _SAMPLES)
        elif columns == output_padding:  # no products, nothing else
            out = xp.zeros((batch, columns), sparse.dtype)
        else:
            out = xp.empty((batch, columns), sparse.dtype)
            _forward_device(self.dense, self.sparse, self.options, out)
        return out

    def backward(self, grad):
        xp = arrays.namespace("dot_interaction", grad)
        grad = xp.ascontiguousarray(grad)
        make = arrays.empty if xp is np else xp.empty
        ddense, dsparse = (make(a.shape, a.dtype) for a in (self.dense, self.sparse))
        if xp is np:

            def block(i: int, j: int) -> None:
                inputs = grad[i:j], self.dense[i:j], self.sparse[i:j]
                in_float32(_backward_cpu, inputs, self.options[:2], [ddense[i:j], dsparse[i:j]])

            cpu.parallel(block, len(grad), _SAMPLES)
        elif self.dense.size or self.sparse.size:
            _backward_device(grad, self.dense, self.sparse, self.options, ddense, dsparse)
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

    Of 16 bits they are summed up in float32 and rounded once; so are their gradients.

    Parameters
    ----------
    dense : (B, D) array or Tensor of float32, float64, float16 or bfloat16 (ml_dtypes'), or None
        The first feature. Without it `output_concat` must be False.
    sparse : (B, F, D) array or Tensor of the same dtype
        The other features. `RowVectors` are read from their rows on a device, forward and backward.
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
        Shapes, dtypes or devices that don't agree; on a device other than the CPU also float64, and
        more than 64 features.

    Examples
    --------
    >>> dense, sparse = np.array([[1.0, 2.0]]), np.array([[[3.0, 4.0], [5.0, 6.0]]])
    >>> dot_interaction(dense, sparse)
    array([[ 1.,  2., 11., 17., 39.]])
    """
    where = "dot_interaction"
    raw = [a if isinstance(a, RowVectors) else Function.operand(a) for a in (dense, sparse)]
    held = [a.held if isinstance(a, Tensor) else a for a in (sparse, dense) if a is not None]
    arrays.namespace(where, None if sparse is None else held[0])
    errors.dtype(where, "sparse", raw[1], np.float32, np.float64, *arrays.HALVES)
    if raw[0] is None:
        errors.axes(where, sparse=(raw[1], "B F D"))
        if output_concat:
            raise ValueError(f"{where}: 'output_concat' needs 'dense', got None.")
    else:
        arrays.namespace(where, held[1])
        errors.dtype(where, "dense", raw[0], raw[1].dtype)
        errors.axes(where, dense=(raw[0], "B D"), sparse=(raw[1], "B F D"))
    xp = arrays.namespace(where, *held)
    if xp is not np:
        errors.dtype(f"{where} on a device", "sparse", raw[1], np.float32, *arrays.HALVES)
        features = raw[1].shape[1] + (raw[0] is not None)
        if features > _MAX_FEATURES:
            raise ValueError(
                f"{where}: on a device there must be at most {_MAX_FEATURES} features, 'dense' "
                f"among them, got {features}."
            )
    if raw[1].shape[2] == 0:
        raise ValueError(f"{where}: D must be at least 1, got shape {raw[1].shape}.")
    return _DotInteraction.apply(
        dense, sparse, self_interaction=self_interaction, output_concat=output_concat,
        output_padding=errors.count(where, "output_padding", output_padding),
    )  # fmt: skip

"""Batch normalization. B rows, N columns; mean and variance are those of a column.

    xhat = (x - mean) * rstd            rstd = 1 / sqrt(variance + eps), of the biased variance
    y = xhat * weight + bias

    dweight = sum over B of dy * xhat        dbias = sum over B of dy
    dx = weight * rstd * (dy - dbias / B - xhat * dweight / B)          in evaluation weight*rstd*dy

In training mean and variance are the batch's, and move the running ones, the variance unbiased:

    running = (1 - momentum) * running + momentum * batch's

Evaluation takes the running ones. The batch's come from parts of its rows: of each the mean and the
sum of squared differences from it, put together by the formula of Chan, Golub and LeVeque (1983) in
an order that sizes alone decide; all less the batch's first row, so that a large mean does no harm
in float32. On a GPU magnitudes below 2^-126 count as zero.

Where a batch lies on several ranks each has these of its rows, and puts those of all ranks together
in their order, in float64 on the host; backward it adds up the sums of all ranks for dx likewise.
So all have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.autograd import Function, Tensor
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width

__all__ = ["batch_norm"]

_ELEMENTS, _LEAST_ROWS, _MOST_ROWS = 1 << 16, 64, 1024  # a block of the CPU
_ROWS, _MOST_BLOCKS = 4, 1024  # rows of a thread at a time; blocks of a launch


# CPU


@cpu.exact_loop
def _moments_cpu(x, pivot, part):
    """One block of rows less the pivot, which is taken off first; its (mean, squares)."""
    rows, columns = x.shape
    count, rest = x.dtype.type(rows), np.zeros(columns, x.dtype)
    mean, squares = part[0], part[1]
    for b in range(rows):
        for n in range(columns):
            rest[n] += x[b, n] - pivot[n]
    for n in range(columns):
        mean[n] = rest[n] / count
        rest[n] = squares[n] = 0
    for b in range(rows):
        for n in range(columns):
            difference = x[b, n] - pivot[n] - mean[n]
            rest[n] += difference
            squares[n] += difference * difference
    for n in range(columns):  # what the long sum lost
        mean[n] += rest[n] / count


@cpu.exact_loop
def _add_moments_cpu(parts, counts):
    """Put all parts together in the first one."""
    mean, squares = parts[0, 0], parts[0, 1]
    count = counts[0]
    for p in range(1, len(parts)):
        before, count = count, count + counts[p]
        share = counts[p] / count
        for n in range(mean.size):
            off = parts[p, 0, n] - mean[n]
            mean[n] += off * share
            squares[n] += parts[p, 1, n] + off * off * (before * share)


@cpu.loop
def _normalize_cpu(x, mean, rstd, weight, bias, y):
    for b in range(x.shape[0]):
        for n in range(x.shape[1]):
            y[b, n] = (x[b, n] - mean[n]) * rstd[n] * weight[n] + bias[n]


@cpu.loop
def _sums_cpu(x, dy, mean, rstd, part):
    products, total = part[0], part[1]
    for b in range(x.shape[0]):
        for n in range(x.shape[1]):
            products[n] += dy[b, n] * ((x[b, n] - mean[n]) * rstd[n])
            total[n] += dy[b, n]


@cpu.loop
def _gradient_cpu(x, dy, mean, rstd, factors, slopes, means, dx):
    for b in range(x.shape[0]):
        for n in range(x.shape[1]):
            xhat = (x[b, n] - mean[n]) * rstd[n]
            dx[b, n] = factors[n] * (dy[b, n] - means[n] - xhat * slopes[n])


def _row_block(columns: int) -> int:
    return min(_MOST_ROWS, max(_LEAST_ROWS, _ELEMENTS // columns))


def _moments(x: np.ndarray) -> np.ndarray:
    """(2, N): of all rows, less the first, mean and squared differences."""
    rows, columns = x.shape
    size = _row_block(columns)
    starts = range(0, rows, size)
    parts = np.empty((len(starts), 2, columns), x.dtype)
    cpu.parallel(lambda i, j: _moments_cpu(x[i:j], x[0], parts[i // size]), rows, size)
    _add_moments_cpu(parts, np.array([min(size, rows - i) for i in starts], x.dtype))
    return parts[0]


def _statistics(x: np.ndarray, eps: float, momentum: float, running: Sequence[Any]) -> tuple:
    mean, squares = _moments(x)
    mean += x[0]
    return _moved(mean, squares, len(x), eps, momentum, running)


def _moved(
    mean: np.ndarray, squares: np.ndarray, rows: int, eps: float, momentum: float, running: Any
) -> tuple:
    """The mean and rstd of a batch, which has moved the running statistics."""
    number = mean.dtype.type
    one, momentum = number(1), number(momentum)
    news = mean, squares / number(rows - 1)
    finite = np.isfinite(news).all(axis=0)
    for kept, new in zip(running, news, strict=True):
        np.copyto(kept, (one - momentum) * kept + momentum * new, where=finite)
    return mean, one / np.sqrt(squares / number(rows) + number(eps))


# Devices


def _geometry(B: int, N: int, lanes: int, vector: int) -> Geometry:
    tiles = blocks(N, lanes * vector)
    return Geometry(blocks(B, _part_rows(B, tiles, lanes)) * tiles, 256)


def _part_rows(rows: int, tiles: int, lanes: int) -> int:
    """Rows of a block: few, while a launch has not too many blocks."""
    least = 256 // lanes * _ROWS
    return least * max(1, blocks(rows, least * max(1, _MOST_BLOCKS // tiles)))


_TAIL = " int64_t b, int64_t n, int64_t turns"
_batch_moments = Kernel(
    "batch_norm.cu", "batch_norm_moments", "const float* x, float* parts," + _TAIL, _geometry
)
_batch_statistics = Kernel(
    "batch_norm.cu", "batch_norm_statistics",
    "const float* x, const float* parts, int64_t count, int64_t rows, int64_t b, int64_t n,"
    " float eps, float momentum, float* running_mean, float* running_var, float* mean, float* rstd",
    lambda columns: Geometry(blocks(columns, 32), 1024),
)  # fmt: skip
_add_moments = Kernel(
    "batch_norm.cu", "batch_norm_add_moments",
    "const float* x, const float* parts, int64_t count, int64_t rows, int64_t b, int64_t n,"
    " float* out", lambda columns: Geometry(blocks(columns, 32), 1024),
)  # fmt: skip
_normalize = Kernel(
    "batch_norm.cu", "batch_norm",
    "const float* x, const float* mean, const float* rstd, const float* weight, const float* bias,"
    " float* y," + _TAIL, _geometry,
)  # fmt: skip
_sums = Kernel(
    "batch_norm.cu", "batch_norm_sums",
    "const float* x, const float* dy, const float* mean, const float* rstd, float* parts," + _TAIL,
    _geometry,
)  # fmt: skip
_add_parts = Kernel(
    "batch_norm.cu", "batch_norm_add_parts",
    "const float* parts, int64_t count, int64_t columns, float* out",
    lambda columns: Geometry(blocks(columns, 32), 1024),
)  # fmt: skip
_gradient = Kernel(
    "batch_norm.cu", "batch_norm_gradient",
    "const float* x, const float* dy, const float* mean, const float* rstd, const float* weight,"
    " const float* sums, float rows, float* dx," + _TAIL, _geometry, optional="sums",
)  # fmt: skip


class _Cut:
    """How launches on (B, N) matrices are cut into parts of rows and tiles of columns."""

    def __init__(self, rows: int, columns: int, *arrays: Any) -> None:
        vector = vector_width(columns, *arrays)
        lanes = min(32, 1 << (columns // vector - 1).bit_length())
        self.macros = {"VECTOR": vector, "LANES": lanes}
        self.sizes = {"B": rows, "N": columns, "lanes": lanes, "vector": vector}
        tiles = blocks(columns, lanes * vector)
        self.part_rows = _part_rows(rows, tiles, lanes)
        self.parts = blocks(rows, self.part_rows)
        self.tail = rows, columns, self.part_rows // (256 // lanes * _ROWS)

    def launch(self, kernel: Kernel, *arguments: Any) -> None:
        kernel(*arguments, *self.tail, macros=self.macros, **self.sizes)


def _statistics_device(
    xp: Any, x: Any, eps: float, momentum: float, running: Sequence[Any]
) -> tuple:
    mean, rstd = xp.empty(x.shape[1], np.float32), xp.empty(x.shape[1], np.float32)
    _of_parts(_batch_statistics, xp, x, eps, momentum, *running, mean, rstd)
    return mean, rstd


def _moments_device(xp: Any, x: Any) -> np.ndarray:
    """(3, N) on the host: the first row, and of all rows less that mean and squares."""
    out = xp.empty((3, x.shape[1]), np.float32)
    _of_parts(_add_moments, xp, x, out)
    return arrays.to_host(out)


def _of_parts(kernel: Kernel, xp: Any, x: Any, *arguments: Any) -> None:
    """Launch a kernel on the moments of parts of the rows."""
    rows, columns = x.shape
    cut = _Cut(rows, columns, x)
    parts = xp.empty((cut.parts, 2, columns), np.float32)
    cut.launch(_batch_moments, x, parts)
    kernel(
        x, parts, cut.parts, cut.part_rows, rows, columns, *arguments, macros=cut.macros,
        columns=columns,
    )  # fmt: skip


def _sums_device(xp: Any, cut: _Cut, x: Any, dy: Any, mean: Any, rstd: Any) -> Any:
    """(2, N): dweight and dbias."""
    columns = x.shape[1]
    sums = xp.empty((2, columns), np.float32)
    parts = sums if cut.parts == 1 else xp.empty((cut.parts, 2, columns), np.float32)
    cut.launch(_sums, x, dy, mean, rstd, parts)
    if cut.parts > 1:
        _add_parts(parts, cut.parts, 2 * columns, sums, macros=cut.macros, columns=2 * columns)
    return sums


# Several ranks


def _rows_and_moments(xp: Any, x: Any, gather: Callable) -> tuple[int, np.ndarray, np.ndarray]:
    """How many rows all ranks have, their mean and their squared differences, in float64."""
    own = np.zeros((3, x.shape[1]))
    if len(x):
        first, *moments = (x[0], *_moments(x)) if xp is np else _moments_device(xp, x)
        own[0], own[1:] = len(x), moments
        own[1] += first
    parts = gather(own)
    parts = parts[parts[:, 0, 0] > 0]
    if len(parts) == 0:
        return 0, own[1], own[2]
    counts, moments = parts[:, 0, 0].copy(), parts[:, 1:].copy()
    _add_moments_cpu(moments, counts)
    return int(counts.sum()), *moments[0]


def _statistics_of_ranks(
    xp: Any, x: Any, eps: float, momentum: float, running: Sequence[Any], gather: Callable
) -> tuple[int, Any, Any]:
    """How many rows all ranks have, and `_statistics` of these."""
    rows, *moments = _rows_and_moments(xp, x, gather)
    if rows == 1:
        raise ValueError(
            "batch_norm: 'x' must have B of at least 2 in training, got 1 row of all ranks."
        )
    of_batch = [a.astype(x.dtype) for a in moments]
    if rows:
        kept = [arrays.to_host(a) for a in running]
        of_batch = _moved(*of_batch, rows, eps, momentum, kept)
        for array, new in zip(running, kept, strict=True):
            array[...] = arrays.copy_to(xp, new)
    return rows, *(arrays.copy_to(xp, a) for a in of_batch)


class _BatchNorm(Function):
    def forward(self, x, weight, bias, running, training, momentum, eps, gather):
        self.xp = xp = arrays.namespace("batch_norm", x, weight, bias)
        self.x, self.weight = x, weight = xp.ascontiguousarray(x), xp.ascontiguousarray(weight)
        self.training, bias = training, xp.ascontiguousarray(bias)
        self.rows, self.gather = len(x), gather if training else None  # rows of all ranks
        y = (arrays.empty if xp is np else xp.empty)(x.shape, x.dtype)
        if not training:
            mean = running[0].copy()  # for backward, whatever changes it until then
            rstd = 1 / xp.sqrt(running[1] + x.dtype.type(eps))
        elif gather is not None:
            self.rows, mean, rstd = _statistics_of_ranks(xp, x, eps, momentum, running, gather)
        elif len(x) == 0:
            mean, rstd = xp.zeros(x.shape[1], x.dtype), xp.zeros(x.shape[1], x.dtype)
        elif xp is np:
            mean, rstd = _statistics(x, eps, momentum, running)
        else:
            mean, rstd = _statistics_device(xp, x, eps, momentum, running)
        self.statistics = mean, rstd
        if xp is not np:
            _Cut(*x.shape, x, mean, rstd, weight, bias, y).launch(
                _normalize, x, mean, rstd, weight, bias, y
            )
            return y

        def block(i: int, j: int) -> None:
            _normalize_cpu(x[i:j], mean, rstd, weight, bias, y[i:j])

        cpu.parallel(block, len(x), _row_block(x.shape[1]))
        return y

    def backward(self, dy):
        xp, x = self.xp, self.x
        dy = xp.ascontiguousarray(dy)
        dx = (arrays.empty if xp is np else xp.empty)(x.shape, x.dtype) if self.needs[0] else None
        sums = self._sums(dy)
        if dx is not None:
            of_batch = self._of_batch(sums)
            if len(x):
                self._gradient(dy, of_batch, dx)
        return dx, sums[0], sums[1]

    def _sums(self, dy):
        """(2, N): dweight and dbias, of this rank's rows."""
        xp, x, (mean, rstd) = self.xp, self.x, self.statistics
        rows, columns = x.shape
        if rows == 0:
            return xp.zeros((2, columns), x.dtype)
        if xp is not np:
            return _sums_device(xp, _Cut(rows, columns, x, dy, mean, rstd), x, dy, mean, rstd)
        size = _row_block(columns)
        parts = np.zeros((-(-rows // size), 2, columns), x.dtype)

        def add_up(i: int, j: int) -> None:
            _sums_cpu(x[i:j], dy[i:j], mean, rstd, parts[i // size])

        cpu.parallel(add_up, rows, size)
        return parts.sum(axis=0)

    def _of_batch(self, sums):
        """The sums of all ranks' rows; in evaluation, where dx has none of them, None."""
        if self.gather is None:
            return sums if self.training else None
        everyone = self.gather(arrays.to_host(sums).astype(np.float64))
        return arrays.copy_to(self.xp, everyone.sum(axis=0).astype(sums.dtype))

    def _gradient(self, dy, sums, dx):
        x, weight, (mean, rstd) = self.x, self.weight, self.statistics
        if self.xp is not np:
            cut = _Cut(*x.shape, x, dy, mean, rstd, weight, dx)
            cut.launch(_gradient, x, dy, mean, rstd, weight, sums, float(self.rows), dx)
            return
        zeros = np.zeros((2, x.shape[1]), x.dtype)
        slopes, means = zeros if sums is None else sums / x.dtype.type(self.rows)
        factors = weight * rstd

        def block(i: int, j: int) -> None:
            _gradient_cpu(x[i:j], dy[i:j], mean, rstd, factors, slopes, means, dx[i:j])

        cpu.parallel(block, len(x), _row_block(x.shape[1]))


def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    gather: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Any:
    """Return y of the formula above.

    Parameters
    ----------
    x : (B, N) array or Tensor of float32, on the CPU also float64
    weight, bias : (N,) arrays or Tensors of the same dtype
    running_mean, running_var : (N,) arrays of the same dtype
        Changed in training, but not by an empty batch, nor by a column whose mean or variance isn't
        finite: an optimizer leaves out a step of such a batch.
    training : bool
        Whether statistics are the batch's.
    momentum : float
        How far the running statistics move to the batch's, from 0 to 1.
    eps : float
        Added to the variance.
    gather : callable, optional
        If x is a rank's part of the batch: returns the arrays (M, N) of all ranks, (ranks, M, N),
        in their order. In training all ranks call it, forward and, if x wants a gradient, backward,
        those without rows as well. The gradients of weight and bias are of this rank's rows.

    Returns
    -------
    (B, N) array or Tensor

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree, a batch of 1 in training, which has no unbiased variance,
        `momentum` not in [0, 1], or `eps` below 0.

    Notes
    -----
    Ioffe and Szegedy 2015, "Batch Normalization"; momentum is PyTorch's, one minus theirs.

    Examples
    --------
    >>> mean, variance = np.zeros(2), np.ones(2)
    >>> x = np.array([[1.0, 10.0], [3.0, 30.0]])
    >>> batch_norm(x, np.ones(2), np.zeros(2), mean, variance, training=True, eps=0)
    array([[-1., -1.],
           [ 1.,  1.]])
    >>> mean, variance
    (array([0.2, 2. ]), array([ 1.1, 20.9]))
    """
    where = "batch_norm"
    given = {"x": x, "weight": weight, "bias": bias}
    given |= {"running_mean": running_mean, "running_var": running_var}
    raw = {name: a.data if isinstance(a, Tensor) else a for name, a in given.items()}
    xp = arrays.namespace(where, *raw.values())
    errors.dtype(where, "x", raw["x"], np.float32, *([np.float64] if xp is np else []))
    for name, array in raw.items():
        errors.dtype(where, name, array, raw["x"].dtype)
    shapes = {name: (array, "B N" if name == "x" else "N") for name, array in raw.items()}
    rows, columns = errors.axes(where, **shapes)
    if columns == 0 or (training and rows == 1 and gather is None):
        rule = "N of at least 1" if columns == 0 else "B of at least 2 in training"
        raise ValueError(f"batch_norm: 'x' must have {rule}, got shape {raw['x'].shape}.")
    if errors.at_least_0(where, "momentum", momentum) > 1:
        raise ValueError(f"batch_norm: 'momentum' must lie in [0, 1], got {momentum}.")
    return _BatchNorm.apply(
        x, weight, bias, running=(raw["running_mean"], raw["running_var"]), training=training,
        momentum=float(momentum), eps=errors.at_least_0(where, "eps", eps), gather=gather,
    )  # fmt: skip

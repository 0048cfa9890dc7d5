"""A multi-layer perceptron as one op. B rows; layer l maps N[l] to N[l+1] columns.

    z = x[l] @ weight[l].T + bias[l]                    weight[l] (N[l+1], N[l]), bias[l] (N[l+1],)
    x[l+1] = max(z, 0) * keep / (1 - rate[l])           the last layer without, if `linear_output`

    dz = dx[l+1] * (x[l+1] > 0) / (1 - rate[l])
    dweight[l] = dz.T @ x[l]        dbias[l] = sum over B of dz        dx[l] = dz @ weight[l]

On the CPU a block of rows goes through all layers while it is in cache. So do gradients of small
weights, which are added up over the blocks; those of large ones follow, cut by output rows, or by
columns where rows are few. Matmuls are calls of one thread each, on blocks of fixed size, of BLAS
or, where matrices are small or rows few, of `thin_matmul`.

On a GPU a layer is one matmul of cublasLt, and one kernel more where there is dropout: bias, ReLU
and mask, and in the backward pass the mask, 1 / (1 - rate) and bias gradient of the layer below,
are part of it. Gradients of weights are a second stream's, beside those of the layers below; all
gradients of a layer with one output are one kernel, see single_output.py.

With `amp`, a type of 16 bits, x[l], weight[l] and bias[l] are rounded to it, and so are dz, dx and,
before dropout, x[l] @ weight[l].T. Sums are float32, and with them the gradients of weights and
biases; a linear output is float32, and its bias not rounded. If it is one column its dz isn't
rounded either, and the gradient of the bias below is summed up before dz is. On a GPU rows are
padded with zeros to 16 bytes, as tensor cores like them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, cpu, cublaslt, errors, streams
from cupyrec.autograd import Function, Tensor
from cupyrec.cublaslt import Epilogue
from cupyrec.ops.cast import cast_array, cast_matrices, padded, padded_width, rounded
from cupyrec.ops.halves import half_type
from cupyrec.ops.relu_dropout import (
    Dropout,
    bias_relu_dropout_cpu,
    bias_relu_dropout_device,
    check_dropout,
    mask_words,
    relu_dropout_backward,
    relu_dropout_backward_cpu,
)
from cupyrec.ops.single_output import single_output_backward
from cupyrec.ops.thin_matmul import FEW_ROWS, thin_matmul

__all__ = ["blocks_of", "fused_mlp", "matmul_block", "row_block", "weight_cuts"]

_WEIGHT_ROWS = 256  # rows or columns of a weight gradient a block
_SMALL = 1 << 14  # numbers of a weight whose gradient is added up over blocks
_BLOCK = 1 << 16  # numbers of the widest layer a block of rows, of narrow ones
_MOST = 64  # such blocks
_FEW = min(64, FEW_ROWS)  # rows of a block where a batch is small
_told: contextvars.ContextVar[int | None] = contextvars.ContextVar("row_block", default=None)
_THIN = 1 << 12  # numbers of a matrix that a BLAS would pack, or clear, for too little


def row_block(rows: int, columns: int) -> int:
    """Return rows a block: small batches give every thread work, large ones fill the BLAS kernel.

    Narrow layers take more, or a block would be over before Python has begun the next. Very
    many rows do too: a block has gradients of small weights to itself until they are added up.

    Examples
    --------
    >>> row_block(4096, 128)
    512
    """
    if (told := _told.get()) is not None:
        return told
    return min(max(512, _BLOCK // columns, -(-rows // _MOST)), max(64, -(-rows // 8)))


@contextlib.contextmanager
def blocks_of(rows: int) -> Iterator[None]:
    """Let `row_block` be so many in this context, whatever the batch: matmuls are then alike.

    Examples
    --------
    >>> with blocks_of(64):
    ...     row_block(4096, 128)
    64
    """
    token = _told.set(rows)
    try:
        yield
    finally:
        _told.reset(token)


def matmul_block(a: Any, b: Any, out: Any) -> None:
    """Write a @ b to `out`, by this thread alone under `cpu.serial_blas`.

    Examples
    --------
    >>> out = np.empty((1, 1), np.float32)
    >>> matmul_block(np.ones((1, 3), np.float32), np.ones((3, 1), np.float32), out)
    >>> out
    array([[3.]], dtype=float32)
    """
    thin = len(a) <= _FEW or min(b.size, out.size) <= _THIN
    if thin and out.dtype == np.float32:
        thin_matmul(a, b, out)
    else:
        np.matmul(a, b, out=out)


def weight_cuts(rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Return blocks of a weight's gradient: even few rows, as of a narrow layer, are cut.

    Examples
    --------
    >>> len(weight_cuts(1024, 256)), len(weight_cuts(16, 1024))
    (4, 4)
    """
    size = rows if rows > _WEIGHT_ROWS else columns
    step = -(-size // -(-size // _WEIGHT_ROWS))
    cuts = [slice(n, n + step) for n in range(0, size, step)]
    return [(n, slice(None)) if rows > _WEIGHT_ROWS else (slice(None), n) for n in cuts]


class _FusedMLP(Function):
    """With `amp`, arrays of float32 hold what is rounded to 16 bits."""

    def forward(self, x, *parameters, dropouts, linear_output, tf32, amp, halves):
        self.amp, self.given = amp, x.dtype
        self.weights = [rounded(w, amp) for w in parameters[0::2]]
        columns = self.weights[0].shape[1]
        self.filling = x.shape[1] - columns
        x = rounded(np.ascontiguousarray(x[:, :columns]), amp)
        self.biases = [np.ascontiguousarray(b) for b in parameters[1::2]]
        hidden = len(self.biases) - linear_output
        self.biases[:hidden] = [rounded(b, amp) for b in self.biases[:hidden]]
        self.dropouts, self.linear_output = dropouts, linear_output
        rows = x.shape[0]
        self.x = [x]
        self.x += [arrays.empty((rows, w.shape[0]), x.dtype) for w in self.weights]
        self.row_block = row_block(rows, max(x.shape[1] for x in self.x))
        loop_arguments = [d.loop_arguments(x.dtype) for d in dropouts]

        @np.errstate(over="ignore", invalid="ignore")  # inf and NaN are passed on
        def block(start: int, stop: int) -> None:
            for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
                y = self.x[i + 1][start:stop]
                matmul_block(self.x[i][start:stop], weight.T, y)
                if linear_output and i == len(self.weights) - 1:
                    y += bias
                else:
                    if dropouts[i].rate > 0:  # on a device another kernel goes on from there
                        self._round(y)
                    bias_relu_dropout_cpu(y, bias, *loop_arguments[i], dropouts[i].first + start)
                    self._round(y)

        with cpu.serial_blas():
            cpu.parallel(block, rows, self.row_block)
        return self.x[-1] if linear_output or amp is None else cast_array(self.x[-1], amp)

    def _round(self, x):
        if self.amp is not None:
            np.copyto(x, cast_array(x, self.amp))

    def backward(self, dy):
        layers = len(self.weights)
        rows, size = dy.shape[0], self.row_block
        dy = dy if self.amp is None else dy.astype(np.float32, copy=False)
        single = self.linear_output and dy.shape[1] == 1
        dz: list[Any] = [arrays.empty((rows, w.shape[0]), dy.dtype) for w in self.weights]
        dx = arrays.empty(self.x[0].shape, dy.dtype) if self.needs[0] else None
        parts = -(-rows // size)
        bias_sums = [np.zeros((parts, len(w)), dy.dtype) for w in self.weights]
        small = {i for i, w in enumerate(self.weights) if w.size <= _SMALL}
        weight_sums = {i: arrays.empty((parts, *self.weights[i].shape), dy.dtype) for i in small}

        def block(start: int, stop: int) -> None:
            np.copyto(dz[-1][start:stop], dy[start:stop])
            for i in reversed(range(layers)):
                grad, bias_sum = dz[i][start:stop], bias_sums[i][start // size]
                linear = self.linear_output and i == layers - 1
                if not linear:
                    scale = dy.dtype.type(self.dropouts[i].scale)
                    relu_dropout_backward_cpu(grad, self.x[i + 1][start:stop], scale, bias_sum)
                if not (linear and single):
                    self._round(grad)
                if linear or (self.amp is not None and not (single and i == layers - 2)):
                    np.sum(grad, axis=0, out=bias_sum)
                if i in small:
                    out = weight_sums[i][start // size]
                    matmul_block(grad.T, self.x[i][start:stop], out)
                below = dz[i - 1] if i > 0 else dx
                if below is not None:
                    matmul_block(grad, self.weights[i], below[start:stop])

        dweights = [self.grad_room(1 + 2 * i) for i in range(layers)]
        dbiases = [self.grad_room(2 + 2 * i) for i in range(layers)]
        large = [(i, w) for i, w in enumerate(self.weights) if i not in small]
        cuts = [(i, n, m) for i, w in large for n, m in weight_cuts(*w.shape)]

        def weight_block(start: int, stop: int) -> None:
            for i, n, m in cuts[start:stop]:
                np.matmul(dz[i][:, n].T, self.x[i][:, m], out=dweights[i][n, m])

        with cpu.serial_blas():
            cpu.parallel(block, rows, size)
            cpu.parallel(weight_block, len(cuts), 1)
        for i, sums in weight_sums.items():
            sums.sum(axis=0, out=dweights[i])
        for sums, dbias in zip(bias_sums, dbiases, strict=True):
            sums.sum(axis=0, out=dbias)
        if dx is not None:
            self._round(dx)
            dx = cast_array(dx, self.given)
            dx = np.pad(dx, ((0, 0), (0, self.filling))) if self.filling else dx
        return (dx, *(g for pair in zip(dweights, dbiases, strict=True) for g in pair))


class _FusedMLPOnDevice(Function):
    def forward(self, x, *parameters, dropouts, linear_output, tf32, amp, halves):
        tf32 = tf32 and amp is None
        matmul = self.matmul = functools.partial(cublaslt.matmul, tf32=tf32)
        xp = arrays.namespace("fused_mlp", x)
        self.given, self.amp = x.dtype, amp
        contiguous = [xp.ascontiguousarray(p) for p in parameters]
        x, own = xp.ascontiguousarray(x), contiguous
        if amp is not None and (halves is not None or x.dtype == amp):
            x, own = padded(x, amp), halves or cast_matrices(contiguous, amp)
        elif amp is not None:
            *own, x = cast_matrices(contiguous, amp, x)
        self.weights, biases = own[0::2], own[1::2]
        self.dropouts, self.linear_output = dropouts, linear_output
        self.x, self.masks = [x], []
        for i, (weight, bias) in enumerate(zip(self.weights, biases, strict=True)):
            if linear_output and i == len(biases) - 1:
                bias = contiguous[-1]  # not rounded
                y = xp.empty((len(x), len(bias)), np.float32)
                matmul(
                    self.x[i], weight[: len(bias)], y, transpose_b=True,
                    epilogue=Epilogue.BIAS, bias=bias,
                )  # fmt: skip
                return y
            y = xp.empty((len(x), len(weight)), x.dtype)
            self.x.append(y)
            mask = xp.empty((len(x), mask_words(len(weight))), np.uint32)
            self.masks.append(mask)
            if dropouts[i].rate > 0:
                matmul(self.x[i], weight, y, transpose_b=True)
                bias_relu_dropout_device(y, bias, y, mask, dropouts[i])
            else:
                matmul(
                    self.x[i], weight, y, transpose_b=True,
                    epilogue=Epilogue.RELU_AUX_BIAS, bias=bias, aux=mask,
                )  # fmt: skip
        return xp.ascontiguousarray(y[:, : len(contiguous[-1])])

    def backward(self, dy):
        xp, last = arrays.namespace("fused_mlp", dy), len(self.weights) - 1
        dweights = [self.grad_room(1 + 2 * i) for i in range(last + 1)]
        dbiases = [self.grad_room(2 + 2 * i) for i in range(last + 1)]
        wide = self.amp is None or self._is_single(last, dweights)
        dz = xp.ascontiguousarray(dy) if wide else padded(dy, self.amp)
        if not self.linear_output:
            dz = relu_dropout_backward(dz, self.masks[last], self.dropouts[last])
        summed = False  # whether the bias gradient of this layer has come with its dz
        with streams.second_stream(xp) as second:
            for i in reversed(range(last + 1)):
                single = self._is_single(i, dweights)
                if single:
                    below = self._single_output(xp, i, dz, dweights, dbiases)
                else:
                    with second(dz):
                        self._weight_gradient(i, dz, dweights[i], None if summed else dbiases[i])
                    below = self._below(xp, i, dz, dbiases)
                dz, summed = below, single or self.amp is None
        return (below, *(g for pair in zip(dweights, dbiases, strict=True) for g in pair))

    def _is_single(self, i, dweights):
        """Whether a layer has one output, and with `amp` one that is float32."""
        linear = self.linear_output and i == len(dweights) - 1
        return len(dweights[i]) == 1 and (linear or self.amp is None)

    def _single_output(self, xp, i, dz, dweights, dbiases):
        """Do all of a layer with one output, which cublasLt's epilogues don't take."""
        x, weight = self.x[i], self.weights[i][:1]
        below = xp.empty(x.shape, x.dtype) if i > 0 or self.needs[0] else None
        relu = (dbiases[i - 1], self.dropouts[i - 1].scale) if i > 0 else (None, None)
        single_output_backward(dz, x, weight, dweights[i], dbiases[i], below, *relu)
        if i > 0 or below is None:
            return below
        return cast_array(below[:, : self.inputs[0].shape[1]], self.given)

    def _below(self, xp, i, dz, dbiases):
        """Return the dz of the layer below, with its bias gradient in float32; of the first, dx."""
        if i == 0:
            dx = xp.empty(self.inputs[0].shape, self.given) if self.needs[0] else None
            if dx is not None:
                self.matmul(dz, self.weights[0][:, : dx.shape[1]], dx)
            return dx
        below = xp.empty(self.x[i].shape, dz.dtype)
        options = dict(alpha=self.dropouts[i - 1].scale, aux=self.masks[i - 1])
        if self.amp is None:
            options |= dict(epilogue=Epilogue.DRELU_BGRAD, bias=dbiases[i - 1])
        else:  # the bias gradient would be of 16 bits
            options |= dict(epilogue=Epilogue.DRELU)
        self.matmul(dz, self.weights[i], below, **options)
        return below

    def _weight_gradient(self, i, dz, dweight, dbias):
        """Write the gradient of a weight, and of its bias unless that is there already."""
        rows, columns = dweight.shape
        dz, x, epilogue, bias = dz[:, :rows], self.x[i][:, :columns], Epilogue.DEFAULT, None
        if dbias is not None and min(len(dz), rows, columns) > 1:
            epilogue, bias = Epilogue.BGRADB, dbias
        elif dbias is not None:  # which cublasLt doesn't do for one row or column
            dz.astype(np.float32, copy=False).sum(axis=0, out=dbias)
        self.matmul(dz, x, dweight, transpose_a=True, epilogue=epilogue, bias=bias)


def fused_mlp(
    x: Any,
    weights: Sequence[Any],
    biases: Sequence[Any],
    *,
    dropouts: Sequence[Dropout] | None = None,
    linear_output: bool = False,
    tf32: bool = False,
    amp: str | None = None,
    halves: Sequence[Any] | None = None,
) -> Any:
    """Return the output of the perceptron above.

    Parameters
    ----------
    x : (B, N[0]) array or Tensor of float32, on the CPU also float64, with `amp` also of that type
        Of 16 bits it may have zero columns beyond, up to whole 16 bytes.
    weights : sequence of (N[l+1], N[l]) arrays or Tensors
    biases : sequence of (N[l+1],) arrays or Tensors
    dropouts : sequence of Dropout, optional
        One a layer; none by default. The output layer's is not applied if `linear_output`.
    linear_output : bool
        Whether the last layer goes without ReLU and dropout.
    tf32 : bool
        Whether a GPU may round what it multiplies to TF32, 10 bits of the fraction.
    amp : {None, "float16", "bfloat16"}
        What is multiplied in, see above; weights and biases are then float32.
    halves : sequence of arrays, optional
        What `cast_matrices` has made of weights and biases in turn, in `amp`; for devices.

    Returns
    -------
    (B, N[-1]) array or Tensor
        Of the type of `x`; with `amp` of that type, or if `linear_output` of float32.

    Raises
    ------
    ValueError, TypeError
        Shapes or dtypes that don't agree.

    Notes
    -----
    OneFlow's ``cublas_fused_mlp``; dropout's scale and mask go into the backward pass of the layer.

    Examples
    --------
    >>> fused_mlp(np.ones((1, 2)), [np.ones((3, 2)), np.ones((1, 3))], [np.zeros(3), np.ones(1)])
    array([[7.]])
    """
    raw = [a.data if isinstance(a, Tensor) else a for a in (x, *weights, *biases)]
    xp = arrays.namespace("fused_mlp", *raw)
    if not weights or len(weights) != len(biases):
        raise ValueError(
            "fused_mlp: 'weights' and 'biases' must be equally many, at least one, "
            f"got {len(weights)} and {len(biases)}."
        )
    floats = (np.float32, np.float64) if xp is np and amp is None else (np.float32,)
    errors.dtype("fused_mlp", "weights[0]", raw[1], *floats)
    half = half_type("fused_mlp", amp)
    errors.dtype("fused_mlp", "x", raw[0], raw[1].dtype, *([] if half is None else [half]))
    first = {"weights[0]": (raw[1], "M N")}
    _, columns = errors.axes("fused_mlp", **first)
    filled = raw[0].shape[1:] == (padded_width(columns),)
    if half is None or raw[0].dtype != half or not filled:
        errors.axes("fused_mlp", **first, x=(raw[0], "B N"))
    for i in range(len(weights)):
        weight, bias = raw[1 + i], raw[1 + len(weights) + i]
        errors.dtype("fused_mlp", f"weights[{i}]", weight, raw[1].dtype)
        errors.dtype("fused_mlp", f"biases[{i}]", bias, raw[1].dtype)
        named = {f"weights[{i}]": (weight, f"N {columns}"), f"biases[{i}]": (bias, "N")}
        (columns,) = errors.axes("fused_mlp", **named)
    dropouts = tuple(dropouts) if dropouts is not None else (Dropout(),) * len(weights)
    if len(dropouts) != len(weights):
        raise ValueError(
            f"fused_mlp: 'dropouts' must be one a layer ({len(weights)}), got {len(dropouts)}."
        )
    for i, dropout in enumerate(dropouts):
        check_dropout("fused_mlp", f"dropouts[{i}]", dropout, len(raw[0]))
    pairs = [p for pair in zip(weights, biases, strict=True) for p in pair]
    if halves is not None and xp is not np:
        wanted = [(half, tuple(map(padded_width, p.shape))) for p in pairs]
        if (given := [(h.dtype, h.shape) for h in halves]) != wanted:
            raise ValueError(
                "fused_mlp: 'halves' must be what cast_matrices makes of weights and biases, "
                f"{_listed(wanted)}, got {_listed(given)}."
            )
    op = _FusedMLP if xp is np else _FusedMLPOnDevice
    return op.apply(
        x, *pairs, dropouts=dropouts, linear_output=linear_output, tf32=tf32, amp=half,
        halves=halves,
    )  # fmt: skip


def _listed(arrays: list[tuple[Any, tuple[int, ...]]]) -> str:
    return " ".join(f"{dtype}{shape}" for dtype, shape in arrays)

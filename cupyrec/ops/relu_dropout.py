"""ReLU then dropout, with a bit mask of live units. B rows, N columns.

    y = max(x + bias, 0) * keep / (1 - rate)
    dx = dy * live / (1 - rate)         live = y > 0

keep of (sample, column) is a Philox word of counter (column // 4, sample, step, layer) at word
column % 4, kept where word >= rate * 2^32. The mask is cublasLt's auxiliary ReLU layout: row b
holds its columns in bits of 32-bit words, column n at bit n % 32 of word n // 32, rows padded to a
multiple of 128 bits, so that a GEMM's DRELU epilogue can apply it. On a GPU magnitudes below 2^-126
count as zero.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.autograd import Function, Tensor
from cupyrec.kernel import Geometry, Kernel, blocks
from cupyrec.ops.cast import cast_array
from cupyrec.ops.halves import in_float32, value_macros
from cupyrec.random import philox4x32

__all__ = ["Dropout", "mask_words", "relu_dropout", "relu_dropout_backward"]

_ROWS = 256  # rows a block of the CPU
_WARP_ROWS, _WARPS = 4, 8  # rows a warp, warps a block
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


class Dropout(NamedTuple):
    """Rate and counter of one dropout: the same six numbers give the same mask on any device.

    Samples are numbered from `first` on. On a device other than the CPU, `step` may be an array
    (1,) of uint32 there.

    Examples
    --------
    >>> Dropout(0.5, seed=1, step=0, layer=2).scale
    2.0
    """

    rate: float = 0.0
    seed: int = 0
    step: Any = 0
    layer: int = 0
    first: int = 0

    @property
    def scale(self) -> float:
        return 1.0 / (1.0 - self.rate)

    def loop_arguments(self, dtype: np.dtype) -> tuple:
        """Scale, threshold, seed, step, layer, typed as the loops take them."""
        threshold = np.uint64(round(self.rate * 2.0**32))
        return (
            dtype.type(self.scale), threshold,
            np.uint64(self.seed), np.uint64(self.step), np.uint64(self.layer),
        )  # fmt: skip


_NO_DROPOUT = Dropout()


def check_dropout(where: str, name: str, dropout: Dropout, samples: int) -> None:
    """Raise ValueError or TypeError unless rate and counters are what Philox takes.

    `samples` is how many there are in the batch.

    Examples
    --------
    >>> check_dropout("f", "dropout", Dropout(0.5, step=-1), samples=8)
    Traceback (most recent call last):
        ...
    ValueError: f: 'dropout.step' must lie in [0, 2**32), got -1.
    """
    errors.rate(where, f"{name}.rate", dropout.rate)
    for part, value, bits in [
        ("seed", dropout.seed, 64), ("step", dropout.step, 32), ("layer", dropout.layer, 32),
    ]:  # fmt: skip
        if part == "step" and _lies_on_device(value):
            continue
        if not 0 <= value < 2**bits:
            raise ValueError(f"{where}: '{name}.{part}' must lie in [0, 2**{bits}), got {value}.")
    samples += dropout.first
    if not 0 <= samples <= 2**32:
        raise ValueError(f"{where}: samples must be numbered below 2**32, got {samples}.")


def _lies_on_device(step: Any) -> bool:
    return arrays.device(step) not in (None, "cpu")


def mask_words(columns: int) -> int:
    """Return the number of 32-bit words in one mask row of `columns` bits.

    Examples
    --------
    >>> mask_words(130)
    8
    """
    return -(-columns // 128) * 4


@cpu.exact_loop
def bias_relu_dropout_cpu(x, bias, scale, threshold, seed, step, layer, first_sample):
    """One block of rows, in place: x becomes y. threshold = rate * 2^32; 0 means no dropout."""
    k0, k1 = np.uint64(seed) & _LOW, np.uint64(seed) >> _32
    rows, columns = x.shape
    zero = x.dtype.type(0)
    groups = (columns + 3) // 4
    words = np.empty((4, groups), np.uint32)
    for b in range(rows):
        row = x[b]
        for n in range(columns):
            value = row[n] + bias[n]
            row[n] = zero if value <= 0 else value  # NaN stays NaN
        if threshold > 0:
            for g in range(groups):
                c = philox4x32(
                    np.uint64(g), np.uint64(first_sample + b), np.uint64(step), np.uint64(layer),
                    k0, k1,
                )  # fmt: skip
                words[0, g], words[1, g], words[2, g], words[3, g] = c
            for n in range(columns):
                row[n] = row[n] * scale if words[n % 4, n // 4] >= threshold else zero


@cpu.exact_loop
def relu_dropout_backward_cpu(dy, y, scale, column_sum):
    """One block of rows, in place: dy becomes dx, whose columns are added to `column_sum`."""
    rows, columns = dy.shape
    zero = dy.dtype.type(0)
    for b in range(rows):
        for n in range(columns):
            value = dy[b, n] * scale if y[b, n] > 0 else zero
            dy[b, n] = value
            column_sum[n] += value


@cpu.exact_loop
def _pack_live(y, mask):
    rows, columns = y.shape
    for b in range(rows):
        for w in range(mask.shape[1]):
            word = np.uint32(0)
            for n in range(32 * w, min(32 * w + 32, columns)):
                word |= np.uint32(y[b, n] > 0) << np.uint32(n % 32)
            mask[b, w] = word


@cpu.exact_loop
def _apply_mask(dy, mask, scale, dx):
    rows, columns = dy.shape
    for b in range(rows):
        for n in range(columns):
            live = (mask[b, n // 32] >> np.uint32(n % 32)) & np.uint32(1)
            dx[b, n] = dy[b, n] * scale if live else dy.dtype.type(0)


# Devices


def _geometry(B: int, N: int) -> Geometry:
    return Geometry(blocks(B, _WARP_ROWS * _WARPS) * blocks(N, 128), 32 * _WARPS)


_forward = Kernel(
    "relu_dropout.cu", "relu_dropout",
    "const value_t* x, const value_t* bias, value_t* y, uint32_t* mask, float scale,"
    " uint64_t threshold, uint64_t seed, uint32_t step, uint32_t layer, int64_t first_sample,"
    " int64_t b, int64_t n, const uint32_t* step_at",
    _geometry, optional="step_at",
)  # fmt: skip
_backward = Kernel(
    "relu_dropout.cu", "relu_dropout_backward",
    "const value_t* dy, const uint32_t* mask, value_t* dx, float scale, int64_t b, int64_t n",
    _geometry,
)  # fmt: skip


def _macros(columns: int, *values: Any) -> dict[str, Any]:
    size = values[0].dtype.itemsize
    wide = columns % 4 == 0 and not any(arrays.address(x) % (4 * size) for x in values)
    tiling = {"VECTOR": 4 if wide else 1, "ROWS": _WARP_ROWS}
    return tiling | value_macros(values[0].dtype)


def bias_relu_dropout_device(x: Any, bias: Any, y: Any, mask: Any, dropout: Dropout) -> None:
    """Write y and mask; y may be x. C-contiguous; x, bias and y of one float type."""
    rows, columns = x.shape
    step_at = dropout.step if _lies_on_device(dropout.step) else None
    numbers = dropout if step_at is None else dropout._replace(step=0)
    _forward(
        *map(arrays.bits, (x, bias, y)), mask, *numbers.loop_arguments(np.dtype(np.float32)),
        dropout.first, rows, columns, step_at, macros=_macros(columns, x, bias, y),
        B=rows, N=columns,
    )  # fmt: skip


class _ReluDropout(Function):
    def forward(self, x, bias, mask, dropout):
        self.mask, self.dropout = mask, dropout
        xp = arrays.namespace("relu_dropout", x, bias)
        bias = xp.ascontiguousarray(bias)
        if xp is not np:
            x, y = xp.ascontiguousarray(x), xp.empty(x.shape, x.dtype)
            bias_relu_dropout_device(x, bias, y, mask, dropout)
            return y
        wide = np.float32 if x.dtype in arrays.HALVES else x.dtype  # 16 bits are storage here
        y, bias = np.array(x, wide, order="C"), bias.astype(wide, copy=False)

        def block(start: int, stop: int) -> None:
            bias_relu_dropout_cpu(
                y[start:stop], bias, *dropout.loop_arguments(y.dtype), dropout.first + start
            )
            _pack_live(y[start:stop], mask[start:stop])

        cpu.parallel(block, len(y), _ROWS)
        return cast_array(y, x.dtype)

    def backward(self, grad):
        dx = relu_dropout_backward(grad, self.mask, self.dropout)
        wide = np.float32 if dx.dtype in arrays.HALVES else dx.dtype
        return dx, dx.astype(wide, copy=False).sum(axis=0)


def relu_dropout(x: Any, bias: Any, dropout: Dropout = _NO_DROPOUT) -> tuple[Any, Any]:
    """Return y of the formula above and the bit mask of its live units.

    Parameters
    ----------
    x : (B, N) array or Tensor of float32, float16 or bfloat16, on the CPU also float64
    bias : (N,) array or Tensor of the same dtype
    dropout : Dropout

    Returns
    -------
    y : (B, N) array or Tensor
    mask : (B, 4 * ceil(N / 128)) array of uint32

    Raises
    ------
    ValueError, TypeError
        Shapes that don't agree, another dtype, or a rate not in [0, 1).

    Notes
    -----
    Dropout is of Srivastava et al. 2014, inverted; the fusion and the mask layout are OneFlow's.

    Examples
    --------
    >>> y, mask = relu_dropout(np.array([[-1.0, 2.0]]), np.array([0.0, 1.0]))
    >>> y, mask
    (array([[0., 3.]]), array([[2, 0, 0, 0]], dtype=uint32))
    """
    raw = [a.data if isinstance(a, Tensor) else a for a in (x, bias)]
    xp = arrays.namespace("relu_dropout", *raw)
    rows, columns = errors.axes("relu_dropout", x=(raw[0], "B N"), bias=(raw[1], "N"))
    errors.dtype("relu_dropout", "x", raw[0], *_floats(xp))
    errors.dtype("relu_dropout", "bias", raw[1], raw[0].dtype)
    check_dropout("relu_dropout", "dropout", dropout, rows)
    mask = xp.empty((rows, mask_words(columns)), np.uint32)
    y = _ReluDropout.apply(x, bias, mask=mask, dropout=dropout)
    return y, mask


def _floats(xp: ModuleType) -> tuple[type, ...]:
    """The dtypes that a device has loops or kernels for."""
    return (np.float32, *arrays.HALVES, *([np.float64] if xp is np else []))


def relu_dropout_backward(dy: Any, mask: Any, dropout: Dropout = _NO_DROPOUT) -> Any:
    """Return dx = dy * live / (1 - rate).

    Parameters
    ----------
    dy : (B, N) array of float32, float16 or bfloat16, on the CPU also float64
    mask : (B, 4 * ceil(N / 128)) array of uint32
        As `relu_dropout` returned it.
    dropout : Dropout
        As it was given to `relu_dropout`.

    Raises
    ------
    ValueError, TypeError
        Shapes that don't agree, or another dtype.

    Examples
    --------
    >>> mask = np.array([[2, 0, 0, 0]], np.uint32)
    >>> relu_dropout_backward(np.array([[5.0, 6.0]]), mask)
    array([[0., 6.]])
    """
    xp = arrays.namespace("relu_dropout_backward", dy, mask)
    errors.dtype("relu_dropout_backward", "dy", dy, *_floats(xp))
    errors.dtype("relu_dropout_backward", "mask", mask, np.uint32)
    rows, columns = errors.axes("relu_dropout_backward", dy=(dy, "B N"))
    errors.axes("relu_dropout_backward", dy=(dy, "B N"), mask=(mask, f"B {mask_words(columns)}"))
    dy, mask = xp.ascontiguousarray(dy), xp.ascontiguousarray(mask)
    dx = xp.empty(dy.shape, dy.dtype)
    if xp is not np:
        _backward(
            arrays.bits(dy), mask, arrays.bits(dx), np.float32(dropout.scale), rows, columns,
            macros=_macros(columns, dy, dx), B=rows, N=columns,
        )  # fmt: skip
        return dx
    wide = np.dtype(np.float32) if dy.dtype in arrays.HALVES else dy.dtype
    scale = wide.type(dropout.scale)

    def block(start: int, stop: int) -> None:
        inputs = dy[start:stop], mask[start:stop]
        in_float32(_apply_mask, inputs, (scale,), [dx[start:stop]])

    cpu.parallel(block, rows, _ROWS)
    return dx

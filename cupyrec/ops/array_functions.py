"""NumPy's reductions, products and changes of shape on Tensors, under NumPy's names and arguments.

Formulas are the array module's own functions; given arrays alone they return arrays. At the end of
this file Tensor, which `elementwise` gave its operators, gets its methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyrec import bulk, cpu
from cupyrec.arrays import device, empty, module, namespace
from cupyrec.autograd import Function, Tensor
from cupyrec.ops import elementwise
from cupyrec.ops.elementwise import sum_to
from cupyrec.ops.thin_matmul import FEW_ROWS, thin_matmul

__all__ = [
    "Tensor", "concatenate", "from_dlpack", "matmul", "mean", "reshape", "softmax", "stack", "sum",
    "transpose",
]  # fmt: skip


_DLPACK_CUDA = 2  # kDLCUDA of dlpack.h
_SMALL = 1 << 13  # multiply-adds that BLAS gives to no second thread
_WORK, _LEAST = 1 << 22, 64  # multiply-adds a block, and at least so many rows or columns


def _spread(grad: np.ndarray, shape: tuple[int, ...], axis: Any, keepdims: bool) -> np.ndarray:
    """Give the gradient of a reduction back the axes that it lost."""
    if axis is not None and not keepdims:
        grad = np.expand_dims(grad, axis)
    return np.broadcast_to(grad, shape)


class _Softmax(Function):
    def forward(self, x, axis):
        e = np.exp(x - x.max(axis=axis, keepdims=True))
        self.axis, self.y = axis, e / e.sum(axis=axis, keepdims=True)
        return self.y

    def backward(self, grad):
        inner = (grad * self.y).sum(axis=self.axis, keepdims=True)
        return (self.y * (grad - inner),)


class _Sum(Function):
    def forward(self, x, axis, keepdims):
        self.shape, self.axis, self.keepdims = np.shape(x), axis, keepdims
        return np.sum(x, axis=axis, keepdims=keepdims)

    def backward(self, grad):
        return (_spread(grad, self.shape, self.axis, self.keepdims),)


class _Mean(_Sum):
    def forward(self, x, axis, keepdims):
        self.shape, self.axis, self.keepdims = np.shape(x), axis, keepdims
        y = np.mean(x, axis=axis, keepdims=keepdims)
        self.count = max(1, np.size(x) // max(1, y.size))
        return y

    def backward(self, grad):
        return super().backward(grad / grad.dtype.type(self.count))


class _Reshape(Function):
    def forward(self, x, shape):
        self.shape = np.shape(x)
        return np.reshape(x, shape)

    def backward(self, grad):
        return (bulk.contiguous(grad).reshape(self.shape),)


class _Contiguous(Function):
    def forward(self, x):
        return bulk.contiguous(x)

    def backward(self, grad):
        return (grad,)


class _Transpose(Function):
    def forward(self, x, axes):
        self.inverse = None if axes is None else np.argsort(np.atleast_1d(axes) % np.ndim(x))
        return np.transpose(x, axes)

    def backward(self, grad):
        return (grad.transpose(self.inverse),)


class _Astype(Function):
    def forward(self, x, dtype):
        return x.astype(dtype)

    def backward(self, grad):
        return (grad,)  # Tensor.backward gives it the dtype of x


def _names_once(part: Any) -> bool:
    """Whether a part of an index can't name an element twice."""
    if part is None or part is ... or isinstance(part, (int, np.integer, slice)):
        return True
    return getattr(part, "dtype", np.dtype(int)).kind == "b"


class _GetItem(Function):
    def forward(self, x, key):
        parts = key if isinstance(key, tuple) else (key,)
        self.key = tuple(p.data if isinstance(p, Tensor) else p for p in parts)
        self.shape, self.xp = x.shape, namespace("Tensor.__getitem__", x)
        return x[self.key]

    def backward(self, grad):
        if self.xp is np and self._takes_all_rows():
            return (bulk.placed(grad, self.key, self.shape),)
        dx = self.xp.zeros(self.shape, grad.dtype)
        if all(_names_once(part) for part in self.key):
            dx[self.key] = grad
        elif self.xp is not np:  # which has no sum in a fixed order for it yet
            raise TypeError(
                "Tensor.__getitem__: a gradient on a device must be of slices or a mask, "
                "got one of an array of indices."
            )
        else:
            np.add.at(dx, self.key, grad)  # an array of indices may name an element twice: slower
        return (dx,)

    def _takes_all_rows(self):
        """Whether the index cuts columns alone, by slices."""
        slices = all(isinstance(part, slice) for part in self.key)
        return slices and self.key[:1] == (slice(None),)


class _Concatenate(Function):
    def forward(self, *arrays, axis):
        joined = bulk.concatenate(arrays, axis)
        self.axis = axis
        self.borders = np.cumsum([np.shape(a)[axis] for a in arrays])[:-1]
        return joined

    def backward(self, grad):
        return tuple(np.split(grad, self.borders, axis=self.axis))


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b by blocks that depend on the shapes alone, each on one BLAS thread."""
    if min(a.ndim, b.ndim) < 2 or a.shape[-1] != b.shape[-2] or device(a) != "cpu":
        return np.matmul(a, b)  # which says what is wrong, or is the device's own
    if a.ndim == b.ndim == 2 and len(a) <= FEW_ROWS and a.dtype == b.dtype == np.float32:
        out = np.empty((len(a), b.shape[1]), np.float32)
        thin_matmul(a, b, out)
        return out
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    work = math.prod(shape) * a.shape[-1]  # multiply-adds
    if work <= _SMALL:
        return np.matmul(a, b)
    with cpu.serial_blas():
        if work <= _WORK:
            return np.matmul(a, b)
        out = empty(shape, np.result_type(a, b))
        n, least = (shape[0], 1) if len(shape) > 2 else (max(shape), _LEAST)
        if len(shape) > 2:
            a, b = (np.broadcast_to(x, (*shape[:-2], *x.shape[-2:])) for x in (a, b))

        def block(i: int, j: int) -> None:
            if len(shape) > 2:
                np.matmul(a[i:j], b[i:j], out=out[i:j])
            elif n == shape[0]:
                np.matmul(a[i:j], b, out=out[i:j])
            else:
                np.matmul(a, b[:, i:j], out=out[:, i:j])

        cpu.parallel(block, n, max(least, n * _WORK // work))
    return out


class _Matmul(Function):
    def forward(self, a, b):
        self.a, self.b = a, b
        return _product(a, b)

    def backward(self, grad):
        a, b = self.a, self.b
        # BLAS takes no array that is broadcast.
        grad = namespace("matmul", grad).ascontiguousarray(grad)
        return (
            sum_to(_product(grad, b.swapaxes(-1, -2)), a.shape) if self.needs[0] else None,
            sum_to(_product(a.swapaxes(-1, -2), grad), b.shape) if self.needs[1] else None,
        )


def softmax(x: Any, axis: int = -1) -> Any:
    """Return exp(x) / sum(exp(x)) along `axis`.

    Examples
    --------
    >>> softmax(np.array([[3.0, 3.0]]))
    array([[0.5, 0.5]])
    """
    return _Softmax.apply(x, axis=axis)


def sum(x: Any, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    """Return the sum over `axis`, as `numpy.sum`.

    Examples
    --------
    >>> sum(np.ones((2, 3)), axis=0)
    array([2., 2., 2.])
    """
    return _Sum.apply(x, axis=axis, keepdims=keepdims)


def mean(x: Any, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    """Return the mean over `axis`, as `numpy.mean`.

    Examples
    --------
    >>> mean(np.ones((2, 3)), axis=0)
    array([1., 1., 1.])
    """
    return _Mean.apply(x, axis=axis, keepdims=keepdims)


def reshape(x: Any, shape: int | tuple[int, ...]) -> Any:
    """Return the same elements in another shape, as `numpy.reshape`.

    Examples
    --------
    >>> reshape(np.arange(4.0), (2, 2))
    array([[0., 1.],
           [2., 3.]])
    """
    return _Reshape.apply(x, shape=shape)


def contiguous(x: Any) -> Any:
    """Return `x` in rows side by side, once for all who ask for that; itself where it is.

    Examples
    --------
    >>> contiguous(np.ones((2, 3)).T).flags.c_contiguous
    True
    """
    return _Contiguous.apply(x)


def transpose(x: Any, axes: Sequence[int] | None = None) -> Any:
    """Return `x` with its axes permuted, reversed by default, as `numpy.transpose`.

    Examples
    --------
    >>> transpose(np.zeros((2, 3))).shape
    (3, 2)
    """
    return _Transpose.apply(x, axes=axes)


def concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Any:
    """Join along an existing axis, or flat ones if that is None, as `numpy.concatenate`.

    Examples
    --------
    >>> concatenate([np.zeros((2, 1)), np.ones((2, 2))], axis=1).shape
    (2, 3)
    """
    if axis is None:
        arrays, axis = [reshape(a, -1) for a in arrays], 0
    return _Concatenate.apply(*arrays, axis=axis)


def stack(arrays: Sequence[Any], axis: int = 0) -> Any:
    """Join along a new axis, as `numpy.stack`.

    Examples
    --------
    >>> stack([np.zeros(2), np.ones(2)], axis=1).shape
    (2, 2)
    """
    ndim = len(arrays[0].shape) + 1
    at = axis + ndim if axis < 0 else axis
    lift = [reshape(a, (*a.shape[:at], 1, *a.shape[at:])) for a in arrays]
    return concatenate(lift, axis=at)


def from_dlpack(x: Any) -> Tensor:
    """Return a Tensor that shares its memory with `x`, of any library that speaks DLPack.

    Examples
    --------
    >>> from_dlpack(np.arange(3.0))
    Tensor([0., 1., 2.])
    """
    on_gpu = x.__dlpack_device__()[0] == _DLPACK_CUDA
    return Tensor(module("cuda" if on_gpu else "cpu").from_dlpack(x))


def matmul(a: Any, b: Any) -> Any:
    """Return the matrix product, as `numpy.matmul`, the same bits for any number of threads.

    Examples
    --------
    >>> matmul(np.ones((2, 3)), np.ones((3, 1)))
    array([[3.],
           [3.]])
    """
    a, b = (x if isinstance(x, Tensor) or device(x) else np.asarray(x) for x in (a, b))
    if b.ndim == 1:  # a vector is a matrix of one column, on the left of one row
        return matmul(a, reshape(b, (-1, 1)))[..., 0]
    if a.ndim == 1:
        return matmul(reshape(a, (1, -1)), b)[..., 0, :]
    return _Matmul.apply(a, b)


def _refuse(self: Tensor, function: Callable, types: Any, args: Any, options: Any) -> None:
    """NumPy's functions, as its ufuncs, would drop the tape."""
    name, ours = f"{function.__module__}.{function.__name__}", function.__name__
    known = ours in __all__ or ours in elementwise.__all__
    instead = f"cupyrec.{ours} takes Tensors" if known else "pass a Tensor's .data"
    raise TypeError(f"{name}: arguments must be arrays, {instead}.")


def _shape_arguments(shape: tuple[Any, ...]) -> Any:
    return shape[0] if len(shape) == 1 else shape


Tensor.__array_function__ = _refuse
Tensor.__matmul__ = matmul
Tensor.__rmatmul__ = lambda self, other: matmul(other, self)
Tensor.__getitem__ = lambda self, key: _GetItem.apply(self, key=key)
Tensor.sum = sum
Tensor.mean = mean
Tensor.reshape = lambda self, *shape: reshape(self, _shape_arguments(shape))
Tensor.transpose = lambda self, *axes: transpose(self, _shape_arguments(axes) if axes else None)
Tensor.T = property(lambda self: transpose(self))
Tensor.astype = lambda self, dtype: _Astype.apply(self, dtype=dtype)

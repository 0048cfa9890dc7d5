"""NumPy's elementwise operators and functions on Tensors, under NumPy's names and arguments.

Formulas are the array module's own functions; given arrays alone they return arrays. At the end of
this file Tensor gets its operators. Gradients of broadcast inputs are summed back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.autograd import Function, Tensor

__all__ = ["exp", "log", "maximum", "relu", "sigmoid", "sqrt", "sum_to", "tanh", "where"]


def sum_to(grad: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum `grad` over the axes along which an input of `shape` was broadcast.

    Examples
    --------
    >>> sum_to(np.ones((2, 3)), (1, 3))
    array([[2., 2., 2.]])
    """
    if grad.shape == shape:
        return grad
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return grad.sum(axis=stretched, keepdims=True) if stretched else grad


class _Binary(Function):
    """z = f(a, b) elementwise; a subclass says f and the partial derivatives by a and by b."""

    def forward(self, a, b):
        # NumPy gives Python's numbers the array's dtype; np.float64 is one of them here.
        self.a, self.b = (float(x) if isinstance(x, float) else x for x in (a, b))
        self.z = self.f(self.a, self.b)
        return self.z

    def backward(self, grad):
        partials = zip(self.needs, (self.by_a, self.by_b), (self.a, self.b), strict=True)
        return tuple(
            sum_to(grad * by(self.a, self.b, self.z), np.shape(x)) if needed else None
            for needed, by, x in partials
        )


class _Add(_Binary):
    f = staticmethod(np.add)

    def by_a(self, a, b, z):
        return 1

    by_b = by_a


class _Subtract(_Binary):
    f = staticmethod(np.subtract)

    def by_a(self, a, b, z):
        return 1

    def by_b(self, a, b, z):
        return -1


class _Multiply(_Binary):
    f = staticmethod(np.multiply)

    def by_a(self, a, b, z):
        return b

    def by_b(self, a, b, z):
        return a


class _Divide(_Binary):
    f = staticmethod(np.divide)

    def by_a(self, a, b, z):
        return 1 / b

    def by_b(self, a, b, z):
        return -z / b


class _Power(_Binary):
    f = staticmethod(np.power)

    def by_a(self, a, b, z):
        with np.errstate(divide="ignore", invalid="ignore"):  # x**0 has derivative 0 at x = 0
            return np.where(np.equal(b, 0), 0, b * np.power(a, b - 1))

    def by_b(self, a, b, z):
        positive = np.greater(a, 0)
        return np.where(positive, z * np.log(np.where(positive, a, 1)), 0)


class _Maximum(_Binary):
    f = staticmethod(np.maximum)

    def by_a(self, a, b, z):  # a tie shares the gradient
        half = z.dtype.type(0.5)
        return (a >= b) * half + (a > b) * half

    def by_b(self, a, b, z):
        return 1 - self.by_a(a, b, z)


class _Unary(Function):
    """y = f(x) elementwise; a subclass says f and dy/dx from (x, y)."""

    def forward(self, x):
        self.x = x
        self.y = self.f(x)
        return self.y

    def backward(self, grad):
        return (grad * self.derivative(self.x, self.y),)


class _Exp(_Unary):
    f = staticmethod(np.exp)

    def derivative(self, x, y):
        return y


class _Log(_Unary):
    f = staticmethod(np.log)

    def derivative(self, x, y):
        return 1 / x


class _Sqrt(_Unary):
    f = staticmethod(np.sqrt)

    def derivative(self, x, y):
        return 1 / (2 * y)


class _Tanh(_Unary):
    f = staticmethod(np.tanh)

    def derivative(self, x, y):
        return 1 - y * y


class _Relu(_Unary):
    def f(self, x):
        return np.maximum(x, 0)

    def derivative(self, x, y):
        return x > 0


class _Sigmoid(_Unary):
    def f(self, x):  # exp of a negative number alone: no overflow
        e = np.exp(-np.abs(x))
        return np.where(x >= 0, 1, e) / (1 + e)

    def derivative(self, x, y):
        return y * (1 - y)


class _Where(Function):
    def forward(self, condition, a, b):
        self.condition, self.shapes = condition, (np.shape(a), np.shape(b))
        return np.where(condition, a, b)

    def backward(self, grad):
        return (
            None,
            sum_to(np.where(self.condition, grad, 0), self.shapes[0]) if self.needs[1] else None,
            sum_to(np.where(self.condition, 0, grad), self.shapes[1]) if self.needs[2] else None,
        )


def exp(x: Any) -> Any:
    """Return e**x elementwise, as `numpy.exp`.

    Examples
    --------
    >>> exp(np.array([0.0]))
    array([1.])
    """
    return _Exp.apply(x)


def log(x: Any) -> Any:
    """Return the natural logarithm elementwise, as `numpy.log`.

    Examples
    --------
    >>> log(np.array([1.0]))
    array([0.])
    """
    return _Log.apply(x)


def sqrt(x: Any) -> Any:
    """Return the square root elementwise, as `numpy.sqrt`.

    Examples
    --------
    >>> sqrt(np.array([4.0]))
    array([2.])
    """
    return _Sqrt.apply(x)


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent elementwise, as `numpy.tanh`.

    Examples
    --------
    >>> tanh(np.array([0.0]))
    array([0.])
    """
    return _Tanh.apply(x)


def relu(x: Any) -> Any:
    """Return max(x, 0) elementwise; the gradient at 0 is 0.

    Examples
    --------
    >>> relu(np.array([-1.0, 2.0]))
    array([0., 2.])
    """
    return _Relu.apply(x)


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) elementwise, without overflow.

    Examples
    --------
    >>> sigmoid(np.array([0.0, -1e9]))
    array([0.5, 0. ])
    """
    return _Sigmoid.apply(x)


def maximum(a: Any, b: Any) -> Any:
    """Return the larger elementwise, as `numpy.maximum`; a tie shares the gradient.

    Examples
    --------
    >>> maximum(np.array([1.0, 5.0]), 2.0)
    array([2., 5.])
    """
    return _Maximum.apply(a, b)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Return `a` where the condition holds, else `b`, as `numpy.where`.

    Examples
    --------
    >>> where(np.array([True, False]), np.array([1.0, 1.0]), np.array([2.0, 2.0]))
    array([1., 2.])
    """
    return _Where.apply(condition, a, b)


def _operator(node: type[Function], swap: bool = False) -> Callable:
    def apply(self: Tensor, other: Any) -> Any:
        if not (isinstance(other, (Tensor, int, float)) or arrays.device(other)):
            return NotImplemented
        return node.apply(other, self) if swap else node.apply(self, other)

    return apply


def _comparison(f: Callable) -> Callable:
    """Comparisons know no gradient; they give arrays of bool. Tensors hash by identity still."""
    return lambda self, other: f(self.data, other.data if isinstance(other, Tensor) else other)


for _name, _node in [
    ("add", _Add), ("sub", _Subtract), ("mul", _Multiply), ("truediv", _Divide), ("pow", _Power),
]:  # fmt: skip
    setattr(Tensor, f"__{_name}__", _operator(_node))
    setattr(Tensor, f"__r{_name}__", _operator(_node, swap=True))

Tensor.__neg__ = lambda self: self * -1
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tensor, f"__{_name}__", _comparison(getattr(operator, _name)))

"""Tensor and its tape: each Function that meets a Tensor leaves a node; `backward` walks them back.

NumPy's operators and methods of Tensor are attached in `cupyrec.ops.elementwise` and
`cupyrec.ops.array_functions`, where their formulas and gradients stand.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, bulk

__all__ = ["Function", "Tensor", "is_recording", "no_grad", "numbered", "record", "unit_gradient"]

_numbers = itertools.count()  # next() is atomic under the GIL
_units: dict[tuple, Any] = {}  # by device, GPU, shape and dtype
_recording = contextvars.ContextVar("recording", default=True)  # each thread has its own


class Tensor:
    """An array that remembers how it was made.

    Parameters
    ----------
    data : array
        Of any device; a list or number becomes a NumPy array of float32.
    requires_grad : bool
        Whether `backward` leaves a gradient in `.grad`.

    Attributes
    ----------
    data : array
    grad : array or None
        Sum of the gradients of all `backward` calls since the last `zero_grad`.

    Raises
    ------
    TypeError
        A gradient is asked for data that is not floating point.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    array([2., 4.], dtype=float32)
    """

    __array_ufunc__ = None  # so that ndarray + Tensor asks Tensor
    __array_priority__ = 1000

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        if isinstance(data, Tensor):
            data = data.data
        if not hasattr(data, "dtype"):
            data = np.asarray(data, np.float32)
        if requires_grad and not arrays.is_float(data.dtype):
            raise TypeError(f"Tensor: only floating data may require a gradient, got {data.dtype}.")
        self.data = data if arrays.device(data) in ("cuda", "sim") else np.asarray(data)
        self.requires_grad = requires_grad
        self.grad = None
        self._node: Function | None = None

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    ndim = property(lambda self: self.data.ndim)
    size = property(lambda self: self.data.size)
    held = property(lambda self: self.data, doc="What lies on its device: an array.")

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        name, indent = type(self).__name__, " " * (len(type(self).__name__) - len("array"))
        body = repr(self.data).replace("array(", f"{name}(", 1).replace("\n", "\n" + indent)
        return body[:-1] + ", requires_grad=True)" if self.requires_grad else body

    def __str__(self) -> str:
        return str(self.data)

    def __format__(self, spec: str) -> str:
        return format(self.data, spec)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __float__(self) -> float:
        return float(self.data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.data, dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()

    def item(self) -> float:
        """Return the value of a one-element Tensor as a Python number.

        Examples
        --------
        >>> Tensor([2.5]).item()
        2.5
        """
        return self.data.item()

    def numpy(self) -> np.ndarray:
        """Return the data as a NumPy array, which shares its memory on the CPU.

        Examples
        --------
        >>> Tensor([2.5]).numpy()
        array([2.5], dtype=float32)
        """
        return arrays.to_host(self.data)

    def detach(self) -> Tensor:
        """Return a Tensor of the same data that the tape doesn't know.

        Examples
        --------
        >>> Tensor([1.0], requires_grad=True).detach().requires_grad
        False
        """
        return Tensor(self.data)

    def zero_grad(self) -> None:
        """Forget the gradient.

        Examples
        --------
        >>> from cupyrec import Tensor
        >>> x = Tensor([1.0], requires_grad=True)
        >>> x.sum().backward()
        >>> x.zero_grad()
        >>> x.grad is None
        True
        """
        self.grad = None

    def add_grad(self, grad: Any) -> None:
        """Add to `.grad`; the array is copied, since a node may hand one array to several inputs.

        Examples
        --------
        >>> x = Tensor([1.0], requires_grad=True)
        >>> x.add_grad(np.array([2.0], np.float32))
        >>> x.grad
        array([2.], dtype=float32)
        """
        if self.grad is None:
            self.grad = grad.copy() if hasattr(grad, "copy") else np.array(grad)
        else:
            self.grad += grad

    def grad_room(self) -> Any:
        """Return an array that a node may write a gradient of this Tensor to and then give it.

        Examples
        --------
        >>> Tensor([1.0, 2.0]).grad_room().shape
        (2,)
        """
        return _room(self.data)

    @np.errstate(over="ignore", invalid="ignore")  # the optimizer tells of them
    def backward(self, grad: Any = None) -> None:
        """Add the gradient of this Tensor to every Tensor it was made from.

        Parameters
        ----------
        grad : array, optional
            Gradient of the objective by this Tensor; by default 1, for one element only.

        Raises
        ------
        ValueError
            Not made from anything that requires a gradient, more than one element without `grad`,
            a gradient of another shape, a tape that an earlier `backward` has used up, or a Tensor
            that has moved to another device since.

        Examples
        --------
        >>> from cupyrec import Tensor
        >>> x = Tensor([[1.0, -2.0]], requires_grad=True)
        >>> (3 * x).backward(np.ones((1, 2), np.float32))
        >>> x.grad
        array([[3., 3.]], dtype=float32)
        """
        if not self.requires_grad:
            raise ValueError("backward: the Tensor must come from one that requires a gradient.")
        if grad is None:
            if self.size != 1:
                raise ValueError(
                    f"backward: without 'grad' one element is needed, got {self.shape}."
                )
            grad = unit_gradient(self.data)
        xp = arrays.namespace("backward", self.data)
        grad = xp.asarray(grad, self.dtype)
        if grad.shape != self.shape:
            raise ValueError(f"backward: 'grad' must have shape {self.shape}, got {grad.shape}.")
        if self._node is None:
            self.add_grad(grad)
            return
        order = _reverse_order(self._node)
        _check_device(order, arrays.device(self.data))
        pending = {self._node: grad}
        for node in order:
            inputs = node.inputs
            grad = pending.pop(node, None)  # None: no gradient came this way
            try:
                parts = [None] * len(inputs) if grad is None else node.backward(grad)
            finally:
                node.inputs = None
            for tensor, part in zip(inputs, parts, strict=True):
                if part is None or not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    continue
                if part.shape != tensor.shape:
                    raise ValueError(
                        f"backward: {type(node).__name__} must give a gradient of shape "
                        f"{tensor.shape}, got {part.shape}."
                    )
                part = part.astype(tensor.dtype, copy=False)
                child = tensor._node
                if child is None:
                    tensor.add_grad(part)
                elif child in pending:
                    pending[child] = bulk.add(pending[child], part)
                else:
                    pending[child] = part
            node.__dict__.clear()  # what it saved is freed while the walk goes on
            node.inputs = None


class Function:
    """An operation with a gradient. Subclasses define `forward` and `backward`.

    ``forward(self, *arrays, **options)`` returns an array and keeps on `self` what ``backward(self,
    grad)`` needs; `backward` returns one gradient per input, None where there is none.
    ``self.needs[i]`` says in both whether input i wants a gradient.

    Examples
    --------
    >>> class Square(Function):
    ...     def forward(self, x):
    ...         self.x = x
    ...         return x * x
    ...     def backward(self, grad):
    ...         return (2 * self.x * grad,)
    >>> x = Tensor([3.0], requires_grad=True)
    >>> Square.apply(x).backward()
    >>> x.grad
    array([6.], dtype=float32)
    """

    inputs: Sequence[Any] | None = ()
    needs: Sequence[bool] = ()
    number: int  # of those recorded

    def forward(self, *arrays: Any, **options: Any) -> Any:
        raise NotImplementedError

    def backward(self, grad: Any) -> Sequence[Any]:
        raise NotImplementedError

    def grad_room(self, i: int) -> Any:
        """Return an array for the gradient of input i, for `backward` to fill and return.

        That of a Parameter lies in its optimizer's flat buffer, and needn't be copied there.

        Examples
        --------
        >>> node = Function()
        >>> node.inputs = [np.zeros(3)]
        >>> node.grad_room(0).shape
        (3,)
        """
        x = self.inputs[i]
        if isinstance(x, Tensor) and all(x is not other for other in self.inputs[:i]):
            return x.grad_room()
        return _room(x.data if isinstance(x, Tensor) else x)

    @staticmethod
    def operand(x: Any) -> Any:
        """Return what `forward` gets of an input.

        Examples
        --------
        >>> Function.operand(Tensor([1.0]))
        array([1.], dtype=float32)
        """
        return x.data if isinstance(x, Tensor) else x

    @classmethod
    def apply(cls, *inputs: Any, **options: Any) -> Any:
        """Run `forward`: arrays in, array out; with a Tensor among the inputs, a Tensor out.

        Examples
        --------
        See the class.
        """
        node = cls()
        recording = is_recording()
        node.needs = [recording and isinstance(x, Tensor) and x.requires_grad for x in inputs]
        output = node.forward(*map(cls.operand, inputs), **options)
        if not any(isinstance(x, Tensor) for x in inputs):
            return output
        differentiable = any(node.needs) and arrays.is_float(output.dtype)
        return record(node, output, inputs) if differentiable else Tensor(output)


def record(node: Function, output: Any, inputs: Sequence[Any]) -> Tensor:
    """Return `output` as a Tensor made by `node` from `inputs`.

    Examples
    --------
    >>> record(Function(), np.zeros(2, np.float32), ()).requires_grad
    True
    """
    tensor = Tensor(output, requires_grad=True)
    node.inputs = inputs
    tensor._node = numbered(node)
    return tensor


def numbered(node: Function) -> Function:
    """Return a node that has been given the next number, by which `backward` knows what is later.

    Examples
    --------
    >>> numbered(Function()).number < numbered(Function()).number
    True
    """
    node.number = next(_numbers)
    return node


def leaves(tensor: Tensor) -> list[Tensor]:
    """Return the Tensors that `backward` of this one leaves a gradient in.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> x = Tensor([1.0], requires_grad=True)
    >>> leaves(x * x * Tensor([2.0]))
    [Tensor([1.], dtype=float32, requires_grad=True)]
    """
    if tensor._node is None:
        return [tensor] if tensor.requires_grad else []
    inputs = [x for node in _reverse_order(tensor._node) for x in node.inputs]
    found = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad and x._node is None]
    return list({id(x): x for x in found}.values())


def is_recording() -> bool:
    """Return whether operations of this thread are recorded, which `no_grad` turns off.

    Examples
    --------
    >>> is_recording()
    True
    """
    return _recording.get()


def unit_gradient(like: Any) -> Any:
    """Return the gradient that `Tensor.backward` begins with by default: 1, shaped as `like`.

    On a device it is always the same array, so that no kernel has to write it, and a node knows by
    ``grad is unit_gradient(grad)`` that there is nothing to multiply by. Nobody may write to it. A
    graph that is captured before there is one makes its own.

    Examples
    --------
    >>> unit_gradient(np.zeros((), np.float32))
    array(1., dtype=float32)
    """
    device = arrays.device(like)
    if device == "cpu":
        return np.ones_like(like)
    key = (device, like.device if device == "cuda" else None, like.shape, like.dtype)
    if key in _units:
        return _units[key]
    made = np.ones_like(like)
    if not arrays.is_capturing(arrays.module(device)):
        _units[key] = made
    return made


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Within this context nothing is recorded of what this thread does.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> x = Tensor([1.0], requires_grad=True)
    >>> with no_grad():
    ...     (x * 2).requires_grad
    False
    """
    before = _recording.get()
    _recording.set(False)
    try:
        yield
    finally:
        _recording.set(before)


def _room(like: Any) -> Any:
    xp = arrays.namespace("backward", like)
    return (arrays.empty if xp is np else xp.empty)(like.shape, like.dtype)


def _reverse_order(root: Function) -> list[Function]:
    """Nodes that `root` was made from, and it, the last to be recorded first.

    So what two look-ups send other ranks has the program's order, whatever lies between them: on a
    rank that replays a graph that is less than on one that doesn't.
    """
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        if node.inputs is None:
            raise ValueError("backward: this tape was used up by an earlier backward().")
        below = {tensor._node for tensor in node.inputs if isinstance(tensor, Tensor)}
        new = below - seen - {None}
        seen |= new
        stack += new
    return sorted(seen, key=lambda node: node.number, reverse=True)


def _check_device(order: list[Function], device: str | None) -> None:
    """Raise ValueError if a Tensor that wants a gradient is on another device by now."""
    tensors = (tensor for node in order for tensor in node.inputs if isinstance(tensor, Tensor))
    for tensor in tensors:
        if tensor.requires_grad and (now := arrays.device(tensor.held)) != device:
            raise ValueError(
                "backward: a Tensor must stay on its device from the forward pass on, "
                f"{device}, got one of shape {tensor.shape} on {now}."
            )

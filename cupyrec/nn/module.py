"""Parameter, Buffer, Module: a model is an object with `forward`; it learns its attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.autograd import Tensor
from cupyrec.embedding import Group
from cupyrec.parallel import Communicator, world

__all__ = ["Buffer", "Module", "Parameter"]


class Parameter(Tensor):
    """A Tensor that a Module learns.

    An optimizer gives it `grad_buffer`, a view of its flat gradient buffer; gradients are then
    written there.

    Examples
    --------
    >>> Parameter([1.0, 2.0])
    Parameter([1., 2.], dtype=float32, requires_grad=True)
    """

    grad_buffer: np.ndarray | None = None

    def __init__(self, data: Any) -> None:
        super().__init__(data, requires_grad=True)

    def add_grad(self, grad: np.ndarray) -> None:
        if self.grad_buffer is None:
            super().add_grad(grad)
        elif self.grad is None:
            if grad is not self.grad_buffer:
                self.grad_buffer[...] = grad
            self.grad = self.grad_buffer
        else:
            self.grad += grad

    def grad_room(self) -> Any:
        if self.grad_buffer is None or self.grad is not None:
            return super().grad_room()
        return self.grad_buffer


class Buffer(Tensor):
    """A Tensor that a Module keeps as part of its state, but that no optimizer changes.

    Examples
    --------
    >>> Buffer([0.0]).requires_grad
    False
    """

    def __init__(self, data: Any) -> None:
        super().__init__(data)


class Module:
    """Base of models and layers. Subclasses define `forward`.

    Parameters, buffers, embedding groups and further Modules are found among the attributes, in the
    order in which they were set, lists, tuples and dicts included. ``super().__init__()`` isn't
    needed.

    Attributes
    ----------
    training : bool
    by_blocks : bool
        Whether a model's outputs have the same bits, on the CPU, in batches of 64 rows and in one
        of up to 64 such batches side by side, within ``blocks_of(64)`` of
        `cupyrec.ops.fused_mlp`. It speaks of the class that says it, not of those derived from it;
        predictions are then made of so many rows at a time.

    Examples
    --------
    >>> class Linear(Module):
    ...     def __init__(self):
    ...         self.weight = Parameter([[2.0]])
    ...     def forward(self, x):
    ...         return x @ self.weight
    >>> Linear()(np.ones((1, 1), np.float32)).numpy()
    array([[2.]], dtype=float32)
    """

    training = True
    by_blocks = False
    _amp: str | None = None

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}: a Module must define forward().")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.forward(*inputs, **options)

    def _walk(self) -> Iterator[tuple[str, Any]]:
        """Yield (dotted name, object) of this Module and all below it, each object once."""
        seen: set[int] = set()
        stack: list[tuple[str, Any]] = [("", self)]
        while stack:
            name, value = stack.pop()
            if isinstance(value, (Module, Parameter, Buffer, Group)):
                if id(value) in seen:
                    continue
                seen.add(id(value))
                yield name, value
            if isinstance(value, Module):
                children = vars(value).items()
            elif isinstance(value, dict):
                children = value.items()
            elif isinstance(value, (list, tuple)):
                children = enumerate(value)
            else:
                continue
            dot = f"{name}." if name else ""
            stack.extend((f"{dot}{key}", child) for key, child in reversed(list(children)))

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, Module) of this Module, whose name is empty, and of all below it.

        Examples
        --------
        >>> [name for name, _ in Module().named_modules()]
        ['']
        """
        return ((name, value) for name, value in self._walk() if isinstance(value, Module))

    def modules(self) -> Iterator[Module]:
        """Yield this Module and all below it.

        Examples
        --------
        >>> len(list(Module().modules()))
        1
        """
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (dotted name, Parameter) of all dense parameters.

        Examples
        --------
        >>> list(Module().named_parameters())
        []
        """
        return ((name, value) for name, value in self._walk() if isinstance(value, Parameter))

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Yield (dotted name, Buffer) of all buffers.

        Examples
        --------
        >>> list(Module().named_buffers())
        []
        """
        return ((name, value) for name, value in self._walk() if isinstance(value, Buffer))

    def named_groups(self) -> Iterator[tuple[str, Group]]:
        """Yield (dotted name, Group) of all groups of embedding tables.

        Examples
        --------
        >>> list(Module().named_groups())
        []
        """
        return ((name, value) for name, value in self._walk() if isinstance(value, Group))

    def parameters(self) -> Iterator[Parameter | Group]:
        """Yield all that an optimizer updates: dense parameters and groups of tables.

        Examples
        --------
        >>> list(Module().parameters())
        []
        """
        return (value for _, value in self._walk() if isinstance(value, (Parameter, Group)))

    def train(self, mode: bool = True) -> Module:
        """Switch dropout and the insertion of ids on or off, here and below; return the Module.

        Examples
        --------
        >>> Module().train().training
        True
        """
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """Switch to evaluation: no dropout, no table changes; return the Module.

        Examples
        --------
        >>> Module().eval().training
        False
        """
        return self.train(False)

    @property
    def amp(self) -> str | None:
        """Type of 16 bits that is multiplied in, ``float16`` or ``bfloat16``; None: float32.

        Setting it sets it here and below. Parameters, embedding rows and what they are updated by
        stay float32, sums are float32.

        Raises
        ------
        ValueError
            Another type.

        Examples
        --------
        >>> model = Module()
        >>> model.amp = "bfloat16"
        >>> model.amp
        'bfloat16'
        """
        return self._amp

    @amp.setter
    def amp(self, name: str | None) -> None:
        known = [None, *(dtype.name for dtype in arrays.HALVES)]
        if name not in known:
            raise ValueError(f"amp: must be one of {known}, got {name!r}.")
        for module in self.modules():
            module._amp = name

    @property
    def device(self) -> str:
        """Name of the device that the Module's parameters are on, ``cpu`` if it has none."""
        first = next(self.parameters(), None)
        if isinstance(first, Group):
            return arrays.name(first.xp)
        return "cpu" if first is None else arrays.device(first.data)

    @property
    def ranks(self) -> Communicator:
        """The ranks that its tables lie on; without tables, all that the launcher started."""
        group = next((group for _, group in self.named_groups()), None)
        return world() if group is None else group.exchange.ranks

    def prepare(self, ids: Any) -> None:
        """Tell the ids of the batch after the next; a Module may pass them to its embeddings.

        See `MultiTableEmbedding.prepare`. It is called by `fit`, and changes no result.

        Examples
        --------
        >>> Module().prepare(np.zeros((2, 3), np.int64))
        """

    def to(self, device: str) -> Module:
        """Move parameters, buffers and tables to ``cpu``, ``cuda`` or ``sim``; return the Module.

        Gradients are dropped. Make the optimizer afterwards: one made before holds the old arrays.

        Raises
        ------
        ValueError
            No such device.
        RuntimeError
            There is no GPU, or CuPy is missing.

        Examples
        --------
        >>> Module().to("cpu").device
        'cpu'
        """
        xp = arrays.module(device)
        for _, value in list(self._walk()):
            if isinstance(value, Group):
                value.to(xp)
            elif isinstance(value, Tensor) and arrays.device(value.data) != device:
                value.data = arrays.copy_to(xp, value.data)
                if isinstance(value, Parameter):
                    value.grad = value.grad_buffer = None
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return name -> array of the dense parameters and buffers; the arrays are their own.

        Examples
        --------
        >>> Module().state_dict()
        {}
        """
        return {name: value.data for name, value in self._walk() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy arrays of any device into parameters and buffers; nothing changes unless all fit.

        Raises
        ------
        ValueError
            A name is missing or unknown, or a shape differs.
        TypeError
            An array is not of real numbers.

        Examples
        --------
        >>> Module().load_state_dict({})
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            raise ValueError(
                "load_state_dict: names must be the model's, "
                f"got missing {sorted(own.keys() - state.keys())}, "
                f"unknown {sorted(state.keys() - own.keys())}."
            )
        for name, array in own.items():
            if array.shape != state[name].shape:
                raise ValueError(
                    f"load_state_dict: '{name}' must have shape {array.shape}, "
                    f"got {state[name].shape}."
                )
            if not np.can_cast(state[name].dtype, array.dtype, "same_kind"):
                raise TypeError(
                    f"load_state_dict: '{name}' must be {array.dtype}, got {state[name].dtype}."
                )
        for name, array in own.items():
            xp = arrays.namespace("load_state_dict", array)
            array[...] = arrays.copy_to(xp, state[name])

"""A method as CUDA graphs: what it launches, forward and backward, is captured once and replayed.

A replay costs the host two calls however many launches there are, asks for no memory and waits for
nothing. It does what the launches did when they were captured, on the same addresses, so a graph
belongs to all that they were made of: sizes, where parameters and their gradients lie, and the
module's numbers and flags. Whenever one of these differs the method is called as it is.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, autograd, random
from cupyrec.autograd import Function, Tensor
from cupyrec.ops.row_vectors import RowVectors
from cupyrec.scratch import share_counters

__all__ = ["graphed"]

logger = logging.getLogger("cupyrec")

_CALLS = 3  # alike in a row: by the last one kernels are compiled and matmuls have their algorithms
_MOST = 4  # graphs of a module, each with memory of its own
_ALIGNED = 256  # bytes, the most that cublasLt chooses its algorithms by
_PLAIN = (bool, int, float, str, type(None))
_capturing = contextvars.ContextVar("capturing", default=False)


def graphed(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a method of a `Module` be replayed as CUDA graphs in training, on ``cuda`` and ``sim``.

    It is captured when it is called with inputs of the same shapes for the third time in a row.
    Results and gradients are those of the method itself, bit for bit; parts of the gradient of a
    parameter that it uses several times are added up before those from elsewhere. So that sums have
    the same order, it gets copies of inputs that are not contiguous or aligned.

    It is called as it is on the CPU, within `no_grad`, without an optimizer, for an empty batch,
    while gradients of a former call are kept or still to come, with arguments by keyword, and for
    other shapes, such as those of a last batch.

    What happens on the host happens in the capture alone. The method must therefore read no value
    of a device's array, take none from the host, and launch the same work in every call; what it
    can't capture is logged once, and the method is called as it is from then on.

    Parameters
    ----------
    method : callable
        Of a Module; takes arrays and Tensors, and returns a Tensor made from parameters of it. All
        arrays, numbers and flags that it uses must be arguments or attributes of the Module or of
        modules below.

    Notes
    -----
    PyTorch's ``make_graphed_callables``, which leaves it to the caller that nothing but the inputs'
    contents changes.

    Examples
    --------
    >>> from cupyrec import nn
    >>> class Tower(nn.Module):
    ...     def __init__(self):
    ...         self.mlp = nn.FusedMLP(3, [4], 1)
    ...     @graphed
    ...     def forward(self, x):
    ...         return self.mlp(x)
    >>> Tower()(np.ones((2, 3), np.float32)).shape
    (2, 1)
    """
    graphs: weakref.WeakKeyDictionary[Any, _Graphs] = weakref.WeakKeyDictionary()

    @functools.wraps(method)
    def call(module: Any, *inputs: Any, **options: Any) -> Tensor:
        plain = not autograd.is_recording() or _capturing.get() or not _on_device(inputs)
        if plain or options:
            return method(module, *inputs, **options)
        if module not in graphs:
            graphs[module] = _Graphs()
        graph = graphs[module].find(method, module, inputs)
        if graph is not None:
            return graph.replay(inputs)
        return _as_replayed(method(module, *map(_as_replayed, inputs)))

    return call


def _data(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


def _held(x: Any) -> Any:
    return x.held if isinstance(x, Tensor) else x


class _AsReplayed(Function):
    """x where a graph would have it, and its gradient: the order of sums may depend on that."""

    def forward(self, x):
        return self._placed(x)

    def backward(self, grad):
        return (self._placed(grad),)

    @staticmethod
    def _placed(x):
        alike = x.flags.c_contiguous and arrays.address(x) % _ALIGNED == 0
        return x if alike else x.copy()


def _as_replayed(x: Any) -> Any:
    plain = isinstance(x, RowVectors) or arrays.device(_data(x)) is None
    return x if plain else _AsReplayed.apply(x)


def _on_device(inputs: tuple) -> bool:
    """Whether these are numbers, and something to compute on in arrays that kernels take."""
    data = [_held(x) for x in inputs if not isinstance(x, _PLAIN)]
    return bool(data) and all(arrays.device(x) in ("cuda", "sim") and x.size > 0 for x in data)


class _Graphs:
    """The graphs of a module, by the shapes of their inputs."""

    def __init__(self) -> None:
        self.graphs: dict[tuple, _Graph] = {}
        self.state: list[Any] = []
        self.last: tuple = ()
        self.alike = 0  # calls in a row
        self.refused = False

    def find(self, method: Callable, module: Any, inputs: tuple) -> _Graph | None:
        """The graph for such a call, None where the method is to be called as it is."""
        state, parameters = _state(module)
        if self.refused or not all(_has_room(p) for p in parameters):
            return None
        if not _same(state, self.state):
            self.graphs.clear()  # none of them will be right again
            self.state, self.alike = state, 0
        key = random.first_sample(), *map(_kind, inputs)
        self.alike = self.alike + 1 if key == self.last else 1
        self.last = key
        if key not in self.graphs and self.alike >= _CALLS:
            self._capture(key, method, module, inputs, parameters)
        graph = self.graphs.pop(key, None)
        if graph is None:
            return None
        self.graphs[key] = graph  # the last to be forgotten
        return graph if graph.idle() else None

    def _capture(
        self, key: tuple, method: Callable, module: Any, inputs: tuple, parameters: list[Tensor]
    ) -> None:
        if len(self.graphs) == _MOST:
            del self.graphs[next(iter(self.graphs))]
        function = functools.partial(method, module)
        token = _capturing.set(True)
        try:
            self.graphs[key] = _Graph(function, inputs, parameters)
        except Exception as error:  # CuPy raises many types
            self.refused = True
            logger.warning("%s runs without a CUDA graph: %s", method.__qualname__, error)
        finally:
            _capturing.reset(token)
            for p in parameters:  # nothing has been computed
                p.grad = None


class _Graph:
    """A forward and a backward graph, and the memory that they work on.

    Inputs are copied to it. The output is copied from it, since a caller may keep that as long as
    it likes; gradients of inputs are lent, and nothing is replayed until they have come back.
    """

    def __init__(self, function: Callable, inputs: tuple, parameters: list[Tensor]) -> None:
        self.xp = xp = arrays.namespace("graphed", *filter(arrays.device, map(_held, inputs)))
        self.step = xp.empty(1, np.uint32)
        self.draws = False  # whether random numbers of the step are drawn
        self.pending: Callable[[], Any] = _nothing  # the replay whose backward is to come
        self.lent: list[Callable[[], Any]] = []
        self.inputs = [_static(xp, x) for x in inputs]
        self.pool, stream = xp.cuda.MemoryPool(), _stream(xp, xp.cuda.Device().id)
        share_counters(xp, stream)
        with xp.cuda.using_allocator(self.pool.malloc), random.step_from(self._step), stream:
            with _capture(stream) as forward:
                output = function(*self.inputs)
            if not (isinstance(output, Tensor) and output.requires_grad):
                raise TypeError("graphed: the method must return a Tensor with a gradient.")
            taught = [p for p in autograd.leaves(output) if not isinstance(p, (_Input, RowVectors))]
            if strangers := [p.shape for p in taught if all(p is not q for q in parameters)]:
                raise TypeError(
                    "graphed: what gets a gradient must be an input or a parameter of the module, "
                    f"got a Tensor {strangers[0]}."
                )
            self.grad = xp.empty(output.shape, output.dtype)
            with _capture(stream) as backward:
                output.backward(self.grad)
                self.gradients = [_contiguous(xp, x) for x in self.inputs]
        if any(p.grad is not p.grad_buffer for p in taught):
            raise TypeError("graphed: what gets a gradient must be an nn.Parameter, got a Tensor.")
        self.output, self.forward, self.backward = output.data, forward[0], backward[0]
        self.rooms = [(p, p.grad_buffer) for p in taught]

    def _step(self) -> Any:
        self.draws = True
        return self.step

    def idle(self) -> bool:
        """Whether what it would overwrite is of use no more."""
        return self.pending() is None and all(lent() is None for lent in self.lent)

    def replay(self, inputs: tuple) -> Tensor:
        for static, x in zip(self.inputs, inputs, strict=True):
            if isinstance(x, RowVectors):
                static.fill(x)
            elif arrays.device(_data(x)):
                _copy(_data(x), _data(static))
        if self.draws:
            self.step.fill(random.step())
        self.forward.launch()
        node = _Replay(self)
        self.pending = weakref.ref(node)
        # With its parameters, of which `backward` sees that they have stayed on their device.
        return autograd.record(node, self.output.copy(), (*inputs, *(p for p, _ in self.rooms)))

    def replay_backward(self, grad: Any) -> list[Any]:
        """The gradients of a replay's inputs; of parameters they go where their optimizer wants."""
        _copy(grad, self.grad)
        held = [(p, p.grad.copy()) for p, _ in self.rooms if p.grad is not None]
        self.backward.launch()
        for p, room in self.rooms:
            p.grad = room
        for p, before in held:  # from elsewhere in the same tape
            p.grad += before
        self.pending = _nothing
        lent = [None if g is None else self._lend(g) for g in self.gradients]
        return lent + [None] * len(self.rooms)

    def _lend(self, grad: Any) -> Any:
        loan = _Loan(self, grad)
        self.lent = [lent for lent in self.lent if lent() is not None] + [weakref.ref(loan)]
        return self.xp.asarray(loan).view(grad.dtype).reshape(grad.shape)


class _Replay(Function):
    def __init__(self, graph: _Graph) -> None:
        self.graph = graph

    def backward(self, grad):
        for static, x in zip(self.graph.inputs, self.inputs, strict=False):
            if isinstance(x, RowVectors):
                static.follow(x)  # raises if rows have changed since
        return self.graph.replay_backward(grad)


class _Loan:
    """Bytes of a graph's memory; it lives as long as any array made from it."""

    def __init__(self, graph: _Graph, array: Any) -> None:
        self.graph = graph
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (array.nbytes,), "typestr": "|u1", "stream": None,
            "data": (arrays.address(array), False), "strides": None,
        }  # fmt: skip


class _Input(Tensor):
    """An input of a capture, whose gradient stays where its node has put it."""

    def add_grad(self, grad: Any) -> None:
        self.grad = grad if self.grad is None else self.grad + grad


def _nothing() -> None:
    return None


def _contiguous(xp: ModuleType, x: Any) -> Any:
    """The gradient of an input, None where it has none."""
    grad = getattr(x, "grad", None)
    return None if grad is None else xp.ascontiguousarray(grad)


def _static(xp: ModuleType, x: Any) -> Any:
    """An input of the same kind in memory of its own."""
    if isinstance(x, RowVectors):
        return x.static()
    data = _data(x)
    if arrays.device(data) is None:
        return x
    room = xp.empty(data.shape, data.dtype)
    return _Input(room, x.requires_grad) if isinstance(x, Tensor) else room


def _copy(source: Any, target: Any) -> None:
    if arrays.address(source) != arrays.address(target):
        target[...] = source


@contextlib.contextmanager
def _capture(stream: Any) -> Iterator[list[Any]]:
    """Yield a list which has the graph of what happens within this context, after it."""
    graph: list[Any] = []
    stream.begin_capture()
    try:
        yield graph
    except BaseException:
        with contextlib.suppress(Exception):  # CUDA may have given it up already
            stream.end_capture()
        raise
    graph.append(stream.end_capture())


@functools.cache
def _stream(xp: ModuleType, device: int) -> Any:
    """The stream of all captures: one workspace of cublasLt serves them."""
    return xp.cuda.Stream(non_blocking=True)


# What a graph depends on


def _kind(x: Any) -> tuple:
    """What of an input is captured."""
    if isinstance(x, RowVectors):
        return type(x), *x.kind()
    data = _data(x)
    if arrays.device(data) is None:
        return type(x), x
    return type(x), data.shape, data.dtype, getattr(x, "requires_grad", False)


def _has_room(p: Tensor) -> bool:
    """Whether the gradient of a parameter goes to its optimizer's buffer, and is to come."""
    return getattr(p, "grad_buffer", None) is not None and p.grad is None


def _state(module: Any) -> tuple[list[Any], list[Tensor]]:
    """All that a method of a module may launch by, and the parameters that want a gradient."""
    state: list[Any] = []
    parameters: list[Tensor] = []
    for part in module.modules():
        state += part.training, part.amp
        stack: list[Any] = [{k: v for k, v in vars(part).items() if k not in ("training", "_amp")}]
        while stack:
            value = stack.pop()
            if isinstance(value, Tensor):
                state += value.data, value.requires_grad, getattr(value, "grad_buffer", None)
                if value.requires_grad:
                    parameters.append(value)
            elif isinstance(value, (list, tuple)):
                state.append(len(value))
                stack += value
            elif isinstance(value, dict):
                state += value
                stack += value.values()
            else:
                state.append(value)
    return state, parameters


def _same(a: list[Any], b: list[Any]) -> bool:
    """Whether two states have the same arrays, and equal numbers and names."""
    return len(a) == len(b) and all(
        x is y or (isinstance(x, _PLAIN) and type(x) is type(y) and x == y)
        for x, y in zip(a, b, strict=True)
    )

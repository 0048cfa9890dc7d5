"""Arrays in the simulator's memory, with as much of CuPy's interface as cupyrec uses.

It is a class of its own, not a kind of `numpy.ndarray`, so that nothing takes it for one: like a
CuPy array it refuses to become a NumPy array unless `get` is called, and its functions refuse NumPy
arrays. Work on the host, done by NumPy, stands for CuPy's own kernels.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyrec.sim import cuda, recorder
from cupyrec.sim.heap import the_heap

__all__ = ["FUNCTIONS", "array", "asarray", "asnumpy", "empty", "ndarray"]


class ndarray:
    """An array of the simulator, whose bytes nothing has written yet.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype

    Examples
    --------
    >>> from cupyrec import sim
    >>> x = sim.asarray(np.arange(6).reshape(2, 3))
    >>> (x[1] * 2).sum().get()
    array(24)
    """

    __hash__ = None

    def __init__(self, shape: int | tuple[int, ...], dtype: Any = float) -> None:
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if min(shape, default=0) < 0:
            raise ValueError(f"sim.empty: 'shape' must have no size below 0, got {shape}.")
        nbytes = dtype.itemsize * math.prod(map(int, shape))
        memory = cuda.allocate(nbytes, f"{dtype} {shape}")
        self._host = np.asarray(memory).view(dtype).reshape(shape)

    def _view(self, host: np.ndarray) -> ndarray:
        """An array of the same bytes."""
        result = object.__new__(type(self))
        result._host = host
        return result

    def _written(self) -> np.ndarray:
        return _written(self._host)

    # What it is

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: self._host.flags)
    T = property(lambda self: self.transpose())

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "version": 3, "stream": None,
            "data": (self._host.ctypes.data, False),
            "strides": None if self.flags.c_contiguous else self.strides,
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self._host)

    def __repr__(self) -> str:
        return repr(self._host)

    def __str__(self) -> str:
        return str(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "sim.ndarray: a conversion to NumPy must be asked for, got an implicit one; "
            "call .get()."
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's functions give arrays of the simulator, as CuPy's arrays have it."""
        if method != "__call__" or ufunc.__name__ not in FUNCTIONS or options:
            return NotImplemented
        return FUNCTIONS[ufunc.__name__](*inputs)

    def __array_function__(self, function: Callable, types: Any, args: Any, options: Any) -> Any:
        ours = FUNCTIONS.get(function.__name__)
        return ours(*args, **options) if ours else NotImplemented

    # Between host and device

    def get(self) -> np.ndarray:
        """Copy to a NumPy array."""
        cuda.waits("get")
        return self._host.copy()

    def set(self, arr: np.ndarray) -> None:
        """Copy from a NumPy array of the same shape and dtype."""
        if arr.shape != self.shape or arr.dtype != self.dtype:
            raise ValueError(
                f"sim.ndarray.set: 'arr' must be {self.dtype} {self.shape}, "
                f"got {arr.dtype} {arr.shape}."
            )
        self[...] = array(arr)

    def item(self) -> Any:
        """Return the one element as a Python scalar."""
        cuda.waits("item")
        return self._host.item()

    # Parts and shapes

    def __getitem__(self, key: Any) -> ndarray:
        host = self._host[_index(key)]
        if isinstance(host, np.ndarray) and np.may_share_memory(host, self._host):
            return self._view(host)
        if not isinstance(host, np.ndarray):  # one element is an array of no axes, as in CuPy
            return self._view(self._host[(*np.atleast_1d(_index(key)), ...)])
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, ndarray) and k.dtype.kind == "b" for k in keys):
            cuda.forbid("an array of the size of what a mask lets through")
        reads = host.nbytes + _nbytes(_index(key))
        return _fresh("take", _taken, self._host, _index(key), reads=reads)

    def __setitem__(self, key: Any, value: Any) -> None:
        key, host = _index(key), _unwrap(value)
        same = isinstance(value, ndarray) and value.dtype == self.dtype
        cuda.submit(_set, self._host, key, host, same)

    def reshape(self, *shape: Any) -> ndarray:
        """Return the same elements in another shape, a view where that is possible."""
        host = self._host.reshape(*shape)
        if np.may_share_memory(host, self._host):
            return self._view(host)
        return _fresh(None, _reshaped, self._host, host.shape)

    def ravel(self) -> ndarray:
        """Return all elements along one axis."""
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        """Return a view with other order of axes."""
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        """Return a view with two axes exchanged."""
        return self._view(self._host.swapaxes(axis1, axis2))

    def view(self, dtype: Any = None) -> ndarray:
        """Return the same bytes as another dtype."""
        return self._view(self._host.view(dtype or self.dtype))

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        """Return a copy of another dtype; the array itself if it has that and not `copy`."""
        if not copy and self.dtype == dtype:
            return self
        return _fresh("astype", _converted, self._host, dtype)

    def copy(self) -> ndarray:
        """Return a copy in C order."""
        return _fresh("copy", _converted, self._host)

    def __deepcopy__(self, memo: Any) -> ndarray:
        return _fresh(None, _converted, self._host)

    def __reduce__(self) -> tuple:
        return array, (self.get(),)

    def fill(self, value: Any) -> None:
        """Set all elements."""
        self[...] = value


# Work on the host, whose arrays those of the simulator are: see `cuda.submit`


def _written(host: np.ndarray) -> np.ndarray:
    """Whether each byte is written: one more axis, of the bytes of an item."""
    heap = the_heap()
    start = host.ctypes.data - heap.base
    shape, strides = (*host.shape, host.itemsize), (*host.strides, 1)
    return np.ndarray(shape, np.uint8, heap.written, start, strides)


def _fresh(
    name: str | None, work: Callable, *given: Any, passes: int = 1, reads: int | None = None
) -> Any:
    """A new array of what `work` gives, (values, which bytes are written): a launch, if named."""
    later = not cuda.get_current_stream().null
    with np.errstate(all="ignore") if later else contextlib.nullcontext():
        values, written = work(*given)
    if values is NotImplemented:
        return values
    values = np.asarray(values)
    result = ndarray(values.shape, values.dtype)
    moved = passes * ((_nbytes(given) if reads is None else reads) + values.nbytes)
    launch = None if name is None else recorder.Launch(name, moved=moved)
    if later:  # the values were those of no time, and told the shape alone
        cuda.submit(lambda host, *given: _fill(launch, host, *work(*given)), result._host, *given)
    else:
        _fill(launch, result._host, values, written)
    return result


def _fill(launch: recorder.Launch | None, host: np.ndarray, values: Any, written: Any) -> None:
    if launch is not None:
        recorder.launched(launch)
    host[...], _written(host)[...] = values, written


def _taken(host: np.ndarray, key: Any) -> tuple:
    return host[key], _written(host)[_of_bytes(key)]


def _reshaped(host: np.ndarray, shape: tuple[int, ...]) -> tuple:
    return host.reshape(shape), _written(host).reshape(*shape, host.itemsize)


def _converted(host: np.ndarray, dtype: Any = None) -> tuple:
    same = dtype is None or host.dtype == dtype
    return (host, _written(host)) if same else (host.astype(dtype), 1)


def _set(host: np.ndarray, key: Any, values: Any, same: bool) -> None:
    """Write an array of the same dtype with what of it is written, or numbers."""
    recorder.launched(recorder.Launch("setitem", moved=_nbytes([host[key], values])))
    written = _written(values).copy() if same else 1
    host[key] = values
    _written(host)[_of_bytes(key)] = written


def _of_bytes(key: Any) -> tuple:
    """An index of elements as one of all their bytes."""
    key = key if isinstance(key, tuple) else (key,)
    return (*key, slice(None)) if any(k is Ellipsis for k in key) else key


def _index(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(_index(k) for k in key)
    return key._host if isinstance(key, ndarray) else key


def _unwrap(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("sim: arrays must be of the simulator (device 'sim'), got numpy.ndarray.")
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrap(v) for v in value)
    return value


def _nbytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return value.nbytes if isinstance(value, (np.ndarray, np.generic)) else 0


def _lift(function: Callable) -> Callable:
    """The same function for arrays of the simulator."""
    name, place = function.__name__, _place_of_out(function)
    waits = function is np.flatnonzero  # for the size of what it returns

    def work(args: Any, options: dict[str, Any]) -> tuple:
        return function(*args, **options), 1

    def fill(host: np.ndarray, args: Any, options: dict[str, Any]) -> None:
        recorder.launched(recorder.Launch(name, moved=_nbytes([args, host])))
        function(*args, **options)
        _written(host)[...] = 1

    @functools.wraps(function)
    def lifted(*args: Any, **options: Any) -> Any:
        out = args[place] if place is not None and len(args) > place else options.get("out")
        args, options = _unwrap(args), {k: _unwrap(value) for k, value in options.items()}
        if isinstance(out, ndarray):
            cuda.submit(fill, out._host, args, options)
            return out
        if waits:
            cuda.waits(name)
        # A radix sort takes 8 bits of the keys a pass.
        passes = args[0].itemsize if name in ("sort", "argsort") else 1
        return _fresh(name, work, args, options, passes=passes)

    return lifted


def _place_of_out(function: Callable) -> int | None:
    """Where among the arguments `out` stands."""
    if isinstance(function, np.ufunc):
        return function.nin
    try:
        return list(inspect.signature(function).parameters).index("out")
    except ValueError:  # none, or a function that doesn't tell
        return None


def _operator(name: str) -> Callable:
    def work(host: np.ndarray, *others: Any) -> tuple:
        return getattr(host, name)(*others), 1

    def operate(self: ndarray, *others: Any) -> Any:
        return _fresh(name.strip("_"), work, self._host, *_unwrap(others))

    return operate


def _in_place(name: str) -> Callable:
    def work(host: np.ndarray, other: Any) -> None:
        launch = recorder.Launch(name.strip("_"), moved=_nbytes([host, host, other]))
        recorder.launched(launch)
        getattr(host, name)(other)

    def operate(self: ndarray, other: Any) -> ndarray:
        cuda.submit(work, self._host, _unwrap(other))
        return self

    return operate


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(ndarray, f"__r{_name}__", _operator(f"__r{_name}__"))
    if _name != "matmul":
        setattr(ndarray, f"__i{_name}__", _in_place(f"__i{_name}__"))
for _name in "neg pos abs invert eq ne lt le gt ge".split():
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in "sum mean max min any all cumsum argsort squeeze".split():
    setattr(ndarray, _name, functools.wraps(getattr(np, _name))(_lift(getattr(np, _name))))


def empty(shape: int | tuple[int, ...], dtype: Any = float) -> ndarray:
    """Return an array whose bytes nothing has written.

    Examples
    --------
    >>> empty((2, 3), np.float32).shape
    (2, 3)
    """
    return ndarray(shape, dtype)


def array(obj: Any, dtype: Any = None) -> ndarray:
    """Return a copy of anything that `numpy.array` takes, or of an array of the simulator.

    Examples
    --------
    >>> array([1, 2]).get()
    array([1, 2])
    """
    if isinstance(obj, ndarray):
        return _fresh(None, _converted, obj._host, dtype)
    cuda.forbid("array")
    return _fresh(None, lambda: (np.asarray(obj, dtype), 1))


def asarray(a: Any, dtype: Any = None) -> ndarray:
    """Return `a` itself if it is an array of the simulator of this dtype, else a copy.

    Of what has a ``__cuda_array_interface__`` it is a view, as in CuPy.

    Examples
    --------
    >>> x = asarray([1, 2])
    >>> asarray(x) is x
    True
    """
    if not isinstance(a, ndarray) and hasattr(a, "__cuda_array_interface__"):
        lent = SimpleNamespace(owner=a, __array_interface__=a.__cuda_array_interface__)
        a = object.__new__(ndarray)._view(np.asarray(lent))
    same = isinstance(a, ndarray) and dtype in (None, a.dtype)
    return a if same else array(a, dtype)


def asnumpy(a: ndarray) -> np.ndarray:
    """Return a copy on the host.

    Examples
    --------
    >>> asnumpy(array([1, 2]))
    array([1, 2])
    """
    return a.get()


def _lift_view(function: Callable) -> Callable:
    """The same function for arrays of the simulator; where it can, its result shares memory."""

    @functools.wraps(function)
    def lifted(a: Any, *args: Any, **options: Any) -> Any:
        found = function(_unwrap(a), *args, **options)
        return [share(a, part) for part in found] if type(found) is list else share(a, found)

    def share(a: Any, host: Any) -> Any:
        if not isinstance(host, np.ndarray):
            return host
        if isinstance(a, ndarray) and np.may_share_memory(host, a._host):
            return a._view(host)
        if function is np.ascontiguousarray:
            return _fresh(None, _converted, _unwrap(a))
        return array(host)

    return lifted


#: NumPy's functions for arrays of the simulator, by NumPy's and CuPy's name.
FUNCTIONS = {
    name: _lift(getattr(np, name))
    for name in (
        "abs absolute add arange argsort concatenate cumsum divide equal exp flatnonzero full"
        " full_like greater less log log1p matmul maximum mean minimum multiply ones ones_like"
        " power sort sqrt stack subtract sum tanh tile where zeros zeros_like"
    ).split()
} | {
    name: _lift_view(getattr(np, name))
    for name in (
        "ascontiguousarray broadcast_to expand_dims ndim reshape shape size split transpose"
    ).split()
}

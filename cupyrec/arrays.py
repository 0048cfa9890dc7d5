"""Which device an array belongs to, how it gets there, and where the CPU's memory comes from.

A device is an array module: `numpy` is ``cpu``, `cupy` is ``cuda``, `cupyrec.sim` is ``sim``. An op
picks its loops or kernels by the module of its arrays; there is no global switch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import mmap
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "DEVICES", "HALVES", "address", "bits", "check_current", "choose_gpu", "copy_to",
    "current_gpu", "device", "empty", "is_capturing", "is_float", "module", "name", "namespace",
    "pages", "stream", "to_host",
]  # fmt: skip

logger = logging.getLogger("cupyrec")

DEVICES = ("cpu", "cuda", "sim")
HALVES = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def is_float(dtype: np.dtype) -> bool:
    """Return whether a dtype is one of floats; NumPy does not know bfloat16 for one.

    Examples
    --------
    >>> [is_float(d) for d in (*HALVES, np.dtype(np.int32))]
    [True, True, False]
    """
    return dtype.kind == "f" or dtype in HALVES


def device(array: Any) -> str | None:
    """Return the name of the device that `array` belongs to, None if it is no array.

    Examples
    --------
    >>> device(np.zeros(3)), device([0.0])
    ('cpu', None)
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return "cpu"
    # Whoever made an array of the others has imported them.
    for name, where in (("cupyrec.sim", "sim"), ("cupy", "cuda")):
        loaded = sys.modules.get(name)
        if loaded is not None and isinstance(array, loaded.ndarray):
            return where
    return None


def bits(array: Any) -> Any:
    """Return an array as kernels take it: floats of 16 bits as uint16, others as they are.

    Examples
    --------
    >>> bits(np.ones(2, np.float16))
    array([15360, 15360], dtype=uint16)
    """
    return array.view(np.uint16) if array.dtype in HALVES else array


def address(array: Any) -> int:
    """Return where the first element of an array lies.

    Examples
    --------
    >>> x = np.zeros(2)
    >>> address(x[1:]) - address(x)
    8
    """
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return array.__cuda_array_interface__["data"][0]


def module(device: str) -> ModuleType:
    """Return the array module of a device.

    Raises
    ------
    ValueError
        No such device.
    RuntimeError
        The device can't be used here.

    Examples
    --------
    >>> module("cpu").__name__
    'numpy'
    >>> module("gpu")
    Traceback (most recent call last):
        ...
    ValueError: device: must be 'cpu', 'cuda' or 'sim', got 'gpu'.
    """
    if device == "cpu":
        return np
    if device == "sim":
        from cupyrec import sim

        return sim
    if device != "cuda":
        raise ValueError(f"device: must be 'cpu', 'cuda' or 'sim', got {device!r}.")
    try:
        import cupy

        if _wished is not None:
            _use_chosen(cupy.cuda)
        capability = int(cupy.cuda.Device().compute_capability)
    except Exception as error:  # no package, no driver, no GPU: CuPy raises many types
        raise RuntimeError(
            f"device 'cuda': needs an NVIDIA GPU, its driver and cupyrec[cuda12] or "
            f"cupyrec[cuda13], got {type(error).__name__}: {error}"
        ) from None
    if capability < 80:
        raise RuntimeError(
            f"device 'cuda': needs compute capability 8.0 or higher, got {capability / 10}."
        )
    return cupy


def current_gpu(device: str) -> Callable[[], contextlib.AbstractContextManager]:
    """Return what makes contexts in which the GPU that is current now is so in any thread.

    CuPy has one of each thread's own, at first number 0.

    Raises
    ------
    ValueError, RuntimeError
        As `module`.

    Examples
    --------
    >>> with current_gpu("cpu")():
    ...     pass
    """
    xp = module(device)
    if xp is np:
        return contextlib.nullcontext
    return functools.partial(xp.cuda.Device, xp.cuda.Device().id)


def check_current(where: str, name: str, array: Any) -> None:
    """Raise ValueError if `array` lies on another GPU than CuPy's current one.

    Examples
    --------
    >>> check_current("f", "x", np.zeros(3))
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray):
        return
    current = cupy.cuda.Device().id
    if array.device.id != current:
        raise ValueError(
            f"{where}: '{name}' must be on GPU {current}, the current one, "
            f"got GPU {array.device.id}."
        )


def stream(module: ModuleType) -> tuple[int, int]:
    """Return device number and address of the stream on which an array module's work goes on.

    Examples
    --------
    >>> stream(np)
    (-1, 0)
    """
    if module is np:
        return -1, 0
    current = module.cuda.get_current_stream()
    return module.cuda.Device().id, getattr(current, "ptr", id(current))  # sim's have no address


def is_capturing(module: ModuleType) -> bool:
    """Return whether work becomes part of a graph now: whoever keeps arrays may not begin to.

    An array made now has no contents before that graph is launched.

    Examples
    --------
    >>> is_capturing(np)
    False
    """
    return module is not np and module.cuda.get_current_stream().is_capturing()


def name(module: ModuleType) -> str:
    """Return the name of the device of an array module.

    Examples
    --------
    >>> name(np)
    'cpu'
    """
    return {"numpy": "cpu", "cupy": "cuda", "cupyrec.sim": "sim"}[module.__name__]


def namespace(where: str, *arrays: Any) -> ModuleType:
    """Return the array module that all `arrays` belong to.

    Parameters
    ----------
    where : str
        Name of the caller, for the error sentence.
    *arrays : array
        Arrays of one device.

    Returns
    -------
    module
        `numpy`, `cupy` or `cupyrec.sim`.

    Raises
    ------
    TypeError
        An argument is no array, or they belong to several devices.

    Examples
    --------
    >>> namespace("f", np.zeros(3)).__name__
    'numpy'
    >>> namespace("f", [1, 2])
    Traceback (most recent call last):
        ...
    TypeError: f: arguments must be arrays of NumPy, CuPy or cupyrec.sim, got list.
    """
    devices = [None if isinstance(array, np.generic) else device(array) for array in arrays]
    if None in devices:
        wrong = type(arrays[devices.index(None)]).__name__
        raise TypeError(
            f"{where}: arguments must be arrays of NumPy, CuPy or cupyrec.sim, got {wrong}."
        )
    if len(set(devices)) > 1:
        raise TypeError(
            f"{where}: arguments must be arrays of one device, got {', '.join(devices)}."
        )
    if devices[0] == "cpu":
        return np
    return sys.modules["cupy" if devices[0] == "cuda" else "cupyrec.sim"]


def copy_to(xp: ModuleType, array: Any) -> Any:
    """Return `array` as an array of the module `xp`; itself where it is one already.

    On a GPU the copy is asynchronous, through pinned memory of CuPy's.

    Examples
    --------
    >>> x = np.zeros(3)
    >>> copy_to(np, x) is x
    True
    """
    if device(array) not in (None, "cpu", name(xp)):  # between GPU and simulator by way of the host
        array = to_host(array)
    return to_host(array) if xp is np else xp.asarray(array)


def to_host(array: Any) -> np.ndarray:
    """Return `array` as a NumPy array, itself where it is one; waits for the device.

    Examples
    --------
    >>> to_host(np.zeros(2))
    array([0., 0.])
    """
    return array.get() if device(array) in ("cuda", "sim") else np.asarray(array)


def choose_gpu(number: int, users: int) -> None:
    """Let this process work on a GPU of its own, of those that it sees; beyond the last begin anew.

    CuPy is not loaded for that: whoever first asks for ``cuda`` makes it its thread's current one,
    unless another than the first is already.

    Parameters
    ----------
    number : int
        Of this process, among those that see the same GPUs.
    users : int
        How many these are. If GPUs are fewer, the first one says so in the log.

    Examples
    --------
    >>> choose_gpu(0, 1)
    """
    global _wished
    _wished = number, users
    if "cupy" in sys.modules:
        with contextlib.suppress(RuntimeError):  # there is no GPU
            module("cuda")


_wished: tuple[int, int] | None = None  # what `choose_gpu` was told


def _use_chosen(cuda: ModuleType) -> None:
    global _wished
    (number, users), count = _wished, cuda.runtime.getDeviceCount()
    _wished = None
    if cuda.Device().id == 0:
        cuda.Device(number % count).use()
    if users > count and number == 0:
        logger.warning("%d ranks share %d GPU%s of their host", users, count, "s" * (count > 1))


class _Pool:
    """Buffers that are used again once nobody holds a view of them.

    The C library gives large arrays back to the system when they are freed, and the system clears
    every page again for the next one: a seventh of a DLRM step (8,400 page faults), were it not for
    this pool. CuPy has its own. Large buffers lie in huge pages: there are few misses of the TLB.
    """

    def __init__(self) -> None:
        # By size, each with the number of the last request that it served.
        self._buffers: dict[int, list[list[Any]]] = {}
        self._requests = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """An idle buffer of at least `nbytes`, or else a new one."""
        step = 1 << max(0, nbytes.bit_length() - 4)
        size = -(-nbytes // step) * step  # at most an eighth is wasted, and few sizes are met
        with self._lock:
            self._requests += 1
            for entry in self._buffers.get(size, ()):
                if _references(entry) == _IDLE:
                    break
            else:
                self._forget()
                entry = [_buffer(size), 0]
                self._buffers.setdefault(size, []).append(entry)
            entry[1] = self._requests
            first = -entry[0].ctypes.data % _LINE
            return entry[0][first : first + nbytes]

    def _forget(self) -> None:
        """Free what no request has used for long: other shapes than today's."""
        for size, entries in self._buffers.items():
            self._buffers[size] = [e for e in entries if self._requests - e[1] < _KEPT]


def _buffer(nbytes: int) -> np.ndarray:
    """A new array of at least so many bytes behind the first that begins a cache line."""
    if nbytes >= _HUGE // 2 and (mapped := _mapped(-(-nbytes // _HUGE) * _HUGE)) is not None:
        return mapped
    return np.empty(nbytes + _LINE, np.uint8)


def _references(entry: list[Any]) -> int:
    """How many there are to the buffer of an entry; its views have one each."""
    return sys.getrefcount(entry[0])


_IDLE = _references([np.empty(1, np.uint8), 0])
_pool = _Pool()
_POOLED = 1 << 18  # bytes from which on an array comes from the pool
_KEPT = 512  # requests that an unused buffer outlives
_LINE = 64  # bytes of a cache line: a vector that lies across two takes twice as long to read


def empty(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a new array with arbitrary contents, as `numpy.empty`, from memory used before.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype

    Examples
    --------
    >>> empty((2, 3), np.float32).shape
    (2, 3)
    """
    shape = (shape,) if isinstance(shape, int) else shape
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < _POOLED:
        return np.empty(shape, dtype)
    return _pool.take(nbytes).view(dtype).reshape(shape)


_OWN_PAGES = 1 << 17  # bytes from which on an array has pages of its own
_HUGE = 2 << 20  # bytes of a huge page


def _mapped(nbytes: int) -> np.ndarray | None:
    """Zeros in pages of their own, huge ones where the system has them; None if there is no room.

    All views refer to this very array.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def pages(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros, as `numpy.zeros`, for what lives long and is read at random.

    Large ones lie in pages of their own, which go back to the system when the array does (the C
    library's heap would keep holes between arrays that grow), and which are huge where it has them
    (fewer misses of the TLB). For many parts of one table see `cupyrec.huge_pages`.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype

    Examples
    --------
    >>> pages(3, np.int64)
    array([0, 0, 0])
    """
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if nbytes < _OWN_PAGES:
        return np.zeros(shape, dtype)
    if (mapped := _mapped(nbytes)) is None:  # NumPy has the right error
        return np.zeros(shape, dtype)
    return mapped.view(dtype).reshape(shape)

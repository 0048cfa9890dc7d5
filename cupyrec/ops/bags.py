"""Bags of values, any number in each: pooled rows, and sequences. N values, M bags, D width.

Bag m holds the values i in offsets[m] : offsets[m + 1], and value i is the vector of row
rows[inverse[i]], as in `embedding_rows`; where inverse[i] = -1 it is padding, which doesn't count.

    out[m] = sum over i of bag m of weights[i] * vector(i)     mean: over the count of its values

No (N, D) array is written, here or on the way back: the gradient of a row is a `segment_sum` of
`grad` with index = `bag_numbers` and the same weights, that of a weight a product of two vectors:

    dweights[i] = grad[bag of i] . vector(i)

and for a mean, `grad` goes through `mean_gradient` first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.embedding_rows import RowMemory, scratch, value_addresses, value_vector
from cupyrec.ops.row_memory import check_learns, check_room
from cupyrec.ops.vector_sums import AHEAD, add_vectors, ask_for, vector_of

__all__ = [
    "bag_numbers", "check_offsets", "mean_gradient", "pad_bags", "pool_rows", "weight_gradient",
]  # fmt: skip

_BAGS, _VALUES = 256, 4096  # a block of the CPU loops
_THREADS = 256  # a block of the kernels


@cpu.exact_loop
def _pool_cpu(memory, rows, inverse, unseen, offsets, weights, mean, scratch, out):
    """One block of bags, with the values and weights of these; `weights` is overwritten."""
    width = out.shape[1]
    addresses = value_addresses(memory, rows, inverse, unseen, scratch)
    for m in range(out.shape[0]):
        first = stop = offsets[m] - offsets[0]
        for i in range(first, offsets[m + 1] - offsets[0]):
            if addresses[i] != 0:  # no padding
                addresses[stop] = addresses[i]
                if weights is not None:
                    weights[stop] = weights[i]
                stop += 1
        sums = vector_of(out, m)
        for d in range(width):
            sums[d] = np.float32(0)
        if scratch is None:
            add_vectors(addresses, weights, first, stop, sums)
        else:
            for i in range(first, stop):
                vector = value_vector(memory, addresses[i], width, scratch)
                weight = np.float32(1) if weights is None else weights[i]
                for d in range(width):
                    sums[d] += weight * vector[d]
        if mean and stop > first:
            for d in range(width):
                sums[d] /= np.float32(stop - first)


@cpu.loop
def _weight_gradient_cpu(memory, rows, inverse, unseen, bags, grad, scratch, out):
    """One block of values."""
    width = grad.shape[1]
    addresses = value_addresses(memory, rows, inverse, unseen, scratch)
    for i in range(out.size):
        ask_for(addresses[i + AHEAD], width)
        product = np.float32(0)
        if addresses[i] != 0:
            vector = value_vector(memory, addresses[i], width, scratch)
            for d in range(width):
                product += vector[d] * grad[bags[i], d]
        out[i] = product


_ROWS = "const uint64_t* chunks, int k, int stride, const int64_t* rows, const int64_t* inverse,"


_pool = Kernel(
    "bags.cu", "pool_rows",
    f"{_ROWS} const float* unseen, const int64_t* offsets, const float* weights, float* out,"
    " int64_t bags",
    lambda M, lanes: Geometry(blocks(M * lanes, _THREADS), _THREADS), optional="weights",
)  # fmt: skip
_weight_gradient = Kernel(
    "bags.cu", "weight_gradient",
    f"{_ROWS} const float* unseen, const int64_t* bags, const float* grad, float* out, int64_t n",
    lambda N: Geometry(blocks(N, _THREADS), _THREADS),
)  # fmt: skip
_numbers = Kernel(
    "bags.cu", "bag_numbers", "const int64_t* offsets, int64_t bags, int64_t* numbers, int64_t n",
    lambda N: Geometry(blocks(N, _THREADS), _THREADS),
)  # fmt: skip


def check_offsets(where: str, offsets: Any, n: int) -> Any:
    """Return `offsets` as int64, or raise the error that tells where they don't cut `n` values.

    On a device it waits once.

    Parameters
    ----------
    where : str
        Name of the caller, for the error sentence.
    offsets : (M + 1,) array of int64 or int32
        From 0 to n, never decreasing.
    n : int

    Raises
    ------
    ValueError, TypeError

    Examples
    --------
    >>> check_offsets("f", np.array([0, 2, 2, 3], np.int32), 3)
    array([0, 2, 2, 3])
    >>> check_offsets("f", np.array([0, 2, 1, 3]), 3)
    Traceback (most recent call last):
        ...
    ValueError: f: 'offsets' must never decrease, got 1 after 2 at 2.
    """
    errors.dtype(where, "offsets", offsets, np.int64, np.int32)
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"{where}: 'offsets' must have axes (M + 1), got shape {offsets.shape}.")
    xp = arrays.namespace(where, offsets)
    offsets = xp.ascontiguousarray(offsets.astype(np.int64, copy=False))
    falls = (offsets[1:] < offsets[:-1]).sum()
    ends = xp.concatenate([offsets[:1], offsets[-1:], falls.reshape(1)])
    first, last, falls = (int(x) for x in arrays.to_host(ends))
    if falls:
        host = arrays.to_host(offsets)
        at = int(np.flatnonzero(host[1:] < host[:-1])[0])
        raise ValueError(
            f"{where}: 'offsets' must never decrease, got {host[at + 1]} after {host[at]} "
            f"at {at + 1}."
        )
    if first != 0:
        raise ValueError(f"{where}: 'offsets' must start at 0, got {first}.")
    if last != n:
        raise ValueError(f"{where}: 'offsets' must end at N = {n}, the values, got {last}.")
    return offsets


def bag_numbers(offsets: Any, n: int) -> Any:
    """Return the bag of each of `n` values.

    Parameters
    ----------
    offsets : (M + 1,) array of int64
        As `check_offsets` returns them.
    n : int

    Returns
    -------
    (N,) array of int64

    Examples
    --------
    >>> bag_numbers(np.array([0, 2, 2, 3]), 3)
    array([0, 0, 2])
    """
    errors.dtype("bag_numbers", "offsets", offsets, np.int64)
    errors.axes("bag_numbers", offsets=(offsets, "M"))
    xp = arrays.namespace("bag_numbers", offsets)
    if xp is np:
        return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    numbers = xp.empty(n, np.int64)
    _numbers(xp.ascontiguousarray(offsets), len(offsets) - 1, numbers, n, N=n)
    return numbers


def pad_bags(offsets: Any, length: int, *, keep_last: bool = True) -> Any:
    """Return which value stands at each of `length` places of each bag, -1 behind its end.

    Parameters
    ----------
    offsets : (M + 1,) array of int64
        As `check_offsets` returns them.
    length : int
        L. Of a longer bag so many values remain.
    keep_last : bool
        Whether those are its last, or else its first.

    Returns
    -------
    (M, L) array of int64

    Raises
    ------
    ValueError, TypeError
        `length` is not a positive integer.

    Examples
    --------
    >>> pad_bags(np.array([0, 2, 2, 6]), 3)
    array([[ 0,  1, -1],
           [-1, -1, -1],
           [ 3,  4,  5]])
    """
    errors.dtype("pad_bags", "offsets", offsets, np.int64)
    errors.axes("pad_bags", offsets=(offsets, "M"))
    length = errors.positive("pad_bags", "length", length)
    xp = arrays.namespace("pad_bags", offsets)
    first, end = offsets[:-1, None], offsets[1:, None]
    if keep_last:
        first = xp.maximum(first, end - length)
    places = first + xp.arange(length)
    return xp.where(places < end, places, -1)


def mean_gradient(grad: Any, inverse: Any, offsets: Any) -> Any:
    """Return the gradient of each bag over the count of its values, padding apart.

    Parameters
    ----------
    grad : (M, D) array of float32
    inverse : (N,) array of int64
    offsets : (M + 1,) array of int64

    Returns
    -------
    (M, D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree.

    Examples
    --------
    >>> grad = np.array([[6.0], [6.0]], np.float32)
    >>> mean_gradient(grad, np.array([0, 1, -1]), np.array([0, 2, 3]))
    array([[3.],
           [6.]], dtype=float32)
    """
    errors.dtype("mean_gradient", "grad", grad, np.float32)
    _check_bags("mean_gradient", inverse, offsets, "grad", grad)
    xp = arrays.namespace("mean_gradient", grad, inverse, offsets)
    before = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(inverse >= 0, dtype=np.int64)])
    counts = xp.maximum(before[offsets[1:]] - before[offsets[:-1]], 1)
    return grad / counts.astype(np.float32)[:, None]


def pool_rows(
    memory: RowMemory,
    rows: Any,
    inverse: Any,
    unseen: Any,
    offsets: Any,
    weights: Any,
    mean: bool,
    out: Any,
) -> None:
    """Write the pooled vectors of bags to `out`, by the formula above, and zeros for empty bags.

    Parameters
    ----------
    memory : RowMemory
        Its chunks lie on the device of the other arrays.
    rows : (U,) array of int64
        A row of -1 - j is vector j of `unseen`.
    inverse : (N,) array of int64
    unseen : (number of unseen ids, D) array of float32
    offsets : (M + 1,) array of int64
        As `check_offsets` returns them.
    weights : (N,) array of float32, or None
    mean : bool
        Whether to divide by the count of a bag's values; not with weights.
    out : (M, D) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree, D = 0. Numbers are not checked.

    Notes
    -----
    A bag is added up in the order of its values, on every device.

    Examples
    --------
    >>> chunk = np.arange(8, dtype=np.float32).reshape(2, 4)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> out, unseen = np.empty((2, 3), np.float32), np.empty((0, 3), np.float32)
    >>> inverse, offsets = np.array([0, 1, 0]), np.array([0, 3, 3])
    >>> pool_rows(memory, np.array([1, 0]), inverse, unseen, offsets, None, False, out)
    >>> out
    array([[ 8., 11., 14.],
           [ 0.,  0.,  0.]], dtype=float32)
    """
    _check_lookup("pool_rows", memory, rows, inverse, unseen, "out", out)
    _check_bags("pool_rows", inverse, offsets, "out", out)
    given = [memory.chunks, rows, inverse, unseen, offsets, out]
    if weights is not None:
        errors.dtype("pool_rows", "weights", weights, np.float32)
        errors.axes("pool_rows", inverse=(inverse, "N"), weights=(weights, "N"))
        given.append(weights)
        if mean:
            raise ValueError("pool_rows: 'mean' must be False with 'weights', got True.")
    xp = arrays.namespace("pool_rows", *given)
    if xp is not np:
        weights = None if weights is None else xp.ascontiguousarray(weights)
        arguments = [xp.ascontiguousarray(a) for a in (rows, inverse, unseen, offsets)]
        macros = _macros(memory, out, arguments[2]) | {
            "WEIGHTED": int(weights is not None),
            "MEAN": int(mean),
        }
        _pool(
            *memory[:3], *arguments, weights, out, len(out),
            macros=macros, M=len(out), lanes=macros["LANES"],
        )  # fmt: skip
        return
    unseen = np.ascontiguousarray(unseen)

    def block(i: int, j: int) -> None:
        values, wide = slice(offsets[i], offsets[j]), scratch(memory, out.shape[1])
        own = None if weights is None else weights[values].copy()
        _pool_cpu(
            memory, rows, inverse[values], unseen, offsets[i : j + 1], own, mean, wide, out[i:j]
        )

    cpu.parallel(block, len(out), _BAGS)


def weight_gradient(
    memory: RowMemory, rows: Any, inverse: Any, unseen: Any, bags: Any, grad: Any
) -> Any:
    """Return the gradient of the weights of `pool_rows`; that of padding is 0.

    Parameters
    ----------
    memory, rows, inverse, unseen
        As `pool_rows` took them, the rows not updated since.
    bags : (N,) array of int64
        `bag_numbers`.
    grad : (M, D) array of float32

    Returns
    -------
    (N,) array of float32

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree, D = 0, rows of int8. Numbers are not checked.

    Examples
    --------
    >>> chunk = np.arange(8, dtype=np.float32).reshape(2, 4)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> grad, unseen = np.array([[1, 1], [2, 0]], np.float32), np.empty((0, 2), np.float32)
    >>> inverse, bags = np.array([0, 1, 0]), np.array([0, 1, 1])
    >>> weight_gradient(memory, np.array([1, 0]), inverse, unseen, bags, grad)
    array([9., 0., 8.], dtype=float32)
    """
    check_learns("weight_gradient", memory.value)
    _check_lookup("weight_gradient", memory, rows, inverse, unseen, "grad", grad)
    errors.dtype("weight_gradient", "bags", bags, np.int64)
    errors.axes("weight_gradient", inverse=(inverse, "N"), bags=(bags, "N"))
    xp = arrays.namespace("weight_gradient", memory.chunks, rows, inverse, unseen, bags, grad)
    grad = xp.ascontiguousarray(grad)
    if xp is not np:
        out = xp.empty(len(inverse), np.float32)
        arguments = [xp.ascontiguousarray(a) for a in (rows, inverse, unseen, bags)]
        macros = _macros(memory, grad, arguments[2])
        _weight_gradient(*memory[:3], *arguments, grad, out, len(out), macros=macros, N=len(out))
        return out
    out, unseen = arrays.empty(len(inverse), np.float32), np.ascontiguousarray(unseen)

    def block(i: int, j: int) -> None:
        wide = scratch(memory, grad.shape[1])
        _weight_gradient_cpu(
            memory, rows, inverse[i:j], unseen, bags[i:j], grad, wide, out[i:j]
        )  # fmt: skip

    cpu.parallel(block, len(out), _VALUES)
    return out


def _check_lookup(
    where: str, memory: RowMemory, rows: Any, inverse: Any, unseen: Any, name: str, vectors: Any
) -> None:
    errors.dtype(where, "rows", rows, np.int64)
    errors.dtype(where, "inverse", inverse, np.int64)
    errors.dtype(where, "unseen", unseen, np.float32)
    errors.dtype(where, name, vectors, np.float32)
    errors.axes(
        where, rows=(rows, "U"), inverse=(inverse, "N"),
        **{name: (vectors, "M D")}, unseen=(unseen, "new D"),
    )  # fmt: skip
    check_room(where, memory, name, vectors, state=0)


def _check_bags(where: str, inverse: Any, offsets: Any, name: str, vectors: Any) -> None:
    errors.dtype(where, "inverse", inverse, np.int64)
    errors.dtype(where, "offsets", offsets, np.int64)
    errors.axes(
        where, inverse=(inverse, "N"), offsets=(offsets, "bags"), **{name: (vectors, "M D")}
    )
    if len(offsets) != len(vectors) + 1:
        raise ValueError(
            f"{where}: 'offsets' must have M + 1 = {len(vectors) + 1} like '{name}', "
            f"got shape {offsets.shape}."
        )


def _macros(memory: RowMemory, vectors: Any, unseen: Any) -> dict[str, int]:
    """Each group of LANES lanes moves vectors, VECTOR floats a lane at a time."""
    width = vectors.shape[1]
    vector = vector_width(width, vectors, unseen)
    lanes = min(32, max(4, 1 << (width // vector - 1).bit_length()))
    return {"DIM": width, "VECTOR": vector, "LANES": lanes, "VALUE": memory.value}

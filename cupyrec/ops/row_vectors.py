"""Vectors that stay in the rows of embedding tables until an op reads them. B batch, F fields.

    vectors[b, f] = vector of row rows[inverse[b, f]], a row of -1 - j being vector j of `unseen`

An op that can, such as `dot_interaction`, takes each vector from its row, so that the (B, F, D)
array is never written: its kernel gets `kernel_source`. For all others `data` gathers them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cupyrec import arrays
from cupyrec.autograd import Function, Tensor, numbered
from cupyrec.kernel import blocks
from cupyrec.ops.embedding_rows import FLOAT32, INT8, RowMemory, gather_rows

__all__ = ["OPTIONAL", "PARAMETERS", "RowVectors", "kernel_source", "pays"]

_SECTOR = 32  # bytes that memory gives at a time

PARAMETERS = (
    "const uint64_t* chunks, int k, int stride, const int64_t* rows, const int64_t* inverse,"
    " const float* unseen"
)  # of a kernel, behind the pointer `sparse` to vectors side by side
OPTIONAL = "sparse chunks rows inverse unseen"


def pays(width: int, value: int, dtype: Any, learns: bool) -> bool:
    """Return whether reading vectors from their rows moves no more bytes than gathering them.

    Gathered, a row is read once, and as a vector of `dtype` written and read: twice if there is a
    gradient to take. Else it is read in its place each time, in whole sectors, and one sector more
    for its number. Rows of int8 are always gathered, as no op would decode them each time.

    Examples
    --------
    >>> pays(16, FLOAT32, np.float32, learns=True), pays(4, FLOAT32, np.float32, learns=True)
    (True, False)
    """
    if value == INT8:
        return False
    reads, vector = 1 + learns, width * np.dtype(dtype).itemsize
    row = _SECTOR * (blocks(width * (4 if value == FLOAT32 else 2), _SECTOR) + 1)
    return reads * row <= row + (1 + reads) * vector


class RowVectors(Tensor):
    """Vectors (B, F, D) in their rows; a Tensor to all who ask for `data`, which gathers them.

    Parameters
    ----------
    read : callable
        ``read(reader)`` returns ``reader(memory, rows)``, of a RowMemory and (U,) array of int64.
    inverse : (B, F) array of int64
        From 0 to U - 1.
    unseen : (M, D) array of float32
    dtype : type
        Of the vectors: float32, float16 or bfloat16.
    node : Function, optional
        Takes their gradient; without it there is none.

    Examples
    --------
    >>> chunk = np.arange(8, dtype=np.float32).reshape(2, 4)
    >>> memory = RowMemory(np.array([chunk.ctypes.data], np.uint64), k=1, stride=4)
    >>> inverse, unseen = np.array([[0, 0]]), np.empty((0, 3), np.float32)
    >>> RowVectors(lambda reader: reader(memory, np.array([1])), inverse, unseen, np.float32)
    RowVectors([[[4., 5., 6.],
                 [4., 5., 6.]]], dtype=float32)
    """

    def __init__(
        self,
        read: Callable[[Callable[[RowMemory, Any], Any]], Any],
        inverse: Any,
        unseen: Any,
        dtype: Any,
        node: Function | None = None,
    ) -> None:
        self.read, self.inverse, self.unseen = read, inverse, unseen
        self._dtype, self._node, self.grad = np.dtype(dtype), node and numbered(node), None
        self.requires_grad, self._chunks = node is not None, None

    shape = property(lambda self: (*self.inverse.shape, self.unseen.shape[1]))
    dtype = property(lambda self: self._dtype)
    ndim = property(lambda self: 3)
    size = property(lambda self: self.inverse.size * self.unseen.shape[1])
    held = property(lambda self: self.inverse)

    @functools.cached_property
    def data(self) -> Any:
        xp = arrays.namespace("RowVectors", self.inverse)
        out = xp.empty(self.shape, self.dtype)
        flat, inverse = out.reshape(-1, self.shape[2]), self.inverse.reshape(-1)
        self.read(lambda memory, rows: gather_rows(memory, rows, inverse, self.unseen, flat))
        return out

    def __len__(self) -> int:
        return len(self.inverse)

    def add_grad(self, grad: Any) -> None:
        self.grad = grad if self.grad is None else self.grad + grad

    # A graph reads from copies of what it was captured with

    def kind(self) -> tuple:
        """Return what kernels that read these rows are launched by, but for addresses."""
        (chunks, *memory), _ = self.read(_where)
        return self.shape, self.dtype, self.requires_grad, len(self.unseen), _room(chunks), *memory

    def static(self) -> RowVectors:
        """Return RowVectors of this kind whose addresses stay, for `fill` to say where rows lie."""
        xp, (memory, _) = arrays.namespace("RowVectors", self.inverse), self.read(_where)
        memory = memory._replace(chunks=xp.empty(_room(memory.chunks), np.uint64))
        rows, inverse = xp.empty(self.inverse.size, np.int64), xp.empty(self.shape[:2], np.int64)
        unseen = xp.empty(self.unseen.shape, np.float32)
        static = RowVectors(lambda reader: reader(memory, rows), inverse, unseen, self.dtype)
        static.requires_grad = self.requires_grad
        return static

    def fill(self, other: RowVectors) -> None:
        """Let what `static` has returned be `other`, of the same kind."""
        self.follow(other)
        (_, rows), (_, found) = self.read(_where), other.read(_where)
        rows[: len(found)] = found
        self.inverse[...] = other.inverse
        if len(self.unseen):
            self.unseen[...] = other.unseen

    def follow(self, other: RowVectors) -> None:
        """Let chunks lie where they do by now, after a look-up that has let the table grow."""
        (memory, _), (now, _) = self.read(_where), other.read(_where)
        if now.chunks is not self._chunks:
            self._chunks, room = now.chunks, len(memory.chunks)
            memory.chunks[: min(room, len(now.chunks))] = now.chunks[:room]


def _where(memory: RowMemory, rows: Any) -> tuple[RowMemory, Any]:
    return memory, rows


def _room(chunks: Any) -> int:
    """How many addresses of chunks a graph has room for; as tables grow it seldom changes."""
    return 1 << len(chunks).bit_length()


def kernel_source(sparse: Any) -> tuple[tuple, dict[str, object], Any]:
    """Return what a kernel reads vectors from, an array (B, F, D) or `RowVectors`.

    Returns
    -------
    arguments : tuple
        The pointer `sparse`, then `PARAMETERS`.
    macros : dict
    aligned : array
        What the width of its loads depends on, rows apart, which begin at multiples of 16 bytes.

    Examples
    --------
    >>> kernel_source(np.zeros((2, 3, 4), np.float32))[1]
    {'GATHERED': 0}
    """
    if not isinstance(sparse, RowVectors):
        return (arrays.bits(sparse), None, 0, 0, None, None, None), {"GATHERED": 0}, sparse
    memory, rows = sparse.read(_where)
    arguments = None, *memory[:3], rows, sparse.inverse, sparse.unseen
    return arguments, {"GATHERED": 1, "VALUE": memory.value}, sparse.unseen

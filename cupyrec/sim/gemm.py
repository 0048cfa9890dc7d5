"""What cublasLt does with a matmul's descriptors: refuse it by the documented rules, or compute it.

    D = epilogue(alpha * op(A) op(B))       column-major; A is m x k, B k x n, D m x n

The epilogues, in their order: BIAS adds a vector of m to each column, RELU is max(x, 0), AUX keeps
a bit a unit, 1 where x > 0; DRELU sets units without bit to 0, BGRAD sums what is left over the
columns. BGRADA sums op(A) over k, BGRADB op(B). Vectors have the type of D. What is of 16 bits is
widened to float32, summed in it, and rounded once. What the documentation leaves open is the worst
here: bits of the mask are 1 at 0 and NaN and beyond m, words beyond those stay unwritten. That some
epilogues need more than one row, column or term stands in NVIDIA's nvmath-python.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupyrec import cpu
from cupyrec.sim.heap import Allocation, the_heap

__all__ = ["Layout", "MatmulFault", "Problem", "execute", "refusals"]

_INVALID, _UNSUPPORTED = "STATUS_INVALID_VALUE", "STATUS_NOT_SUPPORTED"
_LARGEST = 2**31 - 1  # "usually only values that can be expressed as int32_t are supported"
_TYPES = {
    "R_32F": np.dtype(np.float32), "R_16F": np.dtype(np.float16),
    "R_16BF": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
_MASK = 128  # bits that a leading dimension of a mask is a multiple of
_EPILOGUES = {
    "DEFAULT", "RELU", "RELU_AUX", "BIAS", "RELU_BIAS", "RELU_AUX_BIAS",
    "DRELU", "DRELU_BGRAD", "BGRADA", "BGRADB",
}  # fmt: skip


_BGRAD = ("BGRADA", "BGRADB")


class MatmulFault(RuntimeError):
    """A matmul would touch memory that it must not."""


class Layout(NamedTuple):
    """A matrix as its descriptor says; type and order by the names of the headers."""

    type: str
    order: str
    rows: int
    columns: int
    ld: int
    batch: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _TYPES[self.type].itemsize if self.type in _TYPES else 4


class Problem(NamedTuple):
    """A matmul as its descriptors say, and what the call adds: factors, addresses of A, B, C, D."""

    compute: str
    scale: str
    transposes: tuple[str, str]
    epilogue: str
    bias: int
    aux: int
    aux_ld: int
    layouts: tuple[Layout, Layout, Layout]  # of A, B and D
    addresses: tuple[int, int, int, int]
    alpha: float
    beta: float

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n, k."""
        (a, _, d), transposed = self.layouts, self.transposes[0] != "OP_N"
        return d.rows, d.columns, a.rows if transposed else a.columns


def refusals(problem: Problem) -> Iterator[tuple[str, str]]:
    """Yield each status that cublasLt would refuse this with, and the rule that is broken."""
    shapes = []
    for name, layout in zip("ABD", problem.layouts, strict=True):
        shape = layout.rows, layout.columns
        shapes.append(shape)
        types = [problem.layouts[0].type, *(["R_32F"] if name == "D" else [])]
        if layout.type not in _TYPES or layout.type not in types:
            allowed = " or ".join(_TYPES if name == "A" else dict.fromkeys(types))
            yield _UNSUPPORTED, f"{name} must be {allowed}, got {layout.type}"
        if layout.order != "ORDER_COL":
            yield _UNSUPPORTED, f"{name} must be column-major, got {layout.order}"
        if layout.batch != 1:
            yield _UNSUPPORTED, f"{name} must be one matrix, got a batch of {layout.batch}"
        if min(shape) < 1:
            yield _INVALID, f"{name} must have rows and columns, got {shape}"
        if max(shape) > _LARGEST:
            yield _UNSUPPORTED, f"{name} must have sizes below 2**31, got {shape}"
        if layout.ld < layout.rows:
            yield (
                _INVALID,
                f"the leading dimension of {name} must be at least its {layout.rows} rows, "
                f"got {layout.ld}",
            )
    a, b = (
        shape if transpose == "OP_N" else shape[::-1]
        for shape, transpose in zip(shapes, problem.transposes, strict=False)
    )
    if (a[0], b[1], a[1]) != (*shapes[2], b[0]):
        yield _INVALID, f"A, B and D must be m x k, k x n and m x n, got {a}, {b} and {shapes[2]}"
    if problem.compute not in ("COMPUTE_32F", "COMPUTE_32F_FAST_TF32") or problem.scale != "R_32F":
        yield (
            _UNSUPPORTED,
            f"compute and scale type must be COMPUTE_32F or COMPUTE_32F_FAST_TF32 and R_32F, "
            f"got {problem.compute} and {problem.scale}",
        )
    if "TF32" in problem.compute and problem.layouts[0].type != "R_32F":
        yield _UNSUPPORTED, f"{problem.compute} needs A of R_32F, got {problem.layouts[0].type}"
    yield from _epilogue_refusals(problem)
    layouts = *problem.layouts, problem.layouts[2]
    for name, address, layout in zip("ABCD", problem.addresses, layouts, strict=True):
        if address == 0 or address % layout.itemsize:
            yield _INVALID, f"{name} must be aligned to its elements, got address {address:#x}"


def _epilogue_refusals(problem: Problem) -> Iterator[tuple[str, str]]:
    epilogue = problem.epilogue
    if epilogue not in _EPILOGUES:
        yield _UNSUPPORTED, f"the epilogue must be one of {sorted(_EPILOGUES)}, got {epilogue}"
    apart = problem.bias % problem.layouts[2].itemsize
    if ("BIAS" in epilogue or "BGRAD" in epilogue) and (problem.bias == 0 or apart):
        yield _INVALID, f"{epilogue} needs an aligned bias pointer, got {problem.bias:#x}"
    m, n, k = problem.sizes
    if k == 1 and ("DRELU" in epilogue or epilogue in _BGRAD):
        yield _UNSUPPORTED, f"{epilogue} needs k > 1, got 1"
    if epilogue in _BGRAD and 1 in (m, n):
        yield _UNSUPPORTED, f"{epilogue} needs m and n > 1, got {m} and {n}"
    if "AUX" in epilogue or "DRELU" in epilogue:
        rows = problem.layouts[2].rows
        if problem.aux == 0 or problem.aux % (_MASK // 8):
            yield (
                _INVALID,
                f"{epilogue} needs an auxiliary pointer aligned to 16 bytes, got {problem.aux:#x}",
            )
        if problem.aux_ld % _MASK or problem.aux_ld < rows:
            yield (
                _INVALID,
                f"the auxiliary leading dimension must be a multiple of {_MASK} bits and at least "
                f"the {rows} rows of D, got {problem.aux_ld}",
            )


def execute(problem: Problem) -> None:
    """Compute D and what the epilogue adds, on the simulator's memory.

    Raises
    ------
    MatmulFault
        An access outside an allocation, a read of bytes that nothing wrote, or an output that
        overlaps an input.
    """
    m, n, _ = problem.sizes
    epilogue = problem.epilogue
    access, kind = _Access(), _TYPES[problem.layouts[2].type]
    a, b = (
        access.reads(
            name, address, (layout.columns, layout.rows), layout.itemsize * layout.ld,
            _TYPES[layout.type],
        )
        for name, address, layout in zip("AB", problem.addresses, problem.layouts, strict=False)
    )  # fmt: skip
    row_bytes = -(-m // 32) * 4
    mask = (problem.aux, (n, row_bytes), problem.aux_ld // 8)
    if "DRELU" in epilogue:
        live = access.reads("aux", *mask, dtype=np.uint8)
    if "BIAS" in epilogue:
        bias = access.reads("bias", problem.bias, (1, m), kind.itemsize * m, kind)[0]
    rows = (n, m), kind.itemsize * problem.layouts[2].ld, kind
    if problem.beta:
        c = access.reads("C", problem.addresses[2], *rows).astype(np.float32)
        if problem.addresses[2] == problem.addresses[3]:
            access.seen.pop()  # D may be C
    d = access.writes("D", problem.addresses[3], *rows)
    # Row-major from here on: the transposes of A, B and D.
    a, b = (
        _rounded(x, problem.compute).T if transpose != "OP_N" else _rounded(x, problem.compute)
        for x, transpose in zip((a, b), problem.transposes, strict=True)
    )
    with np.errstate(all="ignore"), cpu.serial_blas():
        z = np.matmul(b, a)
        z *= np.float32(problem.alpha)
        if problem.beta:
            z += np.float32(problem.beta) * c
        if "BIAS" in epilogue:
            z += bias.astype(np.float32)
        if "AUX" in epilogue:
            bits = np.ones((n, 8 * row_bytes), bool)
            bits[:, :m] = ~(z < 0)  # as in CUTLASS; nothing says what cublasLt has at 0 and NaN
            out = access.writes("aux", *mask, dtype=np.uint8)
            out[...] = np.packbits(bits, axis=1, bitorder="little")
        if "DRELU" in epilogue:
            z[np.unpackbits(live, axis=1, count=m, bitorder="little") == 0] = 0
        elif "RELU" in epilogue:
            np.maximum(z, 0, out=z)
        if "BGRAD" in epilogue:
            sums = {"BGRADA": lambda: a.sum(axis=0), "BGRADB": lambda: b.sum(axis=1)}
            gradient = sums.get(epilogue, lambda: z.sum(axis=0))()
            size = kind.itemsize * gradient.size
            out = access.writes("bias", problem.bias, (1, gradient.size), size, kind)
            out[0] = gradient
        d[...] = z


def _rounded(x: np.ndarray, compute: str) -> np.ndarray:
    """What tensor cores see, as float32. TF32 keeps 10 bits of the fraction."""
    x = x.astype(np.float32, copy=False)
    if compute != "COMPUTE_32F_FAST_TF32":
        return x
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


class _Access:
    """Arrays of device memory, each checked before anything is computed from it."""

    def __init__(self) -> None:
        self.heap = the_heap()
        self.seen: list[tuple[str, int, int]] = []

    def reads(
        self, name: str, address: int, shape: tuple[int, int], stride: int, dtype: Any = np.float32
    ) -> np.ndarray:
        where, written = self._place(name, address, shape, stride, dtype)
        if not written.all():
            raise MatmulFault(f"cublaslt.matmul: {name} must be written before it is read.")
        return where

    def writes(
        self, name: str, address: int, shape: tuple[int, int], stride: int, dtype: Any = np.float32
    ) -> np.ndarray:
        for other, start, end in self.seen:
            if address < end and start < self._end(address, shape, stride, dtype):
                raise MatmulFault(f"cublaslt.matmul: {name} must not overlap {other}.")
        where, written = self._place(name, address, shape, stride, dtype)
        written[...] = 1
        return where

    def _place(
        self, name: str, address: int, shape: tuple[int, int], stride: int, dtype: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rows, columns) of `dtype`, `stride` bytes a row, and whether each byte is written."""
        end = self._end(address, shape, stride, dtype)
        self.seen.append((name, address, end))
        live = self.heap.live
        i = bisect.bisect(live, address, key=lambda allocation: allocation.address) - 1
        found = live[i] if i >= 0 else Allocation(0, 0, "nothing", "")
        if end > found.address + found.size:
            raise MatmulFault(
                f"cublaslt.matmul: {name} must lie in one array, "
                f"got {end - address} bytes of {found.name}."
            )
        start, item = address - self.heap.base, np.dtype(dtype).itemsize
        array = np.ndarray(shape, dtype, self.heap.bytes, start, (stride, item))
        return array, np.ndarray(
            (*shape, item), np.uint8, self.heap.written, start, (stride, item, 1)
        )

    @staticmethod
    def _end(address: int, shape: tuple[int, int], stride: int, dtype: Any) -> int:
        return address + stride * (shape[0] - 1) + shape[1] * np.dtype(dtype).itemsize

"""Matmuls by cublasLt, with bias, ReLU and their gradients in the same kernel.

cublasLt is column-major, and a row-major array is a column-major view of its transpose:
``out = a @ b`` is asked for as ``out.T = b.T @ a.T``. So A is our `b` and B our `a`, D has our
columns as its rows, and a bias "of D's rows" is one value a column of ours.

Matrices are of float32, or of float16 or bfloat16, whose products are summed in float32 and come
out in either type.

Descriptors are made by the library on every device, it needs no GPU for that. On ``sim`` they are
read back and `cupyrec.sim.gemm` does what they say. What the library can't do on a GPU runs as a
plain GEMM and array functions, is counted in `refused` and warned of once.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import functools
import logging
import threading
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, errors
from cupyrec.cublaslt_library import (
    Cublas,
    CublasLtError,
    Cuda,
    Desc,
    Descriptor,
    Epilogue,
    HeuristicResult,
    Matrix,
    Order,
    Preference,
    Status,
    library,
    succeed,
)

__all__ = ["CublasLtError", "Epilogue", "matmul", "refused"]

logger = logging.getLogger("cupyrec")

#: How often what ran as a plain GEMM, since cublasLt refused it.
refused: collections.Counter[str] = collections.Counter()

_WHERE = "cublaslt.matmul"
_WORKSPACE = 32 << 20  # bytes, what NVIDIA recommends for sm_90; one a stream
_ALIGNMENTS = (256, 128, 64, 32, 16, 8, 4, 2)  # bytes; the heuristic's default is the first
_FLOATS = dict(zip((np.dtype(np.float32), *arrays.HALVES), Cuda, strict=True))
_lock = threading.Lock()  # a cached descriptor holds the pointers of one call


class _Key(NamedTuple):
    """What the choice of an algorithm depends on; m, n, k are cublasLt's."""

    device: int
    m: int
    n: int
    k: int
    types: tuple[Cuda, Cuda]  # of A and B, and of D
    transposes: tuple[bool, bool]
    lds: tuple[int, int, int]
    epilogue: Epilogue
    aux_ld: int
    compute: Cublas
    alignments: tuple[int, ...]  # of A, B, C, D, bias, aux

    def __str__(self) -> str:
        trans = "".join("NT"[t] for t in self.transposes)
        sizes = f"{trans} {self.m} x {self.n} x {self.k}, ld {self.lds}"
        types = " to ".join(t.name for t in dict.fromkeys(self.types))
        return f"{self.epilogue.name} of {sizes}, {types}"


class _Plan:
    """Descriptors of a matmul, and the algorithm that the library chose on this device."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.desc = Descriptor("MatmulDesc", key.compute, Cuda.R_32F)
        self.desc[Desc.TRANSA], self.desc[Desc.TRANSB] = map(int, key.transposes)
        self.desc[Desc.EPILOGUE] = key.epilogue
        if key.aux_ld:
            self.desc[Desc.EPILOGUE_AUX_LD] = key.aux_ld
        shapes = [(key.m, key.k), (key.k, key.n), (key.m, key.n)]
        self.layouts = []
        types = key.types[0], *key.types
        for kind, shape, transpose, ld in zip(
            types, shapes, (*key.transposes, False), key.lds, strict=True
        ):
            shape = shape[::-1] if transpose else shape
            self.layouts.append(Descriptor("MatrixLayout", kind, *shape, ld))
        self.algorithm: Any = None

    def point(self, bias: int, aux: int) -> None:
        """Set the pointers of the epilogue, whose alignment the heuristic reads too."""
        if self.key.epilogue is not Epilogue.DEFAULT:
            self.desc[Desc.BIAS_POINTER], self.desc[Desc.EPILOGUE_AUX_POINTER] = bias, aux


@functools.lru_cache(maxsize=512)
def _plan(key: _Key) -> _Plan:
    return _Plan(key)


def matmul(
    a: Any,
    b: Any,
    out: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    epilogue: Epilogue = Epilogue.DEFAULT,
    bias: Any = None,
    aux: Any = None,
    alpha: float = 1.0,
    added: Any = None,
    tf32: bool = False,
) -> None:
    """Compute z = alpha * a @ b + added, and store in `out` what the epilogue makes of it.

    =============  ====================  =========================================================
    epilogue       out                   besides
    =============  ====================  =========================================================
    DEFAULT        z
    BIAS           z + bias
    RELU_BIAS      max(z + bias, 0)
    RELU_AUX_BIAS  max(z + bias, 0)      aux = bits of out > 0; either at 0 and NaN
    DRELU          z where aux, else 0
    DRELU_BGRAD    z where aux, else 0   bias = sum of out over rows
    BGRADA         z                     bias = sum of b over K: cublasLt's A is our b
    BGRADB         z                     bias = sum of a over K
    =============  ====================  =========================================================

    Parameters
    ----------
    a : (M, K) array of device cuda or sim; (K, M) if `transpose_a`
        Of float32, float16 or bfloat16.
    b : (K, N) array of the same dtype; (N, K) if `transpose_b`
    out : (M, N) array of the same dtype or of float32
        Rows of all three may be apart; elements of a row are consecutive.
    epilogue : Epilogue
    bias : (N,) array of the dtype of `out`, for BGRADB (M,)
        Read or written.
    aux : (M, words) array of uint32
        Bit n % 32 of word n // 32 is that of column n; rows are multiples of 128 bits apart.
    alpha : float
    added : (M, N) array of the dtype of `out`, optional
        Its rows as far apart as those of `out`, which it may be.
    tf32 : bool
        Let tensor cores round the inputs to TF32, 10 bits of the fraction.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes, strides or devices that don't agree.
    CublasLtError
        On the simulator: what cublasLt would refuse. On a GPU: a failure.

    Examples
    --------
    >>> from cupyrec import sim
    >>> a, b, out = sim.ones((2, 3), "f4"), sim.ones((4, 3), "f4"), sim.empty((2, 4), "f4")
    >>> matmul(a, b, out, transpose_b=True, alpha=2.0)  # doctest: +SKIP
    >>> out[0]  # doctest: +SKIP
    array([6., 6., 6., 6.], dtype=float32)
    """
    epilogue = Epilogue(epilogue)
    xp = _device({"a": a, "b": b, "out": out, "added": added, "bias": bias, "aux": aux})
    rows, columns, inner = _sizes(a, b, out, transpose_a, transpose_b)
    _check_epilogue(epilogue, rows, columns, bias, aux)
    if added is not None:
        errors.axes(_WHERE, added=(added, f"{rows} {columns}"))
        if rows > 1 and added.strides != out.strides:
            raise ValueError(
                f"{_WHERE}: 'added' must have the strides of 'out', {out.strides}, "
                f"got {added.strides}."
            )
    if 0 in (rows, columns, inner):  # which cublasLt takes for an error
        _plain(xp, a, b, out, transpose_a, transpose_b, epilogue, bias, aux, alpha, added)
        return
    operands = (b, a, out if added is None else added, out, bias, aux)
    addresses = [x.__cuda_array_interface__["data"][0] if x is not None else 0 for x in operands]
    sim = xp.__name__ == "cupyrec.sim"
    key = _Key(
        -1 if sim else xp.cuda.Device().id,
        columns, rows, inner, (_FLOATS[a.dtype], _FLOATS[out.dtype]),
        (bool(transpose_b), bool(transpose_a)),
        tuple(_leading(name, x) for name, x in (("b", b), ("a", a), ("out", out))),
        epilogue, 32 * _leading("aux", aux) if aux is not None else 0,
        Cublas.COMPUTE_32F_FAST_TF32 if tf32 else Cublas.COMPUTE_32F,
        tuple(_alignment(address) for address in addresses),
    )  # fmt: skip
    with _lock:
        plan = _plan(key)
        plan.point(*addresses[4:])
        beta = 0.0 if added is None else 1.0
        done = (_simulate if sim else _run)(xp, plan, alpha, beta, addresses[:4])
    if not done:
        if not refused[str(key)]:
            logger.warning("cublasLt refuses %s: a plain GEMM runs instead.", key)
        refused[str(key)] += 1
        _plain(xp, a, b, out, transpose_a, transpose_b, epilogue, bias, aux, alpha, added)


# Arguments


def _device(given: dict[str, Any]) -> ModuleType:
    given = {name: x for name, x in given.items() if x is not None}
    xp = arrays.namespace(_WHERE, *given.values())
    if xp is np:
        raise TypeError(f"{_WHERE}: arrays must be of device 'cuda' or 'sim', got 'cpu'.")
    a, out = given["a"], given["out"]
    errors.dtype(_WHERE, "a", a, *_FLOATS)
    errors.dtype(_WHERE, "out", out, *dict.fromkeys((a.dtype, np.dtype(np.float32))))
    dtypes = {"a": a.dtype, "b": a.dtype, "aux": np.uint32}
    for name, x in given.items():
        errors.dtype(_WHERE, name, x, dtypes.get(name, out.dtype))
        arrays.check_current(_WHERE, name, x)
    return xp


def _sizes(a: Any, b: Any, out: Any, transpose_a: bool, transpose_b: bool) -> tuple[int, int, int]:
    """M, N, K."""
    m, k = errors.axes(_WHERE, a=(a, "K M" if transpose_a else "M K"))[:: -1 if transpose_a else 1]
    errors.axes(_WHERE, b=(b, f"N {k}" if transpose_b else f"{k} N"))
    n = b.shape[0 if transpose_b else 1]
    errors.axes(_WHERE, out=(out, f"{m} {n}"))
    return m, n, k


def _check_epilogue(epilogue: Epilogue, rows: int, columns: int, bias: Any, aux: Any) -> None:
    if "BIAS" in epilogue.name or "BGRAD" in epilogue.name:
        if bias is None:
            raise ValueError(f"{_WHERE}: 'bias' must be given for {epilogue.name}, got None.")
        errors.axes(_WHERE, bias=(bias, f"{rows if epilogue is Epilogue.BGRADB else columns}"))
        if not bias.flags.c_contiguous:
            raise ValueError(f"{_WHERE}: 'bias' must be C-contiguous, got strides {bias.strides}.")
    if "AUX" in epilogue.name or "DRELU" in epilogue.name:
        if aux is None:
            raise ValueError(f"{_WHERE}: 'aux' must be given for {epilogue.name}, got None.")
        errors.axes(_WHERE, aux=(aux, f"{rows} words"))
        if 32 * aux.shape[1] < columns:
            raise ValueError(
                f"{_WHERE}: 'aux' must have a bit for each of {columns} columns, "
                f"got shape {aux.shape}."
            )


def _leading(name: str, x: Any) -> int:
    """Elements from one row to the next."""
    rows, columns = x.shape
    apart, rest = divmod(x.strides[0], x.itemsize) if rows > 1 else (columns, 0)
    if rest or (columns > 1 and x.strides[1] != x.itemsize):
        raise ValueError(
            f"{_WHERE}: '{name}' must have rows of consecutive elements, got strides {x.strides}."
        )
    return apart


def _alignment(address: int) -> int:
    return next((n for n in _ALIGNMENTS if address % n == 0), 1)


# The GPU


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    succeed("cublasLtCreate", library().cublasLtCreate(ctypes.byref(handle)))
    return handle


_workspaces: dict[tuple[int, int], Any] = {}  # by device and stream


def _algorithm(plan: _Plan) -> HeuristicResult | bool:
    """The library's choice for this plan, False where it has none."""
    preference = Descriptor("MatmulPreference")
    preference[Preference.MAX_WORKSPACE_BYTES] = _WORKSPACE
    for attribute, alignment in zip(list(Preference)[1:], plan.key.alignments[:4], strict=True):
        preference[attribute] = alignment
    result, count = HeuristicResult(), ctypes.c_int()
    a, b, d = (layout.pointer for layout in plan.layouts)
    status = library().cublasLtMatmulAlgoGetHeuristic(
        _handle(plan.key.device), plan.desc.pointer, a, b, d, d, preference.pointer,
        1, ctypes.byref(result), ctypes.byref(count),
    )  # fmt: skip
    no = (Status.STATUS_NOT_SUPPORTED, Status.STATUS_INVALID_VALUE)  # it says either
    if status not in (Status.STATUS_SUCCESS, *no):
        succeed(f"the heuristic for {plan.key}", status)
    chosen = status == Status.STATUS_SUCCESS and count.value and result.state == status
    return result if chosen else False


def _run(xp: ModuleType, plan: _Plan, alpha: float, beta: float, addresses: list[int]) -> bool:
    """Start the matmul on CuPy's current stream; False if the library can't."""
    if plan.algorithm is None:
        plan.algorithm = _algorithm(plan)
    if plan.algorithm is False:
        return False
    stream = xp.cuda.get_current_stream().ptr
    workspace = _workspaces.get((plan.key.device, stream))
    if workspace is None:
        # Of no pool: the first matmul on this stream may be one of a graph, which has its own.
        workspace = _workspaces[plan.key.device, stream] = xp.cuda.Memory(_WORKSPACE)
    factors = ctypes.c_float(alpha), ctypes.c_float(beta)
    a, b, c, d = addresses
    layout_a, layout_b, layout_d = (layout.pointer for layout in plan.layouts)
    status = library().cublasLtMatmul(
        _handle(plan.key.device), plan.desc.pointer, ctypes.byref(factors[0]), a, layout_a,
        b, layout_b, ctypes.byref(factors[1]), c, layout_d, d, layout_d,
        ctypes.byref(plan.algorithm),
        workspace.ptr, _WORKSPACE, stream,
    )  # fmt: skip
    if status == Status.STATUS_NOT_SUPPORTED:
        plan.algorithm = False
        return False
    succeed(f"cublasLtMatmul of {plan.key}", status)
    return True


# The simulator


def _simulate(xp: ModuleType, plan: _Plan, alpha: float, beta: float, addresses: list[int]) -> bool:
    """Do what the descriptors say; a rule that they break is an error on every GPU."""
    from cupyrec.sim import gemm

    problem = _read(plan, alpha, beta, addresses)
    for status, rule in gemm.refusals(problem):
        raise CublasLtError(f"{_WHERE}: {rule} (CUBLAS_{status}).")

    def work() -> None:
        xp.recorder.launched(xp.recorder.Launch("cublaslt.matmul"))
        gemm.execute(problem)

    xp.cuda.submit(work)
    return True


def _read(plan: _Plan, alpha: float, beta: float, addresses: list[int]) -> Any:
    """What the library holds, by the headers' names."""
    from cupyrec.sim import gemm

    desc = plan.desc
    layouts = [
        gemm.Layout(
            _name(Cuda, x[Matrix.TYPE]), _name(Order, x[Matrix.ORDER]),
            x[Matrix.ROWS], x[Matrix.COLS], x[Matrix.LD], x[Matrix.BATCH_COUNT],
        )
        for x in plan.layouts
    ]  # fmt: skip
    return gemm.Problem(
        _name(Cublas, desc[Desc.COMPUTE_TYPE]), _name(Cuda, desc[Desc.SCALE_TYPE]),
        (_name(Cublas, desc[Desc.TRANSA]), _name(Cublas, desc[Desc.TRANSB])),
        _name(Epilogue, desc[Desc.EPILOGUE]), desc[Desc.BIAS_POINTER],
        desc[Desc.EPILOGUE_AUX_POINTER], desc[Desc.EPILOGUE_AUX_LD],
        tuple(layouts), tuple(addresses), alpha, beta,
    )  # fmt: skip


def _name(kind: type[enum.IntEnum], value: int) -> str:
    return kind(value).name if value in list(kind) else str(value)


# Without cublasLt


def _plain(
    xp: ModuleType, a: Any, b: Any, out: Any, transpose_a: bool, transpose_b: bool,
    epilogue: Epilogue, bias: Any, aux: Any, alpha: float, added: Any,
) -> None:  # fmt: skip
    """The same by array functions."""
    a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    a, b = a.T if transpose_a else a, b.T if transpose_b else b
    z = xp.matmul(a, b)
    if alpha != 1:
        z *= np.float32(alpha)
    if added is not None:
        z += added
    if "BIAS" in epilogue.name:
        z += bias
    if epilogue is Epilogue.RELU_AUX_BIAS:
        aux[...] = _packed(xp, z > 0, aux.shape[1])
    if "DRELU" in epilogue.name:
        columns = xp.arange(z.shape[1])
        live = (aux[:, columns // 32] >> (columns % 32).astype(np.uint32)) & np.uint32(1)
        z = xp.where(live != 0, z, np.float32(0))
    elif "RELU" in epilogue.name:
        z = xp.maximum(z, np.float32(0))
    if epilogue is Epilogue.DRELU_BGRAD:
        bias[...] = z.sum(axis=0)
    elif epilogue is Epilogue.BGRADA:
        bias[...] = b.sum(axis=0)
    elif epilogue is Epilogue.BGRADB:
        bias[...] = a.sum(axis=1)
    out[...] = z


def _packed(xp: ModuleType, live: Any, words: int) -> Any:
    """(rows, words) of uint32 out of (rows, columns) of bool."""
    rows, columns = live.shape
    padded = xp.zeros((rows, 32 * words), np.uint32)
    padded[:, :columns] = live
    shifted = padded.reshape(rows, words, 32) << xp.arange(32).astype(np.uint32)
    return shifted.sum(axis=2, dtype=np.uint32)

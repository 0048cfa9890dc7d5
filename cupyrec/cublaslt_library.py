"""libcublasLt by ctypes: its numbers, its functions, and its descriptors with attributes by name.

All of it works without a GPU but ``cublasLtCreate`` and what takes its handle.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from ctypes import c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

from cupyrec import nvrtc

__all__ = [
    "C_TYPES", "Cublas", "CublasLtError", "Cuda", "Desc", "Descriptor", "Epilogue",
    "HeuristicResult", "Matrix", "Order", "Preference", "Status", "library", "succeed",
]  # fmt: skip


class CublasLtError(RuntimeError):
    """cublasLt refused a call that it must take, or failed."""


# The headers' numbers: cublasLt.h, cublas_api.h, library_types.h


class Epilogue(enum.IntEnum):
    """What happens to a result before it is stored, see `cublaslt.matmul`."""

    DEFAULT = 1
    BIAS = 4
    RELU_BIAS = 6
    RELU_AUX_BIAS = 134
    DRELU = 136
    DRELU_BGRAD = 152
    BGRADA = 256
    BGRADB = 512


class Cublas(enum.IntEnum):
    """Of cublas_api.h."""

    OP_N = 0
    OP_T = 1
    COMPUTE_32F = 68
    COMPUTE_32F_FAST_TF32 = 77


class Status(enum.IntEnum):
    """Of cublas_api.h, cublasStatus_t."""

    STATUS_SUCCESS = 0
    STATUS_INVALID_VALUE = 7
    STATUS_NOT_SUPPORTED = 15


class Cuda(enum.IntEnum):
    """Of library_types.h, cudaDataType_t."""

    R_32F = 0
    R_16F = 2
    R_16BF = 14


class Matrix(enum.IntEnum):
    """Attributes of a matrix layout."""

    TYPE = 0
    ORDER = 1
    ROWS = 2
    COLS = 3
    LD = 4
    BATCH_COUNT = 5


class Order(enum.IntEnum):
    """Values of `Matrix.ORDER`."""

    ORDER_COL = 0
    ORDER_ROW = 1


class Desc(enum.IntEnum):
    """Attributes of a matmul."""

    COMPUTE_TYPE = 0
    SCALE_TYPE = 1
    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    EPILOGUE_AUX_POINTER = 11
    EPILOGUE_AUX_LD = 12


class Preference(enum.IntEnum):
    """Attributes of what the heuristic may choose from."""

    MAX_WORKSPACE_BYTES = 1
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


#: C types of attributes by kind of descriptor; the library compares their sizes with its own.
C_TYPES: dict[str, dict[Any, Any]] = {
    "MatrixLayout": {
        Matrix.TYPE: c_uint32, Matrix.ORDER: c_int32, Matrix.ROWS: c_uint64,
        Matrix.COLS: c_uint64, Matrix.LD: c_int64, Matrix.BATCH_COUNT: c_int32,
    },
    "MatmulDesc": {
        Desc.COMPUTE_TYPE: c_int32, Desc.SCALE_TYPE: c_int32,
        Desc.TRANSA: c_int32, Desc.TRANSB: c_int32,
        Desc.EPILOGUE: c_uint32, Desc.BIAS_POINTER: c_uint64,
        Desc.EPILOGUE_AUX_POINTER: c_uint64, Desc.EPILOGUE_AUX_LD: c_int64,
    },
    "MatmulPreference": {
        Preference.MAX_WORKSPACE_BYTES: c_uint64,
        Preference.MIN_ALIGNMENT_A_BYTES: c_uint32, Preference.MIN_ALIGNMENT_B_BYTES: c_uint32,
        Preference.MIN_ALIGNMENT_C_BYTES: c_uint32, Preference.MIN_ALIGNMENT_D_BYTES: c_uint32,
    },
}  # fmt: skip


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; an algorithm is 8 opaque words."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


_P, _INT, _SIZE = c_void_p, ctypes.c_int, ctypes.c_size_t
_FUNCTIONS = {
    "cublasLtCreate": (_P,),
    "cublasLtMatrixLayoutCreate": (_P, _INT, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulDescCreate": (_P, _INT, _INT),
    "cublasLtMatmulPreferenceCreate": (_P,),
    "cublasLtMatmulAlgoGetHeuristic": (_P, _P, _P, _P, _P, _P, _P, _INT, _P, _P),
    "cublasLtMatmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _SIZE, _P),
}
for _kind in C_TYPES:
    _FUNCTIONS[f"cublasLt{_kind}Destroy"] = (_P,)
    _FUNCTIONS[f"cublasLt{_kind}SetAttribute"] = (_P, _INT, _P, _SIZE)
    _FUNCTIONS[f"cublasLt{_kind}GetAttribute"] = (_P, _INT, _P, _SIZE, _P)


@functools.cache
def library() -> ctypes.CDLL:
    """Return libcublasLt, of the wheels or of an installed toolkit.

    Raises
    ------
    FileNotFoundError
        It is not there.

    Examples
    --------
    >>> library().cublasLtGetVersion() // 10000 in (12, 13)  # doctest: +SKIP
    True
    """
    try:
        from cuda import pathfinder

        names = [pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path]
    except (ImportError, RuntimeError):  # no pathfinder, or it finds none; the system's loader may
        names = [f"libcublasLt.so.{nvrtc.version()[0]}", "libcublasLt.so"]
    found, why = None, []
    for name in names:
        try:
            found = found or ctypes.CDLL(name)
        except OSError as error:
            why.append(str(error))
    if found is None:
        raise FileNotFoundError(
            f"cublaslt: libcublasLt must be there, got {'; '.join(why)}; "
            "install cupyrec[cuda12], cupyrec[cuda13] or cupyrec[sim]."
        )
    for name, types in _FUNCTIONS.items():
        getattr(found, name).argtypes = types
    found.cublasLtGetStatusName.restype = ctypes.c_char_p
    return found


def succeed(what: str, status: int) -> None:
    """Raise `CublasLtError`, which says what failed and how, unless the status is success.

    Examples
    --------
    >>> succeed("cublasLtCreate", 0)
    """
    if status != Status.STATUS_SUCCESS:
        name = library().cublasLtGetStatusName(status).decode()
        raise CublasLtError(f"cublaslt: {what} must succeed, got {name}.")


class Descriptor:
    """One of the library's opaque descriptors: its attributes are items.

    Parameters
    ----------
    kind : str
        Key of `C_TYPES`.
    *arguments : int
        Of its ``Create``.

    Examples
    --------
    >>> layout = Descriptor("MatrixLayout", Cuda.R_32F, 5, 7, 8)  # doctest: +SKIP
    >>> layout[Matrix.LD]  # doctest: +SKIP
    8
    """

    def __init__(self, kind: str, *arguments: int) -> None:
        self.kind, self.pointer = kind, c_void_p()
        self._call("Create", ctypes.byref(self.pointer), *arguments)

    def _call(self, verb: str, *arguments: Any) -> None:
        name = f"cublasLt{self.kind}{verb}"
        succeed(name, getattr(library(), name)(*arguments))

    def __setitem__(self, attribute: enum.IntEnum, value: int) -> None:
        raw = C_TYPES[self.kind][attribute](value)
        self._call("SetAttribute", self.pointer, attribute, ctypes.byref(raw), ctypes.sizeof(raw))

    def __getitem__(self, attribute: enum.IntEnum) -> int:
        raw, written = C_TYPES[self.kind][attribute](), _SIZE()
        self._call(
            "GetAttribute", self.pointer, attribute,
            ctypes.byref(raw), ctypes.sizeof(raw), ctypes.byref(written),
        )  # fmt: skip
        return raw.value

    def __del__(self) -> None:
        if self.pointer:
            self._call("Destroy", self.pointer)

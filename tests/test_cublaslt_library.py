"""Our numbers against NVIDIA's headers, of CUDA 12 and 13 where they are installed.

CUPYREC_CUDA_HEADERS names further folders that hold cublasLt.h, cublas_api.h and library_types.h.
"""

import ctypes
import os
import re
import site
import sys
from pathlib import Path

import oracle
import pytest

from cupyrec import cublaslt_library
from cupyrec.cublaslt_library import (
    C_TYPES,
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

pytest.importorskip("cuda.pathfinder", reason="pip install cupyrec[sim]")

WHEELS = [Path(folder) / "nvidia" for folder in site.getsitepackages()]
MORE = [Path(p) for p in os.environ.get("CUPYREC_CUDA_HEADERS", "").split(os.pathsep) if p]
CUDA_12 = [w / name / "include" for w in WHEELS for name in ("cublas", "cuda_runtime")]
CUDA_13 = [*(w / "cu13" / "include" for w in WHEELS), *MORE]

NUMBERS = [
    ("cublasLt.h", "CUBLASLT_EPILOGUE_", Epilogue),
    ("cublasLt.h", "CUBLASLT_MATMUL_DESC_", Desc),
    ("cublasLt.h", "CUBLASLT_MATMUL_PREF_", Preference),
    ("cublasLt.h", "CUBLASLT_MATRIX_LAYOUT_", Matrix),
    ("cublasLt.h", "CUBLASLT_", Order),
    ("cublas_api.h", "CUBLAS_", Cublas),
    ("cublas_api.h", "CUBLAS_", Status),
    ("library_types.h", "CUDA_", Cuda),
]


@pytest.fixture(params=[CUDA_12, CUDA_13], ids=["12", "13"])
def header(request):
    """A function that reads a header of one CUDA."""

    def read(name: str) -> str:
        paths = [folder / name for folder in request.param if (folder / name).exists()]
        if not paths:
            pytest.skip(f"{name} of this CUDA is not installed")
        return re.sub(r"/\*.*?\*/", "", paths[0].read_text(), flags=re.DOTALL)

    return read


def enumerators(text: str) -> dict[str, int]:
    """Names and values of all enums; a value is numbers and earlier names, joined by |."""
    values: dict[str, int] = {}
    for name, expression in re.findall(r"(\w+)\s*=\s*([\w |()]+?)\s*[,}]", text):
        parts = expression.strip("()").split("|")
        known = [values.get(p.strip(), p.strip()) for p in parts]
        if all(isinstance(k, int) or re.fullmatch(r"\d+|0x[\da-f]+", k) for k in known):
            values[name] = 0
            for k in known:
                values[name] |= k if isinstance(k, int) else int(k, 0)
    return values


def test_enumerators():
    text = "enum { A = 2, B = (A | 128), C = B | 0x10 }; D = f(x),"
    assert enumerators(text) == {"A": 2, "B": 130, "C": 146}


@pytest.mark.parametrize(
    ("file", "prefix", "kind"), NUMBERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_numbers_are_those_of_the_header(header, file, prefix, kind):
    values = enumerators(header(file))
    assert {m.name: values.get(prefix + m.name) for m in kind} == {m.name: m for m in kind}


def test_heuristic_result_is_laid_out_as_in_the_header(header):
    text = header("cublasLt.h")
    (words,) = re.findall(r"uint64_t data\[(\d+)\];\s*} cublasLtMatmulAlgo_t;", text)
    (body,) = re.findall(r"struct {([^}]*)} cublasLtMatmulHeuristicResult_t;", text)
    types = {
        "cublasLtMatmulAlgo_t": ctypes.c_uint64 * int(words), "size_t": ctypes.c_size_t,
        "cublasStatus_t": ctypes.c_int, "float": ctypes.c_float, "int": ctypes.c_int,
    }  # fmt: skip
    fields = []
    for kind, name, count in re.findall(r"(\w+) (\w+)(?:\[(\d+)\])?;", body):
        fields.append((name, types[kind] * int(count) if count else types[kind]))
    made = type("Made", (ctypes.Structure,), {"_fields_": fields})
    assert ctypes.sizeof(made) == ctypes.sizeof(HeuristicResult)
    ours = [getattr(HeuristicResult, name) for name, _ in HeuristicResult._fields_]
    theirs = [getattr(made, name) for name, _ in fields]
    assert [(f.offset, f.size) for f in ours] == [(f.offset, f.size) for f in theirs]


# The library


ARGUMENTS = {
    "MatrixLayout": (Cuda.R_32F, 5, 7, 8),
    "MatmulDesc": (Cublas.COMPUTE_32F, Cuda.R_32F),
    "MatmulPreference": (),
}


def test_library_is_of_cuda_12_or_13():
    assert library().cublasLtGetVersion() // 10000 in (12, 13)


@pytest.mark.parametrize("kind", C_TYPES)
def test_attributes_have_the_library_s_sizes(kind):
    descriptor = Descriptor(kind, *ARGUMENTS[kind])
    for attribute, c_type in C_TYPES[kind].items():
        needed = ctypes.c_size_t()
        get = getattr(library(), f"cublasLt{kind}GetAttribute")
        assert get(descriptor.pointer, attribute, None, 0, ctypes.byref(needed)) == 0
        assert needed.value == ctypes.sizeof(c_type), attribute


def test_what_is_set_is_read_back():
    layout = Descriptor("MatrixLayout", *ARGUMENTS["MatrixLayout"])
    read = [layout[m] for m in Matrix]
    assert read == [Cuda.R_32F, Order.ORDER_COL, 5, 7, 8, 1]
    layout[Matrix.LD] = 2**40
    assert layout[Matrix.LD] == 2**40
    desc = Descriptor("MatmulDesc", *ARGUMENTS["MatmulDesc"])
    assert desc[Desc.COMPUTE_TYPE], desc[Desc.EPILOGUE] == (68, Epilogue.DEFAULT)
    for attribute in Desc:
        if attribute not in (Desc.COMPUTE_TYPE, Desc.SCALE_TYPE):
            desc[attribute] = 1
            assert desc[attribute] == 1


def test_status_is_an_error_that_names_it():
    succeed("f", Status.STATUS_SUCCESS)
    text = "cublaslt: cublasLtCreate must succeed, got CUBLAS_STATUS_NOT_SUPPORTED."
    with pytest.raises(CublasLtError, match=oracle.sentence(text)):
        succeed("cublasLtCreate", 15)


def test_wrong_size_is_refused(monkeypatch):
    monkeypatch.setitem(C_TYPES["MatmulDesc"], Desc.EPILOGUE, ctypes.c_uint64)
    desc = Descriptor("MatmulDesc", *ARGUMENTS["MatmulDesc"])
    with pytest.raises(CublasLtError, match="SetAttribute must succeed.*INVALID_VALUE"):
        desc[Desc.EPILOGUE] = 1


def test_missing_library_says_what_to_install(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    cublaslt_library.nvrtc.version()  # is known from now on
    monkeypatch.setattr(cublaslt_library.ctypes, "CDLL", missing)
    with pytest.raises(FileNotFoundError, match="libcublasLt.*cannot open; install cupyrec"):
        library.__wrapped__()
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(FileNotFoundError, match=r"so\.1[23]: cannot open; .*so: cannot open"):
        library.__wrapped__()

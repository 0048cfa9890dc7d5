import logging

import numpy as np
import oracle
import pytest
from one_instruction import HEADER, execute, kernel

from cupyrec import sim
from cupyrec.sim import memory

NEEDED = "CuPy brings NVRTC: pip install cupyrec[cuda12]"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(name="other"), ValueError,
         "sim.run: 'name' must be one of the kernels ['f'], got 'other'."),
        (dict(args=()), ValueError, "sim.run: 'args' must have 1 values, got 0."),
        (dict(args=(3,)), TypeError,
         "sim.run: 'args[0]' must be an array or a NumPy scalar, got int."),
        (dict(args=(np.int32(3),)), TypeError,
         "sim.run: 'args[0]' must have the 8 bytes that the kernel takes, got 4."),
        (dict(grid=0), ValueError,
         "sim.run: 'grid' and 'block' must be 1 to 3 sizes above 0, got 0."),
        (dict(block=(1, 1, 1, 1)), ValueError,
         "sim.run: 'grid' and 'block' must be 1 to 3 sizes above 0, got (1, 1, 1, 1)."),
    ],
)  # fmt: skip
def test_run_refuses(change, error, text):
    call = dict(source=kernel("", [4]), name="f", grid=1, block=1, args=(np.zeros(1),)) | change
    with pytest.raises(error, match=oracle.sentence(text)):
        sim.run(**call)


def test_memory_is_given_back():
    before = len(memory.the_heap().live)
    sim.run(kernel("", [4]), "f", 2, 40, (np.zeros(80, np.int32),))
    assert len(memory.the_heap().live) == before
    assert HEADER in kernel("", [])


def test_an_unknown_instruction_names_the_line_of_the_source():
    pytest.importorskip("cupy", reason=NEEDED)
    code = """extern "C" __global__ void f(int* x) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(x[0]));
    }"""
    with pytest.raises(sim.PtxError, match=r"'mbarrier\.init.*\(PTX line \d+, own\.cu:2\)"):
        sim.run(code, "f", 1, 1, (np.zeros(1, np.int32),), file="own.cu")
    assert execute("add.s32", "s32", ("s32", [1]), ("s32", [2])).tolist() == [3]  # it lives on


def test_warnings_of_the_compiler_are_logged(caplog, tmp_path, monkeypatch):
    pytest.importorskip("cupy", reason=NEEDED)
    monkeypatch.setenv("CUPYREC_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "cupyrec"):
        sim.run('extern "C" __global__ void f() { int unused; }', "f", 1, 1, (), file="w.cu")
    assert "w.cu(1): warning" in caplog.text

import logging

import numpy as np
import oracle
import pytest
from one_instruction import HEADER, execute, kernel

from cupyrec import sim
from cupyrec.sim import heap

NEEDED = "CuPy brings NVRTC: pip install cupyrec[cuda12]"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(name="other"), ValueError,
         "sim.run: 'name' must be one of the kernels ['f'], got 'other'."),
        (dict(grid=0), ValueError, "sim.run: 'grid' must be 1 to 3 sizes above 0, got 0."),
        (dict(block=(1, 1, 1, 1)), ValueError,
         "sim.run: 'block' must be 1 to 3 sizes above 0, got (1, 1, 1, 1)."),
        (dict(block=()), ValueError, "sim.run: 'block' must be 1 to 3 sizes above 0, got ()."),
        (dict(grid=1.5), TypeError,
         "sim.run: 'grid' must be a whole number or up to 3, got 1.5."),
        (dict(shared=-1), ValueError, "sim.run: 'shared' must be 0 or more, got -1."),
        (dict(shared=1.5), TypeError, "sim.run: 'shared' must be a whole number, got 1.5."),
        (dict(max_steps=-1), ValueError, "sim.run: 'max_steps' must be 0 or more, got -1."),
        (dict(seed=-1), ValueError, "sim.run: 'seed' must be 0 or more, got -1."),
        (dict(arch=8), ValueError,
         "sim.run: 'arch' must be a compute capability times 10, as 80 or 90, got 8."),
        (dict(block=(32, "1")), TypeError,
         "sim.run: 'block' must be a whole number or up to 3, got (32, '1')."),
    ],
)  # fmt: skip
def test_run_refuses(change, error, text):
    call = dict(source=kernel("", [4]), name="f", grid=1, block=1, args=(np.zeros(1),)) | change
    with pytest.raises(error, match=oracle.sentence(text)):
        sim.run(**call)


def test_memory_is_given_back():
    before = len(heap.the_heap().live)
    sim.run(kernel("", [4]), "f", 2, 40, (np.zeros(80, np.int32),))
    assert len(heap.the_heap().live) == before
    assert HEADER in kernel("", [])


def test_a_launch_that_finds_no_memory_gives_back_what_it_has(monkeypatch):
    the_heap = heap.the_heap()
    before, allocate = len(the_heap.live), the_heap.allocate

    def full(size, name, *more):
        if name == "local":
            raise MemoryError
        return allocate(size, name, *more)

    monkeypatch.setattr(the_heap, "allocate", full)
    with pytest.raises(MemoryError):
        sim.run(kernel("", [4]), "f", 2, 40, (np.zeros(80, np.int32),))
    assert len(the_heap.live) == before


@pytest.mark.parametrize(("size", "refused"), [(48 << 10, False), ((48 << 10) + 1, True)])
def test_static_shared_memory_has_its_limit(size, refused):
    text = f".shared .align 1 .b8 tile[{size}];\nmov.u32 %r4, tile;"
    call = (kernel(text, [4]), "f", 1, 1, (np.zeros(1, np.int32),))
    if not refused:
        assert sim.run(*call, shared=1 << 10).faults == []
        return
    sentence = (
        "sim.run: f: a block must have at most 49152 bytes of shared memory that is not dynamic, "
        "got 49153."
    )
    with pytest.raises(ValueError, match=oracle.sentence(sentence)):
        sim.run(*call)


def test_an_unknown_instruction_names_the_line_of_the_source():
    pytest.importorskip("cupy", reason=NEEDED)
    code = """extern "C" __global__ void f(int* x) {
        asm volatile("sust.b.1d.b32.trap [%0, {1}], 1;" :: "l"(x));
    }"""
    with pytest.raises(sim.PtxError, match=r"'sust\.b.*\(PTX line \d+, own\.cu:2\)"):
        sim.run(code, "f", 1, 1, (np.zeros(1, np.int32),), file="own.cu")
    assert execute("add.s32", "s32", ("s32", [1]), ("s32", [2])).tolist() == [3]  # it lives on


def test_warnings_of_the_compiler_are_logged(caplog, tmp_path, monkeypatch):
    pytest.importorskip("cupy", reason=NEEDED)
    monkeypatch.setenv("CUPYREC_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "cupyrec"):
        sim.run('extern "C" __global__ void f() { int unused; }', "f", 1, 1, (), file="w.cu")
    assert "w.cu(1): warning" in caplog.text


LIMITED = """
extern "C" __global__ void __launch_bounds__(64) bounded(int* x) { x[threadIdx.x] = 1; }
extern "C" __global__ void shares(int* x) {
    extern __shared__ int room[];
    __shared__ int own[256];
    room[threadIdx.x] = own[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = room[threadIdx.x] + own[threadIdx.x];
}"""


@pytest.mark.parametrize(
    ("name", "grid", "block", "more", "text"),
    [
        ("bounded", 1, 65, {},
         "sim.run: bounded: a block must have at most 64 threads, 64 along z, got (65, 1, 1)."),
        ("shares", 2**31 - 1, 32, {},
         "sim.run: shares: a launch must have at most 67108864 threads to be simulated, "
         "got 68719476704."),
        ("shares", 1, 1025, {},
         "sim.run: shares: a block must have at most 1024 threads, 64 along z, got (1025, 1, 1)."),
        ("shares", 1, (1, 1, 65), {},
         "sim.run: shares: a block must have at most 1024 threads, 64 along z, got (1, 1, 65)."),
        ("shares", (1, 65536), 1, {},
         "sim.run: shares: a grid must have less than 2**31 blocks along x, 2**16 along y and z, "
         "got (1, 65536, 1)."),
        ("shares", 1, 32, dict(shared=(162 << 10) + 4, arch=80),
         "sim.run: shares: a block must have at most 166912 bytes of shared memory on sm_80, "
         "got 166916."),
        ("shares", 1, 32, dict(shared=228 << 10, arch=90),
         "sim.run: shares: a block must have at most 232448 bytes of shared memory on sm_90, "
         "got 234496."),
    ],
)  # fmt: skip
def test_what_a_gpu_would_not_launch_is_refused(name, grid, block, more, text):
    pytest.importorskip("cupy", reason=NEEDED)
    x = np.zeros(2048, np.int32)
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        sim.run(LIMITED, name, grid, block, (x,), **more)


def test_what_a_gpu_just_launches_runs():
    pytest.importorskip("cupy", reason=NEEDED)
    x = np.ones(1024, np.int32)
    assert sim.run(LIMITED, "bounded", (1, 65535), 1, (x,)).faults  # all blocks write one word
    assert sim.run(LIMITED, "shares", 1, 256, (x,), shared=162 << 10).faults == []
    assert x[:256].tolist() == [2] * 256


STEPS = """extern "C" __global__ void steps(float* x) {
    __shared__ float room[2048];
    room[32 * threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < 40)
        x[8 * threadIdx.x] = room[32 * threadIdx.x];
}"""


def test_each_instruction_has_its_line_and_costs():
    pytest.importorskip("cupy", reason=NEEDED)
    result = sim.run(STEPS, "steps", 1, 64, (np.zeros(512, np.float32),))

    def at(line, root, name):
        found = [one for one in result.executed if one.source == ("kernel.cu", line)
                 and one.opcode.startswith(root)]  # fmt: skip
        (one,) = found
        return one.warps, one.threads, one.counts[name]

    assert at(3, "ld.global", "sectors") == (2, 64, 8)
    assert at(3, "st.shared", "bank_conflicts") == (2, 64, 62)
    assert at(6, "ld.shared", "bank_conflicts") == (2, 40, 31 + 7)
    assert at(6, "st.global", "sectors") == (2, 40, 40)
    assert sum(one.warps for one in result.executed) == result.counts["instructions"]
    for name in ("sectors", "requests", "bank_conflicts", "divergent_branches"):
        assert sum(one.counts.get(name, 0) for one in result.executed) == result.counts[name] > 0

import multiprocessing
import os
import re
import resource

import pytest

from cupyrec import nvrtc

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[cuda12]")

SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYREC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cupys_options(monkeypatch, own, arch):
    """What CuPy itself hands to NVRTC, caught on the way; no GPU is asked."""
    from cupy._core import core
    from cupy.cuda import compiler

    class Caught(Exception):
        pass

    def program(*_, **__):
        class Program:
            def compile(self, options, log=None):
                raise Caught(options)

        return Program()

    monkeypatch.setattr(compiler, "_preprocess", lambda *_: "")
    monkeypatch.setattr(compiler.function, "Module", lambda: None)
    monkeypatch.setattr(
        compiler, "_get_arch_for_options_for_nvrtc", lambda a=None: (f"-arch=compute_{a}", "ptx")
    )
    monkeypatch.setattr(compiler, "_NVRTCProgram", program)
    monkeypatch.setattr(compiler._kernel_cache_backend, "load", lambda name: None)
    with pytest.raises(Caught) as caught:
        core.compile_with_cache("", own, arch=str(arch), prepend_cupy_headers=False)
    return caught.value.args[0]


@pytest.mark.parametrize("own", [(), ("-DX=1",), ("--std=c++14",), ("-std=c++20", "-lineinfo")])
@pytest.mark.parametrize("arch", [80, 90])
def test_options_are_cupys(monkeypatch, own, arch):
    assert nvrtc.compile_options(arch, own) == cupys_options(monkeypatch, own, arch)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_ptx(arch):
    text = nvrtc.ptx(SOURCE, arch=arch, macros={"FACTOR": 2.5})
    assert f".target sm_{arch}" in text
    assert ".visible .entry twice" in text
    assert "0f40200000" in text or "0d4004000000000000" in text  # 2.5


def test_headers_are_found():
    headers = "cuda_fp16.h", "cuda_bf16.h", "cuda/atomic", "cooperative_groups.h"
    text = nvrtc.ptx("".join(f"#include <{name}>\n" for name in headers))
    assert ".version" in text


def test_error_names_file_and_line():
    with pytest.raises(nvrtc.CompileError, match=r"row_codec\.cu\(1\): error:"):
        nvrtc.ptx(SOURCE, file="row_codec.cu")


def test_cache_is_read(cache):
    first = nvrtc.ptx(SOURCE, macros={"FACTOR": 2})
    (path,) = cache.iterdir()
    path.write_text(nvrtc._sealed("kept"))
    assert (nvrtc.ptx(SOURCE, macros={"FACTOR": 2}), first[:2]) == ("kept", "//")


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole.replace(b"mul", b"add"),
        lambda whole: bytes([255]) + whole[1:],
    ],
)
def test_a_damaged_entry_is_written_anew(cache, damage):
    first = nvrtc.ptx(SOURCE, macros={"FACTOR": 2})
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert nvrtc.ptx(SOURCE, macros={"FACTOR": 2}) == first
    assert path.read_bytes() == whole
    assert list(cache.iterdir()) == [path]


def test_a_full_disk_keeps_no_part_of_a_file(cache, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        nvrtc._keep(cache / "a.ptx", "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(cache.iterdir()) == []
    assert "can't be written" in caplog.text


@pytest.mark.parametrize(
    "other",
    [
        dict(macros={"FACTOR": 3}),
        dict(arch=90),
        dict(options=("-lineinfo",)),
        dict(file="other.cu"),
    ],
)
def test_cache_tells_apart(cache, other):
    same = dict(macros={"FACTOR": 2}, arch=80)
    nvrtc.ptx(SOURCE, **same)
    nvrtc.ptx(SOURCE, **{**same, **other})
    assert len(list(cache.iterdir())) == 2


def test_cache_tells_versions_apart(cache, monkeypatch):
    nvrtc.ptx(SOURCE, macros={"FACTOR": 2})
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    nvrtc.ptx(SOURCE, macros={"FACTOR": 2})
    assert len(list(cache.iterdir())) == 2


def compile_into(folder):
    os.environ["CUPYREC_CACHE_DIR"] = str(folder)
    return nvrtc.ptx(SOURCE, macros={"FACTOR": 2})


def test_many_processes_fill_the_cache(cache):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        texts = pool.map(compile_into, [cache] * 6, chunksize=1)
    (path,) = cache.iterdir()
    assert re.fullmatch(r"[0-9a-f]{64}\.ptx", path.name)
    assert set(texts) == {nvrtc._kept(path)}


def test_unwritable_cache_is_none(cache, caplog):
    cache.write_text("a file where the folder should be")
    assert ".entry twice" in nvrtc.ptx(SOURCE, macros={"FACTOR": 2})
    assert "can't be written" in caplog.text


def test_warnings_are_heard_again(cache, caplog):
    source = 'extern "C" __global__ void k() { int idle; }\n'
    for n in (1, 2):
        nvrtc.ptx(source, file="idle.cu")
        assert caplog.text.count("idle.cu(1): warning") == n
    assert not cache.exists()


# ptxas

SHARED = """
extern "C" __global__ void first(float* x) {
    __shared__ float s[256];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = s[255 - threadIdx.x];
}
extern "C" __global__ void second(float* x) { *x = 0; }
"""


@pytest.fixture
def ptxas():
    try:
        nvrtc._ptxas()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    nvrtc._assembled.cache_clear()


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_resources_by_kernel(arch, ptxas):
    found = nvrtc.ptxas(nvrtc.ptx(SHARED, arch=arch), arch)
    assert list(found) == ["first", "second"] or list(found) == ["second", "first"]
    assert (found["first"].shared, found["second"].shared) == (1024, 0)
    assert all(4 <= r.registers <= 32 and r[1:3] == (0, 0) for r in found.values())
    assert all(r.warnings == () for r in found.values())


def test_spills_are_seen(ptxas):
    # 64 values live at once do not fit into the registers that a thread of 1024 x 2 may have.
    source = """extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x, int n) {
        float v[64];
    #pragma unroll
        for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
        for (int k = 0; k < n; ++k)
    #pragma unroll
            for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 7) % 64] + v[(i + 31) % 64];
    #pragma unroll
        for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i];
    }"""
    assert nvrtc.ptxas(nvrtc.ptx(source), 80)["spill"].spills > 0


def test_what_ptxas_says_is_read():
    said = """ptxas warning : Value of threads per SM for entry k is out of range
ptxas info    : 8 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for k
    96 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 96 bytes cumulative stack size, 512 bytes smem
"""
    warning = "ptxas warning : Value of threads per SM for entry k is out of range"
    assert nvrtc._resources(said) == {"k": nvrtc.Resources(14, 20, 96, 512, (warning,))}


def test_resources_are_cached(cache, ptxas, monkeypatch):
    text = nvrtc.ptx(SHARED)
    found = nvrtc.ptxas(text, 80)
    nvrtc._assembled.cache_clear()
    path, version = nvrtc._ptxas()
    monkeypatch.setattr(nvrtc, "_ptxas", lambda: ("/no/ptxas", version))
    assert nvrtc.ptxas(text, 80) == found
    (kept,) = cache.glob("*.json")
    kept.write_text("{}")
    nvrtc._assembled.cache_clear()
    monkeypatch.setattr(nvrtc, "_ptxas", lambda: (path, version))
    assert nvrtc.ptxas(text, 80) == found


def test_ptxas_refuses(ptxas):
    with pytest.raises(nvrtc.CompileError, match=r"^ptxas: .*line 4.*no_such"):
        nvrtc.ptxas(".version 8.0\n.target sm_80\n.address_size 64\nno_such;\n", 80)


def test_no_ptxas(monkeypatch):
    from cuda import pathfinder

    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setenv("PATH", "")
    nvrtc._ptxas.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"^ptxas: must be installed or on PATH"):
        nvrtc.ptxas("", 80)
    nvrtc._ptxas.cache_clear()

import multiprocessing
import os
import re

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
    path.write_text("kept")
    assert (nvrtc.ptx(SOURCE, macros={"FACTOR": 2}), first[:2]) == ("kept", "//")


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
    assert set(texts) == {path.read_text()}


def test_unwritable_cache_is_none(cache, caplog):
    cache.write_text("a file where the folder should be")
    assert ".entry twice" in nvrtc.ptx(SOURCE, macros={"FACTOR": 2})
    assert "can't be written" in caplog.text

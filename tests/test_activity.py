"""What takes long is told while it lasts."""

import shutil
import sys
import time
from types import SimpleNamespace

import pytest
from numba.core import event

from cupyrec import activity, cpu, kernel, nvrtc
from cupyrec.data import prefetch


def test_activities_of_all_threads_end_by_errors_too() -> None:
    with pytest.raises(ZeroDivisionError), activity.during("a"), activity.during("b"):
        assert activity.now() == ["a", "b"]
        raise ZeroDivisionError
    assert activity.now() == []


def test_numba_compiles() -> None:
    seen = []

    class Seen(event.Listener):
        def on_start(self, _event):
            seen.append(activity.now())

        on_end = on_start

    with event.install_listener("numba:compile", Seen()):
        cpu.numba.njit(lambda x: x + 1)(3)
    assert seen[0] == ["compiling"]
    assert activity.now() == []


def test_nvrtc_compiles(tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(nvrtc, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 0))
    monkeypatch.setattr(nvrtc, "compile_options", lambda *given: ())
    monkeypatch.setattr(
        nvrtc, "_compile", lambda *given: (seen.append(activity.now()) or "ptx", "")
    )
    for _ in range(2):  # the second is kept
        assert nvrtc.ptx("source", arch=80).startswith("ptx")
    assert seen == [["compiling"]]
    shutil.rmtree(tmp_path)


def test_cupy_compiles(monkeypatch) -> None:
    seen = []

    class Module:
        def __init__(self, code, options):
            pass

        def get_function(self, name):
            seen.append(activity.now())
            return SimpleNamespace(shared_size_bytes=0)

    device = SimpleNamespace(id=0, attributes={"MaxSharedMemoryPerBlockOptin": 1})
    fake = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device), RawModule=Module)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    one = kernel.Kernel("rank_sum.cu", "rank_sum", "int n", lambda n: None)
    one._function({})
    assert seen == [["compiling"]]


def test_a_batch_is_waited_for() -> None:
    seen = []

    def slow():
        end = time.monotonic() + 60
        while not activity.now() and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(activity.now())
        yield 1

    assert list(prefetch(slow())) == [1]
    assert seen == [["reading"]]
    assert activity.now() == []

"""The kernel bench: its helpers on inputs made by hand, and its script."""

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.kernel import Geometry, Kernel

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import bench_kernels
import kernel_cases
import kernel_figures as figures
import kernel_inputs

FIELDS = {
    "kernel": str, "shape": str, "dtype": str, "bytes_ratio": float, "sectors_per_request": float,
    "bank_conflicts": float, "registers": int, "spills": int, "occupancy": float, "balance": float,
    "bound": str,
}  # fmt: skip

# Loads in flight


def in_flight(*lines):
    body = "\n".join(f"\t{line}" for line in lines)
    text = ".visible .entry other(\n)\n{\n\tld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\n}\n"
    text += f".visible .entry k(\n\t.param .u64 k_param_0\n)\n{{\n\t.reg .f32 %f<9>;\n{body}\n}}\n"
    return figures.loads_in_flight(text, "k")


F1, F2, F3 = (f"ld.global.f32 %f{i}, [%rd1];" for i in (1, 2, 3))
D1, D2 = (f"ld.global.f64 %fd{i}, [%rd1];" for i in (1, 2))
V = "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["ret;"], 0),
        (["ld.param.u64 %rd1, [k_param_0];", "ld.shared.f32 %f1, [%r1];", "ret;"], 0),
        ([F1, "ld.global.nc.v2.f64 {%fd1, %fd2}, [%rd2];"], 20),
        ([V, "ld.global.u8 %rs1, [%rd2];"], 17),
        # A use waits for its load and those before it, not for those behind it.
        ([F1, "add.f32 %f2, %f1, %f1;", F3], 4),
        ([F1, D1, F3, "neg.f64 %fd2, %fd1;", V], 20),
        # So does a load from a loaded address, a store, a predicate.
        (["ld.global.u64 %rd1, [%rd2];", F1], 8),
        ([F1, "st.global.f32 [%rd2], %f1;", F2], 4),
        ([V, "setp.eq.s32 %p1, %r1, 0;", "@%p1 ld.global.f32 %f1, [%rd1];"], 16),
        # Another name for a result is no use of it, that name's is.
        ([F1, "mov.f32 %f2, %f1;", F3, "neg.f32 %f4, %f2;", F1], 8),
        # A register that is written anew no longer waits.
        ([F1, "mov.f32 %f1, 0f00000000;", "neg.f32 %f2, %f1;", F3], 8),
        # Both ways of a branch, and what follows where they meet.
        (["@%p1 bra $L1;", D1, "bra.uni $L2;", "$L1:", F1, "$L2:", F2, "ret;"], 12),
        # Nothing goes on behind `ret`; a loop is gone through once.
        ([D1, "ret;", D2], 8),
        (["$L1:", D1, "@%p1 bra $L1;", F2], 12),
        # cp.async is under way until its wait.
        (
            [
                F1, "{ cp.async.cg.shared.global [%r1], [%rd1], 16; }",
                "cp.async.ca.shared.global [%r2], [%rd1], 4;", "cp.async.commit_group;",
                "cp.async.wait_group 0;", F2,
            ],
            24,
        ),
        ([".loc 1 5 7", F1 + " // " + F2], 4),
    ],
)  # fmt: skip
def test_loads_in_flight(lines, expected):
    assert in_flight(*lines) == expected


def test_no_such_kernel():
    with pytest.raises(ValueError, match="there must be a kernel 'k', found none"):
        figures.loads_in_flight(".visible .entry other(\n)\n{\n\tret;\n}\n", "k")


def test_copies_in_flight():
    ptx = "cp.async.ca.shared.global [%r66], [%rd16], 16;\ncp.async.wait_all;"
    classes = {"ld": 9, "cp.async.ca.shared.global": 12, "cp.async.wait_all": 2}
    assert figures.copies_in_flight(ptx, classes) == 96  # six of 16 bytes at each wait
    assert figures.copies_in_flight("ret;", {"ld": 9}) == 0


# Occupancy


@pytest.mark.parametrize(
    ("registers", "shared", "block", "held"),
    [
        (32, 0, 256, 8),  # 2048 threads
        (33, 0, 256, 6),  # 40 registers a thread: 51 warps, 48 of them in fours, of 8 warps a block
        (64, 0, 256, 4),
        (255, 0, 256, 1),
        (255, 0, 1024, 0),
        (16, 0, 32, 32),  # blocks
        (16, 0, 33, 32),
        (16, 0, 96, 21),  # 64 warps
        (32, 100 << 10, 128, 2),  # 101 KB each of 228
        (32, 227 << 10, 128, 1),
        (32, 228 << 10, 128, 0),
        (32, 27 << 10, 128, 8),
    ],
)
def test_blocks_per_sm(registers, shared, block, held):
    assert figures.blocks_per_sm(registers, shared, block) == held


def test_residency():
    assert figures.residency(32, 0, 256, 132 * 8) == (1.0, 1.0, 2048)
    assert figures.residency(64, 0, 256, 132 * 6) == (0.5, 1.5, 1024)
    assert figures.residency(32, 0, 128, 66) == (1.0, 66 / (132 * 16), 128)  # half of the SMs
    assert figures.residency(255, 0, 1024, 66) == (0, 0, 0)


# Bounds


@pytest.mark.parametrize(
    ("changed", "in_flight", "expected"),
    [
        ({}, 64 << 10, "memory"),
        ({}, 8 << 10, "latency"),
        ({"bytes_read": 1 << 10}, 8 << 10, "memory"),  # it writes: nobody waits for that
        ({}, 0, "memory"),
        ({"instructions": 1e9}, 64 << 10, "compute"),
        ({"shared_wavefronts": 1e9}, 64 << 10, "compute"),
        ({"sectors": 1e9, "instructions": 1e7}, 64 << 10, "memory"),  # from L2
    ],
)
def test_bound(changed, in_flight, expected):
    counts = {
        "bytes_read": 1 << 26, "bytes_written": 1 << 26, "sectors": 1 << 22, "instructions": 1e6,
        "shared_wavefronts": 0,
    }  # fmt: skip
    assert figures.bound(counts | changed, in_flight) == expected


def test_geometry_at_full_batch():
    kernel = Kernel("k.cu", "k", "float* x", lambda B, N, vector: Geometry(B * N, vector))
    launched = bench_kernels.Launched(kernel, {}, {"B": 256, "N": 3, "vector": 4})
    assert bench_kernels.at_full_batch(launched, 256, {}) == (65536 * 3 * 256, 4, 0)
    assert bench_kernels.at_full_batch(launched, 256, {"N": 3}) == (65536 * 3, 4, 0)


# Inputs


def test_keys_are_zipfs():
    tables, ids = kernel_inputs.zipf_keys(2000)
    assert (tables.dtype, ids.dtype, len(ids)) == (np.uint32, np.int64, 2000 * 26)
    _, counts = np.unique(np.stack([tables.astype(np.int64), ids]), axis=1, return_counts=True)
    weights = np.arange(1, 100_001) ** -1.2
    expected = 2000 * weights[0] / weights.sum()
    assert abs(np.sort(counts)[-26:] - expected).max() < 6 * np.sqrt(expected)


def test_a_table_is_half_full(sim):
    it = kernel_cases._Table(sim, 4, new=1)
    size, n = it.table._slots.size, len(it.ids)
    assert len(it.table) * 2 == size >= 16 * n
    found = it.table.find(it.tables, it.ids).get()
    assert (found < 0).sum() == n // 4
    assert len(it.table.find_or_insert(it.tables, it.ids)) == n
    assert it.table._slots.size == size
    it.table.truncate(it.length)
    np.testing.assert_array_equal(it.table.find(it.tables, it.ids).get(), found)


# The script


def test_the_script_on_the_simulator(monkeypatch, capsys, tmp_path):
    path = tmp_path / "k.json"
    arguments = ["--device", "sim", "--kernel", "sgd_rows", "--shape", "B=64", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    said = capsys.readouterr()
    rows = json.loads(said.out.splitlines()[-1])
    assert ended.value.code == 0
    assert [(row["kernel"], row["shape"]) for row in rows] == [
        ("sgd_rows", "U=432 D=128"), ("sgd_rows", "U=432 D=16")
    ]  # fmt: skip
    for row in rows:
        assert {key: type(row[key]) for key in FIELDS} == FIELDS
        assert row["bytes_ratio"] == 1
    assert [len(row.split()) for row in said.err.splitlines()[1:4]] == [14, 15, 15]
    written = json.loads(path.read_text())
    assert written.pop("cases") == rows
    assert written.pop("device") == "simulator, PTX of compute_90"
    assert written.pop("nvrtc") in said.err
    assert abs(time.time() - datetime.fromisoformat(written.pop("date")).timestamp()) < 60
    assert not written


class FakeGpu:
    """The simulator with what the bench asks of CuPy beyond arrays; every call takes 2 ms."""

    class cuda:
        Event = type("Event", (), {"record": lambda self: None, "synchronize": lambda self: None})
        Device = type("Device", (), {"id": 0})
        runtime = SimpleNamespace(
            getDeviceProperties=lambda i: {"name": b"Fake", "l2CacheSize": 1 << 10}
        )
        get_elapsed_time = staticmethod(lambda start, stop: 2.0)

    def __getattr__(self, name):
        return getattr(arrays.module("sim"), name)

    def get_default_memory_pool(self):
        return SimpleNamespace(free_all_blocks=lambda: None)


def test_the_script_on_a_gpu(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    module, functions = arrays.module, SimpleNamespace(num_regs=20, local_size_bytes=0)
    monkeypatch.setattr(arrays, "module", lambda d: FakeGpu() if d == "cuda" else module(d))
    monkeypatch.setattr(bench_kernels, "CHECKED", 4)
    monkeypatch.setattr(Kernel, "_function", lambda *_: functions)
    monkeypatch.setattr(bench_kernels.Timer, "COPIED", 1 << 20)
    monkeypatch.setattr(bench_kernels.Timer, "FLUSHED", 1 << 12)
    arguments = ["--device", "cuda", "--kernel", "sgd_dense", "gather_rows", "--shape", "B=4"]
    arguments += ["--plot", str(tmp_path / "k.png")]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    said = capsys.readouterr()
    assert "Fake: a copy moves 1 GB/s" in said.err
    rows = json.loads(said.out.splitlines()[-1])
    assert [row["kernel"] for row in rows] == ["sgd_dense", "gather_rows", "gather_rows"]
    assert {row["check"] for row in rows} == {"ok"}
    assert rows[0]["gb_per_s"] == pytest.approx(12 * 4096 / 2e-3 / 1e9)
    assert rows[0]["gflop_per_s"] == pytest.approx(4.25 * 4096 / 2e-3 / 1e9, rel=1e-3)
    assert (tmp_path / "k.png").stat().st_size > 0
    assert rows[0]["percent_of_copy"] == pytest.approx(100 * 12 * 4096 / (2 << 20))
    assert ended.value.code == 0


def spoil(monkeypatch, name, change):
    """Let the op's results on a device be what `change` makes of them."""
    make, widths = kernel_cases.CASES[name]

    def spoilt(xp, batch, width):
        work = make(xp, batch, width)
        if xp is not np:
            call = work.call
            work.call = lambda: tuple(map(change, call()))
        return work

    monkeypatch.setitem(kernel_cases.CASES, name, (spoilt, widths))


def with_nan(x):
    host = x.get()
    host[-1] = np.nan
    return arrays.module("sim").asarray(host)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x * 1.001, "1.0e-03"),
        (with_nan, "inf"),
        (lambda x: x * np.float32(np.nan), "inf"),
        (lambda x: x[:-1], "inf"),
        (lambda x: x.reshape(1, -1), "inf"),  # comparing it would broadcast
        (lambda x: x.astype(np.float64), "inf"),
        (lambda x: x, "ok"),
    ],
)
def test_a_wrong_result_is_said(monkeypatch, change, said):
    spoil(monkeypatch, "sgd_dense", change)
    assert bench_kernels.agrees("sgd_dense", arrays.module("sim"), 4, 0) == said


def test_wrong_integers_are_said(monkeypatch):
    spoil(monkeypatch, "hash_find", lambda rows: rows + 1)
    assert bench_kernels.agrees("hash_find", arrays.module("sim"), 4, 0) == "inf"


@pytest.mark.parametrize(
    ("expected", "got", "error"),
    [
        ([1, np.nan, np.inf], [1, np.nan, np.inf], 0),
        ([1, np.nan, np.inf], [1, np.nan, -np.inf], np.inf),
        ([1, np.inf], [1, np.nan], np.inf),
        ([1, np.nan], [1, 2], np.inf),
        ([8, np.nan], [6, np.nan], 0.25),
        ([0.5], [0.25], 0.25),
        ([], [], 0),
    ],
)
def test_difference(expected, got, error):
    assert bench_kernels.difference(np.float32(expected), np.float32(got)) == error


# Naive versions

ALL = [(name, width) for name, (_, widths) in kernel_cases.CASES.items() for width in widths]
NO_NAIVE = set(
    "hash_find hash_find_or_insert hash_delete round_rows encode_at_random cache_find cache_plan"
    " cache_put".split()
)
DRAWN = {"relu_dropout_forward", "relu_dropout_16_forward", "initial_uniform", "initial_normal"}


def naive(name, width=0):
    """What the CPU's op and the naive version give, and how far they may lie apart."""
    works = [kernel_cases.CASES[name][0](np, 8, width) for _ in range(2)]
    expected, got = ([*map(np.asarray, call())] for call in (works[0].call, works[1].naive))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in expected]
    return expected, got, bench_kernels.tolerance(works[0])


@pytest.mark.parametrize(("name", "width"), [case for case in ALL if case[0] not in NO_NAIVE])
def test_naive_versions_agree_with_the_ops(name, width):
    expected, got, tolerance = naive(name, width)
    if name not in DRAWN | {"unique_keys"}:  # of these below
        assert max(map(bench_kernels.difference, expected, got)) <= tolerance


def test_naive_unique_keys_are_all_there():
    (tables, ids, inverse, offsets, positions), theirs, _ = naive("unique_keys")
    keys = tables[inverse], ids[inverse]
    tables, ids, inverse, offsets, positions = theirs
    np.testing.assert_array_equal((tables[inverse], ids[inverse]), keys)
    segments = np.repeat(np.arange(len(ids)), np.diff(offsets))
    np.testing.assert_array_equal(inverse[positions], segments)


def test_naive_dropout_drops_half():
    (y, _), (got, mask), _ = naive("relu_dropout_forward")
    both = (y > 0) & (got > 0)
    np.testing.assert_allclose(got[both], y[both], rtol=1e-6)
    assert abs((got > 0).mean() - (y > 0).mean()) < 0.03
    bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(bits, got > 0)


def test_naive_initial_vectors_are_distributed_as_the_ops():
    for name in ("initial_uniform", "initial_normal"):
        (expected,), (got,), _ = naive(name, 128)
        quantiles = [0.01, 0.1, 0.5, 0.9, 0.99]
        assert np.abs(np.quantile(got, quantiles) - np.quantile(expected, quantiles)).max() < 0.03


def test_no_naive_version_of_what_keys_decide():
    assert {
        name for name, width in ALL if kernel_cases.CASES[name][0](np, 1, width).naive is None
    } == NO_NAIVE


def test_what_the_array_module_moves_counts(monkeypatch):
    make = kernel_cases.CASES["sgd_dense"][0]

    def sorts(xp, batch, width):
        work, x = make(xp, batch, width), xp.zeros(100, np.uint64)
        update = work.call

        def call():
            xp.sort(x)  # 8 passes, each reads and writes 800 bytes
            x[:50] = 1
            return update()

        work.call = call
        return work

    monkeypatch.setitem(kernel_cases.CASES, "sorts", (sorts, (0,)))
    row = bench_kernels.counted("sorts", 4, 0)
    assert row["bytes_ratio"] == pytest.approx(1 + (8 * 2 * 800 + 400) / (12 * 4096), abs=1e-3)
    assert row["other_calls"] == 2

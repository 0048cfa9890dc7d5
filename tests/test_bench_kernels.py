"""The kernel bench: its helpers on inputs made by hand, its script, and the bars it holds us to."""

import json
import sys
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
    tables, ids = kernel_cases.zipf_keys(2000)
    assert (tables.dtype, ids.dtype, len(ids)) == (np.uint32, np.int64, 2000 * 26)
    _, counts = np.unique(np.stack([tables.astype(np.int64), ids]), axis=1, return_counts=True)
    weights = np.arange(1, 100_001) ** -1.2
    expected = 2000 * weights[0] / weights.sum()
    assert abs(np.sort(counts)[-26:] - expected).max() < 6 * np.sqrt(expected)


def test_a_table_is_half_full():
    it = kernel_cases._Table(np, 4, new=1)
    size, n = it.table._slots.size, len(it.ids)
    assert len(it.table) * 2 == size >= 16 * n
    found = it.table.find(it.tables, it.ids)
    assert (found < 0).sum() == n // 4
    assert len(it.table.find_or_insert(it.tables, it.ids)) == n
    assert it.table._slots.size == size
    it.table.truncate(it.length)
    np.testing.assert_array_equal(it.table.find(it.tables, it.ids), found)


# The script


def test_the_script_on_the_simulator(monkeypatch, capsys):
    arguments = ["--device", "sim", "--kernel", "sgd_rows", "--batch", "64"]
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


def test_the_script_on_a_gpu(monkeypatch, capsys):
    module, functions = arrays.module, SimpleNamespace(num_regs=20, local_size_bytes=0)
    monkeypatch.setattr(arrays, "module", lambda d: FakeGpu() if d == "cuda" else module(d))
    monkeypatch.setattr(bench_kernels, "CHECKED", 4)
    monkeypatch.setattr(Kernel, "_function", lambda *_: functions)
    monkeypatch.setattr(bench_kernels.Timer, "COPIED", 1 << 20)
    monkeypatch.setattr(bench_kernels.Timer, "FLUSHED", 1 << 12)
    arguments = ["--device", "cuda", "--kernel", "sgd_dense", "gather_rows", "--batch", "4"]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    monkeypatch.setitem(arrays.module("sim").__dict__, "take", lambda x, i, axis: None)
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    said = capsys.readouterr()
    assert "Fake: a copy moves 1 GB/s" in said.err
    rows = json.loads(said.out.splitlines()[-1])
    assert [row["kernel"] for row in rows] == ["sgd_dense", "gather_rows", "gather_rows"]
    assert {row["check"] for row in rows} == {"ok"}
    assert rows[0]["gb_per_s"] == pytest.approx(12 * 4096 / 2e-3 / 1e9)
    assert rows[0]["percent_of_copy"] == pytest.approx(100 * 12 * 4096 / (2 << 20))
    assert ended.value.code == 0


def test_a_wrong_result_is_said(monkeypatch):
    make, _ = kernel_cases.CASES["sgd_dense"]

    def spoilt(xp, batch, width):
        work = make(xp, batch, width)
        if xp is not np:
            work.call()  # a second update
        return work

    monkeypatch.setitem(kernel_cases.CASES, "sgd_dense", (spoilt, (0,)))
    assert float(bench_kernels.agrees("sgd_dense", arrays.module("sim"), 4, 0)) > 1e-3


# Bars

NEAR_IDEAL = {
    "sgd_dense", "adagrad_dense", "adam_dense", "gather_rows", "int8_encode", "int8_decode",
    "dot_interaction_forward", "dot_interaction_backward", "relu_dropout_forward",
    "relu_dropout_backward", "bce_forward", "bce_backward",
}  # fmt: skip
ROW_WISE = {"sgd_rows", "adagrad_rows", "adam_rows", "segment_sum"}
SMALL = {"clip_scale", "bce_forward", "bce_backward"}  # at a batch of 65,536 they don't fill a GPU
NO_STREAM = SMALL | {"initial_vectors", "unique_keys"}  # compute, and look-ups here and there


@pytest.fixture(scope="module")
def rows():
    """The bench at its main shapes, each kernel at its first width."""
    cases = bench_kernels.CASES.items()
    return [bench_kernels.counted(name, 256, widths[0]) for name, (_, widths) in cases]


def over(rows, key, most):
    return {row["kernel"]: row[key] for row in rows if row[key] > most}


def under(rows, key, least):
    return {row["kernel"]: row[key] for row in rows if row[key] < least}


def test_bytes_are_near_the_ideal(rows):
    assert {row["kernel"] for row in rows} >= NEAR_IDEAL | ROW_WISE
    assert over([row for row in rows if row["kernel"] in NEAR_IDEAL], "bytes_ratio", 1.1) == {}
    assert over([row for row in rows if row["kernel"] in ROW_WISE], "bytes_ratio", 1.5) == {}
    assert over(rows, "bytes_ratio", 4) == {}
    assert under(rows, "bytes_ratio", 0.999) == {}  # else the ideal is wrong


def test_keys_take_few_sectors(rows):
    tables = [row for row in rows if row["kernel"].startswith("hash")]
    assert len(tables) == 2
    assert over(tables, "sectors_per_key", 4) == {}


def test_banks_spills_and_balance(rows):
    assert over(rows, "bank_conflicts", 0.02) == {}
    assert over(rows, "spills", 0) == {}
    assert over(rows, "balance", 4) == {}


def test_launches_fill_a_gpu_and_keep_its_memory_busy(rows):
    assert under([row for row in rows if row["kernel"] not in SMALL], "waves", 1) == {}
    streams = [row for row in rows if row["kernel"] not in NO_STREAM]
    assert under(streams, "in_flight_kb", 32) == {}

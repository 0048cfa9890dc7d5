"""The roofline of the kernel bench, and the operations that it counts."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import bench_kernels
import kernel_figures as figures
import kernel_plot

ROWS = [
    {"kernel": "a", "flop_per_byte": 0.5, "gflop_per_s": 900.0},
    {"kernel": "a", "flop_per_byte": 40.0, "gflop_per_s": 30_000.0},
    {"kernel": "b", "flop_per_byte": 0.0, "gflop_per_s": 0.0},
]


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("fma.rn.ftz.f32", 2),
        ("add.rn.f64", 1),
        ("mul.f16x2", 2),
        ("fma.rn.bf16x2", 4),
        ("sqrt.rn.f32", 1),
        ("add.s32", 0),
        ("mul.wide.u32", 0),
        ("mov.f32", 0),
        ("setp.lt.f32", 0),
        ("cvt.rn.f32.s32", 0),
        ("st.global.v4.f32", 0),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", 2 * 16 * 8 * 8 / 32),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32", 2 * 16**3 / 32),
        ("wmma.load.a.sync.aligned.row.m16n16k16.global.f16", 0),
    ],
)
def test_operations(opcode, expected):
    assert figures.flops(opcode) == expected


def test_operations_of_sgd():
    """Two products with sums a weight, of a scaled rate: N = 4096 in pieces of 4."""
    row = bench_kernels.counted("sgd_dense", 4, 0)
    assert row["flop_per_byte"] * 12 == pytest.approx(4.25, abs=0.01)


def test_the_roof():
    assert kernel_plot.roof(1.0) == 3350
    assert kernel_plot.roof(1e3) == pytest.approx(132 * 1.755 * 4 * 32 * 2)


@pytest.mark.parametrize("measured", [False, True])
def test_a_plot_says_what_it_shows(tmp_path, monkeypatch, measured):
    figure = pytest.importorskip("matplotlib.figure")
    kept = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k))
    )
    path = tmp_path / "k.png"
    kernel_plot.draw(ROWS, "some device", measured, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = kept[0].axes
    roof, points = axes.lines
    assert points.get_label() == "a"
    assert points.get_xdata().tolist() == [0.5, 40]
    ys = [900.0, 30_000.0] if measured else [*map(kernel_plot.roof, [0.5, 40])]
    assert points.get_ydata().tolist() == pytest.approx(ys)
    assert ("counted, not measured" in axes.get_title()) != measured
    assert "H100 SXM: 3.35 TB/s" in roof.get_label()
    assert kept[0].get_supxlabel().endswith("not shown: b")


def test_nothing_to_show_is_an_empty_plot(tmp_path):
    pytest.importorskip("matplotlib")
    kernel_plot.draw(ROWS[2:], "some device", False, tmp_path / "k.png")
    assert (tmp_path / "k.png").stat().st_size > 0


def test_a_plot_needs_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["--device", "sim", "--plot", str(tmp_path / "k.png")]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("bench_kernels: '--plot' must have Matplotlib (")
    assert said.endswith("install cupyrec[plot].\n")

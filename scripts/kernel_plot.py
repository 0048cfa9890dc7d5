"""The roofline of ``bench_kernels.py --plot``: floating-point operations, a byte and a second.

The roof is an H100 SXM's, by the figures of docs/kernels.md. On a GPU the points are measured; on
the simulator nothing is, and they lie on the roof above the intensity that was counted.
"""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

import kernel_figures as figures

MARKERS, COLOURS = "osD^v<>pPX", 10


def require() -> None:
    """Raise ModuleNotFoundError unless there is Matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError(
            f"bench_kernels: '--plot' must have Matplotlib ({error}); install cupyrec[plot]."
        ) from None


def roof(intensity: float) -> float:
    """GFLOP/s that an H100 reaches at most, at so many operations a byte."""
    return min(figures.BANDWIDTH * intensity, figures.FLOPS) / 1e9


def draw(rows: list[dict[str, Any]], measured_on: str, measured: bool, path: Path) -> None:
    """Write the plot of these rows as PNG.

    Parameters
    ----------
    rows : list of dict
        With ``kernel``, ``flop_per_byte`` and, if `measured`, ``gflop_per_s``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in rows if row["flop_per_byte"]]
    ridge = figures.FLOPS / figures.BANDWIDTH
    ends = [min(0.01, *(row["flop_per_byte"] for row in shown), 1), ridge, 10 * ridge]
    axes.plot(
        ends, [*map(roof, ends)], color="0.3", linewidth=1,
        label=f"H100 SXM: {figures.BANDWIDTH / 1e12:.2f} TB/s, {figures.FLOPS / 1e12:.1f} TFLOP/s",
    )  # fmt: skip
    styles = itertools.cycle((m, f"C{i}") for m in MARKERS for i in range(COLOURS))
    for kernel in dict.fromkeys(row["kernel"] for row in shown):
        mine = [row for row in shown if row["kernel"] == kernel]
        marker, colour = next(styles)
        axes.plot(
            [row["flop_per_byte"] for row in mine],
            [row["gflop_per_s"] if measured else roof(row["flop_per_byte"]) for row in mine],
            linestyle="", marker=marker, color=colour, markerfacecolor=colour if measured else "w",
            label=kernel,
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log",
        xlabel="floating-point operations counted / byte of device memory counted",
        ylabel="GFLOP/s, measured" if measured else "GFLOP/s, the roof: nothing is measured",
        title=f"{measured_on}\n{'measured' if measured else 'points: counted, not measured'}",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    if without := dict.fromkeys(row["kernel"] for row in rows if not row["flop_per_byte"]):
        text = f"No floating-point operations, so not shown: {', '.join(without)}"
        figure.supxlabel(textwrap.fill(text, 140), fontsize=8)
    figure.savefig(path, format="png", dpi=150)

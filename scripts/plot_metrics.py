"""Draw a run's training curve: ``plot_metrics.py RUN`` reads metrics.jsonl and writes curve.png."""

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cupyrec import RunFolder

Curves = dict[str, tuple[list[int], list[float]]]  # metric -> steps, values


def curves_of(metrics: list[dict[str, Any]]) -> Curves:
    """Return for each metric the steps it was measured at and its values."""
    curves: Curves = {}
    for line in metrics:
        if "step" in line:  # the last line sums up the run
            for name, value in line.items():
                steps, values = curves.setdefault(name, ([], []))
                steps.append(line["step"])
                values.append(value)
    return curves


def draw(curves: Curves, title: str) -> Figure:
    """Return a figure of train and valid logloss, and below it valid AUC, over the steps."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    top.set(title=title, ylabel="logloss")
    bottom.set(xlabel="step", ylabel="valid AUC")
    for axes, name, label, style in [
        (top, "loss", "train", {"linewidth": 1}),
        (top, "valid_logloss", "valid", {"marker": "o", "color": "tab:orange"}),
        (bottom, "valid_auc", "valid", {"marker": "o", "color": "tab:orange"}),
    ]:
        axes.plot(*curves.get(name, ([], [])), label=label, **style)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    top.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, which holds metrics.jsonl")
    run = parser.parse_args().run
    if not (run / "metrics.jsonl").is_file():
        parser.error(f"'{run}' must be a run's folder, got no metrics.jsonl in it.")
    curves = curves_of(RunFolder(run, resume=True).metrics())
    draw(curves, run.name).savefig(run / "curve.png", dpi=150)


if __name__ == "__main__":
    main()

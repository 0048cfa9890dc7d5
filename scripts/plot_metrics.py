"""Draw a run's training curve: ``plot_metrics.py RUN`` reads metrics.jsonl and writes curve.png."""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

Curves = dict[str, tuple[list[int], list[float]]]  # metric -> steps, values


def read(path: Path) -> Curves:
    """Return for each metric of a JSON-lines file the steps it was measured at and its values."""
    curves: Curves = {}
    for line in path.read_text().splitlines():
        metrics = json.loads(line)
        if "step" in metrics:  # the last line sums up the run
            for name, value in metrics.items():
                steps, values = curves.setdefault(name, ([], []))
                steps.append(metrics["step"])
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
    draw(read(run / "metrics.jsonl"), run.name).savefig(run / "curve.png", dpi=150)


if __name__ == "__main__":
    main()

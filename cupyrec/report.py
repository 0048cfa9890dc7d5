"""A run as one self-contained page: curves, calibration, what tables hold, what ranks sent."""

from __future__ import annotations

import html
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cupyrec import errors
from cupyrec.run_folder import RunFolder

__all__ = ["write_report"]

_STYLE = """
:root { --rule: #e2e2e2; --dim: #666; --bar: #cfe0f5; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 62rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { color: var(--dim); margin: .2rem 0 .6rem; }
dl { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1rem 0; }
dt { color: var(--dim); font-size: .85rem; } dd { margin: 0; font-size: 1.25rem; }
dd, table { font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; } table + svg { margin-top: 1rem; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: right; padding: .15rem .8rem; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; }
td.bar { background: linear-gradient(to left, var(--bar) var(--part), transparent 0); }
details { margin-top: 2rem; } pre { font-size: .8rem; overflow-x: auto; }
"""
# Text as text; a "$" in a task's name begins no formula; the same numbers give the same bytes.
_DRAWN = {"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "cupyrec"}
_COLOURS = {"train": "#4c78a8", "valid": "#e4572e", "other": "#72a97c"}

Curves = dict[str, tuple[list[int], list[float]]]  # metric -> steps, values


def write_report(path: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into a run's folder; return its path.

    It needs nothing beside it: styles and figures, as SVG, are in the file.

    Parameters
    ----------
    path : path
        The folder of a run, which has metrics.jsonl; the run may be going on.

    Raises
    ------
    ValueError
        It is no such folder, or has no metrics yet.
    ModuleNotFoundError
        matplotlib, of the extra ``plot``, is not installed.

    Examples
    --------
    >>> write_report("runs/none")
    Traceback (most recent call last):
        ...
    ValueError: report: 'runs/none' must be a run's folder, got no metrics.jsonl in it.
    """
    folder = Path(path)
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"report: '{folder}' must be a run's folder, got no metrics.jsonl in it.")
    lines = RunFolder.read_metrics(folder / "metrics.jsonl")
    if not lines:
        raise ValueError(f"report: '{folder}' must have metrics, got none yet.")
    config = folder / "config.toml"
    settings = config.read_text("utf-8") if config.is_file() else ""

    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "report: needs matplotlib, pip install 'cupyrec[plot]'."
        ) from None

    with matplotlib.rc_context(_DRAWN):
        text = _page(folder.resolve().name, lines, _table_names(folder), settings)
    target, temporary = folder / "report.html", folder / ".report.tmp"
    try:
        with errors.naming(target):
            temporary.write_text(text, "utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _table_names(folder: Path) -> list[str]:
    """Of the run's schema; none before its first checkpoint."""
    manifest = folder / "last" / "manifest.json"
    if not manifest.is_file():
        return []
    schema = json.loads(manifest.read_text("utf-8"))["config"].get("schema", {})
    columns = schema.get("column", [])
    names = [column["name"] for column in columns if column["kind"] == "categorical"]
    return names + [f"{column['name']} bucket" for column in columns if column.get("buckets")]


def _page(name: str, lines: list[dict[str, Any]], tables: list[str], config: str) -> str:
    curves = _curves(lines)
    parts = [f"<h1>{html.escape(name)}</h1>", _facts(lines)]
    parts += [_section("Loss and AUC", _learning(curves)), _section("Learning rate", _rate(curves))]
    parts += [_section("Calibration", *_calibration(lines))]
    parts += [_section("Embedding tables", *_tables(lines, tables))]
    parts += [_section("Bytes exchanged between ranks", *_exchange(lines))]
    if config:
        parts.append(
            f"<details><summary>Settings</summary><pre>{html.escape(config)}</pre></details>"
        )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(name)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{''.join(parts)}\n</body></html>\n"
    )


def _section(title: str, *content: str) -> str:
    content = "".join(content)
    return f"<h2>{title}</h2>{content}" if content else ""


def _curves(lines: list[dict[str, Any]]) -> Curves:
    """For each metric that is a number, the steps that it was measured at and its values."""
    curves: Curves = {}
    for line in lines:
        if "step" in line:  # the last line sums up the run
            for name, value in line.items():
                if isinstance(value, (int, float)):
                    steps, values = curves.setdefault(name, ([], []))
                    steps.append(line["step"])
                    values.append(value)
    return curves


def _facts(lines: list[dict[str, Any]]) -> str:
    """The result of the run, or how far it has come."""
    result = next((line for line in reversed(lines) if "steps" in line), None)
    if result is None:
        last = max(line["step"] for line in lines if "step" in line)
        return f"<p>Not finished: metrics up to step {last}.</p>"
    entries = "".join(
        f"<div><dt>{html.escape(name.replace('_', ' '))}</dt><dd>{_number(value)}</dd></div>"
        for name, value in result.items() if isinstance(value, (int, float))
    )  # fmt: skip
    return f"<dl>{entries}</dl>"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{round(value):,}"
    return f"{value:.5f}" if abs(value) < 10 else f"{value:.1f}"


def _figure(rows: int, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots(rows, sharex=True, squeeze=False)[:, 0]
    for one in axes:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _svg(figure: Any) -> str:
    """The figure as an element of the page; the same metrics give the same bytes."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _learning(curves: Curves) -> str:
    if not {"loss", "valid_auc"} & curves.keys():
        return ""
    aucs = [name for name in curves if name.startswith("valid_auc")]
    figure, axes = _figure(2 if aucs else 1, 5 if aucs else 3)
    axes[0].set(ylabel="logloss")
    for name, label in [("loss", "train"), ("valid_logloss", "valid")]:
        if name in curves:
            marker = "o" if label == "valid" else None
            axes[0].plot(*curves[name], label=label, color=_COLOURS[label], marker=marker)
    if axes[0].lines:
        axes[0].legend(frameon=False)
    for name in aucs:
        task = name.removeprefix("valid_auc").removeprefix("_")
        style = dict(label=task) if task else dict(label="valid", color=_COLOURS["valid"])
        axes[1].plot(*curves[name], marker="o", **style)
        axes[1].set(ylabel="valid AUC")
    if len(aucs) > 1:
        axes[1].legend(frameon=False)
    axes[-1].set(xlabel="step")
    return _svg(figure)


def _rate(curves: Curves) -> str:
    if "lr" not in curves:
        return ""
    scaled = "loss_scale" in curves
    figure, axes = _figure(1 + scaled, 2 + 1.6 * scaled)
    axes[0].plot(*curves["lr"], color=_COLOURS["train"])
    axes[0].set(ylabel="learning rate")
    if scaled:
        axes[1].step(*curves["loss_scale"], where="post", color=_COLOURS["other"])
        axes[1].set(ylabel="loss scale", yscale="log")
    axes[-1].set(xlabel="step")
    return _svg(figure)


def _calibration(lines: list[dict[str, Any]]) -> Iterable[str]:
    """What was predicted and what happened, in bins of as many samples each."""
    key = "valid_reliability"
    told = [line for line in lines if any(name.startswith(key) and line[name] for name in line)]
    if not told:
        return
    tasks = {name.removeprefix(key)[1:]: bins for name, bins in told[-1].items()
             if name.startswith(key)}  # fmt: skip
    figure, (axes,) = _figure(1, 4)
    highest = max(max(predicted, observed) for b in tasks.values() for _, predicted, observed in b)
    axes.plot([0, highest or 1], [0, highest or 1], color="#999", linewidth=1, linestyle="--")
    for task, bins in tasks.items():
        _, predicted, observed = zip(*bins, strict=True)
        style = dict(label=task) if task else dict(color=_COLOURS["valid"])
        axes.plot(predicted, observed, marker="o", **style)
    if len(tasks) > 1:
        axes.legend(frameon=False)
    axes.set(xlabel="mean predicted probability", ylabel="share of positive labels")
    axes.set_aspect("equal")
    yield (
        f"<p>Of the valid samples at step {told[-1]['step']}, in groups of as many each, by what "
        "was predicted; on the dashed line predictions come true.</p>"
    )
    yield _svg(figure)


def _tables(lines: list[dict[str, Any]], names: list[str]) -> Iterable[str]:
    told = [line for line in lines if "tables" in line]
    if not told:
        return
    yield f"<p>At step {told[-1]['step']}, of all ranks.</p>"
    for layer, columns in told[-1]["tables"].items():
        count = len(columns["ids"])
        own = names if len(names) == count else [str(number) for number in range(count)]
        heads = "table", "ids", "new in the last look-up", "bytes", "unique of ids looked up"
        most = max(1, *columns["ids"])
        rows = [
            [html.escape(own[i]), _bar(columns["ids"][i], most), _number(columns["inserted"][i]),
             _number(columns["bytes"][i]), _percent(columns["unique_ratio"][i])]
            for i in range(count)
        ]  # fmt: skip
        totals = [
            "<b>all</b>", f"<td>{_number(sum(columns['ids']))}</td>",
            _number(sum(columns["inserted"])), _number(sum(columns["bytes"])), "",
        ]  # fmt: skip
        yield f"<p>{html.escape(layer)}</p>" if len(told[-1]["tables"]) > 1 else ""
        yield _table(heads, [*rows, totals])
    grown = [(line["step"], sum(sum(c["ids"]) for c in line["tables"].values())) for line in told]
    if len(grown) > 1:
        figure, (axes,) = _figure(1, 2.2)
        axes.plot(*zip(*grown, strict=True), marker="o", color=_COLOURS["other"])
        axes.set(xlabel="step", ylabel="ids in all tables", ylim=(0, None))
        yield _svg(figure)


def _exchange(lines: list[dict[str, Any]]) -> Iterable[str]:
    told = [line for line in lines if line.get("bytes_sent")]
    if not told:
        return
    sums: dict[str, int] = {}
    for line in told:
        for what, count in line["bytes_sent"].items():
            sums[what] = sums.get(what, 0) + count
    total, steps = sum(sums.values()), max(line["step"] for line in told)
    yield f"<p>{total:,} bytes from all ranks to others, {round(total / steps):,} a step.</p>"
    ordered = sorted(((count, what) for what, count in sums.items() if count), reverse=True)
    most = ordered[0][0] if ordered else 1
    large = [(count, what) for count, what in ordered if count >= total / 1000]
    if len(large) < len(ordered) - 1:  # what keeps ranks in step, a few bytes each
        small = ordered[len(large) :]
        ordered = [*large, (sum(count for count, _ in small), f"{len(small)} others")]
    rows = [[html.escape(what), _bar(count, most), _percent(count / total)]
            for count, what in ordered]  # fmt: skip
    yield _table(("what", "bytes", "share"), rows)
    codecs = [line for line in told if line.get("quantization_error")]
    if codecs and any(codecs[-1]["quantization_error"].values()):
        figure, (axes,) = _figure(1, 2.2)
        for what in codecs[-1]["quantization_error"]:
            values = [line["quantization_error"][what] for line in codecs]
            axes.plot([line["step"] for line in codecs], values, label=what)
        axes.set(xlabel="step", ylabel="relative error of codec", ylim=(0, None))
        axes.legend(frameon=False)
        yield _svg(figure)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _bar(value: int, most: int) -> str:
    return f'<td class="bar" style="--part:{100 * value / most:.1f}%">{value:,}</td>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(c if c.startswith("<td") else f"<td>{c}</td>" for c in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"

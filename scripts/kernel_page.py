"""The page of ``bench_kernels.py --html``: CUDA sources, and what each line of them cost.

An instruction belongs to the line that NVRTC's ``.loc`` directives name; of what is inlined, to the
line inside the function, and of CUDA's own headers, to the line that calls them. Costs of a header
are kept for each ``.cu`` that it is pasted into.
"""

from __future__ import annotations

import collections
import html
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from cupyrec import kernel

HOTTEST = 30  # lines in the table on top
HEADS = ["warp instructions", "share", "sectors", "sectors/request", "bank conflicts"]

Costs = dict[tuple[str, int], collections.Counter]  # (file, line) -> what it cost

STYLE = """
:root { color-scheme: light dark; --bar: light-dark(#f4c98a, #6b4a17);
  --rule: light-dark(#ddd, #444); --dim: light-dark(#666, #999); }
body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem; }
table { border-collapse: collapse; font: 13px/1.5 ui-monospace, monospace; }
th, td { text-align: right; padding: 0 .8em; white-space: pre; }
th { position: sticky; top: 0; background: Canvas; border-bottom: 1px solid var(--rule); }
td:last-child, th:last-child { text-align: left; }
td.share { background: linear-gradient(to left, var(--bar) var(--part), transparent 0); }
td.file { text-align: left; padding-top: .6em; border-bottom: 1px solid var(--rule); }
tr:target { outline: 2px solid Highlight; }
p, .number { color: var(--dim); }
"""


class Line(NamedTuple):
    """A line of a source as it was compiled."""

    file: str
    number: int
    text: str


def costs(launches: Iterable[Any]) -> dict[str, Costs]:
    """For each ``.cu`` that ran, what its lines cost in all these launches."""
    files: dict[str, Costs] = {}
    for launch in launches:
        lines = files.setdefault(launch.file, {})
        for one in launch.result.executed:
            line = lines.setdefault(one.source, collections.Counter())
            line.update(one.counts)
            line["instructions"] += one.warps
    return files


def total(lines: Costs) -> collections.Counter:
    """What all lines cost."""
    result: collections.Counter = collections.Counter()
    for line in lines.values():
        result.update(line)
    return result


def listing(file: str) -> Iterator[Line]:
    """The lines of a ``.cu`` with its headers pasted in, each by where it comes from."""
    here, number = file, 1
    for text in kernel.source(file).splitlines():
        if place := re.fullmatch(r'#line (\d+) "kernels/(.*)"', text):
            number, here = int(place[1]), place[2]
        else:
            yield Line(here, number, text)
            number += 1


def page(launches: Iterable[Any], cases: Iterable[str], measured_on: str) -> str:
    """The page as HTML, without scripts or anything from elsewhere."""
    files = costs(launches)
    sections = "".join(_section(file, lines) for file, lines in files.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Lines of the kernels</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Lines of the kernels</h1>
<p>{html.escape(measured_on)}. Counted, not timed; docs/kernels.md says how.</p>
<p>Cases: {html.escape("; ".join(cases))}.</p>
<h2>Hottest lines</h2>
{_hottest(files)}
{sections}
</body>
</html>
"""


def _hottest(files: dict[str, Costs]) -> str:
    """The lines that most instructions of warps went into, over all sources."""
    wholes = {file: total(lines)["instructions"] for file, lines in files.items()}
    rows = [(line, file, place) for file, lines in files.items() for place, line in lines.items()]
    rows.sort(key=lambda row: -row[0]["instructions"])
    texts = {file: {(x.file, x.number): x.text for x in listing(file)} for file in files}
    return _table("line", [
        f'<tr>{_cells(line, wholes[file])}<td><a href="#{_anchor(file, place)}">'
        f"{_name(file, place)}</a>  {html.escape(texts[file].get(place, '').strip())}</td></tr>"
        for line, file, place in rows[:HOTTEST]
    ])  # fmt: skip


def _section(file: str, lines: Costs) -> str:
    """A source, each line behind what it cost."""
    whole, seen, here, rows = total(lines), set(), file, []
    for place in listing(file):
        key = (place.file, place.number)
        if place.file != here:
            here = place.file
            rows.append(
                f'<tr><td class="file" colspan="{len(HEADS) + 1}">{html.escape(here)}</td></tr>'
            )
        seen.add(key)
        rows.append(_row(file, key, lines, whole, place.text))
    for key in sorted(lines.keys() - seen):  # so that the lines add up to the whole
        text = "(the compiler's own)" if key[1] == 0 else "(not in the kernels' folder)"
        rows.append(_row(file, key, lines, whole, f"{text}, {key[0]}"))
    rows.append(f"<tr>{_cells(whole, whole['instructions'])}<td>all lines</td></tr>")
    return f"<h2>{html.escape(file)}</h2>\n{_table('source', rows)}"


def _row(
    file: str, key: tuple[str, int], lines: Costs, whole: collections.Counter, text: str
) -> str:
    cells = _cells(lines.get(key, collections.Counter()), whole["instructions"])
    return (
        f'<tr id="{_anchor(file, key)}">{cells}<td><span class="number">{key[1]:4d}</span>  '
        f"{html.escape(text)}</td></tr>"
    )


def _cells(line: collections.Counter, whole: int) -> str:
    """What a line cost: empty where it had no instruction, no request or no shared memory."""
    n, asked = line["instructions"], line["requests"]
    share = f"{100 * n / max(1, whole):.1f}"
    return "".join([
        f'<td>{n:,}</td><td class="share" style="--part: {share}%">{share} %</td>'
        if n else "<td></td><td></td>",
        f"<td>{line['sectors']:,}</td><td>{line['sectors'] / asked:.1f}</td>"
        if asked else "<td></td><td></td>",
        f"<td>{line['bank_conflicts']:,}</td>" if line["shared_wavefronts"] else "<td></td>",
    ])  # fmt: skip


def _table(last: str, rows: list[str]) -> str:
    heads = "".join(f"<th>{head}</th>" for head in [*HEADS, last])
    return "\n".join(["<table>", f"<tr>{heads}</tr>", *rows, "</table>"])


def _name(file: str, place: tuple[str, int]) -> str:
    """Where a line is; of a header, which source it is pasted into."""
    name = f"{place[0]}:{place[1]}" if place[1] else "no line"
    return html.escape(name if place[0] == file else f"{name} in {file}")


def _anchor(file: str, place: tuple[str, int]) -> str:
    return html.escape(f"{file}-{place[0]}-{place[1]}")

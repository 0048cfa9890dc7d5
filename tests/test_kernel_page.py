"""The page of the kernel bench: its lines add up to the kernels, and its text is text."""

import html
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyrec import kernel
from cupyrec.kernel import Geometry, Kernel

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import bench_kernels
import kernel_page

HEADER = """// twice & <once>
__device__ float twice(float x) { return x * 2; }
"""
SOURCE = """#include "own.cuh"
extern "C" __global__ void doubles(float* x, int n) {
    __shared__ float room[1024];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && n > 0) {
        room[32 * threadIdx.x] = twice(x[i]);  // "conflicts"
        x[i] = room[32 * threadIdx.x];
    }
}
"""
ROW = re.compile(
    r'<tr id="(?P<id>[^"]*)"><td>(?P<instructions>[\d,]*)</td><td[^>]*>(?P<share>[^<]*)</td>'
    r"<td>(?P<sectors>[\d,]*)</td><td>(?P<each>[^<]*)</td><td>(?P<bank_conflicts>[\d,]*)</td>"
    r'<td><span class="number">(?P<number>[^<]*)</span>  (?P<text>.*)</td></tr>'
)


@pytest.fixture
def launches(sim, tmp_path, monkeypatch):
    """Two launches of a kernel of 40 threads, which pastes a header."""
    monkeypatch.setattr(kernel, "folder", lambda: tmp_path)
    (tmp_path / "own.cu").write_text(SOURCE)
    (tmp_path / "own.cuh").write_text(HEADER)
    doubles = Kernel("own.cu", "doubles", "float* x, int n", lambda n: Geometry(-(-n // 32), 32))
    x = sim.asarray(np.ones(40, np.float32))
    with sim.record() as seen:
        doubles(x, 40, n=40)
        doubles(x, 40, n=40)
    assert x.get().tolist() == [4.0] * 40
    return seen.launches


def rows_of(page):
    return [match.groupdict() for match in ROW.finditer(page)]


def whole(text):
    return int(text.replace(",", "") or 0)


def test_lines_add_up_to_the_launches(launches):
    rows = rows_of(kernel_page.page(launches, ["doubles"], "sim"))
    for name in ("instructions", "sectors", "bank_conflicts"):
        total = sum(launch.result.counts[name] for launch in launches)
        assert sum(whole(row[name]) for row in rows) == total > 0


def test_lines_are_the_source_with_its_headers(launches):
    page = kernel_page.page(launches, ["doubles"], "sim")
    rows = [row for row in rows_of(page) if "compiler" not in row["text"]]
    assert [html.unescape(row["text"]) for row in rows] == [
        *HEADER.splitlines(), *SOURCE.splitlines()[1:]
    ]  # fmt: skip
    at = {row["id"]: row for row in rows}
    loads = at["own.cu-own.cu-6"]
    assert (loads["sectors"], loads["each"]) == ("10", "2.5")  # 4 and 1 sectors, twice
    assert loads["bank_conflicts"] == str(2 * (31 + 7))
    assert whole(at["own.cu-own.cuh-2"]["instructions"]) > 0
    assert at["own.cu-own.cuh-1"]["instructions"] == at["own.cu-own.cuh-1"]["sectors"] == ""


def test_text_is_escaped(launches):
    page = kernel_page.page(launches, ["a<b>"], "x & <y>")
    for text in ("twice &amp; &lt;once&gt;", "&quot;conflicts&quot;", "i &lt; n &amp;&amp; n &gt;"):
        assert text in page
    assert "a&lt;b&gt;" in page
    assert "x &amp; &lt;y&gt;" in page
    assert not re.search("<once>|<b>|<y>|<script|https?:", page)


def test_hottest_lines_come_first(launches):
    page = kernel_page.page(launches, ["doubles"], "sim")
    hottest = page[page.index("Hottest") : page.index("<h2>own.cu")]
    counts = [whole(n) for n in re.findall(r"<tr><td>([\d,]+)</td>", hottest)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == max(whole(row["instructions"]) for row in rows_of(page))
    links = re.findall(r'href="#([^"]*)"', hottest)
    assert set(links) <= {row["id"] for row in rows_of(page)}
    assert len(links) == len(counts)


def test_the_script_writes_the_page(monkeypatch, tmp_path, capsys):
    path = tmp_path / "k.html"
    arguments = ["--kernel", "sgd_rows", "hash_find", "--shape", "B=4", "--html", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_kernels.main()
    assert ended.value.code == 0
    page = path.read_text()
    assert re.findall("<h2>(.*)</h2>", page) == ["Hottest lines", "sgd.cu", "hash_table.cu"]
    counts = [int(n) for n in re.findall(r'"instructions": (\d+)', capsys.readouterr().out)]
    assert sum(whole(row["instructions"]) for row in rows_of(page)) == sum(counts)
    assert "Cases: sgd_rows U=27 D=128; sgd_rows U=27 D=16; hash_find" in page

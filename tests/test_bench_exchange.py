"""The bench of what ranks exchange: at toy sizes, and where it can limit no link."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import cupyrec

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def run(monkeypatch):
    """Run the script in this process, as the interpreter would."""
    monkeypatch.syspath_prepend(SCRIPTS)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_exchange.py", *map(str, arguments)])
        runpy.run_path(str(SCRIPTS / "bench_exchange.py"), run_name="__main__")

    return call


def test_toy_sizes(run, capfd):
    threads = cupyrec.num_threads()
    run("--quick", "--threads", threads)
    said = capfd.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert result["wire_ratio"] == pytest.approx((4 + 128) / (4 * 128), rel=1e-3)
    assert result["wire_ratio_width_16"] == pytest.approx((4 + 16) / (4 * 16), rel=1e-2)
    assert min(result["encode_ratio"], result["decode_ratio"]) > 0
    rows = re.findall(r"^ +(\d) +(\d+) (\w+) +([\d,]+) +([\d,]+) .* (\S+)$", said.err, re.MULTILINE)
    assert len(rows) == 2 * 2 * 4  # ranks, widths, codecs
    for ranks, width, codec, moved, keys, error in rows:
        sent = int(keys.replace(",", "")) / 9  # of an id and a table's byte
        assert (sent > 0) == (ranks == "2")
        if codec == "none":
            assert int(moved.replace(",", "")) == 2 * 4 * int(width) * sent
        least, most = {"none": (0, 0), "fp16": (1e-4, 4e-4), "bf16": (1e-3, 3e-3)}.get(
            codec, (3e-3, 1e-2)
        )
        assert least <= float(error) <= most
    if "link: left out" in said.err:
        assert not any("share" in name for name in result)
    else:
        assert result["communication_share"] < 1
        assert min(result[f"speedup_int8_vs_{codec}"] for codec in ("fp32", "fp16")) > 0
        assert 1 <= result["speedup_allowed_vs_fp16"] < 2 or result["communication_share_fp16"] < 0


def test_what_a_limited_link_needs_is_said(run, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    run("--quick", "--part", "link")
    said = capsys.readouterr()
    assert said.out == "{}\n"
    assert said.err.startswith("link: left out, it needs root and iproute2: ")

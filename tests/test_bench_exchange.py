"""The bench of what ranks exchange: at toy sizes, and where it can limit no link."""

import json
import random
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


@pytest.fixture
def sought(monkeypatch):
    """What a search finds where a step takes 1 s; a link adds bits / rate less what is hidden."""
    monkeypatch.syspath_prepend(SCRIPTS)
    link = runpy.run_path(str(SCRIPTS / "bench_exchange_ranks.py"))["Link"]

    def call(seed, *, codec, shares, hidden=0.0, noise=0.0, tries=8):
        chance, load = random.Random(seed), [1.0]

        def times(codec, rate):
            load[0] *= 1 + chance.gauss(0, noise)  # what else the machine does, which wanders
            each = 1 + (max(0, 8 * bench.bytes[codec] / rate - hidden) if rate else 0)
            return [load[0] * each * (1 + chance.gauss(0, noise)) for _ in range(3)]

        bench = object.__new__(link)
        bench.tries, bench.times = tries, times
        bench.bytes = {"none": 4e8, "fp16": 2e8, "int8": 1e8}
        row = bench.seek(codec, shares, 3)
        added = max(0, 8 * bench.bytes[codec] / row["rate"] - hidden)
        return row, added / (1 + added)

    return call


@pytest.mark.parametrize("shares", [(0.53, 0.60), (0.24, 0.28)])
@pytest.mark.parametrize("hidden", [0.0, 0.3])
def test_the_rate_of_a_share_is_found(sought, shares, hidden):
    row, share = sought(0, codec="none", shares=shares, hidden=hidden)
    assert shares[0] <= row["share"] <= shares[1]
    assert row["share"] == pytest.approx(share)
    limited, int8 = row["limited"], row["int8"]
    assert row["speedup"] == pytest.approx(limited / int8)
    if not hidden:
        assert row["speedup"] == pytest.approx(row["allowed"]) == 1 / (1 - row["share"] * 3 / 4)


def test_a_search_settles_on_a_machine_that_does_other_things(sought):
    found = [
        sought(s, codec="fp16", shares=(0.24, 0.28), hidden=0.2, noise=0.05) for s in range(40)
    ]
    settled = [0.24 <= row["share"] <= 0.28 for row, _ in found]
    assert sum(settled) >= 34
    true = [share for _, share in found]
    assert abs(sum(true) / len(true) - 0.26) < 0.02


def test_the_nearest_rate_is_told_where_none_settles(sought, capsys):
    row, _ = sought(0, codec="fp16", shares=(0.26, 0.26001), noise=0.02, tries=3)
    said = capsys.readouterr().err
    assert "fp16: no rate gave a share of 0.26 to 0.26001; the nearest is told" in said
    told = [float(share) for share in re.findall(r"share (0\.\d+)$", said, re.MULTILINE)]
    assert len(told) == 3
    assert abs(row["share"] - 0.26) <= min(abs(share - 0.26) for share in told) + 1e-3

"""The readers beside others', on few rows."""

import json
import runpy
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from cupyrec import cpu

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "bench_data.py")


@pytest.fixture(autouse=True)
def threads():
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


def run(monkeypatch, capsys, *words: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["bench_data.py", *words])
    runpy.run_path(SCRIPT, run_name="__main__")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_pandas_reads_the_same(monkeypatch, capsys):
    pytest.importorskip("pandas", reason="the extra bench has it")
    words = "--case criteo_tsv --rows 500 --rounds 1 --threads 2".split()
    told = run(monkeypatch, capsys, *words)
    assert (told["case"], told["rows"], told["threads"]) == ("criteo_tsv", 500, 2)
    ratios = [told[f"ratio_vs_pandas_{name}"] for name in ("plain", "gz")]
    assert told["ratio_vs_pandas"] == min(ratios) > 0


def test_parquet_beside_pyarrow(monkeypatch, capsys):
    before = pa.cpu_count()
    told = run(monkeypatch, capsys, *"--case parquet --rows 500 --rounds 1".split())
    pa.set_cpu_count(before)
    ratios = [told[f"ratio_vs_pyarrow{ending}"] for ending in ("", "_hex", "_criteo")]
    assert min(ratios) > 0


def test_without_pandas_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SystemExit, match=r"pandas must be installed.*--editable '\.\[bench\]'$"):
        run(monkeypatch, capsys, "--case", "criteo_tsv")


@pytest.mark.parametrize("words", [["--case", "none"], ["--case", "criteo_tsv", "--rows", "0"]])
def test_it_refuses_what_it_does_not_know(monkeypatch, capsys, words):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, capsys, *words)
    assert ended.value.code == 2

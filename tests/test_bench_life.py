"""The bench of rules on ids, each case tiny."""

import json
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cupyrec.data import criteo_schema, open_dataset
from cupyrec.data.synthetic import write_synthetic

SCRIPTS = Path(__file__).parents[1] / "scripts"


pytestmark = pytest.mark.usefixtures("same_threads")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return runpy.run_path(str(SCRIPTS / "bench_life.py"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the script in this process, as the interpreter would; return its figures and stderr."""
    monkeypatch.syspath_prepend(SCRIPTS)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["bench_life.py", *map(str, words)])
        runpy.run_path(str(SCRIPTS / "bench_life.py"), run_name="__main__")
        said = capsys.readouterr()
        return json.loads(said.out.splitlines()[-1]), said.err

    return call


TINY = "--case days --tables 2 --live 50 --rows 64 --batch 16 --seeds 1 2".split()


@pytest.mark.parametrize("kept", [3, 1])
def test_rows_are_those_of_the_days_kept(kept, run, bench):
    told, said = run(*TINY, "--kept", kept)
    met = []  # keys of each step, four a day
    for number in range(10):
        for ids in np.split(bench["Log"](2, 50, 64).day(number).ids, 4):
            met.append({(table, i) for row in ids.tolist() for table, i in enumerate(row)})
    # An id goes when 4 * kept steps have passed since the one that it was in.
    ends = range(4, 41, 4)
    assert told["ids"] == [len(set().union(*met[max(0, e - 4 * kept) : e])) for e in ends]
    everything = [len(set().union(*met[:e])) for e in ends]
    assert told["ids_no_expiry"] == everything
    assert told["ids_growth_last_days"] == told["ids"][9] / told["ids"][5]
    assert told["ids_growth_last_days_no_expiry"] == everything[9] / everything[5]
    for end in ("", "_no_expiry"):
        growth = told[f"bytes{end}"][9] / told[f"bytes{end}"][5]
        assert told[f"bytes_growth_last_days{end}"] == growth
        assert 0.4 < told[f"auc{end}"] < told["best_auc"]
    first, second = told["auc_differences"]
    assert told["auc_difference"] == (first + second) / 2 != first
    assert told["auc_difference"] == pytest.approx(told["auc"] - told["auc_no_expiry"])
    assert told["rows"] == 640
    assert len(re.findall(r"^( *\d+){3}( +[\d.]+){5}$", said, re.M)) == 20


def test_nothing_is_lost_where_all_days_are_kept(run):
    told, _ = run(*TINY, "--kept", 10)
    assert told["ids"] == told["ids_no_expiry"]
    assert told["auc_differences"] == [0, 0]


def test_a_fifth_of_the_ids_is_new_each_day(bench):
    log = bench["Log"](3, 40, 4000)
    of_days = [log.day(number).ids for number in range(7)]
    np.testing.assert_array_equal(of_days[2], bench["Log"](3, 40, 4000).day(2).ids)
    chance = np.arange(1, 41) ** -1.05
    expected = 4000 * chance / chance.sum()
    for table in range(3):
        orders = []  # ids, the most frequent first
        for ids in of_days:
            known, counts = np.unique(ids[:, table], return_counts=True)
            assert known.size == 40
            counts = np.sort(counts)[::-1]
            assert (abs(counts - expected) < 6 * np.sqrt(expected) + 6).all()
            orders.append(Counter(ids[:, table].tolist()).most_common())
        sets = [{each for each, _ in order} for order in orders]
        assert [len(sets[0] & later) for later in sets] == [40, 32, 24, 16, 8, 0, 0]
        assert len(set().union(*sets)) == 40 + 6 * 8
        first = [each for each, _ in orders[0] if each in sets[1]]
        then = [each for each, _ in orders[1] if each in sets[0]]
        assert first[0] == then[0]  # as popular as the day before, but for those that are gone


def test_clicks_are_as_planted(bench):
    log = bench["Log"](4, 40, 20_000)
    day = log.day(3)
    for row in range(0, 20_000, 4001):
        dense, ids = day.dense[row].tolist(), day.ids[row].tolist()
        main, factors = ([weight(each + kind) for each in ids] for kind in (1, 2))
        pairs = factors[0] * factors[1] + factors[2] * factors[3]
        expected = -1.4 + 0.2 * sum(dense) + 0.4 * sum(main) + 0.4 * pairs
        assert day.logits[row] == pytest.approx(expected, abs=1e-6)
    chance = 1 / (1 + np.exp(-day.logits))
    error = np.sqrt((chance * (1 - chance)).sum())
    assert abs(day.labels.sum() - chance.sum()) < 5 * error
    each = bench["weights"](np.arange(100_000), 1)
    assert abs(each.mean()) < 0.02
    assert abs(each.var() - 1) < 0.02


def weight(number):
    """SplitMix64's finalizer in Python's integers, as a signed number of variance 1."""
    h = number % 2**64
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    h ^= h >> 31
    return (h - 2**64 * (h >= 2**63)) / 2**64 * 12**0.5


PRESET = """
[model]
name = "dlrm"
embedding_dim = 4
bottom = [4]
top = [4]
[training]
batch_size = 64
"""


def test_ids_of_one_look_up_get_no_row(tmp_path, run):
    folder = tmp_path / "criteo"
    for split, rows in (("train", 300), ("valid", 100)):
        write_synthetic(folder / f"{split}.tsv.gz", rows, ids_per_table=50, seed=len(split) + rows)
    (tmp_path / "preset.toml").write_text(PRESET)
    words = ["--data", tmp_path, "--preset", tmp_path / "preset.toml", "--seeds", 1, 2]
    told, said = run("--case", "admission", *words)
    met = Counter()
    for batch in open_dataset([folder / "train.tsv.gz"], criteo_schema()).batches(100):
        met.update((table, i) for row in batch.ids.tolist() for table, i in enumerate(row))
    assert told["rows_k1"] == len(met)
    assert told["rows_k2"] == sum(times > 1 for times in met.values()) < len(met)
    for k in (1, 2):
        first, second = told[f"aucs_k{k}"]
        assert told[f"auc_k{k}"] == pytest.approx((first + second) / 2)
        assert first != second
    assert told["aucs_k1"] != told["aucs_k2"]
    assert told["seeds"] == [1, 2]
    assert len(re.findall(r"^\d +\d +\d+ [\d.]+$", said, re.MULTILINE)) == 4


def test_refuses(tmp_path, run, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        run("--case", "none")
    assert ended.value.code == 2
    monkeypatch.delenv("CUPYREC_DATA", raising=False)
    with pytest.raises(SystemExit, match="bench_life: give --data where CUPYREC_DATA names no"):
        run("--case", "admission")
    with pytest.raises(SystemExit, match=r"bench_life: .*criteo/train\.tsv\.gz"):
        run("--case", "admission", "--data", tmp_path)

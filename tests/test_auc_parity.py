"""What int8 between ranks does to AUC: the script, on tiny data sets in the layout of real ones."""

import json
import re
import runpy
import sys
from pathlib import Path

import click_logs
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))


@pytest.fixture
def run(monkeypatch):
    """Run the script in this process, as the interpreter would."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["auc_parity.py", *map(str, arguments)])
        runpy.run_path(str(SCRIPTS / "auc_parity.py"), run_name="__main__")

    return call


@pytest.fixture
def folder(tmp_path):
    click_logs.write(tmp_path)
    return tmp_path


def test_a_pair_of_each_data_set(run, folder, capsys):
    run("--quick", "--data", folder)
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert (result["runs"], result["ranks"]) == (4, 2)
    assert list(result["mean_difference"]) == ["criteo", "movielens_1m"]
    for name, mean in result["mean_difference"].items():
        (none,), (int8,) = result["auc_none"][name], result["auc_int8"][name]
        assert [mean] == result["differences"][name] == [int8 - none]
        assert 0 < abs(mean) < 0.1 or name == "movielens_1m"  # which is learned wholly
        assert f"{none:.5f} {int8:.5f} {int8 - none:+.5f}" in said.err
    assert 0.55 < result["auc_none"]["criteo"][0] < 1
    assert result["auc_int8"]["movielens_1m"][0] > 0.9
    assert len(re.findall(r"^(?:criteo|movielens_1m) +(?:1|mean) ", said.err, re.MULTILINE)) == 4


def test_a_folder_must_be_named(run, monkeypatch, capsys):
    monkeypatch.delenv("CUPYREC_DATA", raising=False)
    with pytest.raises(SystemExit) as ended:
        run("--quick")
    assert ended.value.code == 2
    assert "argument --data: must name a folder where CUPYREC_DATA does not" in (
        capsys.readouterr().err
    )


def test_a_training_that_fails_says_why(run, folder):
    (folder / "criteo" / "test.tsv.gz").unlink()
    with pytest.raises(SystemExit, match=r"test.tsv.gz: must be a file, found nothing there"):
        run("--quick", "--data", folder, "--sets", "criteo")

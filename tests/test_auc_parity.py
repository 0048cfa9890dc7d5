"""What int8 between ranks does to AUC: the script, on tiny data sets in the layout of real ones."""

import gzip
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyrec.data import TSV, Schema
from cupyrec.data.synthetic import write_synthetic

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def run(monkeypatch):
    """Run the script in this process, as the interpreter would."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["auc_parity.py", *map(str, arguments)])
        runpy.run_path(str(SCRIPTS / "auc_parity.py"), run_name="__main__")

    return call


@pytest.fixture
def folder(tmp_path):
    """Both data sets; in the second, user 2 likes what user 1 doesn't."""
    write_synthetic(tmp_path / "log.tsv", 4000, ids_per_table=20)
    lines = (tmp_path / "log.tsv").read_bytes().splitlines(keepends=True)
    (tmp_path / "criteo").mkdir()
    for name, rows in (("train", lines[:3000]), ("test", lines[3000:])):
        (tmp_path / "criteo" / f"{name}.tsv.gz").write_bytes(gzip.compress(b"".join(rows)))
    movielens = tmp_path / "movielens_1m"
    movielens.mkdir()
    (movielens / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n")
    movies = [f"{i}::Movi\xe9 {i} (A) ({1990 + i})::Drama|War\n" for i in range(40)]
    (movielens / "movies.dat").write_text("".join(movies), "latin-1")
    lines = []
    for row in range(4000):
        user, movie, split = 1 + row % 2, row // 2 % 40, ("train", "test", "valid", "train")
        rating = 4 + row % 2 if (movie % 2) ^ (user == 2) else 1 + row % 3
        lines.append(f"{user}\t{movie}\t{rating}\t{split[row // 80 % 4]}\n")
    (movielens / "ratings.tsv.gz").write_bytes(gzip.compress("".join(lines).encode()))
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


def test_ratings_become_clicks(folder, tmp_path):
    arguments = runpy.run_path(str(SCRIPTS / "auc_parity.py"))["movielens_1m"](
        folder / "movielens_1m", tmp_path
    )
    named = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert named["--test"] == tmp_path / "test.tsv"
    schema = Schema.load(named["--schema"])
    assert (schema.num_dense, schema.num_tables) == (0, 8)
    rows = [line.split("\t") for line in named["--train"].read_text().splitlines()]
    assert len(rows) == 2000
    user, movie = rows[0][1], int(rows[0][6])
    liked = (movie % 2) ^ (user == "2")
    rest = {"1": ["F", "1", "10", "48067"], "2": ["M", "56", "16", "70072"]}[user]
    assert rows[0] == [str(liked), user, *rest, str(movie), str(1990 + movie), "Drama|War"]
    movies = [int(row[6]) for row in rows]
    assert movies != sorted(movies)
    assert np.mean([int(row[0]) for row in rows]) == 0.5
    assert sum(len(batch) for batch in TSV(named["--train"], schema).batches(512)) == 2000


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

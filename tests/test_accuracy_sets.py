"""Real click logs as files to train on, from tiny ones in the same layout."""

import sys
from pathlib import Path

import click_logs
import numpy as np
import pytest

from cupyrec.data import TSV, Schema
from cupyrec.ragged import Bags

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import accuracy_sets


@pytest.fixture
def folder(tmp_path):
    click_logs.write(tmp_path)
    return tmp_path


def test_criteo_is_read_as_it_is(folder, tmp_path):
    files = accuracy_sets.criteo(folder / "criteo", tmp_path)
    assert list(files) == ["--train", "--valid", "--test"]
    assert all(path.is_file() for path in files.values())


@pytest.mark.parametrize("bags", [True, False])
def test_ratings_become_clicks(folder, tmp_path, bags):
    files = accuracy_sets.movielens_1m(folder / "movielens_1m", tmp_path, bags=bags)
    schema = Schema.load(files["--schema"])
    assert (schema.num_dense, schema.num_tables, schema.has_bags) == (0, 8, bags)
    rows = [line.split("\t") for line in files["--train"].read_text().splitlines()]
    assert len(rows) == 2000
    user, movie = rows[0][1], int(rows[0][6])
    liked = (movie % 2) ^ (user == "2")
    rest = {"1": ["F", "1", "10", "48067"], "2": ["M", "56", "16", "70072"]}[user]
    assert rows[0] == [str(liked), user, *rest, str(movie), str(1990 + movie), "Drama|War"]
    movies = [int(row[6]) for row in rows]
    assert movies != sorted(movies)
    assert np.mean([int(row[0]) for row in rows]) == 0.5
    batches = list(TSV(files["--train"], schema).batches(512))
    assert sum(map(len, batches)) == 2000
    assert isinstance(batches[0].ids, Bags) == bags
    if bags:
        assert np.diff(batches[0].ids.offsets).tolist() == [*[1] * 7, 2] * 512

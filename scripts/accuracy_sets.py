"""The real click logs on which accuracy is measured, as what ``cupyrec train`` takes.

The folder with the data holds

- criteo: train.tsv.gz, valid.tsv.gz and test.tsv.gz in the layout of Criteo's click logs;
- movielens_1m: ratings.tsv.gz (user, movie, rating, split), users.dat and movies.dat. A row is a
  rating with its user's and its movie's features, the label rating >= 4; rows are in an order
  drawn once.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np

from cupyrec.data import Column, Schema

__all__ = ["criteo", "movielens_1m"]

MOVIELENS = ["user", "gender", "age", "occupation", "zip", "movie", "year", "genres"]


def criteo(folder: Path, out: Path) -> dict[str, Path]:
    """Flag -> file."""
    return {f"--{split}": folder / f"{split}.tsv.gz" for split in ("train", "valid", "test")}


def movielens_1m(folder: Path, out: Path, bags: bool = True) -> dict[str, Path]:
    """The same, of logs that are written to `out` first.

    A movie's genres are a bag of ids, or all of them together one id.
    """
    users = {row[0]: row for row in _table(folder / "users.dat")}
    movies = {}
    for movie, title, genres in _table(folder / "movies.dat"):
        movies[movie] = [movie, re.search(r"\((\d+)\)$", title)[1], genres]
    lines: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    with gzip.open(folder / "ratings.tsv.gz", "rt", encoding="utf-8") as ratings:
        for user, movie, rating, split in (line.rstrip("\n").split("\t") for line in ratings):
            label = str(int(int(rating) >= 4))
            lines[split].append("\t".join([label, *users[user], *movies[movie]]) + "\n")
    order = np.random.default_rng(0)  # the file is in the order of users
    for split, rows in lines.items():
        shuffled = (rows[i] for i in order.permutation(len(rows)))
        (out / f"{split}.tsv").write_text("".join(shuffled), "utf-8")
    columns = [
        Column(name, "categorical", "string", bag=bags and name == "genres") for name in MOVIELENS
    ]
    Schema([Column("label", "label"), *columns]).save(out / "schema.toml")
    return {f"--{split}": out / f"{split}.tsv" for split in lines} | {
        "--schema": out / "schema.toml"
    }


def _table(path: Path) -> list[list[str]]:
    return [line.split("::") for line in path.read_text("latin-1").splitlines()]

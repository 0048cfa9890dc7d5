"""Tiny data sets in the layout of the real ones on which accuracy is measured."""

import gzip
from pathlib import Path

from cupyrec.data.synthetic import write_synthetic


def write(folder: Path) -> None:
    """Write both; in the second, user 2 likes what user 1 doesn't."""
    write_synthetic(folder / "log.tsv", 4000, ids_per_table=20)
    lines = (folder / "log.tsv").read_bytes().splitlines(keepends=True)
    (folder / "criteo").mkdir()
    parts = {"train": lines[:3000], "valid": lines[2000:3000], "test": lines[3000:]}
    for name, rows in parts.items():
        (folder / "criteo" / f"{name}.tsv.gz").write_bytes(gzip.compress(b"".join(rows)))
    movielens = folder / "movielens_1m"
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

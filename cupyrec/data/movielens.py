"""MovieLens-100k out of a public wheel, as a click log."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import zipfile
from pathlib import Path

from cupyrec.data.schema import Column, Schema

__all__ = ["write_movielens_100k"]

logger = logging.getLogger("cupyrec")

_WHEEL = "recbole 1.2.1"
_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
_FOLDER = "recbole/dataset_example/ml-100k/ml-100k"

_LICENCE = (
    "MovieLens-100k, GroupLens Research, University of Minnesota: for research use; not to be "
    "redistributed or used commercially without permission; the university does not endorse its "
    "use. Publications cite F. M. Harper and J. A. Konstan, The MovieLens Datasets: History and "
    "Context, ACM TiiS 5(4), article 19, 2015, doi:10.1145/2827872. "
    "Terms: https://files.grouplens.org/datasets/movielens/ml-100k-README.txt"
)

_SCHEMA = Schema(
    (
        Column("label", "label"),
        Column("user", "categorical", "integer"),
        Column("item", "categorical", "integer"),
        Column("age", "numeric", transform="log"),
        Column("gender", "categorical", "string"),
        Column("occupation", "categorical", "string"),
        Column("zip", "categorical", "string"),
        Column("year", "categorical", "string"),  # two of them are not numbers
        Column("genres", "categorical", "string"),
    )
)


def write_movielens_100k(
    wheel: str | os.PathLike[str], out: str | os.PathLike[str]
) -> dict[str, int]:
    """Write MovieLens-100k as ``train.tsv``, ``valid.tsv``, ``test.tsv`` and ``schema.toml``.

    A row is a rating with its user's and its movie's features; the label is rating >= 4. Rows are
    in order of time (then user, then item) and split 80/10/10 in that order. Genres are one id:
    the combination. The licence notice is logged.

    Parameters
    ----------
    wheel : path
        ``recbole-1.2.1-py3-none-any.whl``, as ``pip download --no-deps recbole==1.2.1`` fetches it.
    out : path
        A folder; made if it is missing.

    Returns
    -------
    dict
        Name of each split -> its number of rows.

    Raises
    ------
    ValueError
        The wheel is another one.
    OSError
        A file can't be read or written.
    """
    content = Path(wheel).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != _SHA256:
        raise ValueError(f"{wheel}: must be {_WHEEL} with sha256 {_SHA256}, got {digest}.")
    logger.warning(_LICENCE)

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        ratings, users, items = (_table(archive, part) for part in ("inter", "user", "item"))
    user_of = {user: (age, gender, job, code) for user, age, gender, job, code in users}
    item_of = {item: (year, genres) for item, _, year, genres in items}
    ratings.sort(key=lambda row: (float(row[3]), int(row[0]), int(row[1])))
    lines = [
        "\t".join((str(int(float(rating) >= 4)), user, item, *user_of[user], *item_of[item]))
        for user, item, rating, _ in ratings
    ]

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    _SCHEMA.save(out / "schema.toml")
    first, second = len(lines) * 8 // 10, len(lines) * 9 // 10
    splits = {"train": lines[:first], "valid": lines[first:second], "test": lines[second:]}
    for name, rows in splits.items():
        text = "".join(row + "\n" for row in rows)
        (out / f"{name}.tsv").write_text(text, "utf-8", newline="\n")
    return {name: len(rows) for name, rows in splits.items()}


def _table(archive: zipfile.ZipFile, part: str) -> list[list[str]]:
    """Return the rows of one of the data set's tab-separated files, without the header."""
    text = archive.read(f"{_FOLDER}.{part}").decode("utf-8")
    return [line.split("\t") for line in text.splitlines()[1:]]

import hashlib
import logging
import zipfile

import numpy as np
import pytest

from cupyrec.data import TSV, Schema, movielens
from cupyrec.data.movielens import write_movielens_100k

USERS = """user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token
1\t24\tM\ttechnician\t85711
2\t53\tF\tother\tT8H1N
"""
ITEMS = """item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq
7\tCaf\N{LATIN SMALL LETTER E WITH ACUTE}\t1995\tAction Drama
8\tNo Year\t\tComedy
"""
RATINGS = """user_id:token\titem_id:token\trating:float\ttimestamp:float
2\t8\t4\t30
1\t8\t5\t20
1\t7\t3\t20
2\t7\t1\t10
"""


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The layout of the real wheel, with ten ratings: the four above, then six later ones."""
    later = "".join(f"1\t7\t{1 + i % 5}\t{100 - i}\n" for i in range(6))
    path = tmp_path / "recbole-1.2.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (("inter", RATINGS + later), ("user", USERS), ("item", ITEMS)):
            archive.writestr(f"recbole/dataset_example/ml-100k/ml-100k.{name}", text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(movielens, "_SHA256", digest)
    return path


def test_joined_ordered_and_split(wheel, tmp_path):
    out = tmp_path / "new" / "folder"
    assert write_movielens_100k(wheel, out) == {"train": 8, "valid": 1, "test": 1}
    assert (out / "train.tsv").read_text().splitlines()[:4] == [
        "0\t2\t7\t53\tF\tother\tT8H1N\t1995\tAction Drama",
        "0\t1\t7\t24\tM\ttechnician\t85711\t1995\tAction Drama",
        "1\t1\t8\t24\tM\ttechnician\t85711\t\tComedy",
        "1\t2\t8\t53\tF\tother\tT8H1N\t\tComedy",
    ]
    later = [line for name in ("train", "valid", "test")
             for line in (out / f"{name}.tsv").read_text().splitlines()][4:]  # fmt: skip
    assert [line[0] for line in later] == ["0", "1", "1", "0", "0", "0"]  # ratings 1 5 4 3 2 1


def test_the_reader_takes_it(wheel, tmp_path):
    write_movielens_100k(wheel, tmp_path)
    schema = Schema.load(tmp_path / "schema.toml")
    assert [column.name for column in schema.columns] == [
        "label", "user", "item", "age", "gender", "occupation", "zip", "year", "genres",
    ]  # fmt: skip
    [batch] = TSV(tmp_path / "train.tsv", schema).batches(8)
    assert batch.dense[0].tolist() == [np.float32(np.log1p(53))]
    year = schema.table_names.index("year")
    first, second, *missing = batch.ids[[0, 1, 2, 3], year].tolist()
    assert first == second != missing[0] == missing[1] == -(2**63)
    assert batch.labels[:4, 0].tolist() == [0, 0, 1, 1]


def test_the_licence_is_shown(wheel, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "cupyrec"):
        write_movielens_100k(wheel, tmp_path)
    assert "GroupLens" in caplog.text
    assert "doi:10.1145/2827872" in caplog.text


def test_another_wheel_is_refused(wheel, tmp_path):
    digest = movielens._SHA256
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ValueError, match=f"must be recbole 1.2.1 with sha256 {digest}, got "):
        write_movielens_100k(wheel, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileNotFoundError, match=r"nothing.whl"):
        write_movielens_100k(tmp_path / "nothing.whl", tmp_path / "out")

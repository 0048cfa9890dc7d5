"""What a log's columns seem to be."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
from oracle import sentence
from pyarrow import parquet

import cupyrec
from cupyrec import models
from cupyrec.data import Column, Schema, criteo_schema, open_dataset
from cupyrec.data.inspect import inspect
from cupyrec.data.synthetic import write_synthetic


def check_trains(path, tmp_path, rows: int = 10_000) -> Schema:
    """The schema as it is written can be loaded and trained on at once."""
    found = inspect(path, rows)
    (tmp_path / "schema.toml").write_text(found.schema.to_toml(found.comments))
    schema = Schema.load(tmp_path / "schema.toml")
    assert schema == found.schema
    assert set(found.comments) - {""} >= {column.name for column in schema.columns}
    model = models.LR(schema.num_dense, schema.num_tables)
    if not schema.has_bags:
        assert cupyrec.fit(model, open_dataset(path, schema), batch_size=64)["steps"] > 0
    else:
        assert next(open_dataset(path, schema).batches(64)).labels is not None
    return schema


def kinds(schema: Schema) -> dict[str, str]:
    return {c.name: " ".join(filter(None, [c.kind, c.encoding, "bag" * c.bag,
                                           "log" * (c.transform == "log")]))
            for c in schema.columns}  # fmt: skip


COLUMNS = {  # of 100 rows; name -> values, what they are
    "click": (lambda i: i % 2, "label"),
    "user_id": (lambda i: 7 * i % 97, "categorical integer"),
    "age": (lambda i: None if i % 9 == 0 else 18 + 31 * i % 70, "numeric"),
    "price": (lambda i: 0.5 * i, "numeric"),
    "views": (lambda i: 13 * i, "numeric log"),
    "balance": (lambda i: i - 50, "numeric"),
    "weekday": (lambda i: i % 7, "categorical integer"),
    "color": (lambda i: i % 5, "categorical integer"),
    "visits": (lambda i: i % 5, "numeric"),
    "hash": (lambda i: f"{i * 2654435761 % 2**32:08x}", "categorical hex"),
    "code": (lambda i: None if i == 3 else f"k{i % 3}", "categorical string"),
    "big": (lambda i: 10**15 + i, "categorical integer"),
    "timestamp": (lambda i: 1700000000 + i, "ignore"),
    "always": (lambda i: "x", "ignore"),
    "note": (lambda i: f"the comment with number {i} goes on and on and on", "ignore"),
    "weight": (lambda i: 1 + i % 3, "weight"),
    "buy": (lambda i: int(i % 3 == 0), "ignore"),
}
VALUES = {name: [make(i) for i in range(100)] for name, (make, _) in COLUMNS.items()}
TRUTH = {name: told for name, (_, told) in COLUMNS.items()}


def text(delimiter: str, header: bool, quote: str = "") -> str:
    def field(value) -> str:
        value = "" if value is None else str(value)
        return f"{quote}{value}{quote}" if quote and not value.isdigit() and value else value

    lines = [[*COLUMNS]] * header + [list(row) for row in zip(*VALUES.values(), strict=True)]
    return "".join(delimiter.join(map(field, line)) + "\n" for line in lines)


@pytest.mark.parametrize(("delimiter", "quote"), [("\t", ""), (",", ""), (";", '"'), ("\x01", "")])
def test_text_with_names(tmp_path, delimiter, quote) -> None:
    path = tmp_path / "clicks.txt"
    path.write_text(text(delimiter, True, quote))
    schema = check_trains(path, tmp_path)
    assert (schema.delimiter, schema.header, schema.quotes) == (delimiter, True, bool(quote))
    assert kinds(schema) == TRUTH


def test_text_without_names(tmp_path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text(text(",", False))
    schema = check_trains(path, tmp_path)
    assert (schema.delimiter, schema.header) == (",", False)
    assert [c.name for c in schema.columns] == ["label", *(f"c{i}" for i in range(2, 18))]
    # What only a name told is guessed from values alone.
    told = list(kinds(schema).values())
    assert told[:3] == ["label", "numeric", "numeric"]
    assert told[6:8] == ["categorical integer"] * 2
    assert told[9:12] == list(TRUTH.values())[9:12]


def test_parquet(tmp_path) -> None:
    path = tmp_path / "clicks.parquet"
    parquet.write_table(pa.table(VALUES), path)
    assert kinds(check_trains(path, tmp_path)) == TRUTH


def test_types_of_parquet(tmp_path) -> None:
    size = 40
    columns = {
        "label": [i % 2 == 0 for i in range(size)],
        "tags": [[1, 2], None, []] * 13 + [[3]],
        "genres": [["a", "b"], ["c"]] * 20,
        "vector": [[0.5, 0.25]] * size,
        "deep": [[[1]]] * size,
        "decimal": [decimal.Decimal(i) / 4 for i in range(size)],
        "flag": [i % 3 == 0 for i in range(size)],
        "when": [datetime.date(2026, 1, 1)] * size,
        "struct": [{"a": 1}] * size,
        "word": pa.array(["a", "b"] * 20).dictionary_encode(),
        "none": pa.nulls(size),
        "odd": [float("nan")] * size,
    }
    path = tmp_path / "types.parquet"
    parquet.write_table(pa.table(columns), path)
    assert kinds(check_trains(path, tmp_path)) == {
        "label": "label", "tags": "categorical integer bag", "genres": "categorical string bag",
        "vector": "ignore", "deep": "ignore", "decimal": "numeric", "flag": "categorical integer",
        "when": "ignore", "struct": "ignore", "word": "categorical string", "none": "ignore",
        "odd": "ignore",
    }  # fmt: skip


def test_bags_of_text(tmp_path) -> None:
    path = tmp_path / "movies.csv"
    rows = ["Action|Comedy,3|4", "Drama,5", ",", "Comedy|Drama,3"]
    path.write_text(
        "genres,seen,click\n" + "".join(f"{row},{i % 2}\n" for i, row in enumerate(rows * 9))
    )
    assert kinds(check_trains(path, tmp_path)) == {
        "genres": "categorical string bag", "seen": "categorical integer bag", "click": "label",
    }  # fmt: skip


def test_criteos_layout(tmp_path) -> None:
    path = tmp_path / "day_0.tsv.gz"
    write_synthetic(path, 300, ids_per_table=50)
    assert check_trains(path, tmp_path, rows=100) == criteo_schema()
    assert inspect(path).comments[""] == "the layout of Criteo's click logs"


def test_numpy_files(tmp_path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "day_0_dense.npy", rng.normal(size=(90, 2)))
    np.save(tmp_path / "day_0_sparse.npy", rng.integers(0, 5, (90, 1)))
    np.save(tmp_path / "day_0_labels.npy", rng.integers(0, 2, 90))
    for path in ("day_0", "day_0_sparse.npy"):
        schema = inspect(tmp_path / path).schema
        assert kinds(schema) == {"label": "label", "I1": "numeric", "I2": "numeric",
                                 "C1": "categorical integer"}  # fmt: skip
        assert sum(map(len, open_dataset(tmp_path / path, schema).batches(64))) == 90


def write_rows(path, name: str, make, more: str = "") -> None:
    rows = "".join(f"{make(i)},{i % 2}{more}\n" for i in range(20))
    path.write_text(f"{name},click{more and ',more'}\n{rows}")


@pytest.mark.parametrize(("make", "kind"), [
    (lambda i: 7111122350028648955 + i * 10**17, "categorical integer"),
    (lambda i: 10 ** (17 + i % 2) + i, "categorical integer"),
    (lambda i: -(2**63) + i, "categorical integer"),
    (lambda i: 2**63 - 10 + i, "categorical string"),  # no ids of 64 bits, and no amounts
    (lambda i: f"{i}" + "7" * 5000, "ignore"),
])  # fmt: skip
def test_large_whole_numbers_are_ids(tmp_path, make, kind) -> None:
    path = tmp_path / "ids.csv"
    write_rows(path, "x", make, more=",1.5")
    path.write_text(path.read_text().replace("1.5", "2.5", 3))
    assert kinds(check_trains(path, tmp_path))["x"] == kind


def test_columns_without_a_name_of_their_own_are_left_out(tmp_path) -> None:
    path = tmp_path / "pandas.csv"
    write_rows(path, ",a,b,b", lambda i: f"{i},{i % 3},5,{i}")
    assert kinds(check_trains(path, tmp_path)) == {
        "a": "categorical integer", "click": "label",
    }  # fmt: skip
    assert inspect(path).comments[""] == (
        "left out, for they have no names of their own: '', 'b'"
    )  # fmt: skip
    names = ["", "a\nb", "c", "c", "click", "deep"]
    deep = pa.array([{"a\n[[column]]": 1}] * 3)
    table = pa.table([[1, 2, 3]] * 4 + [[0, 1, 0], deep], names=names)
    parquet.write_table(table.append_column("d", [[1, 2, 4]]), tmp_path / "a.parquet")
    assert kinds(check_trains(tmp_path / "a.parquet", tmp_path)) == {
        "click": "label", "deep": "ignore", "d": "numeric",
    }  # fmt: skip
    path.write_text("a,a,click\n1,2,0\n3,4,1\n")
    with pytest.raises(ValueError, match="a column to learn from, got click .*own: 'a'"):
        inspect(path)


@pytest.mark.parametrize("field", ['17" tv', '" 12', '"', '"a" b'])
def test_a_quote_that_is_not_closed_is_a_byte_as_any_other(tmp_path, field) -> None:
    path = tmp_path / "tv.csv"
    write_rows(path, "x,size", lambda i: f"{i},{field}{i}")
    assert not check_trains(path, tmp_path).quotes


def test_where_there_are_no_ids_buckets_are_some(tmp_path) -> None:
    path = tmp_path / "numbers.csv"
    write_rows(path, "x,z", lambda i: f"{i},{i + 0.5}")
    schema = check_trains(path, tmp_path)
    assert schema.table_names == ["x bucket", "z bucket"]
    assert inspect(path).comments[""].startswith("no ids were found: buckets of numbers are some")


def test_one_weight_is_taken(tmp_path) -> None:
    path = tmp_path / "weights.csv"
    write_rows(path, "x,weight,sample_weight", lambda i: f"{i},{i + 0.5},{i + 1.5}")
    assert kinds(check_trains(path, tmp_path)) == {
        "x": "numeric", "weight": "weight", "sample_weight": "ignore", "click": "label",
    }  # fmt: skip
    assert inspect(path).comments["sample_weight"].endswith("; another weight, if its kind is that")


def test_rows_of_many_row_groups_are_looked_at(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    lists = [[[i]] for i in range(40)]  # beside which a batch ends with its row group
    table = pa.table({"x": range(40), "tags": lists, "click": [0, 1] * 20})
    with parquet.ParquetWriter(path, table.schema) as out:
        for rows in (table[:0], table[:5], table[5:]):
            out.write_table(rows, row_group_size=10)
    assert " among 40 rows" in inspect(path).comments["x"]
    assert " among 17 rows" in inspect(path, 17).comments["x"]


def test_what_comments_say(tmp_path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("user,age,city,click,buy\n" + "7,,Ulm,1,0\n8,3,\n9,44,Bonn,0,1\n5,5,Ulm,1,1\n")
    assert inspect(path).comments == {  # of lines with another number of columns nothing is told
        "user": "whole numbers, 3 distinct among 3 rows, 0 % missing, from 5 to 9",
        "age": "whole numbers, 2 distinct among 3 rows, 33.3 % missing, from 5 to 44",
        "city": "text, 2 distinct among 3 rows, 0 % missing, such as 'Ulm'",
        "click": "whole numbers, 2 distinct among 3 rows, 0 % missing, from 0 to 1",
        "buy": "whole numbers, 2 distinct among 3 rows, 0 % missing, from 0 to 1; another label, "
               "if its kind is that",
    }  # fmt: skip


def test_a_log_without_labels_is_told_of(tmp_path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("user,click\n7,1\n8,\n")
    found = inspect(path)
    assert found.comments[""].startswith("no label was found")
    assert found.schema.to_toml(found.comments).startswith("# no label was found")
    assert Column("click", "ignore") in found.schema.columns
    why = "; named as a label is, which must be 0 or 1 in each row"
    assert found.comments["click"].endswith(why)


def test_comments_say_why_a_column_is_ignored_or_no_id(tmp_path) -> None:
    names = "day,date,note,always,none,click,target,category_id,y_id"
    rows = [
        f"2024-01-0{i},1,{i} {'word ' * 9},x,,{i % 2},{'yes' if i % 3 else 'no'},{i}.0,{i}.5"
        for i in range(1, 10)
    ]
    path = tmp_path / "clicks.csv"
    path.write_text("\n".join([names, *rows]) + "\n")
    found = inspect(path)
    ends = {name: comment.partition("; ")[2] for name, comment in found.comments.items() if name}
    assert ends == {
        "day": "a time", "date": "a time", "note": "prose", "always": "the same everywhere",
        "none": "nothing to learn from", "click": "",
        "target": "named as a label is, which must be 0 or 1 in each row",
        "category_id": "named as ids are, which must not be written as floats", "y_id": "",
    }  # fmt: skip
    assert kinds(found.schema) == dict.fromkeys(names.split(","), "ignore") | {
        "click": "label", "category_id": "numeric", "y_id": "numeric",
    }  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_so_many_rows_are_looked_at(tmp_path, rows) -> None:
    (tmp_path / "a.csv").write_text("user,x\n1,5\n2,6\n3,abc\n")
    parquet.write_table(pa.table({"user": [1, 2, 3], "x": [5, 6, None]}), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        assert f" among {rows} rows" in inspect(tmp_path / name, rows).comments["user"]


def test_what_can_not_be_inspected(tmp_path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("2026-01-01\n2026-01-02\n")
    message = f"{path}: must have a column to learn from, got c1 (text, 2 distinct among 2 rows, 0 % missing, such as '2026-01-01'; a time)."  # noqa: E501
    with pytest.raises(ValueError, match=sentence(message)):
        inspect(path)
    with pytest.raises(FileNotFoundError, match="must be a file, found nothing there"):
        inspect(tmp_path / "missing.tsv")
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"x.parquet: must be a whole Parquet file, got: "):
        inspect(tmp_path / "x.parquet")
    parquet.write_table(pa.table({"x": pa.array([], pa.int8())}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x.parquet: must have at least one row, got none"):
        inspect(tmp_path / "x.parquet")
    path.write_text("a,click\n1,0\n2,1\n", "utf-16")
    with pytest.raises(
        ValueError, match=sentence(f"{path}, line 1: must be text, got a zero byte.")
    ):
        inspect(path)
    with pytest.raises(ValueError, match="inspect: 'rows' must be"):
        inspect(path, 0)

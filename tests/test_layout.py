"""Files whose first line names their columns."""

from pathlib import Path

import pytest
from oracle import sentence

from cupyrec.data import TSV, Column, Schema

COLUMNS = (
    Column("click", "label"), Column("item", "categorical", "integer"),
    Column("size", "numeric"), Column("weight", "weight"), Column("note", "ignore"),
)  # fmt: skip
SCHEMA = Schema(COLUMNS, ",", header=True)


@pytest.fixture
def write(tmp_path):
    def write(content: str, name: str = "clicks.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode())
        return path

    return write


def rows(data: TSV) -> list[tuple]:
    out = []
    for batch in data.batches(2):
        labels = [None] * len(batch) if batch.labels is None else batch.labels[:, 0].tolist()
        out += zip(labels, batch.dense[:, 0].tolist(), batch.ids[:, 0].tolist(), strict=True)
    return out


def test_each_file_has_an_order_of_its_own(write):
    paths = [
        write("click,item,size,weight,note\n1,7,2.5,1,x\n0,8,0,1,\n1,9,,1,\n", "a"),
        write("\ufeffday,weight,size,other,item,click\r\nmon,2,-1,,-5,0\r\n", "b"),
    ]
    data = TSV(paths, SCHEMA)
    for _ in range(2):
        assert rows(data) == [(1, 2.5, 7), (0, 0, 8), (1, 0, 9), (0, -1, -5)]
    assert [b.weights[:, 0].tolist() for b in data.batches(3)] == [[1, 1, 1], [2]]


def test_names_in_quotes(write):
    quoted = Schema(COLUMNS[:3], ",", header=True, quotes=True)
    path = write('"a ""b"", c","size","item","click"\n"x,y",1,2,"0"\n')
    assert rows(TSV(path, quoted)) == [(0, 1, 2)]


def test_without_labels_files_lack_them_or_not(write):
    bare = write("size,item\n1,7\n", "bare")
    full = write("weight,click,size,item\nx,,2,8\n", "full")
    assert rows(TSV([bare, full, bare], SCHEMA, labels=False)) == [
        (None, 1, 7), (None, 2, 8), (None, 1, 7),
    ]  # fmt: skip


@pytest.mark.parametrize(("header", "told"), [
    ("click,weight,item", "'size': must be there once, for the schema names it, got 0 of that name among 3 columns: click, weight, item."),  # noqa: E501
    ("weight,item,size", "'click': must be there once, for the schema names it, got 0 of that name among 3 columns: weight, item, size."),  # noqa: E501
    ("click,item,size", "'weight': must be there once, for the schema names it, got 0 of that name among 3 columns: click, item, size."),  # noqa: E501
    ("Click,item,size,weight", "'click': must be there once, for the schema names it, got 0 of that name among 4 columns: Click, item, size, weight."),  # noqa: E501
    ("click,item,size,weight,item", "'item': must be there once, for the schema names it, got 2 of that name among 5 columns: click, item, size, weight, item."),  # noqa: E501
])  # fmt: skip
def test_a_header_that_does_not_fit(write, header, told):
    good = write("click,item,size,weight\n1,7,2.5,1\n", "good")
    path = write(header + "\n1,7,1,1,1\n")
    for on_error in ("raise", "skip"):
        with pytest.raises(ValueError, match=sentence(f"{path}, line 1, column {told}")):
            TSV([good, path], SCHEMA, on_error=on_error)


def test_columns_that_nobody_reads_may_have_any_names(write):
    path = write(",a,a,click,,item,size,weight,note,note\n" + "x,y,,1,,7,2.5,1,,\n" * 2)
    assert rows(TSV(path, SCHEMA)) == [(1, 2.5, 7)] * 2


def test_many_columns_are_told_apart_in_a_moment(write):  # quadratic, it took three minutes
    count = 20_000
    names, schema = [f"c{i}" for i in range(count)], [COLUMNS[0]]
    schema += [Column(name, "numeric", buckets=True) for name in names]
    path = write(",".join(["click", *names]) + "\n1" + ",2" * count + "\n")
    (batch,) = TSV(path, Schema(schema, ",", header=True)).batches(2)
    assert (batch.dense == 2).all() and batch.ids.shape == (1, count)


def test_a_malformed_line_is_told_by_its_number_and_column(write):
    path = write("item,more,size,click,weight\n7,x,1,1,1\n8,x,y,1,1\n")
    text = f"{path}, line 3, column 'size': must be a finite number, got 'y'."
    with pytest.raises(ValueError, match=sentence(text)):
        rows(TSV(path, SCHEMA))
    path = write("item,more,size,click,weight\n7,x,1\n")
    text = f"{path}, line 2, column 'click': a line must have 5 columns, got 3."
    with pytest.raises(ValueError, match=sentence(text)):
        rows(TSV(path, SCHEMA))


def test_a_header_alone(write):
    good, path = (
        write("item,size,click,weight\n7,1,1,1\n", "good"),
        write("item,size,click,weight\n"),
    )
    told = f"{path}: must have at least one row, got a header alone."
    for on_error in ("raise", "skip"):
        with pytest.raises(ValueError, match=sentence(told)):  # at once, not when its turn comes
            TSV([good, path], SCHEMA, on_error=on_error)


def test_a_file_without_header_may_begin_with_a_byte_order_mark(write):
    schema = Schema(COLUMNS[:3], ",")
    assert rows(TSV(write("\ufeff1,7,2\n0,8,1\n"), schema)) == [(1, 2, 7), (0, 1, 8)]

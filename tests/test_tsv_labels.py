"""The reader on files whose labels are not known, or not there."""

from pathlib import Path

import pytest
from test_tsv import CODE, LABEL, SIZE, WORD, expected_rows, rows

from cupyrec.data import TSV, Schema, lines


@pytest.fixture
def write(tmp_path):
    def write(content: str, name: str = "clicks.tsv") -> Path:
        path = tmp_path / name
        path.write_text(content, newline="")
        return path

    return write


def test_without_labels_their_column_is_not_looked_at(write):
    path = write("\ta\nwhatever\tb\n7\tc\n")
    data = TSV(path, Schema((LABEL, CODE)), labels=False)
    assert rows(data, 2) == [(None, [], [10]), (None, [], [11]), (None, [], [12])]


@pytest.mark.parametrize("block", [5, 1 << 20])
def test_files_without_labels_lack_their_column_or_fill_it(write, monkeypatch, block):
    monkeypatch.setattr(lines, "_BLOCK", block)
    schema = Schema((WORD, LABEL, SIZE, CODE))
    bare = write("a\t0\tff\r\nb\t\t\n", "bare.tsv")
    full = write("c\t\t-1\t1\nd\tx\t1\t2\n", "full.tsv")
    expected = expected_rows(b"a\t0\t0\tff\nb\t0\t\t\nc\t0\t-1\t1\nd\t0\t1\t2\n", schema)
    got = rows(TSV([bare, full, bare], schema, labels=False), 3)
    assert [row[1:] for row in got] == [row[1:] for row in expected + expected[:2]]
    with pytest.raises(ValueError) as caught:
        rows(TSV(bare, schema), 3)
    assert str(caught.value) == (
        f"{bare}, line 1, column 'code': a line must have 4 columns, got 3."
    )


@pytest.mark.parametrize(("content", "sentence"), [
    ("a\t0\tff\nb\t1\t0\tff\n", "2, column 4: a line must have 3 columns, got 4."),
    ("a\t1\t0\tff\nb\t0\tff\n", "2, column 'code': a line must have 4 columns, got 3."),
    ("a\tff\nb\t0\tff\n", "1, column 'size': a line must have 4 columns, got 2."),
    ("a\t0\tff\nb\tx\tff\n", "2, column 'size': must be a finite number, got 'x'."),
    ("a\t0\tff\nb\t0\t-\n", "2, column 'code': must be 1 to 16 hex digits, got '-'."),
])  # fmt: skip
def test_every_line_of_a_file_is_as_its_first(write, content, sentence):
    path = write(content)
    with pytest.raises(ValueError) as caught:
        rows(TSV(path, Schema((WORD, LABEL, SIZE, CODE)), labels=False), 9)
    assert str(caught.value) == f"{path}, line {sentence}"


def test_a_schema_without_label(write):
    path = write("a\nb\n")
    assert rows(TSV(path, Schema((CODE,)), labels=False), 9) == [(None, [], [10]), (None, [], [11])]
    with pytest.raises(ValueError, match=r"clicks.tsv: its schema must have a label column"):
        TSV(path, Schema((CODE,)))

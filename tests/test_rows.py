"""Rows with several labels, weights, bags and quotes, as the reader turns them into batches."""

import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import sentence
from test_tsv import MISSING, fnv1a, folder  # noqa: F401

from cupyrec.data import TSV, Column, Schema, lines
from cupyrec.ragged import Bags

CLICK, BUY = Column("click", "label"), Column("buy", "label")
WEIGHT = Column("weight", "weight")
PRICE = Column("price", "numeric", buckets=True)
USER = Column("user", "categorical", "integer")
WORD = Column("word", "categorical", "string")
GENRES = Column("genres", "categorical", "string", bag=True)
SEEN = Column("seen", "categorical", "integer", bag=True, separator=" ")
CODES = Column("codes", "categorical", "hex", bag=True, separator=";")
NOTE = Column("note", "ignore")


@pytest.fixture
def write(tmp_path):
    def write(content: str, name: str = "clicks.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode())
        return path

    return write


def bags_of(ids: Bags) -> list[list[list[int]]]:
    """Of each row the ids of each field."""
    starts = ids.offsets.tolist()
    bags = [ids.ids[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
    return [bags[at : at + ids.num_fields] for at in range(0, len(bags), ids.num_fields)]


def test_labels_and_weights_have_their_places(write):
    path = write("0,1,2.5,7\n1,0,0,8\n")
    data = TSV(path, Schema((BUY, CLICK, WEIGHT, USER), ","))
    (batch,) = data.batches(9)
    assert data.task_names == ["buy", "click"]
    assert batch.labels.tolist() == [[0, 1], [1, 0]]
    assert batch.weights.tolist() == [[2.5, 2.5], [0, 0]]
    assert batch.labels.dtype == batch.weights.dtype == np.float32
    assert batch.ids.tolist() == [[7], [8]]


def test_without_labels_there_are_no_weights(write):
    schema = Schema((BUY, USER, WEIGHT, CLICK), ",")
    for text in ("0,7,1,1\n", "x,7,,\n", "7,-3\n", "7\n"):
        (batch,) = TSV(write(text), schema, labels=False).batches(9)
        assert (batch.labels, batch.weights, batch.ids.tolist()) == (None, None, [[7]])


@pytest.mark.parametrize(("text", "told"), [
    ("1,-1,7", "'weight': the weight must be a finite number of at least 0, got '-1'."),
    ("1,,7", "'weight': the weight must be a finite number of at least 0, got ''."),
    ("1,nan,7", "'weight': the weight must be a finite number of at least 0, got 'nan'."),
    ("1,1e39,7", "'weight': the weight must be a finite number of at least 0, got '1e39'."),
    ("1,inf,7", "'weight': the weight must be a finite number of at least 0, got 'inf'."),
    ("1,1,7 x", "'seen': each id must be an integer of 64 bits, got '7 x'."),
    ("1,1,7;8", "'seen': each id must be an integer of 64 bits, got '7;8'."),
    ("1,1,7,8", "4: a line must have 3 columns, got 4."),
    ("1,1", "'seen': a line must have 3 columns, got 2."),
    ('"1,1,7', "'click': a field that begins with a quote must end with one, got '\"1,1,7'."),
    ('1,"1"x,7', "'weight': a field that begins with a quote must end with one, got '\"1\"x'."),
    ('1,1,"7', "'seen': a field that begins with a quote must end with one, got '\"7'."),
    ('1,1,"7""', "'seen': a field that begins with a quote must end with one, got '\"7\"\"'."),
    ('1,"x",7', "'weight': the weight must be a finite number of at least 0, got 'x'."),
])  # fmt: skip
def test_malformed_fields(write, text, told):
    schema = Schema((CLICK, WEIGHT, SEEN), ",", quotes=True)
    path = write(f'1,1,"7 8"\n{text}\n')
    with pytest.raises(ValueError, match=sentence(f"{path}, line 2, column {told}")):
        list(TSV(path, schema).batches(9))
    data = TSV(path, schema, on_error="skip")
    assert [bags_of(batch.ids) for batch in data.batches(9)] == [[[[7, 8]]]]
    assert data.skipped == 1


@pytest.mark.parametrize("quotes", [False, True])
def test_bags_stand_in_the_order_of_tables(write, quotes):
    schema = Schema((PRICE, SEEN, USER, CODES, GENRES), ",", quotes=quotes)
    assert schema.table_names == ["seen", "user", "codes", "genres", "price bucket"]
    path = write("0,1 2 -3,7,ff;0,a|b\n-1,,,,\n,4  5,8,;,a||\n")
    (batch,) = TSV(path, schema, labels=False).batches(9)
    a, b = fnv1a(b"a"), fnv1a(b"b")
    assert bags_of(batch.ids) == [
        [[1, 2, -3], [7], [255, 0], [a, b], [2]],
        [[], [MISSING], [], [], [1]],
        [[4, MISSING, 5], [8], [MISSING, MISSING], [a, MISSING, MISSING], [0]],
    ]
    assert batch.ids.shape == (3, 5)
    assert batch.ids.offsets.dtype == batch.ids.ids.dtype == np.int64


def test_quoted_fields(write):
    schema = Schema((CLICK, WORD, PRICE, GENRES, NOTE), ",", quotes=True)
    path = write(
        '"1","a,b","2.5","x|y","a ""note"", long"\n0,"say ""hi""",,"",""\n1,a"b,"","""|,",\n'
    )
    (batch,) = TSV(path, schema).batches(9)
    words = [fnv1a(text) for text in (b"a,b", b'say "hi"', b'a"b')]
    assert batch.labels.ravel().tolist() == [1, 0, 1]
    assert batch.dense.ravel().tolist() == [2.5, 0, 0]
    assert bags_of(batch.ids) == [
        [[words[0]], [fnv1a(b"x"), fnv1a(b"y")], [2 + int(2 * np.log1p(2.5))]],
        [[words[1]], [], [0]],
        [[words[2]], [fnv1a(b'"'), fnv1a(b",")], [0]],
    ]


def test_quotes_have_no_meaning_unless_the_schema_says_so(write):
    (batch,) = TSV(write('"a"\n"b\n'), Schema((WORD,), ","), labels=False).batches(9)
    assert batch.ids.ravel().tolist() == [fnv1a(b'"a"'), fnv1a(b'"b')]


# Round trips: random values, written by Python's csv module, come back.

ids = st.integers(-(2**63) + 1, 2**63 - 1)
word = st.text(st.characters(exclude_characters="|\n\r\0", codec="utf-8"), min_size=1, max_size=4)
row = st.fixed_dictionaries({
    "click": st.integers(0, 1), "buy": st.integers(0, 1),
    "weight": st.integers(0, 40).map(lambda n: n / 8),
    "price": st.none() | st.integers(-(2**20), 2**20).map(lambda n: n / 16),
    "user": st.none() | ids, "word": st.none() | word,
    "genres": st.lists(word, max_size=4), "seen": st.lists(ids, max_size=4),
    "codes": st.lists(ids, max_size=3),
    "note": word, "other": word,
})  # fmt: skip
COLUMNS = (CLICK, BUY, WEIGHT, PRICE, USER, WORD, GENRES, SEEN, CODES, NOTE)


def text_of(name: str, value: object) -> str:
    if value is None:
        return ""
    if name == "genres":
        return "|".join(value)
    if name == "seen":
        return " ".join(map(str, value))
    if name == "codes":
        return ";".join(f"{n % 2**64:x}" for n in value)
    return str(value)


def written(rows: list[dict], names: list[str], header: bool, quoting: int, end: str) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator=end, quoting=quoting)
    if header:
        writer.writerow(names)
    writer.writerows([text_of(name, r[name]) for name in names] for r in rows)
    return stream.getvalue().encode()


def expected_bags(r: dict) -> list[list[int]]:
    x = r["price"]
    bucket = 0 if x is None else 1 if x < 0 else 2 + int(np.floor(2 * np.log1p(x)))
    return [
        [MISSING if r["user"] is None else r["user"]],
        [MISSING if r["word"] is None else fnv1a(r["word"].encode())],
        [fnv1a(genre.encode()) for genre in r["genres"]], r["seen"], r["codes"], [bucket],
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(row, min_size=1, max_size=7), min_size=1, max_size=3), st.data(),
    st.booleans(), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(["\n", "\r\n"]), st.integers(50, 400), st.integers(1, 6), st.integers(0, 2),
    st.sampled_from(["raise", "skip"]), st.integers(1, 4),
)  # fmt: skip
def test_rows_come_back(
    folder, files, data, header, quoting, end, block, size, skip, on_error, ranks  # noqa: F811
):  # fmt: skip
    schema, paths = Schema(COLUMNS, ",", header=header, quotes=True), []
    for number, rows in enumerate(files):
        names = [column.name for column in COLUMNS]
        if header:  # each file in an order of its own, with a column more
            names = data.draw(st.permutations([*names, "other"]))
        paths.append(folder / f"{number}.csv")
        mark = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
        paths[-1].write_bytes(mark + written(rows, names, header, quoting, end))
    lines._BLOCK = block
    reader = TSV(paths, schema, on_error=on_error)
    expected = [r for rows in files for r in rows]
    batches = list(reader.batches(size, skip=skip))
    assert reader.skipped == 0
    assert [len(b) for b in batches] == [
        min(size, len(expected) - at) for at in range(skip * size, len(expected), size)
    ]
    expected = expected[skip * size :]
    flat = [bags for b in batches for bags in bags_of(b.ids)]
    assert flat == [expected_bags(r) for r in expected]
    for name, values in [
        ("dense", [[r["price"] or 0.0] for r in expected]),
        ("labels", [[r["click"], r["buy"]] for r in expected]),
        ("weights", [[r["weight"]] * 2 for r in expected]),
    ]:
        assert [values for b in batches for values in getattr(b, name).tolist()] == values
    for rank in range(ranks):
        of_rank = list(reader.of_rank(rank, ranks).batches(size, skip=skip))
        assert len(of_rank) == len(batches)
        for part, whole in zip(of_rank, batches, strict=True):
            same_rows(part, whole.of_rank(rank, ranks))


def same_rows(part, expected):
    assert (part.first, part.total, len(part)) == (expected.first, expected.total, len(expected))
    for name in ("dense", "labels", "weights"):
        np.testing.assert_array_equal(getattr(part, name), getattr(expected, name))
    np.testing.assert_array_equal(part.ids.ids, expected.ids.ids)
    np.testing.assert_array_equal(part.ids.offsets, expected.ids.offsets)


FEW = Schema((USER, GENRES, CODES, WORD), ",", quotes=True)


def expected_row(line: str) -> list[list[int]] | None:
    """What a line of FEW says, None if it is malformed, by Python's csv module."""
    try:
        fields = next(csv.reader([line], strict=True), [])
    except csv.Error:  # a quote that is not closed, or not at the end
        return None
    if len(fields) != 4:
        return None
    user, genres, codes, word = fields
    codes = codes.split(";") if codes else []
    if user and not re.fullmatch(r"[+-]?[0-9]{1,18}", user):
        return None
    if not all(re.fullmatch("[0-9a-f]{0,16}", code) for code in codes):
        return None
    return [
        [int(user) if user else MISSING],
        [fnv1a(g.encode()) if g else MISSING for g in genres.split("|")] if genres else [],
        [(int(c, 16) + 2**63) % 2**64 - 2**63 if c else MISSING for c in codes],
        [fnv1a(word.encode()) if word else MISSING],
    ]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text(st.sampled_from('"",,,|;1a'), max_size=20), min_size=1, max_size=6),
    st.integers(1, 60), st.integers(1, 4),
)  # fmt: skip
@example(['1,"""|,",1;a,"', '1,a|,"1;","a"', '"1",,,""', '"1""",,,'], 60, 2)
@example(['1,"a"a,,', '"",",",";",","', ',"""",,"""a"""'], 9, 1)
def test_any_lines_give_rows_or_are_malformed(folder, texts, block, size):  # noqa: F811
    path, lines._BLOCK = folder / "any.csv", block
    path.write_text("".join(f"{text}\n" for text in texts), newline="")
    expected = [expected_row(text) for text in texts]
    kept = [row for row in expected if row is not None]
    data = TSV(path, FEW, labels=False, on_error="skip")
    if kept:
        got = [row for batch in data.batches(size) for row in bags_of(batch.ids)]
        assert got == kept
        assert data.skipped == len(expected) - len(kept)
    else:
        with pytest.raises(ValueError, match="must have at least one row"):
            list(data.batches(size))
    if None in expected:
        where = f"{path}, line {expected.index(None) + 1}, column "
        with pytest.raises(ValueError, match=re.escape(where)):
            list(TSV(path, FEW, labels=False).batches(size))

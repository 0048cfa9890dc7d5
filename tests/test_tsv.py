import gzip
import logging
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cupyrec.data import TSV, Column, Schema, criteo_schema, lines

MISSING = -(2**63)
LABEL = Column("label", "label")
PRICE = Column("price", "numeric")
SIZE = Column("size", "numeric", transform="log", buckets=True)
CODE = Column("code", "categorical", "hex")
ITEM = Column("item", "categorical", "integer")
WORD = Column("word", "categorical", "string")
NOTE = Column("note", "ignore")
NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
ALL = Schema((LABEL, PRICE, WORD, NOTE, SIZE, CODE, ITEM))


def fnv1a(text: bytes) -> int:
    value = 14695981039346656037
    for byte in text:
        value = (value ^ byte) * 1099511628211 % 2**64
    return (value + 2**63) % 2**64 - 2**63


def expected_row(line: bytes, schema: Schema) -> tuple | None:
    """What the documentation says of a line: (label, dense, ids), or None if it is malformed."""
    fields = line.split(schema.delimiter.encode())
    if len(fields) != len(schema.columns):
        return None
    label, dense, ids, buckets = None, [], [], []
    for text, column in zip(fields, schema.columns, strict=True):
        if column.kind == "label":
            label = float(text) if NUMBER.fullmatch(text) else None
            if label not in (0, 1):
                return None
        elif column.kind == "numeric":
            x = float(text or 0) if NUMBER.fullmatch(text or b"0") else math.inf
            if abs(x) == math.inf:
                return None
            bucket = 0 if not text else 1 if x < 0 else 2 + math.floor(2 * math.log1p(x))
            buckets += [bucket] * column.buckets
            if column.transform == "log":
                x = math.copysign(math.log1p(abs(x)), x)
            if np.isinf(np.float32(x)):
                return None
            dense.append(np.float32(x))
        elif column.kind == "categorical":
            value = MISSING
            if text and column.encoding == "string":
                value = fnv1a(text)
            elif text and column.encoding == "hex":
                if not re.fullmatch(rb"[0-9a-fA-F]{1,16}", text):
                    return None
                value = (int(text, 16) + 2**63) % 2**64 - 2**63
            elif text:
                if not re.fullmatch(rb"[+-]?[0-9]+", text) or not MISSING <= int(text) < 2**63:
                    return None
                value = int(text)
            ids.append(value)
    return label, dense, ids + buckets


def expected_rows(content: bytes, schema: Schema) -> list[tuple | None]:
    lines = (content + b"\n").replace(b"\r\n", b"\n").split(b"\n")[:-1]
    if content.endswith(b"\n"):
        lines.pop()
    return [expected_row(line, schema) for line in lines]


def rows(data: TSV, size: int, **arguments) -> list[tuple]:
    out = []
    for batch in data.batches(size, **arguments):
        assert (batch.dense.dtype, batch.ids.dtype) == (np.float32, np.int64)
        assert batch.dense.shape == (len(batch), data.num_dense)
        assert batch.ids.shape == (len(batch), data.num_tables)
        labels = [None] * len(batch)
        if batch.labels is not None:
            assert batch.labels.dtype == np.float32
            assert batch.labels.shape == (len(batch), 1)
            labels = batch.labels[:, 0].tolist()
        out += zip(labels, map(list, batch.dense), batch.ids.tolist(), strict=True)
    return out


@pytest.fixture
def write(tmp_path):
    def write(content: bytes | str, name: str = "clicks.tsv") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(lines, "_BLOCK", 5)


# Values


@pytest.mark.parametrize(("column", "text", "value"), [
    (WORD, "a", 0xAF63DC4C8601EC8C - 2**64),  # the published test vectors
    (WORD, "foobar", 0x85944171F73967E8 - 2**64),
    (WORD, "", MISSING),
    (WORD, '"quoted"', fnv1a(b'"quoted"')),
    (WORD, "\N{SNOWMAN}", fnv1a(b"\xe2\x98\x83")),
    (CODE, "", MISSING),
    (CODE, "0", 0),
    (CODE, "68fd1e64", 0x68FD1E64),
    (CODE, "DEADbeef", 0xDEADBEEF),
    (CODE, "7fffffffffffffff", 2**63 - 1),
    (CODE, "8000000000000000", MISSING),
    (CODE, "ffffffffffffffff", -1),
    (ITEM, "", MISSING),
    (ITEM, "-0", 0),
    (ITEM, "+7", 7),
    (ITEM, "9223372036854775807", 2**63 - 1),
    (ITEM, "-9223372036854775808", MISSING),
    (ITEM, "0000000000000000000000000000012", 12),
])  # fmt: skip
def test_ids(write, column, text, value):
    path = write(f"{text}\t-5\n")
    assert rows(TSV(path, Schema((column, PRICE)), labels=False), 1) == [(None, [-5.0], [value])]


@pytest.mark.parametrize(("text", "value", "bucket"), [
    ("", 0.0, 0), ("-1", -math.log(2), 1), ("-0.5", -math.log(1.5), 1), ("0", 0.0, 2),
    ("1", math.log(2), 3), ("2", math.log(3), 4),
    ("1e6", math.log(1000001), 29), ("1e300", 300 * math.log(10), 1383),
])  # fmt: skip
def test_numbers_and_buckets(write, text, value, bucket):
    path = write(f"{text}\t{text if len(text) < 5 else 7}\n")
    [(_, dense, ids)] = rows(TSV(path, Schema((SIZE, PRICE)), labels=False), 1)
    assert dense[0] == np.float32(value)
    assert dense[1] == (7 if len(text) >= 5 else np.float32(text or 0))
    assert ids == [bucket]


def test_columns_go_to_their_places(write):
    path = write("1\t2.5\ta\tanything\t-3\tff\t-9\n")
    data = TSV(path, ALL)
    assert (data.num_dense, data.num_tables) == (2, 4)
    assert ALL.table_names == ["word", "code", "item", "size bucket"]
    assert rows(data, 1) == [(1.0, [2.5, np.float32(-math.log(4))], [fnv1a(b"a"), 255, -9, 1])]


@pytest.mark.parametrize("delimiter", list("\t,;| \x01"))
def test_delimiters(write, delimiter):
    path = write(delimiter.join(["1", "2.5", "a\\b", "", "-3", "ff", "9"]))
    schema = Schema(ALL.columns, delimiter)
    assert rows(TSV(path, schema), 1) == expected_rows(path.read_bytes(), schema)


field = st.one_of(
    st.sampled_from(["", "0", "1", "-1", "1.5", "ff", "-", "nan", "inf", "1e39", "1e400", "\r"]),
    st.integers(-(2**64), 2**64).map(str),
    st.integers(0, 2**66).map(lambda x: f"{x:x}"),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.text(st.characters(exclude_characters="\t\n\r", codec="utf-8"), max_size=5),
).map(str.encode)  # fmt: skip
good = st.tuples(
    st.sampled_from([b"0", b"1", b"1.0"]),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(lambda x: repr(x).encode()),
    field.filter(lambda text: b"\r" not in text),
    field,
    st.integers(-5, 10**6).map(lambda x: b"%d" % x) | st.just(b""),
    st.integers(0, 2**64 - 1).map(lambda x: b"%x" % x) | st.just(b""),
    st.integers(-(2**63), 2**63 - 1).map(lambda x: b"%d" % x) | st.just(b""),
).map(b"\t".join)
line_end = st.sampled_from([b"\n", b"\r\n"])
sizes = st.integers(1, 9)


def read(folder: Path, contents: list[bytes], block: int, **arguments) -> TSV:
    paths = []
    for number, content in enumerate(contents):
        paths.append(folder / f"{number}.tsv")
        paths[-1].write_bytes(content)
    lines._BLOCK = block
    return TSV(paths, ALL, **arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    block = lines._BLOCK
    yield tmp_path_factory.mktemp("tsv")
    lines._BLOCK = block


@given(
    st.lists(st.lists(good, min_size=1, max_size=8), min_size=1, max_size=3),
    line_end, st.booleans(), st.integers(1, 300), sizes, st.integers(0, 3),
)  # fmt: skip
def test_rows_come_back_in_order(folder, files, end, last, block, size, skip):
    contents = [end.join(lines) + end * last for lines in files]
    data = read(folder, contents, block)
    expected = [row for content in contents for row in expected_rows(content, ALL)]
    assert rows(data, size) == expected
    counts = [len(batch) for batch in data.batches(size)]
    assert counts == [min(size, len(expected) - at) for at in range(0, len(expected), size)]
    assert rows(data, size, skip=skip) == expected[skip * size :]


@given(
    st.lists(st.one_of(good, st.lists(field, max_size=9).map(b"\t".join)), min_size=1, max_size=8),
    line_end, st.booleans(), st.integers(1, 300), sizes,
)  # fmt: skip
def test_malformed_lines_are_skipped_or_raised(folder, lines, end, last, block, size):
    content = end.join(lines) + end * last
    assume(content)
    check_any_content(folder, content, block, size)


@settings(max_examples=300)
@given(
    st.binary(min_size=1, max_size=60)
    | st.lists(st.sampled_from([b"\t", b"\n", b"\r", b"1", b"-", b"e", b".", b"\0", b"\xff"]),
               min_size=1, max_size=60).map(b"".join),
    st.integers(1, 70), sizes,
)  # fmt: skip
@example(b"\n", 1, 1)
@example(b"\r\n\r", 1, 1)
@example(b"0\t\t\t\t\t\t\r", 3, 1)
def test_any_bytes_give_rows_or_an_error(folder, content, block, size):
    assume(not content.startswith(tuple(lines._OTHERS)))  # Parquet's is another error, and so on
    check_any_content(folder, content, block, size)


def check_any_content(folder, content, block, size):
    expected = expected_rows(content, ALL)
    kept = [row for row in expected if row is not None]
    data = read(folder, [content], block, on_error="skip")
    path = data.paths[0]
    if kept:
        assert rows(data, size) == kept
        assert data.skipped == len(expected) - len(kept)
    else:
        with pytest.raises(ValueError, match=re.escape(f"{path}: must have at least one row")):
            rows(data, size)
    if None in expected:
        before = expected.index(None)
        batches = TSV(path, ALL).batches(size)
        got = [ids for _ in range(before // size) for ids in next(batches).ids.tolist()]
        assert got == [ids for _, _, ids in expected[: len(got)]]
        with pytest.raises(ValueError, match=re.escape(f"{path}, line {before + 1}, column ")):
            next(batches)


def test_a_line_may_be_longer_than_a_block(write, small_blocks):
    path = write("1\t" + "a" * 1000 + "\n0\tb\n1\t" + "c" * 5000)
    got = rows(TSV(path, Schema((LABEL, WORD))), 2)
    assert [ids for _, _, ids in got] == [[fnv1a(b"a" * 1000)], [fnv1a(b"b")], [fnv1a(b"c" * 5000)]]


def test_a_line_without_end_is_refused(write, small_blocks, monkeypatch):
    monkeypatch.setattr(lines, "_LONGEST_LINE", 100)
    path = write("1\tx\n" * 3 + "1\t" + "x" * 500)
    with pytest.raises(ValueError, match=r"clicks.tsv, line 4: a line must have at most 100 bytes"):
        rows(TSV(path, Schema((LABEL, WORD))), 2)


# Malformed lines

FIVE = Schema((LABEL, SIZE, PRICE, CODE, ITEM))
BAD = [
    ("1\t2\t3\tff", "'item': a line must have 5 columns, got 4."),
    ("x", "'size': a line must have 5 columns, got 1."),
    ("", "'size': a line must have 5 columns, got 1."),
    ("1\t2\t3\tff\t9\t", "6: a line must have 5 columns, got 6."),
    ("1\tx\t3\tff\t9\t8\t7", "6: a line must have 5 columns, got 7."),
    ("yes\t2\t3\tff\t9", "'label': the label must be 0 or 1, got 'yes'."),
    ("\t2\t3\tff\t9", "'label': the label must be 0 or 1, got ''."),
    ("2\t2\t3\tff\t9", "'label': the label must be 0 or 1, got '2'."),
    ("-1\t2\t3\tff\t9", "'label': the label must be 0 or 1, got '-1'."),
    ("0.5\t2\t3\tff\t9", "'label': the label must be 0 or 1, got '0.5'."),
    ("nan\t2\t3\tff\t9", "'label': the label must be 0 or 1, got 'nan'."),
    ("1\tx\t3\tff\t9", "'size': must be a finite number, got 'x'."),
    ("1\t2x\t3\tff\t9", "'size': must be a finite number, got '2x'."),
    ("1\t 2\t3\tff\t9", "'size': must be a finite number, got ' 2'."),
    ("1\tNaN\t3\tff\t9", "'size': must be a finite number, got 'NaN'."),
    ("1\tinf\t3\tff\t9", "'size': must be a finite number, got 'inf'."),
    ("1\t1e400\t3\tff\t9", "'size': must be a finite number, got '1e400'."),
    ("1\t2\t-1e39\tff\t9", "'price': must be a finite number, got '-1e39'."),
    ("1\t2\t1_000\tff\t9", "'price': must be a finite number, got '1_000'."),
    ("1\t2\t3\tfg\t9", "'code': must be 1 to 16 hex digits, got 'fg'."),
    ("1\t2\t3\t0xff\t9", "'code': must be 1 to 16 hex digits, got '0xff'."),
    ("1\t2\t3\t-f\t9", "'code': must be 1 to 16 hex digits, got '-f'."),
    ("1\t2\t3\t00000000000000001\t9",
     "'code': must be 1 to 16 hex digits, got '00000000000000001'."),
    ("1\t2\t3\tff\t9.0", "'item': must be an integer of 64 bits, got '9.0'."),
    ("1\t2\t3\tff\t-", "'item': must be an integer of 64 bits, got '-'."),
    ("1\t2\t3\tff\t9223372036854775808",
     "'item': must be an integer of 64 bits, got '9223372036854775808'."),
    ("1\t2\t3\tff\t-9223372036854775809",
     "'item': must be an integer of 64 bits, got '-9223372036854775809'."),
    ("1\t2\t3\tff\t18446744073709551617",
     "'item': must be an integer of 64 bits, got '18446744073709551617'."),
    ("1\t\0\t3\tff\t9", "'size': must be a finite number, got '\\x00'."),
    ("1\t" + "x" * 99 + "\t3\tff\t9", f"'size': must be a finite number, got '{'x' * 60}...'."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "sentence", "end"),
    [(*case, end) for case in BAD for end in ("\n", "\r\n", "") if case[0] + end],
)
def test_malformed(write, small_blocks, line, sentence, end):
    path = write("1\t2\t3\tff\t9" + (end or "\n") + line + end)
    with pytest.raises(ValueError) as caught:
        rows(TSV(path, FIVE), 9)
    assert str(caught.value) == f"{path}, line 2, column {sentence}"


def test_bytes_that_are_no_text_are_shown(write):
    with pytest.raises(ValueError, match=re.escape(r"got '\\xff\\xfe'.")):
        rows(TSV(write(b"1\t\xff\xfe\n"), Schema((LABEL, CODE))), 1)


def test_a_file_without_the_delimiter_tells_of_schemas(write) -> None:
    path = write("1,a\n0,b\n")
    with pytest.raises(ValueError) as caught:
        rows(TSV(path, Schema((LABEL, CODE))), 9)
    assert str(caught.value) == (
        f"{path}, line 1, column 'code': a line must have 2 columns, got 1. The schema's delimiter "
        f"is '\\t'; `cupyrec data inspect '{path}' --out schema.toml` writes a schema by the file."
    )


@pytest.mark.parametrize("size", [1, 3, 100])
def test_line_numbers_after_skipped_lines_blocks_and_files(write, monkeypatch, caplog, size):
    monkeypatch.setattr(lines, "_BLOCK", 11)
    first = write("1\ta\n" + "bad\n" + "0\tb\n" * 20 + "1\n" + "1\tc\n", "first.tsv")
    second = write("1\ta\nx\ta\n", "second.tsv")
    data = TSV([first, second], Schema((LABEL, CODE)), on_error="skip")
    with caplog.at_level(logging.WARNING, "cupyrec"):
        for _ in range(2):
            caplog.clear()
            assert len(rows(data, size)) == 23
            assert data.skipped == 3
            assert [record.getMessage() for record in caplog.records] == [
                f"skipped 3 malformed lines, the first: {first}, line 2, column 'code': "
                f"a line must have 2 columns, got 1."
            ]
    with pytest.raises(ValueError, match=re.escape("second.tsv, line 2, column 'label'")):
        rows(TSV(second, Schema((LABEL, CODE))), size)
    with pytest.raises(ValueError, match=re.escape("first.tsv, line 23, column 'code'")):
        rows(
            TSV(write(first.read_bytes().replace(b"bad", b"1\ta"), "first.tsv"), data.schema), size
        )


def test_bad_arguments(write):
    path = write("1\ta\n")
    with pytest.raises(ValueError, match="TSV: 'on_error' must be one of raise, skip, got 'warn'"):
        TSV(path, Schema((LABEL, CODE)), on_error="warn")
    data = TSV(path, Schema((LABEL, CODE)))
    with pytest.raises(ValueError, match=r"TSV.batches: 'batch_size' must be at least 1, got 0"):
        data.batches(0)
    with pytest.raises(ValueError, match=r"TSV.batches: 'skip' must be at least 0, got -1"):
        data.batches(1, skip=-1)


def test_batches_stay_valid(write):
    data = TSV(write("".join(f"1\t{i:x}\n" for i in range(20))), Schema((LABEL, CODE)))
    batches = list(data.batches(3))
    assert np.concatenate([batch.ids for batch in batches]).ravel().tolist() == list(range(20))


@pytest.mark.skipif(not os.environ.get("CUPYREC_DATA"), reason="CUPYREC_DATA is not set")
def test_criteo_log():
    path = Path(os.environ["CUPYREC_DATA"], "criteo", "valid.tsv.gz")
    got = rows(TSV(path, criteo_schema()), 1000)
    assert got == expected_rows(gzip.decompress(path.read_bytes()), criteo_schema())
    assert len(got) == 9795

"""Text files as whole lines."""

import gzip

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import sentence
from pyarrow import parquet

from cupyrec.data import lines
from cupyrec.data.lines import Lines, batched, read_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    block = lines._BLOCK
    yield tmp_path_factory.mktemp("lines")
    lines._BLOCK = block


def texts(some: Lines) -> list[bytes]:
    return [some.part(i, i + 1).text.tobytes() for i in range(len(some))]


def expected_lines(content: bytes) -> list[bytes]:
    parts = (content + b"\n" * (content[-1:] != b"\n")).replace(b"\r\n", b"\n").split(b"\n")
    return [part + b"\n" for part in parts[:-1]]


contents = st.lists(
    st.sampled_from([b"a", b"bc\t", b"\n", b"\r", b"\r\n"]), min_size=1, max_size=40
)


@settings(max_examples=200)
@given(contents.map(b"".join), st.integers(1, 50))
def test_blocks_hold_all_lines(folder, content, block):
    path, lines._BLOCK = folder / "a.tsv", block
    path.write_bytes(content)
    expected, got = expected_lines(content), []
    for some in read_lines(path):
        assert (some.path, some.number) == (path, len(got) + 1)
        assert some.header == expected[0][:-1]
        assert some.text.tobytes() == b"".join(texts(some))
        got += texts(some)
    assert got == expected


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 4)
)  # fmt: skip
def test_batches_have_so_many_lines(lengths, size, skip):
    text = np.frombuffer(b"".join(b"%06d\n" % i for i in range(100)), np.uint8)

    def blocks():  # each of which is lost when the next one is asked for
        for number, length in enumerate(lengths):
            block, first = text.copy(), sum(lengths[:number])
            borders = np.arange(first, first + length + 1) * 7
            yield Lines("a", b"", first + 1, block, borders)
            block[:] = 0

    whole = [b"%06d\n" % i for i in range(sum(lengths))]
    got = list(batched(blocks(), size, skip=skip))
    assert [sum(map(len, batch)) for batch in got] == [
        min(size, len(whole) - at) for at in range(skip * size, len(whole), size)
    ]
    assert [text for batch in got for some in batch for text in texts(some)] == whole[skip * size :]
    for some in (some for batch in got for some in batch):
        assert int(some.text.tobytes()[:6]) == some.number - 1
        assert len(some.block) == 7 * len(some)  # and no more


def test_parts_end_where_the_lines_do():
    text = np.frombuffer(b"a\n\nbc\n", np.uint8)
    some = Lines("a", b"a", 5, text, np.array([0, 2, 3, 6]))
    assert texts(some.part(1)) == texts(some.part(1, 9)) == [b"\n", b"bc\n"]
    assert some.part(2).number == 7
    for none in (some.part(3), some.part(7, 9), some.part(2, 1), some.part(0, 0)):
        assert len(none) == none.text.size == 0


def test_a_parquet_file_is_no_text(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"id": np.arange(3)}), path)
    text = f"{path}: must be text, one row a line, got a Parquet file."
    with pytest.raises(ValueError, match=sentence(text)):
        list(read_lines(path))


@pytest.mark.parametrize(("codec", "told"), [
    ("gzip", "gzip, whose name must end in .gz"),
    ("zstd", "Zstandard, whose name must end in .zst"),
])  # fmt: skip
def test_compressed_text_is_named_so(tmp_path, codec, told):
    path = tmp_path / "a.csv"
    path.write_bytes(pa.compress(b"1,2\n" * 9, codec, asbytes=True))
    text = f"{path}: must be text, one row a line, got {told}."
    with pytest.raises(ValueError, match=sentence(text)):
        list(read_lines(path))


def test_a_file_without_lines_is_refused(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match=r"a.gz: must have at least one row, got an empty file"):
        list(read_lines(path))

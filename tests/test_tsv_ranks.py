"""The reader as one of several ranks: the same batches, of which it reads its rows alone."""

import logging
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tsv import CODE, LABEL, SIZE, folder, good, line_end, read  # noqa: F401

from cupyrec.data import TSV, Schema, fields, lines


def check_ranks(data: TSV, size: int, ranks: int, skip: int) -> None:
    """Against the rows that one rank reads, cut by the rule of the documentation."""
    whole = list(data.batches(size, skip=skip))
    for rank in range(ranks):
        got = list(data.of_rank(rank, ranks).batches(size, skip=skip))
        assert len(got) == len(whole)
        for part, batch in zip(got, whole, strict=True):
            first, stop = len(batch) * rank // ranks, len(batch) * (rank + 1) // ranks
            assert (part.first, len(part), part.total) == (first, stop - first, len(batch))
            for name in ("dense", "ids", "labels"):
                expected = getattr(batch, name)[first:stop]
                np.testing.assert_array_equal(getattr(part, name), expected)
                assert getattr(part, name).dtype == expected.dtype


@given(
    st.lists(st.lists(good, min_size=1, max_size=8), min_size=1, max_size=3),
    line_end, st.booleans(), st.integers(1, 300), st.integers(1, 9), st.integers(0, 3),
    st.integers(1, 12),
)  # fmt: skip
def test_ranks_have_the_rows_of_one(folder, files, end, last, block, size, skip, ranks):  # noqa: F811
    contents = [end.join(some) + end * last for some in files]
    check_ranks(read(folder, contents, block), size, ranks, skip)


@given(
    st.lists(good | st.sampled_from([b"", b"bad", b"1\t2"]), min_size=1, max_size=20),
    st.integers(1, 300), st.integers(1, 9), st.integers(0, 3), st.integers(1, 5),
)  # fmt: skip
def test_skipped_lines_are_no_rows_of_any_rank(folder, some, block, size, skip, ranks):  # noqa: F811
    content = b"\n".join([b"1\t2\t\t\t\t\t", *some, b""])
    check_ranks(read(folder, [content], block, on_error="skip"), size, ranks, skip)


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_BLOCK", 1000)
    path = tmp_path / "log.tsv"
    path.write_text("".join(f"{i % 2}\t{i}\t{i:x}\n" for i in range(1003)))
    return path


SCHEMA = Schema((LABEL, SIZE, CODE))


def test_a_rank_reads_its_rows_alone(log, monkeypatch):
    read, parse = [], fields.parse

    def note(data, *arguments):
        read.append(data.tobytes().count(b"\n"))
        return parse(data, *arguments)

    monkeypatch.setattr(fields, "parse", note)
    for ranks in (1, 4, 512):
        of_ranks = []
        for rank in range(ranks):
            read.clear()
            count = sum(len(b) for b in TSV(log, SCHEMA).of_rank(rank, ranks).batches(100))
            assert sum(read) == count
            of_ranks.append(count)
        assert sum(of_ranks) == 1003
        assert max(of_ranks) <= 11 * -(-100 // ranks)
    read.clear()
    assert sum(len(b) for b in TSV(log, SCHEMA).batches(100, skip=9)) == sum(read) == 103


def test_the_rank_that_has_a_malformed_line_tells(log, caplog):
    content = log.read_text().split("\n")
    content[777] = "x\t1\tff"  # row 77 of batch 7: that of rank 3
    log.write_text("\n".join(content))
    data = TSV(log, SCHEMA)
    text = f"{log}, line 778, column 'label': the label must be 0 or 1, got 'x'."
    for rank in range(4):
        batches = data.of_rank(rank, 4).batches(100)
        assert [len(next(batches)) for _ in range(7)] == [25] * 7
        if rank == 3:
            with pytest.raises(ValueError, match=re.escape(text)):
                next(batches)
        else:
            assert [len(b) for b in batches] == [25] * 3 + [min(rank, 1)]
    with caplog.at_level(logging.WARNING, "cupyrec"):
        part = TSV(log, SCHEMA, on_error="skip").of_rank(0, 4)
        assert len(list(part.batches(100))) == 11
    assert part.skipped == 1 and text in caplog.text


def test_a_rank_is_one_of_so_many(log):
    data = TSV(log, SCHEMA)
    assert len(next(data.of_rank(1, 4).of_rank(0, 1).batches(7))) == 7
    for rank, ranks in [(2, 2), (-1, 2), (0, 0)]:
        with pytest.raises(ValueError, match=r"TSV.of_rank: 'rank"):
            data.of_rank(rank, ranks)

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyrec.embedding import host_rows
from cupyrec.embedding.host_rows import HostRows


def lines_of(rows, salt=0):
    return (np.asarray(rows)[:, None] * 10 + np.arange(4) + salt).astype(np.uint32)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(host_rows, "_CHUNK_BYTES", 64)  # 4 rows


@given(st.lists(st.tuples(st.sampled_from(["write", "truncate"]), st.integers(0, 40)), max_size=12))
def test_against_a_dict(operations):
    rows, known = HostRows(4), {}
    for number, (what, n) in enumerate(operations):
        if what == "write":  # every other row up to n, and new ones without holes
            some = np.arange(n)[number % 2 :: 2] if n <= len(known) else np.arange(n)
            rows.write(some, lines_of(some, number))
            known |= dict(zip(some.tolist(), lines_of(some, number).tolist(), strict=True))
        else:
            rows.truncate(n)
            known = {row: line for row, line in known.items() if row < n}
        assert len(rows) == len(known)
        out = np.empty((len(known), 4), np.uint32)
        rows.read(np.arange(len(known))[::-1].copy(), out)
        assert out[::-1].tolist() == [known[row] for row in range(len(known))]
    assert rows.nbytes == len(known) * 16


@pytest.mark.usefixtures("small_chunks")
def test_growth_moves_nothing_and_truncation_lets_chunks_go():
    rows, seen = HostRows(4), []
    for first in range(0, 40, 5):
        rows.write(np.arange(first, first + 5), lines_of(range(first, first + 5)))
        seen.append(rows._memory.chunks.tolist())
    assert all(b[: len(a)] == a for a, b in zip(seen, seen[1:], strict=False))
    rows.truncate(9)
    assert len(rows._chunks) == len(rows._memory.chunks) == 3
    got = list(rows.records())
    assert [r.tolist() for r, _ in got] == [list(range(9))]
    np.testing.assert_array_equal(got[0][1], lines_of(range(9)))


@pytest.mark.usefixtures("small_chunks")
def test_a_copy_has_rows_of_its_own():
    rows = HostRows(4)
    rows.write(np.arange(9), lines_of(range(9)))
    other = copy.deepcopy(rows)
    rows.write(np.arange(9), lines_of(range(9), 5))
    out = np.empty((9, 4), np.uint32)
    other.read(np.arange(9), out)
    np.testing.assert_array_equal(out, lines_of(range(9)))


def test_rows_that_are_not_there_are_refused():
    rows = HostRows(4)
    rows.write(np.arange(3), lines_of(range(3)))
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=r"HostRows\.read: rows must lie in \[0, 3\)"):
            rows.read(np.array([0, wrong]), np.empty((2, 4), np.uint32))


def test_words_must_be_positive():
    with pytest.raises(ValueError, match="HostRows: 'words'"):
        HostRows(0)

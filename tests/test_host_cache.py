import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cupyrec.embedding.host_cache import HostCache
from cupyrec.embedding.host_rows import HostRows

operation = st.tuples(st.sampled_from(["write", "read", "truncate", "commit", "records"]),
                      st.integers(0, 120), st.integers(1, 3))  # fmt: skip


def lines_of(rows, salt=0):
    return (np.asarray(rows)[:, None] * 10 + np.arange(8) + salt).astype(np.uint32)


@given(st.lists(operation, max_size=14))
def test_against_a_dict(operations):
    below = HostRows(8)
    rows, known = HostCache(below, 8, 1), {}
    for number, (what, n, step) in enumerate(operations):
        if what == "write":
            some = np.arange(n) if n > len(known) else np.arange(0, n, step)
            rows.write(some, lines_of(some, number))
            known |= dict(zip(some.tolist(), lines_of(some, number).tolist(), strict=True))
        elif what == "truncate":
            rows.truncate(n)
            known = {row: line for row, line in known.items() if row < n}
        elif what == "commit":
            rows.commit({"number": number})
            assert below.meta == rows.meta == {"number": number}
            assert dict(_all(below)) == known
        elif what == "records":
            assert dict(_all(rows)) == known
        some = np.arange(0, len(known), step)[::-1].copy()
        out = np.empty((some.size, 8), np.uint32)
        rows.read(some, out)
        assert out.tolist() == [known[row] for row in some.tolist()]
        assert len(rows) == len(known)


def _all(rows):
    for numbers, lines in rows.records():
        yield from zip(numbers.tolist(), lines.tolist(), strict=True)


def test_what_is_asked_for_again_comes_from_memory():
    below = HostRows(8)
    below.write(np.arange(100), lines_of(range(100)))
    rows, out = HostCache(below, 8, 200), np.empty((50, 8), np.uint32)
    rows.read(np.arange(50), out)
    below.write(np.arange(100), lines_of(range(100), 5))  # which it doesn't hear of
    rows.read(np.arange(50), out)
    np.testing.assert_array_equal(out, lines_of(range(50)))


def test_what_was_there_before_is_found():
    below = HostRows(8)
    below.write(np.arange(100), lines_of(range(100)))
    rows, out = HostCache(below, 8, 32), np.empty((100, 8), np.uint32)
    assert len(rows) == 100
    rows.read(np.arange(100), out)
    np.testing.assert_array_equal(out, lines_of(range(100)))

import mmap
import re

import numpy as np
import oracle
import pytest

from cupyrec.ops.embedding_rows import RowMemory, gather_rows, row_at, write_rows


def chunked(rows: np.ndarray, k: int) -> tuple[RowMemory, list[np.ndarray]]:
    """(memory, chunks) of (N, stride) rows, in chunks of 2^k rows; the rest of the last is NaN."""
    size = 1 << k
    chunks = []
    for first in range(0, len(rows), size):
        chunks.append(np.full((size, rows.shape[1]), np.nan, np.float32))
        chunks[-1][: len(rows) - first] = rows[first : first + size]
    addresses = np.array([chunk.ctypes.data for chunk in chunks], np.uint64)
    return RowMemory(addresses, k, rows.shape[1]), chunks


def unchunked(chunks: list[np.ndarray], n: int) -> np.ndarray:
    return np.concatenate(chunks)[:n]


@pytest.mark.parametrize("width", [1, 3, 4, 10, 128, 1025])
@pytest.mark.parametrize(("n", "k"), [(1, 0), (17, 2), (127, 7), (1025, 3)])
def test_gather(width, n, k):
    stride = (width + 7) // 4 * 4
    rows = oracle.normals((n, stride))
    memory, chunks = chunked(rows, k)
    unseen = oracle.normals((5, width), seed=1)
    generator = np.random.default_rng(0)
    unique = generator.permutation(np.arange(-5, n))[: n // 2 + 3]
    inverse = generator.integers(len(unique), size=2 * n + 600)
    out = np.full((len(inverse), width), np.nan, np.float32)
    gather_rows(memory, unique, inverse, unseen, out)
    for i, u in enumerate(inverse):
        row = unique[u]
        expected = rows[row, :width] if row >= 0 else unseen[-1 - row]
        np.testing.assert_array_equal(out[i], expected)
    np.testing.assert_array_equal(unchunked(chunks, n), rows)


@pytest.mark.parametrize("n", [0, 1, 3, 17, 127, 1025])
@pytest.mark.parametrize(("width", "stride"), [(1, 4), (4, 4), (10, 12), (130, 392)])
def test_write_fills_its_rows_and_nothing_else(n, width, stride):
    before = oracle.normals((n + 20, stride))
    memory, chunks = chunked(before, 3)
    values = oracle.normals((n, width), seed=1)
    write_rows(memory, 7, values)
    after = unchunked(chunks, n + 20)
    np.testing.assert_array_equal(after[7 : 7 + n, :width], values)
    assert not after[7 : 7 + n, width:].any()
    np.testing.assert_array_equal(after[:7], before[:7])
    np.testing.assert_array_equal(after[7 + n :], before[7 + n :])


def test_gather_of_nothing():
    memory, _ = chunked(oracle.normals((4, 4)), 1)
    out = np.empty((0, 3), np.float32)
    none = np.empty(0, np.int64)
    gather_rows(memory, none, none, np.empty((0, 3), np.float32), out)
    only = np.array([-1]), np.zeros(2, np.int64), np.array([[1, 2, 3]], np.float32)
    out = np.empty((2, 3), np.float32)
    gather_rows(RowMemory(np.empty(0, np.uint64), 4, 4), *only, out)
    np.testing.assert_array_equal(out, [[1, 2, 3]] * 2)


GATHER = dict(
    rows=np.array([0, -1]), inverse=np.array([0, 1, 0]), unseen=np.zeros((1, 3), np.float32),
    out=np.zeros((3, 3), np.float32),
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(rows=np.zeros(2)), TypeError, "'rows' must be int64, got float64."),
        (dict(inverse=np.zeros(3, np.int32)), TypeError, "'inverse' must be int64, got int32."),
        (dict(unseen=np.zeros((1, 3))), TypeError, "'unseen' must be float32, got float64."),
        (dict(out=np.zeros((3, 3))), TypeError, "'out' must be float32, got float64."),
        (dict(rows=np.zeros((2, 1), int)), ValueError,
         "'rows' must have axes (U), got shape (2, 1)."),
        (dict(inverse=np.zeros(4, int)), ValueError,
         "'out' must have N = 4 like 'inverse', got shape (3, 3)."),
        (dict(unseen=np.zeros((1, 2), np.float32)), ValueError,
         "'unseen' must have D = 3 like 'out', got shape (1, 2)."),
        (dict(unseen=np.zeros((1, 5), np.float32), out=np.zeros((3, 5), np.float32)), ValueError,
         "'out' must have 1 * D <= 4, the floats of a row, got shape (3, 5)."),
    ],
)  # fmt: skip
def test_gather_refuses(wrong, error, text):
    memory, _ = chunked(oracle.normals((4, 4)), 1)
    with pytest.raises(error, match=oracle.sentence(f"gather_rows: {text}")):
        gather_rows(memory, **GATHER | wrong)


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        (np.zeros((1, 3)), TypeError, "'values' must be float32, got float64."),
        (np.zeros(3, np.float32), ValueError, "'values' must have axes (N, D), got shape (3,)."),
        (np.zeros((1, 5), np.float32), ValueError,
         "'values' must have 1 * D <= 4, the floats of a row, got shape (1, 5)."),
    ],
)  # fmt: skip
def test_write_refuses(values, error, text):
    before = oracle.normals((4, 4))
    memory, chunks = chunked(before, 1)
    with pytest.raises(error, match=oracle.sentence(f"write_rows: {text}")):
        write_rows(memory, 0, values)
    np.testing.assert_array_equal(unchunked(chunks, 4), before)


def test_addresses_are_uint64():
    memory, _ = chunked(oracle.normals((4, 4)), 1)
    memory = memory._replace(chunks=memory.chunks.astype(np.int64))
    with pytest.raises(TypeError, match=r"write_rows: 'memory.chunks' must be uint64, got int64."):
        write_rows(memory, 0, np.zeros((1, 4), np.float32))


def check_update_refuses(update, parts):
    """An update of rows that are [w, …] in `parts` parts refuses what it cannot run on."""
    before = oracle.normals((4, 12))
    memory, chunks = chunked(before, 1)
    rows, g = np.arange(2), np.zeros((2, 12 // parts), np.float32)
    for call, error, text in [
        (lambda: update(memory, rows.astype(np.int32), g), TypeError, "'rows' must be int64"),
        (lambda: update(memory, rows, g.astype(float)), TypeError, "'g' must be float32"),
        (lambda: update(memory, np.arange(3), g), ValueError, "'g' must have U = 3 like 'rows'"),
        (lambda: update(memory, rows, g[0]), ValueError, "'g' must have axes (U, D)"),
        (
            lambda: update(memory, rows, np.ones((2, 12 // parts + 1), np.float32)),
            ValueError, f"'g' must have {parts} * D <= 12, the floats of a row",
        ),
    ]:  # fmt: skip
        with pytest.raises(error, match=rf"_rows: {re.escape(text)}.*\.$"):
            call()
    np.testing.assert_array_equal(unchunked(chunks, 4), before)
    update(memory, rows, g)  # the widest


def test_offsets_beyond_4_gib():
    """Two chunks of 8 GiB of address space, of which a few pages are touched."""
    k, stride = 24, 128
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, named from 3.13 on
    try:
        maps = [mmap.mmap(-1, (4 * stride) << k, flags) for _ in range(2)]
    except OSError as error:
        pytest.skip(f"no 16 GiB of address space: {error}")
    chunks = [np.frombuffer(m, np.float32).reshape(-1, stride) for m in maps]
    memory = RowMemory(np.array([c.ctypes.data for c in chunks], np.uint64), k, stride)
    rows = np.array([0, 2**22 - 1, 2**22, 2**23, 2**24 - 1, 2**24, 2**24 + 2**23 + 5, 2**25 - 1])
    for row in rows:
        write_rows(memory, int(row), np.full((1, 3), row, np.float32))
        np.testing.assert_array_equal(chunks[row >> k][row % 2**k, :4], [*[np.float32(row)] * 3, 0])
    out = np.empty((len(rows), 3), np.float32)
    gather_rows(memory, rows, np.arange(len(rows)), np.empty((0, 3), np.float32), out)
    np.testing.assert_array_equal(out[:, 1], rows.astype(np.float32))


def test_row_at_is_a_view_of_the_whole_row():
    rows = oracle.integers((5, 4), 0, 9)
    memory, chunks = chunked(rows, 1)
    row = row_at(memory, 3)
    np.testing.assert_array_equal(row, rows[3])
    row[2] = 77
    assert chunks[1][1, 2] == 77


def test_same_bits():
    rows = oracle.normals((1025, 12))
    unique = np.random.default_rng(0).permutation(1025)
    inverse = np.random.default_rng(1).integers(1025, size=5000)

    def call():
        memory, chunks = chunked(rows, 4)
        write_rows(memory, 100, oracle.normals((900, 10), seed=2))
        out = np.empty((5000, 10), np.float32)
        gather_rows(memory, unique, inverse, np.empty((0, 10), np.float32), out)
        return out, unchunked(chunks, 1025)

    oracle.check_same_bits(call)

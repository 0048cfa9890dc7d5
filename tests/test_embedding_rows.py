import mmap

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

import mmap
import re

import numpy as np
import oracle
import pytest

from cupyrec.ops.embedding_rows import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Rounding,
    RowMemory,
    gather_rows,
    vector_words,
    write_rows,
)  # fmt: skip

NO_STATE = np.empty((1, 0), np.float32)


def chunked(rows: np.ndarray, k: int, value: int = FLOAT32) -> tuple[RowMemory, list[np.ndarray]]:
    """(memory, chunks) of (N, stride) rows, in chunks of 2^k rows; the rest of the last is NaN."""
    size = 1 << k
    chunks = []
    for first in range(0, len(rows), size):
        chunks.append(np.full((size, rows.shape[1]), np.nan, np.float32))
        chunks[-1][: len(rows) - first] = rows[first : first + size]
    addresses = np.array([chunk.ctypes.data for chunk in chunks], np.uint64)
    return RowMemory(addresses, k, rows.shape[1], value), chunks


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


def keys(n: int) -> Rounding:
    """Awkward keys for n rows."""
    ids = np.random.default_rng(5).integers(-(2**63), 2**63, n)
    tables = np.random.default_rng(6).integers(2**32, size=n, dtype=np.uint32)
    return Rounding(tables, ids, 2**64 - 1, 3)


def written(vectors, states, width, stride, value, rounding):
    """(N, stride) words that rows must have, by the oracle's rounding."""
    rows = np.zeros((len(vectors), stride), np.float32)
    if value == FLOAT32:
        rows[:, :width] = vectors
    else:
        rows.view(np.uint16)[:, :width] = oracle.round_rows(vectors, *rounding, value)
    begin = vector_words(width, value)
    rows[:, begin : begin + states.shape[1]] = states
    return rows


@pytest.mark.parametrize("value", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize(
    ("n", "width", "stride", "state"),
    [(0, 1, 4, 0), (1025, 1, 4, 0), (17, 4, 8, 4), (600, 9, 12, 3), (3, 130, 392, 1)],
)
def test_write_fills_its_rows_and_nothing_else(value, n, width, stride, state):
    before = oracle.normals((n + 20, stride))
    memory, chunks = chunked(before, 3, value)
    vectors, states = oracle.normals((n, width), seed=1), oracle.normals((n, state), seed=2)
    rounding = None if value == FLOAT32 else keys(n)
    for given in (states, np.full((1, state), 7, np.float32)):
        write_rows(memory, 7, vectors, given, rounding)
        after = unchunked(chunks, n + 20)
        expected = written(vectors, given, width, stride, value, rounding)
        assert after[7 : 7 + n].tobytes() == expected.tobytes()
        np.testing.assert_array_equal(after[:7], before[:7])
        np.testing.assert_array_equal(after[7 + n :], before[7 + n :])


@pytest.mark.parametrize(("value", "dtype"), [(FLOAT16, np.float16), (BFLOAT16, np.uint16)])
@pytest.mark.parametrize("width", [1, 4, 9, 130])
def test_gather_widens(width, value, dtype):
    """By NumPy's float16, and bfloat16 as the upper half of a float32."""
    codes = np.random.default_rng(0).integers(2**16, size=(20, width), dtype=np.uint16)
    rows = np.zeros((20, (width + 7) // 8 * 4), np.float32)
    rows.view(np.uint16)[:, :width] = codes
    memory, _ = chunked(rows, 2, value)
    unseen = oracle.normals((3, width))
    out = np.empty((6, width), np.float32)
    gather_rows(memory, np.array([19, -3, 0, 7]), np.array([0, 1, 2, 3, 2, 1]), unseen, out)
    if value == FLOAT16:
        wide = codes.view(dtype).astype(np.float32)
    else:
        wide = (codes.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(out, [wide[19], unseen[2], wide[0], wide[7], wide[0], unseen[2]])


def test_int32_state_keeps_its_bits():
    memory, chunks = chunked(oracle.normals((4, 4)), 1)
    last = np.array([[-1], [2**31 - 1], [0x7F800001], [1]], np.int32)
    write_rows(memory, 0, oracle.normals((4, 2)), last.view(np.float32))
    np.testing.assert_array_equal(unchunked(chunks, 4).view(np.int32)[:, 2:3], last)


def test_gather_of_padding():
    memory, _ = chunked(np.full((4, 4), np.nan, np.float32), 1)
    out = np.full((600, 3), np.nan, np.float32)
    unseen = oracle.normals((1, 3))
    gather_rows(memory, np.array([-1, 0]), np.resize([0, -1, -1], 600), unseen, out)
    np.testing.assert_array_equal(out[::3], np.repeat(unseen, 200, axis=0))
    assert not out[1::3].any() and not out[2::3].any()


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
        (dict(out=np.zeros((3, 3))), TypeError,
         "'out' must be float32 or float16 or bfloat16, got float64."),
        (dict(rows=np.zeros((2, 1), int)), ValueError,
         "'rows' must have axes (U), got shape (2, 1)."),
        (dict(inverse=np.zeros(4, int)), ValueError,
         "'out' must have N = 4 like 'inverse', got shape (3, 3)."),
        (dict(unseen=np.zeros((1, 2), np.float32)), ValueError,
         "'unseen' must have D = 3 like 'out', got shape (1, 2)."),
        (dict(unseen=np.zeros((1, 5), np.float32), out=np.zeros((3, 5), np.float32)), ValueError,
         "rows must have 5 words for 'out' (3, 5) and the state, got a stride of 4."),
    ],
)  # fmt: skip
def test_gather_refuses(wrong, error, text):
    memory, _ = chunked(oracle.normals((4, 4)), 1)
    with pytest.raises(error, match=oracle.sentence(f"gather_rows: {text}")):
        gather_rows(memory, **GATHER | wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(vectors=np.zeros((2, 3))), TypeError, "'vectors' must be float32, got float64."),
        (dict(vectors=np.zeros(3, np.float32)), ValueError,
         "'vectors' must have axes (N, D), got shape (3,)."),
        (dict(states=np.zeros((2, 1), np.int32)), TypeError,
         "'states' must be float32, got int32."),
        (dict(states=np.zeros(1, np.float32)), ValueError,
         "'states' must have axes (N, S), got shape (1,)."),
        (dict(states=np.zeros((3, 1), np.float32)), ValueError,
         "'states' must have N = 1 or 2, got 3."),
        (dict(states=np.zeros((1, 2), np.float32)), ValueError,
         "rows must have 5 words for 'vectors' (2, 3) and the state, got a stride of 4."),
        (dict(rounding=keys(2)), ValueError,
         "'rounding' must be None for rows of float32, got one of step 3."),
    ],
)  # fmt: skip
def test_write_refuses(wrong, error, text):
    before = oracle.normals((4, 4))
    memory, chunks = chunked(before, 1)
    good = dict(vectors=np.zeros((2, 3), np.float32), states=np.zeros((1, 1), np.float32))
    with pytest.raises(error, match=oracle.sentence(f"write_rows: {text}")):
        write_rows(memory, 0, **good | wrong)
    np.testing.assert_array_equal(unchunked(chunks, 4), before)


def test_addresses_are_uint64():
    memory, _ = chunked(oracle.normals((4, 4)), 1)
    memory = memory._replace(chunks=memory.chunks.astype(np.int64))
    with pytest.raises(TypeError, match=r"write_rows: 'memory.chunks' must be uint64, got int64."):
        write_rows(memory, 0, np.zeros((1, 4), np.float32), NO_STATE)


def check_update_refuses(update, parts, words=0):
    """An update of rows that are [w, …] in `parts` parts, and `words`, refuses what it can't do."""
    before = oracle.normals((4, 12))
    memory, chunks = chunked(before, 1)
    widest = (12 - words) // parts
    needed = parts * (widest + 1) + words
    rows, g = np.arange(2), np.zeros((2, widest), np.float32)
    for call, error, text in [
        (lambda: update(memory, rows.astype(np.int32), g), TypeError, "'rows' must be int64"),
        (lambda: update(memory, rows, g.astype(float)), TypeError, "'g' must be float32"),
        (lambda: update(memory, np.arange(3), g), ValueError, "'g' must have U = 3 like 'rows'"),
        (lambda: update(memory, rows, g[0]), ValueError, "'g' must have axes (U, D)"),
        (
            lambda: update(memory, rows, np.ones((2, widest + 1), np.float32)),
            ValueError, f"rows must have {needed} words for 'g' {(2, widest + 1)} and the",
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
        write_rows(memory, int(row), np.full((1, 3), row, np.float32), NO_STATE)
        np.testing.assert_array_equal(chunks[row >> k][row % 2**k, :4], [*[np.float32(row)] * 3, 0])
    out = np.empty((len(rows), 3), np.float32)
    gather_rows(memory, rows, np.arange(len(rows)), np.empty((0, 3), np.float32), out)
    np.testing.assert_array_equal(out[:, 1], rows.astype(np.float32))


def test_same_bits():
    rows = oracle.normals((1025, 12))
    unique = np.random.default_rng(0).permutation(1025)
    inverse = np.random.default_rng(1).integers(1025, size=5000)

    def call():
        memory, chunks = chunked(rows, 4)
        write_rows(memory, 100, oracle.normals((900, 10), seed=2), NO_STATE)
        out = np.empty((5000, 10), np.float32)
        gather_rows(memory, unique, inverse, np.empty((0, 10), np.float32), out)
        return out, unchunked(chunks, 1025)

    oracle.check_same_bits(call)

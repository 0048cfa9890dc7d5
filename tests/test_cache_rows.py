import numpy as np
import oracle
import pytest
from test_embedding_rows import chunked, unchunked

from cupyrec.ops.cache_rows import fill_rows, take_rows
from cupyrec.ops.cache_sets import CacheSets
from cupyrec.ops.row_memory import RowMemory

SHAPES = [(1, 4, 0), (40, 12, 3), (3000, 132, 6)]  # keys, stride, k


def words(shape, seed=0):
    """Any bits, NaNs among them."""
    return np.random.default_rng(seed).integers(2**32, size=shape, dtype=np.uint32)


def filled(n, seed=0):
    """(cache, slots of n keys or -1, tables, ids, counts)"""
    generator = np.random.default_rng(seed)
    cache, ids = CacheSets(n), generator.integers(-(2**63), 2**63, n)
    tables, counts = words(n, seed), generator.integers(2**32, size=n)
    slots = cache.plan(tables, ids, 1, 1).slots
    cache.put(slots, tables, ids, np.arange(n), counts, 1)
    return cache, slots, tables, ids, counts


def payloads_of(rows, tables, ids, counts):
    """Row, low and high word of the id, table, count."""
    keys = [ids % 2**32, ids // 2**32 % 2**32, tables, counts]
    return np.column_stack([rows, *(np.uint32(column) for column in keys)])


@pytest.mark.parametrize(("n", "stride", "k"), SHAPES)
def test_payloads_come_into_slots_and_back(n, stride, k):
    cache, slots, tables, ids, counts = filled(n)
    assert (slots < 0).any() == (n > 100)
    before, given = words((cache.capacity, stride)), words((n, stride + 4), 1)
    memory, chunks = chunked(before.view(np.float32), k)
    fill_rows(memory, slots, given)
    after, inside = before.copy(), slots >= 0
    for i in np.flatnonzero(inside):
        after[slots[i]] = given[i, :stride]
    assert unchunked(chunks, len(before)).tobytes() == after.tobytes()
    taken = words((n, stride + 4), 2)
    expected = taken.copy()
    expected[inside] = payloads_of(given[:, :stride], tables, ids, counts)[inside]
    take_rows(memory, cache, slots, taken)
    assert taken.tobytes() == expected.tobytes()


def test_no_rows():
    memory, chunks = chunked(np.zeros((32, 4), np.float32), 2)
    none, nothing = np.empty(0, np.int64), np.empty((0, 8), np.uint32)
    fill_rows(memory, none, nothing)
    take_rows(memory, CacheSets(1), none, nothing)
    assert not unchunked(chunks, 32).any()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(slots=np.zeros(1, np.int32)), TypeError, "'slots' must be int64, got int32."),
        (
            dict(payloads=np.zeros((1, 8), np.float32)), TypeError,
            "'payloads' must be uint32, got float32.",
        ),
        (
            dict(payloads=np.zeros((1, 4), np.uint32)), ValueError,
            "'payloads' must have axes (N, 8), got shape (1, 4).",
        ),
        (
            dict(payloads=np.zeros((2, 8), np.uint32)), ValueError,
            "'payloads' must have N = 1 like 'slots', got shape (2, 8).",
        ),
    ],
)  # fmt: skip
def test_refuses(wrong, error, text):
    memory = RowMemory(np.zeros(1, np.uint64), k=5, stride=4)
    given = dict(slots=np.full(1, -1), payloads=np.zeros((1, 8), np.uint32)) | wrong
    with pytest.raises(error, match=oracle.sentence(f"fill_rows: {text}")):
        fill_rows(memory, **given)
    with pytest.raises(error, match=oracle.sentence(f"take_rows: {text}")):
        take_rows(memory, CacheSets(1), **given)

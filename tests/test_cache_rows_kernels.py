"""cache_rows.cu."""

import numpy as np
import oracle
import pytest
from test_cache_rows import SHAPES, filled, payloads_of, words
from test_embedding_rows_kernels import chunked, moved, unchunked

from cupyrec import arrays
from cupyrec.ops.cache_rows import fill_rows, take_rows
from cupyrec.ops.cache_sets import CacheSets


def on_device(xp, cache):
    other = CacheSets(1, xp)
    other.words, other._tags = moved(xp, cache.words, cache._tags)
    return other


@pytest.mark.parametrize(("n", "stride", "k"), SHAPES)
def test_payloads_come_into_slots_and_back(xp, n, stride, k):
    cache, slots, tables, ids, counts = filled(n)
    before, given = words((cache.capacity, stride)), words((n, stride + 4), 1)
    memory, chunks = chunked(xp, before.view(np.float32), k)
    fill_rows(memory, *moved(xp, slots, given))
    after, inside = before.copy(), slots >= 0
    after[slots[inside]] = given[inside, :stride]
    assert unchunked(chunks, len(before)).tobytes() == after.tobytes()
    expected = words((n, stride + 4), 2)
    (taken,) = moved(xp, expected.copy())
    expected[inside] = payloads_of(given[:, :stride], tables, ids, counts)[inside]
    take_rows(memory, on_device(xp, cache), *moved(xp, slots), taken)
    assert arrays.to_host(taken).tobytes() == expected.tobytes()


def test_thread_order(xp):
    cache, slots, *_ = filled(300)
    rows, given = np.zeros((cache.capacity, 20), np.float32), words((300, 24))

    def call():
        memory, chunks = chunked(xp, rows, 5)
        fill_rows(memory, *moved(xp, slots, given))
        (taken,) = moved(xp, given)
        take_rows(memory, on_device(xp, cache), *moved(xp, slots), taken)
        return [*chunks, taken]

    oracle.check_thread_order(xp, call)


def test_no_rows(xp):
    memory, chunks = chunked(xp, np.zeros((32, 4), np.float32), 2)
    none, nothing = moved(xp, np.empty(0, np.int64), np.empty((0, 8), np.uint32))
    fill_rows(memory, none, nothing)
    take_rows(memory, CacheSets(1, xp), none, nothing)
    assert not unchunked(chunks, 32).any()


def test_one_device(xp):
    memory, _ = chunked(xp, np.zeros((32, 4), np.float32), 2)
    given = np.zeros(1, np.int64), np.zeros((1, 8), np.uint32)
    with pytest.raises(TypeError, match="fill_rows: arguments must be arrays of one device, "):
        fill_rows(memory, *given)
    with pytest.raises(TypeError, match="take_rows: arguments must be arrays of one device, "):
        take_rows(memory, CacheSets(1), *moved(xp, *given))

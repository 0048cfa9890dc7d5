"""What a cache writes to its backing, and when; that rows are right is tests/test_cached_store."""

import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.embedding.host_rows import HostRows
from cupyrec.embedding.row_cache import RowCache, payload_keys, write_tails
from cupyrec.ops.embedding_rows import FLOAT32

STRIDE = 4


class Full(HostRows):
    """Refuses to be written to while it is full; notes what was."""

    def __init__(self):
        super().__init__(STRIDE + 4)
        self.full, self.written = False, []

    def write(self, rows, lines):
        if self.full:
            raise OSError(28, "No space left on device")
        self.written += rows.tolist()
        super().write(rows, lines)


def made(capacity=1, xp=np):
    heard = []
    backing = Full()
    cache = RowCache(capacity, STRIDE, FLOAT32, backing, xp, heard.extend)
    return cache, backing, heard


def admit(cache, ids, dirty, learns=True):
    """Ask for rows whose numbers and words are those of their ids; return their slots."""
    xp, ids = cache.xp, np.asarray(ids)
    tables = np.zeros(len(ids), np.uint32)
    on_device = [arrays.copy_to(xp, array) for array in (tables, ids)]
    counts = xp.ones(len(ids), np.int64) if learns else None
    cache.begin(stays=learns)
    slots, missing, tables, ids = cache.find(*on_device, counts)
    lines = np.zeros((len(ids), STRIDE + 4), np.uint32)
    lines[:, :STRIDE] = ids[:, None]
    once = np.ones(len(ids), np.int64)
    slots[missing] = cache.admit(tables, ids, ids, once, arrays.copy_to(xp, lines), dirty)
    return slots


def words(cache, slots):
    size = 1 << cache.memory.k
    return [
        arrays.to_host(cache._chunks[slot // size])[slot % size].view(np.uint32).tolist()
        for slot in arrays.to_host(slots).tolist()
    ]


@pytest.mark.parametrize("dirty", [False, True])
def test_rows_that_changed_are_written_when_they_leave(dirty, np_or_xp):
    cache, backing, heard = made(xp=np_or_xp)
    for first in range(0, 320, 20):
        slots = admit(cache, range(first, first + 20), dirty)
        assert words(cache, slots) == [[i] * STRIDE for i in range(first, first + 20)]
        cache.end_step()
    assert cache.evictions >= 320 - 32 - 20
    assert heard == backing.written
    assert len(heard) == (cache.evictions if dirty else 0)
    cache.flush()
    assert sorted(set(heard)) == (list(range(320)) if dirty else [])
    cache.flush()  # nothing is left to write
    assert len(heard) == len(set(heard))
    if dirty:
        out = np.empty((320, STRIDE + 4), np.uint32)
        backing.read(np.arange(320), out)
        np.testing.assert_array_equal(out[:, 0], np.arange(320))
        tables, ids, counts = payload_keys(out)
        assert (tables.any(), ids.tolist(), set(counts.tolist())) == (False, list(range(320)), {1})


def test_a_batch_larger_than_the_cache_lies_beside_it_until_the_step_ends(np_or_xp):
    cache, backing, _ = made(xp=np_or_xp)
    slots = admit(cache, range(100), dirty=True)
    epoch = cache.epoch
    assert words(cache, slots) == [[i] * STRIDE for i in range(100)]
    more = admit(cache, range(50, 130), dirty=True)  # of the same step
    assert words(cache, more) == [[i] * STRIDE for i in range(50, 130)]
    assert (arrays.to_host(more)[:50] == arrays.to_host(slots)[50:]).all() == (cache.epoch == epoch)
    cache.end_step()
    before, large = cache.epoch, cache.nbytes
    assert words(cache, admit(cache, [7], dirty=False)) == [[7] * STRIDE]
    assert cache.epoch > before
    assert cache.nbytes < large
    cache.flush()
    assert set(backing.written) == set(range(130))


def test_what_is_only_looked_at_is_in_flight_for_one_call():
    cache, _, _ = made()
    for first in range(0, 400, 20):
        admit(cache, range(first, first + 20), dirty=False, learns=False)
    assert len(cache._index) <= 20


@pytest.mark.parametrize("count", [20, 100])  # 100: some beside the cache
def test_a_full_disk_changes_nothing(count, np_or_xp):
    cache, backing, _ = made(xp=np_or_xp)
    slots = admit(cache, range(count), dirty=True)
    before = words(cache, slots)
    cache.end_step()
    backing.full, epoch = True, cache.epoch
    with pytest.raises(OSError, match="No space left"):
        admit(cache, range(1000, 1060), dirty=True)
    with pytest.raises(OSError, match="No space left"):
        cache.flush()
    assert cache.epoch == epoch
    assert words(cache, slots) == before
    backing.full = False
    assert words(cache, admit(cache, range(1000, 1060), dirty=True)) == [
        [i] * STRIDE for i in range(1000, 1060)
    ]
    cache.flush()
    assert set(backing.written) == {*range(count), *range(1000, 1060)}


def test_tails():
    lines = np.zeros((2, 8), np.uint32)
    keys = np.array([7, 2**32 - 1], np.uint32), np.array([-(2**63), -1])
    write_tails(lines, *keys, np.array([3, 2**40]))
    tables, ids, counts = payload_keys(lines)
    np.testing.assert_array_equal(tables, keys[0])
    np.testing.assert_array_equal(ids, keys[1])
    assert counts.tolist() == [3, 2**32 - 1]
    assert (lines[:, :4] == 0).all()

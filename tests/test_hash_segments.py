"""How slots on the CPU grow, and how far keys stand from home."""

import numpy as np
import oracle
import pytest
from test_hash_table import HIGH, LOW

from cupyrec.ops import hash_segments
from cupyrec.ops.hash_table import HashTable

MASK = (1 << 28) - 1


def places(table):
    """(segment, slots of the segment, slot, row) of each key, in the order of slots."""
    for s, slots in enumerate(table._slots._slots):
        for at in np.flatnonzero(slots):
            yield s, slots.size, int(at), int(slots[at] >> np.uint64(24)) - 1


def distances(table):
    """How far each key stands from home, by what the module says of the hash's bits."""
    tables, ids = table.keys(0, len(table))
    result = []
    for s, size, at, row in places(table):
        h = oracle.hash_key(int(tables[row]), int(ids[row]))
        assert h >> 57 == s
        result.append((at - ((h >> 29 & MASK) * size >> 28)) % size)
    return np.array(result)


RANDOM = np.random.default_rng(0).integers(LOW, HIGH, 12_000)
REGULAR = {
    "in order": np.arange(12_000), "negative": -np.arange(12_000),
    "around the ends": np.append(LOW + np.arange(6000), HIGH - np.arange(6000)),
    **{f"multiples of 2^{k}": np.arange(12_000) << k for k in (1, 8, 20, 32, 40, 50)},
}  # fmt: skip


@pytest.mark.parametrize("ids", REGULAR.values(), ids=REGULAR.keys())
def test_regular_ids_stand_as_near_to_home_as_random_ones(ids):
    """Knuth, 6.4: a search among random keys of load a touches (1 + 1 / (1 - a)) / 2 slots."""
    found = []
    for keys in (ids, RANDOM):
        table = HashTable()
        table.insert(np.zeros(keys.size, np.uint32), keys)
        found.append(distances(table))
        assert found[-1].size == keys.size  # each once
    load = table.load
    knuth = (1 + 1 / (1 - load)) / 2
    assert found[0].mean() + 1 <= 1.15 * knuth
    assert abs(found[0].mean() - found[1].mean()) <= 0.3 * knuth
    assert found[0].max() <= 2 * found[1].max()


def test_memory_and_work_are_even_while_a_table_grows():
    """The sizes between which all segments grow once: no jump, and at most 24 bytes a key."""
    ids = np.random.default_rng(0).integers(LOW, HIGH, 600_000)
    tables = np.zeros(ids.size, np.uint32)
    table = HashTable()
    table.insert(tables[:400_000], ids[:400_000])
    for first in range(400_000, 600_000, 10_000):
        before = table._slots._segments.copy()
        table.insert(tables[first : first + 10_000], ids[first : first + 10_000])
        grown = (before[:, 1] != table._slots._segments[:, 1]).sum()
        assert 1 <= grown <= 40  # 14 of the 128, were their keys as many as on average
        assert 20 < table.nbytes / len(table) <= 24
        assert 0.68 <= table.load <= 0.8


def test_sizes_are_a_growth_apart_and_staggered():
    for count in (0, 1, 6, 100, 5000, 10**7):
        sizes = hash_segments._sizes(np.full(128, count))
        assert (count <= 0.8 * sizes).all()
        assert (sizes <= np.maximum(1.25 * count / 0.8 + 2, 11)).all()
        assert len(set(sizes.tolist())) == 128 or count < 5000


def test_keys_far_from_home():
    """Where the slot does not tell the whole fraction, the keys do: equal hashes fill a segment."""
    tables, ids = oracle.keys_of_equal_hash(200)
    others = np.arange(3000)
    table = HashTable()
    table.insert(tables, ids)
    (far,) = np.flatnonzero(table._slots._segments[:, 2])
    assert far == oracle.hash_key(int(tables[0]), int(ids[0])) >> 57
    table.insert(np.full(3000, 7, np.uint32), others)  # grows all segments
    np.testing.assert_array_equal(table.find(tables, ids), np.arange(200))
    np.testing.assert_array_equal(
        table.find(np.full(3000, 7, np.uint32), others), np.arange(200, 3200)
    )
    table.delete(tables[::2], ids[::2])
    assert (table.find(tables, ids) >= 0).tolist() == [False, True] * 100
    rows = table.find(np.full(3000, 7, np.uint32), others)
    assert sorted(rows.tolist() + table.find(tables[1::2], ids[1::2]).tolist()) == [*range(3100)]
    distances(table)


def test_fractions_follow_from_slots():
    """Whether a segment's keys are read or not, it grows and shrinks to the same slots."""
    ids = np.random.default_rng(0).integers(LOW, HIGH, 100_000)
    table = HashTable()
    table.insert(np.zeros(ids.size, np.uint32), ids)
    near = np.flatnonzero(table._slots._segments[:, 2] == 0)[:30]
    assert near.size == 30
    for s in near:
        old = table._slots._slots[s]
        for size in (old.size + 77, 2 * old.size, old.size * 9 // 10, old.size):
            filled = [np.zeros(size, np.uint64) for _ in range(2)]
            for far, slots in enumerate(filled):
                hash_segments._refill_cpu(old, np.uint64(far), table._chunks, slots)
            np.testing.assert_array_equal(*filled)
            assert np.count_nonzero(filled[0]) == table._slots._counts[s]

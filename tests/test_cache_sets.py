"""CacheSets on the CPU, against a dict."""

import numpy as np
import oracle
import pytest
from test_hash_table import HIGH, LOW, REFUSED

from cupyrec import arrays
from cupyrec.ops.cache_sets import HALF_LIFE, CacheSets

MOST = 2**32 - 1


class Model:
    """What a cache has to do, by lists: of a slot [key, row, count, used, dirty], or None."""

    def __init__(self, rows):
        self.sets = -(-rows // 32)
        self.slots = [None] * 32 * self.sets

    def set_of(self, key):
        h = oracle.hash_key(*key) * 0xD1342543DE82EF95 % 2**64
        return (h >> 32) * self.sets >> 32

    def find(self, keys, now, counts=None):
        where = {held[0]: slot for slot, held in enumerate(self.slots) if held}
        for i, key in enumerate(keys):
            if key in where:
                held = self.slots[where[key]]
                held[3] = now
                held[2] = min(MOST, held[2] + counts[i]) if counts else held[2]
        return [where.get(key, -1) for key in keys]

    def score(self, slot):
        _, _, count, used, _ = self.slots[slot]
        count = max(1, count)
        whole = count.bit_length() - 1
        return 16 * used + HALF_LIFE * (16 * whole + 16 * count // 2**whole - 16)

    def plan(self, keys, since):
        slots = []
        for key in keys:
            first = 32 * self.set_of(key)
            own = [slot for slot in range(first, first + 32) if slot not in slots]
            empty = [slot for slot in own if not self.slots[slot]]
            still = [slot for slot in own if self.slots[slot] and self.slots[slot][3] < since]
            slots.append((empty + sorted(still, key=self.score) + [-1])[0])
        evicted = sorted(slot for slot in slots if slot >= 0 and self.slots[slot])
        dirty, rows = ([self.slots[slot][i] for slot in evicted] for i in (4, 1))
        return slots, evicted, dirty, rows

    def put(self, slots, keys, rows, counts, now):
        for slot, key, row, count in zip(slots, keys, rows, counts, strict=True):
            if slot >= 0:
                self.slots[slot] = [key, row, min(MOST, count), now, False]

    def taken(self, dirty=False):
        return [slot for slot, held in enumerate(self.slots) if held and held[4] >= dirty]


def columns(xp, keys):
    """(tables, ids) of a device, of a list of keys."""
    tables, ids = zip(*keys, strict=True) if keys else ((), ())
    return [arrays.copy_to(xp, a) for a in (np.array(tables, np.uint32), np.array(ids, np.int64))]


def numbers(xp, values):
    return arrays.copy_to(xp, np.array(values, np.int64))


class Pair:
    """A cache of a device and its model, which must answer alike."""

    def __init__(self, rows, xp):
        self.xp, self.sets, self.model = xp, CacheSets(rows, xp), Model(rows)
        self.dirty = set()

    def check_array(self, got, dtype, expected):
        got = arrays.to_host(got)
        assert (got.dtype, got.tolist()) == (dtype, expected)

    def find(self, keys, now, counts=None):
        given = None if counts is None else numbers(self.xp, counts)
        expected = self.model.find(keys, now, counts)
        self.check_array(self.sets.find(*columns(self.xp, keys), now, given), np.int64, expected)
        return expected

    def plan(self, keys, now, since):
        expected = self.model.plan(keys, since)
        got = self.sets.plan(*columns(self.xp, keys), now, since)
        for one, dtype, truth in zip(got, "qq?q", expected, strict=True):
            self.check_array(one, dtype, truth)
        return expected

    def put(self, slots, keys, rows, counts, now):
        given = [numbers(self.xp, values) for values in (slots, rows, counts)]
        tables, ids = columns(self.xp, keys)
        self.sets.put(given[0], tables, ids, *given[1:], now)
        self.model.put(slots, keys, rows, counts, now)

    def set(self, name, slots):
        getattr(self.sets, name)(numbers(self.xp, slots))
        for slot in slots:
            if slot >= 0 and name == "remove":
                self.model.slots[slot] = None
            elif slot >= 0:
                self.model.slots[slot][4] = name == "mark"

    def check_all(self):
        slots = self.model.taken()
        self.check_array(self.sets.taken(), np.int64, slots)
        self.check_array(self.sets.taken(dirty=True), np.int64, self.model.taken(dirty=True))
        held = [self.model.slots[slot] for slot in slots]
        keys, rows, counts, _, dirty = zip(*held, strict=True) if held else ((),) * 5
        tables, ids = columns(np, keys)
        truth = [
            (np.uint32, tables.tolist()), (np.int64, ids.tolist()), (np.int64, list(rows)),
            (np.int64, list(counts)), (np.bool_, list(dirty)),
        ]  # fmt: skip
        for one, expected in zip(self.sets.records(numbers(self.xp, slots)), truth, strict=True):
            self.check_array(one, *expected)

    def step(self, keys, now, since, counts):
        """Look keys up, and let in those that are not there: what a step of training does."""
        slots = self.find(keys, now, counts)
        new = [
            (key, count) for key, slot, count in zip(keys, slots, counts, strict=True) if slot < 0
        ]
        new_keys, new_counts = [key for key, _ in new], [count for _, count in new]
        plan = self.plan(new_keys, now, since)
        self.put(plan[0], new_keys, [key[1] % 1000 + 5 for key in new_keys], new_counts, now)


def some_keys(generator, count):
    """Keys that meet again now and then, among them extreme ones."""
    extreme = [(0, LOW), (MOST, HIGH), (MOST, -1), (7, 0), (0, 0)]
    ids = 1 + generator.permutation(300)[:count]
    return extreme[: count // 8] + [(int(i) % 3, int(i) << 40) for i in ids]


@pytest.mark.parametrize("rows", [1, 33, 100])
def test_behaves_like_lists(rows):
    check_behaviour(rows, np, 60)


def check_behaviour(rows, xp, steps):
    generator, pair = np.random.default_rng(rows), Pair(rows, xp)
    assert pair.sets.capacity == 32 * -(-rows // 32)
    assert pair.sets.nbytes == 34 * pair.sets.capacity
    evicted = 0
    for now in range(1, steps + 1):
        keys = some_keys(generator, int(generator.integers(0, 80)))
        counts = (2 ** generator.uniform(0, 31, len(keys)) * now**2 // 1).astype(np.int64).tolist()
        pair.step(keys, now, max(0, now - int(generator.integers(3))), counts)
        held = pair.model.taken()
        some = [held[i] for i in generator.permutation(len(held))[: len(held) // 3]]
        pair.set(["mark", "mark", "clean"][now % 3], [*some, -1])
        if now % 5 == 0:
            pair.set("remove", [-1, *some[:9]])
        pair.check_all()
        evicted += len(pair.plan(some_keys(generator, 40), now, now + 1)[1])
    assert evicted > steps
    pair.sets.clear()
    pair.model = Model(rows)
    pair.check_all()


def test_equal_hashes_fill_a_set(np_or_xp):
    """All keys have one set and one tag."""
    pair = Pair(1000, np_or_xp)
    tables, ids = oracle.keys_of_equal_hash(80)
    keys = list(zip(tables.tolist(), ids.tolist(), strict=True))
    pair.step(keys[:20], 1, 1, [1] * 20)
    pair.step(keys[10:75], 2, 2, [1] * 65)  # 10 to 19 are in flight
    pair.check_all()
    assert len(pair.model.taken()) == 32
    assert (np.array(pair.find(keys, 3)) >= 0).sum() == 32
    assert pair.plan(keys[75:], 3, 3)[0] == [-1] * 5  # all of them are in flight now
    assert len(pair.plan(keys[75:], 4, 4)[1]) == 5


def test_scores_weigh_age_and_count(np_or_xp):
    """Of keys with one set: by how often they were looked up, and when."""
    pair = Pair(32, np_or_xp)
    keys = [(0, i) for i in range(32)]
    counts = [1, 2, 3, 4, 0, 2**31, MOST, MOST + 5] * 4
    for i, key in enumerate(keys):
        pair.put([31 - i], [key], [i], [counts[i]], 1 + i * HALF_LIFE // 3)
    now = 11 * HALF_LIFE
    for count in range(1, 33):
        evicted = pair.plan([(1, i) for i in range(count)], now, now)[1]
        assert len(evicted) == count
    assert pair.plan([(1, 0)], 2, HALF_LIFE)[0] == [31]  # the oldest, and looked up once


def test_counts_saturate(np_or_xp):
    pair = Pair(32, np_or_xp)
    keys, counts = [(0, 1), (0, 2), (0, 3)], [MOST - 1, MOST + 1, 5]
    pair.step(keys, 1, 1, counts)
    pair.check_all()
    for more in ([1, 1, 2**62], [2, 2**63 - 1, 0], [1, 1, 1]):
        pair.find(keys, 2, more)
        pair.check_all()


def test_counts_are_of_the_row_that_a_slot_holds(np_or_xp):
    pair = Pair(1, np_or_xp)
    pair.step([(0, i) for i in range(32)], 1, 1, [1000] * 32)
    pair.step([(1, 5)], 2, 2, [1])
    pair.check_all()
    assert sorted(held[2] for held in pair.model.slots) == [1] + [1000] * 31


def test_no_keys(np_or_xp):
    pair = Pair(5, np_or_xp)
    pair.step([], 1, 1, [])
    pair.set("mark", [])
    pair.set("remove", [])
    pair.check_all()


def test_any_number_of_threads_decides_alike():
    generator = np.random.default_rng(0)
    ids = generator.integers(LOW, HIGH, (4, 9000))
    tables = np.zeros(9000, np.uint32)

    def call():
        cache, results = CacheSets(10_000), []
        for now, batch in enumerate(ids[[0, 1, 2, 0, 3]], 1):
            found = cache.find(tables, batch, now, np.ones(9000, np.int64))
            new = np.flatnonzero(found < 0)
            plan = cache.plan(tables[new], batch[new], now, now)
            cache.put(plan.slots, tables[new], batch[new], batch[new], new, now)
            cache.mark(found)
            results += [found, *plan]
        return [*results, cache.words]

    oracle.check_same_bits(call)


@pytest.mark.parametrize(("tables", "ids", "error", "text"), REFUSED)
def test_refuses_keys(tables, ids, error, text):
    cache = CacheSets(1)
    with pytest.raises(error, match=oracle.sentence(f"CacheSets.find: {text}")):
        cache.find(tables, ids, 1)
    with pytest.raises(error, match=oracle.sentence(f"CacheSets.plan: {text}")):
        cache.plan(tables, ids, 1, 1)


KEY = np.zeros(1, np.uint32), np.zeros(1, np.int64)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda it: CacheSets(0), ValueError, "CacheSets: 'rows' must be at least 1, got 0."),
        (lambda it: CacheSets(1.5), TypeError, "CacheSets: 'rows' must be an integer, got 1.5."),
        (
            lambda it: CacheSets(2**37), ValueError,
            "CacheSets: 'rows' must be less than 2**37, got 137438953472.",
        ),
        (
            lambda it: it.find(*KEY, -1), ValueError,
            "CacheSets.find: 'now' must be at least 0, got -1.",
        ),
        (
            lambda it: it.put(KEY[1], *KEY, KEY[1], KEY[1], 2**32), ValueError,
            "CacheSets.put: 'now' must be at most 4294967295, got 4294967296.",
        ),
        (
            lambda it: it.plan(*KEY, 1, 2**32 + 1), ValueError,
            "CacheSets.plan: 'since' must be at most 4294967296, got 4294967297.",
        ),
        (
            lambda it: it.find(*KEY, 1, np.zeros(2, np.int64)), ValueError,
            "CacheSets.find: 'counts' must have N = 1 like 'ids', got shape (2,).",
        ),
        (
            lambda it: it.put(KEY[1], *KEY, KEY[1], np.zeros(1, np.uint32), 1), TypeError,
            "CacheSets.put: 'counts' must be int64, got uint32.",
        ),
        (
            lambda it: it.mark(np.zeros(1)), TypeError,
            "CacheSets.mark: 'slots' must be int64, got float64.",
        ),
        (
            lambda it: it.records(np.zeros((1, 1), np.int64)), ValueError,
            "CacheSets.records: 'slots' must have axes (N), got shape (1, 1).",
        ),
    ],
)  # fmt: skip
def test_refuses(call, error, text):
    with pytest.raises(error, match=oracle.sentence(text)):
        call(CacheSets(1))

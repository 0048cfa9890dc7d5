"""cache_sets.cu: it decides like lists and like the CPU, and what it costs to find keys."""

import numpy as np
import oracle
import pytest
from test_cache_sets import Pair, check_behaviour
from test_hash_table import HIGH, LOW

from cupyrec import arrays
from cupyrec.ops.cache_sets import WAYS, CacheSets


@pytest.mark.parametrize("rows", [33, 100])
def test_behaves_like_lists(xp, rows):
    check_behaviour(rows, xp, 10)


def some_steps(xp, rows=600, keys=700, steps=5):
    """All that a cache of a device gives and has, in steps that look some keys up."""
    generator = np.random.default_rng(0)
    every = generator.integers(LOW, HIGH, 3 * keys)
    cache, results = CacheSets(rows, xp), []
    for now in range(1, steps + 1):
        ids = generator.permutation(every)[:keys]
        tables, counts = (ids % 5).astype(np.uint32), 1 + abs(ids) % 100
        tables, ids, counts = (arrays.copy_to(xp, a) for a in (tables, ids, counts))
        found = cache.find(tables, ids, now, counts)
        new = arrays.copy_to(xp, np.flatnonzero(arrays.to_host(found) < 0))
        tables, ids, counts = tables[new], ids[new], counts[new]
        plan = cache.plan(tables, ids, now, now)
        cache.put(plan.slots, tables, ids, ids, counts, now)
        cache.mark(found)
        cache.clean(found[::2])
        cache.remove(found[::5])
        results += [found, *plan, cache.taken(), cache.taken(dirty=True)]
    return [*results, *cache.records(cache.taken()), cache.words, cache._tags]


def test_decides_like_the_cpu(xp):
    expected, got = some_steps(np), some_steps(xp)
    assert sum(len(evicted) for evicted in expected[2:-7:7]) > 500
    for one, truth in zip(got, expected, strict=True):
        assert one.dtype == truth.dtype
        np.testing.assert_array_equal(arrays.to_host(one), truth)


def test_thread_order(xp):
    oracle.check_thread_order(xp, lambda: some_steps(xp, 300, 130, 3))


def test_a_plan_for_more_keys_than_ways(xp):
    """Segments of 31, 32, 33, 64 and 100 keys, each of one set."""
    for count in (31, 32, 33, 64, 100):
        pair = Pair(1, xp)
        pair.put(list(range(0, 32, 2)), [(0, i) for i in range(16)], list(range(16)), [1] * 16, 1)
        slots, evicted, *_ = pair.plan([(1, i) for i in range(count)], 2, 2)
        assert (slots.count(-1), len(evicted)) == (max(0, count - 32), min(16, count - 16))


def test_keys_to_plan_may_lie_on_the_host(xp):
    cache, tables, ids = CacheSets(1000, xp), np.zeros(70, np.uint32), np.arange(70)
    slots = cache.plan(tables, ids, 1, 1).slots
    same = cache.plan(xp.asarray(tables), xp.asarray(ids), 1, 1).slots
    assert arrays.to_host(slots).tolist() == arrays.to_host(same).tolist()


def test_host_syncs(sim):
    cache, tables, ids = CacheSets(1000, sim), np.zeros(70, np.uint32), np.arange(70)
    on_device = sim.asarray(tables), sim.asarray(ids)
    with sim.record() as seen:
        plan = cache.plan(tables, ids, 1, 1)
    assert seen.syncs == 1
    with sim.record() as seen:
        cache.put(plan.slots, *on_device, on_device[1], on_device[1], 1)
        cache.find(*on_device, 2)
        cache.mark(plan.slots)
        cache.clean(plan.slots)
        cache.records(plan.slots)
        cache.remove(plan.slots)
        cache.clear()
    assert seen.syncs == 0


@pytest.fixture(scope="module")
def full():
    """(tables, ids, cache) with nearly all of 3.2 million slots taken."""
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    sim, generator, n = arrays.module("sim"), np.random.default_rng(0), 100_000 * WAYS
    ids, tables = generator.integers(LOW, HIGH, n), generator.integers(26, size=n).astype(np.uint32)
    cpu = CacheSets(n)
    slots = cpu.plan(tables, ids, 1, 1).slots
    cpu.put(slots, tables, ids, ids, np.ones(n, np.int64), 1)
    cache = CacheSets(1, sim)
    cache.words, cache._tags = sim.asarray(cpu.words), sim.asarray(cpu._tags)
    held = slots >= 0
    assert held.mean() > 0.9
    return sim, tables[held], ids[held], cache


@pytest.mark.parametrize(("share", "counted", "most"), [(1, True, 6), (1, False, 5), (0, True, 3)])
def test_sectors_of_a_look_up(full, share, counted, most):
    """A hit: two of tags, one or two of its record read, one written; 0.9 of its key and slot."""
    sim, tables, ids, cache = full
    asked = np.random.default_rng(1).permutation(len(ids))[:10_000]
    given = sim.asarray(tables[asked]), sim.asarray(ids[asked] + (1 - share))
    counts = sim.asarray(np.ones(10_000, np.int64)) if counted else None
    with sim.record() as seen:
        found = cache.find(*given, 2, counts)
    assert (arrays.to_host(found) >= 0).mean() == share
    (launch,) = [launch for launch in seen.launches if launch.result]
    counts = launch.result.counts
    assert counts["sectors"] / 10_000 <= most
    assert counts["longest_warp"] <= 2 * counts["mean_warp"]


def test_one_device(xp):
    cache, tables, ids = CacheSets(1, xp), np.zeros(1, np.uint32), np.zeros(1, np.int64)
    for call in (
        lambda: cache.find(tables, ids, 1),
        lambda: cache.find(xp.asarray(tables), xp.asarray(ids), 1, ids),
        lambda: cache.plan(xp.asarray(tables), ids, 1, 1),
        lambda: CacheSets(1).plan(xp.asarray(tables), xp.asarray(ids), 1, 1),
        lambda: cache.put(ids, tables, ids, ids, ids, 1),
        lambda: cache.mark(ids),
        lambda: cache.remove(ids),
        lambda: cache.records(ids),
    ):
        with pytest.raises(TypeError, match=r"CacheSets\.\w+: arguments must be arrays of one dev"):
            call()

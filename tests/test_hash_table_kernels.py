"""hash_table.cu: rows like those of the CPU, and what it costs to find them."""

import copy

import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, given, settings
from test_hash_table import HIGH, LOW, Model, call, calls, keys, pairs_of
from test_hash_table import arrays as columns

from cupyrec import arrays
from cupyrec.ops.hash_key import hash_key
from cupyrec.ops.hash_segments import CHUNK
from cupyrec.ops.hash_table import HashTable

few = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(calls, keys)
def test_behaves_like_a_dict(xp, calls, questions):
    table, model = HashTable(xp), Model()
    for name, batch in calls[:4]:
        got, expected = call(table, model, name, batch)
        assert got == expected
        asked = [arrays.copy_to(xp, a) for a in columns(questions + batch)]
        assert arrays.to_host(table.find(*asked)).tolist() == model.find(questions + batch)
    assert pairs_of(table, 0, len(table)) == model.by_row


class Pair:
    """One table on the CPU and one on a device, which must answer alike."""

    def __init__(self, xp):
        self.xp, self.cpu, self.device = xp, HashTable(), HashTable(xp)

    def check_call(self, name, tables, ids):
        given = [arrays.copy_to(self.xp, a) for a in (tables, ids)]
        expected, got = getattr(self.cpu, name)(tables, ids), getattr(self.device, name)(*given)
        if name != "insert":
            got = got if name == "delete" else (got,)
            expected = expected if name == "delete" else (expected,)
            for one, truth in zip(got, expected, strict=True):
                np.testing.assert_array_equal(arrays.to_host(one), truth)
                assert one.dtype == np.int64
        assert len(self.cpu) == len(self.device)
        every = 0, len(self.cpu)
        for one, truth in zip(self.device.keys(*every), self.cpu.keys(*every), strict=True):
            np.testing.assert_array_equal(arrays.to_host(one), truth)
            assert one.dtype == truth.dtype


@pytest.mark.parametrize("seed", range(3))
def test_grows_over_chunks_and_sizes(xp, seed):
    """Regular and random ids, known and new ones mixed; more blocks than a warp has lanes."""
    generator = np.random.default_rng(seed)
    total = CHUNK + 100
    ids = [np.arange(total) << 40, -2 - np.arange(total), generator.integers(LOW, HIGH, total)]
    ids = np.append(ids[seed], [LOW, HIGH, -1])
    tables = generator.integers(0, 3, ids.size).astype(np.uint32)
    pair = Pair(xp)
    sizes = set()
    for n in (1, 0, 300, 600, 2500, 9000, ids.size - 400):
        some = ids.size - 1 - generator.permutation(n)
        pair.check_call("find_or_insert", tables[some], ids[some])
        sizes.add(pair.device._slots.size)
        assert pair.device.load <= 0.8
    assert len(sizes) >= 4
    pair.check_call("insert", tables[:400], ids[:400])
    pair.check_call("find", tables, ids)
    assert 0.5 <= pair.device.load
    pair.check_call("delete", tables[::5], ids[::5])
    pair.check_call("find_or_insert", tables[1::2], ids[1::2])
    pair.check_call("delete", tables[7:], ids[7:])
    assert pair.device.nbytes <= pair.cpu.nbytes + 12 * CHUNK
    pair.check_call("find", tables, ids)


def test_keys_of_equal_hash_are_told_apart(xp):
    tables, ids = oracle.keys_of_equal_hash(100)
    assert len({int(hash_key(*key)) for key in zip(tables, ids, strict=True)}) == 1
    pair = Pair(xp)
    pair.check_call("insert", tables[:30], ids[:30])
    pair.check_call(
        "find_or_insert", tables[::2].copy(), ids[::2].copy()
    )  # all end in one run of slots
    pair.check_call("find", tables, ids)


def test_a_full_run_at_the_end_goes_on_at_the_start(xp):
    """Keys whose first slot is the last of the table."""
    ends = np.array([i for i in range(6000) if oracle.hash_key(0, i) * 128 >> 64 == 127])
    pair = Pair(xp)
    pair.check_call("find_or_insert", np.zeros(ends.size, np.uint32), ends)
    assert (ends.size > 30, pair.device._slots.size) == (True, 256)
    pair.check_call("find", np.zeros(2 * ends.size, np.uint32), np.append(ends, -ends))


def test_truncate_and_copies(xp):
    table = HashTable(xp)
    tables, ids = xp.zeros(700, np.uint32), xp.arange(700)
    table.insert(tables, ids)
    other = copy.deepcopy(table)
    table.truncate(650)
    found = arrays.to_host(table.find(tables, ids))
    np.testing.assert_array_equal(found, np.where(np.arange(700) < 650, np.arange(700), -1))
    rows = table.find_or_insert(tables, ids[::-1])  # a view of other strides
    np.testing.assert_array_equal(
        arrays.to_host(rows), np.append(np.arange(650, 700), np.arange(650)[::-1])
    )
    np.testing.assert_array_equal(arrays.to_host(other.find(tables, ids)), np.arange(700))


def test_no_memory_leaves_the_table_as_it_was(xp, monkeypatch):
    table = HashTable(xp)
    tables, ids = xp.zeros(900, np.uint32), xp.arange(900)
    table.insert(tables[:300], ids[:300])
    real, size = xp.zeros, table._slots.size

    def zeros(shape, dtype):
        if shape > size:
            raise MemoryError("no room")
        return real(shape, dtype)

    monkeypatch.setattr(xp, "zeros", zeros)
    with pytest.raises(MemoryError, match="no room"):
        table.find_or_insert(tables, ids)
    monkeypatch.undo()
    assert len(table) == 300
    expected = np.where(np.arange(900) < 300, np.arange(900), -1)
    np.testing.assert_array_equal(arrays.to_host(table.find(tables, ids)), expected)
    np.testing.assert_array_equal(arrays.to_host(table.find_or_insert(tables, ids)), np.arange(900))


def test_thread_order(xp):
    """New keys, some of which are known, on top of a table that grows."""
    generator = np.random.default_rng(0)
    ids = generator.integers(LOW, HIGH, 1500)
    tables = generator.integers(0, 3, 1500).astype(np.uint32)

    def call():
        table = HashTable(xp)
        t, i = (arrays.copy_to(xp, a) for a in (tables, ids))
        table.insert(t[:400], i[:400])
        rows = table.find_or_insert(t[::-1], i[::-1])
        moved = table.delete(t[::5], i[::5])
        return rows, table.find(t, i), *moved, *table.keys(0, len(table))

    oracle.check_thread_order(xp, call)


def test_host_syncs(xp):
    if xp is not arrays.module("sim"):
        pytest.skip("the simulator counts them")
    table = HashTable(xp)
    tables, ids = xp.zeros(3000, np.uint32), xp.arange(3000)
    with xp.record() as seen:
        table.find(tables, ids)
        table.insert(tables[:100], ids[:100])
        table.keys(0, 100)
    assert seen.syncs == 0
    with xp.record() as seen:
        table.find_or_insert(tables, ids)
    assert seen.syncs == 1


@pytest.fixture(scope="module")
def half_full():
    """(tables, ids, table) with 8,192 keys in 16,384 slots, but for the last 4,096 of them."""
    pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    sim = arrays.module("sim")
    generator = np.random.default_rng(1)
    tables = generator.integers(0, 26, 8192).astype(np.uint32)
    ids = generator.permutation(np.unique(generator.zipf(1.2, 40_000)))[:8192]
    assert ids.size == 8192

    def made(first):
        table = HashTable(sim)
        table.insert(sim.asarray(tables[:first]), sim.asarray(ids[:first]))
        table._slots.rebuild(table._chunks, 16384)
        return table

    return sim, tables, ids, made


@pytest.mark.parametrize("new", [0, 410, 2048, 4096])
def test_sectors_and_balance_at_half_load(half_full, new):
    sim, tables, ids, made = half_full
    table = made(8192 - new)
    asked = np.append(np.arange(4096 - new), np.arange(8192 - new, 8192))
    asked = np.random.default_rng(2).permutation(asked)
    with sim.record() as seen:
        table.find_or_insert(sim.asarray(tables[asked]), sim.asarray(ids[asked]))
    assert (table._slots.size, len(table)) == (16384, 8192)
    (counts,) = [launch.result.counts for launch in seen.launches if launch.result]
    assert counts["sectors"] / 4096 <= 4
    assert counts["longest_warp"] <= 4 * counts["mean_warp"]
    assert counts["bank_conflicts"] <= 0.02 * counts["shared_wavefronts"]


def test_refuses(xp):
    table = HashTable(xp)
    name = arrays.name(xp)
    for method in ("find", "find_or_insert", "insert", "delete"):
        text = f"HashTable.{method}: arguments must be arrays of one device, got cpu, {name}."
        with pytest.raises(TypeError, match=oracle.sentence(text)):
            getattr(table, method)(np.zeros(2, np.uint32), np.zeros(2, np.int64))
        text = f"HashTable.{method}: 'ids' must be int64, got int32."
        with pytest.raises(TypeError, match=oracle.sentence(text)):
            getattr(table, method)(xp.zeros(2, np.uint32), xp.zeros(2, np.int32))
    assert len(table) == 0

"""MemoryStore on devices: the rows of the CPU's, and what moves between the two."""

import copy
import pickle

import numpy as np
import oracle
import pytest
from test_memory_store import ENDS, STATE, keys

from cupyrec import arrays
from cupyrec.embedding import MemoryStore, Rows, memory_store
from cupyrec.ops.embedding_rows import gather_rows
from cupyrec.ops.sgd import sgd_rows


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 4 rows of 8 floats, which the simulator watches faster than those of 16 MB."""
    monkeypatch.setattr(memory_store, "_CHUNK_BYTES", 128)


def numbered(width):
    """Vectors that tell of their key, on its device."""

    def initial(tables, ids):
        xp = arrays.namespace("numbered", tables)
        key = arrays.to_host(tables).astype(np.int64) * 1000 + arrays.to_host(ids) % 1000
        return arrays.copy_to(xp, (key[:, None] + np.arange(width) / 8).astype(np.float32))

    return initial


def stores(xp, width=3, state=STATE):
    """One on the CPU, one on a device."""
    made = MemoryStore(width), MemoryStore(width, xp)
    for store in made:
        store.set_state(state)
    return made


def insert(store, tables, ids):
    rows = store.find_or_insert(
        arrays.copy_to(store.xp, tables), arrays.copy_to(store.xp, ids), numbered(store.width)
    )
    return arrays.to_host(rows)


def check_alike(*all_stores):
    """The same rows in the same order."""
    exported = [store.export_rows(0, len(store)) for store in all_stores]
    for got in exported[1:]:
        assert list(got.states) == list(exported[0].states)
        for a, b in zip(
            [*got[:3], *got.states.values()],
            [*exported[0][:3], *exported[0].states.values()],
            strict=True,
        ):
            assert isinstance(a, np.ndarray)
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("width", [1, 3, 4, 10])
def test_like_the_cpus(xp, width):
    cpu, device = stores(xp, width)
    generator = np.random.default_rng(width)
    for n in (0, 1, 5, 40):
        pairs = [(t, i) for t in (0, 1, 2**32 - 1) for i in [*ENDS, *range(50, 60)]]
        tables, ids = keys([pairs[p] for p in generator.permutation(len(pairs))[:n]])
        np.testing.assert_array_equal(insert(device, tables, ids), insert(cpu, tables, ids))
        asked = np.append(ids, ids + 7), np.append(tables, tables)
        got = device.find(*(arrays.copy_to(xp, a) for a in asked[::-1]))
        np.testing.assert_array_equal(arrays.to_host(got), cpu.find(*asked[::-1]))
        check_alike(cpu, device)
    rows = generator.permutation(len(cpu))[:20]
    g = oracle.integers((20, width), -9, 9)
    for store in (cpu, device):
        here = [arrays.copy_to(store.xp, a) for a in (rows, g)]
        store.update(here[0], lambda memory, rows, g=here[1]: sgd_rows(memory, rows, g, lr=0.25))
    check_alike(cpu, device)


def test_gather(xp):
    _, store = stores(xp)
    tables, ids = keys([(t, i) for t in (0, 1) for i in range(9)])
    insert(store, tables, ids)
    rows, inverse = np.array([17, -1, 4, -2]), np.array([3, 0, 1, 2, 0])
    unseen = np.float32([[90, 91, 92], [80, 81, 82]])
    out = xp.empty((5, 3), np.float32)
    rows, *others = (arrays.copy_to(xp, a) for a in (rows, inverse, unseen))
    store.read(rows, lambda memory, rows: gather_rows(memory, rows, *others, out))
    known = numbered(3)(tables, ids)
    np.testing.assert_array_equal(
        arrays.to_host(out), [unseen[1], known[17], unseen[0], known[4], known[17]]
    )


def test_growth_moves_nothing_and_leaves_the_old_addresses_alone(xp):
    _, store = stores(xp)
    seen = []
    for first in range(0, 40, 5):
        insert(store, np.zeros(5, np.uint32), np.arange(first, first + 5))
        seen.append((store._memory.chunks, arrays.to_host(store._memory.chunks).tolist()))
    for (array, before), (_, now) in zip(seen, seen[1:], strict=False):
        assert now[: len(before)] == before
        assert arrays.to_host(array).tolist() == before
    assert len(seen[-1][1]) == 10


def test_state_moves_and_copies(xp, monkeypatch):
    monkeypatch.setattr(memory_store, "_ROWS", 7)  # several pieces
    cpu, device = stores(xp)
    tables, ids = keys([(t, i) for t in (0, 5) for i in [*ENDS, *range(50, 60)]])
    generator = np.random.default_rng(0)
    values = {n: generator.normal(size=(30, c)).astype(np.float32) for n, c in [("v", 3), ("s", 3)]}
    rows = Rows(tables, ids, values["v"], {"sum": values["s"]})
    cpu.import_rows(rows)  # from the host, both
    device.import_rows(rows)
    check_alike(cpu, device)
    for state in (STATE[::-1], (), STATE[:1]):
        for store in (cpu, device):
            store.set_state(state)
        check_alike(cpu, device)
    copies = [copy.deepcopy(device), pickle.loads(pickle.dumps(device))]  # noqa: S301
    insert(device, np.zeros(9, np.uint32), np.arange(200, 209))
    device.update(xp.arange(39), lambda m, r: sgd_rows(m, r, xp.ones((39, 3), np.float32), lr=1.0))
    check_alike(cpu, *copies)  # the copies have memory of their own
    del device
    for store in copies:
        assert store.xp is xp
        np.testing.assert_array_equal(insert(store, tables, ids), np.arange(30))
    there, back = copy.deepcopy(cpu), copies[0]
    there.to(xp)
    back.to(np)
    assert (there.xp, back.xp) == (xp, np)
    check_alike(cpu, there, back)
    for store in (cpu, there, back):
        insert(store, np.ones(3, np.uint32), np.array([-5, -6, -7]))
    check_alike(cpu, there, back)


def test_no_row_stays_that_has_no_vector(xp):
    for store in stores(xp):
        insert(store, *keys([(0, 1), (0, 2)]))
        tables, ids = (arrays.copy_to(store.xp, a) for a in keys([(0, 2), (0, 3), (1, 1)]))

        def fails(tables, ids):
            raise MemoryError("no room")

        with pytest.raises(MemoryError, match="no room"):
            store.find_or_insert(tables, ids, fails)
        assert len(store) == 2
        assert arrays.to_host(store.find(tables, ids)).tolist() == [1, -1, -1]
        assert insert(store, *keys([(1, 1), (0, 1)])).tolist() == [2, 0]


def test_thread_order(xp):
    tables, ids = keys([(t, i) for t in range(5) for i in range(30)])

    def call():
        _, store = stores(xp)
        for part in (slice(0, 40), slice(20, 150)):
            rows = insert(store, tables[part], ids[part])
        exported = store.export_rows(0, len(store))
        return [xp.asarray(a) for a in (rows, *exported[:3], *exported.states.values())]

    oracle.check_thread_order(xp, call)


@pytest.mark.parametrize("width", [3, 4, 9])
def test_another_state_on_a_device(xp, width):
    made = stores(xp, width, STATE[1:])
    ids = np.arange(21)
    for store in made:
        insert(store, np.zeros(21, np.uint32), ids)
        store.set_state(STATE)
    check_alike(*made)
    insert(made[0], np.ones(9, np.uint32), ids[:9])
    insert(made[1], np.ones(9, np.uint32), ids[:9])
    check_alike(*made)


def test_bytes_of_a_device_are_those_of_its_chunks(xp, monkeypatch):
    monkeypatch.setattr(memory_store, "_CHUNK_BYTES", 512)  # 16 rows
    store = MemoryStore(3, xp)
    store.set_state(STATE)
    for length, rows in [(1, 1), (5, 8), (16, 16), (17, 32), (40, 48)]:
        ids = np.arange(len(store), length)
        insert(store, np.zeros(ids.size, np.uint32), ids)
        assert store.nbytes == store._index.nbytes + 32 * rows

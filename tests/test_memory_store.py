import copy
import signal
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import sentence

from cupyrec.embedding import MemoryStore, Rows, StatePart, memory_store
from cupyrec.ops.embedding_rows import BFLOAT16, FLOAT16, FLOAT32, gather_rows
from cupyrec.ops.hash_segments import Segments
from cupyrec.ops.sgd import sgd_rows

ENDS = [-(2**63), -1, 0, 1, 2**63 - 1]


def numbered(width):
    """Vectors that tell of their key."""

    def initial(tables, ids):
        key = (tables.astype(np.int64) * 1000 + ids % 1000)[:, None]
        return (key + np.arange(width) / 8).astype(np.float32)

    return initial


def keys(pairs):
    return np.array([t for t, _ in pairs], np.uint32), np.array([i for _, i in pairs], np.int64)


def vectors(store, rows):
    out = np.empty((len(rows), store.width), np.float32)
    unseen, every = np.empty((0, store.width), np.float32), np.arange(len(rows))
    store.read(rows, lambda memory, rows: gather_rows(memory, rows, every, unseen, out))
    return out


key = st.tuples(st.integers(0, 3), st.sampled_from([*ENDS, 7, 8, 9, 10**12]))


@given(st.lists(st.lists(key, unique=True, max_size=9), max_size=6), st.integers(1, 5))
def test_against_a_dict(batches, width):
    store, known = MemoryStore(width), {}
    for batch in batches:
        tables, ids = keys(batch)
        before = store.find(tables, ids)
        assert before.tolist() == [known.get(pair, -1) for pair in batch]
        for pair in batch:
            known.setdefault(pair, len(known))
        rows = store.find_or_insert(tables, ids, numbered(width))
        assert rows.tolist() == [known[pair] for pair in batch]
        np.testing.assert_array_equal(vectors(store, rows), numbered(width)(tables, ids))
    assert len(store) == len(known)
    exported = store.export_rows(0, len(store))
    pairs = list(zip(exported.tables.tolist(), exported.ids.tolist(), strict=True))
    assert pairs == list(known)
    assert exported.vectors.dtype == np.float32
    np.testing.assert_array_equal(exported.vectors, numbered(width)(*keys(pairs)))


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 4 rows of 8 floats."""
    monkeypatch.setattr(memory_store, "_CHUNK_BYTES", 128)


STATE = StatePart("sum", 3, 0.5), StatePart("more", 1, -1.0)


def test_growth_over_chunks_moves_nothing(small_chunks):
    store = MemoryStore(3)
    store.set_state(STATE)
    addresses = []
    for first in range(0, 40, 5):  # chunks are filled in the middle of a call
        tables, ids = np.zeros(5, np.uint32), np.arange(first, first + 5)
        store.find_or_insert(tables, ids, numbered(3))
        addresses.append(store._memory.chunks.tolist())
    assert len(addresses[-1]) == 10
    assert all(
        now[: len(before)] == before for before, now in zip(addresses, addresses[1:], strict=False)
    )
    every = store.export_rows(0, 40)
    for first, stop in [(0, 40), (3, 4), (3, 5), (4, 8), (7, 33), (39, 40), (0, 0), (40, 40)]:
        part = store.export_rows(first, stop)
        np.testing.assert_array_equal(part.ids, np.arange(first, stop))
        np.testing.assert_array_equal(part.vectors, numbered(3)(part.tables, part.ids))
        for name in ("sum", "more"):
            np.testing.assert_array_equal(part.states[name], every.states[name][first:stop])
    assert (every.states["sum"] == 0.5).all()
    assert (every.states["more"] == -1).all()
    assert every.states["more"].shape == (40, 1)


def test_update_changes_the_rows_given(small_chunks):
    store = MemoryStore(3)
    store.set_state(STATE)
    ids = np.arange(20)
    store.find_or_insert(np.zeros(20, np.uint32), ids, numbered(3))
    before = store.export_rows(0, 20)

    def rule(memory, rows):
        assert rows.tolist() == [17, 2]
        memory_rows = store._chunks[4][1], store._chunks[0][2]
        for row in memory_rows:
            row[:3] = 99
            row[3:6] = 7

    store.update(np.array([17, 2]), rule)
    after = store.export_rows(0, 20)
    changed = [2, 17]
    rest = np.delete(ids, changed)
    np.testing.assert_array_equal(after.vectors[changed], np.full((2, 3), 99))
    np.testing.assert_array_equal(after.states["sum"][changed], np.full((2, 3), 7))
    np.testing.assert_array_equal(after.states["more"], before.states["more"])
    np.testing.assert_array_equal(after.vectors[rest], before.vectors[rest])


def test_set_state_starts_all_state_anew(small_chunks):
    store = MemoryStore(3)
    store.set_state(STATE)
    store.find_or_insert(np.zeros(9, np.uint32), np.arange(9), numbered(3))
    store.update(np.array([0]), lambda memory, rows: store._chunks[0][0, 3:6].fill(8))
    before = store.export_rows(0, 9)
    assert (before.states["sum"][0] == 8).all()
    for state in (STATE, (StatePart("new", 5, 2.0), StatePart("sum", 1, 0.5))):
        store.set_state(state)
        after = store.export_rows(0, 9)
        assert list(after.states) == [part.name for part in state]
        for part in state:
            np.testing.assert_array_equal(
                after.states[part.name], np.full((9, part.columns), part.initial)
            )
        np.testing.assert_array_equal(after.vectors, before.vectors)
        np.testing.assert_array_equal(after.ids, before.ids)
    store.set_state(())
    assert store.export_rows(0, 9).states == {}
    np.testing.assert_array_equal(store.find(before.tables, before.ids), np.arange(9))


@pytest.mark.parametrize("step", [1, 3, 7])
def test_the_first_chunk_doubles_until_it_is_full(step, monkeypatch):
    monkeypatch.setattr(memory_store, "_CHUNK_BYTES", 512)  # 16 rows of 8 floats
    store, sizes = MemoryStore(3), []
    store.set_state(STATE)
    for first in range(0, 42, step):
        tables, ids = np.zeros(step, np.uint32), np.arange(first, first + step)
        store.find_or_insert(tables, ids, numbered(3))
        sizes.append([len(chunk) for chunk in store._chunks])
        length = len(store)
        assert sum(sizes[-1]) < 2 * length if length <= 16 else set(sizes[-1]) == {16}
    assert len(sizes[-1]) == 3
    rows = store.export_rows(0, 42)
    np.testing.assert_array_equal(rows.ids, np.arange(42))
    np.testing.assert_array_equal(rows.vectors, numbered(3)(rows.tables, rows.ids))
    np.testing.assert_array_equal(rows.states["sum"], np.full((42, 3), 0.5))


@pytest.mark.parametrize("value", [FLOAT32, FLOAT16, BFLOAT16])
def test_set_state_lets_each_chunk_go_once_its_rows_are_moved(small_chunks, monkeypatch, value):
    store = MemoryStore(3, value=value)
    store.find_or_insert(np.zeros(30, np.uint32), np.arange(30), numbered(3))
    before, index = store.export_rows(0, 30), store._index
    former = [weakref.ref(chunk) for chunk in store._chunks]
    alive, fill = [], MemoryStore._fill

    def watched(*arguments):
        alive.append(sum(chunk() is not None for chunk in former))
        fill(*arguments)

    monkeypatch.setattr(MemoryStore, "_fill", watched)
    store.set_state(STATE)
    assert len(former) > 3
    assert alive == list(range(len(former), 0, -1))
    assert store._index is index  # no key is inserted anew
    after = store.export_rows(0, 30)
    np.testing.assert_array_equal(after.vectors, before.vectors)
    np.testing.assert_array_equal(after.states["sum"], np.full((30, 3), 0.5))


@pytest.mark.parametrize(
    ("where", "name"),
    [(Segments, "insert"), (Segments, "forget"), (MemoryStore, "_fill"), (MemoryStore, "_write")],
)
def test_an_interrupted_change_is_whole(small_chunks, monkeypatch, where, name):
    store, change = MemoryStore(3), getattr(where, name)
    tables, ids = np.zeros(40, np.uint32), np.arange(40)
    store.find_or_insert(tables[:20], ids[:20], numbered(3))

    def interrupted(*arguments):
        change(*arguments)
        signal.raise_signal(signal.SIGINT)

    calls = [
        lambda: store.find_or_insert(tables[:25], ids[:25], numbered(3)),
        lambda: store.delete(tables[:7], ids[:7]),
        lambda: store.set_state(STATE),
        lambda: store.import_rows(Rows(tables[30:], ids[30:], numbered(3)(tables, ids)[30:], {})),
    ]
    monkeypatch.setattr(where, name, interrupted)
    stopped = 0
    for call in calls:
        try:
            call()
        except KeyboardInterrupt:
            stopped += 1
    assert stopped
    monkeypatch.undo()
    store.find_or_insert(tables, ids, numbered(3))
    assert len(store) == 40
    rows = store.export_rows(0, 40)
    assert sorted(rows.ids) == list(range(40))
    np.testing.assert_array_equal(rows.vectors, numbered(3)(rows.tables, rows.ids))
    np.testing.assert_array_equal(store.find(rows.tables, rows.ids), np.arange(40))
    np.testing.assert_array_equal(rows.states["more"], np.full((40, 1), -1))


def test_exports_are_copies():
    store = MemoryStore(2)
    store.set_state((StatePart("s", 2, 0.0),))
    store.find_or_insert(np.zeros(3, np.uint32), np.arange(3), numbered(2))
    first = store.export_rows(0, 3)
    for array in (first.tables, first.ids, first.vectors, first.states["s"]):
        array[...] = 77
    assert store.export_rows(0, 3).ids.tolist() == [0, 1, 2]
    assert not (store.export_rows(0, 3).vectors == 77).any()
    assert not store.export_rows(0, 3).states["s"].any()


def test_what_was_imported_is_exported():
    tables, ids = keys([(t, i) for t in (0, 2**32 - 1) for i in ENDS])
    generator = np.random.default_rng(0)
    values = {name: generator.normal(size=(10, 2)).astype(np.float32) for name in "vm"}
    store = MemoryStore(2)
    store.set_state((StatePart("m", 2, 0.0), StatePart("n", 1, 3.0)))
    store.import_rows(Rows(tables, ids, values["v"], {"m": values["m"], "unknown": values["m"]}))
    got = store.export_rows(0, 10)
    np.testing.assert_array_equal(got.tables, tables)
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_array_equal(got.vectors, values["v"])
    np.testing.assert_array_equal(got.states["m"], values["m"])
    np.testing.assert_array_equal(got.states["n"], np.full((10, 1), 3))
    assert store.find(tables[::-1].copy(), ids[::-1].copy()).tolist() == list(range(9, -1, -1))


def test_bytes_grow_with_rows():
    store = MemoryStore(4)
    sizes = [store.nbytes]
    for n in (10, 10_000):
        store.find_or_insert(np.full(n, n, np.uint32), np.arange(n), numbered(4))
        sizes.append(store.nbytes)
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] >= 10_010 * (4 * 4 + 12 + 8)


def test_what_is_refused():
    store = MemoryStore(3)
    tables, ids = keys([(0, 1), (0, 2)])
    store.find_or_insert(tables, ids, numbered(3))
    for first, stop in [(-1, 1), (0, 3), (2, 1), (3, 3)]:
        text = f"export_rows: 0 <= first <= stop <= 2 must hold, got {first}, {stop}."
        with pytest.raises(ValueError, match=sentence(text)):
            store.export_rows(first, stop)
    for width in (0, -1):
        text = f"MemoryStore: 'width' must be at least 1, got {width}."
        with pytest.raises(ValueError, match=sentence(text)):
            MemoryStore(width)
    with pytest.raises(TypeError, match="'ids' must be int64, got float64"):
        store.find(tables, ids.astype(float))
    with pytest.raises(TypeError, match="'tables' must be uint32, got int64"):
        store.find_or_insert(tables.astype(np.int64), ids, numbered(3))
    text = "import_rows: 'vectors' must have axes (N, 3), got shape (2, 2)."
    with pytest.raises(ValueError, match=sentence(text)):
        store.import_rows(Rows(tables, ids + 5, np.zeros((2, 2), np.float32), {}))
    text = "import_rows: 'ids' must have N = 2 like 'tables', got shape (1,)."
    with pytest.raises(ValueError, match=sentence(text)):
        store.import_rows(Rows(tables, ids[:1], np.zeros((2, 3), np.float32), {}))
    assert len(store) == 2


def test_a_copy_has_rows_of_its_own():
    store = MemoryStore(2)
    tables, ids = np.zeros(3, np.uint32), np.array([5, -1, 7])
    store.find_or_insert(tables, ids, lambda t, i: np.ones((len(i), 2), np.float32))
    other = copy.deepcopy(store)
    other.update(np.array([0, 1]), lambda m, r: sgd_rows(m, r, np.ones((2, 2), np.float32), lr=1.0))
    assert store.export_rows(0, 3).vectors.tolist() == [[1, 1]] * 3
    del store
    assert other.export_rows(0, 3).vectors.tolist() == [[0, 0], [0, 0], [1, 1]]
    assert other.find(tables, ids).tolist() == [0, 1, 2]


def test_no_row_stays_that_has_no_vector():
    store = MemoryStore(3)
    store.find_or_insert(*keys([(0, 1), (0, 2)]), numbered(3))

    def fails(tables, ids):
        raise MemoryError("no room")

    tables, ids = keys([(0, 2), (0, 3)])
    with pytest.raises(MemoryError, match="no room"):
        store.find_or_insert(tables, ids, fails)
    assert len(store) == 2
    assert store.find(tables, ids).tolist() == [1, -1]
    store.to(np)
    assert store.find_or_insert(tables, ids, numbered(3)).tolist() == [1, 2]


def test_imported_state_has_its_shape_and_dtype():
    """Another would lie on what follows it."""
    store, (tables, ids) = MemoryStore(2), keys([(0, 1)])
    store.set_state((StatePart("sum", 1, 0.0),))
    vectors = np.zeros((1, 2), np.float32)
    for sums, error in [
        (np.zeros((1, 2), np.float32), ValueError), (np.zeros((1, 1), np.int32), TypeError),
    ]:  # fmt: skip
        with pytest.raises(error, match="^import_rows: 'sum' must "):
            store.import_rows(Rows(tables, ids, vectors, {"sum": sums}))
    assert len(store) == 0


def test_no_memory_for_a_second_chunk_leaves_the_store_as_it_was(monkeypatch):
    store = MemoryStore(1024)
    store.find_or_insert(np.zeros(9, np.uint32), np.arange(9), numbered(1024))
    real, left = memory_store.arrays.pages, iter(range(1))

    def pages(shape, dtype):
        if isinstance(shape, tuple) and shape[-1] == 1024 and next(left, None) is None:
            raise MemoryError("no room")
        return real(shape, dtype)

    monkeypatch.setattr(memory_store.arrays, "pages", pages)
    tables, ids = np.zeros(20_000, np.uint32), np.arange(20_000)
    with pytest.raises(MemoryError, match="no room"):
        store.find_or_insert(tables, ids, numbered(1024))
    monkeypatch.undo()
    assert len(store) == 9
    rows = store.find_or_insert(tables, ids, numbered(1024))
    np.testing.assert_array_equal(vectors(store, rows), numbered(1024)(tables, ids))

"""HashTable on the CPU, against a dict."""

import copy
import os
import subprocess
import sys

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyrec import arrays as devices
from cupyrec import cpu, huge_pages
from cupyrec.ops import hash_table
from cupyrec.ops.hash_key import hash_key
from cupyrec.ops.hash_segments import CHUNK
from cupyrec.ops.hash_table import HashTable

LOW, HIGH = -(2**63), 2**63 - 1

#: Ids that have been special to somebody, neighbours, and multiples of large powers of two.
adversarial_ids = st.one_of(
    st.sampled_from([LOW, LOW + 1, -2, -1, 0, 1, 2, HIGH - 1, HIGH, 2**31 - 1, 2**31, -(2**31)]),
    st.integers(-20, 20),
    st.builds(lambda n, k: n << k, st.integers(-8, 7), st.integers(0, 60)),
    st.integers(LOW, HIGH),
)
table_numbers = st.sampled_from([0, 1, 2, 25, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
keys = st.lists(st.tuples(table_numbers, adversarial_ids), max_size=80)


def arrays(pairs):
    """(tables, ids) as arrays of a list of keys."""
    tables, ids = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(tables, np.uint32), np.array(ids, np.int64)


class Model:
    """What a table has to do, by a dict of key to row and a list of keys by row."""

    def __init__(self):
        self.by_row, self.rows = [], {}

    def find(self, pairs):
        return [self.rows.get(pair, -1) for pair in pairs]

    def insert(self, pairs):
        for pair in pairs:
            self.rows[pair] = len(self.by_row)
            self.by_row.append(pair)

    def find_or_insert(self, pairs):
        self.insert([pair for pair in pairs if pair not in self.rows])
        return self.find(pairs)

    def truncate(self, length):
        for pair in self.by_row[length:]:
            del self.rows[pair]
        del self.by_row[length:]

    def delete(self, pairs):
        free = {self.rows.pop(pair) for pair in pairs if pair in self.rows}
        length = len(self.by_row) - len(free)
        moved_to = sorted(row for row in free if row < length)
        moved_from = [row for row in range(length, len(self.by_row)) if row not in free]
        for start, end in zip(moved_from, moved_to, strict=True):
            self.by_row[end] = self.by_row[start]
            self.rows[self.by_row[end]] = end
        del self.by_row[length:]
        return moved_from, moved_to


#: Calls, each with keys that those of others meet now and then.
calls = st.lists(
    st.tuples(st.sampled_from(["find_or_insert", "insert", "delete", "truncate"]), keys), max_size=8
)


def call(table, model, name, batch):
    """Do one of `calls` to both; return what they answer."""
    batch = batch if name == "delete" else list(dict.fromkeys(batch))
    if name == "truncate":
        length = len(model.by_row) * (len(batch) % 5) // 4
        return table.truncate(length), model.truncate(length)
    if name == "insert":
        batch = [pair for pair in batch if pair not in model.rows]
    tables, ids = (devices.copy_to(table.xp, a) for a in arrays(batch))
    got, expected = getattr(table, name)(tables, ids), getattr(model, name)(batch)
    if name == "insert":
        return got, expected
    got = [devices.to_host(a) for a in (got if name == "delete" else [got])]
    assert [a.dtype for a in got] == [np.int64] * len(got)
    got = [a.tolist() for a in got]
    return got, list(expected) if name == "delete" else [expected]


def pairs_of(table, first, stop):
    tables, ids = (devices.to_host(a) for a in table.keys(first, stop))
    assert (tables.dtype, ids.dtype) == (np.uint32, np.int64)
    return list(zip(tables.tolist(), ids.tolist(), strict=True))


@settings(max_examples=40)
@given(calls, keys)
def test_behaves_like_a_dict(calls, questions):
    table, model = HashTable(), Model()
    for name, batch in calls:
        got, expected = call(table, model, name, batch)
        assert got == expected
        asked = questions + batch
        rows = table.find(*arrays(asked))
        assert rows.dtype == np.int64
        assert rows.tolist() == model.find(asked)
        assert len(table) == len(model.by_row)  # looking up inserted nothing
        first, stop = len(table) // 3, len(table) - len(table) // 4
        assert pairs_of(table, first, stop) == model.by_row[first:stop]
    assert pairs_of(table, 0, len(table)) == model.by_row


@pytest.mark.parametrize("step", [1, -1, 2**20, 2**40, 2**48])
def test_grows_over_chunks_and_sizes(step):
    table, total = HashTable(), CHUNK + 3000
    ids = np.arange(total, dtype=np.int64) * step
    tables = np.arange(total, dtype=np.uint32) % 3
    ids[-1] = LOW
    done = 0
    for n in [1, 511, 1, 100, 5000, 0, total]:
        stop = min(total, done + n)
        table.insert(tables[done:stop], ids[done:stop])
        done = stop
        assert len(table) == done
        np.testing.assert_array_equal(table.find(tables[:done], ids[:done]), np.arange(done))
        assert (table.find(tables[done:], ids[done:]) == -1).all()
    for first, stop in [(0, total), (5, 5), (CHUNK - 1, CHUNK + 1), (CHUNK, total)]:
        got = table.keys(first, stop)
        np.testing.assert_array_equal(got[0], tables[first:stop])
        np.testing.assert_array_equal(got[1], ids[first:stop])
    assert 0.5 < table.load <= 0.8
    assert (table.find(tables + np.uint32(3), ids) == -1).all()


def scenario(seed=0):
    """Random calls at a size where there are many blocks; return all they gave."""
    generator = np.random.default_rng(seed)
    table, given = HashTable(), []
    for _ in range(3):
        ids = generator.permutation(60_000)[:30_000] << 20
        tables = (ids >> 20).astype(np.uint32) % 3
        given.append(table.find_or_insert(tables, ids))
        given += table.delete(tables[::3], ids[::3])
        given.append(table.find(tables, ids))
    return [*given, *table.keys(0, len(table))]


def test_any_number_of_threads_gives_the_same_rows():
    before, results = cpu.num_threads(), []
    try:
        for threads in (1, 2, 5):
            cpu.set_num_threads(threads)
            results.append([a.tobytes() for a in scenario()])
    finally:
        cpu.set_num_threads(before)
    assert results == results[:1] * 3
    assert len(set(results[0])) > 10


def test_huge_pages_change_no_row(monkeypatch):
    expected = [a.tobytes() for a in scenario()]
    monkeypatch.setattr(huge_pages, "_LEAST", 1 << 11)
    monkeypatch.setattr(hash_table, "_MANY", 2)
    assert [a.tobytes() for a in scenario()] == expected


def test_keys_stay_where_they_are_while_a_table_grows(monkeypatch):
    """Into huge pages, too: to move all there at once would be a pause."""
    monkeypatch.setattr(hash_table, "_MANY", 4)
    table, before = HashTable(), np.empty(0, np.uint64)
    for first in range(0, 8 * CHUNK, 2 * CHUNK):
        table.insert(np.zeros(2 * CHUNK, np.uint32), np.arange(first, first + 2 * CHUNK))
        assert table._chunks[: before.size].tolist() == before.tolist()
        assert (table._pages.spare > 0) == (len(table) >= 4 * CHUNK)
        before = table._chunks


def test_slots_and_keys_take_at_most_24_bytes_each():
    generator, table = np.random.default_rng(0), HashTable()
    for _ in range(20):
        ids = generator.integers(LOW, HIGH, 200_000)
        table.insert(np.zeros(ids.size, np.uint32), ids)
    assert table._pages.spare + table._slots._pages.spare > 0
    assert 22 < table.nbytes / len(table) <= 24
    np.testing.assert_array_equal(
        table.find(np.zeros(ids.size, np.uint32), ids), np.arange(3_800_000, 4_000_000)
    )


SLACK = 20 << 20  # 15 MB is the most that was seen
RESIDENT = """
import numpy as np
from test_huge_pages import resident
from cupyrec.ops.hash_table import HashTable

def grow(table, stop):
    while len(table) < stop:
        ids = np.arange(len(table), len(table) + 20_000) * -7046029254386353131
        table.insert(np.zeros(ids.size, np.uint32), ids)

grow(HashTable(), 100_000)  # what the loops themselves take
table, before = HashTable(), resident()
for stop in (1_000_000, 3_000_000, 6_000_000):
    grow(table, stop)
    print(stop, table.nbytes, resident() - before)
"""


def test_the_system_holds_little_more_than_is_counted():
    """In a process of its own, where no other test has left memory to use again."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    lines = subprocess.run(
        [sys.executable, "-c", RESIDENT],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert len(lines) == 3
    for ids, counted, held in (map(int, line.split()) for line in lines):
        assert counted <= 24 * ids
        assert counted - ids <= held <= counted + SLACK


def test_large_deletions_against_a_dict():
    table, model = HashTable(), Model()
    generator = np.random.default_rng(0)
    every = [(int(t), int(i)) for t, i in enumerate(generator.integers(LOW, HIGH, 20_000))]
    for name, batch in [
        ("insert", every), ("delete", every[::2]), ("find_or_insert", every[5000:7000]),
        ("delete", every[:19_000]), ("find_or_insert", every), ("delete", every),
        ("insert", every[:10]),
    ]:  # fmt: skip
        got, expected = call(table, model, name, batch)
        assert got == expected
        assert table.find(*arrays(every)).tolist() == model.find(every)


def test_memory_of_deleted_keys_is_used_again_or_given_back():
    table = HashTable()
    ids = np.arange(10 * CHUNK)
    tables = np.zeros(ids.size, np.uint32)
    empty = table.nbytes
    for first in range(0, ids.size, CHUNK):
        table.insert(tables[first : first + CHUNK], ids[first : first + CHUNK])
    full = table.nbytes
    table.delete(tables[::2], ids[::2])
    table.insert(tables[::2], ids[::2])
    assert table.nbytes == full
    table.delete(tables[5:], ids[5:])
    assert table.nbytes <= full / 4
    table.insert(tables[5:], ids[5:])
    table.truncate(0)
    assert (len(table), table.load) == (0, 0)
    assert table.nbytes <= empty + full / 4


def test_looking_up_changes_no_byte():
    table = HashTable()
    table.insert(np.zeros(9000, np.uint32), np.arange(9000))

    def memory():
        return [a.tobytes() for a in (*table._slots._slots, table._chunks, *table._blocks)]

    before = memory()
    assert (table.find(np.ones(9000, np.uint32), np.arange(9000)) == -1).all()
    assert memory() == before


def test_a_copy_is_its_own():
    tables, ids = np.zeros(3000, np.uint32), np.arange(3000)
    table = HashTable()
    table.insert(tables, ids)
    other = copy.deepcopy(table)
    table.delete(tables[:2999], ids[:2999])
    np.testing.assert_array_equal(other.find(tables, ids), ids)
    other.insert(tables + np.uint32(1), ids)
    assert (len(table), len(other)) == (1, 6000)
    del table
    np.testing.assert_array_equal(other.find_or_insert(tables + np.uint32(1), ids), ids + 3000)


def test_no_memory_leaves_the_table_as_it_was(monkeypatch):
    tables, ids = np.zeros(90_000, np.uint32), np.arange(90_000)
    table = HashTable()
    table.insert(tables[:30_000], ids[:30_000])
    real, left = devices.pages, iter(range(40))

    def pages(shape, dtype):
        if next(left, None) is None:
            raise MemoryError("no room")
        return real(shape, dtype)

    monkeypatch.setattr(devices, "pages", pages)
    with pytest.raises(MemoryError, match="no room"):
        table.find_or_insert(tables, ids)
    assert len(table) == 30_000
    np.testing.assert_array_equal(table.find(tables, ids), np.where(ids < 30_000, ids, -1))
    monkeypatch.undo()
    np.testing.assert_array_equal(table.find_or_insert(tables, ids[::-1]), [
        *range(30_000, 90_000), *range(29_999, -1, -1)])  # fmt: skip


def test_one_id_in_many_tables():
    tables = np.arange(5000, dtype=np.uint32) * np.uint32(858_993)
    ids = np.full(5000, LOW)
    table = HashTable()
    table.insert(tables, ids)
    np.testing.assert_array_equal(table.find(tables, ids), np.arange(5000))
    assert (table.find(tables + np.uint32(1), ids) == -1).all()


def test_keys_of_equal_hash_are_told_apart():
    """All of its 64 bits."""
    tables, ids = oracle.keys_of_equal_hash(50)
    hashes = {int(hash_key(*key)) for key in zip(tables, ids, strict=True)}
    assert len(hashes) == 1
    table = HashTable()
    table.insert(tables[::2], ids[::2])
    expected = np.where(np.arange(50) % 2, -1, np.arange(50) // 2)
    np.testing.assert_array_equal(table.find(tables, ids), expected)
    moved = table.delete(tables[4:], ids[4:])
    assert [a.tolist() for a in moved] == [[], []]
    assert table.find(tables, ids).tolist() == [0, -1, 1, *[-1] * 47]


def test_ids_a_constant_apart_do_not_collide_across_tables():
    """As those of a log whose ids are themselves hashed by multiplying."""
    for constant in (1, 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        ids = np.array([n * constant % 2**64 for n in range(100)], np.uint64).view(np.int64)
        hashes = {int(hash_key(np.uint32(t), i)) for t in range(30) for i in ids}
        assert len(hashes) == 3000


def test_empty():
    table = HashTable()
    empty = np.empty(0, np.uint32), np.empty(0, np.int64)
    assert (len(table), table.find(*empty).shape) == (0, (0,))
    table.insert(*empty)
    assert [a.size for a in (*table.keys(0, 0), *table.delete(*empty))] == [0, 0, 0, 0]
    assert (len(table), table.load) == (0, 0)
    assert table.find(np.zeros(3, np.uint32), np.array([0, -1, LOW])).tolist() == [-1, -1, -1]


def test_same_bits():
    generator = np.random.default_rng(0)
    ids, tables = generator.integers(LOW, HIGH, 10_000), np.zeros(10_000, np.uint32)
    table = HashTable()
    table.insert(tables[:6000], ids[:6000])
    oracle.check_same_bits(lambda: [table.find(tables, ids)])


# Errors

REFUSED = [
    (np.zeros(2, np.int64), np.zeros(2, np.int64), TypeError,
     "'tables' must be uint32, got int64."),
    (np.zeros(2, np.uint32), np.zeros(2), TypeError, "'ids' must be int64, got float64."),
    (np.zeros(2, np.uint32), np.zeros(2, np.int32), TypeError,
     "'ids' must be int64, got int32."),
    (np.zeros(2, np.uint32), np.zeros(3, np.int64), ValueError,
     "'ids' must have N = 2 like 'tables', got shape (3,)."),
    (np.zeros((2, 1), np.uint32), np.zeros(2, np.int64), ValueError,
     "'tables' must have axes (N), got shape (2, 1)."),
    ([0], np.zeros(1, np.int64), TypeError,
     "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got list."),
]  # fmt: skip


@pytest.mark.parametrize(("tables", "ids", "error", "text"), REFUSED)
def test_refuses(tables, ids, error, text):
    table = HashTable()
    for name in ("find", "find_or_insert", "insert", "delete"):
        with pytest.raises(error, match=oracle.sentence(f"HashTable.{name}: {text}")):
            getattr(table, name)(tables, ids)
    assert len(table) == 0


@pytest.mark.parametrize(("first", "stop"), [(-1, 1), (0, 3), (2, 1), (3, 3)])
def test_refuses_rows_that_are_not_there(first, stop):
    table = HashTable()
    table.insert(np.zeros(2, np.uint32), np.arange(2))
    text = f"HashTable.keys: 0 <= first <= stop <= 2 must hold, got {first}, {stop}."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        table.keys(first, stop)

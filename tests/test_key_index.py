"""KeyIndex against a dict; what it may answer for keys that are not there."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hash_table import HIGH, LOW, adversarial_ids, arrays, table_numbers
from test_place_segments import id_of_hash, place_of

from cupyrec import arrays as devices
from cupyrec import cpu, sim
from cupyrec.ops.hash_table import HashTable
from cupyrec.ops.key_index import KeyIndex
from cupyrec.ops.partition import owners

LIMIT = 2**36


class WeakIndex(KeyIndex):
    """Of so few places, 48 in 4 segments or 16, that most keys meet others."""

    _PLACE_BITS = 6
    _SEGMENT_BITS = 2, 4


def weak_place(pair):
    return place_of(*pair, 6, 2)


def full_place(pair):
    return place_of(*pair, 42, 28)


key = st.tuples(table_numbers, adversarial_ids)
rows = st.integers(0, 20) | st.integers(0, LIMIT - 1) | st.sampled_from([2**29, LIMIT - 1])
calls = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "delete", "replace"]),
        st.lists(st.tuples(key, rows), max_size=60, unique_by=lambda pair: pair[0]),
    ),
    max_size=8,
)


def call(index, model, name, batch):
    """Do one of `calls` to both, of the keys for which it may be done."""
    batch = [(pair, row) for pair, row in batch if (pair in model) != (name == "insert")]
    pairs, new = [pair for pair, _ in batch], np.array([row for _, row in batch], np.int64)
    if name == "delete":
        assert index.delete(*arrays(pairs)) is None
        for pair in pairs:
            del model[pair]
    else:
        assert getattr(index, name)(*arrays(pairs), new) is None
        model |= dict(batch)


def check_found(index, model, asked, place):
    """Rows of those that are there; for others -1, or the row of one whose place is the same."""
    found = index.find(*arrays(asked))
    assert found.dtype == np.int64
    there = {}
    for pair, row in model.items():
        there.setdefault(place(pair), set()).add(row)
    for pair, row in zip(asked, found.tolist(), strict=True):
        if pair in model:
            assert row == model[pair]
        else:
            assert row in there.get(place(pair), set()) | {-1}
    assert len(index) == len(model)


@pytest.mark.parametrize(
    ("kind", "place"), [(KeyIndex, full_place), (WeakIndex, weak_place)], ids=["full", "weak"]
)
@settings(max_examples=25)
@given(calls=calls, questions=st.lists(key, max_size=20))
def test_behaves_like_a_dict(kind, place, calls, questions):
    index, model = kind(), {}
    for name, batch in calls:
        call(index, model, name, batch)
        check_found(index, model, questions + [pair for pair, _ in batch] + [*model], place)
    index.clear()
    check_found(index, {}, questions, place)


def test_most_keys_of_a_weak_index_meet_others():
    """So the test above is one of meetings: places are taken and become free again."""
    index, model = WeakIndex(), {}
    pairs = [(0, i) for i in range(300)]
    call(index, model, "insert", [(pair, i) for i, pair in enumerate(pairs)])
    assert 40 <= len(index._segments) <= 60 < 240 <= len(index._met)
    firsts = {}
    for pair in pairs:
        firsts.setdefault(weak_place(pair), pair)
    for batch in ([*firsts.values()], pairs[::2], pairs[200:]):
        call(index, model, "delete", [(pair, 0) for pair in batch])
        check_found(index, model, pairs, weak_place)
    call(index, model, "insert", [(pair, LIMIT - 1 - i) for i, pair in enumerate(pairs)])
    check_found(index, model, pairs, weak_place)
    call(index, model, "replace", [(pair, i) for i, pair in enumerate(pairs)])
    check_found(index, model, pairs, weak_place)
    call(index, model, "delete", [(pair, 0) for pair in pairs])
    assert index.find(*arrays(pairs)).tolist() == [-1] * 300


def test_keys_of_one_place():
    """The hash's upper 42 bits: those of tables 0 to 9 are equal, 10's differ in the last."""
    bits = 0x123456789 << 28 | 7 << 22
    pairs = [(table, id_of_hash(table, bits + table)) for table in range(10)]
    pairs.append((10, id_of_hash(10, bits ^ 1 << 22)))
    index = KeyIndex()
    index.insert(*arrays(pairs[:1]), np.array([100]))
    assert index.find(*arrays(pairs)).tolist() == [100] * 10 + [-1]
    index.insert(*arrays(pairs[1:5]), np.arange(101, 105))
    assert index.find(*arrays(pairs)).tolist() == [*range(100, 105), *[100] * 5, -1]
    index.delete(*arrays(pairs[:1]))
    assert index.find(*arrays(pairs[1:])).tolist() == [*range(101, 105), *[-1] * 6]
    index.insert(*arrays(pairs[5:7]), np.array([105, 106]))
    index.delete(*arrays(pairs[2:6]))
    index.replace(*arrays([pairs[1], pairs[6]]), np.array([201, 206]))
    assert [index.find(*arrays([pairs[i]])).tolist() for i in (1, 6)] == [[201], [206]]
    assert (index.find(*arrays(pairs[2:6])) == -1).all()
    assert len(index) == 2


def random_keys(n, seed=0):
    ids = np.random.default_rng(seed).integers(LOW, HIGH, n)
    return (ids & 7).astype(np.uint32), ids


def insert_all(index, tables, ids, rows, batch):
    for first in range(0, ids.size, batch):
        part = slice(first, first + batch)
        index.insert(tables[part], ids[part], rows[part])


def test_bytes_of_a_key_while_an_index_grows():
    """A few KB of few keys; never more than 10.9 bytes a key of many, 10 on average."""
    tables, ids = random_keys(3_000_000)
    index, each = KeyIndex(), []
    assert index.nbytes <= 8192
    stops = [10, 100, 1000, *range(1700, 10_000, 700), *range(10_000, 3_000_001, 26_000)]
    for first, stop in zip([0, *stops], stops, strict=False):
        index.insert(tables[first:stop], ids[first:stop], np.arange(first, stop))
        assert index.nbytes <= 10.9 * stop + 8192
        if stop >= 10_000:
            each.append(index.nbytes / stop)
            assert 0.79 <= index.load <= 0.88
    assert len(each) == 116
    assert 9 < np.mean(each) <= 10
    assert max(each[10:]) <= 10
    np.testing.assert_array_equal(index.find(tables, ids), np.r_[:stop, [-1] * (3_000_000 - stop)])


def test_keys_that_are_not_there_are_found_rarely():
    """About n / 2^42 of them; each of few if all were of the places of 20 bits fewer."""
    index, n = KeyIndex(), 1_000_000
    tables, ids = random_keys(n)
    insert_all(index, tables, ids, np.arange(n), 100_000)
    tables, ids = random_keys(2 * n, seed=1)
    assert (index.find(tables, ids) >= 0).sum() <= 5  # 0.5 are expected
    weak = type("Weak", (KeyIndex,), {"_PLACE_BITS": 22, "_SEGMENT_BITS": (7, 14)})()
    insert_all(weak, tables[:n], ids[:n], np.arange(n), 100_000)
    share = len(weak._segments) / 2**22
    assert 0.18 < share < 1 - np.exp(-n / 2**22) + 0.01
    assert abs((weak.find(*random_keys(n, seed=2)) >= 0).mean() - share) < 0.005


@pytest.mark.parametrize("first", [0, 2**29 - 1000, LIMIT - 3000])
def test_rows_of_any_size(first):
    """More segments are taken once rows need them, in the midst of it, and no key is lost."""
    tables, ids = random_keys(3000)
    rows = np.random.default_rng(1).permutation(np.arange(first, first + 3000))
    rows = np.sort(rows) if first == 2**29 - 1000 else rows
    index = KeyIndex()
    insert_all(index, tables, ids, rows, 100)
    assert len(index._segments._slots) == (128 if first == 0 else 16_384)
    np.testing.assert_array_equal(index.find(tables, ids), rows)
    index.replace(tables, ids, np.full(3000, LIMIT - 1))
    assert (index.find(tables, ids) == LIMIT - 1).all()
    index.delete(tables[1:], ids[1:])
    assert index.find(tables[:2], ids[:2]).tolist() == [LIMIT - 1, -1]
    index.clear()
    assert (len(index), index.load) == (0, 0)
    assert index.nbytes <= 8192


def test_keys_of_one_rank_take_all_segments_alike():
    """So no bit is of those that tell the owner; nor do regular ids crowd."""
    ids = np.arange(3_200_000) << 12
    tables = (ids >> 12 & 3).astype(np.uint32)
    own = owners(tables, ids, 64) == 5
    index = KeyIndex()
    index.insert(tables[own], ids[own], np.arange(own.sum()))
    counts = index._segments._table[:, 2].astype(np.int64)
    mean = own.sum() / 128
    assert 380 < mean < 400
    assert abs(counts - mean).max() <= 5 * np.sqrt(mean)
    chi_square = ((counts - mean) ** 2 / mean).sum()
    assert 127 - 5 * 16 < chi_square < 127 + 5 * 16  # deviation: sqrt(2 * 127)


def scenario(order=None):
    """What an index answers while keys come and go, at a size where there are many blocks."""
    index, given = KeyIndex(), []
    tables, ids = random_keys(60_000)
    order = np.arange(ids.size) if order is None else order
    for part in np.split(order, 3):
        index.insert(tables[part], ids[part], 7 * part)
        index.replace(tables[part[::5]], ids[part[::5]], part[::5])
        index.delete(tables[part[::3]], ids[part[::3]])
    given.append(index.find(tables, ids))
    return given, [a.tobytes() for a in index._segments._slots]


def test_any_number_of_threads_gives_the_same_bits():
    before, results = cpu.num_threads(), []
    try:
        for threads in (1, 2, 5):
            cpu.set_num_threads(threads)
            given, slots = scenario()
            results.append([a.tobytes() for a in given] + slots)
    finally:
        cpu.set_num_threads(before)
    assert results == results[:1] * 3
    assert len(set(results[0])) > 100


def test_the_order_of_insertion_changes_no_answer():
    tables, ids = random_keys(50_000)
    rows = np.arange(ids.size)
    weak = type("Weak", (KeyIndex,), {"_PLACE_BITS": 17, "_SEGMENT_BITS": (3, 6)})
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(ids.size)
        index = weak()
        insert_all(index, tables[order], ids[order], rows[order], 7000)
        assert len(index._met) > 1000
        np.testing.assert_array_equal(index.find(tables, ids), rows)


class HalfWeakIndex(KeyIndex):
    """Some of its first thousands of keys meet others, some do not."""

    _PLACE_BITS = 12
    _SEGMENT_BITS = 3, 6


@pytest.mark.parametrize("kind", [KeyIndex, HalfWeakIndex])
def test_no_memory_leaves_the_index_as_it_was(kind, monkeypatch):
    """Wherever memory ends: in the slots' growth, in that of keys that met, at more segments."""
    real, tables, ids = devices.pages, *random_keys(2000)
    rows = np.arange(2000) + 2**29 - 1000
    failed = 0
    for allowed in (0, 1, 2, *range(3, 60, 8), 150, 16_400):
        index = kind()
        index.insert(tables[:500], ids[:500], rows[:500])
        expected, left = index.find(tables, ids), iter(range(allowed))

        def pages(shape, dtype, left=left):
            if next(left, None) is None:
                raise MemoryError("no room")
            return real(shape, dtype)

        for batch in (slice(500, 900), slice(900, 2000)):
            monkeypatch.setattr(devices, "pages", pages)
            try:
                index.insert(tables[batch], ids[batch], rows[batch])
            except MemoryError:
                failed += 1
                monkeypatch.undo()
                assert len(index) == batch.start
                np.testing.assert_array_equal(index.find(tables, ids), expected)
                index.insert(tables[batch], ids[batch], rows[batch])
            monkeypatch.undo()
            expected = index.find(tables, ids)
            np.testing.assert_array_equal(expected[: batch.stop], rows[: batch.stop])
    assert failed >= 7


def test_a_copy_is_its_own():
    tables, ids = random_keys(3000)
    index = KeyIndex()
    index.insert(tables, ids, np.arange(3000))
    other = copy.deepcopy(index)
    index.delete(tables, ids)
    np.testing.assert_array_equal(other.find(tables, ids), np.arange(3000))


def test_no_keys():
    index, (tables, ids) = KeyIndex(), random_keys(0)
    index.insert(tables, ids, ids)
    index.replace(tables, ids, ids)
    index.delete(tables, ids)
    assert index.find(tables, ids).shape == (0,)
    assert (len(index), index.load) == (0, 0)


def test_looking_up_changes_no_byte():
    tables, ids = random_keys(9000)
    index = KeyIndex()
    index.insert(tables[:5000], ids[:5000], np.arange(5000))
    before = [a.tobytes() for a in index._segments._slots]
    index.find(tables, ids)
    assert [a.tobytes() for a in index._segments._slots] == before
    assert len(index) == 5000


def test_hash_table_finds_the_same():
    tables, ids = random_keys(30_000)
    index, table = KeyIndex(), HashTable()
    index.insert(tables[::2], ids[::2], np.arange(15_000))
    table.insert(tables[::2], ids[::2])
    np.testing.assert_array_equal(index.find(tables, ids), table.find(tables, ids))


@pytest.mark.parametrize("name", ["insert", "replace"])
@pytest.mark.parametrize("row", [-1, LIMIT, LOW, HIGH])
def test_rows_out_of_range_are_told(name, row):
    index, (tables, ids) = KeyIndex(), random_keys(2)
    index.insert(tables, ids, np.array([3, 4]))
    with pytest.raises(ValueError, match=rf"KeyIndex.{name}: rows must lie in 0 .. 2\*\*36 - 1, "):
        getattr(index, name)(tables, ids + 1, np.array([5, row]))
    assert index.find(tables, ids).tolist() == [3, 4]


@pytest.mark.parametrize("name", ["replace", "delete"])
def test_keys_that_are_not_there_are_told(name):
    index, (tables, ids) = KeyIndex(), random_keys(5)
    index.insert(tables[:3], ids[:3], np.arange(3))
    rows = [np.arange(10, 15)] if name == "replace" else []
    with pytest.raises(ValueError, match=f"KeyIndex.{name}: keys must be there, 2 of 5 are not."):
        getattr(index, name)(tables, ids, *rows)
    assert index.find(tables, ids).tolist() == [0, 1, 2, -1, -1]


def test_arrays_of_another_kind_are_told():
    index, (tables, ids) = KeyIndex(), random_keys(3)
    rows = np.arange(3)
    for name in ("find", "insert", "replace", "delete"):
        rest = [rows] if name in ("insert", "replace") else []
        where, method = f"KeyIndex.{name}: ", getattr(index, name)
        with pytest.raises(TypeError, match=f"{where}'tables' must be uint32"):
            method(tables.astype(np.int64), ids, *rest)
        with pytest.raises(TypeError, match=f"{where}'ids' must be int64"):
            method(tables, ids.astype(np.uint64), *rest)
        with pytest.raises(ValueError, match=where):
            method(tables[:2], ids, *rest)
        with pytest.raises(TypeError, match=where):
            method(sim.asarray(tables), sim.asarray(ids), *rest)
    for name in ("insert", "replace"):
        with pytest.raises(TypeError, match=f"KeyIndex.{name}: 'rows' must be int64"):
            getattr(index, name)(tables, ids, rows.astype(np.int32))
        with pytest.raises(ValueError, match=f"KeyIndex.{name}: "):
            getattr(index, name)(tables, ids, rows[:2])

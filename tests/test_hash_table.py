import math

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyrec.ops.hash_table import HashTable, check_keys, hash_key

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


@given(st.lists(keys, max_size=6), keys)
def test_behaves_like_a_dict(batches, questions):
    table, model = HashTable(), {}
    for batch in batches:
        new = [key for key in dict.fromkeys(batch) if key not in model]
        table.insert(*arrays(new))
        model.update({key: len(model) + i for i, key in enumerate(new)})
        asked = questions + batch
        rows = table.find(*arrays(asked))
        assert rows.dtype == np.int64
        assert rows.tolist() == [model.get(key, -1) for key in asked]
    assert len(table) == len(model)  # looking up inserted nothing
    assert list(zip(table.tables.tolist(), table.ids.tolist(), strict=True)) == list(model)


@pytest.mark.parametrize("step", [1, -1, 2**20, 2**40, 2**48])
def test_grows_through_several_doublings(step):
    table, total = HashTable(), 20_000
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
    np.testing.assert_array_equal(table.ids, ids)
    np.testing.assert_array_equal(table.tables, tables)
    assert table.nbytes >= 12 * total
    assert (table.find(tables + np.uint32(3), ids) == -1).all()


@given(st.lists(keys, max_size=6))
def test_find_or_insert_numbers_new_keys_in_order(batches):
    table, model = HashTable(), {}
    for batch in batches:
        batch = list(dict.fromkeys(batch))
        for key in batch:
            model.setdefault(key, len(model))
        assert table.find_or_insert(*arrays(batch)).tolist() == [model[key] for key in batch]
    every = arrays(list(model))
    half = len(model) // 2
    table.truncate(half)
    assert len(table) == half
    assert table.find(*every).tolist() == [*range(half), *[-1] * (len(model) - half)]
    assert table.find_or_insert(*every).tolist() == list(range(len(model)))


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


def test_ids_a_constant_apart_do_not_collide_across_tables():
    """As those of a log whose ids are themselves hashed by multiplying."""
    for constant in (1, 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        ids = np.array([n * constant % 2**64 for n in range(100)], np.uint64).view(np.int64)
        hashes = {int(hash_key(np.uint32(t), i)) for t in range(30) for i in ids}
        assert len(hashes) == 3000


def test_tables_of_equal_slot_and_tag_are_told_apart():
    """Of id 0, tables 0 and 99,332,920 have the same low 10 and high 16 bits of hash."""
    tables, ids = np.array([0, 99_332_920], np.uint32), np.zeros(2, np.int64)
    a, b = (int(hash_key(*key)) for key in zip(tables, ids, strict=True))
    assert (a % 1024, a >> 48) == (b % 1024, b >> 48)
    table = HashTable()
    table.insert(tables[:1], ids[:1])
    assert table.find(tables, ids).tolist() == [0, -1]


def test_empty():
    table = HashTable()
    empty = np.empty(0, np.uint32), np.empty(0, np.int64)
    assert (len(table), table.find(*empty).shape) == (0, (0,))
    table.insert(*empty)
    assert (len(table), table.ids.size, table.tables.size) == (0, 0, 0)
    assert table.find(np.zeros(3, np.uint32), np.array([0, -1, LOW])).tolist() == [-1, -1, -1]


def test_same_bits():
    generator = np.random.default_rng(0)
    ids, tables = generator.integers(LOW, HIGH, 10_000), np.zeros(10_000, np.uint32)
    table = HashTable()
    table.insert(tables[:6000], ids[:6000])
    oracle.check_same_bits(lambda: [table.find(tables, ids)])


# The hash


@given(table_numbers, adversarial_ids)
def test_hash_key_in_pythons_integers(table, key):
    assert int(hash_key(np.uint32(table), np.int64(key))) == oracle.hash_key(table, key)


@pytest.mark.parametrize("shift", [0, 1, 8, 16, 32, 40, 47])
@pytest.mark.parametrize("bits", [slice(0, 10), slice(22, 32), slice(54, 64)])
def test_hash_spreads_regular_ids(shift, bits):
    """Chi-square of 1,024 cells: slots take the low bits, tags and later owners the high ones."""
    n, cells = 1 << 15, 1 << 10
    hashes = [int(hash_key(np.uint32(1), np.int64(i << shift))) for i in range(n)]
    counts = np.bincount([h >> bits.start & (cells - 1) for h in hashes], minlength=cells)
    chi_square = ((counts - n / cells) ** 2 / (n / cells)).sum()
    assert abs(chi_square - (cells - 1)) < 6 * math.sqrt(2 * (cells - 1))


def test_hash_spreads_one_id_over_tables():
    counts = np.bincount([int(hash_key(np.uint32(t), np.int64(0))) & 255 for t in range(1 << 13)])
    chi_square = ((counts - 32) ** 2 / 32).sum()
    assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)


def test_each_bit_of_a_key_changes_half_of_the_hash():
    flips = []
    for bit in range(64):
        for key in range(32):
            a, b = (hash_key(np.uint32(0), np.int64(k)) for k in (key, (key ^ 1 << bit) - 2**64
                    if (key ^ 1 << bit) > HIGH else key ^ 1 << bit))  # fmt: skip
            flips.append((int(a) ^ int(b)).bit_count())
    assert abs(np.mean(flips) - 32) < 0.5
    assert min(flips) > 10


# Errors


@pytest.mark.parametrize(
    ("tables", "ids", "error", "text"),
    [
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
    ],
)  # fmt: skip
def test_refuses(tables, ids, error, text):
    table = HashTable()
    for where, call in [
        ("HashTable.find", table.find),
        ("HashTable.insert", table.insert),
        ("f", lambda t, i: check_keys("f", t, i)),
    ]:
        with pytest.raises(error, match=oracle.sentence(f"{where}: {text}")):
            call(tables, ids)
    assert len(table) == 0

from unittest import mock

import numpy as np
import oracle
import pytest
from hypothesis import given
from test_hash_table import HIGH, LOW, arrays, keys

from cupyrec.ops.unique_keys import unique_keys


def check_unique(tables, ids):
    got = unique_keys(tables, ids)
    batch = list(zip(tables.tolist(), ids.tolist(), strict=True))
    first = list(dict.fromkeys(batch))
    places = {key: [] for key in first}
    for i, key in enumerate(batch):
        places[key].append(i)
    number = {key: u for u, key in enumerate(first)}
    assert list(zip(got.tables.tolist(), got.ids.tolist(), strict=True)) == first
    assert got.inverse.tolist() == [number[key] for key in batch]
    assert got.positions.tolist() == [i for key in first for i in places[key]]
    assert got.offsets.tolist() == [0, *np.cumsum([len(p) for p in places.values()])]
    assert [a.dtype.name for a in fields(got)] == ["uint32"] + ["int64"] * 4
    return got


def fields(keys):
    return keys.tables, keys.ids, keys.inverse, keys.offsets, keys.positions


@given(keys)
def test_behaves_like_a_dict(batch):
    check_unique(*arrays(batch))


def test_sorts_when_asked_to():
    keys = unique_keys(np.zeros(3, np.uint32), np.array([5, 6, 5]))
    with mock.patch.object(keys, "sort", wraps=keys.sort) as sort:
        assert sort.call_count == 0
        assert keys.offsets.tolist() == [0, 2, 3]
        assert keys.positions.tolist() == [0, 2, 1]
        assert sort.call_count == 1


@pytest.mark.parametrize("n", [0, 1, 3, 17, 127, 1025])
@pytest.mark.parametrize("different", [1, 2, 100, 10_000])
def test_sizes(n, different):
    generator = np.random.default_rng(n)
    ids = generator.integers(different, size=n) * 2**44 + LOW
    got = check_unique(generator.integers(3, size=n).astype(np.uint32), ids)
    assert got.ids.size <= min(n, 3 * different)


@given(keys)
def test_agrees_with_numpy(batch):
    tables, ids = arrays(batch)
    got = unique_keys(tables, ids)
    pairs = np.stack([tables.astype(np.int64), ids])
    np.testing.assert_array_equal(pairs[:, got.positions], np.repeat(
        np.stack([got.tables.astype(np.int64), got.ids]), np.diff(got.offsets), axis=1
    ))  # fmt: skip
    assert got.ids.size == np.unique(pairs, axis=1).shape[1]


def test_views_and_read_only_arrays():
    ids = np.array([[5, HIGH], [-1, LOW], [5, HIGH]])
    column = ids[:, 1]
    tables = np.broadcast_to(np.uint32(3), 3)
    assert check_unique(tables, column).ids.tolist() == [HIGH, LOW]


def test_same_bits():
    n = 300_000  # as many parts as threads
    ids = np.random.default_rng(0).zipf(1.2, n).astype(np.int64)
    mixed = np.arange(n, dtype=np.uint32) % 26
    for tables in (mixed, np.repeat(np.arange(15, dtype=np.uint32), n // 15)):  # and 15 parts apart
        oracle.check_same_bits(lambda t=tables: fields(unique_keys(t, ids)))


@pytest.mark.parametrize(
    ("tables", "ids", "error", "text"),
    [
        (np.zeros(2, np.int32), np.zeros(2, np.int64), TypeError,
         "'tables' must be uint32, got int32."),
        (np.zeros(2, np.uint32), np.zeros(2, np.uint64), TypeError,
         "'ids' must be int64, got uint64."),
        (np.zeros(2, np.uint32), np.zeros((2, 2), np.int64), ValueError,
         "'ids' must have axes (N), got shape (2, 2)."),
        (np.broadcast_to(np.uint32(0), 2**31), np.broadcast_to(0, 2**31), ValueError,
         "N must be less than 2**31, got 2147483648."),
    ],
)  # fmt: skip
def test_refuses(tables, ids, error, text):
    with pytest.raises(error, match=oracle.sentence(f"unique_keys: {text}")):
        unique_keys(tables, ids)

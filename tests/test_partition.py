import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyrec import arrays
from cupyrec.ops.hash_key import hash_key
from cupyrec.ops.partition import owners, partition, shards_of

TABLES, IDS = np.zeros(3, np.uint32), np.arange(3)


def owner(table, key, ranks):
    """SplitMix64's finalizer of the seeded id; (table + 1) * 2^64 / golden ratio comes between."""
    h = key % 2**64 ^ 0x5851F42D4C957F2D
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h + (table + 1) * 0x9E3779B97F4A7C15) % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    h ^= h >> 31
    return (h >> 32) * ranks >> 32


def keys(count, seed=0):
    generator = np.random.default_rng(seed)
    tables = generator.integers(0, 2**32, count, np.uint32)
    return tables, generator.integers(-(2**63), 2**63, count)


def on(xp, *given):
    return [arrays.copy_to(xp, array) for array in given]


@given(
    st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1),
    st.one_of(st.integers(1, 9), st.integers(1, 1024)),
)  # fmt: skip
def test_owner_in_pythons_integers(table, key, ranks):
    (got,) = owners(np.array([table], np.uint32), np.array([key]), ranks)
    assert got == owner(table, key, ranks)


@given(st.integers(0, 2**32 - 1), st.integers(1, 1024), st.integers(1, 1024))
def test_shards_of_a_rank_are_those_that_have_its_keys(h, ranks, shards):
    owner, shard = h * ranks >> 32, h * shards >> 32
    for rank in range(ranks):
        near = shards_of(rank, ranks, shards)
        assert rank != owner or shard in near
        # The range begins and ends with shards that have hashes of the rank.
        first, last = -(-(rank << 32) // ranks), -(-((rank + 1) << 32) // ranks) - 1
        assert (first * ranks >> 32, last * ranks >> 32) == (rank, rank)
        assert (near[0], near[-1]) == (first * shards >> 32, last * shards >> 32)
    assert shards_of(owner, ranks, ranks) == range(owner, owner + 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 40, 1024])
@pytest.mark.parametrize("count", [0, 1, 17, 1023, 1025, 4000])
def test_every_device(np_or_xp, count, ranks):
    tables, ids = keys(count)
    expected = np.array([owner(int(t), int(i), ranks) for t, i in zip(tables, ids, strict=True)])
    got = owners(*on(np_or_xp, tables, ids), ranks)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(arrays.to_host(got), expected)
    order, counts = partition(*on(np_or_xp, tables, ids), ranks)
    assert order.dtype == counts.dtype == np.int64
    assert arrays.namespace("test", order, counts) is np_or_xp
    np.testing.assert_array_equal(arrays.to_host(order), np.argsort(expected, kind="stable"))
    np.testing.assert_array_equal(arrays.to_host(counts), [(expected == r).sum()
                                                           for r in range(ranks)])  # fmt: skip


def test_a_million_keys():
    """More than one tile of the CPU's loops; and one owner has all, or hardly any."""
    tables, ids = keys(1_000_000)
    for ranks in (1, 7, 1000):
        order, counts = partition(tables, ids, ranks)
        np.testing.assert_array_equal(order, np.argsort(owners(tables, ids, ranks), kind="stable"))
        np.testing.assert_array_equal(counts, np.bincount(owners(tables, ids, ranks)))
    ids = np.full(100_000, 3)
    order, counts = partition(np.zeros(100_000, np.uint32), ids, 7)
    np.testing.assert_array_equal(order, np.arange(100_000))
    assert sorted(counts.tolist()) == [0] * 6 + [100_000]


def check_even(counts):
    """Chi-square of equal chances, at six standard deviations."""
    expected = counts.sum() / len(counts)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - (len(counts) - 1)) <= 6 * np.sqrt(2 * (len(counts) - 1))


REGULAR = {
    "from 0": np.arange(1 << 17),
    "below 0": -np.arange(1 << 17),
    "around 2^62": (1 << 62) + np.arange(1 << 17),
    **{f"times 2^{k}": np.arange(1 << 17) << k for k in (1, 8, 16, 32, 46)},
    "times -1000": np.arange(1 << 17) * -1000,
    "hashes": np.array([int(hash_key(np.uint32(0), np.int64(i))) for i in range(1 << 13)],
                       np.uint64).view(np.int64),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 512])
@pytest.mark.parametrize("ids", REGULAR.values(), ids=REGULAR)
def test_regular_ids_are_spread_evenly(ids, ranks):
    for table in (0, 1, 1000):
        counts = partition(np.full(len(ids), table, np.uint32), ids, ranks).counts
        check_even(counts)


@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_one_id_is_spread_over_tables(ranks):
    tables = np.arange(1 << 15, dtype=np.uint32)
    for key in (0, -1, 12345):
        check_even(partition(tables, np.full(len(tables), key), ranks).counts)


def test_tables_don_t_move_together():
    """Ids a constant apart in tables side by side have owners of their own."""
    ids = np.arange(1 << 16)
    for apart in (0, 1, 1000, 0x9E3779B97F4A7C15 - 2**64):
        a = owners(np.zeros(len(ids), np.uint32), ids, 4)
        b = owners(np.ones(len(ids), np.uint32), ids - apart, 4)
        check_even(np.bincount(4 * a + b, minlength=16))


@pytest.mark.parametrize("bits", [slice(56, 64), slice(0, 8), slice(20, 28), slice(32, 40)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_keys_of_a_rank_don_t_crowd_its_slots(ranks, bits):
    """Owner and any 8 bits of `hash_key`, high or low, are independent."""
    tables, ids = np.full(1 << 16, 3, np.uint32), np.arange(1 << 16)
    hashes = np.array([int(hash_key(np.uint32(3), np.int64(i))) for i in ids.tolist()], np.uint64)
    cells = (hashes >> np.uint64(bits.start) & np.uint64(255)).astype(np.int64)
    check_even(np.bincount(owners(tables, ids, ranks) * 256 + cells, minlength=256 * ranks))


def test_ownership_does_not_depend_on_the_batch():
    tables, ids = keys(5000)
    some = np.random.default_rng(1).permutation(5000)[:300]
    np.testing.assert_array_equal(
        owners(tables[some], ids[some], 5), owners(tables, ids, 5)[some]
    )  # fmt: skip


def test_views(np_or_xp):
    tables, ids = keys(2000)
    order, counts = partition(*(a[::2] for a in on(np_or_xp, tables, ids)), 3)
    expected = partition(tables[::2].copy(), ids[::2].copy(), 3)
    np.testing.assert_array_equal(arrays.to_host(order), expected.order)
    np.testing.assert_array_equal(arrays.to_host(counts), expected.counts)


def test_same_bits_on_the_cpu():
    tables, ids = keys(100_000)
    oracle.check_same_bits(lambda: partition(tables, ids, 3))


def test_thread_order(xp):
    given = on(xp, *keys(3000))
    oracle.check_thread_order(xp, lambda: [*partition(*given, 3), owners(*given, 3)])


def test_two_launches(sim):
    given = on(sim, *keys(3000))
    with sim.record() as seen:
        partition(*given, 8)
    assert [launch.name for launch in seen.launches if launch.result] == [
        "count_owners", "place_keys"
    ]  # fmt: skip
    assert len(seen.launches) == 3  # and a running sum
    assert seen.syncs == 0


@pytest.mark.parametrize("function", [owners, partition])
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ((TABLES, IDS, 0), ValueError, "'ranks' must be at least 1, got 0."),
        ((TABLES, IDS, 1025), ValueError, "'ranks' must be at most 1024, got 1025."),
        ((TABLES, IDS, 2.0), TypeError, "'ranks' must be an integer, got 2.0."),
        ((IDS, IDS, 2), TypeError, "'tables' must be uint32, got int64."),
        ((TABLES, TABLES, 2), TypeError, "'ids' must be int64, got uint32."),
        ((TABLES, IDS[:2], 2), ValueError, "'ids' must have N = 3 like 'tables', got shape (2,)."),
    ],
)  # fmt: skip
def test_refuses(function, given, error, text):
    with pytest.raises(error, match=oracle.sentence(f"{function.__name__}: {text}")):
        function(*given)

"""unique_keys.cu: the arrays of the CPU, bit for bit."""

import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, given, settings
from test_hash_table import HIGH, LOW, keys
from test_hash_table import arrays as columns
from test_unique_keys import fields

from cupyrec import arrays
from cupyrec.ops import unique_keys as module
from cupyrec.ops.unique_keys import unique_keys

SORT = "unique_count", "unique_scatter"

few = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_like_cpu(xp, tables, ids):
    got = unique_keys(arrays.copy_to(xp, tables), arrays.copy_to(xp, ids))
    for here, truth in zip(fields(got), fields(unique_keys(tables, ids)), strict=True):
        assert here.dtype == truth.dtype
        np.testing.assert_array_equal(arrays.to_host(here), truth)


def zipf(n, seed=0):
    ids = np.random.default_rng(seed).zipf(1.2, n).astype(np.int64)
    return (np.arange(n) % 26).astype(np.uint32), ids


@few
@given(batch=keys)
def test_small_batches(xp, batch):
    check_like_cpu(xp, *columns(batch * 2))


@pytest.mark.parametrize("n", [0, 1, 3, 17, 32, 127, 256, 257, 1025, 2048, 2049])
@pytest.mark.parametrize("different", [1, 2, 10_000])
def test_sizes(xp, n, different):
    """From all keys equal to all keys distinct; ids whose low bits agree."""
    generator = np.random.default_rng(n)
    ids = generator.integers(different, size=n) * 2**44 + LOW
    if different > n:
        ids = generator.permutation(HIGH - np.arange(n))
    check_like_cpu(xp, generator.integers(min(different, 3), size=n).astype(np.uint32), ids)


@pytest.mark.parametrize("seed", range(5))
def test_ids_of_a_log(xp, seed):
    check_like_cpu(xp, *zipf(3000, seed))


def test_keys_of_equal_hash_are_told_apart(xp):
    """Within one warp, and in one run of slots."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    ids = np.array([-n % 50 * golden % 2**64 for n in range(300)], np.uint64).view(np.int64)
    tables = (np.arange(300) % 50).astype(np.uint32)
    check_like_cpu(xp, tables, ids)
    check_like_cpu(xp, tables // 2, ids)


def test_views(xp):
    tables, ids = zipf(600)
    got = unique_keys(arrays.copy_to(xp, tables)[::-2], arrays.copy_to(xp, ids)[::-2])
    for here, truth in zip(fields(got), fields(unique_keys(tables[::-2], ids[::-2])), strict=True):
        np.testing.assert_array_equal(arrays.to_host(here), truth)


@pytest.mark.parametrize("same", [False, True])
def test_thread_order(xp, same):
    tables, ids = zipf(1200)
    if same:
        tables[:], ids[:] = 3, -1
    here = arrays.copy_to(xp, tables), arrays.copy_to(xp, ids)
    oracle.check_thread_order(xp, lambda: fields(unique_keys(*here)))


# The sort


def test_digits_cover_all_numbers_in_few_passes():
    for n in [*range(1, 300), *(2**k + d for k in range(9, 31) for d in (-1, 0, 1)), 2**31 - 1]:
        bits, width = module._digits(n)
        assert n <= 2**bits
        assert 5 <= width <= 8
        assert -(-bits // width) == -(-bits // 8)


@pytest.mark.parametrize("digits", [(11, 5), (11, 8), (18, 6), (21, 7), (31, 8)], ids=str)
def test_any_number_of_passes(xp, digits, monkeypatch):
    """As many keys would have; bits that are 0 change no order."""
    monkeypatch.setattr(module, "_digits", lambda n: digits)
    check_like_cpu(xp, *zipf(2100))


def bytes_of_module_functions(n):
    """What the fill of slots and the sums read and write."""
    bits, width = module._digits(n)
    counts = -(-n // 2048) << width
    return 4 * (1 << (2 * n).bit_length()) + 8 * -(-n // 32) + 8 * counts * -(-bits // width)


@pytest.mark.parametrize("distribution", ["zipf", "equal", "distinct"])
def test_costs(sim, distribution):
    n = 6656
    tables, ids = zipf(n)
    if distribution != "zipf":
        tables[:], ids = 0, np.arange(n) if distribution == "distinct" else np.zeros(n, np.int64)
    with sim.record() as seen:
        keys = unique_keys(sim.asarray(tables), sim.asarray(ids))
        unsorted = len(seen.launches)
        got = fields(keys)
    assert seen.syncs == 1
    assert not any(launch.name in SORT for launch in seen.launches[:unsorted])
    assert "sort" not in [launch.name for launch in seen.launches]
    counts = [launch.result.counts for launch in seen.launches if launch.result]
    assert len(counts) == 6
    ideal = tables.nbytes + ids.nbytes + sum(array.nbytes for array in got)
    moved = sum(c["bytes_read"] + c["bytes_written"] for c in counts)
    assert moved + bytes_of_module_functions(n) <= 3.2 * ideal
    assert sum(c["sectors"] for c in counts) / n <= 10.5
    assert not any(c["bank_conflicts"] for c in counts)
    assert all(c["longest_warp"] <= 4 * c["mean_warp"] for c in counts)


def test_refuses(xp):
    name = arrays.name(xp)
    text = f"unique_keys: arguments must be arrays of one device, got {name}, cpu."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        unique_keys(xp.zeros(2, np.uint32), np.zeros(2, np.int64))
    text = "unique_keys: 'ids' must have N = 2 like 'tables', got shape (3,)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        unique_keys(xp.zeros(2, np.uint32), xp.zeros(3, np.int64))

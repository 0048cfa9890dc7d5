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
from cupyrec.scratch import stamped

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
        bits, width = (n - 1).bit_length(), module._width(n)
        assert 5 <= width <= 8
        assert module._passes(n, width) == max(1, -(-bits // 8))
    width = module._width(8192 * 26)
    assert [module._passes(u, width) for u in (1, 256, 257, 2**16, 2**16 + 1)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("width", [5, 6, 8])
def test_any_number_of_passes(xp, width, monkeypatch):
    monkeypatch.setattr(module, "_width", lambda n: width)
    check_like_cpu(xp, *zipf(5000))
    check_like_cpu(xp, np.zeros(2100, np.uint32), np.arange(2100))
    check_like_cpu(xp, np.zeros(2100, np.uint32), np.arange(2100) % 3)


def test_what_earlier_launches_wrote_counts_for_nothing(xp):
    words, stamp = stamped(xp, 1 << 15)
    words[...] = xp.asarray(np.arange(words.size, dtype=np.uint64) % 2**33 + np.uint64(stamp))
    check_like_cpu(xp, *zipf(2500))


@pytest.mark.parametrize("distribution", ["zipf", "equal", "distinct"])
def test_costs(sim, distribution):
    n = 6656
    tables, ids = zipf(n)
    if distribution != "zipf":
        tables[:], ids = 0, np.arange(n) if distribution == "distinct" else np.zeros(n, np.int64)
    given = sim.asarray(tables), sim.asarray(ids)
    unique_keys(*given)  # makes what launches share
    with sim.record() as seen:
        keys = unique_keys(*given)
        unsorted = len(seen.launches)
        got = fields(keys)
    assert seen.syncs == 1
    names = [launch.name for launch in seen.launches]
    assert names[:unsorted] == ["unique_claim", "unique_number"]
    assert names[unsorted:] == ["unique_sort"] * (1 if distribution == "equal" else 2)
    counts = [launch.result.counts for launch in seen.launches]
    ideal = tables.nbytes + ids.nbytes + sum(array.nbytes for array in got)
    assert sum(c["bytes_read"] + c["bytes_written"] for c in counts) <= 2.7 * ideal
    assert sum(c["sectors"] for c in counts) / n <= 10
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

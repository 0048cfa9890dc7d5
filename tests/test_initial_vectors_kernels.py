"""initial_vectors.cu."""

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hash_table import adversarial_ids, table_numbers
from test_hash_table import arrays as keys
from test_initial_vectors import IDS, TABLES, seeds

from cupyrec import arrays
from cupyrec.ops.initial_vectors import uniform_vectors


def device_vectors(xp, tables, ids, *rest):
    return uniform_vectors(arrays.copy_to(xp, tables), arrays.copy_to(xp, ids), *rest)


@pytest.mark.parametrize("width", [1, 3, 4, 10, 16, 128, 130, 1025])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
@pytest.mark.parametrize(("low", "high"), [(-0.05, 0.05), (-1 / 3, 7.7), (2, 2), (0, 1e-38)])
def test_every_bit_is_the_cpus(xp, width, seed, low, high):
    got = arrays.to_host(device_vectors(xp, TABLES, IDS, width, seed, low, high))
    assert (got.dtype, got.shape) == (np.float32, (6, width))
    assert got.tobytes() == uniform_vectors(TABLES, IDS, width, seed, low, high).tobytes()


@pytest.mark.parametrize("n", [0, 1, 3, 17, 127, 1025])
def test_any_number_of_keys(xp, n):
    tables = np.random.default_rng(0).integers(2**32, size=n, dtype=np.uint32)
    ids = np.random.default_rng(1).integers(-(2**63), 2**63, size=n)
    got = arrays.to_host(device_vectors(xp, tables, ids, 6, 7, -1, 1))
    assert got.tobytes() == uniform_vectors(tables, ids, 6, 7, -1, 1).tobytes()


@settings(max_examples=30)
@given(st.lists(st.tuples(table_numbers, adversarial_ids), max_size=4), seeds)
def test_any_key_and_seed_sim(batch, seed):
    tables, ids = keys(batch)
    got = device_vectors(arrays.module("sim"), tables, ids, 5, seed, -0.05, 0.05).get()
    assert got.tobytes() == oracle.uniform_vectors(tables, ids, 5, seed, -0.05, 0.05).tobytes()


def test_views_are_copied(xp):
    ids = arrays.copy_to(xp, np.stack([IDS, IDS[::-1]], axis=1))[:, 1]
    got = uniform_vectors(arrays.copy_to(xp, TABLES), ids, 3, 1, 0, 1)
    expected = uniform_vectors(TABLES, IDS[::-1].copy(), 3, 1, 0, 1)
    np.testing.assert_array_equal(arrays.to_host(got), expected)


def test_thread_order(xp):
    ids, tables = np.arange(300), np.arange(300, dtype=np.uint32)
    oracle.check_thread_order(xp, lambda: [device_vectors(xp, tables, ids, 10, 1, -0.05, 0.05)])


def test_refuses(xp):
    with pytest.raises(TypeError, match=r"uniform_vectors: arguments must be arrays of one device"):
        uniform_vectors(arrays.copy_to(xp, TABLES), IDS, 3, 1, 0, 1)
    with pytest.raises(ValueError, match=r"uniform_vectors: 'seed' must lie in \[0, "):
        device_vectors(xp, TABLES, IDS, 3, 2**64, 0, 1)


def test_moves_and_balance():
    sim = arrays.module("sim")
    n, width = 500, 128
    with sim.record() as seen:
        device_vectors(sim, np.zeros(n, np.uint32), np.arange(n), width, 1, 0, 1)
    counts = seen.launches[-1].result.counts
    ideal = n * (12 + width * 4)
    assert counts["bytes_read"] + counts["bytes_written"] <= 1.1 * ideal
    assert counts["sectors"] * 32 <= 1.2 * ideal
    assert counts["longest_warp"] <= 4 * counts["mean_warp"]

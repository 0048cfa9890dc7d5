"""initial_vectors.cu."""

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hash_table import adversarial_ids, table_numbers
from test_hash_table import arrays as keys
from test_initial_vectors import (
    IDS,
    NORMALS,
    TABLES,
    distributions,
    seeds,
    three_tables,
    truncated_normal,
    uniform,
    uniform_vectors,
)

from cupyrec import arrays
from cupyrec.ops.initial_vectors import Distributions, initial_vectors

FAR = [(0, 1, -9, -4), (0, 1, -31, -30), (1, -2, 0.5, 3), (0, 1e-39, -1e-39, 1)]


def vectors(xp, tables, ids, width, seed, of_tables):
    held = Distributions(*(arrays.copy_to(xp, array) for array in of_tables))
    return initial_vectors(arrays.copy_to(xp, tables), arrays.copy_to(xp, ids), width, seed, held)


def device_vectors(xp, tables, ids, width, seed, low, high):
    return vectors(xp, tables, ids, width, seed, distributions([(width, uniform(low, high))]))


def check_bits(xp, tables, ids, width, of_tables):
    got = arrays.to_host(vectors(xp, tables, ids, width, 7, of_tables))
    assert got.tobytes() == initial_vectors(tables, ids, width, 7, of_tables).tobytes()


@pytest.mark.parametrize("values", NORMALS + FAR)
def test_every_bit_of_normal_vectors_is_the_cpus(xp, values):
    tables, ids = np.zeros(1025, np.uint32), np.arange(1025)
    low, high = (values[2], values[3]) if values[1] > 0 else (values[3], values[2])
    parameters = truncated_normal(values[0], values[1], low, high)
    of_all = distributions([(5, (*parameters[:4], values[2], values[3]))])
    check_bits(xp, tables, ids, 5, of_all)


@pytest.mark.parametrize("width", [1, 3, 17, 130, 4096])
def test_tables_and_ranges_are_the_cpus(xp, width):
    tables = np.array([1, 0, 2, 2**32 - 1, 1, 3], np.uint32)
    check_bits(xp, tables, IDS, width, distributions(*three_tables(width)))


def test_a_thousand_tables(xp):
    of_tables = distributions(
        *([(16, uniform(0, t)), (17, truncated_normal(t, 1, t - 1, t + 2))] for t in range(1000))
    )
    tables = np.random.default_rng(0).integers(0, 1001, 1025, np.uint32)
    check_bits(xp, tables, np.arange(1025), 17, of_tables)


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
    of_all = distributions([(3, uniform(0, 1))])
    got = vectors(xp, TABLES, ids, 3, 1, of_all)
    expected = initial_vectors(TABLES, IDS[::-1].copy(), 3, 1, of_all)
    np.testing.assert_array_equal(arrays.to_host(got), expected)


def test_thread_order(xp):
    ids, tables = np.arange(300), np.arange(300, dtype=np.uint32)
    of_all = distributions([(6, truncated_normal(0, 1, -1, 3)), (10, uniform(0, 1))])
    oracle.check_thread_order(xp, lambda: [vectors(xp, tables, ids, 10, 1, of_all)])


def test_refuses(xp):
    with pytest.raises(TypeError, match=r"initial_vectors: arguments must be arrays of one device"):
        uniform_vectors(arrays.copy_to(xp, TABLES), IDS, 3, 1, 0, 1)
    with pytest.raises(ValueError, match=r"initial_vectors: 'seed' must lie in \[0, "):
        device_vectors(xp, TABLES, IDS, 3, 2**64, 0, 1)


@pytest.mark.parametrize("parameters", [uniform(0, 1), truncated_normal(0, 1, -9, 9)])
def test_moves_and_balance(parameters):
    sim = arrays.module("sim")
    n, width = 500, 128
    of_all = distributions([(width, parameters)])
    with sim.record() as seen:
        vectors(sim, np.zeros(n, np.uint32), np.arange(n), width, 1, of_all)
    counts = seen.launches[-1].result.counts
    ideal = n * (12 + width * 4)
    assert counts["bytes_read"] + counts["bytes_written"] <= 1.1 * ideal
    assert counts["sectors"] * 32 <= 1.5 * ideal  # a warp asks L1 for its distribution
    assert counts["longest_warp"] <= 1.2 * counts["mean_warp"]

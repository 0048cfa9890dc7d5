"""embedding_rows.cu."""

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops.embedding_rows import RowMemory, gather_rows, write_rows


def chunked(xp, rows, k):
    """(memory, chunks) of (N, stride) rows on a device; the rest of the last chunk is NaN."""
    size = 1 << k
    chunks = []
    for first in range(0, len(rows), size):
        chunk = np.full((size, rows.shape[1]), np.nan, np.float32)
        chunk[: len(rows) - first] = rows[first : first + size]
        chunks.append(arrays.copy_to(xp, chunk))
    addresses = [chunk.__cuda_array_interface__["data"][0] for chunk in chunks]
    return RowMemory(xp.asarray(np.array(addresses, np.uint64)), k, rows.shape[1]), chunks


def unchunked(chunks, n):
    return np.concatenate([arrays.to_host(chunk) for chunk in chunks])[:n]


def gathered(xp, rows, k, unique, inverse, unseen):
    """(out, rows afterwards)"""
    memory, chunks = chunked(xp, rows, k)
    out = xp.empty((len(inverse), unseen.shape[1]), np.float32)
    gather_rows(memory, *(arrays.copy_to(xp, a) for a in (unique, inverse, unseen)), out)
    return out, unchunked(chunks, len(rows))


def case(n, width, outputs, seed=0):
    """Rows, half of which are asked for, and 5 unseen ones."""
    generator = np.random.default_rng(seed)
    rows = oracle.normals((n, (width + 7) // 4 * 4))
    unique = generator.permutation(np.arange(-5, n))[: n // 2 + 3]
    inverse = generator.integers(len(unique), size=outputs)
    return rows, unique, inverse, oracle.normals((5, width), seed=1)


@pytest.mark.parametrize(
    "shape",
    oracle.covering((0, 1, 17, 127, 1025), (1, 3, 4, 10, 16, 128, 130, 1025), most=40_000),
    ids=str,
)
def test_gather_copies_every_bit(xp, shape):
    outputs, width = shape
    rows, unique, inverse, unseen = case(41, width, outputs)
    out, after = gathered(xp, rows, 3, unique, inverse, unseen)
    vectors = np.concatenate([rows[:, :width], unseen[::-1]])[unique]  # -1 - j counts from the end
    np.testing.assert_array_equal(arrays.to_host(out), vectors[inverse])
    np.testing.assert_array_equal(after, rows)


@pytest.mark.parametrize(
    "shape",
    oracle.covering((0, 1, 3, 17, 127), ((1, 4), (3, 12), (4, 4), (10, 32), (128, 132), (130, 392),
                                         (1025, 1028)), most=None),
    ids=str,
)  # fmt: skip
def test_write_fills_its_rows_and_nothing_else(xp, shape):
    n, (width, stride) = shape
    before = oracle.normals((n + 20, stride))
    memory, chunks = chunked(xp, before, 3)
    values = oracle.normals((n, width), seed=1)
    write_rows(memory, 7, arrays.copy_to(xp, values))
    after = unchunked(chunks, n + 20)
    np.testing.assert_array_equal(after[7 : 7 + n, :width], values)
    assert not after[7 : 7 + n, width:].any()
    np.testing.assert_array_equal(after[:7], before[:7])
    np.testing.assert_array_equal(after[7 + n :], before[7 + n :])


def test_views_are_copied_and_unaligned_arrays_read_as_they_lie(xp):
    rows, unique, inverse, unseen = case(41, 4, 50)
    memory, chunks = chunked(xp, rows, 3)
    whole = arrays.copy_to(xp, np.stack([inverse, inverse], axis=1))
    flat = xp.empty(50 * 4 + 1, np.float32)
    out = flat[1:].reshape(50, 4)
    gather_rows(memory, arrays.copy_to(xp, unique), whole[:, 0], arrays.copy_to(xp, unseen), out)
    expected, _ = gathered(xp, rows, 3, unique, inverse, unseen)
    np.testing.assert_array_equal(arrays.to_host(out), arrays.to_host(expected))
    write_rows(memory, 3, out[:38, 1:3])
    places = arrays.copy_to(xp, np.arange(3, 41)), arrays.copy_to(xp, np.arange(38))
    again = xp.empty((38, 2), np.float32)
    gather_rows(memory, *places, xp.empty((0, 2), np.float32), again)
    np.testing.assert_array_equal(arrays.to_host(again), arrays.to_host(out)[:38, 1:3])
    assert not unchunked(chunks, 41)[3:, 2:].any()


def test_thread_order(xp):
    rows, unique, inverse, unseen = case(100, 10, 300)

    def call():
        memory, chunks = chunked(xp, rows, 4)
        write_rows(memory, 11, arrays.copy_to(xp, oracle.normals((60, 10), seed=2)))
        places = (arrays.copy_to(xp, a) for a in (unique, inverse, unseen))
        out = xp.empty((300, 10), np.float32)
        gather_rows(memory, *places, out)
        return out, *chunks

    oracle.check_thread_order(xp, call)


def test_devices_do_not_mix(xp):
    memory, _ = chunked(xp, oracle.normals((4, 4)), 1)
    with pytest.raises(TypeError, match=r"gather_rows: arguments must be arrays of one device, "):
        gather_rows(
            memory, np.arange(2), np.arange(2), np.zeros((0, 3), np.float32),
            np.zeros((2, 3), np.float32),
        )  # fmt: skip
    with pytest.raises(TypeError, match=r"write_rows: arguments must be arrays of one device, "):
        write_rows(memory, 0, np.zeros((1, 4), np.float32))
    with pytest.raises(TypeError, match=r"write_rows: 'values' must be float32, got float64\.$"):
        write_rows(memory, 0, xp.asarray(np.zeros((1, 4))))


@pytest.mark.parametrize("device", ["cpu", None])
def test_rows_without_columns_are_refused(xp, device):
    xp = arrays.module(device) if device else xp
    memory = RowMemory(xp.empty(0, np.uint64), 1, 4)
    rows, none = xp.empty(2, np.int64), xp.empty((2, 0), np.float32)
    text = "gather_rows: 'out' must have D of at least 1, got shape (2, 0)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        gather_rows(memory, rows, rows, none, none)
    text = "write_rows: 'values' must have D of at least 1, got shape (2, 0)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        write_rows(memory, 0, none)


def test_more_elements_than_32_bits_count(xp):
    """On a GPU; the simulator shows with few that the test is right."""
    width, large = 1024, arrays.name(xp) == "cuda"
    n = 2**31 // width + 37 if large else 45
    if large and xp.cuda.runtime.memGetInfo()[0] < 5 * n * width:
        pytest.skip("needs 10 GB of the GPU's memory")
    rows = oracle.normals((11, width))
    memory, _chunks = chunked(xp, rows, 2)
    inverse = xp.arange(n) % 11
    out = xp.empty((n, width), np.float32)
    gather_rows(memory, xp.arange(11), inverse, xp.empty((0, width), np.float32), out)
    for part in (slice(0, 40), slice(n - 40, n)):
        expected = rows[np.arange(n)[part] % 11]
        np.testing.assert_array_equal(arrays.to_host(out[part]), expected)
    if large:
        del out
        xp.get_default_memory_pool().free_all_blocks()


# What the gather of (B, F, D) = (256, 27, 128) moves

N, U, D = 256 * 27, 1500, 128


def test_bytes_and_balance():
    sim = arrays.module("sim")
    rows = oracle.normals((U, D))
    inverse = np.concatenate([np.arange(U), np.random.default_rng(0).integers(U, size=N - U)])
    inverse = np.random.default_rng(1).permutation(inverse)
    with sim.record() as seen:
        gathered(sim, rows, 8, np.arange(U), inverse, np.empty((0, D), np.float32))
    counts = next(x.result.counts for x in seen.launches if x.name == "gather_rows")
    ideal = U * D * 4 + N * 8 + N * D * 4
    assert counts["bytes_read"] + counts["bytes_written"] <= 1.1 * ideal
    assert counts["sectors"] * 32 <= 1.1 * (2 * N * D * 4 + N * 8 + N * 32)
    assert counts["longest_warp"] <= 4 * counts["mean_warp"]
    assert not counts["bank_conflicts"]


def test_write_moves_what_it_must():
    sim = arrays.module("sim")
    memory, _ = chunked(sim, oracle.normals((500, 132)), 6)
    with sim.record() as seen:
        write_rows(memory, 0, sim.asarray(oracle.normals((500, 130))))
    counts = seen.launches[-1].result.counts
    ideal = 500 * (130 + 132) * 4
    assert counts["bytes_read"] + counts["bytes_written"] <= 1.1 * ideal

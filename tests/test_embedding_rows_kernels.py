"""embedding_rows.cu."""

import numpy as np
import oracle
import pytest
from test_embedding_rows import NO_STATE, keys, written
from test_embedding_rows import chunked as chunked_cpu

from cupyrec import arrays
from cupyrec.ops.embedding_rows import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Rounding,
    RowMemory,
    gather_rows,
    write_rows,
)  # fmt: skip


def chunked(xp, rows, k, value=FLOAT32):
    """(memory, chunks) of (N, stride) rows on a device; the rest of the last chunk is NaN."""
    size = 1 << k
    chunks = []
    for first in range(0, len(rows), size):
        chunk = np.full((size, rows.shape[1]), np.nan, np.float32)
        chunk[: len(rows) - first] = rows[first : first + size]
        chunks.append(arrays.copy_to(xp, chunk))
    addresses = [chunk.__cuda_array_interface__["data"][0] for chunk in chunks]
    addresses = xp.asarray(np.array(addresses, np.uint64))
    return RowMemory(addresses, k, rows.shape[1], value), chunks


def unchunked(chunks, n):
    return np.concatenate([arrays.to_host(chunk) for chunk in chunks])[:n]


def gathered(xp, rows, k, unique, inverse, unseen, value=FLOAT32):
    """(out, rows afterwards)"""
    memory, chunks = chunked(xp, rows, k, value)
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


def moved(xp, *given):
    return [arrays.copy_to(xp, array) for array in given]


def on_device(xp, rounding):
    if rounding is None:
        return None
    return Rounding(*moved(xp, *rounding[:2]), *rounding[2:])


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


@pytest.mark.parametrize("value", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("width", [1, 10, 64])
def test_gather_of_padding(xp, width, value):
    rows, unseen = np.full((4, 64), np.nan, np.float32), oracle.normals((1, width))
    inverse = np.resize([0, -1, -1], 600)
    out, _ = gathered(xp, rows, 1, np.array([-1, 0]), inverse, unseen, value)
    expected = np.where(inverse[:, None] < 0, np.float32(0), unseen)
    np.testing.assert_array_equal(arrays.to_host(out), expected)


@pytest.mark.parametrize("value", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("width", [1, 3, 4, 10, 130])
def test_gather_widens_as_the_cpu(xp, width, value):
    """All codes, NaN among them, and unseen vectors of float32."""
    codes = np.resize(np.arange(2**16, dtype=np.uint16), (-(-(2**16) // width), width))
    codes = np.random.default_rng(0).permutation(codes)[:60]
    rows = np.zeros((60, (width + 7) // 8 * 4), np.float32)
    rows.view(np.uint16)[:, :width] = codes
    _, unique, inverse, unseen = case(60, width, 100)
    out, _ = gathered(xp, rows, 3, unique, inverse, unseen, value)
    memory, _ = chunked_cpu(rows, 3, value)
    expected = np.empty((100, width), np.float32)
    gather_rows(memory, unique, inverse, unseen, expected)
    assert arrays.to_host(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "shape",
    oracle.covering((0, 1, 3, 17, 127),
                    ((1, 4, 0), (3, 12, 3), (4, 8, 4), (9, 20, 1), (10, 32, 20), (128, 132, 1),
                     (130, 392, 260), (1025, 1028, 2)),
                    (FLOAT32, FLOAT16, BFLOAT16), (False, True)),
    ids=str,
)  # fmt: skip
def test_write_fills_its_rows_and_nothing_else(xp, shape):
    n, (width, stride, state), value, common = shape
    before = oracle.normals((n + 20, stride))
    memory, chunks = chunked(xp, before, 3, value)
    vectors = oracle.normals((n, width), seed=1)
    states = oracle.normals((1 if common else n, state), seed=2)
    rounding = None if value == FLOAT32 else keys(n)
    write_rows(memory, 7, *moved(xp, vectors, states), on_device(xp, rounding))
    after = unchunked(chunks, n + 20)
    expected = written(vectors, states, width, stride, value, rounding)
    assert after[7 : 7 + n].tobytes() == expected.tobytes()
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
    write_rows(memory, 3, out[:38, 1:3], xp.asarray(NO_STATE))
    places = arrays.copy_to(xp, np.arange(3, 41)), arrays.copy_to(xp, np.arange(38))
    again = xp.empty((38, 2), np.float32)
    gather_rows(memory, *places, xp.empty((0, 2), np.float32), again)
    np.testing.assert_array_equal(arrays.to_host(again), arrays.to_host(out)[:38, 1:3])
    assert not unchunked(chunks, 41)[3:, 2:].any()


@pytest.mark.parametrize("value", [FLOAT32, FLOAT16])
def test_thread_order(xp, value):
    rows, unique, inverse, unseen = case(100, 10, 300)
    rounding = None if value == FLOAT32 else on_device(xp, keys(60))
    vectors, states = oracle.normals((60, 10), seed=2), oracle.normals((60, 2), seed=3)

    def call():
        memory, chunks = chunked(xp, rows, 4, value)
        write_rows(memory, 11, *moved(xp, vectors, states), rounding)
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
        write_rows(memory, 0, np.zeros((1, 4), np.float32), NO_STATE)
    with pytest.raises(TypeError, match=r"write_rows: 'vectors' must be float32, got float64\.$"):
        write_rows(memory, 0, xp.asarray(np.zeros((1, 4))), xp.asarray(NO_STATE))


@pytest.mark.parametrize("device", ["cpu", None])
def test_rows_without_columns_are_refused(xp, device):
    xp = arrays.module(device) if device else xp
    memory = RowMemory(xp.empty(0, np.uint64), 1, 4)
    rows, none = xp.empty(2, np.int64), xp.empty((2, 0), np.float32)
    text = "gather_rows: 'out' must have D of at least 1, got shape (2, 0)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        gather_rows(memory, rows, rows, none, none)
    text = "write_rows: 'vectors' must have D of at least 1, got shape (2, 0)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        write_rows(memory, 0, none, xp.asarray(NO_STATE))


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


@pytest.mark.parametrize("value", [FLOAT32, BFLOAT16])
def test_write_moves_what_it_must(value):
    sim = arrays.module("sim")
    n, width, stride = 500, 128, 132 if value == FLOAT32 else 68
    memory, _ = chunked(sim, oracle.normals((n, stride)), 6, value)
    rounding = None if value == FLOAT32 else on_device(sim, keys(n))
    vectors = sim.asarray(oracle.normals((n, width)))
    with sim.record() as seen:
        write_rows(memory, 0, vectors, sim.zeros((1, 1), np.float32), rounding)
    counts = seen.launches[-1].result.counts
    ideal = n * (width + stride) * 4
    assert counts["bytes_read"] + counts["bytes_written"] <= 1.1 * ideal
    assert counts["sectors"] * 32 <= 2 * ideal

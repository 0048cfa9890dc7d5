import math

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops import sum_squares as op
from cupyrec.ops.sum_squares import sum_squares

f32 = np.float32
SIZES = [0, 1, 3, 17, 127, 1025, 2047, 2048, 2049, 6145]


@pytest.mark.parametrize("n", SIZES)
def test_integer_data_is_exact(xp, n):
    x = oracle.integers(n, -9, 9)
    got = sum_squares(xp.asarray(x))
    assert (arrays.namespace("", got), got.shape, got.dtype) == (xp, (1,), np.float64)
    oracle.check_exact(arrays.to_host(got), np.float64([sum(int(v) ** 2 for v in x)]))


@pytest.mark.parametrize("n", [17, 1025, 6145])
def test_error(xp, n):
    """Squares of float32 are exact in float64: only the sum rounds."""
    x = oracle.normals(n)
    truth = math.fsum(float(v) ** 2 for v in x)
    got = sum_squares(xp.asarray(x)).item()
    assert abs(got - truth) <= np.finfo(np.float64).eps * math.sqrt(n) * truth


def test_more_tiles_than_blocks(xp, monkeypatch):
    x = oracle.integers(13_000, -9, 9)
    monkeypatch.setattr(op, "_MOST_BLOCKS", 3)
    oracle.check_exact(arrays.to_host(sum_squares(xp.asarray(x))), np.float64([(x**2).sum()]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 2100, 4099])
def test_nan_and_inf(xp, value, at):
    x = oracle.normals(4100)
    x[at] = value
    np.testing.assert_equal(arrays.to_host(sum_squares(xp.asarray(x)))[0], abs(value))


def test_neither_overflows_nor_underflows(xp):
    assert sum_squares(xp.full(4, 2.0**127, f32)).item() == 2.0**256
    assert sum_squares(xp.full(4, 2.0**-126, f32)).item() == 2.0**-250


def test_any_shape_layout_and_alignment_give_the_same_bits(xp):
    x = oracle.normals((17, 10, 30))
    held = xp.asarray(x)
    expected = arrays.to_host(sum_squares(held)).tobytes()
    assert arrays.to_host(sum_squares(held.ravel())).tobytes() == expected
    for offset in (1, 2, 3):
        larger = np.zeros(x.size + offset, f32)
        larger[offset:] = x.ravel()
        view = xp.asarray(larger)[offset:]
        assert arrays.to_host(sum_squares(view)).tobytes() == expected
    part = x[:, ::2].transpose(2, 0, 1)
    got = sum_squares(held[:, ::2].transpose(2, 0, 1))
    assert arrays.to_host(got) == arrays.to_host(sum_squares(xp.asarray(part.copy())))
    np.testing.assert_allclose(arrays.to_host(got), sum_squares(part.copy()), rtol=1e-14)


def test_same_bits_in_any_order(xp):
    x = xp.asarray(oracle.normals(5000))
    oracle.check_thread_order(xp, lambda: [sum_squares(x), sum_squares(x[:-3])])


def test_what_moves():
    sim = arrays.module("sim")
    n = 16_384
    x = sim.asarray(oracle.normals(n))
    with sim.record() as seen:
        sum_squares(x)
    assert [launch.name for launch in seen.launches] == ["sum_squares", "add_parts"]
    assert seen.syncs == 0
    counts = [launch.result.counts for launch in seen.launches]
    ideal = 4 * n + 8
    assert sum(c["bytes_read"] + c["bytes_written"] for c in counts) <= 1.01 * ideal
    assert 32 * sum(c["sectors"] for c in counts) <= 1.05 * ideal
    for c in counts:
        assert c["bank_conflicts"] <= 0.02 * c["shared_wavefronts"]
        assert c["longest_warp"] <= 4 * c["mean_warp"]
    assert op._sum.geometry(N=2_400_000).grid >= 132 * 8


def test_refuses(xp):
    text = "sum_squares: 'x' must be float32, got float64."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        sum_squares(xp.zeros(3))

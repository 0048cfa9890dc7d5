import math

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops import clip_scale as op
from cupyrec.ops.clip_scale import clip_scale, scale_pointer, scale_value

f32 = np.float32
SIZES = [0, 1, 3, 17, 127, 1025, 2047, 2048, 2049, 6145]
CASES = [  # of squared norms that are exact
    ([[]], None, None), ([[], []], 2.0, None), ([[0, 0]], 1e-30, None), ([[3, 4]], 1.0, None),
    ([[3], [4]], 5.0, None), ([[3], [], [4]], 6.0, None), ([[2, 4, 4]], None, None),
    ([[2.0**127] * 4], 2.0**70, None), ([[2.0**-126] * 4], 2.0**-130, None),
    ([[1, math.inf]], 1.0, None), ([[1], [-math.inf]], None, None), ([[1], [math.nan]], 1.0, None),
    ([[]], None, 0.5), ([[]], None, math.nan), ([[]], 1.0, math.inf), ([[2]], 1.0, 0.5),
    ([[2]], 1.0, -math.inf), ([[math.nan]], 1.0, 0.5), ([[2]], None, math.nan),
]  # fmt: skip


def truth(xs, clip_norm, loss=None):
    norm = math.sqrt(math.fsum(float(x) ** 2 for part in xs for x in part))
    if not (math.isfinite(norm) and math.isfinite(loss or 0)):
        return math.nan
    return min(1.0, clip_norm / norm) if clip_norm and norm else 1.0


def number(scale):
    return f32(scale if isinstance(scale, float) else scale.item())


def on(xp, xs):
    return [xp.asarray(np.array(x, f32)) for x in xs]


@pytest.mark.parametrize(("xs", "clip_norm", "loss"), CASES)
def test_cpu(xs, clip_norm, loss):
    for dtype in (f32, np.float64):
        value = None if loss is None else np.asarray(loss, dtype)
        got = clip_scale(on(np, xs), clip_norm, value)
        assert type(got) is float
        np.testing.assert_equal(got, truth(xs, clip_norm, loss))
    np.testing.assert_equal(clip_scale(on(np, xs), clip_norm, loss), got)


@pytest.mark.parametrize(("xs", "clip_norm", "loss"), CASES)
def test_devices(xp, xs, clip_norm, loss):
    for shape in ((), (1,)):
        value = None if loss is None else xp.full(shape, loss, f32)
        got = clip_scale(on(xp, xs), clip_norm, value)
        assert (arrays.namespace("", got), got.shape, got.dtype) == (xp, (1,), f32)
        np.testing.assert_array_equal(arrays.to_host(got), f32([truth(xs, clip_norm, loss)]))


def check_size(xp, n):
    """Squares of float32 are exact in float64: only their sum, root and quotient round."""
    x = oracle.normals(n) if n % 2 else oracle.integers(n, -9, 9)
    got = number(clip_scale([xp.asarray(x)], 0.25))
    np.testing.assert_allclose(got, f32(truth([x], 0.25)), rtol=0 if n % 2 == 0 else 2e-7)


@pytest.mark.parametrize("n", SIZES)
def test_any_size(np_or_xp, n):
    check_size(np_or_xp, n)


@pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 200_000])
def test_blocks_of_the_cpu(n):
    check_size(np, n)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_any_number_of_arrays(np_or_xp, count):
    """Also where a launch has several blocks, or nothing to do."""
    sizes = [3, 0, 5000, 1, 2049, 17, 0, 4096, 1][:count]
    xs = [oracle.integers(n, -9, 9, seed=n) for n in sizes]
    for order in (xs, xs[::-1]):
        got = number(clip_scale([np_or_xp.asarray(x) for x in order], 0.5))
        assert got == f32(truth(xs, 0.5))


def test_more_tiles_than_blocks(xp, monkeypatch):
    x = oracle.integers(13_000, -9, 9)
    monkeypatch.setattr(op, "_MOST_BLOCKS", 3)
    got = clip_scale([xp.asarray(x), xp.asarray(x[:9000])], 0.5)
    oracle.check_exact(arrays.to_host(got), f32([truth([x, x[:9000]], 0.5)]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 2100, 4099])
def test_one_value_that_is_not_finite(np_or_xp, value, at):
    xs = [np_or_xp.asarray(oracle.normals(4100, seed=i)) for i in range(2)]
    xs[at % 2][at] = value
    assert np.isnan(number(clip_scale(xs)))


def test_any_shape_layout_and_alignment_give_the_same_bits(xp):
    x = oracle.normals((17, 10, 30))
    held = xp.asarray(x)

    def got(y):
        return arrays.to_host(clip_scale([y], 0.1)).tobytes()

    assert got(held.ravel()) == got(held)
    for offset in (1, 2, 3):
        larger = np.zeros(x.size + offset, f32)
        larger[offset:] = x.ravel()
        assert got(xp.asarray(larger)[offset:]) == got(held)
    part = x[:, ::2].transpose(2, 0, 1)
    assert got(held[:, ::2].transpose(2, 0, 1)) == got(xp.asarray(part.copy()))


def test_same_bits_in_any_order(xp):
    xs = [xp.asarray(oracle.normals(n)) for n in (5000, 3, 2049)]
    oracle.check_thread_order(xp, lambda: [clip_scale(xs, 0.5)])
    oracle.check_thread_order(xp, lambda: [clip_scale([*xs, *xs], 0.5)])


def test_same_bits_on_the_cpu():
    x = oracle.normals(300_000)
    oracle.check_same_bits(
        lambda: [clip_scale([y], 0.1) for y in (x, x[1:], x[:-3], x.reshape(2, -1).T)]
    )


def test_launches(sim):
    """One, on which the host doesn't wait."""
    xs, loss = [sim.asarray(oracle.normals(8192))] * 3, sim.ones((), f32)
    clip_scale(xs)  # makes what blocks are counted in
    with sim.record() as seen:
        clip_scale(xs, 0.5, loss)
    assert ([launch.name for launch in seen.launches], seen.syncs) == (["clip_scale"], 0)
    with sim.record() as seen:
        clip_scale([*xs, *xs], 0.5)
    assert [launch.name for launch in seen.launches] == ["clip_scale"] * 2


def test_scales_as_updates_take_them(xp):
    assert scale_pointer(xp, 1.0) is scale_pointer(xp, f32(1)) is None
    for scale in (0.5, f32(0.5)):
        held = scale_pointer(xp, scale)
        assert (arrays.namespace("", held), held.dtype) == (xp, f32)
        assert arrays.to_host(held) == [0.5]
    assert scale_pointer(xp, held) is held
    text = "scale: must be one number, got shape (0,)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        scale_pointer(xp, xp.ones(0, f32))
    assert [scale_value(s) for s in (0.5, f32(0.5), np.full(1, 0.5, f32))] == [0.5] * 3


def test_refuses(xp):
    one, loss = xp.ones(1, f32), xp.ones((), f32)
    for arguments, error, text in [
        (([one], 0.0), ValueError, "'clip_norm' must be positive, got 0.0."),
        (([one], math.nan), ValueError, "'clip_norm' must be positive, got nan."),
        (([xp.ones(1)], 1.0), TypeError, "'gradients' must be float32, got float64."),
        (([one], 1.0, xp.ones(1)), TypeError, "'loss' must be float32, got float64."),
        (
            ([one], 1.0, xp.ones(3, f32)), ValueError,
            "'loss' must be one number, got shape (3,).",
        ),
        (
            ([[2.0], one], 1.0), TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got list.",
        ),
        (
            ([np.ones(1, f32), one], 1.0, loss), TypeError,
            f"arguments must be arrays of one device, got cpu, {arrays.name(xp)}.",
        ),
    ]:  # fmt: skip
        with pytest.raises(error, match=oracle.sentence(f"clip_scale: {text}")):
            clip_scale(*arguments)

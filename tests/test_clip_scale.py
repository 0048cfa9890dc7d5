import math

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops.clip_scale import clip_scale, scale_pointer, scale_value

f32 = np.float32
CASES = [
    ([], None, None), ([], 2.0, None), ([0.0], 2.0, None), ([0.0, 0.0], 1e-30, None),
    ([9.0, 16.0], 1.0, None), ([9.0, 16.0], 5.0, None), ([9.0, 16.0], 6.0, None),
    ([9.0, 16.0], None, None), ([1e300, 1e300, 7.0], 3.0, None), ([1e-300], 3.0, None),
    ([2.0, 3.0, 5.0, 7.0, 11.0], 0.1, None), ([math.inf], 1.0, None), ([1.0, math.nan], 1.0, None),
    ([math.inf], None, None), ([], None, 0.5), ([], None, math.nan), ([], 1.0, math.inf),
    ([4.0], 1.0, 0.5), ([4.0], 1.0, -math.inf), ([math.nan], 1.0, 0.5), ([4.0], None, math.nan),
]  # fmt: skip


def truth(squares, clip_norm, loss):
    norm = math.sqrt(math.fsum(squares))
    if not (math.isfinite(norm) and math.isfinite(loss or 0)):
        return math.nan
    return min(1.0, clip_norm / norm) if clip_norm and norm else 1.0


@pytest.mark.parametrize(("squares", "clip_norm", "loss"), CASES)
def test_cpu(squares, clip_norm, loss):
    for dtype in (f32, np.float64):
        value = None if loss is None else np.asarray(loss, dtype)
        got = clip_scale(squares, clip_norm, value)
        assert type(got) is float
        np.testing.assert_allclose(got, truth(squares, clip_norm, loss), rtol=1e-15)
    np.testing.assert_equal(clip_scale(squares, clip_norm, loss), got)


@pytest.mark.parametrize(("squares", "clip_norm", "loss"), [c for c in CASES if c[0] or c[2]])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_devices(xp, squares, clip_norm, loss, shape):
    held = [xp.full(1, value, np.float64) for value in squares]
    value = None if loss is None else xp.full(shape, loss, f32)
    got = clip_scale(held, clip_norm, value)
    assert (arrays.namespace("", got), got.shape, got.dtype) == (xp, (1,), f32)
    expected = clip_scale(squares, clip_norm, loss)
    np.testing.assert_array_equal(arrays.to_host(got), f32([expected]))


def test_same_bits_in_any_order(xp):
    held = [xp.full(1, value, np.float64) for value in (0.1, 0.7, 1e-9)]
    oracle.check_thread_order(xp, lambda: [clip_scale(held, 0.5, xp.ones((), f32))])


def test_the_host_does_not_wait():
    sim = arrays.module("sim")
    held = [sim.full(1, value, np.float64) for value in (1.0, 2.0)]
    with sim.record() as seen:
        clip_scale(held, 0.5)
        clip_scale(held[:1], 0.5)
    assert seen.syncs == 0
    names = [launch.name for launch in seen.launches]
    assert names == ["concatenate", "clip_scale", "clip_scale"]


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
    one, loss = xp.ones(1), xp.ones((), f32)
    for arguments, error, text in [
        (([one], 0.0), ValueError, "'clip_norm' must be positive, got 0.0."),
        (([1.0], math.nan), ValueError, "'clip_norm' must be positive, got nan."),
        (([xp.ones(1, f32)], 1.0), TypeError, "'squares' must be float64, got float32."),
        (([xp.ones(2)], 1.0), ValueError, "'squares' must have axes (1), got shape (2,)."),
        (([one], 1.0, one), TypeError, "'loss' must be float32, got float64."),
        (
            ([one], 1.0, xp.ones(3, f32)), ValueError,
            "'loss' must be one number, got shape (3,).",
        ),
        (
            ([2.0, one], 1.0), TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got float.",
        ),
        (
            ([np.ones(1)], 1.0, loss), TypeError,
            f"arguments must be arrays of one device, got cpu, {arrays.name(xp)}.",
        ),
    ]:  # fmt: skip
        with pytest.raises(error, match=oracle.sentence(f"clip_scale: {text}")):
            clip_scale(*arguments)

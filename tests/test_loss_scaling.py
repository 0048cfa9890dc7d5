"""What a step makes of a loss scale: the loops of the CPU, and the kernel's last thread."""

import math

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops.clip_scale import clip_scale
from cupyrec.ops.loss_scaling import LARGEST, LossScaling

f32 = np.float32
INF = math.inf
RULES = [  # scale, growth, backoff, interval, gradients of the steps
    (8.0, 2.0, 0.5, 2, [1, 1, INF, 1, 1, 1, 1, -INF, math.nan]),
    (2.0, 2.0, 0.5, 1, [INF, INF, INF, 1, 1]),
    (2.0**23, 4.0, 0.25, 1, [1, 1, 1]),
    (10.0, 1.1, 0.3, 1, [1, 1, INF, 1]),
]


def scaling_on(xp, scale, growth, backoff, interval):
    state = xp.asarray(np.array([scale, 0, 0, 0, 1, 1]))
    return LossScaling(state, xp.asarray(f32([scale, 0, 0])), growth, backoff, interval, 0.9, 0.999)


@pytest.mark.parametrize("rule", RULES)
def test_devices_go_the_way_of_the_formula(xp, rule):
    scale, growth, backoff, interval, steps = rule
    held = scaling_on(xp, *rule[:4])
    good = skipped = stuck = applied = 0
    for g in steps:
        factor = clip_scale([xp.full(3, g, f32)], 0.5, scaling=held).item()
        if math.isfinite(g):
            norm = math.sqrt(3) / scale
            assert factor == pytest.approx(min(1, 0.5 / norm) / scale, rel=1e-6)
            good, applied = good + 1, applied + 1
            if good == interval:
                scale, good = float(f32(min(scale * growth, LARGEST))), 0
        else:
            assert math.isnan(factor)
            skipped, stuck, good = skipped + 1, stuck + (scale == 1), 0
            scale = float(f32(max(1, scale * backoff)))
        got = arrays.to_host(held.state)
        assert got[:4].tolist() == [scale, good, skipped, stuck]
        np.testing.assert_allclose(got[4:], [0.9**applied, 0.999**applied], rtol=1e-14)
        factors = arrays.to_host(held.factors)
        assert factors[0] == scale
        if applied:
            np.testing.assert_allclose(
                factors[1:], [1 / (1 - 0.9**applied), (1 - 0.999**applied) ** -0.5], rtol=1e-6
            )


def test_cpu_and_devices_have_the_same_bits(xp):
    """But where the CPU raises."""
    runs = []
    for module in (np, xp):
        held = scaling_on(module, 64.0, 1.7, 0.6, 3)
        factors = []
        for i in range(40):
            g = module.full(1, INF if i % 11 == 5 else 3.0, f32)
            factor = clip_scale([g], 0.1, module.ones((), f32), scaling=held)
            factors.append(f32(factor if module is np else factor.item()))
        runs.append(np.concatenate([*map(arrays.to_host, held[:2]), factors]))
    np.testing.assert_array_equal(*runs)


def test_the_cpu_leaves_alone_what_its_caller_refuses():
    held = scaling_on(np, 1.0, 2.0, 0.5, 1)
    for g, loss in [(INF, 1.0), (1.0, INF), (INF, math.nan)]:
        assert math.isnan(clip_scale([np.full(1, g, f32)], loss=loss, scaling=held))
        assert held.state.tolist() == [1, 0, 0, 0, 1, 1]


def test_any_power_of_two_clips_to_the_same_bits(np_or_xp):
    x, got = oracle.normals(5000), []
    for scale in (1.0, 2.0**7, 2.0**24):
        held = scaling_on(np_or_xp, scale, 2.0, 0.5, 9)
        factor = clip_scale([np_or_xp.asarray(x * f32(scale))], 0.3, scaling=held)
        got.append(f32(factor if np_or_xp is np else factor.item()) * f32(scale))
    assert len({g.tobytes() for g in got}) == 1


def test_same_bits_in_any_order(xp):
    xs = [xp.asarray(oracle.normals(n)) for n in (5000, 3)]

    def call():
        held = scaling_on(xp, 8.0, 2.0, 0.5, 1)
        return [clip_scale(xs, 0.5, scaling=held), held.state, held.factors]

    oracle.check_thread_order(xp, call)

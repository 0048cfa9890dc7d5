"""What surrounds the update of dense parameters: see test_update_kernels.py for the updates."""

import numpy as np
import oracle
import pytest

from cupyrec.ops.dense_parameters import check_dense, update_dense
from cupyrec.ops.sgd import _dense

f32 = np.float32


def halve(w, g, constants):
    w -= constants[0] * constants[1] * g


def test_the_gradient_may_be_strided(np_or_xp):
    xp, n = np_or_xp, 1025
    w, g = oracle.integers((n,), -9, 9), oracle.integers((2 * n,), -9, 9)
    got = xp.asarray(w.copy())
    xp_of = check_dense("f", w=got, g=xp.asarray(g)[::2])
    constants = (f32(0.5),) if xp is np else (f32(0.5), f32(0))  # sgd.cu's decay
    update_dense(xp_of, _dense, halve, (got, xp.asarray(g)[::2]), 4.0, *constants)
    got = got if xp is np else got.get()
    np.testing.assert_array_equal(got, w - 2 * g[::2])


@pytest.mark.parametrize("sizes", [(0,), (65535, 65537, 1)])
def test_blocks_meet_every_number_once(sizes):
    for n in sizes:
        w = np.zeros(n, f32)
        update_dense(np, None, halve, (w, np.ones(n, f32)), 2.0, f32(-0.5))
        np.testing.assert_array_equal(w, np.ones(n, f32))


def test_a_scale_that_is_nan_updates_nothing():
    w = np.ones(3, f32)
    update_dense(np, None, halve, (w, w), np.full(1, np.nan, f32), f32(1))
    np.testing.assert_array_equal(w, np.ones(3, f32))


def test_refuses_other_lengths():
    text = "f: 'g' must have N = 3 like 'w', got shape (2,)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        check_dense("f", w=np.zeros(3, f32), g=np.zeros(2, f32))

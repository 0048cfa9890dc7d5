"""Products of what is not 0 in x: integers against the sums written out, whatever is 0."""

import numpy as np
import oracle
import pytest

from cupyrec.ops.live_products import live_products_cpu, live_sums_cpu

# R, H, M and M filled, O and O filled
SHAPES = [(1, 1, 1, 16, 1, 16), (9, 3, 16, 16, 5, 16), (70, 5, 39, 48, 33, 48)]


def filled(x, *shape):
    out = np.zeros(shape, np.float32)
    out[tuple(map(slice, x.shape))] = x
    return out


@pytest.mark.parametrize("live", ["none", "half", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_all_products(shape, live):
    r, h, m, wide, o, outputs = shape
    x = oracle.integers((r, h), 1, 4)
    if live != "all":
        x *= 0 if live == "none" else np.random.default_rng(2).random((r, h)) < 0.5
    x0, dz = oracle.integers((r, m), -4, 4, seed=1), oracle.integers((r, o), -4, 4, seed=2)
    weight = oracle.integers((h, m, o), -4, 4, seed=3)
    z, dweight = np.ones((r, outputs), np.float32), np.ones((h, wide, outputs), np.float32)
    dx, dx0 = np.full((r, h), np.nan, np.float32), np.ones((r, wide), np.float32)
    padded, given = filled(x0, r, wide), filled(weight, h, wide, outputs)
    live_products_cpu(x, padded, given, m, z)
    turned = np.ascontiguousarray(given.transpose(0, 2, 1))
    live_sums_cpu(filled(dz, r, outputs), x, padded, turned, m, dx, dx0, dweight)

    p = np.float64(x)[:, :, None] * x0[:, None, :]
    dp = np.einsum("ro,ijo->rij", np.float64(dz), weight)
    oracle.check_exact(z[:, :o], 1 + np.einsum("rij,ijo->ro", p, weight))
    oracle.check_exact(dx, (x != 0) * np.einsum("rij,rj->ri", dp, x0))
    oracle.check_exact(dx0[:, :m], 1 + np.einsum("rij,ri->rj", dp, x))
    oracle.check_exact(dweight[:, :m, :o], 1 + np.einsum("rij,ro->ijo", p, dz))

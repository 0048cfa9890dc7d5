"""DLRM in mixed precision: the simulator's kernels against the CPU, which rounds where they do."""

import numpy as np
import pytest

import cupyrec
from cupyrec import arrays, models, optim
from cupyrec.data import Batch

STEPS = 3


def train(device, amp, scaler=None, steps=STEPS):
    """Losses, and parameters at the end."""
    cupyrec.manual_seed(1)
    model = models.DLRM(num_dense=13, num_tables=26, embedding_dim=16, dropout=0.1).to(device)
    model.amp = amp
    # Adam would make a step of full size of a gradient that is all rounding.
    optimizer = optim.SGD(model.parameters(), lr=0.5, scaler=scaler)
    rng, losses = np.random.default_rng(2), []
    for _ in range(steps):
        dense = rng.standard_normal((32, 13)).astype("f")
        ids, labels = rng.integers(0, 50, (32, 26)), rng.random((32, 1)) < 0.3
        batch = Batch(dense, ids, labels.astype("f"))
        losses.append(cupyrec.train_step(model, batch, optimizer).item())
    return losses, [arrays.to_host(p.data) for _, p in model.named_parameters()]


@pytest.mark.parametrize("amp", ["float16", "bfloat16"])
def test_the_simulator_agrees_with_the_cpu(sim, amp):
    eps = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[amp]
    scalers = [optim.GradientScaler() if amp == "float16" else None for _ in range(2)]
    losses, parameters = train("cpu", amp, scalers[0])
    theirs, others = train("sim", amp, scalers[1])
    np.testing.assert_allclose(theirs, losses, rtol=eps)
    for a, b in zip(others, parameters, strict=True):
        assert np.abs(a - b).max() <= eps * np.abs(b).max()


@pytest.mark.parametrize("amp", ["float16", "bfloat16"])
def test_training_is_near_that_in_float32(amp):
    losses, _ = train("cpu", amp, optim.GradientScaler() if amp == "float16" else None, steps=8)
    plain, _ = train("cpu", None, steps=8)
    assert losses != plain
    np.testing.assert_allclose(losses, plain, rtol=0.01)

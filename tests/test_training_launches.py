"""What a step of DLRM training asks of the device."""

import numpy as np
import pytest

import cupyrec
from cupyrec import optim
from cupyrec.data import Batch
from cupyrec.models import DLRM

# Of a step, matmuls among them; more only where a table grows. 16 bits also take casts.
LAUNCHES = {None: 24, "float16": 25, "bfloat16": 25}


@pytest.mark.parametrize("amp", LAUNCHES)
def test_a_step_takes_few_launches_and_two_syncs(sim, amp):
    model = DLRM(num_dense=13, num_tables=26, dropout=0.1).to("sim")
    model.amp = amp
    scaler = optim.GradientScaler() if amp == "float16" else None
    optimizer = optim.Adam(model.parameters(), lr=0.01, clip_norm=1.0, scaler=scaler)
    for samples in (50, 512, 512):  # the last step finds tables and scratch memory large enough
        ids = np.arange(samples * 26).reshape(26, samples).T % 50
        labels = np.arange(samples, dtype=np.float32)[:, None] % 2
        batch = Batch(np.ones((samples, 13), np.float32), ids, labels)
        with sim.record() as seen:
            cupyrec.train_step(model, batch, optimizer)
    names = [launch.name for launch in seen.launches]
    assert len(names) <= LAUNCHES[amp], names
    assert seen.syncs <= 2

"""What a step of DLRM training asks of the device."""

import numpy as np

import cupyrec
from cupyrec import optim
from cupyrec.data import Batch
from cupyrec.models import DLRM

LAUNCHES = 25  # of a step, matmuls among them; more only where a table grows


def test_a_step_takes_few_launches_and_two_syncs(sim):
    model = DLRM(num_dense=13, num_tables=26, dropout=0.1).to("sim")
    optimizer = optim.Adam(model.parameters(), lr=0.01, clip_norm=1.0)
    for samples in (50, 512, 512):  # the last step finds tables and scratch memory large enough
        ids = np.arange(samples * 26).reshape(26, samples).T % 50
        labels = np.arange(samples, dtype=np.float32)[:, None] % 2
        batch = Batch(np.ones((samples, 13), np.float32), ids, labels)
        with sim.record() as seen:
            cupyrec.train_step(model, batch, optimizer)
    names = [launch.name for launch in seen.launches]
    assert len(names) <= LAUNCHES, names
    assert seen.syncs <= 2

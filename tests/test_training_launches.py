"""What a step of DLRM training asks of the device."""

import numpy as np
import pytest

import cupyrec
from cupyrec import optim
from cupyrec.data import Batch
from cupyrec.models import DLRM

# Of a step, matmuls among them; more only where a table grows. 16 bits also take casts.
LAUNCHES = {None: 24, "float16": 25, "bfloat16": 25}


# Of a step whose dense part is replayed: by the host, and in its two graphs.
REPLAYED = {None: (16, 14), "float16": (16, 15), "bfloat16": (16, 15)}


def steps(sim, amp):
    """What each step asks for; the dense part of the fourth is captured for those after it."""
    model = DLRM(num_dense=13, num_tables=26, dropout=0.1).to("sim")
    model.amp = amp
    scaler = optim.GradientScaler() if amp == "float16" else None
    optimizer, seen = optim.Adam(model.parameters(), lr=0.01, clip_norm=1.0, scaler=scaler), []
    for samples in (50, *[96] * 5):
        ids = np.arange(samples * 26).reshape(26, samples).T % 50
        labels = np.arange(samples, dtype=np.float32)[:, None] % 2
        batch = Batch(np.ones((samples, 13), np.float32), ids, labels)
        with sim.record() as step:
            cupyrec.train_step(model, batch, optimizer)
        seen.append(step)
    return seen


@pytest.mark.parametrize("amp", LAUNCHES)
def test_a_step_takes_few_launches_and_two_syncs(sim, monkeypatch, amp):
    """And fewer from the host where it is replayed."""
    graphs, launch = [], sim.cuda.Graph.launch

    def counted(graph):
        with sim.record() as seen:
            launch(graph)
        graphs.append([one.name for one in seen.launches])

    monkeypatch.setattr(sim.cuda.Graph, "launch", counted)
    _, _, eager, *_, replayed = steps(sim, amp)
    # The third finds tables and scratch memory large enough.
    names = [one.name for one in eager.launches]
    assert len(names) <= LAUNCHES[amp], names
    assert eager.syncs <= 2
    assert eager.graphs == 0
    forward, backward = graphs[-2:]
    by_host, in_graphs = REPLAYED[amp]
    assert replayed.graphs == 2
    assert 0 < len(forward) + len(backward) <= in_graphs, (forward, backward)
    names = [one.name for one in replayed.launches]
    assert len(names) - len(forward) - len(backward) <= by_host, names
    assert replayed.syncs <= 2
    assert replayed.allocations == 0

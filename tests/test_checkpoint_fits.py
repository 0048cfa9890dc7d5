"""Checkpoints of other models and optimizers are refused, and leave these as they were."""

import re

import pytest
from oracle import sentence
from test_checkpoint import batch, dlrm, everything, trained

import cupyrec
from cupyrec import checkpoint, optim
from cupyrec.models import DLRM


class Other(DLRM):
    pass


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (Other(2, 2, embedding_dim=3), "must be of model Other, got DLRM."),
        (dlrm(width=4), "must have the model's groups [('embedding.groups.4', 4, 'float32')]"),
        (dlrm(tables=3), "load_state_dict: 'top.weights.0' must have shape (4, 9), got (4, 6)."),
        (DLRM(2, 2, embedding_dim=3, bottom=[5], top=[4, 4]), "must have optimizer/m/top.biases.2"),
    ],
)
def test_another_model_is_refused_and_left_as_it_was(model, rule, tmp_path):
    checkpoint.save(tmp_path / "c", *trained())
    optimizer = optim.Adam(model.parameters(), 0.1)
    tables = model.embedding.num_tables
    cupyrec.train_step(model, batch([1, 2], tables), optimizer)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=re.escape(rule)):
        checkpoint.load(tmp_path / "c", model, optimizer)
    assert everything(model, optimizer) == before


def test_another_optimizer_is_refused(tmp_path):
    model, optimizer = trained(optim.Adam)
    checkpoint.save(tmp_path / "c", model, optimizer)
    other = optim.SGD(model.parameters(), 0.1)
    before = everything(model, other)
    text = f"checkpoint.load: '{tmp_path / 'c'}' must have the state of SGD, got Adam."
    with pytest.raises(ValueError, match=sentence(text)):
        checkpoint.load(tmp_path / "c", model, other)
    assert everything(model, other) == before

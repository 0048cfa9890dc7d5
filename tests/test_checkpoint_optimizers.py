"""Checkpoints with optimizers that were made with other constants."""

import numpy as np
import pytest
from test_checkpoint import dlrm, everything, trained

from cupyrec import checkpoint, optim


@pytest.mark.parametrize(
    "options", [dict(betas=(0.5, 0.9)), dict(eps=1e-3), dict(weight_decay=0.1)]
)
def test_rows_that_catch_up_keep_their_constants(options, tmp_path):
    model, optimizer = trained(optim.CatchUpAdam)
    checkpoint.save(tmp_path / "c", model, optimizer)
    fresh = dlrm()
    again = optim.CatchUpAdam(fresh.parameters(), 0.1, **options)
    before = [p.copy() for p in fresh.state_dict().values()]
    with pytest.raises(ValueError, match="catch up by .* which the optimizer must have, got "):
        checkpoint.load(tmp_path / "c", fresh, again)
    for a, b in zip(fresh.state_dict().values(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    checkpoint.load(tmp_path / "c", fresh, optim.CatchUpAdam(fresh.parameters(), 0.7))


class Halving:
    """A schedule with a state of its own."""

    def __init__(self):
        self.halvings = 0

    def __call__(self, step):
        return 0.5**self.halvings

    def state_dict(self):
        return {"halvings": self.halvings}

    def load_state_dict(self, state):
        self.halvings = 9
        self.halvings = state["halvings"]


@pytest.mark.parametrize(
    ("saved", "given", "error"),
    [(Halving, optim.Plateau, ValueError), (optim.Plateau, Halving, KeyError)],
)
def test_a_schedule_that_refuses_a_state_leaves_all_as_it_was(saved, given, error, tmp_path):
    model, optimizer = trained()
    optimizer.schedule = saved()
    checkpoint.save(tmp_path / "c", model, optimizer)
    model, optimizer = trained()
    optimizer.schedule = given()
    before = everything(model, optimizer), optimizer.schedule.state_dict()
    with pytest.raises(error):
        checkpoint.load(tmp_path / "c", model, optimizer)
    assert (everything(model, optimizer), optimizer.schedule.state_dict()) == before
    optimizer.schedule = saved()
    checkpoint.load(tmp_path / "c", model, optimizer)

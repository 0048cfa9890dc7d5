"""Checkpoints with optimizers that were made with other constants."""

import numpy as np
import pytest
from test_checkpoint import dlrm, everything, trained

from cupyrec import checkpoint, nn, optim
from cupyrec.embedding import Normal

f32 = np.float32


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.CatchUpAdam, dict(eps=f32(1e-8), betas=(f32(0.9), 0.999), weight_decay=f32(0.1))),
        (optim.RowWiseAdagrad, dict(initial_accumulator=f32(0.1))),
        (optim.FTRL, dict(initial_accumulator=f32(0.1), lambda1=f32(0.1))),
    ],
)
def test_scalars_of_numpy_are_saved_as_numbers(kind, options, tmp_path):
    def build():
        start = [(np.int64(1), Normal(std=f32(0.1))), (np.int32(1), Normal())]
        layer = nn.MultiTableEmbedding(
            np.int64(1), np.int64(2), initializer=[start], seed=np.int64(3)
        )
        plateau = optim.Plateau(factor=f32(0.5), min_factor=f32(0.75))
        return layer, kind(layer.parameters(), f32(0.1), schedule=plateau, **options)

    layer, optimizer = build()
    for auc in (0.7, 0.6):
        layer(np.array([[7]])).sum().backward()
        optimizer.step()
        optimizer.schedule.observe(f32(auc))
    checkpoint.save(tmp_path / "c", layer, optimizer)
    again, fresh = build()
    checkpoint.load(tmp_path / "c", again, fresh)
    assert again.digest() == layer.digest()
    assert fresh.schedule == optimizer.schedule

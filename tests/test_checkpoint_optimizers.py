"""Checkpoints with optimizers that were made with other constants."""

import numpy as np
import pytest
from test_checkpoint import dlrm, trained

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

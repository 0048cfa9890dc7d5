import math

import numpy as np
import oracle
import pytest
import whole_model
from whole_model import DENSE, TABLES

from cupyrec.models import LR


@pytest.mark.parametrize("num_dense", [0, DENSE])
def test_logits_are_sums_of_weights(num_dense):
    model = LR(num_dense, TABLES)
    for parameter in model.first_order.parameters():
        parameter.data[...] = oracle.normals(parameter.shape, seed=3)
    batch = next(whole_model.batches(1, rows=9))
    weights = model.embedding(batch.ids).numpy()
    expected = np.empty((9, 1))
    for b in range(9):
        expected[b] = math.fsum([*weights[b, :, 0], *model.first_order.bias.data])
        if num_dense:
            expected[b] += np.float64(batch.dense[b]) @ model.first_order.weight.data[:, 0]
    got = model(batch.dense, batch.ids)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_few_rows():
    whole_model.check_few_rows(LR(DENSE, TABLES))


def test_gradient():
    whole_model.check_gradient(LR(DENSE, TABLES))


def test_devices_agree(xp):
    whole_model.check_devices_agree(xp, lambda: LR(DENSE, TABLES))


def test_replays(xp):
    whole_model.check_it_replays_what_it_does(xp, lambda: LR(DENSE, TABLES))


def test_refuses():
    text = "MultiTableEmbedding: 'num_tables' must be at least 1, got 0."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        LR(3, 0)


def test_parameters_are_as_many_as_fuxictrs():
    """On MovielensLatest_x1, of 90,239 ids."""
    assert whole_model.count(LR(0, 3), 90_239) == 90_240

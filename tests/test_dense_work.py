"""What dense parts take, against the models."""

import pytest

from cupyrec import models
from cupyrec.dense_work import dense_work


def test_a_perceptron_counts_each_weight_six_times():
    model = models.DCN(3, 2, 4, crosses=2, deep=[8, 5])
    told = dense_work(model, 3, 2, 4)
    width = 3 + 2 * 4
    weights = 2 * width + width * 8 + 8 * 5 + (width + 5)
    assert told.flops == 6 * weights
    assert told.activations == 2 * width + 2 * width + 8 + 5 + 1
    assert told.parameters == weights + 2 * width + 8 + 5 + 1


def test_products_and_feature_maps():
    plain = dense_work(models.DeepFM(2, 3, 4, deep=[8]), 2, 3, 5)
    with_maps = dense_work(models.XDeepFM(2, 3, 4, deep=[8], maps=[6]), 2, 3, 5)
    maps, head = 6 * 3 * 3, 6
    assert with_maps.flops - plain.flops == 6 * (5 * maps + head)
    inner = dense_work(models.PNN(2, 3, 4, deep=[8]), 2, 3, 4)
    layers = (2 + 12 + 3) * 8 + 8
    assert inner.flops == 6 * layers + 3 * 4 * 3 * 4


def test_buffers_and_room():
    told = dense_work(models.DLRM(2, 3, 4, bottom=[8], top=[8], batch_norm=True), 2, 3, 4)
    assert told.buffers == 16
    assert told.room % 64 == 0
    assert told.room >= told.parameters


@pytest.mark.parametrize("model", [models.LR, models.FM])
def test_a_first_order_alone_has_next_to_no_operations(model):
    assert dense_work(model(2, 3), 2, 3, 1).flops == 0

import itertools

import numpy as np
import oracle
import pytest
import whole_model
from whole_model import DENSE, TABLES

from cupyrec.models import DeepFM


def make(num_dense=DENSE, **options):
    return DeepFM(num_dense, TABLES, **dict(embedding_dim=5, deep=[7, 6]) | options)


@pytest.mark.parametrize("num_dense", [0, DENSE])
def test_logits_against_the_paper(num_dense):
    model = make(num_dense)
    for logit, dense, vectors, first in whole_model.samples(model, num_dense):
        pairs = sum(v @ w for v, w in itertools.combinations(vectors, 2))
        deep = whole_model.mlp(model.deep, np.concatenate([dense, *vectors])[None])[0, 0]
        np.testing.assert_allclose(logit, first + pairs + deep, rtol=1e-4, atol=1e-6)


def test_few_rows():
    whole_model.check_few_rows(make())


@pytest.mark.parametrize("batch_norm", [False, True])
def test_gradient(batch_norm):
    whole_model.check_gradient(make(batch_norm=batch_norm))


@pytest.mark.parametrize("amp", [None, "float16", "bfloat16"])
def test_devices_agree(xp, amp):
    whole_model.check_devices_agree(xp, lambda: make(dropout=0.2), amp)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_replays(xp, batch_norm):
    whole_model.check_it_replays_what_it_does(xp, lambda: make(dropout=0.2, batch_norm=batch_norm))


def test_refuses():
    text = "DeepFM: 'embedding_dim' must be at least 1, got 0."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        make(embedding_dim=0)


def test_parameters_are_as_many_as_fuxictrs():
    """On MovielensLatest_x1, of 90,239 ids."""
    model = DeepFM(0, 3, 10, deep=[400] * 3, batch_norm=True)
    assert whole_model.count(model, 90_239) == 1_328_630

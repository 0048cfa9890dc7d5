import itertools

import numpy as np
import oracle
import pytest
import whole_model
from whole_model import DENSE, TABLES

from cupyrec.models import FM


def make(num_dense=DENSE, **options):
    return FM(num_dense, TABLES, **dict(embedding_dim=5) | options)


@pytest.mark.parametrize("num_dense", [0, DENSE])
def test_logits_against_the_paper(num_dense):
    model = make(num_dense)
    model.first_order.bias.data[...] = 0.5
    for logit, _, vectors, first in whole_model.samples(model, num_dense):
        pairs = sum(v @ w for v, w in itertools.combinations(vectors, 2))
        np.testing.assert_allclose(logit, first + 0.5 + pairs, rtol=1e-5)


def test_few_rows():
    whole_model.check_few_rows(make())


def test_gradient():
    whole_model.check_gradient(make())


@pytest.mark.parametrize("amp", [None, "float16", "bfloat16"])
def test_devices_agree(xp, amp):
    whole_model.check_devices_agree(xp, lambda: make(), amp)


def test_replays(xp):
    whole_model.check_it_replays_what_it_does(xp, lambda: make())


def test_refuses():
    text = "FM: 'embedding_dim' must be at least 1, got 0."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        make(embedding_dim=0)


def test_parameters_are_as_many_as_fuxictrs():
    """On MovielensLatest_x1, of 90,239 ids."""
    assert whole_model.count(FM(0, 3, 10), 90_239) == 992_630

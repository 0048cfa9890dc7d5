import itertools

import numpy as np
import oracle
import pytest
import whole_model
from whole_model import DENSE, TABLES

from cupyrec.models import PNN

PRODUCTS = "inner", "outer", "both"


def make(product="both", num_dense=DENSE, **options):
    return PNN(num_dense, TABLES, **dict(embedding_dim=5, product=product, deep=[7, 6]) | options)


@pytest.mark.parametrize("num_dense", [0, DENSE])
@pytest.mark.parametrize("product", PRODUCTS)
def test_logits_against_the_paper(product, num_dense):
    model = make(product, num_dense)
    batch = next(whole_model.batches(1, rows=9))
    got = model(batch.dense, batch.ids)
    vectors = model.embedding(batch.ids).numpy().astype(np.float64)
    logits = np.empty((9, 1))
    for b in range(9):
        x = [*(batch.dense[b] if num_dense else []), *vectors[b].ravel()]
        if product != "outer":
            x += [vectors[b, r] @ vectors[b, c] for r in range(TABLES) for c in range(r)]
        if product != "inner":
            total = vectors[b].sum(axis=0)
            x += [total[r] * total[c] for r in range(5) for c in range(r + 1)]
        logits[b] = whole_model.mlp(model.deep, np.array([x]))[0]
    np.testing.assert_allclose(got.numpy(), logits, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("product", PRODUCTS)
def test_few_rows(product):
    whole_model.check_few_rows(make(product))


@pytest.mark.parametrize("product", PRODUCTS)
def test_gradient(product):
    whole_model.check_gradient(make(product))


@pytest.mark.parametrize(
    ("product", "amp"), [*itertools.product(PRODUCTS, [None, "float16"]), ("both", "bfloat16")]
)
def test_devices_agree(xp, product, amp):
    whole_model.check_devices_agree(xp, lambda: make(product, dropout=0.2), amp)


def test_replays(xp):
    whole_model.check_it_replays_what_it_does(xp, lambda: make(dropout=0.2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, 4, 0), "MultiTableEmbedding: 'embedding_dim' must be at least 1, got 0."),
        ((3, 0), "PNN: 'num_tables' must be at least 1, got 0."),
        ((3, 1, 8, "inner"), "PNN: 'inner' products must be of two tables or more, got 1."),
        ((3, 2, 8, "cross"), "PNN: 'product' must be 'inner', 'outer' or 'both', got 'cross'."),
    ],
)
def test_refuses(arguments, text):
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        PNN(*arguments)


def test_parameters_are_as_many_as_fuxictrs():
    """On MovielensLatest_x1, of 90,239 ids."""
    assert whole_model.count(PNN(0, 3, 10, deep=[400] * 3), 90_239) == 1_237_191

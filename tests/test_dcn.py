import numpy as np
import oracle
import pytest
import whole_model
from whole_model import DENSE, TABLES

from cupyrec import models

MODELS = models.DCN, models.DCNv2


@pytest.fixture(params=MODELS)
def make(request):
    return lambda **options: request.param(
        DENSE, TABLES, **dict(embedding_dim=5, crosses=3, deep=[7, 6]) | options
    )


@pytest.mark.parametrize("deep", [[6], [7, 6]])
@pytest.mark.parametrize("num_dense", [0, DENSE])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_against_the_paper(kind, num_dense, deep):
    model = kind(num_dense, TABLES, embedding_dim=5, crosses=3, deep=deep)
    for cross in model.crosses:
        cross.bias.data[...] = oracle.normals(cross.bias.shape, seed=3)
    batch = next(whole_model.batches(1, rows=9))
    got = model(batch.dense, batch.ids)
    rows = model.embedding(batch.ids).numpy().astype(np.float64)
    logits = np.empty((9, 1))
    for b in range(9):
        x0 = np.concatenate([*([batch.dense[b]] if num_dense else []), *rows[b]])
        x = x0
        for cross in model.crosses:
            weight, bias = np.float64(cross.weight.data), cross.bias.data
            x = x0 * (x @ weight) + bias + x if weight.ndim == 1 else x0 * (weight @ x + bias) + x
        deep = whole_model.mlp(model.deep, x0[None])[0]
        logits[b] = whole_model.mlp(model.head, np.concatenate([x, deep])[None])[0]
    np.testing.assert_allclose(got.numpy(), logits, rtol=1e-4, atol=1e-5)


def test_its_parts_have_the_sizes_of_the_papers():
    """Of DCN's 2 N numbers a layer, of DCN-v2's N^2 + N."""
    for kind, count in ((models.DCN, 2 * 429), (models.DCNv2, 429 * 430)):
        model = kind(13, 26, embedding_dim=16, crosses=4, deep=[1024, 1024])
        shapes = {name: array.size for name, array in model.state_dict().items()}
        assert sum(n for name, n in shapes.items() if name.startswith("crosses.")) == 4 * count
        assert shapes["deep.weights.1"] == 1024**2
        assert shapes["head.weights.0"] == 429 + 1024


def test_few_rows(make):
    whole_model.check_few_rows(make())


@pytest.mark.parametrize("batch_norm", [False, True])
def test_gradient(make, batch_norm):
    whole_model.check_gradient(make(batch_norm=batch_norm))


@pytest.mark.parametrize("amp", [None, "float16", "bfloat16"])
def test_devices_agree(make, xp, amp):
    whole_model.check_devices_agree(xp, lambda: make(dropout=0.2), amp)


@pytest.mark.parametrize("amp", [None, "float16"])
def test_devices_agree_on_normalized_batches(make, xp, amp):
    whole_model.check_devices_agree(xp, lambda: make(dropout=0.2, batch_norm=True), amp)


def test_devices_agree_without_dense_features(xp):
    def make():
        return models.DCN(0, TABLES, embedding_dim=5, deep=[7])

    whole_model.check_devices_agree(xp, make, "float16")


def test_replays(make, xp):
    whole_model.check_it_replays_what_it_does(xp, lambda: make(dropout=0.2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"crosses": 0}, "'crosses' must be at least 1, got 0."),
        ({"deep": []}, "'deep' must have a layer or more, got []."),
    ],
)
def test_refuses(make, options, text):
    with pytest.raises(ValueError, match=rf"^DCN(v2)?: {oracle.sentence(text)[1:]}"):
        make(**options)


@pytest.mark.parametrize(
    ("kind", "crosses", "expected"), [(models.DCN, 4, 1_238_661), (models.DCNv2, 5, 1_243_071)]
)
def test_parameters_are_as_many_as_fuxictrs(kind, crosses, expected):
    """On MovielensLatest_x1, of 90,239 ids."""
    model = kind(0, 3, 10, crosses=crosses, deep=[400] * 3, batch_norm=True)
    assert whole_model.count(model, 90_239) == expected

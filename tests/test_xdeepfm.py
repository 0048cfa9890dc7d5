import numpy as np
import oracle
import pytest
import whole_model
from whole_model import DENSE, TABLES

from cupyrec.models import XDeepFM


def make(num_dense=DENSE, **options):
    small = dict(embedding_dim=5, maps=[8, 6, 3], deep=[7, 6])
    return XDeepFM(num_dense, TABLES, **small | options)


@pytest.mark.parametrize(("split_half", "linear"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("num_dense", [0, DENSE])
def test_logits_against_the_paper(num_dense, split_half, linear):
    """Equation 6, feature map by feature map."""
    model = make(num_dense, split_half=split_half, linear_maps=linear)
    for bias in model.interaction.biases:
        bias.data[...] = oracle.normals(bias.shape, seed=3)
    for logit, dense, x0, first in whole_model.samples(model, num_dense):
        x, pooled = x0, []
        for number, (weight, bias) in enumerate(
            zip(model.interaction.weights, model.interaction.biases, strict=True)
        ):
            products = [np.outer(a, b) for a, b in zip(x.T, x0.T, strict=True)]  # column by column
            maps = [
                [(w * p).sum() + c for p in products]
                for w, c in zip(weight.data, bias.data, strict=True)
            ]
            maps = np.array(maps) if linear else np.maximum(maps, 0)
            cut = len(maps) // 2 if split_half and number < 2 else 0
            pooled += list(maps[cut:].sum(axis=1))
            x = maps[:cut] if cut else maps
        assert model.interaction.width == len(pooled)
        explicit = whole_model.mlp(model.head, np.array([pooled]))[0, 0]
        deep = whole_model.mlp(model.deep, np.concatenate([dense, *x0])[None])[0, 0]
        np.testing.assert_allclose(logit, first + explicit + deep, rtol=1e-4, atol=1e-5)


def test_few_rows():
    whole_model.check_few_rows(make())


@pytest.mark.parametrize("linear", [False, True])
def test_gradient(linear):
    model = make(linear_maps=linear)
    for bias in model.interaction.biases:
        bias.data[...] = 0.01  # away from the kinks
    whole_model.check_gradient(model)


@pytest.mark.parametrize("amp", [None, "float16", "bfloat16"])
def test_devices_agree(xp, amp):
    whole_model.check_devices_agree(xp, lambda: make(dropout=0.2), amp)


def test_replays(xp):
    whole_model.check_it_replays_what_it_does(xp, lambda: make(dropout=0.2))


@pytest.mark.parametrize("maps", [[], [3, 4], [4, 0]])
def test_refuses(maps):
    with pytest.raises(ValueError, match=r"^CompressedInteraction: 'layers' must be "):
        make(maps=maps)


def test_an_odd_layer_is_not_split():
    assert make(maps=[4, 3]).interaction.width == 5
    assert make(maps=[3, 3], split_half=False).interaction.width == 6


def test_parameters_are_as_many_as_fuxictrs():
    """On MovielensLatest_x1, of 90,239 ids."""
    assert (
        whole_model.count(
            XDeepFM(0, 3, 10, maps=[64] * 3, split_half=False, deep=[400] * 3), 90_239
        )
        == 1_351_767
    )

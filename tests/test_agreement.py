"""What ranks must agree on before they train together (marked `ranks`)."""

import numpy as np
import pytest

import cupyrec
from cupyrec import Tensor, models, optim
from cupyrec.optim import Optimizer
from cupyrec.parallel import Exchange, world

pytestmark = pytest.mark.ranks
RANKS = world()
N, R = RANKS.size, RANKS.rank
LAST = N - 1


def parameters() -> list[Tensor]:
    return [Tensor(np.ones(3, np.float32), requires_grad=True)]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda last: optim.SGD(parameters(), 0.2 if last else 0.1), "lr"),
        (lambda last: (optim.Adagrad if last else optim.Adam)(parameters(), 1), "optimizer"),
        (lambda last: optim.SGD(parameters(), 1, clip_norm=2.0 if last else None), "clip_norm"),
        (lambda last: optim.Adam(parameters(), betas=(0.9, 0.99 if last else 0.9)), "betas"),
        (lambda last: optim.FTRL(parameters(), 1, lambda1=float(last)), "lambda1"),
        (
            lambda last: optim.SGD([{"params": parameters(), "l2": float(last)}], 1),
            "lr, weight_decay and l2 of parameter groups",
        ),
    ],
)
def test_ranks_of_other_settings_are_refused(make, name: str) -> None:
    if N == 1:
        assert isinstance(make(True), Optimizer)
        return
    with pytest.raises(ValueError, match=f"have the same {name}, got .* on rank 0"):
        make(R == LAST)
    assert isinstance(make(True), Optimizer)  # and the ranks are in step again


def test_ranks_of_other_codecs_are_refused() -> None:
    cupyrec.manual_seed(1)
    model = models.DLRM(2, 3)
    for _, group in model.named_groups():
        group.exchange = Exchange(RANKS, backward="int8" if R == LAST else "none", num_tables=3)
    if N == 1:
        optim.SGD(model.parameters(), 0.1)
        return
    told = rf"got \['Exchange\(.*backward=int8.*on rank {LAST}, .*backward=none.* on rank 0"
    with pytest.raises(ValueError, match=told):
        optim.SGD(model.parameters(), 0.1)

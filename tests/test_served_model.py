"""What a model that is served is made of; what it answers: tests/test_predictor.py."""

import numpy as np
import pytest
import saved
import trial

import cupyrec
from cupyrec import optim
from cupyrec.embedding import Life, Rows
from cupyrec.serving.served_model import nearest, without_rows


def test_rows_are_rounded_half_to_even_and_never_to_infinity():
    x = np.array([[1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-7 + 2**-9), 3.3895e38]], np.float32)
    rows = Rows(np.zeros(1, np.uint32), np.array([7]), x, {})
    half = nearest(rows._replace(vectors=x[:, :3]), "bfloat16").vectors
    assert half.tolist() == [[1, 1 + 2**-6, -(1 + 2**-7)]]
    assert nearest(rows, "float32") is nearest(rows, None) is rows
    most = np.array([[65504, 65519.99, 2**-24, 0]], np.float32)
    got = nearest(rows._replace(vectors=most), "float16").vectors
    assert got.tolist() == [[65504, 65504, 2**-24, 0]]
    with pytest.raises(ValueError, match="table 0 must be such as float16 holds, got 3.3"):
        nearest(rows, "float16")
    with pytest.raises(ValueError, match="table 0 must be such as bfloat16 holds, got 3.39"):
        nearest(rows._replace(vectors=np.full((1, 1), 3.4e38, np.float32)), "bfloat16")


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_copy_has_neither_rows_nor_what_an_optimizer_keeps(device):
    model = saved.model_of(life=Life(admit_after=2)).to(device)
    optimizer = optim.Adam(model.parameters(), 0.05)
    cupyrec.fit(model, trial.planted(20), optimizer=optimizer, batch_size=10)
    copied = without_rows(model, {"embedding.groups.4": "float16"}).to("cpu")
    (group,) = (group for _, group in copied.named_groups())
    assert (len(group.store), group.store.state, group.life) == (0, (), None)
    assert (group.dtype, group.history, group.candidates) == ("float16", None, None)
    assert copied.embedding.group is group is not model.embedding.group
    for (name, mine), (_, theirs) in zip(
        copied.named_parameters(), model.named_parameters(), strict=True
    ):
        assert mine.grad_buffer is None, name
        assert (mine.numpy() == theirs.numpy()).all()
        mine.data += 1
        assert (mine.numpy() != theirs.numpy()).all()

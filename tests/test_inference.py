"""Evaluation and prediction."""

import itertools
import math

import numpy as np
import pytest
import trial
from oracle import sentence
from test_training import rows_of, small, weights_of

import cupyrec
from cupyrec import autograd, inference, nn, optim
from cupyrec.data import Arrays, RankSlices
from cupyrec.inference import dataset_of, logits_of
from cupyrec.parallel import Communicator, Exchange


@pytest.mark.parametrize("first", [0, 1000])
def test_nothing_changes_where_nothing_is_trained(first):
    model = small()
    optimizer = optim.Adam(model.parameters(), 0.1)
    cupyrec.fit(model, trial.planted(200), optimizer=optimizer, batch_size=50)
    group = model.embedding.group
    store = group.store
    before = weights_of(model), rows_of(model), store.nbytes
    state = {k: v.tobytes() for k, v in store.export_rows(0, len(store)).states.items()}
    dense, ids, labels = trial.planted(300, seed=1)
    ids = ids * 2 + first  # half or all of them unseen
    measured = cupyrec.evaluate(model, (dense, ids, labels), batch_size=64)
    probabilities = cupyrec.predict(model, (dense, ids))
    assert (weights_of(model), rows_of(model), store.nbytes) == before
    assert {k: v.tobytes() for k, v in store.export_rows(0, len(store)).states.items()} == state
    assert group.store is store
    assert group.gradients()[0].size == 0
    assert optimizer.t == 4
    # The same numbers again, by other batches, and as the loop over samples gives them.
    np.testing.assert_allclose(
        cupyrec.predict(model, (dense, ids), batch_size=7), probabilities, rtol=1e-5
    )
    p = probabilities.astype(np.float64)
    loss = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).mean()
    assert measured["logloss"] == pytest.approx(loss, rel=1e-5)
    won = p[labels == 1][:, None] - p[labels == 0]
    assert measured["auc"] == pytest.approx(((won > 0) + (won == 0) / 2).mean(), rel=1e-6)


def test_evaluation_keeps_the_modes_of_all_parts_even_after_an_error():
    model = small()
    model.top.eval()
    data = trial.planted(10)
    cupyrec.evaluate(model, data)
    cupyrec.predict(model, data[:2])
    with pytest.raises(ValueError, match="MultiTableEmbedding: 'ids' must have axes"):
        cupyrec.predict(model, (data[0], data[1][:, :1]))
    assert (model.training, model.top.training, model.bottom.training) == (True, False, True)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda z: z[:, 0], ValueError, "model: 'logits' must have axes (B, T), got shape (10,)."),
        (
            lambda z: z[:4],
            ValueError,
            "model: 'logits' must have B = 10 like 'dense', got shape (4, 1).",
        ),
        (lambda z: [z, z], TypeError, "model: must return a Tensor of logits, got list."),
    ],
)
def test_a_model_that_returns_no_logits(change, error, text):
    class Changed(nn.Module):
        def __init__(self):
            self.own = small()

        def forward(self, dense, ids):
            return change(self.own(dense, ids))

    with pytest.raises(error, match=sentence(text)):
        cupyrec.predict(Changed(), trial.planted(10)[:2])


def test_probabilities_of_extreme_logits():
    class Itself(nn.Module):
        def forward(self, dense, ids):
            assert not autograd.is_recording()
            return cupyrec.Tensor(dense)

    z = np.array([-1e4, -100, -1, 0, 1, 20, 1e4], np.float32)[:, None]
    ids = np.zeros((7, 1), np.int64)
    got = cupyrec.predict(Itself(), (z, ids))
    assert got.dtype == np.float32
    expected = [0, math.exp(-100), 1 / (1 + math.e), 0.5, math.e / (1 + math.e), 1 - 2e-9, 1]
    np.testing.assert_allclose(got, np.float32(expected), rtol=1e-6)
    assert (got[0], got[-1]) == (0, 1)


def test_evaluate_needs_labels_and_finite_logits():
    model = small()
    dense, ids, labels = trial.planted(10)
    text = "evaluate: every row must have a label, got 0 for 10 rows."
    with pytest.raises(ValueError, match=sentence(text)):
        cupyrec.evaluate(model, (dense, ids))
    model.top.biases[1].data[0] = np.inf
    text = sentence("logits: must be finite, got 10 of 10 that are not.")
    with pytest.raises(FloatingPointError, match=text):
        cupyrec.evaluate(model, (dense, ids, labels))
    with pytest.raises(FloatingPointError, match=text):
        cupyrec.predict(model, (dense, ids))


def test_logits_stand_in_order_whatever_the_batches():
    model, data = small(), trial.planted(10)
    whole, labels = logits_of(model, Arrays(*data).batches(10))
    parts, _ = logits_of(model, Arrays(*data).batches(3))
    assert (labels[:, 0] == data[2]).all()
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    none, labels = logits_of(model, [])
    assert none.shape == labels.shape == (0, 1)


class Many(Communicator):
    """One of many ranks, whose parts of some batches are told."""

    def __init__(self, parts):
        super().__init__()
        self.parts, self.size, self.rank, self.sizes = parts, len(parts), 3, []

    def all_gather(self, what, own):
        self.now = [parts[: len(own)] for parts in self.parts]
        self.parts = [parts[len(own) :] for parts in self.parts]
        lengths = np.array([[len(part) for part in parts] for parts in self.now])
        assert (lengths[self.rank] == own).all()
        return lengths

    def all_to_all(self, what, transfer):
        self.sizes.append(transfer.receive.size)
        for rank, parts in enumerate(self.now):
            transfer.received(rank)[:] = np.concatenate(parts)
        assert (transfer.send == transfer.received(self.rank)).all()


@pytest.mark.parametrize(
    ("ranks", "batches", "at_once"), [(5, 7, 3), (512, 20, 4), (4, 6, 1 << 10)]
)
def test_logits_of_many_ranks_stand_in_order(ranks, batches, at_once, monkeypatch):
    monkeypatch.setattr(inference, "_BATCHES", at_once)
    rng = np.random.default_rng(ranks)
    lengths = rng.integers(0, 4, (ranks, batches))
    parts = [[rng.random(n, np.float32) for n in row] for row in lengths]
    many = Many(parts)
    got = list(inference._in_order(many, parts[many.rank]))
    expected = [parts[rank][batch] for batch in range(batches) for rank in range(ranks)]
    assert np.concatenate(got).tolist() == np.concatenate(expected).tolist()
    # So many arrays and no more, each of so many batches and no more.
    assert many.sizes == [
        lengths[:, first : first + at_once].sum() for first in range(0, batches, at_once)
    ]
    assert [part.size for part in got] == many.sizes


def test_logits_of_ranks_with_consecutive_rows_stand_rank_after_rank(monkeypatch):
    monkeypatch.setattr(inference, "_BATCHES", 2)
    rng = np.random.default_rng(0)
    parts = [[rng.random(n, np.float32) for n in rng.integers(0, 4, 5)] for _ in range(4)]
    many = Many(parts)
    (got,) = inference._in_order(many, parts[many.rank], consecutive=True)
    assert got.tolist() == np.concatenate([*itertools.chain(*parts)]).tolist()


def test_what_is_data():
    model = small()
    slices = RankSlices(Arrays(*trial.planted(10)), 0, 2)
    assert dataset_of(model, slices) is slices
    # Of several ranks: by the data's own way if it has one, else of whole batches.
    ranks = Communicator()
    ranks.rank, ranks.size = 1, 3
    model = small()
    model.embedding.group.exchange = Exchange(ranks)

    class Own:
        def batches(self, size, *, skip=0):
            yield from Arrays(*trial.planted(10)).batches(size, skip=skip)

    for data in (trial.planted(10), Own(), slices):
        (batch,) = dataset_of(model, data).batches(10)
        assert (batch.first, len(batch), batch.total) == (3, 3, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Own, "of_rank", lambda self, *rank: rank, raising=False)
        assert dataset_of(model, Own()) == (1, 3)
    with pytest.raises(TypeError, match="data: must be a dataset .* got int"):
        dataset_of(model, 3)

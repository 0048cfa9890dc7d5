"""Evaluation and prediction."""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import trial
from oracle import sentence
from test_training import rows_of, small, weights_of

import cupyrec
from cupyrec import autograd, inference, models, nn, optim
from cupyrec.data import Arrays, RankSlices, criteo_schema
from cupyrec.embedding import CachedHost
from cupyrec.from_settings import MODELS, build_model, default_settings
from cupyrec.inference import BLOCK, dataset_of, logits_of, pass_rows, probabilities
from cupyrec.parallel import Communicator, Exchange
from cupyrec.ragged import Bags


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
    assert (cupyrec.predict(model, (dense, ids), batch_size=7) == probabilities).all()
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
        (lambda z: z[:, 0], ValueError, "model: 'logits' must have axes (B, T), got shape (64,)."),
        (
            lambda z: z[:4],
            ValueError,
            "model: 'logits' must have B = 64 like 'dense', got shape (4, 1).",
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


# Blocks


class Pooled(nn.Module):
    """Means of bags through an MLP."""

    def __init__(self):
        self.embedding = nn.MultiTableEmbedding(3, 8, pooling="mean")
        self.mlp = nn.FusedMLP(3 * 8 + 2, [80], 1, skip_final_activation=True)

    def forward(self, dense, ids):
        vectors = self.embedding(ids)
        flat = cupyrec.reshape(vectors, (len(dense), 24))
        return self.mlp(cupyrec.concatenate([dense, flat], axis=1))


MADE = {
    "dlrm": lambda: models.DLRM(2, 3),
    "normalized": lambda: models.DLRM(2, 3, batch_norm=True),
    "dcn_v2": lambda: models.DCNv2(2, 3),
    "deepfm": lambda: models.DeepFM(2, 3),
    "deepfm_by_occurrence": lambda: models.DeepFM(2, 3, deep=[400]),
    "xdeepfm": lambda: models.XDeepFM(2, 3),
    "mmoe": lambda: models.MMoE(2, 3, num_tasks=2),
    "pooled": Pooled,
}


def rows_for(name, rows, seed=0):
    """dense, and ids in a form that takes lists of rows: bags are (N,) arrays of their lengths."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((rows, 2), np.float32)
    ids = rng.integers(0, 50, (rows, 3))
    if name != "pooled":
        return dense, ids, lambda chosen: ids[chosen]
    lengths = rng.integers(0, 4, (rows, 3))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    bags = Bags(rng.integers(0, 50, offsets[-1]), offsets, 3)
    return dense, bags, lambda chosen: Bags.joined([bags.part(i, i + 1) for i in chosen])


def learnt(name, device="cpu"):
    """A model that has rows for about half of the ids, and has moved."""
    cupyrec.manual_seed(7)
    model = MADE[name]().to(device)
    optimizer = optim.Adam(model.parameters(), 0.05)
    dense, ids, _ = rows_for(name, 10, seed=1)
    tasks = 2 if name == "mmoe" else 1
    labels = (dense[:, :1] > 0).repeat(tasks, axis=1).astype(np.float32)
    cupyrec.fit(model, Arrays(dense, ids, labels), optimizer=optimizer, batch_size=5)
    return model


def held(model):
    """All that the tables are and have counted."""
    groups = [group for _, group in model.named_groups()]
    return [m.digest() for m in model.modules() if hasattr(m, "digest")], [
        (len(g.store), g.store.nbytes, g.store.metrics(), vars(g.statistics).copy()) for g in groups
    ]


@pytest.mark.parametrize("name", MADE)
def test_the_bits_of_a_row_hang_on_the_row_alone(name):
    model = learnt(name)
    dense, ids, some = rows_for(name, 1000)
    before = str(held(model))
    whole = probabilities(model, dense, ids)
    assert whole.shape == (1000, 2 if name == "mmoe" else 1)
    assert len(np.unique(whole)) > 900
    order = np.random.default_rng(3).permutation(1000)
    for rows in ([], [999], *(order[:n] for n in (1, 63, 64, 65, 1000))):
        rows = np.array(rows, np.int64)
        if rows.size or name != "pooled":
            assert (probabilities(model, dense[rows], some(rows)) == whole[rows]).all()
    for place in range(0, BLOCK, 3):  # one row in places of all residues, among copies of another
        rows = np.full(BLOCK, order[0])
        rows[place] = order[1]
        assert (probabilities(model, dense[rows], some(rows)) == whole[rows]).all()
    assert str(held(model)) == before
    for rows, size in ((70, 1), (1000, 65), (1000, 1000)):
        got = cupyrec.predict(model, (dense[:rows], some(np.arange(rows))), batch_size=size)
        assert (got.reshape(-1, whole.shape[1]) == whole[:rows]).all()


@pytest.mark.parametrize("amp", [None, "bfloat16"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_work_block_by_block(name, amp):
    """As many rows as a forward pass takes give the bits of blocks by themselves."""
    assert vars(MODELS[name])["by_blocks"]
    rng = np.random.default_rng(5)
    settings = default_settings(name)
    wide = {"deep": [300, 200], "top": [300, 200], "batch_norm": True}
    for change in ({}, {key: wide[key] for key in settings["model"].keys() & wide.keys()}):
        changed = settings | {"model": settings["model"] | change}
        model = build_model(changed, criteo_schema(), "cpu")
        model.amp = amp
        for span in (50, 10**6):  # of ids: many occur often, or nearly all once
            dense = rng.standard_normal((1088, 13), np.float32)
            ids = rng.integers(0, span, (1088, 39))
            model.train()(dense[:100], ids[:100])
            for parameter in (p for _, p in model.named_parameters()):
                parameter.data[...] = rng.normal(0, 0.1, parameter.shape)
            assert pass_rows(model) >= 512
            whole = probabilities(model, dense, ids)
            for place in (0, 320, 1024):
                part = slice(place, place + BLOCK)
                assert (probabilities(model, dense[part], ids[part]) == whole[part]).all()
            assert len(np.unique(whole)) > 400


def test_the_bits_of_a_row_where_the_kernels_of_a_blas_treat_rows_differently():
    """As on a processor without AVX-512; the variable is OpenBLAS's."""
    program = """if True:
        from cupyrec.ops import array_functions, fused_mlp, thin_matmul
        array_functions.FEW_ROWS = thin_matmul.FEW_ROWS = 512
        fused_mlp._FEW = 64
        import test_inference
        for name in ("dlrm", "dcn_v2", "deepfm_by_occurrence", "mmoe"):
            test_inference.test_the_bits_of_a_row_hang_on_the_row_alone(name)
    """
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = os.environ | {"OPENBLAS_CORETYPE": "Haswell", "PYTHONPATH": path}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0


@pytest.mark.parametrize("name", ["dlrm", "pooled"])
def test_the_bits_of_a_row_on_a_device(name):
    model = learnt(name, "sim")
    dense, ids, some = rows_for(name, 70)
    whole = probabilities(model, dense, ids)
    np.testing.assert_allclose(whole, probabilities(learnt(name), dense, ids), rtol=1e-4)
    for rows in ([69], [3, *range(20, 60), 5]):
        assert (probabilities(model, dense[rows], some(rows)) == whole[rows]).all()


def test_filling_up_asks_for_no_other_rows():
    model = learnt("dlrm")
    model.embedding.keep_in(CachedHost(cache_rows=100))
    dense, ids, _ = rows_for("dlrm", 1)
    asked, find = [], model.embedding.group.store.find
    model.embedding.group.store.find = lambda *keys: asked.append(keys) or find(*keys)
    probabilities(model, dense, ids, passes=3)
    assert [sorted(keys[1].tolist()) for keys in asked] == [sorted(ids[0].tolist()), [], []]


@pytest.mark.parametrize("name", ["dlrm", "pooled"])
@pytest.mark.parametrize("rows", [64, 65, 600])
def test_models_see_arrays_of_one_kind(name, rows):
    """Loops are compiled for each kind, which takes a server's client half a minute."""
    seen = []

    class Watched(type(MADE[name]())):
        def forward(self, dense, ids):
            seen.extend([dense, ids] if name == "dlrm" else [dense, ids.ids, ids.offsets])
            return super().forward(dense, ids)

    model = Watched(2, 3) if name == "dlrm" else Watched()
    dense, ids, _ = rows_for(name, rows)
    expected = probabilities(model, dense, ids)
    for array in (dense, ids) if name == "dlrm" else (dense, ids.ids, ids.offsets):
        array.flags.writeable = False
    assert (probabilities(model, np.asfortranarray(dense), ids) == expected).all()
    assert all(array.flags.c_contiguous and array.flags.writeable for array in seen)


def test_what_is_not_finite_is_told_row_by_row():
    model, (dense, ids, _) = learnt("dlrm"), rows_for("dlrm", 70)
    good = probabilities(model, dense, ids)
    dense[[3, 69]] = np.inf
    got = probabilities(model, dense, ids)
    assert np.flatnonzero(np.isnan(got[:, 0])).tolist() == [3, 69]
    assert (np.delete(got, [3, 69]) == np.delete(good, [3, 69])).all()


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

"""Predictor: answers of a checkpoint, from many threads, while newer ones take its place."""

import contextvars
import json
import shutil
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import saved
import trial
from oracle import sentence
from saved import DENSE, IDS, expected, model_of, save_chain, save_one

import cupyrec
from cupyrec import checkpoint, kernel, nn, sim
from cupyrec.data import open_dataset
from cupyrec.embedding import CachedHost, CachedSSD, Memory
from cupyrec.ragged import Bags
from cupyrec.serving import Predictor, served_model


@pytest.fixture
def chain(tmp_path):
    return save_chain(tmp_path)


def answers(predictor):
    return predictor.probabilities(DENSE, IDS)[0]


def test_a_checkpoint_saved_by_hand_answers_as_after_loading_it(tmp_path):
    path, model = save_one(tmp_path / "c"), model_of(seed=9)
    model(DENSE[:20], IDS[:20])
    before = model.embedding.digest()
    with Predictor(path, model=model) as predictor:
        got, version = predictor.probabilities(DENSE, IDS)
        assert (got == expected(path)).all()
        assert (predictor.predict((DENSE, IDS), batch_size=7) == got[:, 0]).all()
        for rows in ([], [149], range(60, 130)):
            assert (predictor.probabilities(DENSE[rows], IDS[rows])[0] == got[rows]).all()
        told = json.loads((path / "manifest.json").read_text())
        assert version == predictor.version == f"{told['crc32']:08x}"
        assert (predictor.name, predictor.schema, predictor.path) == ("dlrm", None, path.resolve())
        assert (predictor.num_dense, predictor.num_tables, predictor.has_bags) == (-1, 2, False)
    assert model.embedding.digest() == before  # it was copied
    with pytest.raises(RuntimeError, match="Predictor: it must be open"):
        answers(predictor)
    predictor.close()  # once more does no harm


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["memory", "host", "ssd"])
def test_every_tier_answers_and_no_row_is_inserted(tier, device, chain, tmp_path):
    place = tmp_path / "rows"
    tiers = Memory(), CachedHost(cache_rows=64), CachedSSD(path=place, cache_rows=64)
    made = dict(zip(("memory", "host", "ssd"), tiers, strict=True))[tier]
    rows = slice(0, 150 if device == "cpu" else 70)
    want = Predictor(chain[2], model=model_of(), device=device)
    with Predictor(chain[1], model=model_of(), device=device, tier=made) as predictor:
        assert not place.exists() or len(list(place.iterdir())) == 1
        assert predictor.update(chain[2])  # in place
        group = predictor.model.embedding.group
        before = predictor.model.embedding.digest(), len(group.store)
        assert before == (want.model.embedding.digest(), len(want.model.embedding.group.store))
        got, _ = predictor.probabilities(DENSE[rows], IDS[rows])
        assert (got == want.probabilities(DENSE[rows], IDS[rows])[0]).all()
        assert (predictor.model.embedding.digest(), len(group.store)) == before
        assert str(group.tier).split("(")[0] == type(made).__name__
        assert predictor.update(chain[0])  # beside
        assert not place.exists() or len(list(place.iterdir())) == 1
    assert not place.exists() or not list(place.iterdir())
    if device == "cpu":
        assert (answers(want) == expected(chain[2])).all()
    else:
        np.testing.assert_allclose(got, expected(chain[2])[rows], rtol=1e-4)


def test_a_newer_link_of_the_chain_changes_rows_where_they_are(chain):
    with Predictor(chain[0], model=model_of()) as predictor:
        model = predictor.model
        assert predictor.update(chain[2])  # two deltas, the last of which deletes rows
        assert predictor.model is model
        assert predictor.version == Predictor(chain[2], model=model_of()).version
        assert (answers(predictor) == expected(chain[2])).all()
        assert not predictor.update(chain[2])
        assert predictor.update(chain[0])  # no delta leads back
        assert predictor.model is not model
        assert (answers(predictor) == expected(chain[0])).all()


def test_rows_that_catch_up_are_all_read_anew(tmp_path):
    paths = save_chain(tmp_path, cupyrec.optim.CatchUpAdam)
    with Predictor(paths[0], model=model_of()) as predictor:
        assert (answers(predictor) == expected(paths[0])).all()
        assert predictor.update(paths[2])
        assert (answers(predictor) == expected(paths[2])).all()


def test_threads_get_answers_of_one_version_each(chain, tmp_path):
    other = save_one(tmp_path / "other", seed=8)
    paths = [*chain, other]
    told = {}
    for path in paths:
        predictor = Predictor(path, model=model_of())
        told[predictor.version] = expected(path)
    assert len({answer.tobytes() for answer in told.values()}) == 4
    predictor, stop, wrong, seen = Predictor(chain[0], model=model_of()), [], [], set()

    def ask():
        while not stop:
            got, version = predictor.probabilities(DENSE, IDS)
            seen.add(version)
            if not (got == told[version]).all():
                wrong.append(version)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for path in [chain[1], chain[2], other, chain[0], chain[2]] * 2:
            predictor.update(path)
            end = time.monotonic() + 60
            while predictor.version not in seen and time.monotonic() < end:
                answers(predictor)
    finally:
        stop.append(True)
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(seen) == 4


def config(schema):
    return {"schema": schema.to_dict()}


def test_an_update_that_is_refused_leaves_what_is_served(chain, tmp_path):
    saved.spoil(chain[2], "embedding.groups.4.00000-of-00001.vectors")
    wide = save_one(tmp_path / "wide", top=9)
    told = save_one(tmp_path / "told", config(trial.SCHEMA))
    narrow = save_one(tmp_path / "narrow", embedding_dim=2)
    (tmp_path / "cut").mkdir()
    with Predictor(chain[0], model=model_of()) as predictor:
        before, version = predictor.probabilities(DENSE, IDS)
        for path, error, text in [
            (chain[2], ValueError, "it is damaged"),
            (wide, ValueError, "must have the parameters of .* with 'top.biases.0' .8., got .9."),
            (told, ValueError, "must have the schema of .* got another."),
            (narrow, ValueError, "the groups of tables of .* with 'embedding.groups.2' None"),
            (tmp_path / "cut", FileNotFoundError, "must be a checkpoint folder"),
        ]:
            with pytest.raises(error, match=text):
                predictor.update(path)
            assert (answers(predictor) == before).all()
            assert predictor.version == version
        assert predictor.update(chain[1])  # and the next one is taken


def test_rows_that_are_half_changed_are_read_anew(chain, monkeypatch):
    with Predictor(chain[0], model=model_of()) as predictor:
        before, calls = answers(predictor), []

        def failing(*arguments):
            calls.append(1)
            take_rows(*arguments)
            if len(calls) == 1:
                raise OSError("the disk is full")

        take_rows = served_model.take_rows
        monkeypatch.setattr(served_model, "take_rows", failing)
        with pytest.raises(OSError, match="the disk is full"):
            predictor.update(chain[1])
        assert len(calls) > 1
        assert (answers(predictor) == before).all()
        assert predictor.update(chain[1])
        assert (answers(predictor) == expected(chain[1])).all()


def test_without_any_that_can_be_read_the_next_one_is_taken(chain, monkeypatch):
    with Predictor(chain[0], model=model_of()) as predictor:
        with monkeypatch.context() as failing:
            failing.setattr(served_model, "take_rows", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                predictor.update(chain[1])
        assert not predictor.is_open
        with pytest.raises(RuntimeError, match="must be open and have a checkpoint"):
            answers(predictor)
        assert predictor.update(chain[1])
        assert predictor.is_open
        assert (answers(predictor) == expected(chain[1])).all()


def test_what_was_read_is_taken_though_its_files_are_gone(chain, tmp_path):
    other = save_one(tmp_path / "other", seed=8)
    want = expected(chain[1]), expected(other)
    with Predictor(chain[0], model=model_of()) as predictor:
        for path, answer in zip((chain[1], other), want, strict=True):
            staged = predictor.read(path)
            shutil.rmtree(path)
            assert predictor.take(staged)
            assert (answers(predictor) == answer).all()


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("model", "dlrm", "'model' must be a Module, got str."),
        ("model", nn.MultiTableEmbedding, "'model' must be a Module, got type."),
        ("schema", {}, "'schema' must be a Schema, got dict."),
        ("tier", "cached_ssd", "'tier' must be a Tier, got str."),
    ],
)
def test_arguments_of_another_type(chain, name, given, text):
    with pytest.raises(TypeError, match=sentence(f"Predictor: {text}")):
        Predictor(chain[0], **{"model": model_of()} | {name: given})


def test_an_update_read_before_another_is_not_taken(chain):
    with Predictor(chain[0], model=model_of()) as predictor:
        staged = predictor.read(chain[1])
        assert predictor.update(chain[2])
        with pytest.raises(RuntimeError, match="an update must be read for version"):
            predictor.take(staged)
        assert (answers(predictor) == expected(chain[2])).all()


def test_an_update_read_before_the_end_is_not_taken(chain, tmp_path):
    tier = CachedSSD(path=tmp_path / "rows", cache_mb=1)
    predictor = Predictor(chain[0], model=model_of(), tier=tier)
    staged = predictor.read(chain[1]), predictor.read(save_one(tmp_path / "other", seed=8))
    predictor.close()
    for one in staged:
        with pytest.raises(RuntimeError, match="must be open"):
            predictor.take(one)
    assert not [*tier.path.iterdir()]


def test_a_run_tells_its_model_and_its_schema(tmp_path):
    logs = trial.write_logs(tmp_path)
    more = "--set", "training.deltas=3", "--set", "training.save_every=3"
    assert trial.train(logs, tmp_path / "run", *more) == 0
    output = tmp_path / "p.npy"
    words = "--data", tmp_path / "test.tsv", "--output", output
    assert trial.command("predict", tmp_path / "run", *words) == 0
    with Predictor(tmp_path / "run") as predictor:
        data = open_dataset([str(tmp_path / "test.tsv")], trial.SCHEMA, labels=False)
        assert (predictor.predict(data, batch_size=50) == np.load(output)).all()
        assert predictor.path == (tmp_path / "run" / "best").resolve()
        assert (predictor.name, predictor.task_names) == ("dlrm", ["click"])
        assert predictor.schema == trial.SCHEMA
        assert (predictor.num_dense, predictor.num_tables) == (1, 3)
        with pytest.raises(ValueError, match=sentence("Predictor: 'dense' must have axes")[:-1]):
            predictor.probabilities(np.zeros((2, 2), "f"), np.zeros((2, 3), np.int64))
        with pytest.raises(TypeError, match="Predictor: 'ids' must be int64, got int32"):
            predictor.probabilities(np.zeros((2, 1), "f"), np.zeros((2, 3), np.int32))
        checkpoints = sorted(p for p in (tmp_path / "run" / "checkpoints").iterdir())
        for path in checkpoints:
            predictor.update(path)
            with Predictor(path) as other:
                assert (predictor.predict(data) == other.predict(data)).all()


def test_a_checkpoint_by_hand_needs_its_model(tmp_path):
    path = save_one(tmp_path / "c")
    with pytest.raises(ValueError, match="must be written by `cupyrec train`, or come with"):
        Predictor(path)
    with pytest.raises(ValueError, match="must be of model MultiTableEmbedding, got DLRM"):
        Predictor(path, model=nn.MultiTableEmbedding(2, 4))


def test_a_schema_tells_what_such_a_checkpoint_does_not(tmp_path):
    model = cupyrec.models.DLRM(1, 3)
    checkpoint.save(tmp_path / "c", model)
    data = open_dataset([str(trial.write_log(tmp_path / "x.tsv", 70))], trial.SCHEMA)
    with Predictor(tmp_path / "c", model=model, schema=trial.SCHEMA) as predictor:
        assert (predictor.num_dense, predictor.num_tables) == (1, 3)
        assert (predictor.schema, predictor.task_names) == (trial.SCHEMA, ["click"])
        assert (predictor.predict(data) == cupyrec.predict(model, data)).all()


def test_threads_work_on_the_predictor_s_gpu(chain, monkeypatch):
    """CuPy's current GPU is each thread's own."""
    current = contextvars.ContextVar("current", default=0)

    class Device:
        def __init__(self, number=None):
            self.id = current.get() if number is None else number

        def __enter__(self):
            self._token = current.set(self.id)

        def __exit__(self, *_):
            current.reset(self._token)

    launched, launch = set(), kernel.Kernel.__call__

    def noted(*arguments, **more):
        launched.add((threading.current_thread().name, current.get()))
        return launch(*arguments, **more)

    monkeypatch.setattr(sim.cuda, "Device", Device)
    monkeypatch.setattr(kernel.Kernel, "__call__", noted)
    rows = DENSE[:20], IDS[:20]
    with Device(3):
        predictor = Predictor(chain[0], model=model_of(), device="sim")

    def work():
        predictor.update(chain[1])
        predictor.update(chain[0])
        predictor.probabilities(*rows)
        predictor.predict(rows)

    thread = threading.Thread(target=work, name="other")
    thread.start()
    thread.join()
    assert launched == {("MainThread", 3), ("other", 3)}


# Dtypes


def nearest(dtype, vectors):
    if dtype == "int8":
        most = np.abs(vectors).max(axis=1, keepdims=True)
        return np.rint(vectors / most * np.float32(127)) * (most / np.float32(127))
    kinds = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
    return vectors.astype(kinds[dtype]).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize("unseen", ["zero", 1])
def test_vectors_are_rounded_to_the_nearest(chain, dtype, unseen):
    model = model_of()
    checkpoint.load(chain[2], model)
    for table in range(2):
        ids, vectors = model.embedding.export_table(table)
        vectors = nearest(dtype, vectors)
        model.embedding.import_table(table, ids, vectors)
        new = np.setdiff1d(IDS[:, table], ids)
        given = vectors[ids.tolist().index(1)] if unseen == 1 else np.zeros(4, "f")
        model.embedding.import_table(table, new, np.repeat(given[None], len(new), 0))
    want = cupyrec.predict(model, (DENSE, IDS))[:, None]
    with Predictor(chain[0], model=model_of(), dtype=dtype, unseen=unseen) as predictor:
        assert predictor.update(chain[2])
        assert predictor.model.embedding.group.dtype == dtype
        assert (answers(predictor) == want).all()


def test_vectors_stay_as_they_were_saved(chain, tmp_path):
    half = save_one(tmp_path / "half", embedding_dtype="float16")
    with Predictor(chain[0], model=model_of()) as predictor:
        assert predictor.update(half)
        assert predictor.model.embedding.group.dtype == "float16"
        assert (answers(predictor) == expected(half, embedding_dtype="float16")).all()


def test_a_vector_that_float16_does_not_hold_is_told(tmp_path):
    model = model_of()
    model.embedding.import_table(1, np.array([7]), np.full((1, 4), 70000, "f"))
    checkpoint.save(tmp_path / "c", model)
    text = sentence(
        "Predictor: vectors of table 1 must be such as float16 holds, got 70000.0 for id 7."
    )
    with pytest.raises(ValueError, match=text):
        Predictor(tmp_path / "c", model=model_of(), dtype="float16")
    assert Predictor(tmp_path / "c", model=model_of(), dtype="bfloat16").name == "dlrm"
    with pytest.raises(ValueError, match="'dtype' must be one of"):
        Predictor(tmp_path / "c", model=model_of(), dtype="float8")


# Bags


class Pooled(nn.Module):
    def __init__(self):
        self.embedding = nn.MultiTableEmbedding(2, 4, pooling="mean", seed=1)
        self.mlp = nn.FusedMLP(9, [8], 1, skip_final_activation=True)

    def forward(self, dense, ids):
        flat = cupyrec.reshape(self.embedding(ids), (len(dense), 8))
        return self.mlp(cupyrec.concatenate([dense, flat], axis=1))


def test_bags_of_ids(tmp_path):
    cupyrec.manual_seed(1)
    model, offsets = Pooled(), np.array([0, 2, 2, 3, 5, 6, 7])
    bags = Bags(np.array([5, 6, 7, 5, 9, 1, 1]), offsets, 2)
    model(DENSE[:2], bags.part(0, 2))
    checkpoint.save(tmp_path / "c", model)
    with Predictor(tmp_path / "c", model=Pooled()) as predictor:
        assert (predictor.has_bags, predictor.num_tables) == (True, 2)
        got, _ = predictor.probabilities(DENSE[:3], bags)
        assert (got[:, 0] == cupyrec.predict(model, (DENSE[:3], bags))).all()
    with Predictor(tmp_path / "c", model=Pooled(), unseen=5) as predictor:
        same = Bags(np.array([5, 6, 7, 5, 9, 5, 5]), offsets, 2)
        with_default, _ = predictor.probabilities(DENSE[:3], bags)
        assert (with_default == predictor.probabilities(DENSE[:3], same)[0]).all()
        assert with_default[2] != got[2]


# Beside others


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_predictors_and_training_do_not_touch_each_other(chain, device, tmp_path):
    rows = slice(0, 150 if device == "cpu" else 20)
    told = [Predictor(p, model=model_of(), device=device) for p in chain[:2]]
    want = [p.probabilities(DENSE[rows], IDS[rows])[0] for p in told]

    def trained():
        model = model_of(dropout=0.3).to(device)
        optimizer = cupyrec.optim.Adam(model.parameters(), 0.05)
        data, size = trial.planted(100 if device == "cpu" else 20), 20 if device == "cpu" else 10
        for _ in range(5 if device == "cpu" else 1):
            cupyrec.fit(model, data, optimizer=optimizer, batch_size=size)
        return model.embedding.digest()

    alone, stop, wrong = trained(), [], []

    def ask(predictor, answer):
        while not stop:
            if not (predictor.probabilities(DENSE[rows], IDS[rows])[0] == answer).all():
                wrong.append(predictor)

    def load():
        while not stop:
            Predictor(chain[2], model=template).close()

    template = model_of()
    work = [threading.Thread(target=ask, args=pair) for pair in zip(told, want, strict=True)]
    work.append(threading.Thread(target=load))
    for thread in work:
        thread.start()
    try:
        assert trained() == alone
    finally:
        stop.append(True)
        for thread in work:
            thread.join()
    assert not wrong

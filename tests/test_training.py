import math
import re
import signal
import threading
import time

import numpy as np
import pytest
import trial
from oracle import sentence

import cupyrec
from cupyrec import checkpoint, nn, optim, training
from cupyrec.data import Arrays, Batch
from cupyrec.models import DLRM
from cupyrec.parallel.failure import Position
from cupyrec.progress import Progress
from cupyrec.run_folder import RunFolder


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return trial.write_logs(tmp_path_factory.mktemp("logs"))


def small(**options):
    cupyrec.manual_seed(3)
    return DLRM(1, 2, embedding_dim=4, bottom=[8], top=[8], **options)


def rows_of(model):
    (group,) = (group for _, group in model.named_groups())
    return [part.tobytes() for part in group.store.export_rows(0, len(group.store))[:3]]


def weights_of(model):
    return {name: array.tobytes() for name, array in model.state_dict().items()}


class Logistic(nn.Module):
    """Of NumPy's operators: z = w . x + b + a weight for each id."""

    def __init__(self, num_dense=1, num_tables=2):
        self.weights = nn.MultiTableEmbedding(num_tables, 1)
        self.w = nn.Parameter(np.zeros((num_dense, 1), np.float32))
        self.b = nn.Parameter(np.zeros(1, np.float32))

    def forward(self, dense, ids):
        return dense @ self.w + self.weights(ids).sum(axis=1) + self.b


# One step


def test_a_step_of_logistic_regression_by_hand():
    model = Logistic()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    dense, ids, labels = trial.planted(50)
    start = model.eval()(dense, ids).numpy().astype(np.float64)  # of initial vectors alone
    model.train()
    loss = cupyrec.train_step(model, Batch(dense, ids, labels[:, None]), optimizer)
    p = 1 / (1 + np.exp(-start))
    y = labels[:, None].astype(np.float64)
    assert loss.item() == pytest.approx(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean(), rel=1e-6)
    error = (p - y) / 50
    np.testing.assert_allclose(model.w.data, -0.5 * dense.T @ error, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(model.b.data, -0.5 * error.sum(axis=0), rtol=1e-4, atol=1e-7)
    after = start + dense @ model.w.data + model.b.data
    for i, row in enumerate(ids):
        for table, key in enumerate(row):
            after[i] -= 0.5 * error[ids[:, table] == key].sum()
    np.testing.assert_allclose(model.eval()(dense, ids).numpy(), after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer_class", [optim.SGD, optim.Adagrad, optim.Adam])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_steps_of_few_rows(rows, optimizer_class):
    model = small()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    dense, ids, labels = (part[:rows] for part in trial.planted(2))
    before = weights_of(model)
    loss = cupyrec.train_step(model, Batch(dense, ids, labels[:, None]), optimizer)
    assert (loss.item() > 0) == (rows > 0)
    assert (weights_of(model) == before) == (rows == 0)
    assert len(model.embedding.group.store) == len(np.unique(ids + np.array([0, 100])))
    assert optimizer.t == 1


def test_a_loss_that_is_not_finite_changes_nothing():
    model = small()
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    dense, ids, labels = trial.planted(8)
    batch = Batch(dense, ids, labels[:, None])
    cupyrec.train_step(model, batch, optimizer)
    model.top.biases[1].data[0] = np.inf
    before = weights_of(model), rows_of(model), optimizer.t
    text = (
        "train_step: the loss must be finite, got nan in step 2, where the largest parameter is "
        f"inf and the largest dense feature {np.abs(dense).max():g}. Try a smaller learning rate "
        "than 0.25, or clip_norm."
    )
    with pytest.raises(FloatingPointError, match=sentence(text)):
        cupyrec.train_step(model, batch, optimizer)
    assert (weights_of(model), rows_of(model), optimizer.t) == before
    model.top.biases[1].data[0] = 0
    dense[3, 0] = np.nan
    text = "train_step: 'batch.dense' must be finite, got nan in row 3, column 0."
    with pytest.raises(ValueError, match=sentence(text)):
        cupyrec.train_step(model, batch, optimizer)


# Fit


def test_own_models_learn():
    train, valid = trial.planted(4000), trial.planted(2000, seed=1)
    lines = []
    optimizer = optim.Adagrad((model := Logistic()).parameters(), lr=0.2)
    result = cupyrec.fit(
        model, train, valid, optimizer=optimizer, epochs=2, batch_size=50, callbacks=[lines.append]
    )
    assert (result["steps"], result["samples"]) == (160, 8000)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 8
    assert losses[-1] < 0.85 * losses[0]
    assert result["valid_auc"] > 0.8
    # Without a run's folder the best is not kept: the AUC is that of the model as it is.
    aucs = [line["valid_auc"] for line in lines if "valid_auc" in line]
    assert result["valid_auc"] == aucs[-1] == cupyrec.evaluate(model, valid)["auc"]
    assert result["best_step"] == 160
    assert cupyrec.evaluate(model, valid)["samples"] == 2000


def test_the_last_partial_batch_is_trained():
    seen = []

    class Noting(Arrays):
        def batches(self, batch_size, *, skip=0):
            for batch in super().batches(batch_size, skip=skip):
                seen.append(len(batch))
                yield batch

    result = cupyrec.fit(small(), Noting(*trial.planted(25)), epochs=2, batch_size=10)
    assert seen == [10, 10, 5] * 2
    assert (result["steps"], result["samples"]) == (6, 50)
    assert cupyrec.fit(small(), trial.planted(1))["samples"] == 1


def test_a_rank_tells_its_step_and_that_it_is_alive_while_it_reads():
    model, steps, stands = small(), [], []

    class Slow(Arrays):
        def batches(self, batch_size, *, skip=0):
            end = time.monotonic() + 60
            while not Position.of(model.ranks).doing and time.monotonic() < end:
                time.sleep(0.01)
            stands.append(Position.of(model.ranks))
            yield from super().batches(batch_size, skip=skip)

    def note(line):
        steps.append((line["step"], model.ranks.step))

    cupyrec.fit(model, Slow(*trial.planted(30)), batch_size=10, epochs=2, callbacks=[note])
    assert {told for told, _ in steps} == {3, 6}
    assert all(told == step for told, step in steps)
    assert [(stand.doing, stand.gets_on) for stand in stands] == [("reading", True)] * 2


def test_no_rows(caplog):
    empty = tuple(part[:0] for part in trial.planted(1))
    model = small()
    assert cupyrec.fit(model, empty, empty, epochs=2)["steps"] == 0
    assert caplog.messages == [f"epoch {i}: no rows to train on" for i in range(2)]
    assert cupyrec.predict(model, empty[:2]).shape == (0,)
    measured = cupyrec.evaluate(model, empty)
    assert measured["samples"] == 0
    assert math.isnan(measured["auc"])
    assert math.isnan(measured["logloss"])


def test_metrics_tell_of_losses_and_learning_rates(tmp_path):
    model, run = small(), RunFolder(tmp_path)
    optimizer = optim.SGD(model.parameters(), lr=0.5, schedule=lambda step: 1 / step)
    losses, step = [], training.train_step

    def noting(*arguments):
        loss = step(*arguments)
        losses.append(loss.item())
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_step", noting)
        cupyrec.fit(model, trial.planted(250), optimizer=optimizer, batch_size=10, run=run)
    *lines, tables = run.metrics()
    assert (tables["step"], tables["tables"].keys()) == (25, {"embedding"})
    assert sum(tables["tables"]["embedding"]["ids"]) == 80
    assert lines == [
        {"step": 20, "epoch": 0, "loss": sum(losses[:20]) / 20, "lr": 0.5 / 20},
        {"step": 25, "epoch": 0, "loss": sum(losses[20:]) / 5, "lr": 0.5 / 25},
    ]


def test_what_was_trained_before_changes_nothing():
    def fit():
        model = small(dropout=0.5)
        cupyrec.fit(model, trial.planted(20), batch_size=10)
        return weights_of(model)

    expected = fit()
    model = small(dropout=0.5)
    cupyrec.fit(Logistic(), trial.planted(50), batch_size=10)  # it took the step to 5
    cupyrec.fit(model, trial.planted(20), batch_size=10)
    assert weights_of(model) == expected == fit()


def test_a_model_that_was_in_eval_is_trained_and_frozen_parts_are_not():
    model = small().eval()
    cupyrec.fit(model, trial.planted(50))
    assert model.training
    assert len(model.embedding.group.store) > 0
    before = rows_of(model)
    model.embedding.eval()
    cupyrec.fit(model, trial.planted(50, seed=1), trial.planted(50))
    assert rows_of(model) == before
    assert (model.training, model.embedding.training, model.top.training) == (True, False, True)


def test_a_valid_set_of_one_class_keeps_the_last_step(tmp_path, caplog):
    dense, ids, labels = trial.planted(20)
    run = RunFolder(tmp_path)
    valid = dense, ids, np.ones_like(labels)
    result = cupyrec.fit(
        small(), (dense, ids, labels), valid, batch_size=10, eval_every=1, patience=1, run=run
    )
    assert (result["steps"], result["best_step"], result["valid_auc"]) == (2, 2, None)
    assert run.best.resolve() == run.last.resolve()
    assert [line["valid_auc"] for line in run.metrics() if "valid_auc" in line] == [None, None]
    assert "auc: labels are all of one class (20 of 20 positive)" in caplog.messages


def test_a_plateau_lowers_the_rate_from_the_weights_it_has_and_the_best_comes_back(
    tmp_path, monkeypatch
):
    """FuxiCTR's rule: a tenth at every AUC that isn't better by 1e-6, the end at two in a row."""
    aucs = iter([0.6, 0.7, 0.7 + 5e-7, 0.71, 0.70, 0.71 + 5e-7])
    weights, real = [], training.evaluate

    def evaluate(model, data, **options):
        weights.append((weights_of(model), rows_of(model)))
        return real(model, data, **options) | {"auc": next(aucs)}

    monkeypatch.setattr(training, "evaluate", evaluate)
    model, run, starts = small(), RunFolder(tmp_path), []
    optimizer = optim.Adam(
        model.parameters(), 1e-3, schedule=optim.Plateau(threshold=1e-6, min_factor=0.05)
    )
    update = optimizer.step

    def step(loss):
        starts.append((weights_of(model), rows_of(model)))
        update(loss)

    monkeypatch.setattr(optimizer, "step", step)
    data = trial.planted(20)
    model.embedding(data[1])  # all rows are there
    result = cupyrec.fit(
        model, data, data, optimizer=optimizer, epochs=9, batch_size=20, patience=2,
        min_delta=1e-6, run=run,
    )  # fmt: skip
    assert (result["steps"], result["best_step"], result["valid_auc"]) == (6, 4, 0.71)
    rates = [line["lr"] for line in run.metrics() if "lr" in line]
    np.testing.assert_allclose(rates, [1e-3, 1e-3, 1e-3, 1e-4, 1e-4, 5e-5], rtol=1e-12)
    assert starts[1:] == weights[:-1]
    assert (weights_of(model), rows_of(model)) == weights[3]


def test_it_ends_at_its_best(tmp_path, monkeypatch):
    aucs = iter([0.6, 0.5])
    weights, real = [], training.evaluate

    def evaluate(model, data, **options):
        weights.append((weights_of(model), rows_of(model)))
        return real(model, data, **options) | {"auc": next(aucs)}

    monkeypatch.setattr(training, "evaluate", evaluate)
    model, run = small(), RunFolder(tmp_path)
    optimizer = optim.Adam(model.parameters(), 0.1)
    data = trial.planted(20)
    cupyrec.fit(model, data, data, optimizer=optimizer, epochs=2, batch_size=10, run=run)
    assert weights[0] != weights[1]
    assert (weights_of(model), rows_of(model)) == weights[0]
    assert optimizer.t == 2
    checkpoint.load(run.last, model, optimizer)
    assert (weights_of(model), rows_of(model)) == weights[1]


def test_valid_given_to_a_finished_run(tmp_path):
    model, run = small(), RunFolder(tmp_path)
    optimizer = optim.SGD(model.parameters(), 0.1)
    progress = Progress()
    cupyrec.fit(model, trial.planted(20), optimizer=optimizer, run=run, progress=progress)
    result = cupyrec.fit(
        model, trial.planted(20), trial.planted(20), optimizer=optimizer, run=run, progress=progress
    )
    assert (result["steps"], result["samples"], result["valid_auc"]) == (1, 0, None)


def prefetchers():
    return [t for t in threading.enumerate() if t.name.startswith("cupyrec-") and t.is_alive()]


def test_no_thread_is_left_over():
    def broken(line):
        raise RuntimeError("in a callback")

    def interrupted():
        with trial.at_step(3, trial.interrupt):
            cupyrec.fit(small(), trial.planted(500), batch_size=5)

    before = len(prefetchers())
    with pytest.raises(RuntimeError, match="in a callback"):
        cupyrec.fit(small(), trial.planted(500), batch_size=5, callbacks=[broken])
    with pytest.raises(KeyboardInterrupt, match="^SIGINT: stopped after step 3$"):
        interrupted()
    assert len(prefetchers()) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_stops_as_sigint_does(tmp_path, caplog):
    run = RunFolder(tmp_path)
    with trial.at_step(2, lambda: trial.interrupt(signal.SIGTERM)):
        with pytest.raises(KeyboardInterrupt, match="^SIGTERM: stopped after step 2, saved in "):
            cupyrec.fit(small(), trial.planted(50), batch_size=5, run=run)
    assert checkpoint.verify(run.last)["progress"]["step"] == 2


def test_fit_in_a_thread():
    results = []
    thread = threading.Thread(
        target=lambda: results.append(cupyrec.fit(small(), trial.planted(20), batch_size=5))
    )
    thread.start()
    thread.join()
    assert results[0]["steps"] == 4


def test_a_spoilt_model_is_not_saved():
    data = trial.planted(10)
    text = "fit: step 1 must leave a model that gives finite logits, but logits: must be finite"
    optimizer = optim.SGD((model := small()).parameters(), lr=1e30)
    with pytest.raises(FloatingPointError, match=text):
        cupyrec.fit(model, data, optimizer=optimizer)


def test_fit_says_what_it_cannot_do():
    model, arrays = small(), trial.planted(20)
    with pytest.raises(TypeError, match=r"^fit: 'optimizer' must be one of cupyrec.optim, got str"):
        cupyrec.fit(model, arrays, optimizer="adam")
    with pytest.raises(ValueError, match=r"^fit: 'optimizer' must update parameters of 'model'"):
        cupyrec.fit(model, arrays, optimizer=optim.SGD(small().parameters(), 0.1))
    with pytest.raises(ValueError, match=r"^train_step: 'batch' must have labels, got none.$"):
        cupyrec.fit(model, arrays[:2])
    batch = Batch(arrays[0], arrays[1], arrays[2][:, None])
    others = {"train.tsv": "a path, 'train.tsv'", None: "NoneType", batch: "a Batch (of whose"}
    for data, told in others.items():
        text = (
            "data: must be a dataset such as cupyrec.data.TSV(path, schema) or, of a data frame, "
            "cupyrec.data.Frame(frame, schema), or arrays (dense, ids, labels), got "
        )
        with pytest.raises(TypeError, match=re.escape(text + told)):
            cupyrec.fit(model, data)
    with pytest.raises(TypeError, match=r"^fit: 'epochs' must be an integer, got 1.5.$"):
        cupyrec.fit(model, arrays, epochs=1.5)

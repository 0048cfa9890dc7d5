"""Training, evaluation and prediction of several tasks, and of samples with weights."""

import math

import numpy as np
import oracle
import pytest
import trial
from test_training import rows_of, weights_of

import cupyrec
from cupyrec import metrics, nn, optim
from cupyrec.data import Arrays, Batch
from cupyrec.ops.array_functions import reshape
from cupyrec.ragged import Bags
from cupyrec.run_folder import RunFolder

f32 = np.float32
NAMES = ["click", "sale"]


class Linear(nn.Module):
    """As many tasks as asked for, of two ids."""

    def __init__(self, tasks=2, pooling=None):
        self.embedding = nn.MultiTableEmbedding(2, 4, pooling=pooling)
        self.head = nn.FusedMLP(8, [], tasks, skip_final_activation=True)

    def forward(self, dense, ids):
        return self.head(reshape(self.embedding(ids), (len(ids), 8)))


def model_of(**options):
    cupyrec.manual_seed(3)
    return Linear(**options)


def log(rows, seed=0):
    """A click depends on both ids, a sale on the opposite."""
    dense, ids, labels = trial.planted(rows, seed)
    return dense, ids, np.stack([labels, 1 - labels], axis=1)


def trained(data, **options):
    model = model_of()
    optimizer = optim.SGD(model.parameters(), 0.5)
    cupyrec.fit(model, data, optimizer=optimizer, batch_size=16, **options)
    return weights_of(model), rows_of(model)


def test_a_step_of_two_tasks_with_weights():
    model, (dense, ids, labels) = model_of(), log(9)
    weights = np.abs(oracle.normals((9, 2)))
    logits = model(dense, ids).numpy()
    batch = Batch(dense, ids, labels, total=18, weights=weights)
    loss = cupyrec.train_step(model, batch, optim.SGD(model.parameters(), 0.1)).item()
    expected, _ = oracle.bce_with_logits(logits, labels, 18, weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_weights_of_tasks_and_classes_are_those_of_samples():
    dense, ids, labels = log(40)
    own = np.abs(oracle.normals(40))
    weights = own[:, None] * np.array([2, 0.5], f32) * np.where(labels > 0, f32(3), f32(1))
    got = trained(
        Arrays(dense, ids, labels, own), epochs=2, task_weights=[2, 0.5], positive_weight=3
    )
    assert got == trained(Arrays(dense, ids, labels, weights), epochs=2)
    assert got != trained((dense, ids, labels), epochs=2)
    assert trained((dense, ids, labels)) == trained((dense, ids, labels), task_weights=[1, 1])


def test_a_task_of_weight_0_is_not_learnt():
    model, data = model_of(), log(40)
    before = model.head.weights[0].data.copy()
    optimizer = optim.SGD(model.parameters(), 0.5)
    cupyrec.fit(model, data, optimizer=optimizer, batch_size=16, task_weights=[1, 0])
    np.testing.assert_array_equal(model.head.weights[0].data[1], before[1])
    assert (model.head.weights[0].data[0] != before[0]).any()


def test_two_tasks_learn_and_tell_of_each(tmp_path):
    model, run = model_of(), RunFolder(tmp_path)
    data, valid = (Arrays(*log(n, seed), task_names=NAMES) for n, seed in ((4000, 0), (500, 1)))
    result = cupyrec.fit(
        model, data, valid, optimizer=optim.Adam(model.parameters(), 0.02), batch_size=64,
        run=run, group=0,
    )  # fmt: skip
    assert result["valid_auc"] > 0.75
    (line,) = [line for line in run.metrics() if "valid_auc" in line]
    measured = cupyrec.evaluate(model, valid, group=0, bins=10)
    told = {f"valid_{key}": value for key, value in measured.items() if key != "samples"}
    assert line == {"step": 63} | told
    _, ids, labels = log(500, 1)
    probabilities = cupyrec.predict(model, log(500, 1)[:2])
    assert probabilities.shape == (500, 2)
    scores = np.log(probabilities / (1 - probabilities))
    measures = {
        "auc": metrics.auc, "logloss": metrics.logloss, "calibration": metrics.calibration,
        "normalized_entropy": metrics.normalized_entropy,
        "gauc": lambda y, z: metrics.gauc(y, z, ids[:, 0]),
    }  # fmt: skip
    assert measured.keys() == {"samples", *measures} | {
        f"{measure}_{name}" for measure in (*measures, "reliability") for name in NAMES
    }
    for task, name in enumerate(NAMES):
        expected = metrics.reliability(labels[:, task], scores[:, task])
        np.testing.assert_allclose(measured[f"reliability_{name}"], expected, 1e-4)
    for measure, function in measures.items():
        each = [function(labels[:, task], scores[:, task]) for task in (0, 1)]
        np.testing.assert_allclose([measured[f"{measure}_{name}"] for name in NAMES], each, 1e-4)
        np.testing.assert_allclose(measured[measure], np.mean(each), 1e-4)


def test_tasks_without_names_have_numbers():
    assert {"auc_0", "auc_1", "logloss_1"} <= cupyrec.evaluate(model_of(), log(20)).keys()


def test_one_task_has_no_names_and_a_column_less():
    dense, ids, labels = log(20)
    model = model_of(tasks=1)
    measured = cupyrec.evaluate(model, Arrays(dense, ids, labels[:, 0], task_names=["click"]))
    assert measured.keys() == {"auc", "logloss", "normalized_entropy", "calibration", "samples"}
    assert cupyrec.predict(model, (dense, ids)).shape == (20,)


def test_a_task_of_one_class_is_no_part_of_the_mean(caplog):
    dense, ids, labels = log(50)
    labels[:, 1] = 0
    measured = cupyrec.evaluate(model_of(), (dense, ids, labels))
    assert measured["auc"] == measured["auc_0"]
    assert measured["calibration"] == measured["calibration_0"]
    assert math.isnan(measured["auc_1"]) and math.isnan(measured["normalized_entropy_1"])
    assert measured["logloss"] == (measured["logloss_0"] + measured["logloss_1"]) / 2
    assert "auc: labels are all of one class (0 of 50 positive)" in caplog.messages
    labels[:, 0] = 1
    assert math.isnan(cupyrec.evaluate(model_of(), (dense, ids, labels))["auc"])


def test_bags_are_trained_on_and_grouped_by_their_first_id():
    dense, ids, labels = log(60)
    bags = Bags(ids.ravel(), np.arange(121), num_fields=2)
    model, other = model_of(pooling="sum"), model_of()
    for one, data in ((model, (dense, bags, labels)), (other, (dense, ids, labels))):
        optimizer = optim.SGD(one.parameters(), 0.5)
        cupyrec.fit(one, data, optimizer=optimizer, batch_size=16)
    ours = cupyrec.evaluate(model, (dense, bags, labels), group=1, batch_size=7)
    theirs = cupyrec.evaluate(other, (dense, ids, labels), group=1)
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"task_weights": [1, -2]}, ValueError,
         "fit: 'task_weights' must be finite and at least 0, got -2."),
        ({"positive_weight": math.nan}, ValueError,
         "fit: 'positive_weight' must be finite and at least 0, got nan."),
        ({"positive_weight": "3"}, TypeError, "fit: 'positive_weight' must be a number, got '3'."),
        ({"task_weights": [1]}, ValueError,
         "Batch.weighted: 'tasks' must have a weight for each of 2 labels, got 1."),
        ({"patience": -1}, ValueError, "fit: 'patience' must be at least 0, got -1."),
        ({"save_every": 2.5}, TypeError, "fit: 'save_every' must be an integer, got 2.5."),
        ({"group": "user"}, TypeError, "fit: 'group' must be an integer, got 'user'."),
        ({"run": "runs/mine"}, TypeError, "fit: 'run' must be a RunFolder, got str."),
    ],
)  # fmt: skip
def test_refuses(options, error, text):
    model = model_of()
    with pytest.raises(error, match=oracle.sentence(text)):
        cupyrec.fit(model, log(20), **options)
    assert len(model.embedding.group.store) == 0


def test_refuses_another_number_of_tasks_and_a_field_that_is_not_there():
    data, model = log(20), model_of(tasks=3)
    text = "bce_with_logits: 'labels' must have T = 3 like 'logits', got shape (20, 2)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        cupyrec.fit(model, data)
    text = "evaluate: labels must be of 3 tasks, as logits are, got 2."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        cupyrec.evaluate(model, data)
    text = "evaluate: 'group' must be one of 2 fields, got 2."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        cupyrec.evaluate(model_of(), data, group=2)

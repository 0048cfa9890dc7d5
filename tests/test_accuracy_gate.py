"""The gate of published accuracy: the script, on small data in the layout of the real ones."""

import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest

from cupyrec import nn, optim

SCRIPTS = Path(__file__).parents[1] / "scripts"
SETS = json.loads((SCRIPTS / "accuracy_published.json").read_text("utf-8"))
MODELS = ["lr", "fm", "deepfm", "dcn", "dcn_v2", "xdeepfm", "pnn", "dlrm"]


@pytest.fixture
def script():
    return runpy.run_path(str(SCRIPTS / "accuracy_gate.py"))


@pytest.fixture
def run(script, monkeypatch, capsys):
    """Run the script in this process; return its exit status, last line and what it said."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["accuracy_gate.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            script["main"]()
        said = capsys.readouterr()
        return ended.value.code, json.loads(said.out.splitlines()[-1]), said.err

    return call


def write(folder, fields, rows, own=str):
    """Three files, whose clicks depend on their ids; ids from 30 on are of test alone."""
    generator = np.random.default_rng(1)
    weights = generator.normal(0, 2, (len(fields), 40))
    folder.mkdir()
    for split, count in zip(("train", "valid", "test"), rows, strict=True):
        ids = generator.integers(0, 40 if split == "test" else 30, (count, len(fields)))
        logits = weights[np.arange(len(fields)), ids].sum(axis=1)
        clicks = generator.random(count) < 1 / (1 + np.exp(-logits))
        lines = [",".join(["label", *fields])]
        lines += [
            ",".join([f"{float(y)}", *map(own, row)]) for y, row in zip(clicks, ids, strict=True)
        ]
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("which", ["movielenslatest_x1", "frappe_x1"])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_published(script, which, name):
    model = script["build"](which, name, seed=1)
    count = script["parameters"](model, SETS[which]["table_rows"])
    assert count == SETS[which]["models"][name]["parameters"]


def test_published_figures_are_whole():
    assert sum(SETS["movielenslatest_x1"]["rows"]) == 2_006_859
    assert sum(SETS["frappe_x1"]["rows"]) == 288_609
    for which in ("movielenslatest_x1", "frappe_x1"):
        assert list(SETS[which]["models"]) == MODELS
        for told in SETS[which]["models"].values():
            best = max(auc for auc, _ in told["valid"])
            assert best - 0.01 < told["least"] < told["test"][0] < best + 0.001
            aucs, patience = [auc for auc, _ in told["valid"]], told["patience"]
            ended = max(aucs[-patience:]) <= max(aucs[:-patience])  # by itself
            assert ended != (len(aucs) == 100)


@pytest.mark.parametrize("own", [str, "u{}".format])
def test_files_are_read_and_ids_numbered(script, tmp_path, own):
    fields = SETS["movielenslatest_x1"]["fields"]
    which, splits = script["read"](write(tmp_path / "x", fields, (50, 20, 10), own))
    assert which == "movielenslatest_x1"
    assert [len(labels) for _, labels in splits.values()] == [50, 20, 10]
    texts = {}
    for split, (ids, labels) in splits.items():
        lines = (tmp_path / "x" / f"{split}.csv").read_text().splitlines()[1:]
        rows = [line.split(",") for line in lines]
        np.testing.assert_array_equal(labels, [float(row[0]) for row in rows])
        for row, numbers in zip(rows, ids.tolist(), strict=True):
            for field, (text, number) in enumerate(zip(row[1:], numbers, strict=True)):
                assert texts.setdefault((field, text), number) == number
    for field in range(3):
        numbers = [number for (at, _), number in texts.items() if at == field]
        assert sorted(numbers) == list(range(len(numbers)))  # one each


def test_first_values_are_fuxictrs(script):
    model = script["build"]("movielenslatest_x1", "dcn_v2", seed=3)
    for weight in [*model.deep.weights, *(cross.weight for cross in model.crosses)]:
        expected = math.sqrt(2 / sum(weight.shape))
        assert np.std(weight.data) == pytest.approx(expected, rel=0.07)
        assert np.abs(weight.data).max() > 2.5 * expected  # not uniform
    assert not any(bias.data.any() for bias in model.deep.biases)
    np.testing.assert_array_equal(model.deep.norms[0].weight.data, 1)
    ids = np.stack([np.arange(5000), np.arange(5000) % 7, np.arange(5000) % 900], axis=1)
    script["insert"](model, ids)
    group = model.embedding.group
    assert len(group.store) == 5000 + 7 + 900
    rows = group.store.export_rows(0, len(group.store)).vectors
    assert rows.std() == pytest.approx(1e-4, rel=0.02)
    assert group.dense_updates
    again, other = (script["build"]("movielenslatest_x1", "dcn_v2", seed) for seed in (3, 4))
    for name, array in model.state_dict().items():
        if name.startswith("deep.weights"):
            assert (array == again.state_dict()[name]).all() != (
                array == other.state_dict()[name]
            ).all()


def test_first_values_of_a_convolution_are_pytorchs(script):
    layer = script["build"]("frappe_x1", "xdeepfm", seed=3).interaction
    assert layer.linear and not layer.split_half
    for array in (layer.weights[0].data, layer.biases[0].data):  # fan-in of 10 * 10
        assert 0.09 < np.abs(array).max() <= 0.1
        assert np.std(array) == pytest.approx(0.1 / math.sqrt(3), rel=0.15)


def test_the_optimizer_is_fuxictrs(script):
    for name, of_bias in (("fm", 0.5), ("deepfm", 0.0)):
        model = script["build"]("frappe_x1", name, seed=1)
        optimizer = script["optimizer_of"](model, name, 0.5)
        dense, tables = optimizer.parameter_groups
        assert (dense.l2, tables.l2, tables.tables) == (of_bias, 0.5, [model.embedding.group])
        assert len(dense.parameters) == len(list(model.named_parameters()))
        assert (type(optimizer), optimizer.lr, optimizer.clip_norm) == (optim.Adam, 1e-3, 10)
        rates = []
        for auc in (0.7, 0.7 + 9e-7, 0.6, 0.6, 0.6):
            optimizer.schedule.observe(auc)
            rates.append(optimizer.current_lr())
        np.testing.assert_allclose(rates, [1e-3, 1e-4, 1e-5, 1e-6, 1e-6], rtol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_tells_what_is_off(run, tmp_path, name):
    folder = write(tmp_path / "x", SETS["frappe_x1"]["fields"], (600, 200, 200))
    code, result, said = run("--data", folder, "--model", name, "--epochs", 2)
    assert (code, result["passed"]) == (1, False)
    assert (result["set"], result["model"], result["epochs"]) == ("frappe_x1", name, 2)
    assert result["checks"] == dict.fromkeys(["parameters", "epoch_1", "epoch_2"], False)
    assert result["published_parameters"] == SETS["frappe_x1"]["models"][name]["parameters"]
    theirs = SETS["frappe_x1"]["models"][name]["valid"]
    for epoch, ((auc, logloss), published) in enumerate(
        zip(result["valid"], theirs, strict=False), 1
    ):
        assert f"epoch {epoch}: valid {auc:.6f} / {logloss:.6f}, published " in said
        assert f"published {published[0]:.6f} / {published[1]:.6f}" in said
    assert "parameters: OFF" in said


def test_a_run_that_is_as_published_passes(script, run, tmp_path):
    """By figures made up for these rows, of which it must end by itself: ids of test are new."""
    folder = write(tmp_path / "x", SETS["movielenslatest_x1"]["fields"], (3000, 400, 400))
    told = script["PUBLISHED"]["movielenslatest_x1"]["models"]["deepfm"]
    rows = 3 * 30 + 3  # and one more a field
    told["options"] |= dict(deep=[16], dropout=0.0)
    told |= dict(parameters=rows * 11 + 30 * 16 + 16 + 16 + 1 + 2 * 16, near=[0.5, 0.5], least=0.6)
    code, result, said = run("--data", folder)
    assert result["epochs"] < 100
    assert (code, result["passed"]) == (0, True), said
    assert result["checks"] == dict.fromkeys(["parameters", "epoch_1", "epoch_2", "test"], True)
    best = max(auc for auc, _ in result["valid"])
    assert best not in [auc for auc, _ in result["valid"][-2:]]
    told["least"] = 0.999
    code, again, said = run("--data", folder)
    assert again["valid"] == result["valid"]  # the same bits
    assert (code, again["checks"]["test"]) == (1, False)
    assert "test: OFF" in said


def test_what_is_refused(script, tmp_path):
    folder = write(tmp_path / "x", ["user", "item"], (5, 5, 5))
    fields = "user_id, item_id, tag_id or label, user, item, daytime"
    with pytest.raises(SystemExit, match=f"columns must be label, {fields}.*got label, user, item"):
        script["read"](folder)
    (folder / "valid.csv").unlink()
    text = f"accuracy_gate: '{folder / 'valid.csv'}' must be a file."
    with pytest.raises(SystemExit, match=oracle.sentence(text)):
        script["read"](folder)


def test_rows_of_ids_that_no_batch_has_had_move_by_l2_alone(script):
    """Adam on a gradient of l2 times the row, whatever its size, moves it by the rate."""
    model = script["build"]("movielenslatest_x1", "lr", seed=1)
    script["insert"](model, np.array([[1, 1, 1], [2, 2, 2]]))
    optimizer = script["optimizer_of"](model, "lr", 0.01)
    before = model.embedding.export_table(0)
    assert isinstance(model, nn.Module)
    logits = model(np.empty((2, 0), np.float32), np.array([[1, 1, 1]] * 2))
    logits.sum().backward()
    optimizer.step()
    ids, after = model.embedding.export_table(0)
    moved = after[ids == 2] - before[1][before[0] == 2]
    np.testing.assert_allclose(np.abs(moved), 1e-3, rtol=0.05)
    assert np.sign(moved) == -np.sign(before[1][before[0] == 2])

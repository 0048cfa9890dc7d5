"""What presets reach on real data: the script, on a small file in the layout of the real one."""

import gzip
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import census_income

SCRIPT = Path(census_income.__file__).with_name("accuracy_table.py")

PRESET = """
[model]
embedding_dim = 4
initial_range = 0.01
tower = []
dropout = 0.0
[mmoe]
experts = 2
expert = {expert}
[training]
epochs = 6
batch_size = 64
lr = 0.02
weight_decay = 0.0
task_weights = [1, 1]
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the script in this process; return its exit status and the line that ends stdout."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["accuracy_table.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        return ended.value.code, json.loads(lines[-1]) if lines else None

    return call


@pytest.fixture
def folder(tmp_path):
    """Income is of age and weeks worked, marriage of age alone; the weight tells both."""
    generator = np.random.default_rng(0)
    table = np.full((1500, 42), "Not in universe", dtype="U20")
    for column in census_income.NUMBERS:
        table[:, column] = generator.integers(0, 50, 1500)
    age, weeks = table[:, 0].astype(int), table[:, 39].astype(int)
    table[:, 41] = np.where(age + weeks > 60, "50000+.", "- 50000.")
    table[:, 7] = np.where(age < 20, "Never married", "Divorced")
    table[:, 24] = np.char.add(table[:, 41], table[:, 7])
    (tmp_path / "census_income").mkdir()
    text = "".join(", ".join(row) + "\n" for row in table)
    (tmp_path / "census_income" / "census-income.test.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_what_is_read_and_how_it_is_split(folder):
    rows = census_income.read(folder / "census_income")
    assert [column.shape for column in rows] == [(1500, 7), (1500, 39), (1500, 2)]
    age = np.expm1(rows.dense[:, 0]).round()
    np.testing.assert_array_equal(rows.labels[:, 1], age < 20)
    weeks = np.expm1(rows.dense[:, 6]).round()
    np.testing.assert_array_equal(rows.labels[:, 0], age + weeks > 60)
    sizes = {"test": (1200, 300), "valid": (900, 300)}
    seen = {}
    for measured, expected in sizes.items():
        own, others = census_income.split(rows, measured)
        assert (len(own.ids), len(others.ids)) == expected
        np.testing.assert_allclose(own.dense.mean(axis=0), 0, atol=1e-12)
        seen[measured] = [part.ids.tobytes() for part in (own, others)]
    whole = census_income.split(rows, "test")[0]
    assert whole.ids.tobytes() == seen["valid"][1] + seen["valid"][0]  # none of test is in valid


@pytest.mark.parametrize("expert", [[16], [16, 8], [16, 16, 8]])
def test_both_models_learn_and_are_of_one_size(expert, folder, tmp_path, run):
    preset = tmp_path / "preset.toml"
    preset.write_text(PRESET.format(expert=expert))
    words = ["--data", "census_income", "--folder", folder, "--seeds", 2]
    status, result = run(*words, "--measure", "valid", "--preset", preset)
    told = result["census_income"]
    assert (status, result["measured"], told["seeds"]) == (0, "valid", [2])
    for name in ("mmoe", "shared_bottom"):
        assert 0.85 < told[f"{name}_income_auc"] == np.mean(told[f"{name}_income_aucs"])
        assert told[f"{name}_never_married_auc"] > 0.9
    assert told["income_difference"] == told["mmoe_income_auc"] - told["shared_bottom_income_auc"]
    inputs = 7 + 39 * 4
    more = told["shared_bottom_parameters"] - told["mmoe_parameters"]
    assert 0 <= more < inputs + 1 + [*expert, 0, 0][1] + 2 * expert[0]


@pytest.mark.parametrize(
    ("mmoe", "shared", "missed"), [(0.96, 0.95, 0), (0.96, 0.96, 1), (0.9495, 0.94, 1)]
)
def test_bars_hold_what_test_says(mmoe, shared, missed, folder, run, monkeypatch):
    aucs, presets = {"mmoe": mmoe, "shared_bottom": shared}, []

    def train(name, settings, rows, seed):
        presets.append(settings["training"].keys())
        return name

    def evaluate(name, data):
        return {"auc_income": aucs[name], "auc_never_married": 0.9}

    monkeypatch.setattr(census_income, "train", train)
    monkeypatch.setattr(census_income.cupyrec, "evaluate", evaluate)
    monkeypatch.setattr(census_income, "size", lambda model: 3)
    status, result = run("--data", "census_income", "--folder", folder, "--seeds", 1)
    assert (status, result["census_income"]["passed"]) == (missed, not missed)
    assert len(presets) == 2 and {"epochs", "lr"} <= presets[0]  # of the committed file


def test_refuses(folder, run):
    assert run("--folder", folder, "--preset", folder / "x.toml") == (2, None)
    status, _ = run("--data", "census_income", "--folder", folder / "none")
    assert status.startswith("census_income: '") and "must be a file." in status

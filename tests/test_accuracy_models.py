"""The table of AUC by presets: on tiny data sets in the layout of real ones."""

import sys
import tomllib
from pathlib import Path

import click_logs
import pytest

from cupyrec.from_settings import MODELS

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

import accuracy_models  # noqa: E402

DEEP = {"dlrm", "dcn", "dcn_v2", "deepfm", "xdeepfm", "pnn"}


@pytest.fixture
def folder(tmp_path):
    click_logs.write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["criteo", "movielens_1m"])
def test_a_model_of_each_set(folder, name, capsys):
    compare = getattr(accuracy_models, f"compare_{name}")
    result = compare(folder / name, SCRIPTS / "configs" / name / "lr.toml", "test", [1, 2])
    assert len(set(result["each"]["lr"])) == 2  # of two seeds
    assert result["auc"]["lr"] == pytest.approx(sum(result["each"]["lr"]) / 2)
    assert f"{name:12} lr         {result['auc']['lr']:.5f}" in capsys.readouterr().err
    assert result["auc"]["lr"] > {"criteo": 0.55, "movielens_1m": 0.4}[name]


def test_test_is_not_read_for_tuning(folder):
    (folder / "criteo" / "test.tsv.gz").unlink()
    given = folder / "criteo", SCRIPTS / "configs" / "criteo" / "fm.toml"
    result = accuracy_models.compare_criteo(*given, "valid", [1])
    assert 0.5 < result["auc"]["fm"] < 1
    with pytest.raises(SystemExit, match=r"test.tsv.gz: must be a file, found nothing there"):
        accuracy_models.compare_criteo(*given, "test", [1])
    with pytest.raises(SystemExit, match=r"' must be a preset or a folder of some\.$"):
        accuracy_models.compare_criteo(folder / "criteo", folder / "none", "valid", [1])


@pytest.mark.parametrize(
    ("means", "passed"),
    [
        ({"deepfm": 0.81, "dlrm": 0.803, "fm": 0.8029}, True),
        ({"deepfm": 0.81, "dlrm": 0.803, "fm": 0.804}, False),
        ({"deepfm": 0.81, "dlrm": 0.8019}, False),
        ({"deepfm": 0.8069, "dlrm": 0.803}, False),
    ],
)
def test_bars(means, passed):
    assert accuracy_models._passed("movielens_1m", means) == passed


def test_every_preset_is_of_its_model():
    for name in ("criteo", "movielens_1m"):
        paths = (SCRIPTS / "configs" / name).glob("*.toml")
        known = {path.stem: tomllib.loads(path.read_text())["model"]["name"] for path in paths}
        assert all(stem == model for stem, model in known.items())
        assert DEEP | {"fm", "lr"} <= known.keys() <= MODELS.keys()

import json

import trial

import cupyrec
from cupyrec.data import TSV


def test_data_commands(tmp_path, capsys):
    out = tmp_path / "clicks.tsv.gz"
    assert trial.command("data", "synthetic", "--rows", 200, "--out", out, "--seed", 3) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == 200
    assert 0.5 < printed["best_auc"] < 1
    rows = sum(len(b) for b in TSV(out, cupyrec.data.criteo_schema()).batches(64))
    assert rows == 200
    wheel = tmp_path / "none.whl"
    assert trial.command("data", "movielens-100k", "--wheel", wheel, "--out", tmp_path) == 1
    assert str(wheel) in capsys.readouterr().err

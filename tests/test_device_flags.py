import json

import numpy as np
import pytest
import trial

from cupyrec import arrays


@pytest.fixture
def no_gpu(monkeypatch):
    def module(device, module=arrays.module):
        if device == "cuda":
            raise RuntimeError("device 'cuda': needs an NVIDIA GPU.")
        return module(device)

    monkeypatch.setattr(arrays, "module", module)


def test_without_a_gpu_cuda_is_refused_if_asked_for(no_gpu, tmp_path, capsys):
    assert trial.train(trial.write_logs(tmp_path), tmp_path / "run", "--device", "cuda") == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "cupyrec: --device 'cuda': needs an NVIDIA GPU. `cupyrec doctor` tells what is missing.\n"
    )
    assert captured.out == ""
    assert not (tmp_path / "run").exists()
    assert trial.command("serve", tmp_path / "run", "--device", "cuda") == 2
    assert capsys.readouterr() == captured


def test_the_gpu_is_the_default_where_there_is_one(tmp_path, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(
        arrays, "module", lambda device, module=arrays.module: asked.append(device) or np
    )
    assert trial.train(trial.write_logs(tmp_path, rows=40), tmp_path / "run") == 0
    assert asked[0] == "cuda"
    assert any(record.getMessage().startswith("device cuda, ") for record in caplog.records)


def test_a_run_on_the_simulator_goes_on_and_is_measured_on_the_cpu(sim, tmp_path, capsys, caplog):
    logs = trial.write_logs(tmp_path, rows=64)
    results = {}
    for device in ("cpu", "sim"):
        assert trial.train(logs, tmp_path / device, "--device", device) == 0
        results[device] = json.loads(capsys.readouterr().out)
        assert any(r.getMessage().startswith(f"device {device}, ") for r in caplog.records)
        assert ("it checks kernels, and is not for training" in caplog.text) == (device == "sim")
    assert results["sim"]["steps"] == 2
    for key in ("valid_auc", "test_auc", "test_logloss"):
        np.testing.assert_allclose(results["sim"][key], results["cpu"][key], atol=1e-4)
    words = ("--epochs", 2, "--device", "cpu", *logs)
    assert trial.command("train", *words, "--resume", tmp_path / "sim") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    words = ("--data", logs[5], "--device", "sim")
    assert trial.command("evaluate", tmp_path / "cpu", *words) == 0
    np.testing.assert_allclose(
        json.loads(capsys.readouterr().out)["test_auc"], results["cpu"]["test_auc"], atol=1e-4
    )


@pytest.mark.parametrize("amp", ["float16", "bfloat16"])
def test_a_run_in_mixed_precision(tmp_path, capsys, amp):
    logs, results = trial.write_logs(tmp_path), {}
    for name in ("float32", amp):
        assert trial.train(logs, tmp_path / name, "--amp", name, "--device", "cpu") == 0
        results[name] = json.loads(capsys.readouterr().out)
    assert results[amp]["test_logloss"] != results["float32"]["test_logloss"]
    for key in ("valid_auc", "test_auc", "test_logloss"):
        np.testing.assert_allclose(results[amp][key], results["float32"][key], atol=0.01)
    lines = [json.loads(line) for line in (tmp_path / amp / "metrics.jsonl").open()]
    scales = [line["loss_scale"] for line in lines if "loss_scale" in line]
    assert (scales != []) == (amp == "float16")
    assert f'amp = "{amp}"' in (tmp_path / amp / "config.toml").read_text()
    assert trial.command("evaluate", tmp_path / amp, "--data", logs[5], "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)["test_auc"] == results[amp]["test_auc"]


def test_an_unknown_precision_is_wrong_usage(tmp_path, capsys):
    logs = trial.write_logs(tmp_path, rows=40)
    assert trial.train(logs, tmp_path / "run", "--amp", "half") == 2
    assert "--amp must be one of " in capsys.readouterr().err

"""scripts/bench_train.py beside DeepCTR-Torch, each model on a tiny case."""

import argparse
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY = dict(
    optimizer="adam", tables=3, ids=50, width=4, num_dense=0, top=[5, 3], batch=64, zipf=1.2,
    lr=0.1, batches=2,
)  # fmt: skip
CASES = {
    "deepfm": TINY | dict(model="deepfm"),
    "dcn": TINY | dict(model="dcn", crosses=2),
    "xdeepfm": TINY | dict(model="xdeepfm", maps=[4, 2]),
}
ONCE = argparse.Namespace(rounds=1, steps=1, threads=1)


@pytest.fixture(scope="module")
def bench():
    return runpy.run_path(str(SCRIPTS / "bench_train.py"))


@pytest.fixture(scope="module")
def data(bench):
    rng, shape = np.random.default_rng(1), (TINY["batches"], TINY["batch"])
    return {
        "dense": np.zeros((*shape, 0), np.float32),
        "indices": bench["zipf_indices"](rng, TINY),
        "labels": (rng.random((*shape, 1)) < 0.25).astype(np.float32),
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_our_side_moves_every_row_as_deepctr_does(bench, data, case):
    for lazy in (False, True):
        ours = bench["Ours"](case | {"dense_updates": not lazy}, data)
        store = ours.model.embedding.group.store
        assert len(store) == 3 * 50
        ours.ids = ours.ids[:, :8]  # of which no table has all rows
        ours.dense, ours.labels = ours.dense[:, :8], ours.labels[:, :8]
        ours()
        before = store.export_rows(0, len(store)).vectors
        ours()
        moved = (store.export_rows(0, len(store)).vectors != before).any(axis=1)
        assert moved.sum() <= 24 if lazy else moved.sum() > 24


def test_deepctr_is_timed_beside_both_of_ours(bench, data, monkeypatch, capsys):
    class Peer:
        def __init__(self, case, data, threads):
            self.steps = []

        def seconds(self, what, steps):
            return {"step": 10.0, "fit": 40.0}[what] * steps

        def close(self):
            pass

    monkeypatch.setitem(bench["beside_deepctr"].__globals__, "Peer", Peer)
    result = bench["beside_deepctr"](CASES["deepfm"], data, ONCE)
    assert result["samples_per_second_deepctr"] == 6.4
    for name, ratio in (("", "ratio_vs_deepctr"), ("_lazy", "ratio_lazy")):
        assert result[f"samples_per_second{name}"] / 6.4 == pytest.approx(result[ratio])
    told = capsys.readouterr().err
    assert told.count("'deepctr': 10000.0,") == told.count("'deepctr_fit': 20000.0} ms") == 2
    assert result["ratio_fit"] > 0


@pytest.mark.parametrize(
    ("case", "peer"), [("deepfm", "torch"), ("mlp", "deepctr-torch"), ("dcn", "torch")]
)
def test_each_peer_has_its_cases(case, peer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_train.py", "--case", case, "--peer", peer])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / "bench_train.py"), run_name="__main__")
    assert ended.value.code == 2
    assert f"--peer {peer} must come with --case" in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_deepctr_answers(bench, data, tmp_path, case):
    if not (bench["PEER_VENV"] / "complete_deepctr").exists():
        pytest.skip("bench_train.py has not installed the peer")
    np.savez(tmp_path / "data.npz", **data)
    command = [
        bench["PEER_VENV"] / "bin/python", SCRIPTS / "bench_peer_deepctr.py",
        tmp_path / "data.npz", json.dumps(case | {"threads": 1}),
    ]  # fmt: skip
    result = subprocess.run(command, input="step 2\nfit 1\n", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(0 < float(line) < 60 for line in result.stdout.splitlines())
    assert result.stdout.count("\n") == 2

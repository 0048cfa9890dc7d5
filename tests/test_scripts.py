"""What stands in scripts/ runs: each on a tiny case, shell scripts as far as bash reads them."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import trial

from cupyrec.data import movielens

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY = dict(
    tables=3, ids=50, width=4, num_dense=2, bottom=[6], top=[5, 3],
    batch=64, zipf=1.2, lr=0.1, batches=2,
)  # fmt: skip


def run(name, *arguments, monkeypatch):
    """Run a script in this process, as the interpreter would."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")


@pytest.fixture(scope="module")
def bench():
    return runpy.run_path(str(SCRIPTS / "bench_train.py"))


@pytest.fixture(scope="module")
def data(bench):
    rng = np.random.default_rng(1)
    shape = TINY["batches"], TINY["batch"]
    return {
        "dense": rng.standard_normal((*shape, 2), np.float32),
        "indices": bench["zipf_indices"](rng, TINY),
        "labels": (rng.random((*shape, 1)) < 0.25).astype(np.float32),
    }


def test_every_script_is_tried_here():
    names = {path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".sh")}
    assert names == set(re.findall(r'"(\w+\.(?:py|sh))"', Path(__file__).read_text()))


# Shell


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh", "venv.sh"])
def test_bash_reads_it(name):
    result = subprocess.run(["bash", "-n", SCRIPTS / name], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_quickstart_fetches_what_the_command_takes():
    text = (SCRIPTS / "quickstart.sh").read_text()
    assert re.findall(r"^hash=(\w+)$", text, re.MULTILINE) == [movielens._SHA256]


@pytest.mark.parametrize(("python", "code"), [(sys.executable, 0), ("false", 1), ("none", 127)])
def test_pythons_that_are_new_enough(python, code):
    command = f"source {SCRIPTS / 'venv.sh'}; new_enough {python}"
    assert subprocess.run(["bash", "-c", command]).returncode == code


# Plots and baselines


def test_a_curve_of_a_run_that_was_cut_short(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    lines = [
        '{"step": 20, "loss": 0.6, "lr": 0.1}',
        '{"step": 25, "valid_auc": null, "valid_logloss": 0.55}',
        '{"step": 40, "loss": 0.5, "lr": 0.1}',
        '{"steps": 40, "test_auc": 0.7}',
        '{"step": 60, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run("plot_metrics.py", tmp_path, monkeypatch=monkeypatch)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    plot = runpy.run_path(str(SCRIPTS / "plot_metrics.py"))
    curves = plot["curves_of"]([json.loads(line) for line in lines[:-1]])
    assert curves["loss"] == ([20, 40], [0.6, 0.5])
    assert curves["valid_auc"] == ([25], [None])
    assert "test_auc" not in curves


def test_a_curve_of_no_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as caught:
        run("plot_metrics.py", tmp_path / "none", monkeypatch=monkeypatch)
    assert caught.value.code == 2
    assert "must be a run's folder, got no metrics.jsonl in it.\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [[], ["--standardise"]])
def test_the_baseline_takes_the_best_penalty_on_valid(tmp_path, monkeypatch, capsys, more):
    pytest.importorskip("sklearn")
    trial.write_logs(tmp_path, rows=400)
    run("baseline_logistic.py", tmp_path, *more, monkeypatch=monkeypatch)
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    tried = [float(auc) for auc in re.findall(r"valid AUC ([.\d]+)", captured.err)]
    assert len(tried) == 17
    assert result["valid_auc"] == pytest.approx(max(tried), abs=1e-4)
    assert result["C"] == pytest.approx(10 ** (-3 + 0.25 * tried.index(max(tried))))
    assert 0.6 < result["test_auc"] < 1  # of labels that users, items and prices explain


# Benches


def test_layers_of_the_bench(bench):
    # 4 values and 3 tables make 4 features, 6 pairs of them.
    assert bench["layer_shapes"](TINY) == [(2, 6), (6, 4), (10, 5), (5, 3), (3, 1)]
    assert len(bench["layer_shapes"](bench["MLP"])) == 3 + 5
    assert bench["layer_shapes"](bench["MLP"])[3] == (128 + 27 * 26 // 2, 1024)


def test_ids_of_the_bench_are_zipfs(bench):
    case = TINY | {"batch": 20_000}
    indices = bench["zipf_indices"](np.random.default_rng(5), case)
    assert (indices.shape, indices.dtype) == ((2, 20_000, 3), np.int64)
    weights = [rank**-1.2 for rank in range(1, 51)]
    expected = np.array(weights) * (40_000 / sum(weights))
    most_frequent = []
    for table in range(3):
        counts = np.bincount(indices[..., table].ravel(), minlength=50)
        assert len(counts) == 50
        assert np.abs(np.sort(counts)[::-1] - expected).max() < 6 * np.sqrt(expected.max())
        most_frequent.append(counts.argmax())
    assert len(set(most_frequent)) > 1  # each table is shuffled on its own
    ids = bench["raw_ids"](np.arange(1000))
    assert ids.dtype == np.int64
    assert len(set(ids.tolist())) == 1000


def test_our_side_of_the_bench_trains(bench, data):
    ours = bench["Ours"](TINY, data)
    (group,) = (group for _, group in ours.model.named_groups())
    assert len(group.store) == 3 * 50
    before = {name: p.data.copy() for name, p in ours.model.named_parameters()}
    ours()
    ours()
    assert ours.optimizer.t == 2
    assert len(group.store) == 3 * 50  # no id was new
    after = dict(ours.model.named_parameters())
    assert all((after[name].data != old).any() for name, old in before.items())


def test_matmuls_of_the_bench_are_those_of_the_layers(bench):
    gemms = bench["Gemms"](TINY)
    gemms()
    assert [(x.shape[1], w.shape[0]) for x, w, *_ in gemms.layers] == bench["layer_shapes"](TINY)
    for x, w, dy, y, dw, dx in gemms.layers:
        wide = [a.astype(np.float64) for a in (x, w, dy)]
        np.testing.assert_allclose(y, np.einsum("bn,mn->bm", wide[0], wide[1]), atol=1e-4)
        np.testing.assert_allclose(dw, np.einsum("bm,bn->mn", wide[2], wide[0]), atol=1e-4)
        np.testing.assert_allclose(dx, np.einsum("bm,mn->bn", wide[2], wide[1]), atol=1e-4)


def test_the_peer_answers(bench, data, tmp_path):
    if not (bench["PEER_VENV"] / "complete").exists():
        pytest.skip("bench_train.py has not installed the peer")
    np.savez(tmp_path / "data.npz", **data)
    case = TINY | {"threads": 1, "layers": bench["layer_shapes"](TINY)}
    command = [
        bench["PEER_VENV"] / "bin/python", SCRIPTS / "bench_peer_torch.py",
        tmp_path / "data.npz", json.dumps(case),
    ]  # fmt: skip
    result = subprocess.run(command, input="step 2\ngemms 1\n", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    step, gemms = map(float, result.stdout.split())
    assert 0 < gemms < step < 60

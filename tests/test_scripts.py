"""What stands in scripts/ runs: each on a tiny case, shell scripts as far as bash reads them."""

import argparse
import json
import re
import runpy
import signal
import subprocess
import sys
import unittest
from pathlib import Path

import numpy as np
import pytest
import trial

from cupyrec import arrays

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY = dict(
    model="dlrm", optimizer="sgd", tables=3, ids=50, width=4, num_dense=2, bottom=[6], top=[5, 3],
    batch=64, zipf=1.2, lr=0.1, batches=2,
)  # fmt: skip
SIDE_BY_SIDE = TINY | dict(model="concatenation", optimizer="adam")


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


# test_bench_kernels.py and tests of their own names have these.
ELSEWHERE = {
    "accuracy_models.py", "accuracy_sets.py", "accuracy_table.py", "census_income.py",
    "interaction_cases.py", "kernel_cases.py", "kernel_figures.py",
    "kernel_inputs.py", "kernel_naive.py", "kernel_page.py", "kernel_plot.py", "kernel_shapes.py",
    "exchange_cases.py", "mlp_cases.py", "normalization_cases.py", "optimizer_cases.py",
    "bench_plan.py", "store_cases.py",
    "accuracy_gate.py", "auc_parity.py", "bench_data.py", "bench_exchange.py",
    "bench_exchange_ranks.py", "bench_life.py", "bench_peer_deepctr.py", "bench_peer_rocksdb.py",
    "bench_stores.py", "bench_serving.py", "bench_peer_fastapi.py",
    "chaos_stores.py", "gpu_ranks.py",
}  # fmt: skip


def test_every_script_is_tried_here():
    names = {path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".sh")}
    assert names == set(re.findall(r'"(\w+\.(?:py|sh))"', Path(__file__).read_text()))


# Shell


@pytest.mark.parametrize(
    "name", ["api_reference.sh", "gpu_check.sh", "quickstart.sh", "test.sh", "venv.sh"]
)
def test_bash_reads_it(name):
    result = subprocess.run(["bash", "-n", SCRIPTS / name], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("python", "code"), [(sys.executable, 0), ("false", 1), ("none", 127)])
def test_pythons_that_are_new_enough(python, code):
    command = f"source {SCRIPTS / 'venv.sh'}; new_enough {python}"
    assert subprocess.run(["bash", "-c", command]).returncode == code


def test_a_copy_is_no_editable_install(tmp_path):
    command = ["bash", "-c", f"source {SCRIPTS / 'venv.sh'}; cd {tmp_path}; is_editable"]
    assert subprocess.run(command).returncode == 1
    packages = tmp_path / ".venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "cupyrec-0.1.0.dist-info").mkdir()
    assert subprocess.run(command).returncode == 1
    (packages / "__editable__.cupyrec-0.1.0.pth").touch()
    assert subprocess.run(command).returncode == 0


# Baselines


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
    assert bench["layer_shapes"](SIDE_BY_SIDE) == [(12, 5), (5, 3), (3, 1)]
    mlp, embedding = (bench["layer_shapes"](bench["CASES"][case]) for case in ("mlp", "embedding"))
    assert len(mlp) == 3 + 5
    assert mlp[3] == (128 + 27 * 26 // 2, 1024)
    assert embedding == [(832, 64), (64, 32), (32, 1)]


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


@pytest.mark.parametrize("case", [TINY, SIDE_BY_SIDE], ids=["dlrm", "concatenation"])
def test_our_side_of_the_bench_trains(bench, data, case):
    ours = bench["Ours"](case, data)
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


@pytest.mark.parametrize("case", [TINY, SIDE_BY_SIDE, SIDE_BY_SIDE | {"optimizer": "adagrad"}])
def test_the_peer_answers(bench, data, tmp_path, case):
    if not (bench["PEER_VENV"] / "complete").exists():
        pytest.skip("bench_train.py has not installed the peer")
    step, gemms = ask_the_peer(
        bench, data, case | {"layers": bench["layer_shapes"](case)}, tmp_path
    )
    assert 0 < gemms < step < 60


def ask_the_peer(bench, data, case, folder):
    """Seconds of a step and of the matmuls."""
    np.savez(folder / "data.npz", **data)
    command = [
        bench["PEER_VENV"] / "bin/python", SCRIPTS / "bench_peer_torch.py",
        folder / "data.npz", json.dumps(case | {"threads": 1}),
    ]  # fmt: skip
    result = subprocess.run(command, input="step 2\ngemms 1\n", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return map(float, result.stdout.split())


# What makes an embedding fast

FEW_KEYS = dict(tables=3, ids=50, batch=16, zipf=1.1, batches=1)
FEW_ROWS = dict(tables=2, width=4, batch=16, sizes=[100, 200], lr=0.1)
FEW_BAGS = dict(
    model="bags", optimizer="sgd", tables=3, ids=20, width=4, longest=5, batch=8, zipf=1.1, lr=0.1,
    batches=2,
)  # fmt: skip
ONCE = argparse.Namespace(rounds=1, steps=1, threads=1)


@pytest.fixture
def embedding_bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return runpy.run_path(str(SCRIPTS / "bench_embedding.py"))


def test_unique_keys_are_timed(embedding_bench, capsys):
    result = embedding_bench["unique"](FEW_KEYS, ONCE)
    assert list(result) == ["ratio_vs_numpy", "encode_ratio_vs_numpy"]
    assert all(0 < ratio < 1000 for ratio in result.values())
    assert capsys.readouterr().err.count(" ms, ours ") == 4


def test_growing_tables_are_timed(embedding_bench, capsys):
    result = embedding_bench["growth"](FEW_ROWS, ONCE)
    told = capsys.readouterr().err
    assert re.findall(r"^(\d+) ids", told, re.MULTILINE) == ["128", "224"]  # by 32 a step
    assert 0 < result["lookup_growth"] < 100
    assert 0 < result["longest_pause"] < 60
    assert result["bytes_per_id"] > 16  # at least an id and a table, in slots that are not all full


def test_bags_of_the_bench(embedding_bench):
    data = embedding_bench["ragged"](FEW_BAGS)
    assert data["lengths"].shape == (2, 8, 3)
    assert set(data["lengths"].ravel()) == {1, 2, 3, 4, 5}
    assert data["values"].shape == (data["lengths"].sum(),)
    assert data["values"].max() < 20


def test_our_step_on_bags_of_the_bench(embedding_bench):
    ours = embedding_bench["OurBags"](FEW_BAGS, embedding_bench["ragged"](FEW_BAGS))
    table = ours.embedding.group.store
    before = table.export_rows(0, len(table)).vectors
    assert len(before) == FEW_BAGS["tables"] * FEW_BAGS["ids"]  # as many rows as the peer has
    ours()
    moved = (before - table.export_rows(0, len(table)).vectors) / FEW_BAGS["lr"]
    counts = np.diff(ours.batches[ours.at][1]).sum()
    np.testing.assert_allclose(moved.sum(), counts * FEW_BAGS["width"], rtol=1e-3)


def test_the_peer_sums_bags(bench, embedding_bench, tmp_path):
    if not (bench["PEER_VENV"] / "complete").exists():
        pytest.skip("bench_train.py has not installed the peer")
    step, _ = ask_the_peer(bench, embedding_bench["ragged"](FEW_BAGS), FEW_BAGS, tmp_path)
    assert 0 < step < 60


@pytest.mark.parametrize("script", ["bench_train.py", "bench_embedding.py"])
def test_benches_know_their_cases(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    with pytest.raises(SystemExit) as ended:
        run(script, "--case", "none", monkeypatch=monkeypatch)
    assert ended.value.code == 2
    assert "argument --case: invalid choice: 'none'" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["bench_train.py", "bench_embedding.py", "bench_exchange.py"])
def test_benches_refuse_to_measure_nothing(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    with pytest.raises(SystemExit) as ended:
        run(script, "--rounds", "0", monkeypatch=monkeypatch)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "argument --rounds: must be an integer of at least 1, got '0'" in told


def test_the_baseline_names_the_extra_that_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(SystemExit, match=r"scipy must be installed.*--editable '\.\[bench\]'$"):
        run("baseline_logistic.py", "none", monkeypatch=monkeypatch)


# On a GPU

TINY_TRAINING = (
    "--batch 8 --tables 2 --dense 3 --ids 20 --width 4 --bottom 6 --top 5 --batches 2 --warmup 2"
    " --steps 3"
).split()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_training_at_toy_sizes(device, monkeypatch, capsys):
    if device == "sim":
        pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
    with pytest.raises(SystemExit) as ended:
        run("gpu_train.py", "--device", device, *TINY_TRAINING, monkeypatch=monkeypatch)
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert ended.value.code == 0
    assert (result["device"], result["batch"]) == (device, 8)
    for amp in ("float32", "float16"):
        for where in ("from_host", "on_device"):
            assert result[amp][f"samples_per_second_{where}"] > 0
            assert re.search(rf"^{amp} {where} +[\d.]+ ms a step", said.err, re.MULTILINE)
        assert 0.3 < result[amp]["loss"] < 1.5


@pytest.mark.parametrize("kind", [{}, {"compiled": True, "amp": "float16"}])
def test_pytorch_trains_beside(bench, kind):
    if not (bench["PEER_VENV"] / "complete").exists():
        pytest.skip("bench_train.py has not installed the peer")
    script = runpy.run_path(str(SCRIPTS / "gpu_train.py"))
    options = argparse.Namespace(
        torch=bench["PEER_VENV"] / "bin/python", device="cpu", batch=8, tables=2, dense=3, ids=20,
        width=4, bottom=[6], top=[5], lr=0.1, batches=2, warmup=1, steps=1,
    )  # fmt: skip
    assert script["train_torch"](options, script["click_log"](options), **kind) > 0


def test_no_gpu_is_said(monkeypatch, capsys):
    def none(device):
        raise RuntimeError("device 'cuda': needs a GPU.")

    monkeypatch.setattr(arrays, "module", none)
    for name in ("gpu_train.py", "bench_kernels.py"):
        monkeypatch.syspath_prepend(SCRIPTS)
        with pytest.raises(SystemExit) as ended:
            run(name, "--device", "cuda", monkeypatch=monkeypatch)
        assert ended.value.code == 3
        assert capsys.readouterr().err.endswith("device 'cuda': needs a GPU.\n")


def test_chaos_tells_how_a_job_ended(monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    with pytest.raises(SystemExit) as ended:  # this seed's one run sends SIGTERM, and soon
        run("chaos.py", "--runs", 1, "--ranks", 1, "--seed", 10, monkeypatch=monkeypatch)
    said = capsys.readouterr()
    assert ended.value.code == 0
    result = {"runs": 1, "hangs": 0, "corruptions": 0, "unexplained": 0}
    assert json.loads(said.out.splitlines()[-1]) == result
    assert "1 ranks, terminate rank 0 0.06 s after" in said.err
    assert "ended with 143 in" in said.err


def test_chaos_on_a_server(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run("chaos_serving.py", "--each", 3, monkeypatch=monkeypatch)
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert ended.value.code == 0, said.err
    assert result["sent"] == 3 * result["kinds"]
    assert sum(result["answers"].values()) + result["closed"] == result["sent"]
    assert (result["dead"], result["alive"]) == (0, True)
    assert result["rss_mb"][0] > 50


def test_chaos_counts_a_rank_that_lives_on_as_a_hang(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    job = object.__new__(runpy.run_path(str(SCRIPTS / "chaos.py"))["Job"])
    job.folder, job.ranks, job.process = tmp_path, 2, subprocess.Popen(["true"])
    job.process.wait()
    rank = subprocess.Popen(["sleep", "60"])
    (tmp_path / "1").write_text(str(rank.pid))
    assert not job.ended(0.2)
    assert rank.wait(60) == -signal.SIGKILL
    assert job.ended(0.2)


@pytest.fixture
def bare():
    """The script that does without packages, for one that nobody has."""
    script = runpy.run_path(str(SCRIPTS / "bare_python.py"))
    finder = script["_Finder"](["tqdm_of_nobody", "hypothesis_of_nobody"])
    script["HARMLESS"].append("hypothesis_of_nobody")
    sys.meta_path.append(finder)
    yield script
    sys.meta_path.remove(finder)
    for name in [n for n in sys.modules if n.endswith("_of_nobody") or "_of_nobody." in n]:
        del sys.modules[name]


def test_what_is_missing_can_be_imported(bare):
    names = {}
    exec("from tqdm_of_nobody.contrib.logging import redirect as f, tqdm as t", names)
    with pytest.raises(unittest.SkipTest, match=r"contrib.logging.tqdm: tqdm_of_nobody is not"):
        names["t"](3)
    exec("from hypothesis_of_nobody import given, strategies as st", names)

    @names["given"](names["st"].integers(0, 3))
    def tried(): ...

    assert not isinstance(tried, type(run))  # so pytest doesn't take it


def test_python_without_the_packages(tmp_path):
    script = tmp_path / "script"
    script.write_text("import sys; print(sys.argv)")
    bare = [sys.executable, SCRIPTS / "bare_python.py"]
    for arguments, said in [
        (["-c", "print(5)"], "5\n"),
        ([script, "a", "-b"], f"{[str(script), 'a', '-b']}\n"),
        (["-m", "json.tool", "--help"], "usage: "),
    ]:
        result = subprocess.run([*bare, *arguments], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(said)

import json

import numpy as np
import pytest
import trial
from test_checkpoint import IDS, dlrm, trained
from test_oneembedding import Folder

from cupyrec import checkpoint, checkpoint_diff, optim


def run(capsys, *arguments, code=0):
    """Run ``cupyrec checkpoint``; return the JSON line and what was said on stderr."""
    assert trial.command("checkpoint", *arguments) == code
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    return json.loads(lines[-1]) if lines else None, captured.err


@pytest.fixture
def saved(tmp_path):
    model, optimizer = trained(optim.Adagrad)
    checkpoint.save(tmp_path / "c", model, optimizer, config={"seed": 1}, progress={"step": 3})
    return tmp_path / "c"


def test_inspect(saved, capsys, caplog):
    told, _ = run(capsys, "inspect", saved)
    parameters = sum(np.size(a) for a in dlrm().state_dict().values())
    assert told | {"bytes": 0} == {
        "checkpoint": str(saved), "format": 3, "cupyrec": told["cupyrec"], "model": "DLRM",
        "optimizer": {"class": "Adagrad", "t": 3, "schedule": None, "scaler": None},
        "progress": {"step": 3}, "base": None, "parameters": parameters, "files": 5, "bytes": 0,
        "groups": [
            {
                "name": "embedding.groups.3", "width": 3, "dtype": "float32", "state": ["sum"],
                "rows": 12, "bytes": 12 * 36, "shards": [12],
                "tables": {t: {"ids": 6, "bytes": 6 * 36} for t in ("0", "1")},
            }
        ],
        "config": {"seed": 1},
    }  # fmt: skip
    files = trial.files(saved)
    assert told["bytes"] == sum(len(f) for name, f in files.items() if name != "manifest.json")
    said = caplog.text
    for text in ("DLRM, format 3", f"{parameters} parameters", "'seed': 1", "'step': 3"):
        assert text in said
    assert f"{'1':>10} {6:14} {216:16}" in said


def test_tables_without_rows_are_shown(tmp_path, capsys):
    checkpoint.save(tmp_path / "c", dlrm())
    told, _ = run(capsys, "inspect", tmp_path / "c")
    nothing = {"ids": 0, "bytes": 0}
    assert told["groups"][0]["tables"] == {"0": nothing, "1": nothing}


def test_verify(saved, capsys):
    told, _ = run(capsys, "verify", saved)
    assert (told["files"], told["rows"]) == (5, 12)
    file = saved / "embedding.groups.3.00000-of-00001.ids.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    told, said = run(capsys, "verify", saved, code=1)
    size = len(content)
    text = f"cupyrec: checkpoint: '{file}' must have {size} bytes, got {size - 8}.\n"
    assert (told, said) == (None, text)


def test_a_runs_folder_is_its_best_or_last(saved, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last").symlink_to("../c")
    assert run(capsys, "verify", tmp_path / "run")[0]["checkpoint"].endswith("run/last")
    _, said = run(capsys, "verify", tmp_path, code=1)
    assert said.startswith(f"cupyrec: checkpoint: '{tmp_path}' must be a checkpoint folder, got no")


def test_reshard(saved, capsys, tmp_path):
    told, _ = run(capsys, "reshard", saved, tmp_path / "d", "--shards", 4)
    files = trial.files(tmp_path / "d")
    assert (told["files"], told["bytes"]) == (18, sum(map(len, files.values())))
    fresh = dlrm()
    again = optim.Adagrad(fresh.parameters(), 0.1)
    manifest = checkpoint.load(tmp_path / "d", fresh, again)
    assert len(manifest["groups"][0]["shards"]) == 4
    assert sorted(fresh.embedding.export_table(1)[0]) == sorted(IDS)
    told, said = run(capsys, "reshard", saved, tmp_path / "d", "--shards", 2, code=2)
    text = f"cupyrec: checkpoint: '{tmp_path / 'd'}' must not exist without --overwrite.\n"
    assert (told, said) == (None, text)
    assert trial.files(tmp_path / "d") == files
    run(capsys, "reshard", saved, tmp_path / "d", "--shards", 2, "--overwrite")
    assert len(trial.files(tmp_path / "d")) == 10
    _, said = run(capsys, "reshard", saved, tmp_path / "e", "--shards", 0, code=2)
    assert "must be an integer of at least 1, got '0'" in said


def test_help(capsys):
    names = "inspect", "verify", "diff", "reshard", "export", "import"
    for words in ([], *([name] for name in names)):
        assert trial.command("checkpoint", *words, "--help") == 0
    assert capsys.readouterr().out.count("usage: cupyrec checkpoint") == 7


def test_diff(saved, capsys, caplog, tmp_path, monkeypatch):
    run(capsys, "reshard", saved, tmp_path / "same", "--shards", 3)
    told, _ = run(capsys, "diff", saved, tmp_path / "same")
    assert told == {"equal": True, "tables": {}, "dense": {}, "settings": []}
    assert "0 of 2 tables with ids differ" in caplog.text
    model, optimizer = trained(optim.Adagrad, ids=[*IDS, 99])
    checkpoint.save(tmp_path / "other", model, optimizer)
    told, _ = run(capsys, "diff", saved, tmp_path / "other", "--scratch", tmp_path, code=1)
    assert told["tables"]["embedding.groups.3.1"]["only_b"] == 1
    assert f"embedding.groups.3.1: 6 ids in both, 0 only in {saved}, 1 only in" in caplog.text
    assert told["dense"].keys() >= {"parameter/top.weights.0"}
    assert "parameter/top.weights.0: by up to 0." in caplog.text
    monkeypatch.setattr(checkpoint_diff, "_distance", lambda x, y: np.full(x.shape, np.inf))
    told, _ = run(capsys, "diff", saved, tmp_path / "other", code=1)
    assert told["tables"]["embedding.groups.3.1"]["largest"]["vectors"] is None  # JSON has no inf
    told, said = run(capsys, "diff", saved, tmp_path, code=1)
    assert told is None
    assert "must be a checkpoint folder" in said


def test_export_and_import(saved, capsys, tmp_path):
    out = tmp_path / "e"
    told, _ = run(capsys, "export", saved, out, "--format", "npy", "--table", 1, "--states")
    name = "embedding.groups.3.1"
    assert (told["files"], told["tables"][name]["ids"]) == (4, 6)
    vectors = np.load(out / f"{name}.vectors.npy")
    np.save(out / f"{name}.vectors.npy", vectors + 1)
    file = out / f"{name}.ids.npy"
    told, _ = run(capsys, "import", file, saved, tmp_path / "d", "--table", name)
    assert (told["imported"], told["replaced"]) == (6, 6)
    told, _ = run(capsys, "diff", saved, tmp_path / "d", code=1)
    assert told["tables"][name]["differ"]["vectors"] == 6
    assert abs(told["tables"][name]["largest"]["vectors"] - 1) < 1e-6
    told, _ = run(capsys, "export", saved, tmp_path / "p")
    assert told["format"] == "parquet"
    for words in (["export", saved, out], ["import", file, saved, tmp_path / "d", "--table", 1]):
        _, said = run(capsys, *words, code=2)
        assert "must not exist without --overwrite" in said


def test_import_of_what_other_systems_saved(saved, capsys, tmp_path):
    vectors = np.arange(15, dtype=np.float32).reshape(5, 3)
    one = Folder(tmp_path / "0-1", 6)
    one.put(np.arange(10, 15), np.repeat(vectors, 2, axis=0).reshape(5, 6))
    one.save("s")
    (tmp_path / "m").mkdir()
    for name, array in (
        ("key", np.arange(10, 15)), ("emb_vector", vectors), ("slot_id", np.arange(5) % 2)
    ):  # fmt: skip
        array.tofile(tmp_path / "m" / name)
    np.savez(tmp_path / "w.npz", a=vectors)
    np.save(tmp_path / "words.npy", np.arange(10, 15))
    snapshot = [tmp_path, "--from", "oneembedding", "--snapshot", "s"]
    model = [tmp_path / "m", "--from", "hugectr"]
    matrix = [tmp_path / "w.npz", "--from", "weights", "--weight", "a"]
    words = tmp_path / "words.npy"
    for i, (source, count) in enumerate([
        ([*snapshot, "--states", "sum"], 5),
        ([*snapshot, "--storage-dim", 6, "--key-type", "uint64", "--ids", 11, 13], 2),
        ([*snapshot, "--states", "sum", "--ids", -5, 11, "--offset", 100], 1),
        (model, 5), ([*model, "--slot", 1], 2), (matrix, 5), ([*matrix, "--vocabulary", words], 5),
    ]):  # fmt: skip
        at = ["--table", 1, *source[1:]]
        told, _ = run(capsys, "import", source[0], saved, tmp_path / str(i), *at)
        assert told["imported"] == count
    told, _ = run(capsys, "diff", tmp_path / "3", tmp_path / "6")
    assert told["equal"]
    ids = np.load(tmp_path / "2" / "embedding.groups.3.00000-of-00001.ids.npy")
    assert -90 in ids
    state = np.load(tmp_path / "2" / "embedding.groups.3.00000-of-00001.state.sum.npy")
    assert state[ids == -90].tolist() == [vectors[0].tolist()]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ("--slot 1", "--slot is not known with --from left out."),
        ("--from weights", "--weight must be given with --from weights."),
        ("--from oneembedding", "--snapshot must be given with --from oneembedding."),
        ("--from hugectr --storage-dim 3", "--storage-dim is not known with --from hugectr."),
    ],
)
def test_import_refuses_options_of_another_system(options, rule, saved, capsys, tmp_path):
    words = ["import", tmp_path, saved, tmp_path / "d", "--table", "1", *options.split()]
    _, said = run(capsys, *words, code=2)
    assert said == f"cupyrec: import: {rule}\n"

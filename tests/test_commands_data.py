"""The command on Parquet, .npy files and what `data inspect` writes."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
import trial
from pyarrow import parquet

from cupyrec.data import Schema


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The same rows as Parquet, as .npy files and as text, and names of each kind's files."""
    folder = tmp_path_factory.mktemp("logs")
    for name, rows, seed in (("train", 300, 0), ("test", 90, 1)):
        dense, ids, labels = trial.planted(rows, seed)
        table = pa.table({"item": ids[:, 1], "price": dense[:, 0], "user": ids[:, 0],
                          "click": labels.astype(np.int8), "note": ["x"] * rows})  # fmt: skip
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=100)
        for part, array in (("dense", dense), ("sparse", ids), ("labels", labels)):
            np.save(folder / f"{name}_{part}.npy", array)
        lines = (f"{y:.0f}\t{x!r}\t{user}\t{item}\n" for y, x, (user, item)
                 in zip(labels, dense[:, 0].tolist(), ids.tolist(), strict=True))  # fmt: skip
        (folder / f"{name}.tsv").write_text("".join(lines))
    (folder / "schema.toml").write_text(
        "".join(f'[[column]]\nname = "{name}"\nkind = {kind}\n' for name, kind in (
            ("click", '"label"'), ("price", '"numeric"'),
            ("user", '"categorical"\nencoding = "integer"'),
            ("item", '"categorical"\nencoding = "integer"'),
        ))
    )  # fmt: skip
    return folder


def run(logs, kind: str, out, *more: object) -> int:
    ending = {"parquet": ".parquet", "npy": "", "text": ".tsv"}[kind]
    return trial.command("train", "--train", logs / f"train{ending}", "--test",
                         logs / f"test{ending}", *trial.SMALL, "--out", out, *more)  # fmt: skip


def test_every_kind_of_file_trains_to_the_same_bits(logs, tmp_path, capsys) -> None:
    assert run(logs, "text", tmp_path / "text", "--schema", logs / "schema.toml") == 0
    assert run(logs, "parquet", tmp_path / "parquet", "--schema", logs / "schema.toml") == 0
    assert run(logs, "npy", tmp_path / "npy") == 0  # whose shapes tell the schema
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({result["test_auc"] for result in results}) == 1
    assert results[0]["test_auc"] > 0.6
    files = [trial.files(tmp_path / kind / "last") for kind in ("text", "parquet", "npy")]
    weights = [{n: c for n, c in some.items() if n != "manifest.json"} for some in files]
    assert weights[0] == weights[1] == weights[2]
    told = json.loads((tmp_path / "npy" / "data.json").read_text())["train"]
    assert [name for name, _ in told] == [f"train_{p}.npy" for p in ("dense", "sparse", "labels")]


def test_a_run_evaluates_and_predicts_files_of_any_kind(logs, tmp_path, capsys) -> None:
    assert run(logs, "npy", tmp_path / "run") == 0
    capsys.readouterr()
    got = []
    table = parquet.read_table(logs / "test.parquet")
    table = table.rename_columns({"price": "I1", "user": "C1", "item": "C2", "click": "label"})
    parquet.write_table(table, tmp_path / "named.parquet")
    parquet.write_table(table.drop_columns("label"), tmp_path / "unlabelled.parquet")
    for data in (logs / "test.tsv", tmp_path / "named.parquet", logs / "test"):
        assert trial.command("evaluate", tmp_path / "run", "--data", data) == 0
        got.append(json.loads(capsys.readouterr().out)["test_auc"])
    assert len(set(got)) == 1
    for data in (logs / "test.tsv", tmp_path / "unlabelled.parquet", logs / "test_dense.npy"):
        out = tmp_path / "out.npy"
        assert trial.command("predict", tmp_path / "run", "--data", data, "--output", out,
                             "--overwrite") == 0  # fmt: skip
        got.append(np.load(out))
    assert got[3].shape == (90,)
    assert (got[3] == got[4]).all() and (got[3] == got[5]).all()


def test_a_run_on_parquet_resumes(logs, tmp_path) -> None:
    schema = ["--schema", logs / "schema.toml"]
    assert run(logs, "parquet", tmp_path / "whole", *schema, "--epochs", 2) == 0
    with trial.at_step(14, trial.interrupt):
        assert run(logs, "parquet", tmp_path / "run", *schema, "--epochs", 2) == 130
    resumed = ["train", "--train", logs / "train.parquet", "--test", logs / "test.parquet"]
    assert trial.command(*resumed, "--resume", tmp_path / "run") == 0
    assert trial.files(tmp_path / "run" / "last") == trial.files(tmp_path / "whole" / "last")


def test_what_is_refused(logs, tmp_path, capsys) -> None:
    assert run(logs, "parquet", tmp_path / "run") == 1
    assert "train.parquet: must come with a schema, got none. `cupyrec data inspect '" in (
        capsys.readouterr().err
    )
    mixed = "train", "--train", logs / "train.parquet", logs / "train.tsv"
    assert trial.command(*mixed, "--schema", logs / "schema.toml") == 1
    assert re.search(r"train\.tsv: must be parquet as '.*' is, got text\.", capsys.readouterr().err)
    assert run(logs, "npy", tmp_path / "run", "--set", "data.buckets=false") == 2
    assert "data.buckets must be left to the columns of --schema" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["parquet", "text"])
def test_what_inspect_writes_is_trained_on_at_once(logs, tmp_path, capsys, kind) -> None:
    file = logs / {"parquet": "train.parquet", "text": "train.tsv"}[kind]
    schema = tmp_path / "schema.toml"
    assert trial.command("data", "inspect", file) == 0
    shown = capsys.readouterr().out
    assert "[[column]]  # whole numbers, 2 distinct among 300 rows, 0 % missing" in shown
    assert trial.command("data", "inspect", file, "--out", schema, "--rows", 1000) == 0
    assert schema.read_text() == shown
    assert trial.command("data", "inspect", file, "--out", schema) == 2
    assert "must not exist without --overwrite" in capsys.readouterr().err
    assert trial.command("data", "inspect", file, "--out", schema, "--overwrite") == 0
    assert trial.command("data", "inspect", file, "--out", tmp_path / "a" / "b.toml") == 0
    assert (tmp_path / "a" / "b.toml").read_text() == shown
    assert trial.command("data", "inspect", file, "--out", tmp_path, "--overwrite") == 2
    assert f"data: '{tmp_path}' must not exist without --overwrite, nor be a folder." in (
        capsys.readouterr().err
    )
    assert len(Schema.load(schema).task_names) == 1
    assert run(logs, kind, tmp_path / "run", "--schema", schema) == 0

import json
import re

import numpy as np
import pytest
import trial
from pyarrow import parquet
from test_checkpoint import batch, trained

import cupyrec
from cupyrec import checkpoint, checkpoint_export, checkpoint_shards, nn, optim
from cupyrec.checkpoint_export import export, find_table
from cupyrec.checkpoint_reshard import reshard


def read(folder, name, form, part):
    """A part of an exported table."""
    if form == "npy":
        return np.load(folder / f"{name}.{part}.npy")
    column = {"ids": "id", "vectors": "vector"}.get(part, part)
    values = parquet.read_table(folder / f"{name}.parquet")[column].combine_chunks()
    if part == "ids":
        return values.to_numpy()
    return values.flatten().to_numpy().reshape(len(values), -1)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("form", ["parquet", "npy"])
def test_what_a_table_exports(form, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_shards, "_ROWS", 16)
    monkeypatch.setattr(checkpoint_export, "_OPEN", 2)
    monkeypatch.setattr(checkpoint_export, "_GROUP_BYTES", 500)
    layer = nn.MultiTableEmbedding(5, [3, 2, 3, 3, 3])
    optimizer = optim.Adam(layer.parameters(), 0.1)
    for table in (0, 1, 3, 4):
        ids = np.random.default_rng(table).permutation(50 + table) - 2
        layer.import_table(table, ids, np.full((len(ids), layer.widths[table]), 0.5, np.float32))
    layer(np.arange(20).reshape(4, 5)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "one", layer, optimizer)
    reshard(tmp_path / "one", tmp_path / "c", shards)
    told = export(tmp_path / "c", tmp_path / "e", format=form, states=True)
    assert told == json.loads((tmp_path / "e" / "export.json").read_text())
    names = {f"groups.{width}.{table}" for table, width in enumerate(layer.widths)}
    assert told["tables"].keys() == names
    files = {file for table in told["tables"].values() for file in table["files"]}
    assert files | {"export.json"} == {p.name for p in (tmp_path / "e").iterdir()}
    for table, width in enumerate(layer.widths):
        name, (ids, vectors) = f"groups.{width}.{table}", layer.export_table(table)
        got = {
            part: read(tmp_path / "e", name, form, part)
            for part in ("ids", "vectors", "state.m", "state.v")
        }
        assert (told["tables"][name]["ids"], told["tables"][name]["width"]) == (len(ids), width)
        assert [got[part].dtype.name for part in got] == ["int64", *["float32"] * 3]
        assert got["state.v"].shape == (len(ids), width)
        order, ours = np.argsort(got["ids"]), np.argsort(ids)
        np.testing.assert_array_equal(got["ids"][order], ids[ours])
        np.testing.assert_array_equal(got["vectors"][order], vectors[ours])
        moved = (vectors[ours] != 0.5).any(axis=1)
        np.testing.assert_array_equal(got["state.v"][order].any(axis=1), moved)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_owe_steps_are_up_to_date(dtype, tmp_path):
    model, optimizer = trained(optim.CatchUpAdam, embedding_dtype=dtype)
    cupyrec.train_step(model, batch(range(100, 106)), optimizer)
    for seed in range(3):
        cupyrec.train_step(model, batch([1, 2], seed=seed), optimizer)
    checkpoint.save(tmp_path / "c", model, optimizer)
    export(tmp_path / "c", tmp_path / "e", format="npy", tables=["1"])
    assert len(list((tmp_path / "e").iterdir())) == 3
    name = "embedding.groups.3.1"
    ids, vectors = (read(tmp_path / "e", name, "npy", part) for part in ("ids", "vectors"))
    expected_ids, expected = model.embedding.export_table(1)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(vectors, expected)
    stored = np.load(next((tmp_path / "c").glob("*.vectors.npy")))
    assert not np.isin(vectors, stored).all()


def test_names_and_numbers(tmp_path):
    known = ["user.groups.8.0", "item.groups.8.0", "item.groups.8.10", "3"]
    assert [find_table(known, name) for name in ("10", "item.groups.8.0", "3")] == [
        "item.groups.8.10", "item.groups.8.0", "3",
    ]  # fmt: skip
    for name in ("0", "1", "groups.8.0", ""):
        names = f"{', '.join(known)}, or tell its number"
        text = f"checkpoint: 'table' must name one of {names}, got '{name}'."
        with pytest.raises(ValueError, match=re.escape(text)):
            find_table(known, name)
    assert find_table(known[1:3], "price", [*"abcdefghij", "price"]) == "item.groups.8.10"
    assert find_table(known[1:3], "0", ["10", "0"]) == "item.groups.8.0"  # a number is a number
    with pytest.raises(ValueError, match=re.escape("one of a, b, c, d, e, f, ..., or tell its")):
        find_table(known[1:3], "h", "abcdefg")
    checkpoint.save(tmp_path / "c", *trained())
    with pytest.raises(ValueError, match="must name one of embedding.groups.3.0, embedding.gr"):
        export(tmp_path / "c", tmp_path / "e", format="npy", tables=["0", "2"])
    with pytest.raises(ValueError, match=re.escape("one of ['parquet', 'npy'], got 'csv'.")):
        export(tmp_path / "c", tmp_path / "e", format="csv")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_tables_of_a_run_by_their_columns(tmp_path, capsys):
    assert trial.train(trial.write_logs(tmp_path, rows=64), tmp_path / "run") == 0
    wanted = "item", "price bucket"
    arguments = tmp_path / "run", tmp_path / "e", "--format", "npy", "--table", *wanted
    assert trial.command("checkpoint", "export", *arguments) == 0
    numbers = [trial.SCHEMA.table_names.index(name) for name in wanted]
    files = {file.name for file in (tmp_path / "e").glob("*.ids.npy")}
    assert files == {f"embedding.groups.4.{number}.ids.npy" for number in numbers}
    capsys.readouterr()
    assert trial.command("checkpoint", "export", tmp_path / "run", "f", "--table", "itm") == 1
    text = "'table' must name one of user, item, price bucket, or tell its number, got 'itm'."
    assert text in capsys.readouterr().err


def test_only_an_export_or_checkpoint_is_replaced(tmp_path):
    checkpoint.save(tmp_path / "c", *trained())
    export(tmp_path / "c", tmp_path / "e", format="npy")
    before = trial.files(tmp_path / "e")
    with pytest.raises(FileExistsError, match="must not exist yet"):
        export(tmp_path / "c", tmp_path / "e", format="parquet")
    assert trial.files(tmp_path / "e") == before
    export(tmp_path / "c", tmp_path / "e", format="parquet", overwrite=True)
    assert len(trial.files(tmp_path / "e")) == 3
    (tmp_path / "notes").mkdir()
    with pytest.raises(FileExistsError, match="must be a checkpoint or an export"):
        export(tmp_path / "c", tmp_path / "notes", format="npy", overwrite=True)

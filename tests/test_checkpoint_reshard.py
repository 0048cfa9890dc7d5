import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import trial
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import dlrm, everything, trained
from test_checkpoint_files import as_format_2, rewrite_manifest
from test_checkpoint_ranks import load_together
from test_checkpoint_shards import check_rows, some_rows, write

from cupyrec import checkpoint, checkpoint_reshard, checkpoint_shards, nn, optim
from cupyrec.checkpoint_checks import check
from cupyrec.checkpoint_reshard import chosen, reshard, split
from cupyrec.checkpoint_shards import read_keys, read_rows
from cupyrec.ops.partition import owners


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8, 70])
def test_each_row_is_in_the_shard_of_its_owner(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_shards, "_ROWS", 64)
    rows = some_rows(np.arange(1000) % 7, np.arange(1000) - 500)
    entry = write(tmp_path, [[chosen(rows, slice(300))], [chosen(rows, slice(300, None))]])
    (tmp_path / "new").mkdir()
    new, files = split(
        tmp_path / "new", entry, read_keys(tmp_path, entry), lambda: read_rows(tmp_path, entry),
        shards,
    )  # fmt: skip
    assert sorted(files) == sorted(p.name for p in (tmp_path / "new").iterdir())
    assert (len(new["shards"]), new["rows"]) == (shards, 1000)
    owned = owners(rows.tables, rows.ids, shards)
    for number, shard in enumerate(new["shards"]):
        parts = list(read_rows(tmp_path / "new", new | {"shards": [shard]}))
        expected = chosen(rows, owned == number)  # in the order in which they were
        assert shard["rows"] == len(expected.ids) == sum(len(part.ids) for part in parts)
        for part in parts:
            check_rows(part, chosen(expected, slice(len(part.ids))))
            expected = chosen(expected, slice(len(part.ids), None))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1)), unique=True),
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3),
)
@settings(max_examples=25)
def test_tables_are_the_same_whatever_the_shards(keys, counts):
    layer = nn.MultiTableEmbedding(4, 3, seed=1)
    optimizer = optim.RowWiseAdagrad(layer.parameters(), 0.1)
    for table in range(4):
        ids = np.array([i for t, i in keys if t == table], np.int64)
        layer.import_table(table, ids, np.full((ids.size, 3), table, np.float32))
    layer(np.array([[keys[0][1] if keys else 5] * 4])).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint.save(folder / "0", layer, optimizer)
        for number, count in enumerate(counts):
            reshard(folder / str(number), folder / str(number + 1), count)
            assert len(check(folder / str(number + 1))["groups"][0]["shards"]) == count
        fresh = nn.MultiTableEmbedding(4, 3)
        checkpoint.load(
            folder / str(len(counts)), fresh, optim.RowWiseAdagrad(fresh.parameters(), 0.1)
        )
        assert fresh.digest() == layer.digest()


def test_all_else_stays(tmp_path):
    model, optimizer = trained(optim.CatchUpAdam)
    checkpoint.save(tmp_path / "c", model, optimizer, config={"a": 1}, progress={"step": 3})
    rewrite_manifest(tmp_path / "c", as_format_2)
    reshard(tmp_path / "c", tmp_path / "d", 3)
    before, after = (checkpoint.read_manifest(tmp_path / name) for name in "cd")
    assert (before.pop("format"), after.pop("format")) == (2, 3)
    for manifest in (before, after):
        del manifest["files"]
        for entry in manifest["groups"]:
            del entry["shards"]
    assert before == after
    dense = "dense.safetensors"
    assert trial.files(tmp_path / "c")[dense] == trial.files(tmp_path / "d")[dense]
    # A rank of three finds its rows in one shard.
    three = []
    for _ in range(3):
        part = dlrm()
        three.append((part, optim.CatchUpAdam(part.parameters(), 0.1)))
    load_together(tmp_path / "d", three)
    sizes = [len(part.embedding.group.store) for part, _ in three]
    shards = checkpoint.read_manifest(tmp_path / "d")["groups"][0]["shards"]
    assert sizes == [shard["rows"] for shard in shards]
    # One shard again has the rows of before, by owner.
    reshard(tmp_path / "d", tmp_path / "e", 1)
    fresh = dlrm()
    again = optim.CatchUpAdam(fresh.parameters(), 0.1)
    checkpoint.load(tmp_path / "e", fresh, again)
    assert fresh.embedding.digest() == model.embedding.digest()


def test_onto_itself_and_over_others(tmp_path):
    model, optimizer = trained()
    checkpoint.save(tmp_path / "c", model, optimizer)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "link").symlink_to("c")
    with pytest.raises(FileExistsError, match=re.escape("reshard: '" + str(tmp_path / "c"))):
        reshard(tmp_path / "c", tmp_path / "c", 2)
    for name in ("other", "link"):
        with pytest.raises(FileExistsError, match="must be a checkpoint or an export to be over"):
            reshard(tmp_path / "c", tmp_path / name, 2, overwrite=True)
    reshard(tmp_path / "c", tmp_path / "c", 2, overwrite=True)
    assert len(check(tmp_path / "c")["groups"][0]["shards"]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "link", "other"]
    fresh = dlrm()
    again = optim.Adam(fresh.parameters(), 0.1)
    checkpoint.load(tmp_path / "c", fresh, again)
    assert fresh.embedding.digest() == model.embedding.digest()
    assert everything(fresh, again).keys() == everything(model, optimizer).keys()


def test_what_is_damaged_is_not_passed_on(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "c", *trained())
    (file,) = (tmp_path / "c").glob("*.vectors.npy")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match=re.escape(str(file))):
        reshard(tmp_path / "c", tmp_path / "d", 2)
    file.write_bytes(content)
    for shards, text in ((0, "at least 1, got 0"), (1025, "at most 1024, got 1025")):
        with pytest.raises(ValueError, match=text):
            reshard(tmp_path / "c", tmp_path / "d", shards)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_reshard.ShardWriter, "write", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'd'}'"):
        reshard(tmp_path / "c", tmp_path / "d", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]

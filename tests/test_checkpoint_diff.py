import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import batch, dlrm, trained
from test_checkpoint_files import as_format_2, rewrite_manifest
from test_checkpoint_shards import some_rows, write

import cupyrec
from cupyrec import checkpoint, checkpoint_diff, nn, optim
from cupyrec.checkpoint_diff import diff
from cupyrec.checkpoint_reshard import reshard
from cupyrec.embedding import Rows, Uniform

PARTS = ("vectors", "state.m", "state.t")


@pytest.fixture(params=[1, 5], ids=["at-once", "in-parts"])
def parts(request, monkeypatch):
    """The comparison of tables small enough for memory, and of others."""
    if request.param > 1:
        monkeypatch.setattr(checkpoint_diff, "_BYTES", 100)
    return request.param


def truth(a, b):
    """The same in plain loops over dicts: (table, id) -> part -> list of numbers."""
    found = {}
    for key in [*a, *(key for key in b if key not in a)]:
        new = {"common": 0, "only_a": 0, "only_b": 0, "differ": {}, "largest": {}}
        table = found.setdefault(f"g.{key[0]}", new)
        table["only_b" if key not in a else "only_a" if key not in b else "common"] += 1
        if key in a and key in b:
            for part in PARTS:
                far = max(abs(x - y) for x, y in zip(a[key][part], b[key][part], strict=True))
                if far:
                    table["differ"][part] = table["differ"].get(part, 0) + 1
                    table["largest"][part] = max(table["largest"].get(part, 0), far)
    return found


def as_dict(rows):
    values = {"vectors": rows.vectors, **{f"state.{k}": v for k, v in rows.states.items()}}
    return {
        (int(t), int(i)): {part: values[part][n].tolist() for part in PARTS}
        for n, (t, i) in enumerate(zip(rows.tables, rows.ids, strict=True))
    }


KEYS = st.lists(st.tuples(st.integers(0, 2), st.integers(-5, 15)), unique=True, max_size=30)


@given(KEYS, KEYS, st.integers(0, 2**32 - 1))
def test_tables_are_compared_as_loops_compare_them(keys_a, keys_b, seed):
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(checkpoint_diff, "_BYTES", int(rng.choice([100, 1 << 20])))
        sides, truths = [], []
        for side, keys in (("a", keys_a), ("b", keys_b)):
            tables, ids = np.array(keys, np.int64).reshape(-1, 2).T
            rows = some_rows(tables, ids)
            for values in (rows.vectors, *rows.states.values()):
                values += (rng.random(values.shape) < 0.1).astype(values.dtype)
            folder = Path(name) / side
            folder.mkdir()
            sides.append(checkpoint_diff._Side(folder, write(folder, [[rows], []])))
            truths.append(as_dict(rows))
        assert checkpoint_diff._of_group(*sides, None) == truth(*truths)


def test_shards_formats_and_order_make_no_difference(parts, tmp_path):
    model, optimizer = trained(optim.CatchUpAdam, ids=range(50))
    checkpoint.save(tmp_path / "c", model, optimizer, config={"a": 1}, progress={"step": 3})
    checkpoint.save(tmp_path / "d", model, optimizer)
    rewrite_manifest(tmp_path / "c", as_format_2)
    reshard(tmp_path / "d", tmp_path / "e", 3)
    for other in "cde":
        told = diff(tmp_path / "c", tmp_path / other)
        table = {"common": 50, "only_a": 0, "only_b": 0, "differ": {}, "largest": {}}
        assert told == {
            "equal": True, "dense": {}, "settings": [],
            "tables": {f"embedding.groups.3.{t}": table for t in range(2)},
        }  # fmt: skip


def test_another_step_is_told(parts, tmp_path):
    model, optimizer = trained(optim.Adam, ids=range(30))
    checkpoint.save(tmp_path / "a", model, optimizer)
    before = model.state_dict()["top.weights.0"].copy()
    vectors = dict(zip(*model.embedding.export_table(1), strict=True))
    cupyrec.train_step(model, batch([3, 4, 99]), optimizer)
    checkpoint.save(tmp_path / "b", model, optimizer)
    told = diff(tmp_path / "a", tmp_path / "b")
    assert not told["equal"]
    table = told["tables"]["embedding.groups.3.1"]
    assert (table["common"], table["only_a"], table["only_b"]) == (30, 0, 1)
    assert table["differ"] == dict.fromkeys(["vectors", "state.m", "state.v"], 2)
    after = dict(zip(*model.embedding.export_table(1), strict=True))
    largest = max(abs(after[i].astype(float) - vectors[i]).max() for i in (3, 4))
    assert table["largest"]["vectors"] == largest > 0
    moved = abs(model.state_dict()["top.weights.0"].astype(float) - before).max()
    assert told["dense"]["parameter/top.weights.0"] == moved > 0
    assert told["settings"] == ["optimizer"]  # its number of steps
    back = diff(tmp_path / "b", tmp_path / "a")
    assert back["tables"]["embedding.groups.3.1"]["only_a"] == 1
    assert back["dense"] == told["dense"]


def test_other_layouts(tmp_path):
    model, optimizer = trained(optim.Adam)
    checkpoint.save(tmp_path / "a", model, optimizer)
    checkpoint.save(tmp_path / "b", model)
    told = diff(tmp_path / "a", tmp_path / "b")
    assert not told["equal"]
    assert told["settings"] == ["optimizer", "embedding.groups.3: state"]
    assert all(found["differ"] == {} for found in told["tables"].values())
    assert told["dense"]["optimizer/m/top.weights.0"] is None
    assert "parameter/top.weights.0" not in told["dense"]
    wide = dlrm(width=4)
    wide.embedding.import_table(0, np.array([7]), np.ones((1, 4), np.float32))
    checkpoint.save(tmp_path / "w", wide)
    told = diff(tmp_path / "b", tmp_path / "w")
    assert told["tables"]["embedding.groups.3.0"]["only_a"] == 6
    assert told["tables"]["embedding.groups.4.0"]["only_b"] == 1
    assert {"embedding.groups.3", "embedding.groups.4"} <= set(told["settings"])
    assert told["dense"]["parameter/top.weights.0"] is None  # another shape


def test_a_seed_counts_though_there_are_no_rows(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        layer = nn.MultiTableEmbedding(1, 2, initializer=Uniform(0, seed), seed=seed)
        checkpoint.save(tmp_path / name, layer)
    told = diff(tmp_path / "a", tmp_path / "b")
    assert told["settings"] == ["groups.2: seed", "groups.2: initial"]
    assert told["tables"] == {}


def test_bits_count_and_nan_is_far(tmp_path):
    entry = {"name": "g", "width": 1, "state": []}
    sides = []
    for side, values in (("a", [0.0, np.nan, np.nan]), ("b", [-0.0, np.nan, 1.0])):
        (tmp_path / side).mkdir()
        vectors = np.array(values, np.float32)[:, None]
        rows = Rows(np.zeros(3, np.uint32), np.arange(3), vectors, {})
        sides.append(
            checkpoint_diff._Side(tmp_path / side, write(tmp_path / side, [[rows]], entry))
        )
    (table,) = checkpoint_diff._of_group(*sides, None).values()
    assert (table["common"], table["differ"]) == (3, {"vectors": 2})
    assert table["largest"] == {"vectors": np.inf}


def test_the_folder_for_parts_is_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_diff, "_BYTES", 100)
    checkpoint.save(tmp_path / "a", *trained())
    (tmp_path / "scratch").mkdir()
    seen = []
    join = checkpoint_diff._join
    monkeypatch.setattr(checkpoint_diff, "_join", lambda *a: (seen.append(a[1].folder), join(*a)))
    assert diff(tmp_path / "a", tmp_path / "a", scratch=tmp_path / "scratch")["equal"]
    assert len(seen) == 6  # 12 rows of 48 bytes, 100 at a time
    assert all((tmp_path / "scratch") in folder.parents for folder in seen)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_damage_is_not_taken_for_a_difference(tmp_path):
    checkpoint.save(tmp_path / "a", *trained())
    reshard(tmp_path / "a", tmp_path / "b", 1)
    (file,) = (tmp_path / "b").glob("*.vectors.npy")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    for pair in (("a", "b"), ("b", "a")):
        with pytest.raises(ValueError, match=re.escape(str(file))):
            diff(*(tmp_path / name for name in pair))

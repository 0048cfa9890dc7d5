import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from test_checkpoint import batch, dlrm, trained

import cupyrec
from cupyrec import checkpoint, checkpoint_shards, nn, optim
from cupyrec.checkpoint_diff import diff
from cupyrec.checkpoint_export import export
from cupyrec.checkpoint_import import import_table
from cupyrec.checkpoint_reshard import reshard
from cupyrec.embedding import Life


def write(folder, form, ids, vectors):
    if form == "npy":
        np.save(folder / "x.ids.npy", ids)
        np.save(folder / "x.vectors.npy", vectors)
        return folder / "x.ids.npy"
    numbers = pa.array(vectors.reshape(-1))
    lists = pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])
    if form == "lists":  # as others write them
        lists = lists.cast(pa.list_(numbers.type))
    parquet.write_table(pa.table({"label": ids, "id": ids, "vector": lists}), folder / "x.parquet")
    return folder / "x.parquet"


@pytest.mark.parametrize("name", ["Adam", "CatchUpAdam", "FTRL"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", ["parquet", "lists", "npy"])
def test_as_the_tables_import_them(form, dtype, name, tmp_path, monkeypatch):
    """The checkpoint is that of a model into which the same was imported."""
    monkeypatch.setattr(checkpoint_shards, "_ROWS", 16)
    kind = getattr(optim, name)
    model, optimizer = trained(kind, ids=range(40), embedding_dtype=dtype)
    cupyrec.train_step(model, batch([3, 4]), optimizer)
    checkpoint.save(tmp_path / "one", model, optimizer)
    reshard(tmp_path / "one", tmp_path / "c", 3)
    ids = np.arange(30, 70, dtype=np.int64 if form == "npy" else np.uint64)
    vectors = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    file = write(tmp_path, form, ids, vectors)
    told = import_table(file, tmp_path / "c", tmp_path / "d", "1")
    assert told == {"imported": 40, "replaced": 10}
    model.embedding.import_table(1, ids, vectors)
    checkpoint.save(tmp_path / "expected", model, optimizer)
    assert diff(tmp_path / "d", tmp_path / "expected")["equal"]
    assert len(checkpoint.verify(tmp_path / "d")["groups"][0]["shards"]) == 3
    fresh = dlrm(embedding_dtype=dtype)
    checkpoint.load(tmp_path / "d", fresh, kind(fresh.parameters(), 0.1))
    assert fresh.embedding.digest() == model.embedding.digest()


@pytest.mark.parametrize("form", ["parquet", "npy"])
def test_into_a_table_without_rows_and_from_an_export(form, tmp_path):
    model, _ = trained()
    checkpoint.save(tmp_path / "full", model)
    export(tmp_path / "full", tmp_path / "e", format=form, tables=["1"])
    checkpoint.save(tmp_path / "empty", dlrm())
    name = "embedding.groups.3.1"
    file = tmp_path / "e" / f"{name}.{'parquet' if form == 'parquet' else 'ids.npy'}"
    told = import_table(file, tmp_path / "empty", tmp_path / "empty", name, overwrite=True)
    assert told == {"imported": 6, "replaced": 0}
    fresh = dlrm()
    checkpoint.load(tmp_path / "empty", fresh)
    for got, expected in zip(
        fresh.embedding.export_table(1), model.embedding.export_table(1), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    assert fresh.embedding.export_table(0)[0].size == 0


@pytest.mark.parametrize("form", ["parquet", "npy"])
def test_a_file_without_rows_changes_nothing(form, tmp_path):
    checkpoint.save(tmp_path / "c", *trained())
    file = write(tmp_path, form, np.empty(0, np.int64), np.empty((0, 3), np.float32))
    told = import_table(file, tmp_path / "c", tmp_path / "d", "0")
    assert told == {"imported": 0, "replaced": 0}
    assert diff(tmp_path / "c", tmp_path / "d")["equal"]


@pytest.mark.parametrize("form", ["parquet", "npy"])
@pytest.mark.parametrize(
    ("ids", "vectors", "error", "rule"),
    [
        ([1, 2, 1], np.ones((3, 3), np.float32), ValueError,
         "must have an id once, got 1 twice or more."),
        ([1, 2], np.ones((2, 4), np.float32), ValueError,
         "'vectors' must have shape (2, 3)|'vectors' must have"),
        ([1, 2], np.ones((2, 3)), TypeError, "'vectors' must be float32, got float64."),
        ([1.0], np.ones((1, 3), np.float32), TypeError, "'ids' must be"),
        ([1, 2], np.array([[0, 1, 2], [3, np.nan, 4]], np.float32), ValueError,
         "'vectors' must be finite, got 1 of 2 not."),
    ],
)  # fmt: skip
def test_refuses(ids, vectors, error, rule, form, tmp_path):
    checkpoint.save(tmp_path / "c", *trained())
    file = write(tmp_path, form, np.array(ids), vectors)
    with pytest.raises(error) as caught:
        import_table(file, tmp_path / "c", tmp_path / "d", "0")
    assert any(part in str(caught.value) for part in rule.split("|"))
    assert not (tmp_path / "d").exists()


def test_refuses_large_numbers_in_halves(tmp_path):
    checkpoint.save(tmp_path / "c", dlrm(embedding_dtype="float16"))
    file = write(tmp_path, "npy", np.array([1]), np.full((1, 3), 1e5, np.float32))
    with pytest.raises(ValueError, match="must lie within float16, up to 65504, got 100000"):
        import_table(file, tmp_path / "c", tmp_path / "d", "0")


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"id": [1]}, "must have columns id and vector, got ['id']."),
        ({"id": [1], "vector": [1.0]}, "must have vectors in lists, got double."),
        ({"id": [1, None], "vector": [[1.0], [2.0]]}, "must have no nulls, got some."),
        (
            {"id": [1, 2], "vector": [[1.0], [2.0, 3.0]]},
            "must have vectors of one width, got [1, 2]",
        ),
    ],
)
def test_refuses_other_parquet(columns, rule, tmp_path):
    checkpoint.save(tmp_path / "c", dlrm())
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    text = re.escape(f"import: '{tmp_path / 'x.parquet'}' {rule}")
    with pytest.raises(ValueError, match=text):
        import_table(tmp_path / "x.parquet", tmp_path / "c", tmp_path / "d", "0")


def test_refuses_other_files(tmp_path):
    checkpoint.save(tmp_path / "c", dlrm())
    (tmp_path / "x.parquet").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="x.parquet' must be Parquet, got: "):
        import_table(tmp_path / "x.parquet", tmp_path / "c", tmp_path / "d", "0")
    with pytest.raises(ValueError, match=r"'file' must end in .parquet or .ids.npy, got "):
        import_table(tmp_path / "x.csv", tmp_path / "c", tmp_path / "d", "0")
    np.save(tmp_path / "x.ids.npy", np.array([1, 2]))
    with pytest.raises(FileNotFoundError, match=r"x.vectors.npy"):
        import_table(tmp_path / "x.ids.npy", tmp_path / "c", tmp_path / "d", "0")
    np.save(tmp_path / "x.vectors.npy", np.ones((1, 3), np.float32))
    with pytest.raises(ValueError, match="'vectors' must have N = 2 like 'ids', got shape"):
        import_table(tmp_path / "x.ids.npy", tmp_path / "c", tmp_path / "d", "0")
    with pytest.raises(ValueError, match="must name one of embedding.groups.3.0, "):
        import_table(tmp_path / "x.ids.npy", tmp_path / "c", tmp_path / "d", "2")


def test_account_begins_with_what_is_imported(tmp_path):
    """A table whose ids that wait for rows are none of its rows, as an export shows."""

    def built():
        life = Life(admit_after=2, expire_after=50, check_every=10)
        layer = nn.MultiTableEmbedding(1, 3, life=life)
        return layer, optim.Adagrad(layer.parameters(), 0.1)

    def train(layer, optimizer, ids, steps):
        for _ in range(steps):
            cupyrec.sum(layer(np.array(ids)[:, None])).backward()
            optimizer.step()

    layer, optimizer = built()
    train(layer, optimizer, [1], 95)
    train(layer, optimizer, [8], 1)
    checkpoint.save(tmp_path / "a", layer, optimizer)
    told = export(tmp_path / "a", tmp_path / "e", format="npy")["tables"]
    assert {name: table["ids"] for name, table in told.items()} == {"groups.3.0": 1}
    file = write(tmp_path, "npy", np.array([7, 9]), np.ones((2, 3), np.float32))
    assert import_table(file, tmp_path / "a", tmp_path / "b", "0")["imported"] == 2
    again, its_optimizer = built()
    checkpoint.load(tmp_path / "b", again, its_optimizer)
    train(again, its_optimizer, [1, 8], 5)
    assert again.group.clock == 101 and set(again.export_table(0)[0]) == {1, 7, 8, 9}

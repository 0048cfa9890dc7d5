"""Files of any kind."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from oracle import sentence
from pyarrow import parquet

from cupyrec.data import TSV, Column, NumPyFiles, Parquet, Schema, open_dataset
from cupyrec.data.open_dataset import kind_of

SCHEMA = Schema([Column("label", "label"), Column("I1", "numeric"),
                 Column("C1", "categorical", "integer")])  # fmt: skip


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    (tmp_path / "a.tsv").write_text("1\t2.5\t7\n0\t1\t8\n")
    table = pa.table({"C1": [7, 8], "I1": [2.5, 1], "label": [1, 0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    np.save(tmp_path / "a_dense.npy", np.array([[2.5], [1]]))
    np.save(tmp_path / "a_sparse.npy", np.array([[7], [8]]))
    np.save(tmp_path / "a_labels.npy", np.array([1, 0]))
    return {"text": tmp_path / "a.tsv", "parquet": tmp_path / "a.parquet", "npy": tmp_path / "a"}


def test_all_kinds_give_the_same_rows(files) -> None:
    made = {"text": TSV, "parquet": Parquet, "npy": NumPyFiles}
    for kind, path in files.items():
        assert kind_of(path) == kind
        for paths in (path, str(path), [path], [path, path][: 1 if kind == "npy" else 2]):
            data = open_dataset(paths, SCHEMA)
            assert type(data) is made[kind]
            batch = next(data.batches(2))
            assert batch.dense.tolist() == [[2.5], [1]]
            assert batch.ids.tolist() == [[7], [8]]
            assert batch.labels.tolist() == [[1], [0]]
        assert next(open_dataset(path, SCHEMA, labels=False).batches(2)).labels is None


def test_which_need_a_schema(files) -> None:
    assert open_dataset(files["npy"]).schema == SCHEMA
    assert open_dataset(f"{files['npy']}_sparse.npy").schema == SCHEMA
    assert open_dataset(files["text"]).num_tables == 39
    path = files["parquet"]
    message = f"{path}: must come with a schema, got none. `cupyrec data inspect '{path}' --out"
    with pytest.raises(ValueError, match=message):
        open_dataset(path)


def test_kinds_are_not_mixed(files) -> None:
    text, other = files["text"], files["parquet"]
    with pytest.raises(
        ValueError, match=sentence(f"{other}: must be text as '{text}' is, got parquet.")
    ):
        open_dataset([text, other], SCHEMA)
    with pytest.raises(ValueError, match="must name at least one file"):
        open_dataset([], SCHEMA)


def test_malformed_lines_of_text_may_be_skipped(files) -> None:
    files["text"].write_text("1\t2.5\t7\nx\n0\t1\t8\n")
    data = open_dataset(files["text"], SCHEMA, on_error="skip")
    assert sum(map(len, data.batches(9))) == 2
    with pytest.raises(ValueError, match="line 2"):
        list(open_dataset(files["text"], SCHEMA).batches(9))


def test_a_folder_is_no_file(files, monkeypatch) -> None:
    monkeypatch.chdir(files["text"].parent)
    for path in (".", "..", files["text"].parent):
        with pytest.raises(IsADirectoryError, match="must be a file, got a folder"):
            open_dataset(path, SCHEMA)

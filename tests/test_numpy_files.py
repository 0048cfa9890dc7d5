"""Memory-mapped .npy files, in the layout of Criteo's 1TB log."""

import os
import re

import numpy as np
import pytest
from oracle import sentence

import cupyrec
from cupyrec import models
from cupyrec.data import Column, NumPyFiles, Schema, criteo_schema


@pytest.fixture
def write(tmp_path):
    def write(day: str, rows: int, seed: int = 0, **changes) -> str:
        rng = np.random.default_rng(seed)
        arrays = {
            "dense": rng.normal(size=(rows, 2)).astype("f"),
            "sparse": rng.integers(-9, 9, (rows, 3)).astype(np.int32),
            "labels": rng.integers(0, 2, rows).astype(np.int32),
        } | changes
        for name, array in arrays.items():
            if array is not None:
                np.save(tmp_path / f"{day}_{name}.npy", array)
        return str(tmp_path / day)

    return write


def whole(*prefixes: str) -> list[np.ndarray]:
    return [np.concatenate([np.load(f"{p}_{name}.npy") for p in prefixes])
            for name in ("dense", "sparse", "labels")]  # fmt: skip


@pytest.mark.parametrize("size", [1, 4, 9, 100])
@pytest.mark.parametrize(("ranks", "skip"), [(1, 0), (1, 2), (3, 0), (3, 1), (5, 0)])
def test_rows_of_all_days_in_order(write, size, ranks, skip) -> None:
    prefixes = [write("day_0", 5, 0), write("day_1", 1, 1), write("day_2", 7, 2)]
    dense, ids, labels = whole(*prefixes)
    data = NumPyFiles(prefixes)
    assert (data.num_dense, data.num_tables, data.task_names) == (2, 3, ["label"])
    steps = [*zip(*(data.of_rank(r, ranks).batches(size, skip=skip) for r in range(ranks)),
                  strict=True)]  # fmt: skip
    assert len(steps) == max(-(-13 // size) - skip, 0)
    for number, step in enumerate(steps, skip):
        rows = slice(number * size, (number + 1) * size)
        for name, truth in (("dense", dense), ("ids", ids), ("labels", labels[:, None])):
            got = np.concatenate([getattr(batch, name) for batch in step])
            assert got.tolist() == truth[rows].tolist()
            assert got.dtype == (np.int64 if name == "ids" else np.float32)
        assert {batch.total for batch in step} == {len(dense[rows])}
        assert [b.first for b in step] == [sum(map(len, step[:r])) for r in range(ranks)]


def test_files_of_a_prefix_are_named_by_any_of_them(write) -> None:
    prefix, other = write("day_0", 3), write("day_1", 4)
    paths = [f"{p}_{n}.npy" for p in (prefix, other) for n in ("dense", "labels", "sparse")]
    for given in ([prefix, other], paths, paths[::3]):  # as a shell's * has them, too
        assert sum(map(len, NumPyFiles(given).batches(10))) == 7
    assert len(next(NumPyFiles(prefix).batches(10))) == 3


def test_dtypes(write) -> None:
    ids = np.array([[2**64 - 1, 0], [5, 7]], np.uint64)
    prefix = write("day", 2, sparse=ids, dense=np.zeros((2, 0)), labels=np.array([[True], [False]]))
    (batch,) = NumPyFiles(prefix).batches(2)
    assert batch.ids.tolist() == [[-1, 0], [5, 7]]
    assert batch.labels.tolist() == [[1], [0]]


def test_predicting_needs_no_labels(write) -> None:
    prefix = write("day", 4, labels=None)
    with pytest.raises(FileNotFoundError, match=f"{prefix}_labels.npy: must be a file"):
        NumPyFiles(prefix)
    data = NumPyFiles(prefix, labels=False)
    model = models.DLRM(2, 3)
    assert cupyrec.predict(model, data).shape == (4,)
    assert next(data.batches(9)).labels is None


def test_schemas_that_go_with_them(write) -> None:
    prefix = write("day", 4)
    schema = NumPyFiles(prefix).schema
    assert NumPyFiles(prefix, schema).schema is schema
    assert [column.name for column in schema.columns] == ["label", "I1", "I2", "C1", "C2", "C3"]
    message = f"{prefix}_dense.npy: must have 1 values and 3 ids as the schema has, got 2 and 3."
    with pytest.raises(ValueError, match=sentence(message)):
        NumPyFiles(prefix, Schema([c for c in schema.columns if c.name != "I1"]))
    with pytest.raises(ValueError, match="column 'I1': of .npy files it must be a label, plain"):
        NumPyFiles(prefix, criteo_schema())
    with pytest.raises(ValueError, match="its schema must have one label, got 2"):
        NumPyFiles(prefix, Schema([*schema.columns, Column("buy", "label")]))


@pytest.mark.parametrize(("changes", "kind", "message"), [
    ({"dense": np.zeros((4, 2), int)}, TypeError, "dense.npy: must be floats, got int64."),
    ({"sparse": np.zeros((4, 3))}, TypeError, "sparse.npy: must be integers, got float64."),
    ({"sparse": np.zeros((3, 3), int)}, ValueError,
     "sparse.npy: must have 4 rows as day_dense.npy has, got 3."),
    ({"labels": np.zeros(5)}, ValueError, "labels.npy: must have 4 rows as day_dense.npy has, got 5."),  # noqa: E501
    ({"labels": np.zeros((4, 2))}, ValueError, "labels.npy: must have 1 columns, got 2."),
    ({"dense": np.zeros(4)}, ValueError, "dense.npy: must have rows and columns, got shape (4,)."),
    ({"dense": np.zeros((0, 2))}, ValueError, "dense.npy: must have at least one row, got none."),
])  # fmt: skip
def test_arrays_are_checked_at_once(write, changes, kind, message) -> None:
    prefix = write("day", 4, **changes)
    with pytest.raises(kind, match=sentence(f"{prefix}_{message}")):
        NumPyFiles(prefix)


def test_days_are_alike(write) -> None:
    prefixes = write("day_0", 4), write("day_1", 4, sparse=np.zeros((4, 2), int))
    message = f"{prefixes[1]}_sparse.npy: must have 3 columns, got 2."
    with pytest.raises(ValueError, match=sentence(message)):
        NumPyFiles(prefixes)


def test_values_are_checked_as_they_are_read(write) -> None:
    dense, labels = np.zeros((4, 2)), np.zeros(4)
    dense[3, 1], labels[2] = np.nan, 2
    prefix = write("day", 4, dense=dense)
    message = f"{prefix}_dense.npy, row 3, column 1: must be finite numbers, got nan."
    with pytest.raises(ValueError, match=sentence(message)):
        list(NumPyFiles(prefix).batches(3))
    prefix = write("other", 4, labels=labels)
    message = f"{prefix}_labels.npy, row 2, column 0: labels must be 0 or 1, got 2.0."
    with pytest.raises(ValueError, match=sentence(message)):
        list(NumPyFiles(prefix).batches(3))
    dense[3, 1] = 1e300
    with pytest.raises(ValueError, match="row 3, column 1: must be finite numbers, got 1e"):
        list(NumPyFiles(write("large", 4, dense=dense)).batches(4))


def test_damaged_and_changed_files(write, tmp_path) -> None:
    prefix = write("day", 400)
    np.savez(tmp_path / "archive.npz", prefix=[1])
    archive = (tmp_path / "archive.npz").read_bytes()
    data = NumPyFiles(prefix)
    path = tmp_path / "day_sparse.npy"
    state, content = path.stat(), path.read_bytes()
    os.utime(path, ns=(0, state.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=f"{path}: must stay as it was when the dataset was made"):
        data.batches(3)
    endless = content[:10] + re.sub(rb"\(\d+", b"(" + b"9" * 20, content[10:])
    for broken in (content[:-1], content[:9], b"", b"1,2,3\n", endless, archive):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"{path}: must be a whole \.npy file, got: .*\.$"):
            NumPyFiles(prefix)
    with pytest.raises(ValueError, match="NumPyFiles.batches: 'skip' must be at least 0, got -1"):
        data.batches(3, skip=-1)

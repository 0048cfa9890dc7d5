import re
import tracemalloc

import numpy as np
import oracle
import pytest
import trial

from cupyrec import checkpoint_shards
from cupyrec.checkpoint_shards import ShardWriter, divided, read_keys, read_rows
from cupyrec.embedding import Rows

ENTRY = {"name": "g", "width": 2, "state": [["m", 2, 0.0, "float32"], ["t", 1, 0, "int32"]]}


def some_rows(tables, ids):
    """Rows whose numbers follow from their keys."""
    tables, ids = np.asarray(tables, np.uint32), np.asarray(ids, np.int64)
    vectors = np.stack([tables, ids % 1000], axis=1).astype(np.float32)
    return Rows(tables, ids, vectors, {"m": -vectors, "t": (ids % 77).astype(np.int32)[:, None]})


def write(folder, shards, entry=ENTRY):
    """Write shards, lists of rows; return the entry with them."""
    for number, rows in enumerate(shards):
        name = checkpoint_shards.shard_name(number, len(shards))
        with ShardWriter(folder, entry, name, sum(len(r.ids) for r in rows)) as writer:
            for part in rows:
                writer.write(part)
    return divided(entry, [sum(len(r.ids) for r in rows) for rows in shards])


def check_rows(got, expected):
    for a, b in zip(got[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    assert got.states.keys() == expected.states.keys()
    for name, state in got.states.items():
        np.testing.assert_array_equal(state, expected.states[name])


def test_shards_come_one_after_the_other(tmp_path):
    a, b, c = some_rows([0, 1], [5, 6]), some_rows([], []), some_rows([2], [-(2**63)])
    entry = write(tmp_path, [[a, c], [b], []])
    assert entry["rows"] == 3
    assert [shard["rows"] for shard in entry["shards"]] == [3, 0, 0]
    (got,) = read_rows(tmp_path, entry)
    check_rows(got, some_rows([0, 1, 2], [5, 6, -(2**63)]))
    assert np.load(tmp_path / "g.00000-of-00003.state.t.npy").dtype == np.int32
    assert np.load(tmp_path / "g.00001-of-00003.vectors.npy").shape == (0, 2)


def test_the_files_are_told(tmp_path):
    with ShardWriter(tmp_path, ENTRY, "00000-of-00001", 1) as writer:
        writer.write(some_rows([3], [4]))
    files = trial.files(tmp_path)
    assert list(writer.files) == [f"g.00000-of-00001.{part}.npy" for part in (
        "tables", "ids", "vectors", "state.m", "state.t",
    )]  # fmt: skip
    for name, told in writer.files.items():
        assert told["bytes"] == len(files[name])
    with pytest.raises(ValueError, match="ShardWriter: 1 more rows must be written, got none."):
        write_too_few(tmp_path)


def write_too_few(folder):
    with ShardWriter(folder, ENTRY, "00000-of-00001", 2) as writer:
        writer.write(some_rows([3], [4]))


def test_pieces_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_shards, "_ROWS", 4)
    rows = some_rows(np.arange(11) % 3, np.arange(11) - 5)
    entry = write(tmp_path, [[rows]])
    pieces = list(read_rows(tmp_path, entry))
    assert [len(piece.ids) for piece in pieces] == [4, 4, 3]
    check_rows(pieces[1], some_rows(rows.tables[4:8], rows.ids[4:8]))
    assert [(k.shard, k.first) for k in read_keys(tmp_path, entry)] == [
        ("00000-of-00001", first) for first in (0, 4, 8)
    ]


def test_memory_is_bounded(tmp_path):
    entry = {"name": "g", "width": 64, "state": []}
    n, count = 4096, 100
    with ShardWriter(tmp_path, entry, "00000-of-00001", n * count) as writer:
        for i in range(count):
            ids = np.arange(n) + i * n
            writer.write(Rows(np.zeros(n, np.uint32), ids, np.ones((n, 64), np.float32), {}))
    entry = divided(entry, [n * count])  # 105 MB
    tracemalloc.start()
    try:
        assert sum(len(rows.ids) for rows in read_rows(tmp_path, entry)) == n * count
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


def test_only_what_is_wanted_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_shards, "_ROWS", 4)
    rows = some_rows(np.zeros(12), np.arange(12))
    entry = write(tmp_path, [[rows]])
    file = tmp_path / "g.00000-of-00001.vectors.npy"
    file.write_bytes(file.read_bytes()[:-1])  # of the last row
    got = list(read_rows(tmp_path, entry, lambda tables, ids: ids % 5 == 2))
    assert [piece.ids.tolist() for piece in got] == [[2], [7]]
    check_rows(got[1], some_rows([0], [7]))
    text = f"checkpoint: '{file}' must go on for 1 bytes, got its end at {128 + 95}."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        list(read_rows(tmp_path, entry))


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int32), np.zeros((3, 1), np.int64), np.zeros(3)])
def test_a_file_of_another_shape_is_refused(wrong, tmp_path):
    entry = write(tmp_path, [[some_rows([0], [1])], [some_rows([0, 0], [2, 3])]])
    file = tmp_path / "g.00001-of-00002.ids.npy"
    np.save(file, wrong)
    text = f"checkpoint: '{file}' must have shape (2,) and dtype int64, "
    with pytest.raises(ValueError, match=re.escape(text)):
        list(read_rows(tmp_path, entry))
    file.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=re.escape(f"checkpoint: '{file}' must be .npy, got ")):
        list(read_rows(tmp_path, entry))

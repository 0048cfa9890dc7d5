import re
import tracemalloc

import numpy as np
import oracle
import pytest
from test_checkpoint import trained
from test_checkpoint_files import rewrite_manifest
from test_checkpoint_shards import some_rows, write

from cupyrec import checkpoint, checkpoint_checks
from cupyrec.checkpoint_checks import check, check_unique


def test_all_is_well(tmp_path):
    checkpoint.save(tmp_path / "c", *trained())
    assert check(tmp_path / "c") == checkpoint.read_manifest(tmp_path / "c")


def more_rows(manifest):
    manifest["groups"][0]["rows"] += 1


def more_rows_of_a_shard(manifest):
    more_rows(manifest)
    manifest["groups"][0]["shards"][0]["rows"] += 1


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (more_rows, "must have 13 rows together, got 12."),
        (more_rows_of_a_shard, "must have shape (13,) and dtype uint32, got (12,) and uint32."),
    ],
)
def test_counts_that_are_wrong(change, rule, tmp_path):
    checkpoint.save(tmp_path / "c", *trained())
    rewrite_manifest(tmp_path / "c", change)
    assert checkpoint.verify(tmp_path / "c")
    for refuse in (check, lambda path: checkpoint.load(path, *trained())):
        with pytest.raises(ValueError, match=re.escape(rule)):
            refuse(tmp_path / "c")


def test_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_checks, "_KEYS", 1 << 16)
    rows = some_rows(np.zeros(500_000), np.arange(500_000))
    entry = write(tmp_path, [[rows]])
    del rows
    tracemalloc.start()
    try:
        check_unique(tmp_path, entry)
        assert tracemalloc.get_traced_memory()[1] < 4e6  # hashes of all keys are as many bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("most", [2, 1 << 25])
def test_a_key_in_two_shards_is_named(most, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_checks, "_KEYS", most)  # sorted at once
    shards = [[some_rows([0, 1, 2], [5, 5, -7])], [some_rows([3, 0], [5, 6])]]
    check_unique(tmp_path, write(tmp_path, shards))
    shards.append([some_rows([9, 2], [9, -7])])
    entry = write(tmp_path, shards)
    text = (
        "checkpoint: id -7 of table 2 must be there once, got it in row 2 of "
        f"'{tmp_path / 'g.00000-of-00003.ids.npy'}' and in row 1 of "
        f"'{tmp_path / 'g.00002-of-00003.ids.npy'}'."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        check_unique(tmp_path, entry)
    check_unique(tmp_path, entry, lambda tables, ids: tables != 2)


def test_keys_that_share_a_hash_are_two_keys(tmp_path):
    tables, ids = oracle.keys_of_equal_hash(3)
    entry = write(tmp_path, [[some_rows(tables[i : i + 1], ids[i : i + 1])] for i in range(3)])
    check_unique(tmp_path, entry)
    entry = write(tmp_path, [[some_rows(tables, ids)], [some_rows(tables[1:2], ids[1:2])]])
    with pytest.raises(ValueError, match=f"id {ids[1]} of table {tables[1]} must be there once"):
        check_unique(tmp_path, entry)

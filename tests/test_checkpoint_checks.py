import re
import tracemalloc

import numpy as np
import oracle
import pytest
from test_checkpoint import trained
from test_checkpoint_files import rewrite_manifest
from test_checkpoint_ranks import parts, save_together
from test_checkpoint_shards import some_rows, write

from cupyrec import checkpoint, checkpoint_checks
from cupyrec.checkpoint_checks import check, check_share, check_unique
from cupyrec.ops.partition import owners


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


@pytest.fixture(scope="module")
def three_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    built = parts(*trained(ids=range(40)), 3, folder)
    assert save_together(folder / "c", built) == [None] * 3
    return folder / "c"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_file_is_checked_by_one_rank(three_shards, ranks, monkeypatch):
    manifest, read = checkpoint.read_manifest(three_shards), []
    checked = checkpoint_checks.check_files

    def note(folder, files):
        read.append([*files])
        checked(folder, files)

    monkeypatch.setattr(checkpoint_checks, "check_files", note)
    for rank in range(ranks):
        assert check_share(three_shards, manifest, rank, ranks) == [True]
    assert sorted(name for names in read for name in names) == sorted(manifest["files"])
    if ranks == 3:
        for rank, names in enumerate(read):
            others = [name for name in names if f".0000{rank}-of-00003." not in name]
            assert others == ["dense.safetensors"] * (rank == 0)


def test_shards_that_are_none_of_owners_are_told_of(tmp_path):
    model, optimizer = trained(ids=range(40))
    built = parts(model, optimizer, 3, tmp_path)
    assert save_together(tmp_path / "c", built[::-1]) == [None] * 3  # the second is in its place
    manifest = checkpoint.read_manifest(tmp_path / "c")
    told = [check_share(tmp_path / "c", manifest, rank, 3) for rank in range(3)]
    assert told == [[False], [True], [False]]
    assert check(tmp_path / "c") == manifest


def test_a_key_twice_in_a_shard_is_found_by_the_rank_that_checks_it(tmp_path):
    both = some_rows([0] * 40, range(40))
    places = owners(both.tables, both.ids, 2)
    shards = [
        some_rows([0] * (places == shard).sum(), both.ids[places == shard]) for shard in (0, 1)
    ]
    manifest = {"files": {}, "groups": [write(tmp_path, [[part] for part in shards])]}
    assert [check_share(tmp_path, manifest, rank, 2) for rank in (0, 1)] == [[True], [True]]
    again = some_rows([0], shards[1].ids[:1])
    manifest["groups"] = [write(tmp_path, [[shards[0]], [shards[1], again]])]
    assert check_share(tmp_path, manifest, 0, 2) == [True]
    text = f"id {again.ids[0]} of table 0 must be there once, got it in row 0 of "
    with pytest.raises(ValueError, match=text):
        check_share(tmp_path, manifest, 1, 2)

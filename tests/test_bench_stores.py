"""The bench of tiers, on few rows."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


pytestmark = pytest.mark.usefixtures("same_threads")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return runpy.run_path(str(SCRIPTS / "bench_stores.py"))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the script in this process, as the interpreter would; return its figures and stderr."""
    monkeypatch.syspath_prepend(SCRIPTS)

    def call(*words):
        words = ["bench_stores.py", *map(str, words), "--folder", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(str(SCRIPTS / "bench_stores.py"), run_name="__main__")
        said = capsys.readouterr()
        assert list(tmp_path.iterdir()) == []  # its files are gone
        return json.loads(said.out.splitlines()[-1]), said.err

    return call


TINY = "--case ssd --rows 26000 --batch 64 --warm-up 20 --rounds 2 --steps 2".split()


def test_rows_on_disk_beside_memory(run):
    told, said = run(*TINY, "--peer", "none", "--pages")
    for end in ("", "_warm"):
        assert 0 < told[f"ratio_vs_memory{end}"] < 20
        # The cache holds a tenth of the rows; those of 24 steps are fewer, and many are new.
        assert 0.3 < told[f"hit_rate{end}"] <= 1
    assert told["hit_rate"] == told["hit_rate_warm"]  # of the same batches
    assert 0.5 < told["hit_rate_ideal"] < 0.75
    if told["disk_reads_per_second"] is not None:
        assert 0 < told["ratio_allowed"] <= 1
    assert 1 <= told["disk_ratio"] < 50  # a few rows and whole files
    assert {"ratio_vs_rocksdb"}.isdisjoint(told)
    assert len(re.findall(r"^ms a step: {'memory': ", said, re.MULTILINE)) == 2
    assert "26,000 rows on disk, 2,600 in a cache" in said


def test_rocksdb_does_the_same(run):
    pytest.importorskip("rocksdict", reason="the extra bench has it")
    told, said = run(*TINY)
    assert told["ratio_vs_rocksdb"] > 0
    assert len(re.findall(r"^rows of a batch, [\d,]+: [\d.]+ ms, RocksDB ", said, re.M)) == 2


def test_rocksdb_gives_back_rows(bench, tmp_path):
    pytest.importorskip("rocksdict", reason="the extra bench has it")
    popularity = bench["Popularity"](3, 3000, 10, 1.05)
    peer = bench["RocksRows"](tmp_path, 1 << 20, 1)
    bench["load"](peer, popularity, 4)
    for tables, ids in popularity.everything():
        keys = bench["keys_of"](tables, ids)
        rows = peer.get(keys)
        np.testing.assert_array_equal(rows[:, :4], bench["vectors_of"](ids, 4))
        assert not rows[:, 4:].any()
        peer.put(keys, rows + 1)
        np.testing.assert_array_equal(peer.get(keys), rows + 1)
    peer.close()


def test_without_rocksdb_it_says_how_to_get_it(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    monkeypatch.delitem(sys.modules, "bench_peer_rocksdb", raising=False)
    with pytest.raises(SystemExit, match=r"rocksdict must be installed.*--editable '\.\[bench\]'$"):
        run(*TINY)


def test_ids_are_inserted_and_found(run):
    told, _ = run(*"--case insert --ids 20000 --batch 1000".split())
    assert told["ids"] == 20_000
    assert min(told["inserts_per_second"], told["look_ups_per_second"]) > 0
    assert told["peak_rss_bytes"] > 50e6  # Python and NumPy
    assert told["disk_bytes_per_id"] >= 32 + 16


# What it is of


def test_ids_are_as_popular_as_zipf_says(bench):
    popularity = bench["Popularity"](4, 400, 5000, 1.05)
    ranks = np.concatenate([popularity.ranks(step) for step in range(4)])
    assert ranks.shape == (20_000, 4)
    weights = np.arange(1, 101) ** -1.05
    expected = 80_000 * weights / weights.sum()
    counts = np.bincount(ranks.ravel(), minlength=100)
    assert counts.size == 100
    assert (abs(counts - expected) < 6 * np.sqrt(expected)).all()
    np.testing.assert_array_equal(popularity.ranks(2), ranks[10_000:15_000])


def test_every_row_is_there_once_in_no_order_of_rank(bench):
    popularity = bench["Popularity"](4, 400_003, 10, 1.05)
    blocks = list(popularity.everything())
    assert len(blocks) > 1
    tables, ids = (np.concatenate(column) for column in zip(*blocks, strict=True))
    assert (tables.dtype, ids.dtype) == (np.uint32, np.int64)
    assert len(set(zip(tables.tolist(), ids.tolist(), strict=True))) == 400_000
    (batch,) = popularity.batches(3, 4)
    assert batch.shape == (10, 4)
    known = [set(ids[tables == table].tolist()) for table in range(4)]
    assert all(len(each) == 100_000 for each in known)
    assert all(number in known[table] for row in batch.tolist() for table, number in enumerate(row))
    top = set(popularity.ids(np.arange(1000), np.int64(0)).tolist())
    places = [i for i, number in enumerate(ids[tables == 0].tolist()) if number in top]
    assert abs(np.mean(places) - 50_000) < 5000
    assert abs(np.mean(ids < 0) - 0.5) < 0.01


def test_the_ideal_cache_holds_the_most_frequent_rows(bench):
    popularity = bench["Popularity"](2, 2000, 300, 1.05)
    hits = keys = 0
    for step in (5, 6):
        for table, column in enumerate(popularity.ranks(step).T):
            unique = set(column.tolist())
            assert len(unique) < 300
            hits, keys = hits + len(unique & {*range(100)}), keys + len(unique)
            assert table < 2
    assert popularity.ideal_hit_rate(5, 7, 0.1) == hits / keys
    assert popularity.ideal_hit_rate(5, 7, 1.0) == 1


def test_unique_keys_of_a_batch(bench):
    ids = np.array([[5, 5], [6, 5], [5, 7]])
    tables, unique, counts = bench["unique_of"](ids)
    assert list(zip(tables, unique, counts, strict=True)) == [
        (0, 5, 2), (0, 6, 1), (1, 5, 2), (1, 7, 1)]  # fmt: skip


def test_the_store_alone_does_what_a_step_does(bench):
    """Rows in memory: vectors come back, and each is updated as Adagrad says."""
    popularity = bench["Popularity"](26, 2600, 8, 1.05)
    trainer = bench["Trainer"](bench["SSD"] | {"batch": 8}, popularity)
    assert len(trainer.store) == 2600
    tables, ids, counts = bench["unique_of"](popularity.batches(0, 1)[0])
    got = trainer.store_alone(tables, ids, counts)
    np.testing.assert_array_equal(got, bench["vectors_of"](ids, 32))
    again = trainer.store_alone(tables, ids, counts)
    np.testing.assert_allclose(again, got - 0.01 * np.sign(got), atol=2e-5)
    with pytest.raises(AssertionError, match="1 of the ids have no row"):
        trainer.store_alone(tables[:1], ids[:1] + 1, counts[:1])


def test_the_disk_is_read(bench, tmp_path, monkeypatch):
    rates = bench["disk_reads"](tmp_path, 1 << 20)
    if rates is not None:  # where the file system has direct I/O
        assert list(rates) == ["1", "8", "32"]
        assert min(rates.values()) > 0
    path = tmp_path / "four"
    path.write_bytes(bytes(range(256)) * 64)
    buffer = np.zeros(4096, np.uint8)
    with path.open("rb") as file:
        assert bench["read_at"](file.fileno(), buffer.ctypes.data, np.array([8192, 4096]))
        assert buffer.tolist() == [*range(256)] * 16
        assert not bench["read_at"](file.fileno(), buffer.ctypes.data, np.array([16_384]))


@pytest.mark.parametrize("words", [["--case", "none"], ["--case", "ssd", "--rows", "0"]])
def test_it_refuses_what_it_does_not_know(run, words):
    with pytest.raises(SystemExit) as ended:
        run(*words)
    assert ended.value.code == 2

import re
import tempfile
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import oracle
import pytest
import trial
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import batch, dlrm, everything, trained

import cupyrec
from cupyrec import checkpoint, checkpoint_shards, nn, optim
from cupyrec.checkpoint_shards import ShardWriter, check_unique, divided, read_keys, read_rows
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
        check_unique(tmp_path, entry)
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


# Keys that are there twice


@pytest.mark.parametrize("most", [2, 1 << 25])
def test_a_key_in_two_shards_is_named(most, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_shards, "_KEYS", most)  # sorted at once
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


# Many ranks


class Ranks:
    """Threads that stand for ranks."""

    def __init__(self, count):
        self.count, self.told = count, [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def gather(self, rank):
        def gather(value):
            self.told[rank] = value
            self.barrier.wait()
            values = list(self.told)
            self.barrier.wait()
            return values

        return gather

    def run(self, work):
        """Call ``work(rank, gather)`` on all; return what each returned or raised."""
        results = [None] * self.count

        def one(rank):
            try:
                results[rank] = work(rank, self.gather(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def owner(tables, ids, ranks):
    return (tables.astype(np.int64) * 3 + ids) % ranks


def parts(model, optimizer, ranks, folder):
    """Models with the rows of one each: those that a rank would have."""
    checkpoint.save(folder / "whole", model, optimizer)
    built = []
    for rank in range(ranks):
        part = dlrm()
        again = type(optimizer)(part.parameters(), 0.1)
        checkpoint.load(
            folder / "whole", part, again,
            owned=lambda tables, ids, rank=rank: owner(tables, ids, ranks) == rank,
        )  # fmt: skip
        built.append((part, again))
    return built


def save_together(folder, built):
    return Ranks(len(built)).run(
        lambda rank, gather: checkpoint.save(folder, *built[rank], rank=rank, gather=gather)
    )


def load_together(folder, built):
    def load(rank, gather):
        return checkpoint.load(
            folder, *built[rank], rank=rank, gather=gather,
            owned=lambda tables, ids: owner(tables, ids, len(built)) == rank,
        )  # fmt: skip

    return Ranks(len(built)).run(load)


@pytest.mark.parametrize("name", ["Adam", "CatchUpAdam"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_any_number_of_ranks_save_what_any_number_loads(ranks, name, tmp_path):
    kind = getattr(optim, name)
    model, optimizer = trained(kind, ids=range(40))
    cupyrec.train_step(model, batch(range(100, 106)), optimizer)
    built = parts(model, optimizer, ranks, tmp_path)
    sizes = [len(part.embedding.group.store) for part, _ in built]
    assert sum(sizes) == len(model.embedding.group.store) == 92
    assert save_together(tmp_path / "c", built) == [None] * ranks
    manifest = checkpoint.verify(tmp_path / "c")
    (entry,) = manifest["groups"]
    assert [shard["rows"] for shard in entry["shards"]] == sizes
    assert len(manifest["files"]) == 1 + ranks * (3 + len(entry["state"]))
    fresh = dlrm()
    again = kind(fresh.parameters(), 0.1)
    checkpoint.load(tmp_path / "c", fresh, again)
    assert fresh.embedding.digest() == model.embedding.digest()
    same = {key: value for key, value in everything(fresh, again).items() if key[:3] != "row"}
    for key in ("tables", "ids", "vectors"):
        del same[key]
    assert same == {key: everything(model, optimizer)[key] for key in same}
    # By another number of ranks, rows that owe steps without the optimizer, too.
    for count in (1, 3):
        several = [dlrm() for _ in range(count)]
        load_together(tmp_path / "c", [(part,) for part in several])
        stores = [part.embedding.group.store for part in several]
        assert sum(map(len, stores)) == 92
        x = batch([*range(40), *range(100, 106)], tables=2)
        served = model.eval().embedding(x.ids).numpy()
        mine = [part.eval().embedding(x.ids).numpy() for part in several]
        chosen = owner(np.tile([0, 1], (len(x.ids), 1)), x.ids, count)
        for rank in range(count):
            np.testing.assert_allclose(
                mine[rank][chosen == rank], served[chosen == rank], rtol=1e-6, atol=1e-7
            )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1)), unique=True),
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25)
def test_tables_are_the_same_whatever_the_shards(keys, counts, seed):
    def build():
        layer = nn.MultiTableEmbedding(4, 3, seed=1)
        return layer, optim.RowWiseAdagrad(layer.parameters(), 0.1)

    layer, optimizer = build()
    rng = np.random.default_rng(seed)
    for table in range(4):
        ids = np.array([i for t, i in keys if t == table], np.int64)
        vectors = rng.standard_normal((ids.size, 3)).astype(np.float32)
        layer.import_table(table, ids, vectors)
    layer(np.array([[keys[0][1] if keys else 5] * 4])).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0"
        checkpoint.save(path, layer, optimizer)
        for number, count in enumerate(counts, 1):
            built = []
            for rank in range(count):
                built.append(build())
                checkpoint.load(
                    path, *built[-1], owned=lambda t, i, r=rank, n=count: owner(t, i, n) == r
                )
            path = Path(folder) / str(number)
            assert save_together(path, built) == [None] * count
        fresh, again = build()
        checkpoint.load(path, fresh, again)
        assert len(fresh.group.store) == len(layer.group.store)
        assert fresh.digest() == layer.digest()


def test_a_rank_that_fails_fails_all_and_nothing_stands(tmp_path):
    model, optimizer = trained(ids=range(40))
    built = parts(model, optimizer, 3, tmp_path)
    built[1][0].embedding.group.store.update(
        np.arange(1), lambda memory, rows: oracle_nan(built[1][0].embedding.group)
    )
    results = save_together(tmp_path / "c", built)
    assert [type(error) for error in results] == [RuntimeError, FloatingPointError, RuntimeError]
    text = "checkpoint.save: rank 1 must get on, got FloatingPointError: checkpoint.save: vectors"
    assert str(results[0]).startswith(text)
    assert [p.name for p in tmp_path.iterdir()] == ["whole"]
    results = save_together(tmp_path / "whole", built)
    assert [type(error) for error in results] == [FileExistsError, RuntimeError, RuntimeError]


def oracle_nan(group):
    group.store._chunks[0][0, 0] = np.nan


def test_damage_that_one_rank_finds_leaves_all_as_they_were(tmp_path):
    model, optimizer = trained(ids=range(40))
    built = parts(model, optimizer, 4, tmp_path)
    assert save_together(tmp_path / "c", built) == [None] * 4
    before = [everything(*part) for part in built]
    for file in sorted((tmp_path / "c").glob("embedding*")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        results = load_together(tmp_path / "c", built)
        kinds = sorted(type(error).__name__ for error in results)
        assert kinds == ["RuntimeError"] * 3 + ["ValueError"]
        assert all(str(file) in str(error) for error in results)
        file.write_bytes(content)
    assert [everything(*part) for part in built] == before


def test_a_key_in_two_shards_leaves_the_model_as_it_was(tmp_path):
    model, optimizer = trained()
    assert save_together(tmp_path / "c", [(model, optimizer), (model, optimizer)]) == [None] * 2
    other, again = trained(ids=[1, 2])
    before = everything(other, again)
    with pytest.raises(ValueError, match=r"must be there once, got it in row 0 of '.*00000-of-0"):
        checkpoint.load(tmp_path / "c", other, again)
    assert everything(other, again) == before

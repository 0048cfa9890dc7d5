"""Checkpoints that several ranks write, and that several load."""

import json
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import batch, dlrm, everything, trained

import cupyrec
from cupyrec import checkpoint, checkpoint_files, checkpoint_shards, nn, optim
from cupyrec.ops.partition import owners
from cupyrec.parallel import Communicator, OtherRankError


class Thread(Communicator):
    """A rank that is a thread, or by itself stands for one of so many."""

    def __init__(self, rank, size, gather=None):
        super().__init__()
        self.rank, self.size = rank, size
        self.gather = gather or (lambda rank, value: [value] * size)

    def all_gather_json(self, what, value):
        return self.gather(self.rank, value)


class Ranks:
    """Threads that stand for ranks."""

    def __init__(self, count):
        self.count, self.told = count, [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def gather(self, rank, value):
        self.told[rank] = json.loads(json.dumps(value))  # as it would travel
        self.barrier.wait()
        values = list(self.told)
        self.barrier.wait()
        return values

    def run(self, work):
        """Call ``work`` with each rank; return what each returned or raised."""
        results = [None] * self.count

        def one(rank):
            try:
                results[rank] = work(Thread(rank, self.count, self.gather))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def parts(model, optimizer, ranks, folder):
    """Models with the rows of one each: those that a rank would have."""
    checkpoint.save(folder / "whole", model, optimizer)
    built = []
    for rank in range(ranks):
        part = dlrm()
        again = type(optimizer)(part.parameters(), 0.1)
        checkpoint.load(folder / "whole", part, again, ranks=Thread(rank, ranks))
        built.append((part, again))
    return built


def save_together(folder, built):
    return Ranks(len(built)).run(
        lambda ranks: checkpoint.save(folder, *built[ranks.rank], ranks=ranks)
    )


def load_together(folder, built):
    return Ranks(len(built)).run(
        lambda ranks: checkpoint.load(folder, *built[ranks.rank], ranks=ranks)
    )


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
        tables = np.tile(np.uint32([0, 1]), len(x.ids))
        chosen = owners(tables, x.ids.reshape(-1), count).reshape(x.ids.shape)
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
                checkpoint.load(path, *built[-1], ranks=Thread(rank, count))
            path = Path(folder) / str(number)
            assert save_together(path, built) == [None] * count
        fresh, again = build()
        checkpoint.load(path, fresh, again)
        assert len(fresh.group.store) == len(layer.group.store)
        assert fresh.digest() == layer.digest()


def with_adam(model):
    return model, optim.Adam(model.parameters(), 0.1)


@pytest.fixture
def reading(monkeypatch):
    """Files and bytes that were read since: a dict that each part of the code adds to."""
    told = {"opened": set(), "rows": 0, "keys": 0, "checked": 0}
    opening, read = checkpoint_shards._Reader._open, checkpoint_shards._Reader.read
    checked = checkpoint_files._file_crc32

    def note_open(reader, part):
        told["opened"].add(f"{reader._shard['name']}")
        return opening(reader, part)

    def note_read(reader, part, *at):
        rows = read(reader, part, *at)
        told["keys" if part in ("tables", "ids") else "rows"] += rows.nbytes
        return rows

    def note_check(file):
        told["checked"] += file.stat().st_size
        return checked(file)

    monkeypatch.setattr(checkpoint_shards._Reader, "_open", note_open)
    monkeypatch.setattr(checkpoint_shards._Reader, "read", note_read)
    monkeypatch.setattr(checkpoint_files, "_file_crc32", note_check)
    return told


@pytest.mark.parametrize(("saved", "loading"), [(8, 8), (8, 4), (8, 3), (4, 8), (1, 4), (8, 1)])
def test_ranks_read_the_shards_that_have_their_rows(saved, loading, tmp_path, reading):
    model, optimizer = trained(ids=range(400))
    assert save_together(tmp_path / "c", parts(model, optimizer, saved, tmp_path)) == [None] * saved
    entry, files = (checkpoint.read_manifest(tmp_path / "c")[key] for key in ("groups", "files"))
    sizes = [shard["rows"] for shard in entry[0]["shards"]]
    state = checkpoint_shards.row_bytes(entry[0]) - 12
    checked = 0
    for rank in range(loading):
        near = range(rank * saved // loading, -(-(rank + 1) * saved // loading))
        own = range(rank * saved // loading, (rank + 1) * saved // loading)
        reading.update(opened=set(), rows=0, keys=0, checked=0)
        checkpoint.load(tmp_path / "c", *with_adam(dlrm()), ranks=Thread(rank, loading))
        assert {int(name[:5]) for name in reading["opened"]} == {*near, *own}
        assert reading["rows"] == sum(sizes[shard] for shard in near) * state
        # Keys: to see whose they are, to see that they are there once, and with their rows.
        times = sum(sizes[shard] for shard in own) * (2 if saved > 1 else 1)
        assert reading["keys"] == 12 * (times + sum(sizes[shard] for shard in near))
        checked += reading["checked"]
    assert checked == sum(told["bytes"] for told in files.values())


def test_shards_that_are_none_of_owners_load(tmp_path):
    model, optimizer = trained(ids=range(40))
    built = parts(model, optimizer, 4, tmp_path)
    assert save_together(tmp_path / "c", built[1:] + built[:1]) == [None] * 4
    for count in (1, 2, 3, 4, 8):
        several = [with_adam(dlrm()) for _ in range(count)]
        assert not any(isinstance(e, Exception) for e in load_together(tmp_path / "c", several))
        assert save_together(tmp_path / str(count), several) == [None] * count
        fresh, again = with_adam(dlrm())
        checkpoint.load(tmp_path / str(count), fresh, again)
        assert fresh.embedding.digest() == model.embedding.digest()
    # With a key that is there twice, in shards which two ranks check.
    store = built[3][0].embedding.group.store
    built[0][0].embedding.group.store.import_rows(store.export_rows(0, 1))
    assert save_together(tmp_path / "d", built[1:] + built[:1]) == [None] * 4
    results = load_together(tmp_path / "d", built)
    text = sorted(str(error) for error in results)
    assert "must be there once, got it in row 0 of" in text[0]
    assert all(type(error) in (ValueError, OtherRankError) for error in results)


def test_a_rank_that_fails_fails_all_and_nothing_stands(tmp_path):
    model, optimizer = trained(ids=range(40))
    built = parts(model, optimizer, 3, tmp_path)
    built[1][0].embedding.group.store.update(
        np.arange(1), lambda memory, rows: oracle_nan(built[1][0].embedding.group)
    )
    results = save_together(tmp_path / "c", built)
    assert [type(error) for error in results] == [
        OtherRankError,
        FloatingPointError,
        OtherRankError,
    ]
    text = "checkpoint.save: rank 1 must get on, got FloatingPointError: checkpoint.save: vectors"
    assert str(results[0]).startswith(text)
    assert [p.name for p in tmp_path.iterdir()] == ["whole"]
    results = save_together(tmp_path / "whole", built)
    assert [type(error) for error in results] == [FileExistsError, OtherRankError, OtherRankError]


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
        assert kinds == ["OtherRankError"] * 3 + ["ValueError"]
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

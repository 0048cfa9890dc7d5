"""The files are written here from the description of the format, block by block.

Those of oneembedding.zip OneFlow 0.9.0 wrote, by ``make_persistent_table_writer`` for two ranks:
keys -30 to 69, then 40 to 74 again, in column j of 6 the number 10 key + j + 0.25, then + 0.5.
"""

import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint import dlrm, trained

from cupyrec import checkpoint, embedding, nn, optim
from cupyrec.checkpoint_import import import_table
from cupyrec.checkpoint_shards import read_rows
from cupyrec.migrate.oneembedding import read_snapshot

NOTHING = b"\xff\x5a"  # what nobody may read


class Folder:
    """A rank's folder, to which rows are appended."""

    def __init__(self, path, columns, key="<i8", page=64, blocks=4):
        self.path, self.key, self.columns, self.blocks = path, np.dtype(key), columns, blocks
        self.block = page
        while self.block < 4 * columns:
            self.block += page
        self.each = self.block // (4 * columns)
        self.numbers, self.end = {}, 0
        for name in ("keys", "values", "snapshots"):
            (path / name).mkdir(parents=True)
        texts = {
            "LOCK": "", "KEY_SIZE": self.key.itemsize, "VALUE_SIZE": 4 * columns,
            "PHYSICAL_BLOCK_SIZE": page, "NUM_LOGICAL_BLOCKS_PER_CHUNK": blocks,
        }  # fmt: skip
        for name, text in texts.items():
            (path / name).write_text(f"{text}\n")

    def put(self, keys, rows):
        """Append rows in whole blocks; what else is in them holds no number."""
        for first in range(0, len(keys), self.each):
            some = range(first, min(first + self.each, len(keys)))
            body = b"".join(np.asarray(rows[i], "<f4").tobytes() for i in some)
            names = b"".join(np.array(keys[i], self.key).tobytes() for i in some)
            chunk = self.end // (self.each * self.blocks)
            for kind, content, size in (
                ("value", body, self.block), ("key", names, self.each * self.key.itemsize)
            ):  # fmt: skip
                with open(self.path / f"{kind}s" / f"{kind}-{chunk:012d}", "ab") as file:
                    file.write(content + NOTHING * ((size - len(content)) // 2))
            for j, i in enumerate(some):
                self.numbers[int(keys[i])] = self.end + j
            self.end += self.each

    def save(self, name):
        folder = self.path / "snapshots" / name
        folder.mkdir()
        chunks = {}
        for number in np.random.default_rng(0).permutation(list(self.numbers.values())).tolist():
            chunks.setdefault(number // (self.each * self.blocks), []).append(number)
        for chunk, numbers in chunks.items():
            (folder / f"index-{chunk:012d}").write_bytes(np.array(numbers, "<u8").tobytes())
        (folder / "LIST").write_text("".join(f"index-{chunk:012d}\n" for chunk in sorted(chunks)))


def rows_of(count, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((count, columns)).astype(np.float32)


def read(path, width, most=7, snapshot="s", **options):
    """What a snapshot holds: id -> its numbers."""
    got = {}
    for ids, vectors, states in read_snapshot(path, width, most, snapshot=snapshot, **options):
        assert ids.dtype == np.int64
        assert vectors.dtype == np.float32
        assert 0 < len(ids) <= most
        for i, id in enumerate(ids.tolist()):
            assert id not in got
            got[id] = np.concatenate([vectors[i], *(state[i] for state in states.values())])
    return got


def check_same(got, expected):
    assert got.keys() == expected.keys()
    for id, numbers in expected.items():
        np.testing.assert_array_equal(got[id], numbers)


@pytest.mark.parametrize(
    ("columns", "page", "blocks"),
    [(3, 64, 4), (16, 64, 3), (20, 64, 5), (1, 64, 2), (16, 512, 1), (1025, 4096, 2), (5, 64, 99)],
)
def test_the_rows_that_a_snapshot_counts(columns, page, blocks, tmp_path):
    """Blocks with a rest, of one row, of several pages; chunks; keys that were written again."""
    folder = Folder(tmp_path / "t", columns, page=page, blocks=blocks)
    first, later = rows_of(23, columns), rows_of(9, columns, seed=1)
    keys = np.array([-(2**63), 2**63 - 1, -1, *range(20)])
    folder.put(keys, first)
    folder.save("s")
    expected = dict(zip(keys.tolist(), first, strict=True))
    check_same(read(folder.path, columns), expected)
    folder.put(keys[5:14], later)
    folder.put([99], rows_of(1, columns, seed=2))
    folder.save("t")
    check_same(read(folder.path, columns), expected)  # as it was
    expected |= dict(zip(keys[5:14].tolist(), later, strict=True))
    expected[99] = rows_of(1, columns, seed=2)[0]
    for most in (1, 5, 65536):
        check_same(read(folder.path, columns, most, "t"), expected)


def test_what_oneflow_wrote(tmp_path):
    with zipfile.ZipFile(Path(__file__).with_name("oneembedding.zip")) as archive:
        archive.extractall(tmp_path)
    expected = {
        key: 10 * key + np.arange(6) + (0.25 if key < 40 else 0.5) for key in range(-30, 75)
    }
    for most in (7, 65536):
        check_same(read(tmp_path, 6, most, "last"), expected)
    check_same(read(tmp_path, 3, 7, "last", states=["sum"]), expected)


def test_a_chunk_without_rows_that_count(tmp_path):
    folder = Folder(tmp_path / "t", 16, blocks=2)
    folder.put([1, 2], rows_of(2, 16))
    folder.put([1, 2, 3], rows_of(3, 16, seed=1))
    folder.save("s")
    assert (folder.path / "snapshots/s/LIST").read_text().startswith("index-000000000001\n")
    check_same(read(folder.path, 16), dict(zip([1, 2, 3], rows_of(3, 16, seed=1), strict=True)))


def test_a_snapshot_without_rows(tmp_path):
    Folder(tmp_path / "t", 3).save("s")
    assert read(tmp_path / "t", 3) == {}


@pytest.mark.parametrize(
    ("kind", "keys", "ids"),
    [
        ("<u4", [0, 2**32 - 1], [0, 2**32 - 1]),
        ("<i4", [-1, 5], [-1, 5]),
        ("<u8", [2**64 - 1, 5], [-1, 5]),
        ("<i8", [-1, 5], [-1, 5]),
    ],
)
def test_keys(kind, keys, ids, tmp_path):
    folder = Folder(tmp_path / "t", 3, kind)
    folder.put(keys, rows_of(2, 3))
    folder.save("s")
    name = folder.key.newbyteorder("=").name
    expected = dict(zip(ids, rows_of(2, 3), strict=True))
    check_same(read(folder.path, 3, key_type=name), expected)
    other = "int64" if folder.key.itemsize == 4 else "uint32"
    with pytest.raises(ValueError, match="KEY_SIZE' must be . for such keys and rows, got ."):
        read(folder.path, 3, key_type=other)


def test_several_ranks(tmp_path):
    expected = {}
    for rank in range(10):
        folder = Folder(tmp_path / f"{rank:02}-10", 3)
        if rank != 4:  # which has none
            keys = np.arange(rank, 100, 10 + rank)
            folder.put(keys, rows_of(len(keys), 3, seed=rank))
            expected |= dict(zip(keys.tolist(), rows_of(len(keys), 3, seed=rank), strict=True))
        folder.save("s")
    (tmp_path / "notes").mkdir()
    keys_are_of_one_rank = len(expected)
    assert keys_are_of_one_rank > 20
    got = {}
    for ids, vectors, _ in read_snapshot(tmp_path, 3, snapshot="s"):
        got |= dict(zip(ids.tolist(), vectors, strict=True))
    check_same(got, expected)
    (tmp_path / "04-10").rename(tmp_path / "04-11")
    with pytest.raises(ValueError, match="must hold a folder for each of 11 ranks, got"):
        read(tmp_path, 3)


def test_vectors_alone_and_states(tmp_path):
    folder = Folder(tmp_path / "t", 9)
    folder.put(np.arange(20), rows_of(20, 9))
    folder.save("s")
    check_same(read(folder.path, 3, storage_dim=9), dict(enumerate(rows_of(20, 9)[:, :3])))
    check_same(read(folder.path, 3, states=["m", "v"]), dict(enumerate(rows_of(20, 9))))
    some = read(folder.path, 3, states=["sum"], storage_dim=9)
    check_same(some, dict(enumerate(rows_of(20, 9)[:, :6])))
    with pytest.raises(ValueError, match="VALUE_SIZE' must be 12 for such keys and rows, got 36."):
        read(folder.path, 3)
    with pytest.raises(ValueError, match="'storage_dim' must be at least 9, got 8."):
        read(folder.path, 3, storage_dim=8, states=["m", "v"])
    with pytest.raises(ValueError, match="'states' must be none, momentum, sum, or m and v, got"):
        read(folder.path, 3, states=["n", "z"])
    with pytest.raises(ValueError, match="'key_type' must be one of .*, got 'float32'."):
        read(folder.path, 3, key_type="float32")


def damaged(folder, what):
    """Do something to a folder; return the file that is to blame, and what is said of it."""
    index, values = folder / "snapshots/s/index-000000000001", folder / "values/value-000000000001"
    keys = folder / "keys/key-000000000001"
    listed = folder / "snapshots/s/LIST"
    if what == "values cut":
        values.write_bytes(values.read_bytes()[:-1])
        return values, "must hold row 39, which .* counts, got rows 20 to 34."
    if what == "keys cut":
        keys.write_bytes(keys.read_bytes()[:-9])
        return keys, "must hold row 39, which .* counts, got rows 20 to 37."
    if what == "index cut":
        index.write_bytes(index.read_bytes()[:-3])
        return index, "must have 8 bytes a row, got 5 more."
    if what == "index of another chunk":
        index.write_bytes(np.array([21, 19], "<u8").tobytes())
        return index, "must count rows 20 to 39, got 19."
    if what == "index of no chunk":
        index.write_bytes(np.array([21, 2**64 - 1], "<u8").tobytes())
        return index, "must count rows 20 to 39, got 18446744073709551615."
    if what == "row twice":
        index.write_bytes(np.array([21, 22, 21], "<u8").tobytes())
        return index, "must count a row once, got 1 twice or more."
    if what == "no number":
        content = bytearray(values.read_bytes())
        content[8:12] = np.array(np.nan, "<f4").tobytes()
        values.write_bytes(content)
        return values, "'vectors' must be finite, got 1 of [0-9]+ not."
    if what == "list":
        listed.write_text("index-000000000000\nindex-1\n")
        return listed, "must name index files, each once, got"
    if what == "list twice":
        listed.write_text("index-000000000000\nindex-000000000000\n")
        return listed, "must name index files, each once, got"
    (folder / "PHYSICAL_BLOCK_SIZE").write_text("4 KiB\n")
    return folder / "PHYSICAL_BLOCK_SIZE", "must be a number, got '4 KiB'."


@pytest.mark.parametrize(
    "what",
    [
        "values cut", "keys cut", "index cut", "index of another chunk", "index of no chunk",
        "row twice", "no number", "list", "list twice", "size",
    ],
)  # fmt: skip
def test_refuses_damage_and_changes_nothing(what, tmp_path):
    folder = Folder(tmp_path / "t", 3)
    folder.put(np.arange(40), rows_of(40, 3))
    folder.save("s")
    assert len(read(folder.path, 3)) == 40
    file, rule = damaged(folder.path, what)
    with pytest.raises(ValueError, match=re.escape(f"oneembedding: '{file}'") + ":? " + rule):
        read(folder.path, 3)
    checkpoint.save(tmp_path / "c", dlrm())
    with pytest.raises(ValueError, match=rule):
        import_table(
            folder.path, tmp_path / "c", tmp_path / "d", "0",
            read=lambda *where: read_snapshot(*where, snapshot="s"),
        )  # fmt: skip
    assert not (tmp_path / "d").exists()


def test_refuses_other_folders(tmp_path):
    with pytest.raises(ValueError, match="must be a rank's folder or hold all ranks', got neither"):
        read(tmp_path, 3)
    folder = Folder(tmp_path / "t", 3)
    folder.put([1], rows_of(1, 3))
    folder.save("s")
    folder.save("t")
    text = r"'snapshot' must be one of \['s', 't'\], got 'u'."
    with pytest.raises(ValueError, match=text):
        read(folder.path, 3, snapshot="u")
    (folder.path / "keys" / "key-000000000000").unlink()
    with pytest.raises(FileNotFoundError, match="key-000000000000"):
        read(folder.path, 3)


def test_into_a_layer(tmp_path):
    folder = Folder(tmp_path / "0-1", 6)
    folder.put(np.arange(50), rows_of(50, 6))
    folder.save("s")
    layer = nn.MultiTableEmbedding(num_tables=2, embedding_dim=3)
    for ids, vectors, _ in read_snapshot(tmp_path, 3, snapshot="s", storage_dim=6):
        layer.import_table(1, ids, vectors)
    ids, vectors = layer.export_table(1)
    check_same(
        dict(zip(ids.tolist(), vectors, strict=True)), dict(enumerate(rows_of(50, 6)[:, :3]))
    )


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        (optim.Adagrad, {}, ["sum"]),
        (optim.Adam, {}, ["m", "v"]),
        (optim.SGD, {"momentum": 0.9}, ["momentum"]),
    ],
)
def test_states_into_a_checkpoint(kind, options, names, tmp_path):
    width = 3 * (1 + len(names))
    folder = Folder(tmp_path / "t", width)
    folder.put(np.arange(30), np.abs(rows_of(30, width)))
    folder.save("s")
    model = dlrm()
    checkpoint.save(tmp_path / "c", model, kind(model.parameters(), 0.1, **options))
    told = import_table(
        folder.path, tmp_path / "c", tmp_path / "d", "1",
        read=lambda *where: read_snapshot(*where, snapshot="s", states=names),
        ids=range(10, 25), offset=10,
    )  # fmt: skip
    assert told == {"imported": 15, "replaced": 0}
    fresh = dlrm()
    manifest = checkpoint.load(tmp_path / "d", fresh, kind(fresh.parameters(), 0.1, **options))
    (rows,) = read_rows(tmp_path / "d", manifest["groups"][0])
    assert set(rows.tables.tolist()) == {1}
    got = np.concatenate([rows.vectors, *(rows.states[name] for name in names)], axis=1)
    expected = np.abs(rows_of(30, width))[10:25]
    check_same(dict(zip(rows.ids.tolist(), got, strict=True)), dict(enumerate(expected)))


def test_states_where_account_is_kept_of_ids(tmp_path):
    """Imported ids are as if looked up once, in the step to come."""
    folder = Folder(tmp_path / "t", 6)
    folder.put(np.arange(30), np.abs(rows_of(30, 6)))
    folder.save("s")
    life = embedding.Life(expire_after=10**6)
    layer = nn.MultiTableEmbedding(num_tables=1, embedding_dim=3, life=life)
    checkpoint.save(tmp_path / "c", layer, optim.Adagrad(layer.parameters(), 0.1))
    import_table(
        folder.path, tmp_path / "c", tmp_path / "d", "0",
        read=lambda *where: read_snapshot(*where, snapshot="s", states=["sum"]),
    )  # fmt: skip
    manifest = checkpoint.load(tmp_path / "d", layer, optim.Adagrad(layer.parameters(), 0.1))
    (rows,) = read_rows(tmp_path / "d", manifest["groups"][0])
    np.testing.assert_array_equal(rows.states["life"], np.ones((30, 2)))
    np.testing.assert_array_equal(rows.states["sum"], np.abs(rows_of(30, 6))[rows.ids, 3:])


@pytest.mark.parametrize("kind", [optim.Adam, optim.CatchUpAdam, optim.RowWiseAdagrad])
def test_refuses_states_of_another_optimizer(kind, tmp_path):
    folder = Folder(tmp_path / "t", 6)
    folder.put(np.arange(3), rows_of(3, 6))
    folder.save("s")
    checkpoint.save(tmp_path / "c", *trained(kind))
    with pytest.raises(ValueError, match="must bring the states of the checkpoint's rows, by col"):
        import_table(
            folder.path, tmp_path / "c", tmp_path / "d", "1",
            read=lambda *where: read_snapshot(*where, snapshot="s", states=["sum"]),
        )  # fmt: skip
    assert not (tmp_path / "d").exists()

"""The files are written here number by number, by struct."""

import re
import struct
from functools import partial

import numpy as np
import pytest
from test_checkpoint import dlrm

from cupyrec import checkpoint
from cupyrec.checkpoint_import import import_table
from cupyrec.migrate.hugectr import read_sparse_model


def write(folder, keys, vectors, slots=None, key="<q"):
    folder.mkdir()
    (folder / "key").write_bytes(b"".join(struct.pack(key, k) for k in keys))
    rows = (struct.pack(f"<{len(row)}f", *row) for row in vectors)
    (folder / "emb_vector").write_bytes(b"".join(rows))
    if slots is not None:
        (folder / "slot_id").write_bytes(b"".join(struct.pack("<Q", s) for s in slots))
    return folder


def numbers(count, width):
    return np.random.default_rng(0).standard_normal((count, width)).astype(np.float32)


def read(folder, width, most=7, **options):
    ids, rows = [], []
    for some, vectors, states in read_sparse_model(folder, width, most, **options):
        assert (some.dtype, vectors.dtype, states) == (np.int64, np.float32, {})
        assert len(some) == len(vectors) <= most
        ids += some.tolist()
        rows += vectors.tolist()
    return ids, rows


@pytest.mark.parametrize("rows", [0, 1, 7, 23])
@pytest.mark.parametrize("width", [1, 5])
def test_a_distributed_embedding(rows, width, tmp_path):
    keys = [-(2**63), 2**63 - 1, -1, *range(20)][:rows]
    folder = write(tmp_path / "m", keys, numbers(rows, width))
    assert read(folder, width) == (keys, numbers(rows, width).tolist())
    assert read(folder, width, 65536) == (keys, numbers(rows, width).tolist())


def test_a_localized_embedding(tmp_path):
    keys, slots = list(range(100, 123)), [i * 7 % 3 for i in range(23)]
    folder = write(tmp_path / "m", keys, numbers(23, 4), slots)
    assert read(folder, 4) == (keys, numbers(23, 4).tolist())
    for slot in range(4):
        mine = [i for i in range(23) if slots[i] == slot]
        expected = [keys[i] for i in mine], numbers(23, 4)[mine].tolist()
        assert read(folder, 4, slot=slot) == expected
        assert bool(mine) == (slot < 3)


def test_keys_of_32_bits(tmp_path):
    folder = write(tmp_path / "m", [0, 2**32 - 1], numbers(2, 4), key="<I")
    assert read(folder, 4, key_type="uint32")[0] == [0, 2**32 - 1]
    with pytest.raises(ValueError, match="must have 2 rows of 8 bytes like .* of width 4, got 1."):
        read(folder, 4)
    with pytest.raises(ValueError, match="'key_type' must be int64 or uint32, got 'int32'."):
        read(folder, 4, key_type="int32")


@pytest.mark.parametrize(
    ("name", "change", "width", "rule"),
    [
        ("key", -8, 4, "must have 6 rows of 8 bytes like '.*emb_vector' of width 4, got 5."),
        ("key", -1, 4, "must have 8 bytes a row, got 7 more."),
        ("slot_id", 8, 4, "must have 6 rows of 8 bytes like '.*emb_vector' of width 4, got 7."),
        ("slot_id", -4, 4, "must have 8 bytes a row, got 4 more."),
        ("emb_vector", -4, 4, "must have 16 bytes a row, got 12 more."),
        ("key", 0, 2, "must have 12 rows of 8 bytes like '.*emb_vector' of width 2, got 6."),
        ("emb_vector", 0, 5, "must have 20 bytes a row, got 16 more."),
    ],
)
def test_refuses_sizes_that_dont_fit(name, change, width, rule, tmp_path):
    file = write(tmp_path / "m", range(6), numbers(6, 4), range(6)) / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) + change] + bytes(max(0, change)))
    with pytest.raises(ValueError, match=re.escape(f"hugectr: '{file}' ") + rule):
        next(read_sparse_model(tmp_path / "m", width))


def test_refuses_what_is_missing(tmp_path):
    folder = write(tmp_path / "m", range(6), numbers(6, 4))
    with pytest.raises(FileNotFoundError, match="slot_id"):
        read(folder, 4, slot=0)
    (folder / "key").unlink()
    with pytest.raises(FileNotFoundError, match="key"):
        read(folder, 4)


def test_into_a_checkpoint(tmp_path):
    """Slots have keys of their own offsets; a slot goes into a table, by its raw ids."""
    keys = [*range(5), *range(1000, 1007)]
    folder = write(tmp_path / "m", keys, numbers(12, 3), [0] * 5 + [1] * 7)
    checkpoint.save(tmp_path / "c", dlrm())
    for slot, at, out in (0, "c", "d"), (1, "d", "e"):
        told = import_table(
            folder, tmp_path / at, tmp_path / out, str(slot),
            read=partial(read_sparse_model, slot=slot), offset=1000 * slot,
        )  # fmt: skip
        assert told == {"imported": (5, 7)[slot], "replaced": 0}
    fresh = dlrm()
    checkpoint.load(tmp_path / "e", fresh)
    for table, own in enumerate((slice(0, 5), slice(5, 12))):
        ids, vectors = fresh.embedding.export_table(table)
        assert ids.tolist() == list(range(own.stop - own.start))
        np.testing.assert_array_equal(vectors, numbers(12, 3)[own])


@pytest.mark.parametrize(
    ("keys", "number", "rule"),
    [
        ([1, 2, 1], 1.0, "m' must have an id once, got 1 twice or more."),
        (
            [1, 2, 3],
            np.inf,
            "hugectr: '.*/m/emb_vector': 'vectors' must be finite, got 1 of 3 not.",
        ),
    ],
)
def test_refuses_and_changes_nothing(keys, number, rule, tmp_path):
    vectors = np.ones((3, 3), np.float32)
    vectors[1, 2] = number
    checkpoint.save(tmp_path / "c", dlrm())
    with pytest.raises(ValueError, match=rule):
        import_table(
            write(tmp_path / "m", keys, vectors), tmp_path / "c", tmp_path / "d", "0",
            read=read_sparse_model,
        )  # fmt: skip
    assert not (tmp_path / "d").exists()

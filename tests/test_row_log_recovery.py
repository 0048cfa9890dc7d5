"""Damage of every kind and place, and what is saved of it."""

import json
import logging
import os

import numpy as np
import pytest
from test_row_log import payloads, read, tiny, write  # noqa: F401

from cupyrec.embedding import row_log_files
from cupyrec.embedding.row_log import RowLog
from cupyrec.embedding.row_log_files import read_manifest
from cupyrec.ops.log_records import SLOT_BITS

SIZE = 48  # bytes a record
ROWS = 300


@pytest.fixture
def folder(tmp_path, tiny):  # noqa: F811
    """Rows as of version 1, every third of version 2; none was written twice between commits."""
    with RowLog(tmp_path, 8) as log:
        write(log, range(ROWS), 1)
        log.commit({"step": 1})
        write(log, range(0, ROWS, 3), 2)
        log.commit({"step": 2})
        write(log, range(ROWS), 3)
    return tmp_path


def truth(rows):
    both = payloads(rows, version=1), payloads(rows, version=2)
    return np.where(np.asarray(rows)[:, None] % 3 == 0, both[1], both[0])


def files(folder):
    told = json.loads((folder / "manifest.json").read_text())["log"]["files"]
    return [(folder / f"{serial:012d}.rows", slots) for serial, slots in told]


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_undamaged(folder):
    left = {path.name for path in folder.glob("*.rows")}
    with RowLog(folder, 8) as log:
        np.testing.assert_array_equal(read(log, range(ROWS)), truth(range(ROWS)))
        told = {path.name: slots for path, slots in files(folder)}
        assert set(told) < left  # later files are gone
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.rows")}
        assert sizes == {name: slots * SIZE for name, slots in told.items()}


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("slot", [0, 1, -1])
@pytest.mark.parametrize("byte", [0, 3, 4, 8, 9, 15, 16, 47])
def test_a_flipped_bit(folder, number, slot, byte):
    path, slots = files(folder)[number]
    flip(path, slot % slots * SIZE + byte)
    rule = rf"'{path}' must have at offset {slot % slots * SIZE} the record that was written there"
    with pytest.raises(ValueError, match=rule):
        RowLog(folder, 8)
    with pytest.raises(ValueError, match=rule):  # that changed nothing
        RowLog(folder, 8)
    check_saved(folder, 1)


def check_saved(folder, most):
    """Salvage loses no more rows than that, and what it gives was written."""
    with RowLog(folder, 8, salvage=True) as log:
        assert len(log) + log.lost == ROWS and log.lost <= most
        got = read(log, range(len(log)))
        lost = log.lost
        log.commit({"saved": True})
    with RowLog(folder, 8) as log:
        assert log.meta == {"saved": True} and log.lost == 0
        np.testing.assert_array_equal(read(log, range(len(log))), got)
        write(log, range(len(log)), 7)
        log.commit({})
    versions = {
        tuple(p): r
        for v in (1, 2)
        for r, p in zip(range(ROWS), payloads(range(ROWS), version=v).tolist(), strict=True)
    }
    came = [versions[tuple(p)] for p in got.tolist()]
    assert len(set(came)) == len(came)  # no row twice
    assert sum(row != at for at, row in enumerate(came)) <= lost  # others keep their numbers


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("cut", [0, 1, SIZE, SIZE + 5, None])
def test_a_truncated_file(folder, number, cut):
    path, slots = files(folder)[number]
    size = slots * SIZE - cut if cut else 0
    if cut == 0:
        size = slots * SIZE - 1
    os.truncate(path, size)
    with pytest.raises(ValueError, match=rf"'{path}' must have {slots * SIZE} bytes, got {size}"):
        RowLog(folder, 8)
    check_saved(folder, slots if cut is None else 2)


def test_a_file_that_is_gone(folder, caplog):
    path, slots = files(folder)[0]
    path.unlink()
    with pytest.raises(ValueError, match=rf"'{path}' must have {slots * SIZE} bytes, got no such"):
        RowLog(folder, 8)
    with caplog.at_level(logging.WARNING, "cupyrec"):
        check_saved(folder, slots)
    assert "rows of" in caplog.text and "are lost" in caplog.text


def test_everything_is_gone(folder):
    for path, _ in files(folder):
        path.unlink()
    with RowLog(folder, 8, salvage=True) as log:
        assert (len(log), log.lost) == (0, ROWS)
        write(log, range(5))
        log.commit({})
    with RowLog(folder, 8) as log:
        np.testing.assert_array_equal(read(log, range(5)), payloads(range(5)))


@pytest.mark.parametrize("harm", ["flip", "gone"])
def test_the_manifest_is_damaged(folder, harm):
    path = folder / "manifest.json"
    if harm == "flip":
        flip(path, 30)
    else:
        path.unlink()
    with pytest.raises(ValueError, match=rf"RowLog: '{path}' must be whole"):
        RowLog(folder, 8)
    with RowLog(folder, 8, salvage=True) as log:  # as much as was written, committed or not
        assert (len(log), log.lost, log.meta) == (ROWS, 0, {})
        got = read(log, range(ROWS))
        newest = (got == payloads(range(ROWS), version=3)).all(axis=1)
        assert newest.any()
        np.testing.assert_array_equal(got[~newest], truth(np.flatnonzero(~newest)))
        log.commit({"saved": True})
    with RowLog(folder, 8) as log:
        np.testing.assert_array_equal(read(log, range(ROWS)), got)


def test_another_format(folder):
    text = (folder / "manifest.json").read_text()
    with RowLog(folder, 8) as log:
        files_ = log._state.files
        told = read_manifest(files_.folder)
        text = json.dumps(told | {"format": 2})
    crc = __import__("zlib").crc32(text.encode())
    (folder / "manifest.json").write_text(f'{{"crc32": {crc}, "log": {text}}}')
    with pytest.raises(ValueError, match=r"RowLog: 'format' must be 2 as in '.*', got 1\."):
        RowLog(folder, 8)


def test_damage_that_comes_later_is_seen_by_reads(folder):
    with RowLog(folder, 8) as log:
        number, slot = divmod(int(log.versions(np.array([7]))[0]), 1 << SLOT_BITS)
        path = log._state.files[number].path
        flip(path, slot * SIZE + 20)
        rule = rf"'{path}' must have at offset {slot * SIZE} the record that was written there"
        with pytest.raises(OSError, match=rule):
            read(log, [7])
        with pytest.raises(OSError, match=rule):
            list(log.records())
        others = [row for row in range(ROWS) if row != 7]
        np.testing.assert_array_equal(read(log, others), truth(others))


def test_a_stranger_in_the_folder_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "1.rows").write_text("mine")
    RowLog(tmp_path, 8).close()
    RowLog(tmp_path, 8).close()
    assert {p.name for p in tmp_path.iterdir()} == {"notes.txt", "1.rows", "LOCK", "manifest.json"}


def test_what_the_disk_can_not_read(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(row_log_files, "_LEAST", 10 * 4096)
    with RowLog(tmp_path, 8) as log:
        write(log, range(3000))
        log.commit({})
    path, real = files(tmp_path)[1][0], os.preadv

    def failing(descriptor, buffers, offset):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name == str(path) and offset < 5 * 4096 < offset + buffers[0].nbytes:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(OSError, match=rf"Input/output error: '{path}'"):
            RowLog(tmp_path, 8)
        with RowLog(tmp_path, 8, salvage=True) as log:
            assert 1 <= log.lost <= 2 * 85 and len(log) + log.lost == 3000
            log.commit({"saved": True})
    assert f"'{path}' can't be read: Input/output error" in caplog.text
    assert not path.exists()
    with RowLog(tmp_path, 8) as log:
        assert log.meta == {"saved": True}
        came = read(log, range(len(log)))
    every = {tuple(line) for line in payloads(range(3000)).tolist()}
    assert len({tuple(line) for line in came.tolist()} & every) == len(came)

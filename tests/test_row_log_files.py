"""The folder: manifest, lock, files and what memory tells of them."""

import os
import resource

import numpy as np
import pytest

from cupyrec.embedding import row_log_files
from cupyrec.embedding.row_log_files import Commit, Files, lock_folder, read_manifest, sync
from cupyrec.ops import log_records
from cupyrec.ops.log_records import FILES


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path, words=8, direct=False)


def append(file, records):
    """Write so many records to a file."""
    made = np.zeros((records, 6), np.uint64)
    log_records.void(made)
    os.pwrite(file.writer, made, file.written * 48)
    file.written += records
    file.length = file.written
    return made


def test_manifests_come_back(tmp_path, files):
    assert read_manifest(files.folder) is None
    a, b = files.create(), files.create()
    files.write_manifest(Commit(7, 9, {"é": [0.1, 1 << 70, None]}), [(a, 3), (b, 0)])
    told = read_manifest(files.folder)
    assert told == {
        "format": 1, "words": 8, "count": 7, "sequence": 9, "meta": {"é": [0.1, 1 << 70, None]},
        "files": [[1, 3]],
    }  # fmt: skip
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".rows", ".rows"]


def test_a_damaged_manifest_is_none(tmp_path, files):
    files.write_manifest(Commit(7, 9, {"a": "b"}), [])
    path = tmp_path / "manifest.json"
    good = path.read_bytes()
    for at in range(len(good) - 1):  # the last one ends the line
        for bit in (0, 6):
            data = bytearray(good)
            data[at] ^= 1 << bit
            path.write_bytes(data)
            assert read_manifest(files.folder) is None, at
        path.write_bytes(good[:at])
        assert read_manifest(files.folder) is None, at


def test_a_manifest_that_can_not_be_written_leaves_the_old_one(files, monkeypatch):
    files.write_manifest(Commit(1, 1, {}), [])
    for name in ("fsync", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, raising(28))
            with pytest.raises(OSError, match=r"\[Errno 28\]"):
                files.write_manifest(Commit(2, 2, {}), [])
        if name == "fsync":
            assert read_manifest(files.folder)["count"] == 1


def raising(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def test_sizes_follow_the_table(files):
    assert files.capacity == (1 << 20) // 48
    files.live[0] = 10**7
    assert files.capacity == 10**7 // 128
    files.live[0] = 10**10
    assert files.capacity == (1 << 30) // 48


def test_numbers_are_not_given_again_soon(files):
    first = files.create()
    files.remove(first)
    assert not first.path.exists()
    second = files.create()
    assert (second.number, second.serial) == (1, 2)
    files._number = FILES - 1
    assert files.create().number == 0 and files.create().number == 2  # 1 is taken


def test_reads_and_their_damage(files):
    file = files.create()
    made = append(file, 1000)
    np.testing.assert_array_equal(files.read(file.reader, 300, 200), made[300:500])
    np.testing.assert_array_equal(files.read(file.reader, 999, 1), made[999:])
    assert files.read_bytes >= 201 * 48
    os.truncate(file.path, 48 * 400 + 47)
    with pytest.raises(OSError, match=rf"'{file.path}' must have at offset 19200 the record"):
        files.read(file.reader, 300, 200)


def test_commits_clear_what_is_held(files):
    file = files.create()
    append(file, 100)
    files.commit_slots(file, 100)
    file.bits[1] = 5
    files.held[0] = 2
    before = file.bits
    files.commit_slots(file, 70)
    assert not file.bits.any() and files.bits[0] == file.bits.ctypes.data
    assert (files.held[0], files.committed[0]) == (0, 70) and file.bits is not before
    kept = file.bits
    files.commit_slots(file, 80)
    assert file.bits is kept


def test_syncs_what_it_must(files, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    a, b = files.create(), files.create()
    append(a, 10)
    append(b, 10)
    files.committed[b.number] = 4
    files.sync(committed_only=True)
    assert synced == [b.reader.descriptor] and (a.synced, b.synced) == (0, 4)
    files.sync(committed_only=False)
    assert synced == [f.reader.descriptor for f in (b, a, b)] and (a.synced, b.synced) == (10, 10)
    files.sync(committed_only=False)
    assert len(synced) == 3


def test_reads_under_way_keep_files(files):
    file = files.create()
    append(file, 3)
    descriptors, held = files.readers()
    reader = file.reader.descriptor
    files.remove(file)
    assert len(os.pread(int(descriptors[0]), 144, 0)) == 144
    assert files.create().reader.descriptor != reader
    del held
    with pytest.raises(OSError):
        os.fstat(reader)


def test_locks(tmp_path):
    descriptor = lock_folder(tmp_path / "a" / "b")
    with pytest.raises(BlockingIOError, match="must be open once"):
        lock_folder(tmp_path / "a" / "b")
    os.close(descriptor)
    os.close(lock_folder(tmp_path / "a" / "b"))


def test_sync_names_the_folder(tmp_path, monkeypatch):
    sync(tmp_path)
    monkeypatch.setattr(os, "fsync", raising(5))
    with pytest.raises(OSError, match=str(tmp_path)):
        sync(tmp_path)


def test_direct_flags(tmp_path):
    os.close(lock_folder(tmp_path))
    assert row_log_files._direct_flags(tmp_path) in (0, os.O_DIRECT)


def test_more_files_may_be_open_than_a_process_begins_with(files):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = len(os.listdir("/proc/self/fd")) + 60
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, before[1]))
    try:
        for _ in range(50):  # each takes two
            files.create()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        files.close()

"""The thread that frees the disk: what it moves, when it stops, and its errors."""

import errno
import os
import threading
import time

import numpy as np
import pytest
from test_row_log import payloads, read, tiny, write  # noqa: F401

from cupyrec.embedding import row_log_compaction, row_log_files
from cupyrec.embedding.row_log import RowLog
from cupyrec.ops.log_records import SLOT_BITS


@pytest.fixture
def log(tmp_path, tiny, monkeypatch):  # noqa: F811
    """A log of 2000 rows, of which the thread moves 17 at a time."""
    monkeypatch.setattr(row_log_compaction, "_PIECE", 17 * 48)
    with RowLog(tmp_path, 8) as log:
        write(log, range(2000))
        log.commit({"step": 1})
        yield log


def rewrite(log, times, commit=False):
    """Rewrite half of the rows so often; return the version of each."""
    rng, versions = np.random.default_rng(0), np.zeros(2000, np.int64)
    for version in range(1, times + 1):
        rows = np.flatnonzero(rng.random(2000) < 0.5)
        write(log, rows, version)
        versions[rows] = version
        if commit and version % 4 == 0:
            log.commit({})
    return versions


def check_rows(log, versions):
    want = payloads(range(2000))
    for version in np.unique(versions):
        rows = np.flatnonzero(versions == version)
        want[rows] = payloads(rows, version=version)
    np.testing.assert_array_equal(read(log, range(2000)), want)


def test_without_commits_the_last_one_stays(log, tmp_path):
    check_rows(log, rewrite(log, 30))
    files = log._state.files
    assert files.held.sum() == 2000 and files.live.sum() == 2000
    assert log.disk_bytes <= 1.5 * 4000 * 48 + 4 * files.file_bytes
    assert log.written_bytes > 30 * 1100 * 48
    log.close()
    with RowLog(tmp_path, 8) as log:
        assert log.meta == {"step": 1}
        np.testing.assert_array_equal(read(log, range(2000)), payloads(range(2000)))


def test_it_waits_while_records_are_read(log):
    records = log.records()
    next(records)
    write(log, range(2000), 1)
    before = {file.serial for file in log._state.files}
    for version in range(2, 8):
        write(log, range(2000), version)  # does not wait for ever
    assert before <= {file.serial for file in log._state.files}
    records.close()
    write(log, [0], 8)
    files = log._state.files
    assert log.disk_bytes <= 1.5 * files.needed_bytes + 4 * files.file_bytes


@pytest.mark.parametrize("name", ["pwrite", "fdatasync", "fsync", "replace", "unlink"])
def test_an_error_is_raised_by_the_next_call(log, tmp_path, monkeypatch, name):
    owner = type(tmp_path) if name in ("replace", "unlink") else os
    real, failed = getattr(owner, name), threading.Event()

    def fail(*given, **named):
        if threading.current_thread().name == "cupyrec-compaction":
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match=r"Errno 28.*" + str(tmp_path)):
            rewrite(log, 30, commit=True)
        assert failed.is_set()
    versions = rewrite(log, 30, commit=True)
    check_rows(log, versions)
    log.commit({"step": 2})
    files = log._state.files
    assert log.disk_bytes <= 1.5 * files.needed_bytes + 4 * files.file_bytes
    log.close()
    with RowLog(tmp_path, 8) as log:
        check_rows(log, versions)


def test_a_damaged_record_is_left_alone(log, tmp_path):
    number, slot = divmod(int(log.versions(np.array([10]))[0]), 1 << SLOT_BITS)
    path = log._state.files[number].path
    data = bytearray(path.read_bytes())
    data[slot * 48 + 30] ^= 1
    path.write_bytes(data)
    rule = rf"'{path}' must have at offset {slot * 48} the record that was written there"
    others = np.flatnonzero(np.arange(2000) % 10)
    with pytest.raises(OSError, match=rule):
        for version in range(1, 100):
            write(log, others, version)
            log.commit({})
    for version in range(100, 110):  # it was said, and goes on
        write(log, others, version)
    assert path.exists()
    np.testing.assert_array_equal(read(log, others), payloads(others, version=109))
    with pytest.raises(OSError, match=rule):
        read(log, [10])


def test_a_file_that_can_not_be_read_is_left_alone(log, monkeypatch):
    number = int(log.versions(np.array([10]))[0]) >> SLOT_BITS
    path, real = log._state.files[number].path, os.preadv

    def failing(descriptor, *given):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *given)

    monkeypatch.setattr(os, "preadv", failing)
    others = np.flatnonzero(np.arange(2000) % 10)
    with pytest.raises(OSError, match=rf"Input/output error: '{path}'"):
        for version in range(1, 100):
            write(log, others, version)
            log.commit({})
    for version in range(100, 110):
        write(log, others, version)
        log.commit({})
    assert path.exists()
    np.testing.assert_array_equal(read(log, others), payloads(others, version=109))


def test_dropped_in_the_midst_of_work(tmp_path, tiny):  # noqa: F811
    for version in range(10):
        log = RowLog(tmp_path, 8)
        write(log, range(3000), version)
        log.commit({"version": version})
        write(log, range(1, 3000, 2), 99)
        write(log, range(1, 3000, 2), 98)
        del log
    log = RowLog(tmp_path, 8)
    np.testing.assert_array_equal(read(log, range(3000)), payloads(range(3000), version=9))
    log.close()


def test_copies_of_committed_records_are_held_wherever_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(row_log_files, "_LEAST", 3 * 4096)  # 256 records
    with RowLog(tmp_path, 8) as log:
        state, compaction = log._state, log._compaction
        write(log, range(512))
        log.commit({})
        write(log, [*range(200), *range(256, 456)], 1)
        log.commit({})
        first, second = list(state.files)[:2]
        for victim in (first, second):  # a commit in the midst of the file they go to
            compaction._empty(victim)
            assert not state.files.live[victim.number]
            log.commit({"step": 1})
        assert state.moved.file.length < state.moved.file.capacity
        assert first.reader is None and second.reader is None
        compaction._empty(next(iter(state.files)))  # the copies of rows 0 to 199
        write(log, range(512), 2)
        assert state.files.held.sum() == 512
        for file in list(state.files):
            if file not in (state.fresh.file, state.moved.file):
                compaction._empty(file)
        with state.change:
            state.drop_unneeded()
        assert state.files.held.sum() == 512
    with RowLog(tmp_path, 8) as log:
        assert log.meta == {"step": 1}
        rows = np.arange(512)
        want = payloads(rows)
        new = (rows < 200) | (rows >= 256) & (rows < 456)
        want[new] = payloads(rows[new], version=1)
        np.testing.assert_array_equal(read(log, rows), want)


@pytest.mark.parametrize("patience", [0, 60])
def test_a_commit_waits_for_seconds_only(log, tmp_path, monkeypatch, patience):
    monkeypatch.setattr(row_log_compaction, "_PATIENCE", patience)
    real, held_up = os.preadv, threading.Event()

    def slow(*given):
        if threading.current_thread().name == "cupyrec-compaction":
            held_up.wait(60 if patience == 0 else 0)
        return real(*given)

    files = log._state.files

    def is_small():
        return log.disk_bytes <= 1.5 * files.needed_bytes + 4 * files.file_bytes

    rewrite(log, 6)
    monkeypatch.setattr(os, "preadv", slow)
    log.commit({"step": 2})
    assert is_small() == (patience > 0)
    most = log.disk_bytes
    if patience == 0:
        held_up.set()
        for version in range(7, 60):
            write(log, range(0, 2000, 3), version)
            assert log.disk_bytes <= most + 5 * files.file_bytes
        log._compaction.settle()
        deadline = time.monotonic() + 60
        while not is_small() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert is_small()

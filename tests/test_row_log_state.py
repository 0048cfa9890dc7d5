"""What is written, held and committed, and a disk that is full."""

import contextlib
import errno
import os
import subprocess

import numpy as np
import pytest

from cupyrec.embedding import row_log_files, row_log_state, row_log_streams
from cupyrec.embedding.row_log import RowLog
from cupyrec.embedding.row_log_files import read_manifest
from cupyrec.embedding.row_log_state import LogState


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Files of 4 KB, a buffer of 1 KB, truncation in steps of 10 rows."""
    monkeypatch.setattr(row_log_files, "_LEAST", 4096)
    monkeypatch.setattr(row_log_streams, "_BUFFER", 1024)
    monkeypatch.setattr(row_log_state, "_BLOCK", 10)


def put(state, rows, value):
    rows = np.asarray(rows)
    if rows.max() >= state.count:
        state.grow(int(rows.max()) + 1)
    done = 0
    while done < rows.size:
        done += state.write(rows[done:], np.full((rows.size - done, 4), value, np.uint64))


def figures(state):
    return state.files.live.sum(), state.files.held.sum()


def test_the_last_commit_is_held(tmp_path):
    state = LogState(tmp_path, 8, direct=False)
    put(state, range(100), 1)
    put(state, range(50), 2)
    assert figures(state) == (100, 0)
    state.commit({})
    put(state, range(30), 3)
    put(state, range(20), 4)
    assert figures(state) == (100, 30)
    state.truncate(90)
    assert figures(state) == (90, 40)
    state.truncate(10)
    assert figures(state) == (10, 100)  # the rows of the commit, and the newest of 10 of them
    state.commit({"a": 1})
    assert figures(state) == (10, 0)
    assert (state.committed.count, state.committed.sequence) == (10, 200)


def test_unneeded_files_go_with_a_commit(tmp_path):
    state = LogState(tmp_path, 8, direct=False)
    put(state, range(850), 1)  # ten files of 85, whose last page is their end
    state.commit({})
    many = len(list(tmp_path.glob("*.rows")))
    put(state, range(850), 2)
    state.drop_unneeded()
    assert len(list(tmp_path.glob("*.rows"))) == 2 * many
    state.commit({})
    assert len(list(tmp_path.glob("*.rows"))) == many
    assert len(read_manifest(state.files.folder)["files"]) == many


def test_rows_grow_and_shrink_their_memory(tmp_path):
    state = LogState(tmp_path, 8, direct=False)
    before = state.nbytes
    state.grow((3 << 20) + 1)
    assert state.nbytes - before == 4 * (5 << 20)
    put(state, [5], 1)
    state.truncate(3 << 20)
    assert state.nbytes - before == 3 * (5 << 20)
    assert figures(state) == (1, 0)


@contextlib.contextmanager
def full_tmpfs(folder):
    """A small file system; what it gives frees half of it."""
    command = ["mount", "-t", "tmpfs", "-o", "size=384k", "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode:
        with full_injected(folder) as free:
            yield free
        return
    try:
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(192 << 10))
        yield lambda: ballast.unlink(missing_ok=True)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def full_injected(folder):
    """Writes that fail beyond 192 KB."""
    real, limit = os.pwrite, [192 << 10]

    def full(descriptor, data, offset):
        used = 0
        for path in folder.glob("log/*.rows"):
            with contextlib.suppress(FileNotFoundError):  # just removed
                used += path.stat().st_size
        if used >= limit[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[: limit[0] - used], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        yield lambda: limit.__setitem__(0, 1 << 30)


@pytest.mark.parametrize("disk", [full_tmpfs, full_injected])
@pytest.mark.parametrize("direct", [False, True])
def test_a_full_disk_loses_nothing(tmp_path, disk, direct):
    place = tmp_path / "disk"
    place.mkdir()
    rng = np.random.default_rng(0)
    with disk(place) as free:
        with RowLog(place / "log", 8, direct=direct) as log:
            held = rng.integers(0, 1 << 32, (1200, 8), np.uint32)
            log.write(np.arange(1200), held)
            log.commit({"step": 1})
            kept, failures = held.copy(), []
            for step in range(40):
                rows = rng.permutation(1200 + 10 * (step + 1))[:400]
                rows = np.union1d(rows, np.arange(1200 + 10 * step, 1200 + 10 * (step + 1)))
                new = rng.integers(0, 1 << 32, (rows.size, 8), np.uint32)
                for tries in range(3):
                    try:
                        log.write(rows, new)
                        break
                    except OSError as error:
                        failures.append(error)
                    assert len(log) == 1200 + 10 * step
                    check_rows(log, np.setdiff1d(np.arange(len(log)), rows), held)
                    if tries:  # and what the first one freed was not enough
                        free()
                else:
                    raise AssertionError("a write must succeed once there is room")
                grown = np.empty((1200 + 10 * (step + 1), 8), np.uint32)
                grown[: len(held)], grown[rows] = held, new
                held = grown
                check_rows(log, np.arange(len(held)), held)
            assert failures
            for error in failures:
                assert error.errno == errno.ENOSPC and f"{place}/log/" in str(error)
        with RowLog(place / "log", 8, direct=direct) as log:
            assert log.meta == {"step": 1} and len(log) == 1200
            check_rows(log, np.arange(1200), kept)


def check_rows(log, rows, held):
    out = np.empty((rows.size, 8), np.uint32)
    log.read(rows, out)
    np.testing.assert_array_equal(out, held[rows])


@pytest.mark.parametrize("name", ["pwrite", "fdatasync", "fsync", "replace"])
def test_a_commit_that_fails_is_made_again(tmp_path, monkeypatch, name):
    owner = type(tmp_path) if name == "replace" else os
    with RowLog(tmp_path, 8) as log:
        rows = np.arange(15)  # less than a buffer
        log.write(rows, np.full((15, 8), 1, np.uint32))
        log.commit({"step": 1})
        log.write(rows[:9], np.full((9, 8), 2, np.uint32))
        with monkeypatch.context() as patch:

            def fail(*_):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr(owner, name, fail)
            for _ in range(2):
                with pytest.raises(OSError, match=str(tmp_path)):
                    log.commit({"step": 2})
        assert log.meta == {"step": 1}
        log.commit({"step": 2})
        log.write(rows, np.full((15, 8), 3, np.uint32))
    with RowLog(tmp_path, 8) as log:
        assert log.meta == {"step": 2}
        check_rows(log, rows, np.repeat([2, 1], [9, 6])[:, None] * np.ones(8, np.uint32))


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_failed_sync_gave_up_is_written_again(tmp_path, monkeypatch, lost):
    with RowLog(tmp_path, 8) as log:
        rows = np.arange(300)
        log.write(rows, np.full((300, 8), 1, np.uint32))
        log.commit({"step": 1})
        log.write(rows, np.full((300, 8), 2, np.uint32))
        with monkeypatch.context() as patch:

            def fail(_):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(OSError, match=str(tmp_path)):
                log.commit({"step": 2})
        doubtful = next(file for file in log._state.files if file.doubtful)
        if lost:  # of the page cache too
            with open(doubtful.path, "r+b") as stream:
                stream.seek(doubtful.synced * 48)
                stream.write(bytes(48))
            rule = rf"'{doubtful.path}' must have at offset {doubtful.synced * 48} the record"
            with pytest.raises(OSError, match=rule):
                log.commit({"step": 2})
            assert log.meta == {"step": 1}
            return
        written, real = [], os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda *a: written.append(a[2]) or real(*a))
        log.commit({"step": 2})
        assert written == [doubtful.path.stat().st_size - doubtful.written * 48]
        assert not doubtful.doubtful
    with RowLog(tmp_path, 8) as log:
        assert log.meta == {"step": 2}
        check_rows(log, rows, np.full((300, 8), 2, np.uint32))

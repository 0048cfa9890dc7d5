"""The log of rows as its callers see it; tests/test_row_log_model.py tries random calls."""

import gc
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from cupyrec.embedding import row_log_files, row_log_streams
from cupyrec.embedding.row_log import RowLog


def payloads(rows, words=8, version=0):
    """What a row holds in a version of it."""
    rows = np.asarray(rows, np.uint64)[:, None] * np.uint64(1 << 20) + np.uint64(version)
    mixed = (rows + np.arange(words // 2, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return np.ascontiguousarray(mixed).view(np.uint32)


def read(log, rows):
    out = np.empty((len(rows), log.words), np.uint32)
    log.read(np.asarray(rows, np.int64), out)
    return out


def write(log, rows, version=0):
    rows = np.asarray(rows, np.int64)
    log.write(rows, payloads(rows, log.words, version))


@pytest.fixture
def tiny(monkeypatch):
    """Files of 4 KB, a buffer of 1 KB."""
    monkeypatch.setattr(row_log_files, "_LEAST", 4096)
    monkeypatch.setattr(row_log_streams, "_BUFFER", 1024)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("words", [4, 8, 20, 1028])
@pytest.mark.parametrize("n", [0, 1, 127, 1025])
def test_reads_what_was_written(tmp_path, tiny, direct, words, n):
    with RowLog(tmp_path / "log", words, direct=direct) as log:
        order = np.random.default_rng(n).permutation(n)
        write(log, order)
        np.testing.assert_array_equal(read(log, order), payloads(order, words))
        write(log, order[: n // 2], 1)
        log.commit({"n": n})
        np.testing.assert_array_equal(
            read(log, order[: n // 2]), payloads(order[: n // 2], words, 1)
        )
        np.testing.assert_array_equal(read(log, order[n // 2 :]), payloads(order[n // 2 :], words))
    with RowLog(tmp_path / "log", words, direct=direct) as log:
        assert len(log) == n and log.meta == {"n": n} and log.lost == 0
        np.testing.assert_array_equal(
            read(log, order[: n // 2]), payloads(order[: n // 2], words, 1)
        )
        seen = [rows for rows, got in log.records() if check_records(rows, got, order[: n // 2])]
        assert sorted(np.concatenate([*seen, []]).tolist()) == list(range(n))


def check_records(rows, got, rewritten):
    for version, part in enumerate([~np.isin(rows, rewritten), np.isin(rows, rewritten)]):
        np.testing.assert_array_equal(got[part], payloads(rows[part], got.shape[1], version))
    return True


def test_what_was_not_committed_is_forgotten(tmp_path, tiny):
    log = RowLog(tmp_path, 8)
    write(log, range(100))
    del log
    log = RowLog(tmp_path, 8)
    assert len(log) == 0 and log.meta == {}
    write(log, range(50), 1)
    log.commit({"a": [1, None, "é"]})
    write(log, range(90), 2)
    log.truncate(3)
    write(log, range(20), 3)
    del log
    log = RowLog(tmp_path, 8)
    assert len(log) == 50 and log.meta == {"a": [1, None, "é"]}
    np.testing.assert_array_equal(read(log, range(50)), payloads(range(50), version=1))


def test_truncated_rows_come_back_only_as_written_anew(tmp_path, tiny):
    with RowLog(tmp_path, 8) as log:
        write(log, range(100))
        log.commit({})
        log.truncate(10)
        log.commit({})
        write(log, range(10, 60), 1)
        log.commit({})
    with RowLog(tmp_path, 8) as log:
        assert len(log) == 60
        np.testing.assert_array_equal(read(log, range(10)), payloads(range(10)))
        np.testing.assert_array_equal(read(log, range(10, 60)), payloads(range(10, 60), version=1))


def test_versions_change_with_their_rows(tmp_path, tiny):
    with RowLog(tmp_path, 8) as log:
        write(log, range(40))
        before = log.versions(np.arange(40))
        assert before.dtype == np.uint64 and np.unique(before).size == 40
        write(log, [3, 30], 1)
        changed = np.flatnonzero(log.versions(np.arange(40)) != before)
        assert changed.tolist() == [3, 30]


def test_files_stay_small(tmp_path, tiny):
    rng = np.random.default_rng(0)
    with RowLog(tmp_path, 8) as log:
        write(log, range(1000))
        for version in range(1, 40):
            write(log, rng.choice(1000, 300, replace=False), version)
            if version % 4 == 0:
                log.commit({})
        files = log._state.files
        with log._state.lock:  # no file goes meanwhile
            on_disk = sum(f.stat().st_size for f in tmp_path.glob("*.rows"))
            assert 1000 * 48 <= files.needed_bytes <= 2000 * 48
            assert on_disk <= files.disk_bytes <= 1.5 * files.needed_bytes + 4 * 4096
        assert 40 * 300 * 48 < log.written_bytes
        log.commit({})
        write(log, range(1000), 50)
        log.commit({})
        write(log, [0], 51)  # waits
        assert log.disk_bytes <= 1.5 * files.needed_bytes + 4 * 4096


def test_memory_is_told(tmp_path):
    with RowLog(tmp_path, 8) as log:
        empty = log.nbytes
        write(log, range(1_100_000))
        assert 5 * 1_100_000 <= log.nbytes - empty <= 5 * (2 << 20) + (1 << 20)
        log.commit({})
        assert log.nbytes - empty <= 5 * (2 << 20) + (1 << 20)
        assert empty < 20 << 20


def test_reads_while_rows_are_written_and_moved(tmp_path, tiny):
    rows, stop, wrong = np.arange(5000), threading.Event(), []

    def look():
        rng = np.random.default_rng(1)
        while not stop.is_set():
            asked = 8 * rng.choice(625, 50, replace=False)
            try:
                np.testing.assert_array_equal(read(log, asked), payloads(asked))
            except BaseException as error:
                wrong.append(error)

    with RowLog(tmp_path, 8) as log:
        write(log, rows)
        before = log.versions(rows[::8])
        reader = threading.Thread(target=look)
        reader.start()
        for version in range(40):
            write(log, rows[rows % 8 > 0], version)
            if version % 10 == 0:
                log.commit({})
        stop.set()
        reader.join()
        moved = log.versions(rows[::8]) != before
    assert not wrong and moved.mean() > 0.5


def test_reads_while_rows_come_and_go(tmp_path, tiny):
    """They say so, or give what is there; rows go by a chunk of addresses, so none may be asked."""
    stop, wrong, seen = threading.Event(), [], {"there": 0, "gone": 0}
    new = np.arange((1 << 20) + 100)[-200:]

    def look():
        while not stop.is_set():
            try:
                np.testing.assert_array_equal(read(log, new), payloads(new, 4))
                seen["there"] += 1
            except ValueError as error:
                seen["gone"] += 1
                if not re.search("must be (less than|written first)", str(error)):
                    wrong.append(error)
            except BaseException as error:
                wrong.append(error)

    with RowLog(tmp_path, 4) as log:
        write(log, range(1 << 20))
        log.truncate(new[0])
        new_payloads = payloads(new, 4)
        reader = threading.Thread(target=look)
        reader.start()
        end = time.monotonic() + 60
        for number in itertools.count():
            log.write(new, new_payloads)
            log.truncate(new[0])
            if number >= 60 and (seen["gone"] or time.monotonic() > end):
                break
        stop.set()
        reader.join()
    assert not wrong and seen["gone"]


def test_one_log_has_a_folder(tmp_path):
    with RowLog(tmp_path, 8) as log:
        with pytest.raises(BlockingIOError, match=f"'{tmp_path}' must be open once"):
            RowLog(tmp_path, 8)
        code = f"from cupyrec.embedding.row_log import RowLog; RowLog({str(tmp_path)!r}, 8)"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert other.returncode == 1 and "BlockingIOError" in other.stderr
        write(log, [0])
        log.commit({})
    with RowLog(tmp_path, 8) as log:
        assert len(log) == 1


def test_a_folder_of_other_words_or_format(tmp_path):
    RowLog(tmp_path, 8).close()
    with pytest.raises(ValueError, match=r"'words' must be 8 as in '.*', got 12\."):
        RowLog(tmp_path, 12)
    RowLog(tmp_path, 8).close()  # nobody has it


def test_arguments(tmp_path):
    log = RowLog(tmp_path, 8)
    rows, good = np.arange(3), payloads(range(3))
    for words in (0, 6, -4):
        with pytest.raises(ValueError, match="RowLog: 'words'"):
            RowLog(tmp_path / "other", words)
    with pytest.raises(TypeError, match=r"RowLog\.write: 'rows' must be int64, got int32"):
        log.write(rows.astype(np.int32), good)
    with pytest.raises(TypeError, match=r"RowLog\.write: 'payloads' must be uint32, got float32"):
        log.write(rows, good.view(np.float32))
    with pytest.raises(ValueError, match=r"RowLog\.write: 'payloads'"):
        log.write(rows, good[:, :4].copy())
    with pytest.raises(ValueError, match=r"RowLog\.write: 'payloads' must be C-contiguous"):
        log.write(rows, payloads(range(6))[::2])
    with pytest.raises(ValueError, match=r"RowLog\.write: 'rows' must be at least 0, got -1\."):
        log.write(rows - 1, good)
    log.write(rows, good)
    with pytest.raises(ValueError, match=r"RowLog: 'rows' must be less than 3, got 3\."):
        log.read(rows + 1, good)
    with pytest.raises(ValueError, match=r"RowLog: 'rows' must be less than 3, got 3\."):
        log.versions(rows + 1)
    with pytest.raises(ValueError, match=r"RowLog\.truncate: 'count' must be at most 3, got 4\."):
        log.truncate(4)
    with pytest.raises(TypeError):
        log.commit({"a": object()})
    assert len(log) == 3
    log.close()
    log.close()
    for call in (
        lambda: log.write(rows, good), lambda: log.read(rows, good), lambda: log.truncate(0),
        lambda: log.commit({}), lambda: log.versions(rows), lambda: next(log.records()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must be open, got a closed log"):
            call()


def test_records_refuse_writes_meanwhile(tmp_path, tiny):
    with RowLog(tmp_path, 8) as log:
        write(log, range(1000))
        records = log.records()
        next(records)
        write(log, [3], 1)
        with pytest.raises(RuntimeError, match=r"RowLog\.records: no row must be written"):
            for _ in records:
                pass
        write(log, range(1000), 1)
        assert sum(len(rows) for rows, _ in log.records()) == 1000


def test_threads_end_with_the_log(tmp_path):
    def ours():
        return [t for t in threading.enumerate() if t.name.startswith("cupyrec-")]

    gc.collect()  # logs of other tests
    before = len(ours())
    log = RowLog(tmp_path, 8)
    write(log, range(100))
    read(log, range(100))
    open_files = len(os.listdir("/proc/self/fd"))
    assert len(ours()) > before
    del log
    gc.collect()
    assert len(ours()) == before
    assert len(os.listdir("/proc/self/fd")) < open_files


def test_says_once_that_the_page_cache_stays(tmp_path, monkeypatch, caplog):
    real = os.open

    def refusing(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    with caplog.at_level(logging.WARNING, "cupyrec"), RowLog(tmp_path, 8, direct=True) as log:
        write(log, range(3000))
        log.commit({})
        write(log, range(3000), 1)
        np.testing.assert_array_equal(read(log, range(3000)), payloads(range(3000), version=1))
    assert [r.message.split(": ")[1] for r in caplog.records] == [
        f"the file system of '{tmp_path}' refuses O_DIRECT"
    ]


def test_new_rows_may_come_in_any_order_but_must_all_be_there_at_a_commit(tmp_path):
    with RowLog(tmp_path, 8) as log:
        write(log, [5, 2])
        assert len(log) == 6
        np.testing.assert_array_equal(read(log, [2, 5]), payloads([2, 5]))
        with pytest.raises(
            ValueError, match=r"RowLog\.read: rows must be written first, got row 3"
        ):
            read(log, [2, 3])
        with pytest.raises(ValueError, match=r"all of 6 rows must be written, got 4 not\."):
            log.commit({})
        assert sorted(row for rows, _ in log.records() for row in rows) == [2, 5]
        log.truncate(3)
        write(log, [0, 1])
        log.commit({})
    with RowLog(tmp_path, 8) as log:
        np.testing.assert_array_equal(read(log, range(3)), payloads(range(3)))


@pytest.mark.parametrize("name", ["write", "truncate", "commit"])
def test_ctrl_c_waits_for_the_end_of_a_call(name, tmp_path, monkeypatch):
    """One that comes as a lock is taken would leave it taken."""
    with RowLog(tmp_path, 8) as log:
        write(log, range(3))
        calls = {
            "write": lambda: write(log, range(4)),
            "truncate": lambda: log.truncate(2),
            "commit": lambda: log.commit({"step": 1}),
        }
        go_on = log._compaction.go_on

        def interrupted():
            signal.raise_signal(signal.SIGINT)
            go_on()

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(log._compaction, "go_on", interrupted)
            calls[name]()
        assert len(log) == {"write": 4, "truncate": 2, "commit": 3}[name]
        assert log.meta == ({"step": 1} if name == "commit" else {})


def test_ctrl_c_as_records_begin_lets_compaction_go_on(tmp_path, monkeypatch):
    with RowLog(tmp_path, 8) as log:
        write(log, range(3))
        pause = log._compaction.pause

        def interrupted(by=1):
            pause(by)
            if by == 1:
                signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(log._compaction, "pause", interrupted)
            list(log.records())
        assert log._compaction._paused == 0
        assert len(list(log.records())) == 1

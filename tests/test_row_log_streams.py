"""Appending through a buffer, and writes that fail."""

import errno
import os

import numpy as np
import pytest

from cupyrec.embedding import row_log_files, row_log_streams
from cupyrec.embedding.row_log_files import Files
from cupyrec.embedding.row_log_streams import Stream
from cupyrec.ops.log_records import SLOT_BITS


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(row_log_files, "_LEAST", 48 * 20)
    monkeypatch.setattr(row_log_streams, "_BUFFER", 48 * 8)
    return Files(tmp_path, words=8, direct=False)


def put(stream, n, start=0):
    """Append so many records of 6 equal words each; return their addresses."""
    addresses = []
    while len(addresses) < n:
        records, address = stream.room()
        m = min(len(records), n - len(addresses))
        records[:m] = np.arange(start + len(addresses), start + len(addresses) + m)[:, None]
        stream.took(m)
        addresses += range(address, address + m)
    return addresses


def contents(files):
    return [np.fromfile(f.path, np.uint64).reshape(-1, 6)[:, 0].tolist() for f in files]


def test_files_fill_up_one_after_another(files):
    stream = Stream(files, committed=False)
    addresses = put(stream, 45)
    assert addresses == [f << SLOT_BITS | s for f in range(3) for s in range(20)][:45]
    assert contents(files) == [list(range(20)), list(range(20, 40)), []]
    stream.flush()
    stream.flush()
    assert contents(files)[2] == list(range(40, 45))
    assert [f.writer >= 0 for f in files] == [False, False, True]
    assert files.written_bytes == 45 * 48
    assert files.committed[:3].tolist() == [0, 0, 0]


def test_copies_of_committed_records_are_committed(files):
    stream = Stream(files, committed=True)
    put(stream, 21)
    assert files.committed[:2].tolist() == [20, 20]
    assert files.bits[:2].all()


def test_buffered_records_are_found(files):
    stream = Stream(files, committed=False)
    out = np.zeros((30, 4), np.uint64)
    stream.copy_to(np.arange(30), out)
    addresses = np.array(put(stream, 30))
    stream.copy_to(addresses, out)
    buffered = addresses < 0
    assert 0 < buffered.sum() < 30
    assert out[:, 0].tolist() == [i if b else 0 for i, b in enumerate(buffered)]


@pytest.mark.parametrize("taken", [0, 50])
def test_a_write_that_fails_is_made_again(files, monkeypatch, taken):
    stream = Stream(files, committed=False)
    put(stream, 8)
    real, room = os.pwrite, [taken]

    def full(descriptor, data, offset):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, data[: room[0]], offset)
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for _ in range(2):
            missing = 8 * 48 - room[0]
            rule = rf"RowLog: '.*0001\.rows' must take {missing} bytes more, got No space left"
            with pytest.raises(OSError, match=rule) as raised:
                stream.room()
            assert raised.value.errno == errno.ENOSPC
    put(stream, 3, 8)
    stream.flush()
    assert contents(files) == [list(range(11))]


def test_a_file_that_can_not_be_made_changes_nothing(files, monkeypatch):
    stream = Stream(files, committed=False)
    put(stream, 20)
    with monkeypatch.context() as patch:
        patch.setattr(files, "create", lambda: open("/nonexistent/file"))
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                stream.room()
    assert put(stream, 2) == [1 << SLOT_BITS, 1 << SLOT_BITS | 1]


@pytest.mark.parametrize(
    ("least", "records"), [(1 << 14, 1), (1 << 14, 85), (1 << 14, 86), (960, 3)]
)
def test_a_page_is_written_once(files, monkeypatch, least, records):
    monkeypatch.setattr(row_log_files, "_LEAST", least)
    stream = Stream(files, committed=False)
    stream.end_page()
    assert stream.file is None
    put(stream, records)
    stream.end_page()
    length = stream.file.length
    pages = -(-records * 48 // 4096)
    assert length == min(-(-pages * 4096 // 48), least // 48)
    stream.end_page()
    assert stream.file.length == length  # there is nothing new


def test_goes_on_with_a_file(files):
    stream = Stream(files, committed=False)
    put(stream, 5)
    stream.flush()
    stream.file.close_writer()
    other = Stream(files, committed=False)
    other.go_on(stream.file)
    put(other, 16, 5)
    other.flush()
    assert contents(files) == [list(range(20)), [20]]

"""The reader on several files, compressed, empty, missing or changing ones, by several threads."""

import gzip
import os
import re
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from test_tsv import CODE, LABEL, SIZE, rows

from cupyrec import cpu
from cupyrec.data import TSV, Schema, lines, tsv


@pytest.fixture
def write(tmp_path):
    def write(content: bytes | str, name: str = "clicks.tsv") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("block", [7, 1 << 20])
@pytest.mark.parametrize(("name", "compress"), [
    ("a.tsv.gz", gzip.compress),
    ("a.tsv.zst", lambda text: pa.compress(text, "zstd", asbytes=True)),
    ("a.tsv.gz", lambda text: gzip.compress(text[:9]) + gzip.compress(text[9:])),
])  # fmt: skip
def test_compressed(write, monkeypatch, block, name, compress):
    monkeypatch.setattr(lines, "_BLOCK", block)
    content = b"".join(b"%d\t%x\n" % (i % 2, i) for i in range(1000))
    got = rows(TSV(write(compress(content), name), Schema((LABEL, CODE))), 64)
    assert got == [(i % 2, [], [i]) for i in range(1000)]


@pytest.mark.parametrize("name", ["a.tsv.gz", "a.tsv.zst"])
@pytest.mark.parametrize("damage", [lambda b: b[:-3], lambda b: b[:3], lambda b: b"1\tff\n" * 9])
def test_damaged_compression(write, name, damage):
    content = b"1\tff\n" * 999
    whole = gzip.compress(content) if "gz" in name else pa.compress(content, "zstd", asbytes=True)
    path = write(damage(whole), name)
    with pytest.raises(ValueError, match=re.escape(f"{path}: must be a whole {path.suffix} file")):
        rows(TSV(path, Schema((LABEL, CODE))), 64)


def test_several_files_make_one_epoch(write):
    paths = [write("1\ta\n0\tb", "a"), write("1\tc\n", "b"), write("0\td\n1\te\n", "c")]
    data = TSV(paths, Schema((LABEL, CODE)))
    for _ in range(2):
        assert [ids for _, _, ids in rows(data, 2)] == [[10], [11], [12], [13], [14]]
        assert [len(batch) for batch in data.batches(2)] == [2, 2, 1]


def test_empty_files(write):
    schema = Schema((LABEL, CODE))
    full, empty = write("1\ta\n"), write("", "empty.tsv")
    with pytest.raises(ValueError) as caught:
        TSV([full, empty], schema)
    assert str(caught.value) == f"{empty}: must have at least one row, got an empty file."
    zipped = write(gzip.compress(b""), "empty.gz")
    with pytest.raises(ValueError) as caught:
        TSV([full, zipped], schema)
    assert str(caught.value) == f"{zipped}: must have at least one row, got an empty file."
    wrong = write("x\ny\n", "wrong.tsv")
    with pytest.raises(ValueError) as caught:
        rows(TSV([full, wrong], schema, on_error="skip"), 1)
    assert str(caught.value) == f"{wrong}: must have at least one row, got malformed lines alone."


def test_missing_files(tmp_path, write):
    with pytest.raises(FileNotFoundError, match=r"nothing.tsv: must be a file"):
        TSV([write("1\ta\n"), tmp_path / "nothing.tsv"], Schema((LABEL, CODE)))
    with pytest.raises(IsADirectoryError, match=re.escape(f"{tmp_path}: must be a file")):
        TSV(tmp_path, Schema((LABEL, CODE)))
    with pytest.raises(ValueError, match="'paths' must name at least one file"):
        TSV([], Schema((LABEL, CODE)))


def test_files_that_change_are_refused(write):
    path, other = write("1\ta\n"), write("1\tb\n", "other.tsv")
    data = TSV([other, path], Schema((LABEL, CODE)))
    assert [ids for _, _, ids in rows(data, 9)] == [[11], [10]]
    write("1\tab\n")
    told = f"{path}: must stay as it was when the dataset was made, got a file of another size or "
    with pytest.raises(ValueError, match=re.escape(told)):
        data.of_rank(0, 2).batches(9)
    data, stat = TSV([other, path], data.schema), path.stat()
    write("1\tba\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=re.escape(told)):
        data.batches(9)
    path.unlink()
    with pytest.raises(ValueError, match=re.escape(told)):
        data.batches(9)


def test_a_file_must_not_change_while_others_are_read(write):
    paths = [write("1\ta\n" * 5), write("1\tb\n", "other.tsv")]
    batches = TSV(paths, Schema((LABEL, CODE))).batches(2)
    next(batches)
    write("0\tbc\n", "other.tsv")
    with pytest.raises(ValueError, match=re.escape(f"{paths[1]}: must stay as it was")):
        list(batches)


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("cupyrec-in-order")]


def test_few_rows_a_batch_are_read_by_the_thread_that_asks(write):
    batches = TSV(write("1\ta\n" * 900), Schema((LABEL, CODE))).batches(255)
    next(batches)
    assert not workers()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_batches_are_the_same_for_any_number_of_threads(write, monkeypatch, on_error):
    monkeypatch.setattr(tsv, "_FEW", 64)
    monkeypatch.setattr(lines, "_BLOCK", 1000)
    path = write("".join(f"{i % 2}\t{i}\t{i:x}\n" for i in range(2003)))
    data = TSV(path, Schema((LABEL, SIZE, CODE)), on_error=on_error)
    before = cpu.num_threads()
    try:
        for threads in (1, 2, 7):
            cpu.set_num_threads(threads)
            assert [ids[0] for _, _, ids in rows(data, 64)] == list(range(2003))
            batches = data.batches(64)
            next(batches)
            assert bool(workers()) == (threads > 1)
            batches.close()
            assert not workers()
    finally:
        cpu.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_before_a_malformed_line_come_whatever_reads_ahead(write, monkeypatch, threads):
    monkeypatch.setattr(tsv, "_FEW", 3)
    monkeypatch.setattr(cpu, "_threads", threads)
    path = write("1\ta\n" * 10 + "x\ta\n" + "1\ta\n" * 50)
    batches = TSV(path, Schema((LABEL, CODE))).batches(3)
    assert [len(next(batches)) for _ in range(3)] == [3, 3, 3]
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 11, column 'label'")):
        next(batches)

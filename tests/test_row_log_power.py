"""A row log after the power fails: what was not synced is there, or not, or in part."""

import contextlib
import os
import shutil

import numpy as np
import pytest
from test_row_log import payloads, read, tiny, write  # noqa: F401

from cupyrec.embedding import row_log_compaction, row_log_files
from cupyrec.embedding.row_log import RowLog

SECTOR, PAGE = 512, 4096


class Disk:
    """What of a folder is surely on the disk, as far as the calls that wait for it tell."""

    def __init__(self, folder, patch):
        self.folder = folder
        self.entries: dict[str, int] = {}  # name -> file, as of the last sync of the folder
        self.contents: dict[int, bytes] = {}  # file -> as of its last sync
        self.kept = contextlib.ExitStack()  # open, so that the system gives no number again
        self.seen = lambda: None
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self.synced(getattr(os, name)))
        create = row_log_files.Files.create

        def created(files):
            file = create(files)
            self.keep(file.reader.descriptor, b"")
            return file

        patch.setattr(row_log_files.Files, "create", created)

    def synced(self, real):
        def call(descriptor):
            self.seen()
            real(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path == str(self.folder):
                self.entries = self.now()
            else:
                with open(path, "rb") as stream:
                    self.keep(descriptor, stream.read())
            self.seen()

        return call

    def keep(self, descriptor, content):
        number = os.fstat(descriptor).st_ino
        if number not in self.contents:
            self.kept.callback(os.close, os.dup(descriptor))
        self.contents[number] = content

    def now(self):
        return {e.name: e.inode() for e in os.scandir(self.folder) if e.name != "LOCK"}

    def fail(self, to, rng):
        """Make what may be left: each change since the last sync is there by chance."""
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        now, share = self.now(), rng.choice([0, 0.5, 1])
        current = {number: (self.folder / name).read_bytes() for name, number in now.items()}
        for name in self.entries.keys() | now.keys():
            entries = now if rng.random() < share else self.entries
            if (number := entries.get(name)) is None:
                continue
            old = self.contents.get(number, b"")
            new = current.get(number, old)
            data = bytearray(old.ljust(len(new), b"\0"))
            for at in range(0, len(data), SECTOR):
                if rng.random() < share:
                    data[at : at + SECTOR] = new[at : at + SECTOR].ljust(SECTOR, b"\0")
            del data[max(len(old), len(new)) :]
            for at in range(0, len(data), PAGE):  # one that was being written may be lost
                if old[at : at + PAGE] != new[at : at + PAGE] and rng.random() < share / 5:
                    data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))
            keep = len(data) if rng.random() < share else len(old)
            (to / name).write_bytes(data[:keep])


@pytest.mark.parametrize("seed", range(3))
def test_the_last_commit_is_there(tmp_path, tiny, monkeypatch, seed):  # noqa: F811
    monkeypatch.setattr(row_log_compaction, "_PIECE", 2048)
    rng, chance = np.random.default_rng(seed), np.random.default_rng(seed + 100)
    (folder := tmp_path / "log").mkdir()
    disk, images = Disk(folder, monkeypatch), []
    truth, versions = {0: np.empty(0, np.int64)}, np.empty(0, np.int64)
    with RowLog(folder, 8) as log:

        def look():  # by whom a commit and the compaction exclude each other
            if chance.random() < 0.15:
                image = tmp_path / f"image{len(images)}"
                disk.fail(image, chance)
                images.append((image, log.meta.get("step", 0)))

        disk.seen = look
        for step in range(1, 13):
            for part in range(4):
                old = np.flatnonzero(rng.random(versions.size) < 0.4)
                rows = np.concatenate([old, np.arange(rng.integers(0, 60)) + versions.size])
                versions = np.resize(versions, max(versions.size, rows.max(initial=-1) + 1))
                versions[rows] = 4 * step + part
                write(log, rows, 4 * step + part)
            truth[step] = versions.copy()
            log.commit({"step": step})
        disk.seen = lambda: None
    disk.kept.close()
    assert len(images) > 10 and any(step > 6 for _, step in images)
    for image, done in images:
        with RowLog(image, 8) as log:
            step = log.meta.get("step", 0)
            assert step in (done, done + 1)
            check_rows(log, truth[step])


def check_rows(log, versions):
    assert len(log) == versions.size
    rows, got = np.arange(versions.size), read(log, range(versions.size))
    for version in np.unique(versions):
        part = versions == version
        np.testing.assert_array_equal(got[part], payloads(rows[part], version=version))

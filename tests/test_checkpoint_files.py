import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import trial
from oracle import sentence
from test_checkpoint import dlrm, everything, trained

import cupyrec
from cupyrec import checkpoint, checkpoint_files, checkpoint_shards, optim

ROOT = Path(__file__).parents[1]


def rewrite_manifest(folder, change):
    """Let `change` have its way with the manifest, and give it the crc32 that fits."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["crc32"]
    change(manifest)
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    file.write_text(json.dumps(manifest))


def as_format_2(manifest):
    manifest["format"] = 2
    for entry in manifest["groups"]:
        entry["shards"] = [shard["name"] for shard in entry["shards"]]
        del entry["tables"]


def test_format_2_loads(tmp_path):
    model, optimizer = trained(optim.CatchUpAdam)
    checkpoint.save(tmp_path / "c", model, optimizer)
    rewrite_manifest(tmp_path / "c", as_format_2)
    fresh = dlrm()
    again = optim.CatchUpAdam(fresh.parameters(), 0.1)
    assert checkpoint.load(tmp_path / "c", fresh, again)["format"] == 2
    assert everything(fresh, again) == everything(model, optimizer)


def test_other_formats_are_refused(tmp_path):
    checkpoint.save(tmp_path / "c", dlrm())
    for version in (1, 5):
        rewrite_manifest(tmp_path / "c", lambda m, v=version: m.update(format=v, cupyrec="9.1"))
        text = (
            f"checkpoint: format of '{tmp_path / 'c'}' must be from 2 to 4, got {version} "
            f"(written by cupyrec 9.1; this is {cupyrec.__version__}). "
            "Use the version that wrote it."
        )
        with pytest.raises(ValueError, match=sentence(text)):
            checkpoint.load(tmp_path / "c", dlrm())


def test_sentences_of_damage(tmp_path):
    checkpoint.save(tmp_path / "c", dlrm())
    file = tmp_path / "c" / "dense.safetensors"
    content = file.read_bytes()
    size, crc32 = len(content), zlib.crc32(content)
    for wrong, rule in {
        content[:-3]: f"must have {size} bytes, got {size - 3}.",
        content[:-1] + b"x": f"must have crc32 {crc32}, got {zlib.crc32(content[:-1] + b'x')}: "
        "it is damaged.",
    }.items():
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=sentence(f"checkpoint: '{file}' {rule}")):
            checkpoint.verify(tmp_path / "c")
    for text in ("", "{", "[]", "3", '{"model": "DLRM"}', "\udcff"):
        (tmp_path / "c" / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match="manifest.json' must be a manifest in JSON, got "):
            checkpoint.read_manifest(tmp_path / "c")


# Folders that appear whole


def test_what_exists_is_left_alone(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "f").touch()
    (tmp_path / "l").symlink_to("nowhere")
    for name in "cfl":
        text = sentence(f"checkpoint.save: '{tmp_path / name}' must not exist yet.")
        with pytest.raises(FileExistsError, match=text):
            checkpoint.save(tmp_path / name, dlrm())
    manifest = tmp_path / "c" / "manifest.json"
    for path, found in [
        (tmp_path / "c", f"got no {manifest}: a run has one after its first save"),
        (tmp_path / "none", "found nothing there"),
    ]:
        text = sentence(f"checkpoint: '{path}' must be a checkpoint folder, {found}.")
        with pytest.raises(FileNotFoundError, match=text):
            checkpoint.load(path, dlrm())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "f", "l"]


class FullDisk:
    """A file that takes so many bytes and no more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room[0] -= len(data)
        if self.room[0] < 0:
            raise OSError(28, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    model, optimizer = trained()
    checkpoint.save(tmp_path / "old", model, optimizer)
    total = sum(len(content) for content in trial.files(tmp_path / "old").values())
    real = open

    def full(path, mode="r", *more, **options):
        file = real(path, mode, *more, **options)
        return FullDisk(file, room) if "w" in mode else file

    monkeypatch.setattr(checkpoint_shards, "open", full, raising=False)
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: full(path, "wb").write(data))
    for share in (0, 0.2, 0.4, 0.6, 0.8, 0.99):
        room = [int(share * total)]
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'new'}'"):
            checkpoint.save(tmp_path / "new", model, optimizer)
        assert [p.name for p in tmp_path.iterdir()] == ["old"]
    monkeypatch.undo()
    for name in ("fsync", "rename"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(os, name, lambda *_: FullDisk(None, [0]).write(b"x"))
            checkpoint.save(tmp_path / "new", model, optimizer)
        assert [p.name for p in tmp_path.iterdir()] == ["old"]
    checkpoint.load(tmp_path / "old", model, optimizer)


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path):
    (tmp_path / ".c.tmp").mkdir()
    (tmp_path / ".c.tmp" / "dense.safetensors").write_bytes(b"half")
    (tmp_path / ".c.tmp" / "extra").touch()
    checkpoint.save(tmp_path / "c", dlrm())
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert checkpoint.verify(tmp_path / "c")["model"] == "DLRM"
    assert "extra" not in trial.files(tmp_path / "c")


def test_files_are_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    sync, rename = os.fsync, Path.rename

    def noted(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", lambda p, to: (calls.append("rename"), rename(p, to)))
    checkpoint.save(tmp_path / "c", dlrm())
    at = calls.index("rename")
    names = {p.name for p in (tmp_path / "c").iterdir()}
    assert {p.name for p in calls[:at]} == names | {".c.tmp"}
    assert calls[at - 1].name == ".c.tmp"  # its entries, after what they name
    assert calls[at + 1 :] == [tmp_path]


SAVE_FOR_EVER = """
import sys
sys.path[:0] = sys.argv[2:]
from test_checkpoint import trained
from cupyrec import checkpoint

model, optimizer = trained(ids=range(2000))
number = 0
while True:
    checkpoint.save(f"{sys.argv[1]}/{number}", model, optimizer)
    number += 1
"""


def test_kill_9_leaves_the_last_good_one(tmp_path):
    """Whenever it comes: what has its name is whole, and what has none is cleared."""
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, tmp_path, ROOT / "tests", ROOT],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "3").exists() and saver.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for _ in range(20):  # in the midst of the next one, as a rule
        if any(tmp_path.glob(".*.tmp/*.npy")):
            break
        time.sleep(0.0005)
    saver.kill()
    assert saver.communicate()[1] == ""
    assert saver.returncode == -signal.SIGKILL
    saved = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(saved) >= 4
    for path in saved:
        assert checkpoint.verify(path)["groups"][0]["rows"] == 4000
    model, optimizer = trained(ids=range(2000))
    checkpoint.load(max(saved, key=lambda path: int(path.name)), model, optimizer)
    checkpoint.save(tmp_path / str(len(saved)), model, optimizer)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_of_ones_own(tmp_path):
    with checkpoint_files.new_folder(tmp_path / "a" / "b", "f") as folder:
        told = checkpoint_files.write_file(folder / "x", b"content")
        assert not (tmp_path / "a" / "b").exists()
    assert told == {"bytes": 7, "crc32": zlib.crc32(b"content")}
    assert trial.files(tmp_path / "a" / "b") == {"x": b"content"}
    with pytest.raises(KeyboardInterrupt), checkpoint_files.new_folder(tmp_path / "c", "f"):
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["a"]

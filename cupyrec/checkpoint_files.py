"""The files of a checkpoint: its manifest, and folders that appear whole or not at all.

manifest.json         format, versions, model and its configuration, groups of tables with their
                      shards, optimizer, progress, and the size and crc32 of every other file; crc32
                      of its own
dense.safetensors     parameter/NAME, buffers too; optimizer/STATE/NAME; rates/GROUP of catch-up
GROUP.SHARD.*.npy     rows: see `cupyrec.checkpoint_shards`
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cupyrec import __version__, errors

__all__ = [
    "check_files", "find_checkpoint", "new_folder", "read_manifest", "sync", "verify", "write_file",
    "write_manifest",
]  # fmt: skip

_MARKS = ("manifest.json", "export.json")  # of what may be overwritten
DELTA = 4  # of what has changed since another checkpoint
FORMAT = 3  # 2 had one shard of each group, and told neither its rows nor a group's tables


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, where: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a folder under a temporary name, which becomes `path` unless something is raised.

    Whoever writes a file in it must sync it.

    Parameters
    ----------
    path : path
        A folder that doesn't exist yet.
    where : str
        Who asks, for errors.
    overwrite : bool
        Whether a checkpoint or export at `path` is replaced, once the new one is whole. If the
        process is killed in that instant, the old one is beside it: .NAME.old.

    Raises
    ------
    FileExistsError
        There is something at `path`; it is left as it is.
    OSError
        The disk is full, say; nothing stands at `path` then.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     with new_folder(root + "/new", "a test") as folder:
    ...         _ = write_file(folder / "a", b"b")
    ...     (Path(root) / "new" / "a").read_bytes()
    b'b'
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        if not overwrite:
            raise FileExistsError(f"{where}: '{path}' must not exist yet.")
        if path.is_symlink() or not any((path / name).is_file() for name in _MARKS):
            raise FileExistsError(
                f"{where}: '{path}' must be a checkpoint or an export to be overwritten, "
                "got something else."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir()
    try:
        with errors.naming(path):
            yield temporary
            sync(temporary)
        if path.exists():  # overwritten
            old = path.with_name(f".{path.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_file(file: Path, content: bytes) -> dict[str, int]:
    """Write a file and sync it; return its size and crc32.

    Examples
    --------
    See `new_folder`.
    """
    file.write_bytes(content)
    sync(file)
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def write_manifest(folder: Path, values: dict[str, Any]) -> int:
    """Write manifest.json: these values, the format, the version and a crc32, which is returned.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = write_manifest(Path(folder), {"files": {}, "groups": []})
    ...     verify(folder)["format"]
    3
    """
    version = DELTA if "base" in values else FORMAT
    manifest = {"format": version, "cupyrec": __version__, **values}
    manifest["crc32"] = _crc32(manifest)
    write_file(folder / "manifest.json", json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest["crc32"]


def find_checkpoint(path: str | os.PathLike) -> Path:
    """Return `path`, or if it is a run's folder its best checkpoint, else its last.

    Examples
    --------
    >>> find_checkpoint("no/run").as_posix()
    'no/run'
    """
    path = Path(path)
    if not (path / "manifest.json").exists():
        path = next((p for p in (path / "best", path / "last") if p.exists()), path)
    return path


def read_manifest(path: str | os.PathLike, *, delta: bool = False) -> dict[str, Any]:
    """Return the manifest of a checkpoint; groups of format 2 as those of 3.

    Parameters
    ----------
    path : path
    delta : bool
        Whether it may hold only what has changed since another one.

    Raises
    ------
    FileNotFoundError
        There is no checkpoint at `path`.
    ValueError
        The manifest is damaged, or of a newer format than this version reads; or it is a delta's.

    Examples
    --------
    See `write_manifest`.
    """
    file = Path(path) / "manifest.json"
    if not file.is_file():
        if not Path(path).exists():
            raise FileNotFoundError(
                f"checkpoint: '{path}' must be a checkpoint folder, found nothing there."
            )
        raise FileNotFoundError(
            f"checkpoint: '{path}' must be a checkpoint folder, got no {file}: a run has one after "
            "its first save."
        )
    try:
        manifest = json.loads(file.read_text("utf-8"))
        version, crc32 = manifest["format"], manifest.pop("crc32", None)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint: '{file}' must be a manifest in JSON, got {error!r}."
        ) from None
    if version not in (2, FORMAT, DELTA):
        raise ValueError(
            f"checkpoint: format of '{path}' must be from 2 to {DELTA}, got {version} "
            f"(written by cupyrec {manifest.get('cupyrec')}; this is {__version__}). "
            "Use the version that wrote it."
        )
    if crc32 != _crc32(manifest):
        raise ValueError(
            f"checkpoint: '{file}' must have crc32 {crc32}, got {_crc32(manifest)}: it is damaged."
        )
    if version == DELTA and not delta:
        raise ValueError(
            f"checkpoint: '{path}' must hold all rows, got what has changed since "
            f"'{manifest['base']['name']}': `cupyrec checkpoint compact` writes all."
        )
    if version == 2:
        for entry in manifest["groups"]:
            entry["shards"] = [{"name": name, "rows": entry["rows"]} for name in entry["shards"]]
            entry["tables"] = None
    return manifest


def manifest_crc32(path: str | os.PathLike) -> int:
    """Return the crc32 that a checkpoint's manifest tells, by which others know it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     crc32 = write_manifest(Path(folder), {"files": {}, "groups": []})
    ...     manifest_crc32(folder) == crc32
    True
    """
    return json.loads((Path(path) / "manifest.json").read_text("utf-8"))["crc32"]


def verify(path: str | os.PathLike) -> dict[str, Any]:
    """Read every file of a checkpoint against its size and crc32; return the manifest.

    Raises
    ------
    FileNotFoundError
        No checkpoint, or a file of it is missing.
    ValueError
        A file is damaged; it is named, and where it ends if it is too short.

    Examples
    --------
    See `write_manifest`.
    """
    manifest = read_manifest(path)
    check_files(Path(path), manifest["files"])
    return manifest


def check_files(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Read files against their size and crc32, which the manifest tells by name.

    Raises
    ------
    FileNotFoundError, ValueError
        As `verify`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     check_files(Path(root), {"a": write_file(Path(root, "a"), b"b")})
    """
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"checkpoint: '{file}' must exist, it is in the manifest.")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise ValueError(
                f"checkpoint: '{file}' must have {expected['bytes']} bytes, got {size}."
            )
        if (got := _file_crc32(file)) != expected["crc32"]:
            raise ValueError(
                f"checkpoint: '{file}' must have crc32 {expected['crc32']}, got {got}: "
                "it is damaged."
            )


def _crc32(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def _file_crc32(file: Path) -> int:
    crc = 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk.

    Examples
    --------
    >>> sync(Path("."))
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints: a folder of plain files, written whole or not at all, verified before it is used.

manifest.json         format, versions, model and its configuration, tables, optimizer,
                      progress, and the size and crc32 of every other file; crc32 of its own
dense.safetensors     parameter/NAME, buffers too; optimizer/STATE/NAME; rates/GROUP of catch-up
GROUP.SHARD.*.npy     tables (N,), ids (N,), vectors (N, D), state.NAME (N, columns)
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from safetensors import numpy as safetensors

from cupyrec import __version__, arrays, random
from cupyrec.embedding import Group, InitialVectors, Rows, StatePart, export_rows
from cupyrec.nn import FusedMLP, Module
from cupyrec.ops.adam_history import AdamHistory
from cupyrec.optim import Optimizer

__all__ = ["load", "read_manifest", "save", "sync", "verify"]

FORMAT = 2
_ROWS = 1 << 16  # rows in memory at a time
_SHARD = "00000-of-00001"


def save(
    path: str | os.PathLike,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    config: dict[str, Any] | None = None,
    progress: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint: under a temporary name, synced to disk, then renamed.

    Parameters
    ----------
    path : path
        A folder that doesn't exist yet.
    model : Module
    optimizer : Optimizer, optional
        Its state is saved too, dense and rows.
    config : dict, optional
        JSON values: what is needed to build the model again.
    progress : dict, optional
        JSON values: where training stands.

    Raises
    ------
    FileExistsError
        There is something at `path`; it is left as it is.
    FloatingPointError
        A parameter or a vector is not finite; nothing stands at `path` then.
    OSError
        The disk is full, say; nothing stands at `path` then.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec.models import DLRM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder + "/checkpoint", DLRM(2, 3))
    ...     read_manifest(folder + "/checkpoint")["groups"][0]["rows"]
    0
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"checkpoint.save: '{path}' must not exist yet.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir()
    try:
        dense = safetensors.save(_dense(model, optimizer))  # save_file raises no OSError
        (temporary / "dense.safetensors").write_bytes(dense)
        groups = [
            _save_group(temporary, name, group, optimizer is not None)
            for name, group in model.named_groups()
        ]
        manifest = {
            "format": FORMAT,
            "cupyrec": __version__,
            "model": type(model).__name__,
            "config": config or {},
            "progress": progress or {},
            "optimizer": optimizer and optimizer.state_dict(),
            "groups": groups,
            "dropout_seeds": {name: mlp.dropout_seed for name, mlp in _mlps(model)},
            "files": {file.name: _fingerprint(file) for file in sorted(temporary.iterdir())},
        }
        manifest["crc32"] = _crc32(manifest)
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        for file in [*temporary.iterdir(), temporary]:
            sync(file)
        temporary.rename(path)
        sync(path.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # "No space left on device" alone says too little
        raise


def read_manifest(path: str | os.PathLike) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises
    ------
    FileNotFoundError
        There is no checkpoint at `path`.
    ValueError
        The manifest is damaged, or of a newer format than this version reads.

    Examples
    --------
    See `save`.
    """
    file = Path(path) / "manifest.json"
    if not file.is_file():
        raise FileNotFoundError(f"checkpoint: '{path}' must be a checkpoint folder, got no {file}.")
    try:
        manifest = json.loads(file.read_text("utf-8"))
        version, crc32 = manifest["format"], manifest.pop("crc32", None)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint: '{file}' must be a manifest in JSON, got {error!r}."
        ) from None
    if version != FORMAT:
        raise ValueError(
            f"checkpoint: format of '{path}' must be {FORMAT}, got {version} "
            f"(written by cupyrec {manifest.get('cupyrec')}; this is {__version__})."
        )
    if crc32 != _crc32(manifest):
        raise ValueError(
            f"checkpoint: '{file}' must have crc32 {crc32}, got {_crc32(manifest)}: it is damaged."
        )
    return manifest


def verify(path: str | os.PathLike) -> dict[str, Any]:
    """Read every file of a checkpoint against its size and crc32; return the manifest.

    Raises
    ------
    FileNotFoundError
        No checkpoint, or a file of it is missing.
    ValueError
        A file is damaged; it is named.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec.models import DLRM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder + "/checkpoint", DLRM(2, 3))
    ...     verify(folder + "/checkpoint")["model"]
    'DLRM'
    """
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = Path(path) / name
        if not file.is_file():
            raise FileNotFoundError(f"checkpoint: '{file}' must exist, it is in the manifest.")
        got = _fingerprint(file)
        if got != expected:
            raise ValueError(f"checkpoint: '{file}' must have {expected}, got {got}.")
    return manifest


def load(
    path: str | os.PathLike, model: Module, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint into a model, after `verify`; return the manifest.

    Parameters
    ----------
    path : path
    model : Module
        Of the class and shapes that were saved. Its tables are replaced.
    optimizer : Optimizer, optional
        Of the class that was saved, with such a schedule. Without it, optimizer state is left
        aside.

    Raises
    ------
    FileNotFoundError, ValueError
        As `verify`; or model or optimizer are not the saved ones. They are unchanged then.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec.models import DLRM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder + "/checkpoint", DLRM(2, 3))
    ...     load(folder + "/checkpoint", DLRM(2, 3))["format"]
    2
    """
    manifest = verify(path)
    _check_fits(path, manifest, model, optimizer)
    dense = safetensors.load_file(Path(path) / "dense.safetensors")
    states = _states(model, optimizer)
    if optimizer is not None:
        saved = {key for key in dense if key.startswith("optimizer/")}
        saved |= {f"rows/{e['name']}/{name}" for e in manifest["groups"] for name, *_ in e["state"]}
        wanted = states.keys() | {
            f"rows/{name}/{part.name}"
            for name, group in model.named_groups()
            for part in group.store.state
        }
        for name in sorted(wanted ^ saved)[:1]:
            what = f"have {name}, got no" if name in wanted else f"not have {name}, got"
            raise ValueError(f"checkpoint.load: '{path}' must {what} such state.")
    model.load_state_dict(
        {
            key.removeprefix("parameter/"): array
            for key, array in dense.items()
            if key.startswith("parameter/")
        }
    )
    if optimizer is not None:
        for key, view in states.items():
            view[...] = arrays.copy_to(arrays.namespace("checkpoint.load", view), dense[key])
        optimizer.load_state_dict(manifest["optimizer"])
        optimizer.zero_grad()
        random.set_step(optimizer.t)
    for name, mlp in _mlps(model):
        mlp.dropout_seed = manifest["dropout_seeds"][name]
    for (_, group), entry in zip(model.named_groups(), manifest["groups"], strict=True):
        rates = dense.get(f"rates/{entry['name']}")
        _load_group(Path(path), group, entry, rates, optimizer is not None)
    return manifest


def _load_group(
    path: Path, group: Group, entry: dict[str, Any], rates: np.ndarray | None, with_state: bool
) -> None:
    initial = InitialVectors.from_dict(entry["initial"], group.width, entry["seed"])
    group.clear()
    group.initial = initial.to(group.xp)
    history = None if rates is None else AdamHistory(**entry["history"], rates=rates.tolist())
    if with_state and history is not None:
        group.history = history
    for rows in _read_group(path, entry):
        if not with_state:
            if history is not None:  # vectors are of the step that their row was in last
                former = Group(initial, dtype=group.dtype)
                former.set_state(_state_parts(entry), history)
                former.store.import_rows(rows)
                rows = export_rows(former, 0, len(rows.ids))
            rows = rows._replace(states={})
        group.store.import_rows(rows)


def _check_fits(path: Any, manifest: dict, model: Module, optimizer: Optimizer | None) -> None:
    if manifest["model"] != type(model).__name__:
        raise ValueError(
            f"checkpoint.load: '{path}' must be of model {type(model).__name__}, "
            f"got {manifest['model']}."
        )
    groups = [(name, group.width, group.dtype) for name, group in model.named_groups()]
    saved = [(entry["name"], entry["width"], entry["dtype"]) for entry in manifest["groups"]]
    if groups != saved:
        raise ValueError(
            f"checkpoint.load: '{path}' must have the model's groups {groups}, got {saved}."
        )
    if optimizer is not None:
        got = (manifest["optimizer"] or {}).get("class")
        if got != type(optimizer).__name__:
            raise ValueError(
                f"checkpoint.load: '{path}' must have the state of {type(optimizer).__name__}, "
                f"got {got}."
            )
        for (name, group), entry in zip(model.named_groups(), manifest["groups"], strict=True):
            own = None if group.history is None else group.history.constants
            if own != entry["history"]:  # rows would go on by the saved ones, the rest by others
                raise ValueError(
                    f"checkpoint.load: rows of '{name}' catch up by {entry['history']} in "
                    f"'{path}', which the optimizer must have, got {own}."
                )
        state = manifest["optimizer"]["schedule"]
        if state is not None and not hasattr(optimizer.schedule, "load_state_dict"):
            raise ValueError(
                "checkpoint.load: 'optimizer' must have a schedule with a state, as that of "
                f"'{path}' has {state}, got {optimizer.schedule}."
            )
        if state is not None:  # refused or half loaded, it would be a copy
            copy.deepcopy(optimizer.schedule).load_state_dict(state)


def _mlps(model: Module) -> list[tuple[str, FusedMLP]]:
    return [(name, m) for name, m in model.named_modules() if isinstance(m, FusedMLP)]


def _dense(model: Module, optimizer: Optimizer | None) -> dict[str, np.ndarray]:
    tensors = {f"parameter/{name}": array for name, array in model.state_dict().items()}
    tensors |= _states(model, optimizer)
    tensors |= {
        f"rates/{name}": group.history.rates
        for name, group in model.named_groups()
        if optimizer is not None and group.history is not None
    }
    tensors = {name: np.ascontiguousarray(arrays.to_host(a)) for name, a in tensors.items()}
    for name, array in tensors.items():
        if name.startswith("parameter/"):
            _check_finite(name, array)
    return tensors


def _states(model: Module, optimizer: Optimizer | None) -> dict[str, np.ndarray]:
    """Return the optimizer's state of dense parameters: name in the file -> view."""
    if optimizer is None:
        return {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if strangers := [p.shape for p in optimizer.parameters if id(p) not in names]:
        raise ValueError(
            f"checkpoint: the optimizer's parameters must be the model's, got also {strangers}."
        )
    return {
        f"optimizer/{state}/{names[id(parameter)]}": view
        for state, views in optimizer.state_arrays().items()
        for parameter, view in zip(optimizer.parameters, views, strict=True)
    }


def _save_group(folder: Path, name: str, group: Group, with_state: bool) -> dict[str, Any]:
    """Write a group's files, a few rows at a time; return its entry of the manifest."""
    store = group.store
    count = len(store)
    state = store.state if with_state else ()
    columns = {
        "tables": (np.uint32, (count,)),
        "ids": (np.int64, (count,)),
        "vectors": (np.float32, (count, store.width)),
        **{f"state.{part.name}": (part.dtype, (count, part.columns)) for part in state},
    }
    with contextlib.ExitStack() as stack:
        files = {
            key: stack.enter_context(open(_file(folder, name, _SHARD, key), "wb"))
            for key in columns
        }
        for key, (dtype, shape) in columns.items():
            header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(files[key], header)
        for first in range(0, count, _ROWS):
            at = first, min(first + _ROWS, count)
            rows = store.export_rows(*at) if with_state else export_rows(group, *at)
            _check_finite(f"vectors of {name}", rows.vectors)
            parts = {"tables": rows.tables, "ids": rows.ids, "vectors": rows.vectors}
            parts |= {f"state.{part.name}": rows.states[part.name] for part in state}
            for key, array in parts.items():
                files[key].write(np.ascontiguousarray(array).tobytes())
    return {
        "name": name,
        "width": store.width,
        "dtype": group.dtype,
        "rows": count,
        "seed": group.initial.seed,
        "initial": group.initial.to_dict(),
        "state": [[part.name, part.columns, part.initial, part.dtype.__name__] for part in state],
        "history": group.history.constants if state and group.history is not None else None,
        "shards": [_SHARD],
    }


def _read_group(folder: Path, entry: dict[str, Any]) -> Iterator[Rows]:
    """Yield a group's rows, a few at a time."""
    for shard in entry["shards"]:
        tables, ids, vectors, *states = (
            np.load(
                _file(folder, entry["name"], shard, key), mmap_mode="r" if entry["rows"] else None
            )
            for key in ["tables", "ids", "vectors", *(f"state.{s[0]}" for s in entry["state"])]
        )
        for first in range(0, len(ids), _ROWS):
            cut = slice(first, first + _ROWS)
            yield Rows(
                np.array(tables[cut]),
                np.array(ids[cut]),
                np.array(vectors[cut]),
                {
                    name: np.array(state[cut])
                    for (name, *_), state in zip(entry["state"], states, strict=True)
                },
            )


def _state_parts(entry: dict[str, Any]) -> tuple[StatePart, ...]:
    return tuple(StatePart(*part[:3], getattr(np, part[3])) for part in entry["state"])


def _file(folder: Path, name: str, shard: str, key: str) -> Path:
    return folder / f"{quote(name, safe='')}.{shard}.{key}.npy"  # a name may hold a slash


def _check_finite(name: str, array: np.ndarray) -> None:
    finite = int(np.isfinite(array).sum())
    if finite < array.size:
        raise FloatingPointError(
            f"checkpoint.save: {name} must be finite, "
            f"got {array.size - finite} of {array.size} values that are not."
        )


def _crc32(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def _fingerprint(file: Path) -> dict[str, int]:
    crc = size = 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}


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

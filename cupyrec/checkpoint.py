"""Checkpoints: a folder of plain files, written whole or not at all, verified before it is used.

Any number of ranks write one together, each the rows that it has; any number load it, each the rows
that it is to have. See `cupyrec.checkpoint_files` and `cupyrec.checkpoint_shards` for what lies in
the folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from cupyrec import arrays, random
from cupyrec.checkpoint_checks import check_share, check_unique
from cupyrec.checkpoint_deltas import (
    Link,
    base_of,
    changes,
    deleted_entry,
    deleted_rows,
    links,
    named_shards,
    note_saved,
    rows_since,
    take_rows,
)
from cupyrec.checkpoint_files import (
    manifest_crc32,
    new_folder,
    read_manifest,
    verify,
    write_file,
    write_manifest,
)
from cupyrec.checkpoint_fits import check_fits, check_states, parameters, states
from cupyrec.checkpoint_shards import (
    CANDIDATES,
    ShardWriter,
    catch_up_history,
    divided,
    shard_name,
)
from cupyrec.embedding import InitialVectors, Rows, Tables, exported
from cupyrec.nn import FusedMLP, Module
from cupyrec.ops.partition import owners, shards_of
from cupyrec.optim import Optimizer
from cupyrec.parallel import Communicator

__all__ = ["load", "read_manifest", "save", "verify"]


def save(
    path: str | os.PathLike,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    base: str | os.PathLike | None = None,
    config: dict[str, Any] | None = None,
    progress: dict[str, Any] | None = None,
    ranks: Communicator | None = None,
) -> None:
    """Write a checkpoint: under a temporary name, synced to disk, then renamed.

    Parameters
    ----------
    path : path
        A folder that doesn't exist yet.
    model : Module
    optimizer : Optimizer, optional
        Its state is saved too, dense and rows.
    base : path, optional
        The checkpoint that the model was last saved as, or loaded from with `optimizer`, which
        must be given: of rows, only those that training has looked up since are written, and keys
        that were deleted. Tables must be made with ``life=Life()``. It loads as long as its base
        is where it was.
    config : dict, optional
        JSON values: what is needed to build the model again.
    progress : dict, optional
        JSON values: where training stands.
    ranks : Communicator, optional
        Those that write it together, each a shard of its rows, rank 0 all else; by default the
        model's. They must see the same folder.

    Raises
    ------
    FileExistsError
        There is something at `path`; it is left as it is.
    FloatingPointError
        A parameter or a vector is not finite; nothing stands at `path` then.
    OSError
        The disk is full, say; nothing stands at `path` then.
    OtherRankError
        Another rank failed; nothing stands at `path` then.
    ValueError
        The model was last saved as, or loaded from, another checkpoint than `base`; an optimizer
        was made since; or none is given with `base`.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec.models import DLRM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder + "/checkpoint", DLRM(2, 3))
    ...     verify(folder + "/checkpoint")["groups"][0]["rows"]
    0
    """
    where, ranks = "checkpoint.save", ranks or model.ranks
    with contextlib.ExitStack() as stack:

        def begin() -> str | None:
            return None if ranks.rank else str(stack.enter_context(new_folder(path, where)))

        told, since = None, None
        if base is not None and optimizer is None:
            raise ValueError("checkpoint.save: 'optimizer' must be given with 'base', got None.")
        if base is not None:
            told, since = ranks.together(where, lambda: base_of(Path(path), Path(base), model))
        folder = Path(ranks.all_gather_json(where, ranks.together(where, begin))[0])
        part = ranks.together(
            where, lambda: _write_part(folder, model, optimizer, since, ranks.rank, ranks.size)
        )
        parts = ranks.all_gather_json(where, part)

        def finish() -> None:
            if ranks.rank > 0:
                return
            files = {name: told for _, files in parts for name, told in files.items()}
            counts = zip(*(rows for rows, _ in parts), strict=True)
            groups = _entries(model, optimizer is not None, since is not None)
            values = {
                "model": type(model).__name__,
                "config": config or {},
                "progress": progress or {},
                "optimizer": optimizer and optimizer.state_dict(),
                "groups": [divided(*group) for group in zip(groups, counts, strict=True)],
                "dropout_seeds": {name: mlp.dropout_seed for name, mlp in _mlps(model)},
                "files": dict(sorted(files.items())),
            }
            values |= {} if told is None else {"base": told}
            crc32.append(write_manifest(folder, values))
            stack.close()  # the rename

        crc32: list[int] = []
        ranks.together(where, finish)
        note_saved(model, ranks.all_gather_json(where, crc32)[0][0])


def _entries(model: Module, with_state: bool, delta: bool) -> list[dict[str, Any]]:
    """Each group's entry in the manifest, but for its rows; of a delta, of deleted keys too."""
    tables = {
        id(group): [t for t, w in enumerate(module.widths) if w == width]
        for module in model.modules()
        if isinstance(module, Tables)
        for width, group in module.groups.items()
    }
    entries = []
    for name, group in named_shards(model):
        state = group.store.state if with_state else ()
        catches_up = with_state and group.history is not None
        entries.append(
            {
                "name": name,
                "width": group.width,
                "dtype": group.dtype,
                "tables": tables.get(id(group)),
                "seed": group.initial.seed,
                "initial": group.initial.to_dict(),
                "state": [[p.name, p.columns, p.initial, p.dtype.__name__] for p in state],
                "history": group.history.constants if catches_up else None,
                "clock": group.clock,
            }
        )
        if delta:
            entries.append(deleted_entry(entries[-1]))
    return entries


def _write_part(
    folder: Path,
    model: Module,
    optimizer: Optimizer | None,
    since: dict[str, int | None] | None,
    rank: int,
    ranks: int,
) -> tuple[list[int], dict[str, Any]]:
    """Write what is a rank's; return the number of its rows in each group, and its files.

    If `since` is given that are rows looked up after a step, each group's own, and deleted keys.
    """
    counts, files = [], {}
    if rank == 0:
        dense = safetensors.save(_dense(model, optimizer))  # save_file raises no OSError
        files["dense.safetensors"] = write_file(folder / "dense.safetensors", dense)
    entries = iter(_entries(model, optimizer is not None, since is not None))
    for name, shard in named_shards(model):

        def write(rows: Callable[[], Iterable[Rows]], count: int, name: str = name) -> None:
            with ShardWriter(folder, next(entries), shard_name(rank, ranks), count) as writer:
                for some in rows():
                    _check_finite(f"vectors of {name}", some.vectors)
                    writer.write(some)
            counts.append(count)
            files.update(writer.files)

        if since is None:
            write(shard.store.export if optimizer else partial(exported, shard), len(shard.store))
        else:
            rows = partial(rows_since, shard, since[name])
            deleted = deleted_rows(shard, rank, ranks)
            write(rows, sum(len(some.ids) for some in rows()))
            write(lambda deleted=deleted: [deleted], len(deleted.ids))
    return counts, files


def load(
    path: str | os.PathLike,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    ranks: Communicator | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of any number of shards into a model, after checks; return the manifest.

    Parameters
    ----------
    path : path
    model : Module
        Of the class and shapes that were saved. Its tables are replaced. Without an optimizer they
        may be of another dtype: vectors are rounded as its rows are when they are written, for
        float16 to 65504 at most.
    optimizer : Optimizer, optional
        Of the class that was saved, with such a schedule. Without it, optimizer state is left
        aside.
    ranks : Communicator, optional
        Those that load it together, each the rows that it owns; by default the model's. They share
        the checks and read no more than the shards that may hold their rows: see
        `cupyrec.ops.partition.shards_of`. All are left as they were if one of them finds fault.

    Raises
    ------
    FileNotFoundError, ValueError
        As `verify`; a key is there twice; or model or optimizer are not the saved ones. They are
        unchanged then.
    OtherRankError
        Another rank failed.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec.models import DLRM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder + "/checkpoint", DLRM(2, 3))
    ...     load(folder + "/checkpoint", DLRM(2, 3))["model"]
    'DLRM'
    """
    path, where, ranks = Path(path), "checkpoint.load", ranks or model.ranks
    owned = None
    if ranks.size > 1:

        def owned(tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
            return owners(tables, ids, ranks.size) == ranks.rank

    def check() -> tuple[list[Link], dict[str, np.ndarray], list[bool]]:
        chain = links(path)
        manifest = chain[-1].manifest
        check_fits(path, manifest, model, optimizer)
        placed = [p for link in chain for p in check_share(*link, ranks.rank, ranks.size)]
        dense = safetensors.load_file(path / "dense.safetensors")
        if optimizer is not None:
            check_states(path, manifest, dense, model, optimizer)
        return chain, dense, placed

    chain, dense, placed = ranks.together(where, check)
    manifest = chain[-1].manifest
    everyones = zip(*ranks.all_gather_json(where, placed), strict=True)

    def check_others() -> list[Link]:
        """The chain, with the shards that this rank reads."""
        near = []
        for link in chain:
            groups = []
            for entry in link.manifest["groups"]:
                if all(next(everyones)):
                    own = shards_of(ranks.rank, ranks.size, len(entry["shards"]))
                    entry = entry | {"shards": [entry["shards"][number] for number in own]}
                else:
                    check_unique(link.folder, entry, owned)
                groups.append(entry)
            near.append(link._replace(manifest=link.manifest | {"groups": groups}))
        return near

    near = ranks.together(where, check_others)

    def take() -> None:
        _load_dense(manifest, dense, model, optimizer)
        for _, group in model.named_groups():
            group.clear()
        for name, shard in named_shards(model):
            entry = near[-1].entry(name)
            if entry is None:  # candidates, of which no account was kept
                shard.clock = near[-1].clock(name.removesuffix(CANDIDATES))
                continue
            initial = InitialVectors.from_dict(entry["initial"], shard.width, entry["seed"])
            history = catch_up_history(entry, dense)
            shard.initial = initial.to(shard.xp)
            if optimizer is not None and history is not None:
                shard.history = history
            shard.clock = near[-1].clock(name)
            for link in near:
                for change in changes(link, name, owned, history, optimizer is not None):
                    take_rows(shard, *change)
        note_saved(model, None if optimizer is None else manifest_crc32(path))

    ranks.together(where, take)
    return manifest


def _load_dense(
    manifest: dict[str, Any],
    dense: dict[str, np.ndarray],
    model: Module,
    optimizer: Optimizer | None,
) -> None:
    model.load_state_dict(parameters(dense))
    if optimizer is not None:
        for key, view in states(model, optimizer).items():
            view[...] = arrays.copy_to(arrays.namespace("checkpoint.load", view), dense[key])
        optimizer.load_state_dict(manifest["optimizer"])
        optimizer.zero_grad()
        random.set_step(optimizer.t)
    for name, mlp in _mlps(model):
        mlp.dropout_seed = manifest["dropout_seeds"][name]


def _mlps(model: Module) -> list[tuple[str, FusedMLP]]:
    return [(name, m) for name, m in model.named_modules() if isinstance(m, FusedMLP)]


def _dense(model: Module, optimizer: Optimizer | None) -> dict[str, np.ndarray]:
    tensors = {f"parameter/{name}": array for name, array in model.state_dict().items()}
    tensors |= states(model, optimizer)
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


def _check_finite(name: str, array: np.ndarray) -> None:
    finite = int(np.isfinite(array).sum())
    if finite < array.size:
        raise FloatingPointError(
            f"checkpoint.save: {name} must be finite, "
            f"got {array.size - finite} of {array.size} values that are not."
        )

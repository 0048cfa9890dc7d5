"""Checkpoints of small models, saved by hand, and what they are to answer."""

import shutil
from pathlib import Path

import numpy as np
import trial

import cupyrec
from cupyrec import checkpoint, models, nn, optim
from cupyrec.checkpoint_files import read_manifest, write_manifest
from cupyrec.checkpoint_reshard import split
from cupyrec.checkpoint_shards import read_keys, read_rows
from cupyrec.embedding import Life
from cupyrec.parallel import Communicator, Exchange, world

IDS = np.random.default_rng(5).integers(0, 60, (150, 2))  # a third of them unseen in training
FORGOTTEN = np.setdiff1d(IDS[:9, 0], [1, 3])  # of table 0, by the last of a chain
DENSE = np.random.default_rng(6).standard_normal((150, 1), np.float32)


def model_of(
    seed: int = 3, top: int = 8, life: Life | None = None, alone: bool = False, **options
) -> nn.Module:
    """A model of all ranks, or of this one alone."""
    cupyrec.manual_seed(seed)
    model = models.DLRM(1, 2, **{"embedding_dim": 4, "bottom": [8], "top": [top]} | options)
    group = model.embedding.group
    group.keep_account(life)
    group.exchange = Exchange(Communicator() if alone else world(), num_tables=2)
    return model


def expected(path: Path, **options) -> np.ndarray:
    """What `cupyrec.predict` says of the rows above after `checkpoint.load`."""
    model = model_of(**options)
    checkpoint.load(path, model)
    return cupyrec.predict(model, (DENSE, IDS))[:, None]


def save_one(path: Path, config: dict | None = None, kind=optim.Adam, **options) -> Path:
    model = model_of(**options)
    optimizer = kind(model.parameters(), 0.05)
    cupyrec.fit(model, trial.planted(100), optimizer=optimizer, batch_size=20)
    checkpoint.save(path, model, optimizer, config=config)
    return path


def save_chain(folder: Path, kind=optim.Adam) -> list[Path]:
    """A full checkpoint and two on top of it; the last one has forgotten ids, and has new ones."""
    model = model_of(life=Life(), alone=True)
    optimizer, paths = kind(model.parameters(), 0.05), []
    for number in range(3):
        data = trial.planted(60, seed=number, users=20 + 5 * number)
        cupyrec.fit(model, data, optimizer=optimizer, batch_size=20)
        if number == 2:
            assert 0 < model.embedding.delete(0, FORGOTTEN) < len(FORGOTTEN)
        paths.append(folder / f"step-{number}")
        checkpoint.save(paths[-1], model, optimizer, base=paths[-2] if number else None)
    return paths


def in_shards(paths: list[Path], folder: Path, shards: list[int]) -> list[Path]:
    """The same chain as if each of its checkpoints came from so many ranks."""
    made, told = [], {}
    for path, count in zip(paths, shards, strict=True):
        manifest = read_manifest(path, delta=True)
        files, groups = {"dense.safetensors": manifest["files"]["dense.safetensors"]}, []
        made.append(folder / path.name)
        made[-1].mkdir(parents=True)
        shutil.copy(path / "dense.safetensors", made[-1])
        for entry in manifest["groups"]:
            rows = (read_rows, path, entry)
            group, written = split(
                made[-1], entry, read_keys(path, entry), lambda r=rows: r[0](*r[1:]), count
            )
            groups.append(group)
            files |= written
        if told:
            told = {"base": manifest["base"] | told}
        kept = {k: v for k, v in manifest.items() if k not in ("format", "cupyrec", "base")}
        told = {"crc32": write_manifest(made[-1], kept | told | {"groups": groups, "files": files})}
    return made


def mix_shards(path: Path) -> None:
    """Tell of shards in another order, so that they have others' keys."""
    manifest = read_manifest(path)
    for entry in manifest["groups"]:
        entry["shards"].reverse()
    kept = {k: v for k, v in manifest.items() if k not in ("format", "cupyrec")}
    write_manifest(path, kept)


def spoil(path: Path, name: str) -> None:
    """Change a byte in the middle of a checkpoint's file whose name begins so."""
    (file,) = (f for f in path.iterdir() if f.name.startswith(name))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

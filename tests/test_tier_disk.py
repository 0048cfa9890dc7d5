"""A disk that fills up while tables on it are trained: an error, and training goes on after it."""

import contextlib
import errno
import os
import resource
import subprocess

import numpy as np
import pytest

import cupyrec
from cupyrec import checkpoint, models, nn, optim
from cupyrec.embedding import CachedSSD, Memory

STEPS, BATCH = 40, 256


@contextlib.contextmanager
def small_disk(folder):
    """A file system of 3 MB; what it gives makes it one of 40."""
    options = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder]
    if subprocess.run(options, capture_output=True).returncode:
        with small_files() as grow:  # nobody may mount here
            yield grow
        return
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=40m", folder], check=True)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def small_files():
    """Files of at most 0.4 MB, until what it gives is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def batches():
    generator = np.random.default_rng(0)
    for _ in range(STEPS):
        ids = generator.integers(0, 20_000, (BATCH, 2))
        yield np.ones((BATCH, 1), np.float32), ids, (ids[:, :1] % 2).astype(np.float32)


def built(tier):
    cupyrec.manual_seed(1)
    model = models.DLRM(1, 2, embedding_dim=32, bottom=[4], top=[4])
    model.embedding.keep_in(tier)
    return model, optim.Adagrad(model.parameters(), 0.1)


def step(model, optimizer, dense, ids, labels):
    loss = cupyrec.bce_with_logits(model(dense, ids), labels)
    loss.backward()
    optimizer.step()
    return float(loss.data)


@pytest.mark.parametrize("disk", [small_disk, lambda folder: small_files()])
def test_training_goes_on_when_there_is_room_again(disk, tmp_path):
    model, optimizer = built(Memory())
    truth = [step(model, optimizer, *batch) for batch in batches()]
    digest = model.embedding.digest()
    folder, losses, refused = tmp_path / "disk", [], []
    folder.mkdir()
    with disk(folder) as make_room:
        model, optimizer = built(CachedSSD(path=folder, cache_rows=64))
        for batch in batches():
            try:
                losses.append(step(model, optimizer, *batch))
            except OSError as error:
                refused.append(error)
                with pytest.raises(OSError, match=str(folder)):
                    checkpoint.save(tmp_path / "checkpoint", model, optimizer)
                assert not (tmp_path / "checkpoint").exists()
                make_room()
                losses.append(step(model, optimizer, *batch))
        assert len(refused) == 1
        assert refused[0].errno in (errno.ENOSPC, errno.EFBIG)
        assert os.fspath(folder) in str(refused[0])
        assert losses == truth
        assert model.embedding.digest() == digest
        checkpoint.save(tmp_path / "checkpoint", model, optimizer)
        again, its_optimizer = built(Memory())
        checkpoint.load(tmp_path / "checkpoint", again, its_optimizer)
        assert again.embedding.digest() == digest
        model.embedding.close()


@pytest.mark.parametrize("saved", [False, True])
def test_an_optimizer_that_finds_no_room_changes_nothing(saved, tmp_path):
    tier = CachedSSD(path=tmp_path, cache_rows=64)
    table = nn.MultiTableEmbedding(1, 32, tier=tier, seed=1)
    table(np.arange(3000)[:, None])
    if saved:
        table.save()
    before, logs = table.digest(), sorted(tmp_path.glob("*/*/*"))
    with small_files() as make_room:
        for _ in range(2):
            with pytest.raises(OSError, match=str(tmp_path)):
                optim.Adam(table.parameters(), 0.1)
            assert table.digest() == before
            assert sorted(tmp_path.glob("*/*/*")) == logs  # the new one does not fill the disk
        make_room()
        optim.Adam(table.parameters(), 0.1)
    assert [part.name for part in table.group.store.state] != []
    table.close()
    again = nn.MultiTableEmbedding(1, 32, tier=tier, seed=1)
    assert len(again.group.store) == 3000 * saved
    again.close()

"""A chain of deltas says what a full checkpoint does, on any number of ranks."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from oracle import sentence

import cupyrec
from cupyrec import checkpoint, checkpoint_deltas, nn, optim
from cupyrec.checkpoint_checks import check
from cupyrec.checkpoint_deltas import compact, links
from cupyrec.checkpoint_diff import diff
from cupyrec.checkpoint_files import manifest_crc32, write_manifest
from cupyrec.embedding import CachedHost, CachedSSD, Life, Memory
from cupyrec.parallel import Communicator, Exchange, world

IDS, PER_STEP = 3000, 40
LIFE = Life(admit_after=2, expire_after=25, check_every=5)


class Model(nn.Module):
    def __init__(self, life=LIFE, tier=None):
        self.wide = nn.MultiTableEmbedding(2, 4, life=life, tier=tier, seed=1)
        self.deep = nn.MultiTableEmbedding(1, 2, life=life, seed=2)
        self.top = nn.FusedMLP(10, [], 1, skip_final_activation=True)

    def forward(self, ids):
        parts = [self.wide(ids), self.deep(ids[:, :1])]
        flat = [cupyrec.reshape(part, (len(ids), -1)) for part in parts]
        return self.top(cupyrec.concatenate(flat, axis=1))


def built(make=optim.Adagrad, **options):
    cupyrec.manual_seed(7)
    model = Model(**options)
    return model, make(model.parameters(), 0.1)


def train(model, optimizer, day, steps=10):
    """Days move through the ids, so that some come and some go."""
    generator = np.random.default_rng(day)
    for _ in range(steps):
        ids = day * 60 + generator.integers(0, 200, (PER_STEP, 2))
        cupyrec.mean(model(ids)).backward()
        optimizer.step()


def digests(model):
    candidates = [
        group.candidates and len(group.candidates.store) for _, group in model.named_groups()
    ]
    dense = {name: np.asarray(a).tobytes() for name, a in model.state_dict().items()}
    return model.wide.digest(), model.deep.digest(), candidates, dense


def size(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*.npy"))


@pytest.mark.parametrize("make", [optim.Adagrad, optim.CatchUpAdam])
@pytest.mark.parametrize("tier", ["memory", "host", "ssd"])
def test_a_chain_of_ten_equals_the_full_save(tier, make, tmp_path):
    tiers = {
        "memory": Memory(), "host": CachedHost(cache_rows=1),
        "ssd": CachedSSD(path=tmp_path / "rows", cache_rows=64),
    }  # fmt: skip
    model, optimizer = built(make, tier=tiers[tier])
    train(model, optimizer, 0)
    checkpoint.save(tmp_path / "0", model, optimizer)
    for day in range(1, 11):
        train(model, optimizer, day)
        base = tmp_path / str(day - 1)
        checkpoint.save(tmp_path / str(day), model, optimizer, base=base, progress={"step": day})
    truth = digests(model)
    checkpoint.save(tmp_path / "full", model, optimizer, progress={"step": 10})
    chain = links(tmp_path / "10")
    assert [link.folder.name for link in chain] == [str(day) for day in range(11)]
    again, its_optimizer = built(make)
    manifest = checkpoint.load(tmp_path / "10", again, its_optimizer)
    assert manifest["progress"] == {"step": 10}
    assert digests(again) == truth
    assert its_optimizer.t == optimizer.t
    compact(tmp_path / "10", tmp_path / "compact")
    told = diff(tmp_path / "compact", tmp_path / "full")
    assert told["equal"], told
    check(tmp_path / "compact")
    for pair in ((model, optimizer), (again, its_optimizer)):  # they go on alike
        train(*pair, 11)
    assert digests(again) == digests(model)
    model.wide.close()


def test_what_a_delta_is_based_on_is_not_overwritten(tmp_path):
    model, optimizer = built()
    for day in range(3):
        train(model, optimizer, day, steps=2)
        base = tmp_path / str(day - 1) if day else None
        checkpoint.save(tmp_path / str(day), model, optimizer, base=base)
    for out in (tmp_path / "0", tmp_path / "2" / ".." / "1"):
        text = f"compact: 'out' must not be what '{tmp_path / '2'}' is based on, got '{out}'."
        with pytest.raises(ValueError, match=sentence(text)):
            compact(tmp_path / "2", out, overwrite=True)
    assert len(links(tmp_path / "2")) == 3
    compact(tmp_path / "2", tmp_path / "2", overwrite=True)
    assert len(links(tmp_path / "2")) == 1


def test_the_size_follows_the_rows_touched(tmp_path):
    model, optimizer = built(life=Life())
    ids = np.arange(IDS)[:, None] + [0, 0]
    cupyrec.mean(model(ids)).backward()
    optimizer.step()
    checkpoint.save(tmp_path / "full", model, optimizer)
    base, sizes = tmp_path / "full", []
    for touched in (0, 30, 300):
        if touched:
            cupyrec.mean(model(ids[:touched])).backward()
            optimizer.step()
        path = tmp_path / str(touched)
        checkpoint.save(path, model, optimizer, base=base)
        sizes.append(size(path))
        base = path
    headers = sizes[0]
    row = (size(tmp_path / "full") - headers / 2) / IDS
    assert (sizes[1] - headers) / 30 == pytest.approx(row, rel=0.01)
    assert (sizes[2] - headers) / 300 == pytest.approx(row, rel=0.01)


def test_a_delta_applied_twice_is_one(tmp_path):
    model, optimizer = built()
    train(model, optimizer, 0)
    checkpoint.save(tmp_path / "0", model, optimizer)
    train(model, optimizer, 2)
    model.wide.delete(0, np.arange(150, 200))
    checkpoint.save(tmp_path / "1", model, optimizer, base=tmp_path / "0")
    checkpoint.save(tmp_path / "1 again", model, optimizer, base=tmp_path / "1")  # nothing new
    shutil.rmtree(tmp_path / "1 again")
    twice = tmp_path / "twice"
    shutil.copytree(tmp_path / "1", twice)
    told = checkpoint.read_manifest(twice, delta=True)
    told["base"] = {"name": "../1", "crc32": manifest_crc32(tmp_path / "1")}
    kept = {k: v for k, v in told.items() if k not in ("format", "cupyrec")}
    write_manifest(twice, kept)
    results = []
    for path in (tmp_path / "1", twice):
        again, its_optimizer = built()
        checkpoint.load(path, again, its_optimizer)
        results.append(digests(again))
    assert len(links(twice)) == 3
    assert results[0] == results[1] == digests(model)


def test_deltas_move_with_their_base_and_are_refused_without(tmp_path):
    model, optimizer = built()
    (tmp_path / "a").mkdir()
    checkpoint.save(tmp_path / "a" / "0", model, optimizer)
    train(model, optimizer, 0)
    checkpoint.save(tmp_path / "a" / "1", model, optimizer, base=tmp_path / "a" / "0")
    (tmp_path / "a").rename(tmp_path / "b")
    again, its_optimizer = built()
    checkpoint.load(tmp_path / "b" / "1", again, its_optimizer)
    assert digests(again) == digests(model)
    before = digests(again)
    other, other_optimizer = built()
    train(other, other_optimizer, 5)
    shutil.rmtree(tmp_path / "b" / "0")
    with pytest.raises(FileNotFoundError, match="must be a checkpoint folder"):
        checkpoint.load(tmp_path / "b" / "1", again, its_optimizer)
    checkpoint.save(tmp_path / "b" / "0", other, other_optimizer)
    with pytest.raises(ValueError, match="must be what .* is based on, with crc32"):
        checkpoint.load(tmp_path / "b" / "1", again, its_optimizer)
    with pytest.raises(ValueError, match="must hold all rows, got what has changed since '../0'"):
        check(tmp_path / "b" / "1")
    assert digests(again) == before


@pytest.mark.parametrize("bases", [{"a": "../a"}, {"a": "../b", "b": "../a"}])
def test_a_chain_without_an_end_is_refused(bases, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_deltas, "manifest_crc32", lambda _: 7)  # as if it were forged
    for name, base in bases.items():
        told = {"files": {}, "groups": [], "base": {"name": base, "crc32": 7}}
        (tmp_path / name).mkdir()
        write_manifest(tmp_path / name, told)
    with pytest.raises(ValueError, match=r"a' must not be based on itself\.$"):
        links(tmp_path / "a")


def test_a_base_must_be_what_the_model_was(tmp_path):
    model, optimizer = built()
    checkpoint.save(tmp_path / "0", model, optimizer)
    train(model, optimizer, 0, steps=1)
    checkpoint.save(tmp_path / "1", model, optimizer)
    text = (
        f"checkpoint.save: '{tmp_path / '0'}' must be the checkpoint that the model was last "
        "saved as, or loaded from with the optimizer, got another."
    )
    with pytest.raises(ValueError, match=sentence(text)):
        checkpoint.save(tmp_path / "2", model, optimizer, base=tmp_path / "0")
    plain, plain_optimizer = built(life=None)
    checkpoint.save(tmp_path / "3", plain, plain_optimizer)
    with pytest.raises(ValueError, match="must be made with life=Life"):
        checkpoint.save(tmp_path / "4", plain, plain_optimizer, base=tmp_path / "3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "3"]
    checkpoint.load(tmp_path / "0", model, optimizer)
    checkpoint.save(tmp_path / "2", model, optimizer, base=tmp_path / "0")


def test_account_may_begin_and_end_with_a_checkpoint(tmp_path):
    for before, after in ((None, LIFE), (LIFE, None)):
        model, optimizer = built(life=before)
        train(model, optimizer, 0)
        path = tmp_path / str(before is None)
        checkpoint.save(path, model, optimizer)
        again, its_optimizer = built(life=after)
        checkpoint.load(path, again, its_optimizer)
        ids, vectors = again.wide.export_table(0)
        order, (truth_ids, truth) = np.argsort(ids), model.wide.export_table(0)
        np.testing.assert_array_equal(ids[order], np.sort(truth_ids))
        np.testing.assert_array_equal(vectors[order], truth[np.argsort(truth_ids)])


@pytest.mark.parametrize("tier", [None, CachedHost(cache_mb=1)])
def test_account_that_begins_takes_all_rows_as_looked_up_then(tier, tmp_path):
    model, optimizer = built(life=None)
    train(model, optimizer, 0, steps=60)
    checkpoint.save(tmp_path / "0", model, optimizer)
    model, optimizer = built(tier=tier)
    checkpoint.load(tmp_path / "0", model, optimizer)
    rows = len(model.wide.group.store)
    train(model, optimizer, 50, steps=6)  # of other ids; there was a check
    assert len(model.wide.group.store) >= rows
    lives = [rows.states["life"] for rows in model.deep.group.candidates.store.export()]
    assert np.concatenate(lives)[:, 0].min() > 60
    checkpoint.save(tmp_path / "1", model, optimizer, base=tmp_path / "0")
    compact(tmp_path / "1", tmp_path / "all")
    for path in (tmp_path / "1", tmp_path / "all"):
        again, its_optimizer = built()
        checkpoint.load(path, again, its_optimizer)
        assert digests(again) == digests(model)


def test_a_base_of_an_older_version_tells_no_clock(tmp_path):
    model, optimizer = built(life=None)
    train(model, optimizer, 0)
    checkpoint.save(tmp_path / "0", model, optimizer)
    told = checkpoint.read_manifest(tmp_path / "0")
    for entry in told["groups"]:
        del entry["clock"]
    kept = {k: v for k, v in told.items() if k not in ("format", "cupyrec")}
    write_manifest(tmp_path / "0", kept)
    model, optimizer = built(life=Life())
    checkpoint.load(tmp_path / "0", model, optimizer)
    train(model, optimizer, 1)
    checkpoint.save(tmp_path / "1", model, optimizer, base=tmp_path / "0")
    again, its_optimizer = built(life=Life())
    checkpoint.load(tmp_path / "1", again, its_optimizer)
    assert digests(again) == digests(model)


def test_state_that_the_base_does_not_have_is_refused(tmp_path):
    model, optimizer = built()
    train(model, optimizer, 0)
    checkpoint.save(tmp_path / "0", model, optimizer)
    with pytest.raises(ValueError, match="'optimizer' must be given with 'base', got None"):
        checkpoint.save(tmp_path / "1", model, base=tmp_path / "0")
    optimizer = optim.Adagrad(model.parameters(), 0.1)  # whose sums begin anew
    with pytest.raises(ValueError, match="or loaded from with the optimizer, got another"):
        checkpoint.save(tmp_path / "1", model, optimizer, base=tmp_path / "0")
    checkpoint.load(tmp_path / "0", model)  # without its sums
    with pytest.raises(ValueError, match="or loaded from with the optimizer, got another"):
        checkpoint.save(tmp_path / "1", model, optimizer, base=tmp_path / "0")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_without_an_optimizer_account_goes_on(tmp_path):
    model, optimizer = built()
    train(model, optimizer, 0, steps=60)
    checkpoint.save(tmp_path / "0", model, optimizer)
    again, _ = built(optim.Adam)
    checkpoint.load(tmp_path / "0", again)
    told = []
    for own in (model, again):
        rows = next(iter(own.wide.group.store.export()))
        told.append(sorted(zip(rows.ids.tolist(), rows.states["life"].tolist(), strict=True)))
    assert told[0] == told[1]


def test_the_way_to_a_base_may_lead_through_links(tmp_path):
    (tmp_path / "disk" / "far" / "away").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk" / "far" / "away")
    model, optimizer = built()
    checkpoint.save(tmp_path / "0", model, optimizer)
    (tmp_path / "last").symlink_to("0")
    for number in (1, 2):
        train(model, optimizer, number, steps=2)
        path = tmp_path / "home" / str(number)
        checkpoint.save(path, model, optimizer, base=tmp_path / "last")
        (tmp_path / "last").unlink()
        (tmp_path / "last").symlink_to(path)
    for way in (path, path.resolve(), tmp_path / "last"):
        again, its_optimizer = built()
        checkpoint.load(way, again, its_optimizer)
        assert digests(again) == digests(model)


@pytest.mark.ranks
def test_ranks_write_a_chain_and_others_load_it(tmp_path_factory):
    """Written by all ranks and by one; each loads what the other wrote."""
    ranks = world()
    folder = Path(ranks.all_gather_json("folder", str(tmp_path_factory.mktemp("chain")))[0])

    def alone():
        model, optimizer = built()
        for _, group in model.named_groups():
            group.exchange = Exchange(Communicator())
        return model, optimizer

    model, optimizer = built()
    train(model, optimizer, 0)
    checkpoint.save(folder / "0", model, optimizer)
    for day in (1, 2, 3):
        train(model, optimizer, day)
        model.wide.delete(1, np.arange(60 * day, 60 * day + 100))  # of all ranks
        checkpoint.save(folder / str(day), model, optimizer, base=folder / str(day - 1))
    checkpoint.save(folder / "full", model, optimizer)
    own = digests(model)[:2]
    for path in (folder / "3", folder / "full"):
        again, its_optimizer = built()
        checkpoint.load(path, again, its_optimizer)
        assert digests(again)[:2] == own
    single, its_optimizer = alone()  # each rank loads all rows
    checkpoint.load(folder / "3", single, its_optimizer, ranks=Communicator())
    assert digests(single)[:2] == own

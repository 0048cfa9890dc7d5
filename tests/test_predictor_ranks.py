"""Predictor of several ranks: each checks and reads its share of a checkpoint."""

import builtins
from pathlib import Path

import numpy as np
import pytest
import saved
from oracle import sentence
from saved import DENSE, IDS, model_of, save_chain, save_one

from cupyrec.embedding import CachedSSD, Memory
from cupyrec.ops.partition import owners
from cupyrec.parallel import Communicator, OtherRankError, world
from cupyrec.serving import Predictor
from cupyrec.serving.chain import Chain
from cupyrec.serving.served_model import Rules, ServedModel

SHARDS = [3, 1, 5]  # of the links of a chain


def served(path, rank, ranks, unseen="initial", tier=None):
    """What one of several ranks has, which speaks to no other."""
    template = model_of(alone=True)
    template.ranks.rank, template.ranks.size = rank, ranks
    rules = Rules("cpu", tier or Memory(), None, unseen, template, None)
    return ServedModel(Chain.found(path), rules)


def rows_of(model):
    (group,) = (group for _, group in model.model.named_groups())
    return {
        (int(table), int(id)): vector.tobytes()
        for some in group.store.export()
        for table, id, vector in zip(some.tables, some.ids, some.vectors, strict=True)
    }


def owned(rows, rank, ranks):
    tables, ids = (np.array(part) for part in zip(*rows, strict=True))
    own = owners(tables.astype(np.uint32), ids, ranks) == rank
    return {key: rows[key] for key, mine in zip(rows, own.tolist(), strict=True) if mine}


@pytest.fixture
def opened(monkeypatch):
    """Names of files that have been opened, a name for each time."""
    names, before = [], builtins.open

    def noting(file, *arguments, **options):
        names.append(Path(file).parent.name + "/" + Path(file).name)
        return before(file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", noting)
    return names


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("unseen", ["initial", 1])
def test_a_rank_has_its_rows_of_a_chain_in_any_shards(tmp_path, ranks, unseen):
    whole = save_chain(tmp_path / "whole")
    paths = saved.in_shards(whole, tmp_path / "parts", SHARDS)
    told, newer = (served(whole[number], 0, 1, unseen) for number in (0, 2))
    for rank in range(ranks):
        model = served(paths[0], rank, ranks, unseen)
        assert rows_of(model) == owned(rows_of(told), rank, ranks)
        update = model.update(Chain.found(paths[2]))
        model.take(update)
        assert rows_of(model) == owned(rows_of(newer), rank, ranks)
        anew = served(paths[2], rank, ranks, unseen)
        assert rows_of(anew) == rows_of(model)
        keys = np.array([0, 1], np.uint32), np.array([10**9, 10**9])
        for one in (model, anew):
            group, known = one.model.embedding.group, newer.model.embedding.group
            assert (group.initial(*keys) == known.initial(*keys)).all()


def test_a_rank_opens_its_shards_alone(tmp_path, opened):
    (path,) = saved.in_shards(save_chain(tmp_path / "whole")[:1], tmp_path / "parts", [8])
    for rank in range(8):
        opened.clear()
        served(path, rank, 8)
        shards = {name for name in opened if name.endswith(".npy")}
        assert shards
        assert all(f".{rank:05}-of-00008." in name for name in shards)
    opened.clear()
    for rank in range(4):
        served(path, rank, 4)
    checked = [name for name in opened if name.endswith("vectors.npy")]
    assert {checked.count(name) for name in checked} == {3}  # its crc32, its shape, its rows
    opened.clear()
    served(path, 1, 2, unseen=1)  # whose rows lie in shards of the other
    others = {name for name in opened if any(f".{n:05}-of" in name for n in range(4))}
    tables, ids = np.array([0, 1], np.uint32), np.array([1, 1])
    wanted = {number for number in owners(tables, ids, 8).tolist() if number < 4}
    assert wanted
    found = {number for number in range(4) for name in others if f".{number:05}-of" in name}
    assert found == wanted


def test_no_more_than_the_links_that_are_new_is_opened(tmp_path, opened):
    paths = saved.in_shards(save_chain(tmp_path / "whole"), tmp_path / "parts", [2, 2, 2])
    model = served(paths[1], 1, 2)
    opened.clear()
    model.take(model.update(Chain.found(paths[2])))
    names = {name for name in opened if name.endswith(".npy")}
    assert names
    assert all(name.startswith("step-2/") and "00001-of" in name for name in names)


def test_shards_with_keys_of_others_are_refused(tmp_path):
    (path,) = saved.in_shards(save_chain(tmp_path / "whole")[:1], tmp_path / "parts", [2])
    before = rows_of(served(path, 0, 1))
    saved.mix_shards(path)
    assert rows_of(served(path, 0, 1)) == before  # one rank reads all
    text = sentence(
        f"Predictor: shards of 'embedding.groups.4' in '{path}' must have their owners' keys "
        "alone, for several ranks to serve them, got others: `cupyrec checkpoint reshard` puts "
        "each in its place."
    )
    for rank in range(2):
        with pytest.raises(ValueError, match=text):
            served(path, rank, 2)


@pytest.mark.parametrize("part", ["tables", "ids", "vectors"])
def test_a_damaged_shard_is_told_by_all_who_read_it(tmp_path, part):
    (path,) = saved.in_shards(save_chain(tmp_path / "whole")[:1], tmp_path / "parts", [1])
    file = path / f"embedding.groups.4.00000-of-00001.{part}.npy"
    content = file.read_bytes()
    file.write_bytes(content[:128] + b"\xee" * (len(content) - 128))  # tables that there are not
    for rank in range(3):
        with pytest.raises(ValueError, match=f"'{file}' must have crc32 .*: it is damaged"):
            served(path, rank, 3, unseen=1)


@pytest.mark.ranks
def test_ranks_answer_together_as_one_does(tmp_path):
    ranks = world()
    folder = Path(ranks.all_gather_json("folder", str(tmp_path))[0])
    paths = [folder / "parts" / f"step-{n}" for n in range(3)]
    if ranks.rank == 0:
        whole = save_chain(folder / "whole")
        saved.in_shards(whole, folder / "parts", SHARDS)
        for unseen in ("initial", 1):
            with Predictor(whole[2], model=model_of(alone=True), unseen=unseen) as predictor:
                np.save(folder / f"{unseen}.npy", predictor.probabilities(DENSE, IDS)[0])
    ranks.barrier("saved")
    for unseen in ("initial", 1):
        with Predictor(paths[0], model=model_of(), unseen=unseen) as predictor:
            assert predictor.update(paths[2])
            got = predictor.predict((DENSE, IDS), batch_size=100)
            assert (got[:, None] == np.load(folder / f"{unseen}.npy")).all()
            rows = len(predictor.model.embedding.group.store)
            assert ranks.size == 1 or rows < ranks.all_gather("rows", np.array([rows])).sum()
    ranks.barrier("the end of the folder")


@pytest.mark.ranks
def test_what_one_rank_finds_damaged_none_serves(tmp_path):
    ranks = world()
    folder = Path(ranks.all_gather_json("folder", str(tmp_path))[0])
    last, tier = ranks.size - 1, CachedSSD(path=tmp_path / "rows", cache_mb=1)
    if ranks.rank == 0:
        for seed, name in enumerate(("good", "bad")):
            whole = save_one(folder / "whole" / name, seed=seed, alone=True)
            saved.in_shards([whole], folder, [ranks.size])
        shard = f"{last:05}-of-{ranks.size:05}"
        saved.spoil(folder / "bad", f"embedding.groups.4.{shard}.vectors")
    ranks.barrier("saved")
    kind = ValueError if ranks.rank == last else OtherRankError
    with Predictor(folder / "good", model=model_of(), tier=tier) as predictor:
        before, version = predictor.predict((DENSE, IDS)), predictor.version
        for _ in range(2):
            with pytest.raises(kind, match="it is damaged"):
                predictor.update(folder / "bad")
        assert len([*Path(tier.path).iterdir()]) == 1  # the one served
        assert (predictor.predict((DENSE, IDS)) == before).all()
        assert predictor.version == version
    with pytest.raises(kind, match="it is damaged"):
        Predictor(folder / "bad", model=model_of())
    ranks.barrier("the end of the folder")


def test_ranks_must_read_the_same_version(tmp_path, monkeypatch):
    paths = save_chain(tmp_path)
    with Predictor(paths[0], model=model_of()) as predictor:
        both = [predictor.version, "00000000"]
        monkeypatch.setattr(
            Communicator, "all_gather_json",
            lambda _, what, value: both if what == "version" else [value],
        )  # fmt: skip
        with pytest.raises(ValueError, match=f"got {both[0]}, 00000000: it was replaced"):
            predictor.update(paths[1])
        assert predictor.version == both[0]

import numpy as np
import pytest

from cupyrec import arrays, nn, optim
from cupyrec.embedding import MemoryStore, Tables
from cupyrec.embedding.statistics import Statistics
from cupyrec.parallel import Communicator, Exchange, world


def test_what_a_table_holds_and_how_it_is_used(xp):
    embedding = nn.MultiTableEmbedding(3, 2, fields=[0, 0, 2], seed=1).to(arrays.name(xp))
    ids = np.array([[1, 2, 5], [1, 3, 5], [4, 1, 5]])
    embedding(xp.asarray(ids))
    told = embedding.statistics()
    assert told["ids"].tolist() == [4, 0, 1]
    np.testing.assert_allclose(told["unique_ratio"], [4 / 6, np.nan, 1 / 3])
    assert told["inserted"].tolist() == [4, 0, 1]
    store = embedding.group.store
    np.testing.assert_allclose(told["bytes"], np.array([4, 0, 1]) / 5 * store.nbytes, atol=1)
    assert told["load"].tolist() == [store.load] * 3
    assert 0 < store.load < 1
    for _ in range(2):  # the second has nothing new
        embedding(xp.asarray(ids + 10))
    told = embedding.statistics()
    assert told["ids"].tolist() == [8, 0, 2]
    assert told["inserted"].tolist() == [0, 0, 0]  # by the last look-up
    embedding(xp.asarray(np.array([[1, 99, 5], [98, 2, 97]])))
    assert embedding.statistics()["inserted"].tolist() == [2, 0, 1]


def test_evaluation_is_not_counted():
    embedding = nn.MultiTableEmbedding(1, 2)
    embedding.eval()(np.array([[1], [2]]))
    told = embedding.statistics()
    assert (told["ids"].tolist(), told["inserted"].tolist()) == ([0], [0])
    assert np.isnan(told["unique_ratio"]).all()


def test_deletion_import_and_clear_are():
    embedding = nn.MultiTableEmbedding(2, 2)
    embedding(np.array([[1, 1], [2, 2]]))
    embedding.statistics()
    embedding.delete(0, np.array([2]))
    embedding.import_table(1, np.array([7, 8]), np.zeros((2, 2), np.float32))
    assert embedding.statistics()["ids"].tolist() == [1, 4]
    embedding.group.clear()
    assert embedding.statistics()["ids"].tolist() == [0, 0]


@pytest.mark.ranks
def test_those_of_several_ranks_are_of_the_whole_table():
    """Each looks up the same id, and one of its own; half of its own ids it has twice."""
    ranks = world()
    embedding = nn.MultiTableEmbedding(2, 2, seed=1)
    own = 10 * ranks.rank + 10
    embedding(np.array([[7, own], [7, own + 1], [7, own + 1]]))
    told = embedding.statistics()
    assert told["ids"].tolist() == [1, 2 * ranks.size]
    assert told["inserted"].tolist() == [1, 2 * ranks.size]
    np.testing.assert_allclose(told["unique_ratio"], [1 / 3, 2 / 3])
    store = embedding.group.store
    held = store.nbytes if len(store) else 0  # no table's, where it has no rows
    stores = ranks.all_gather("stores", np.array([held])).sum()
    np.testing.assert_allclose(told["bytes"].sum(), stores, atol=2 * ranks.size)
    alone = Tables(2, 2, seed=1)
    alone.group.exchange = Exchange(Communicator())
    numbers = 10 + np.arange(10 * ranks.size)
    for table, ids in [(0, np.array([7])), (1, numbers[numbers % 10 < 2])]:
        tables = np.full(ids.size, table, np.uint32)
        alone.group.look_up(tables, ids, insert=True)
    assert embedding.digest() == alone.digest()


@pytest.mark.ranks
def test_a_repr_is_of_one_rank_which_waits_for_no_other():
    ranks = world()
    embedding = nn.MultiTableEmbedding(1, 2)
    embedding(np.arange(40)[:, None])
    if ranks.rank == 0:
        for told in (repr(embedding), repr(embedding.group)):
            assert (f"(shard 0 of {ranks.size}, " in told) == (ranks.size > 1)
        assert f"Group({ranks.shard}ids={len(embedding.group.store)}, " in told
    ranks.barrier("the end")


def test_state_is_part_of_the_bytes():
    bytes_of = []
    for optimizer in (optim.SGD, optim.Adam):
        embedding = nn.MultiTableEmbedding(1, 64)
        optimizer(embedding.parameters(), lr=0.1)
        embedding(np.arange(1000)[:, None])
        bytes_of.append(int(embedding.statistics()["bytes"][0]))
    assert bytes_of[1] - bytes_of[0] == 1000 * 2 * 64 * 4


def test_a_table_beyond_the_number_given():
    store = MemoryStore(1)
    store.find_or_insert(
        np.array([3], np.uint32), np.array([5]), lambda *keys: np.zeros((1, 1), np.float32)
    )
    with pytest.raises(ValueError):
        Statistics().report(store, 2)

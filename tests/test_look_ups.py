import numpy as np
import pytest

from cupyrec.embedding import CachedHost, Group, InitialVectors, Uniform, import_vectors
from cupyrec.parallel import Communicator, Exchange, world

TABLES, IDS = np.zeros(4, np.uint32), np.array([5, 7, 5, -1])


def group(exchange=None, dtype="float32"):
    return Group(InitialVectors(3, Uniform(-1, 1), seed=1), exchange=exchange, dtype=dtype)


def test_padding_has_no_row_and_the_vector_zero():
    made = group()
    look_up = made.look_up(TABLES, IDS, insert=True, kept=np.array([0, 1, 2]))
    vectors = made.vectors(look_up)
    assert len(made.store) == 2
    np.testing.assert_array_equal(vectors[3], np.zeros(3))
    np.testing.assert_array_equal(vectors[0], vectors[2])


def test_what_was_asked_ahead_is_for_these_very_ids():
    made = group()
    asked = made.ask(TABLES, IDS)
    made.ahead = IDS, asked
    assert made.asked_ahead(IDS.copy()) is None
    assert made.asked_ahead(IDS) is asked
    assert made.asked_ahead(IDS) is None


def test_rows_are_read_ahead_where_a_tier_does():
    made, read = group(), []
    made.ahead = IDS, made.ask(TABLES, IDS)
    made.read_ahead()  # nothing to do
    made.keep_in(CachedHost(cache_rows=1))
    made.store.prefetch = lambda tables, ids: read.append(ids.tolist())
    made.read_ahead()
    assert read == []
    type(made.store).reads_ahead, before = True, type(made.store).reads_ahead
    try:
        made.read_ahead()
        assert read == [[5, 7, -1]]
        made.ahead = None
        made.read_ahead()
        assert len(read) == 1
    finally:
        type(made.store).reads_ahead = before


@pytest.mark.ranks
def test_ranks_find_what_one_does():
    ranks, alone = world(), group(Exchange(Communicator()))
    made, ids = group(), np.arange(40) * 3
    truth = alone.vectors(alone.look_up(np.zeros(40, np.uint32), ids, insert=True))
    got = made.vectors(made.look_up(np.zeros(40, np.uint32), ids, insert=True))
    np.testing.assert_array_equal(got, truth)
    rows = ranks.all_gather("rows", np.array([len(made.store)]))
    assert rows.sum() == 40


@pytest.mark.ranks
def test_ranks_serve_rows_of_int8_as_one_does():
    ranks, alone = world(), group(Exchange(Communicator()), "int8")
    made, tables, ids = group(dtype="int8"), np.zeros(40, np.uint32), np.arange(40) * 3
    for one in (made, alone):
        import_vectors(one, tables[::2], ids[::2], np.arange(60, dtype=np.float32).reshape(20, 3))
    truth = alone.vectors(alone.look_up(tables, ids, insert=False))
    got = made.vectors(made.look_up(tables, ids, insert=False))
    assert got.tobytes() == truth.tobytes()
    assert ranks.all_gather("rows", np.array([len(made.store)])).sum() == 20
    with pytest.raises(ValueError, match="to learn, got int8"):
        made.look_up(tables, ids, insert=True)

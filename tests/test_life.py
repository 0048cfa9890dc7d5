"""When ids get rows and lose them, against a dict of what each has seen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import sentence

import cupyrec
from cupyrec import arrays, nn, optim
from cupyrec.embedding import LIFE, CachedHost, CachedSSD, Life, Memory, MemoryStore, Rows
from cupyrec.embedding.life import gone

batches = st.lists(st.lists(st.integers(-3, 12), min_size=1, max_size=12), max_size=25)


def table(life, tier=None, device="cpu"):
    made = nn.MultiTableEmbedding(1, 4, life=life, tier=tier, seed=1)
    made.group.to(arrays.module(device))
    return made, optim.SGD(made.parameters(), 0.5)


def step(made, optimizer, ids):
    """Train on ids of table 0; return their vectors before."""
    xp = made.group.xp
    vectors = made(arrays.copy_to(xp, np.asarray(ids, np.int64)[:, None]))
    cupyrec.sum(vectors).backward()
    optimizer.step()
    return arrays.to_host(vectors.data)[:, 0]


def ids_of(made):
    return set(made.export_table(0)[0].tolist())


@given(batches, st.integers(1, 4), st.integers(1, 6) | st.none(), st.integers(0, 3),
       st.integers(1, 5) | st.none())  # fmt: skip
@settings(deadline=None)
def test_against_a_dict(batches, k, age, below, most):
    every = 3
    life = Life(
        admit_after=k, expire_after=age, expire_below=below, max_ids=most, check_every=every
    )
    made, optimizer = table(life)
    rows, waiting = {}, {}
    for number, batch in enumerate(batches):
        step(made, optimizer, batch)
        for i in sorted(set(batch)):
            where = rows if i in rows else waiting
            last, seen = where.get(i, (0, 0))
            where[i] = number, seen + batch.count(i)
            if where is waiting and seen + batch.count(i) >= k:
                rows[i] = number, batch.count(i)
        waiting = {i: seen for i, seen in waiting.items() if k > 1}
        if (number + 1) % every == 0:
            for i, (last, _) in list(waiting.items()):
                if i in rows or (age and number - last >= age):
                    del waiting[i]
            for i, (last, seen) in list(rows.items()):
                if (age and number - last >= age) or (seen < below and number - last >= every):
                    del rows[i]
            oldest = sorted(rows, key=lambda i: (*rows[i], i))
            for i in oldest[: max(0, len(rows) - (most or 99))]:
                del rows[i]
        assert ids_of(made) == set(rows)
    if k > 1:
        assert len(made.group.candidates.store) == len(waiting)
    exported = made.group.store.export_rows(0, len(rows))
    for i, (last, seen) in zip(
        exported.ids.tolist(), exported.states["life"].tolist(), strict=True
    ):
        assert (last - 1, seen) == rows[i]


def told_of(tier, device="cpu"):
    """What a table is after some steps, and what it gave in them."""
    cupyrec.manual_seed(0)
    life = Life(admit_after=2, admit_probability=0.7, expire_after=4, max_ids=30, check_every=3)
    made, optimizer = table(life, tier, device)
    generator, losses = np.random.default_rng(0), []
    for _ in range(9):
        losses.append(step(made, optimizer, generator.zipf(1.3, 40) % 100 - 50).tobytes())
    told = made.digest(), losses, sorted(ids_of(made)), len(made.group.candidates.store)
    made.close()
    return told


@pytest.fixture(scope="module")
def truth():
    return told_of(None)


@pytest.mark.parametrize("tier", ["memory", "host", "ssd"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_every_tier_and_device_keeps_the_same_ids_and_bits(tier, device, truth, tmp_path):
    tiers = {
        "memory": Memory(), "host": CachedHost(cache_rows=1),
        "ssd": CachedSSD(path=tmp_path, cache_rows=1),
    }  # fmt: skip
    got = told_of(tiers[tier], device)
    assert got[2:] == truth[2:]
    assert 0 < len(got[2]) <= 30
    if device == "cpu":
        assert got == truth


def test_an_id_without_a_row_has_its_initial_vector_and_learns_nothing():
    plain, _ = table(None)
    initial = arrays.to_host(plain.eval()(np.array([[7], [8]])).data)[:, 0]
    made, optimizer = table(Life(admit_after=3))
    for _ in range(2):
        np.testing.assert_array_equal(step(made, optimizer, [7, 8]), initial)
    assert len(made.group.store) == 0
    np.testing.assert_array_equal(step(made, optimizer, [7]), initial[:1])  # now it has a row
    assert ids_of(made) == {7}
    np.testing.assert_array_equal(step(made, optimizer, [7, 8]), initial - np.float32([[0.5], [0]]))


def test_a_batch_counts_every_occurrence():
    made, optimizer = table(Life(admit_after=3))
    step(made, optimizer, [7, 7, 8, 8, 8])
    assert ids_of(made) == {8}


def test_probability():
    made, optimizer = table(Life(admit_probability=0.25))
    left = np.arange(4000)
    for share in (0.25, 0.4375):
        step(made, optimizer, left)
        assert len(made.group.store) == pytest.approx(share * 4000, abs=4 * 27.4)
    before = len(made.group.store)
    step(made, optimizer, sorted(ids_of(made)))
    assert len(made.group.store) == before


def test_expired_ids_start_anew_and_their_rows_are_used_again():
    made, optimizer = table(Life(expire_after=2, check_every=1))
    start = step(made, optimizer, range(50))
    for _ in range(4):
        step(made, optimizer, range(50, 60))
    assert ids_of(made) == set(range(50, 60))
    np.testing.assert_array_equal(step(made, optimizer, range(50)), start)
    assert len(made.group.store) == 60


def test_optimizers_keep_their_state_beside_it():
    made, optimizer = table(Life())
    optimizer = optim.Adagrad(made.parameters(), 0.1)
    step(made, optimizer, [1, 2])
    step(made, optimizer, [2])
    rows = made.group.store.export_rows(0, 2)
    assert rows.states["life"][:, 1].tolist() == [1, 2]
    np.testing.assert_array_equal(rows.states["sum"][:, 0], [1, 2])
    assert made.group.optimizer_state[0].name == "sum"


@pytest.mark.parametrize("tier", [Memory(), CachedHost(cache_rows=64)])
def test_account_goes_on_with_another_optimizer(tier):
    made, optimizer = table(Life(expire_after=50, check_every=10), tier)
    for _ in range(95):
        step(made, optimizer, [1, 2])
    for make in (optim.Adam, optim.RowWiseAdagrad, optim.SGD):
        optimizer = make(made.parameters(), 0.1)
        [rows] = made.group.store.export()
        np.testing.assert_array_equal(rows.states["life"], [[95, 95]] * 2)
    for _ in range(6):
        step(made, optimizer, [1])
    assert ids_of(made) == {1, 2}


def test_an_id_that_was_deleted_is_counted_anew():
    made, optimizer = table(Life(admit_after=3))
    step(made, optimizer, [7, 7, 7, 8, 8])
    assert made.delete(0, np.array([7, 8])) == 1
    step(made, optimizer, [7, 8])
    assert ids_of(made) == set()
    step(made, optimizer, [7, 7, 8])
    assert ids_of(made) == {7}


def test_keys_that_went_are_kept_for_deltas_alone():
    made, optimizer = table(Life(expire_after=1, check_every=1))
    for number in range(5):
        step(made, optimizer, [number])
    assert made.group.deleted == []  # there is no checkpoint that a delta may have as its base


def test_limits_of_each_table():
    store = MemoryStore(1)
    store.set_state((LIFE,))
    tables = np.repeat(np.arange(2, dtype=np.uint32), 4)
    life = np.array([[5, 1], [3, 9], [5, 2], [5, 1]] * 2, np.int32)
    vectors = np.zeros((8, 1), np.float32)
    store.import_rows(Rows(tables, np.arange(8), vectors, {"life": life}))
    got = gone(store, Life(max_ids=[2, 4]), now=9)
    assert [a.tolist() for a in got] == [[0, 0], [1, 0]]
    got = gone(store, Life(max_ids=[3, 1]), now=9)
    assert sorted(got[1].tolist()) == [1, 4, 5, 7]


def test_limits_must_be_one_or_one_a_table():
    text = (
        "MultiTableEmbedding: 'life' must have one of max_ids, or one of each of the 3 tables, "
        "got 1."
    )
    with pytest.raises(ValueError, match=sentence(text)):
        nn.MultiTableEmbedding(3, 4, life=Life(max_ids=[5]))


@pytest.mark.ranks
def test_ranks_share_a_tables_limit():
    made, _ = table(Life(max_ids=100))
    made(np.arange(1000)[:, None])
    made.group.expire()
    ranks = made.group.exchange.ranks
    assert len(made.group.store) == -(-100 // ranks.size)
    rows = ranks.all_gather("rows", np.array([len(made.group.store)])).sum()
    assert 100 <= rows < 100 + ranks.size


def test_account_must_be_kept_from_the_start():
    made, _ = table(None)
    made(np.array([[1]]))
    text = "MultiTableEmbedding: 'life' must be given before there are rows, got 1 of them."
    with pytest.raises(ValueError, match=sentence(text)):
        made.group.keep_account(Life())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"admit_after": 0}, ValueError, "Life: 'admit_after' must be at least 1, got 0."),
        ({"admit_probability": 0}, ValueError,
         "Life: 'admit_probability' must lie in (0, 1], got 0."),
        ({"admit_probability": "1"}, TypeError,
         "Life: 'admit_probability' must be a number, got '1'."),
        ({"expire_after": 0}, ValueError, "Life: 'expire_after' must be at least 1, got 0."),
        ({"max_ids": [5, 0]}, ValueError, "Life: 'max_ids' must be at least 1, got 0."),
        ({"check_every": 1.5}, TypeError, "Life: 'check_every' must be an integer, got 1.5."),
    ],
)  # fmt: skip
def test_what_is_refused(options, error, text):
    with pytest.raises(error, match=sentence(text)):
        Life(**options)


def test_ages_go_on_where_rows_that_were_saved_are_found_again(tmp_path):
    tier = CachedSSD(path=tmp_path, cache_rows=1)
    made, optimizer = table(Life(), tier)
    for ids in ([1, 2], [2], [3]):
        step(made, optimizer, ids)
    made.save()
    made.close()
    again, optimizer = table(Life(expire_after=2, check_every=1))
    again.keep_in(tier)
    assert (again.group.clock, ids_of(again)) == (3, {1, 2, 3})
    step(again, optimizer, [3])
    assert ids_of(again) == {3}
    again.close()

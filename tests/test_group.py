import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import sentence

from cupyrec.embedding import Group, InitialVectors, StatePart, Uniform


def group(width=3, seed=9):
    return Group(InitialVectors(width, Uniform(-1, 1), seed))


def columns(pairs):
    return np.array([t for t, _ in pairs], np.uint32), np.array([i for _, i in pairs], np.int64)


keys = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([-(2**63), -1, 0, 5, 2**63 - 1])), max_size=30
)


@given(keys, keys)
def test_a_key_has_one_vector_known_or_not(first, second):
    """Before it has a row, when it gets one, and after."""
    g = group()
    for pairs in (first, second):
        tables, ids = columns(pairs)
        expected = oracle.uniform_vectors(tables, ids, 3, 9, -1, 1)
        count = len(g.store)
        unseen = g.vectors(g.look_up(tables, ids, insert=False))
        assert len(g.store) == count
        np.testing.assert_array_equal(unseen, expected)
        for insert in (True, False):
            vectors = g.vectors(g.look_up(tables, ids, insert=insert))
            np.testing.assert_array_equal(vectors, expected)
    assert len(g.store) == len({*first, *second})


def test_rows_follow_first_occurrence():
    g = group()
    tables, ids = columns([(1, 5), (0, 5), (1, 5), (0, -1), (1, 4)])
    g.look_up(tables, ids, insert=True)
    rows = g.store.export_rows(0, len(g.store))
    assert list(zip(rows.tables.tolist(), rows.ids.tolist(), strict=True)) == [
        (1, 5), (0, 5), (0, -1), (1, 4),
    ]  # fmt: skip


@given(st.lists(keys, min_size=1, max_size=4))
def test_gradients_of_a_row_are_summed_over_all_look_ups(batches):
    g = group()
    truth = {}
    for seed, pairs in enumerate(batches):
        plan = g.look_up(*columns(pairs), insert=True)
        gradient = oracle.integers((len(pairs), 3), -9, 9, seed=seed)
        g.add_gradient(plan, gradient)
        for pair, part in zip(pairs, gradient, strict=True):
            truth[pair] = truth.get(pair, 0) + part.astype(np.float64)
    rows, gradients, tables, ids, *_ = g.gradients()
    assert len(set(rows.tolist())) == len(rows) == len(truth)
    exported = g.store.export_rows(0, len(g.store))
    np.testing.assert_array_equal(exported.tables[rows], tables)
    np.testing.assert_array_equal(exported.ids[rows], ids)
    for table, key, gradient in zip(tables.tolist(), ids.tolist(), gradients, strict=True):
        np.testing.assert_array_equal(gradient, truth[table, key])
    again = g.gradients()
    np.testing.assert_array_equal(again[0], rows)
    np.testing.assert_array_equal(again[1], gradients)
    g.zero_grad()
    assert g.gradients()[0].shape == (0,)
    assert g.gradients()[1].shape == (0, 3)


def test_update_hands_out_each_row_once_and_not_without_gradients():
    g, seen = group(), []
    g.update(g.gradients(), 1, lambda *arguments: seen.append(arguments))
    assert seen == []
    plan = g.look_up(*columns([(0, 7), (0, 8), (0, 7)]), insert=True)
    g.add_gradient(plan, np.float32([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    g.update(g.gradients(), 1, lambda *arguments: seen.append(arguments))
    ((memory, rows, gradients, rounding),) = seen
    assert rounding is None
    assert memory.stride == 4
    assert rows.tolist() == [0, 1]
    assert gradients.tolist() == [[8, 10, 12], [4, 5, 6]]


def test_clear_and_set_state_forget_gradients_but_not_the_state():
    g = group()
    g.set_state((StatePart("sum", 3, 0.25),))
    for forget in (g.clear, lambda: g.set_state((StatePart("m", 3, 0.5),))):
        plan = g.look_up(*columns([(0, 7)]), insert=True)
        g.add_gradient(plan, np.ones((1, 3), np.float32))
        forget()
        assert g.gradients()[0].size == 0
    assert len(g.store) == 1
    assert (g.store.export_rows(0, 1).states["m"] == 0.5).all()
    g.clear()
    assert len(g.store) == 0
    assert g.store.state == (StatePart("m", 3, 0.5),)


def test_it_prints_its_size():
    g = group()
    g.look_up(*columns([(0, 7), (1, 7)]), insert=True)
    told = f"bytes={g.store.nbytes}, load={g.store.load:.2f}"
    assert repr(g) == f"Group(ids=2, width=3, dtype=float32, {told})"


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds(seed):
    with pytest.raises(
        ValueError, match=sentence(f"InitialVectors: 'seed' must lie in [0, 2**64), got {seed}.")
    ):
        group(seed=seed)
    g = group(seed=2**64 - 1)
    assert g.vectors(g.look_up(*columns([(0, 1)]), insert=False)).shape == (1, 3)

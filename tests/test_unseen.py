"""What ids without a row get: default rows as they go by, and in a predictor."""

import numpy as np
import pytest
import saved
from saved import DENSE, IDS, model_of, save_chain, save_one

import cupyrec
from cupyrec import checkpoint
from cupyrec.embedding import CachedHost, Constant, InitialVectors, Memory, Rows
from cupyrec.serving import Predictor
from cupyrec.serving.unseen import DefaultRows, check_unseen, initial_vectors


def rows(tables, ids, value):
    vectors = np.full((len(ids), 2), value, np.float32)
    return Rows(np.array(tables, np.uint32), np.array(ids), vectors, {})


def test_the_last_word_about_a_default_row_holds():
    found = DefaultRows(np.array([5, 0, 7]), [0, 2], 2)
    assert found.missing() == [0, 2]  # table 1 is another group's
    found.note(None, rows([0, 0, 2], [7, 5, 5], 1))
    assert found.missing() == [2]
    found.note(None, rows([2, 2], [6, 7], 2))
    other = found.copy()
    other.note(rows([0, 2], [5, 6], 0), None)
    assert (found.missing(), other.missing()) == ([], [0])
    changed = rows([2, 0], [7, 5], 3)
    other.note(changed, changed)
    own = InitialVectors(2, Constant(9), seed=1)
    keys = np.array([0, 2, 2], np.uint32), np.array([100, 100, -3])
    for at, values in ((found, [1, 2, 2]), (other, [3, 3, 3])):
        assert initial_vectors(5, own, at)(*keys)[:, 1].tolist() == values
    assert initial_vectors("initial", own, None) is own
    assert not initial_vectors("zero", own, None)(*keys).any()


@pytest.mark.parametrize(
    ("unseen", "error", "text"),
    [
        ("mean", ValueError, "'unseen' must be 'initial', 'zero' or an id, got 'mean'."),
        (1.5, TypeError, "an id or one of each table, got 1.5."),
        (np.array(3), TypeError, "an id or one of each table, got array"),
        (True, TypeError, "an id or one of each table, got True."),
        ([1, None], TypeError, "an id or one of each table, got None."),
        (2**63, ValueError, "must be an id of 64 bits"),
    ],
)
def test_what_is_no_rule(unseen, error, text):
    with pytest.raises(error, match=text):
        check_unseen(unseen)


# In a predictor


def answers(predictor):
    return predictor.probabilities(DENSE, IDS)[0]


def with_rows(path, default):
    """What is expected, where unseen ids have the rows of `default` (T,), None for zeros."""
    model = model_of()
    checkpoint.load(path, model)
    tables = model.embedding
    for table in range(2):
        ids, vectors = tables.export_table(table)
        known = dict(zip(ids.tolist(), vectors, strict=True))
        given = np.zeros(4, "f") if default is None else known[default[table]]
        new = np.setdiff1d(IDS[:, table], ids)
        assert new.size
        tables.import_table(table, new, np.repeat(given[None], len(new), 0))
    return cupyrec.predict(model, (DENSE, IDS))[:, None]


@pytest.mark.parametrize(
    ("unseen", "default"), [("zero", None), (1, (1, 1)), ((1, 3), (1, 3)), (np.int64(1), (1, 1))]
)
@pytest.mark.parametrize("tier", [Memory(), CachedHost(cache_rows=64)])
def test_what_unseen_ids_get(tmp_path, unseen, default, tier):
    chain = save_chain(tmp_path)
    options = {"model": model_of(), "unseen": unseen, "tier": tier}
    other = save_one(tmp_path / "other", seed=8)
    with Predictor(chain[0], **options) as predictor:
        for path in (chain[0], chain[1], chain[2], other):  # whose default rows differ
            predictor.update(path)
            assert (answers(predictor) == with_rows(path, default)).all()


def test_a_default_id_must_have_a_row_in_each_table(tmp_path):
    chain = save_chain(tmp_path)
    text = "the default id of 'unseen' must have a row in each table, got none in table 1"
    with pytest.raises(ValueError, match=text):
        Predictor(chain[0], model=model_of(), unseen=(1, 999))
    model = model_of()
    checkpoint.load(chain[1], model)
    had, _ = model.embedding.export_table(0)
    forgotten = int(np.intersect1d(had, saved.FORGOTTEN)[0])  # by the last link
    predictor = Predictor(chain[1], model=model_of(), unseen=(forgotten, 1))
    before = answers(predictor)
    with pytest.raises(ValueError, match="got none in table 0"):
        predictor.update(chain[2])
    assert (answers(predictor) == before).all()
    with pytest.raises(ValueError, match="one of each of the 2 tables, got 3"):
        Predictor(chain[0], model=model_of(), unseen=[1, 2, 3])

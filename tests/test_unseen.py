"""Default rows, as they go by."""

import numpy as np
import pytest

from cupyrec.embedding import Constant, InitialVectors, Rows
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
    saved = InitialVectors(2, Constant(9), seed=1)
    keys = np.array([0, 2, 2], np.uint32), np.array([100, 100, -3])
    for at, values in ((found, [1, 2, 2]), (other, [3, 3, 3])):
        assert initial_vectors(5, saved, at)(*keys)[:, 1].tolist() == values
    assert initial_vectors("initial", saved, None) is saved
    assert not initial_vectors("zero", saved, None)(*keys).any()


@pytest.mark.parametrize(
    ("unseen", "error", "text"),
    [
        ("mean", ValueError, "'unseen' must be 'initial', 'zero' or an id, got 'mean'."),
        (1.5, TypeError, "an id or one of each table, got 1.5."),
        (True, TypeError, "an id or one of each table, got True."),
        ([1, None], TypeError, "an id or one of each table, got None."),
        (2**63, ValueError, "must be an id of 64 bits"),
    ],
)
def test_what_is_no_rule(unseen, error, text):
    with pytest.raises(error, match=text):
        check_unseen(unseen)

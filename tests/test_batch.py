import numpy as np

from cupyrec.data import Batch


def test_len_is_the_number_of_rows():
    assert len(Batch(np.zeros((5, 0), np.float32), np.zeros((5, 3), np.int64))) == 5
    assert len(Batch(np.zeros((2, 3), np.float32), np.zeros((2, 0), np.int64))) == 2


def test_labels_may_be_unknown():
    assert Batch(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64)).labels is None

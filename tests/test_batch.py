import numpy as np

from cupyrec.data import Batch


def test_len_is_the_number_of_rows():
    assert len(Batch(np.zeros((5, 0), np.float32), np.zeros((5, 3), np.int64))) == 5
    assert len(Batch(np.zeros((2, 3), np.float32), np.zeros((2, 0), np.int64))) == 2


def test_it_moves_between_devices(sim):
    batch = Batch(np.ones((2, 3), np.float32), np.ones((2, 4), np.int64))
    moved = batch.to("sim")
    assert type(moved.dense) is type(moved.ids) is sim.ndarray
    assert moved.labels is None
    assert moved.to("sim").ids is moved.ids
    back = Batch(moved.dense, moved.ids, sim.zeros((2, 1), np.float32)).to("cpu")
    np.testing.assert_array_equal(back.ids, batch.ids)
    assert isinstance(back.labels, np.ndarray)


def test_labels_may_be_unknown():
    assert Batch(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64)).labels is None

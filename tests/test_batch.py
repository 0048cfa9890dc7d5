import numpy as np
import pytest

from cupyrec.data import Batch
from cupyrec.ragged import Bags


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


def test_a_part_knows_where_it_stands():
    batch = Batch(np.arange(5, dtype="f")[:, None], np.arange(5)[:, None], first=3, total=9)
    part = batch.part(1, 4)
    assert (part.first, part.total, part.ids.ravel().tolist()) == (4, 9, [1, 2, 3])
    assert np.shares_memory(part.dense, batch.dense)


def test_labels_may_be_unknown():
    assert Batch(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64)).labels is None


def test_bags_are_shared_out_and_moved_with_their_samples(sim):
    bags = Bags(np.array([7, 5, 6, 8]), np.array([0, 1, 3, 4, 4]), num_fields=2)
    batch = Batch(np.zeros((2, 0), np.float32), bags, np.ones((2, 1), np.float32))
    second = batch.of_rank(1, 2)
    assert (second.first, len(second), second.total) == (1, 1, 2)
    assert second.ids.ids.tolist() == [8]
    assert second.to("sim").ids.offsets.get().tolist() == [0, 1, 1]


def test_weights_of_tasks_and_classes_multiply_those_of_samples():
    labels = np.array([[0, 1], [1, 0]], np.float32)
    batch = Batch(np.zeros((2, 0), "f"), np.zeros((2, 1), np.int64), labels)
    once = batch.weighted(tasks=[1, 0.5], positives=3)
    assert once.weights.tolist() == [[1, 1.5], [3, 0.5]]
    assert once.weighted(positives=2).weights.tolist() == [[1, 3], [6, 0.5]]
    assert once.of_rank(1, 2).weights.tolist() == [[3, 0.5]]
    with pytest.raises(ValueError, match="'tasks' must have a weight for each of 2 labels, got 1"):
        batch.weighted(tasks=[1])
    with pytest.raises(ValueError, match="must have labels, got none"):
        Batch(batch.dense, batch.ids).weighted()

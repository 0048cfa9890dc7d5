import numpy as np
import pytest

from cupyrec.data import Arrays
from cupyrec.ragged import Bags

IDS = np.arange(10).reshape(5, 2)


@pytest.mark.parametrize("size", [1, 2, 5, 7])
@pytest.mark.parametrize("skip", [0, 1, 2, 9])
def test_batches_are_the_rows_in_order(size, skip):
    dense, labels = np.arange(5.0)[:, None], np.array([0, 1, 1, 0, 1])
    batches = list(Arrays(dense, IDS, labels).batches(size, skip=skip))
    assert [len(b) for b in batches] == [min(size, 5 - at) for at in range(size * skip, 5, size)]
    for b in batches:
        assert (b.dense.dtype, b.ids.dtype, b.labels.dtype) == (np.float32, np.int64, np.float32)
    rows = np.concatenate(
        [np.hstack([b.dense, b.ids, b.labels]) for b in batches] or [np.empty((0, 4))]
    )
    assert rows.tolist() == np.hstack([dense, IDS, labels[:, None]])[size * skip :].tolist()


def test_a_dataset_is_read_again():
    data = Arrays(None, IDS)
    assert [len(b) for b in data.batches(3)] == [len(b) for b in data.batches(3)] == [3, 2]
    assert (data.num_dense, data.num_tables) == (0, 2)
    assert next(data.batches(2)).labels is None
    assert next(data.batches(2)).dense.shape == (2, 0)


def test_no_rows_give_no_batch():
    assert list(Arrays(np.zeros((0, 3)), np.zeros((0, 2), int), np.zeros(0)).batches(4)) == []


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32])
def test_integers_are_widened_by_value(dtype):
    info = np.iinfo(dtype)
    ids = np.array([[info.min, info.max]], dtype)
    assert next(Arrays(None, ids).batches(1)).ids.tolist() == [[info.min, info.max]]


def test_uint64_keeps_its_bits():
    ids = np.array([[2**63, 2**64 - 1, 2**63 - 1]], np.uint64)
    assert next(Arrays(None, ids).batches(1)).ids.tolist() == [[-(2**63), -1, 2**63 - 1]]


@pytest.mark.parametrize(
    "labels", [[[1], [0]], [True, False], [1.0, 0.0], np.array([1, 0], np.uint8)]
)
def test_labels_of_any_number_type(labels):
    assert next(Arrays(None, IDS[:2], labels).batches(2)).labels.tolist() == [[1.0], [0.0]]


NAN, INF = np.zeros((5, 2)), np.zeros((5, 2), np.float32)
NAN[3, 1], INF[2, 0] = np.nan, -np.inf


@pytest.mark.parametrize(("arrays", "error", "sentence"), [
    ((None, IDS.astype(float)), TypeError, "Arrays: 'ids' must be integers, got float64."),
    ((None, IDS > 3), TypeError, "Arrays: 'ids' must be integers, got bool."),
    ((None, IDS.astype(str)), TypeError, "Arrays: 'ids' must be integers, got <U21."),
    ((None, IDS[0]), ValueError, "Arrays: 'ids' must have axes (B, F), got shape (2,)."),
    ((IDS, IDS), TypeError, "Arrays: 'dense' must be floating, got int64."),
    ((np.zeros(5), IDS), ValueError,
     "Arrays: 'dense' must have axes (B, num_dense), got shape (5,)."),
    ((np.zeros((4, 2)), IDS), ValueError,
     "Arrays: 'dense' must have B = 5 like 'ids', got shape (4, 2)."),
    ((NAN, IDS), ValueError, "Arrays: 'dense' must be finite, got nan in row 3, column 1."),
    ((INF, IDS), ValueError, "Arrays: 'dense' must be finite, got -inf in row 2, column 0."),
    ((NAN[:3] + 1e39, IDS[:3]), ValueError,
     "Arrays: 'dense' must be finite, got 1e+39 in row 0, column 0."),
    ((None, IDS, [0, 1, 0, 2, 1]), ValueError,
     "Arrays: 'labels' must be 0 or 1, got 2 in row 3, column 0."),
    ((None, IDS, [0, 1, 0, np.nan, 1]), ValueError,
     "Arrays: 'labels' must be 0 or 1, got nan in row 3, column 0."),
    ((None, IDS, [0, 1]), ValueError,
     "Arrays: 'labels' must have B = 5 like 'ids', got shape (2, 1)."),
    ((None, IDS, np.zeros((5, 2, 1))), ValueError,
     "Arrays: 'labels' must have axes (B, T), got shape (5, 2, 1)."),
    ((None, IDS, None, np.ones(5)), ValueError,
     "Arrays: 'weights' must come with labels, got none."),
    ((None, IDS, np.zeros(5), np.ones(4)), ValueError,
     "Arrays: 'weights' must have B = 5 like 'labels', got shape (4,)."),
    ((None, IDS, np.zeros((5, 2)), np.ones((5, 3))), ValueError,
     "Arrays: 'weights' must have T = 2 like 'labels', got shape (5, 3)."),
    ((None, IDS, np.zeros(5), [1, 0, -0.5, 1, 1]), ValueError,
     "Arrays: 'weights' must be finite and not negative, got -0.5 in row 2, column 0."),
    ((None, IDS, np.zeros(5), [1, 0, np.nan, 1, 1]), ValueError,
     "Arrays: 'weights' must be finite and not negative, got nan in row 2, column 0."),
    ((None, IDS, np.zeros(5), [1e39] * 5), ValueError,
     "Arrays: 'weights' must be finite and not negative, got 1e+39 in row 0, column 0."),
    ((None, IDS, np.zeros(5), ["1"] * 5), TypeError,
     "Arrays: 'weights' must be numbers, got <U1."),
    ((None, IDS, ["0"] * 5), TypeError, "Arrays: 'labels' must be numbers, got <U1."),
])  # fmt: skip
def test_bad_arrays(arrays, error, sentence):
    with pytest.raises(error) as caught:
        Arrays(*arrays)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("given", [[1, 2, 0, 0.5, 3], [[1, 2], [2, 2], [0, 1], [0.5, 0], [3, 3]]])
def test_tasks_and_weights(given):
    labels = np.array([[0, 1], [1, 1], [1, 0], [0, 0], [1, 0]])
    data = Arrays(None, IDS, labels, given, task_names=["click", "sale"])
    assert data.task_names == ["click", "sale"]
    batches = list(data.batches(2))
    assert np.concatenate([batch.labels for batch in batches]).tolist() == labels.tolist()
    expected = np.reshape(given, (5, -1)) * np.ones((1, 2))
    assert np.concatenate([batch.weights for batch in batches]).tolist() == expected.tolist()
    assert {batch.weights.dtype for batch in batches} == {np.dtype(np.float32)}
    assert data.of_rank(1, 2).task_names == ["click", "sale"]


def test_bags():
    bags = Bags(np.arange(9), np.array([0, 2, 3, 3, 5, 8, 9]), num_fields=2)
    data = Arrays(np.ones((3, 1), np.float32), bags, [0, 1, 1])
    assert data.num_tables == 2
    first, last = data.batches(2)
    assert (first.ids.ids.tolist(), first.ids.offsets.tolist()) == ([*range(5)], [0, 2, 3, 3, 5])
    assert (last.ids.ids.tolist(), last.ids.offsets.tolist()) == ([5, 6, 7, 8], [0, 3, 4])
    with pytest.raises(ValueError, match="'labels' must have B = 3 like 'ids', got shape"):
        Arrays(None, bags, [0, 1])


@pytest.mark.parametrize(("labels", "told"), [(None, "no labels"), (np.zeros((5, 1)), "1 labels")])
def test_names_are_those_of_the_labels(labels, told):
    with pytest.raises(ValueError, match=rf"'task_names' must name {told}, got \['a', 'b'\]\."):
        Arrays(None, IDS, labels, task_names=["a", "b"])


def test_bad_arguments_of_batches():
    with pytest.raises(ValueError, match="'batch_size' must be at least 1, got 0"):
        Arrays(None, IDS).batches(0)
    with pytest.raises(ValueError, match="'skip' must be at least 0, got -1"):
        Arrays(None, IDS).batches(1, skip=-1)

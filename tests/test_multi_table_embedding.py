import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import sentence

import cupyrec
from cupyrec import nn, optim
from cupyrec.embedding import Uniform

ids_of = st.sampled_from([-(2**63), -(2**63) + 1, -1, 0, 1, 2**31, 2**63 - 1])
batch = st.lists(st.tuples(ids_of, ids_of), max_size=8)

IDS = "'ids' must be int64 or uint64 or int32 or uint32"


class Dict:
    """Tables as dicts, trained by SGD with lr 1/4; whole numbers stay exact."""

    def __init__(self, seed):
        self.rows, self.seed = {}, seed

    def row(self, table, key):
        initial = oracle.uniform_vectors([table], [key], 2, self.seed, 0, 0)[0]
        return self.rows.get((table, key), initial)

    def look_up(self, ids):
        return np.float32(
            [[self.row(table, key) for table, key in enumerate(row)] for row in ids]
        ).reshape(len(ids), 2, 2)

    def step(self, ids, gradient):
        total = {}
        for row, parts in zip(ids, gradient, strict=True):
            for table, (key, part) in enumerate(zip(row, parts, strict=True)):
                total[table, key] = total.get((table, key), 0) + part
        for (table, key), part in total.items():
            self.rows[table, key] = self.row(table, key) - part / 4


@given(st.lists(st.tuples(st.sampled_from(["train", "eval", "no_grad"]), batch), max_size=8))
def test_against_dicts(calls):
    embedding = nn.MultiTableEmbedding(2, 2, initializer=Uniform(0, 0), seed=4)
    optimizer = optim.SGD(embedding.parameters(), lr=0.25)
    truth = Dict(seed=4)
    for number, (kind, rows) in enumerate(calls):
        ids = np.array(rows, np.int64).reshape(-1, 2)
        count = len(embedding.group.store)
        embedding.train(kind != "eval")
        if kind == "no_grad":
            with cupyrec.no_grad():
                vectors = embedding(ids)
        else:
            vectors = embedding(ids)
        np.testing.assert_array_equal(vectors.numpy(), truth.look_up(rows))
        assert vectors.requires_grad == (kind == "train")
        if kind == "eval":
            assert len(embedding.group.store) == count
        if kind == "train":
            gradient = oracle.integers(vectors.shape, -8, 8, seed=number)
            vectors.backward(gradient)
            optimizer.step()
            truth.step(rows, gradient)


@given(batch, batch)
def test_several_look_ups_are_one_step(first, second):
    embedding = nn.MultiTableEmbedding(2, 2, initializer=Uniform(0, 0), seed=4)
    optimizer = optim.Adagrad(embedding.parameters(), lr=1.0)
    total = {}
    for number, rows in enumerate((first, second, first)):
        vectors = embedding(np.array(rows, np.int64).reshape(-1, 2))
        gradient = oracle.integers(vectors.shape, -4, 4, seed=number)
        vectors.backward(gradient)
        for row, parts in zip(rows, gradient, strict=True):
            for table, part in enumerate(parts):
                total[table, row[table]] = total.get((table, row[table]), 0) + part
    optimizer.step()
    rows = embedding.group.store.export_rows(0, len(embedding.group.store))
    assert len(rows.ids) == len(total)
    for table, key, vector, square in zip(
        rows.tables.tolist(), rows.ids.tolist(), rows.vectors, rows.states["sum"], strict=True
    ):
        np.testing.assert_array_equal(square, total[table, key] ** 2)  # summed, then squared
        np.testing.assert_allclose(vector, -np.sign(total[table, key]), atol=1e-6)


def test_an_unseen_id_is_evaluated_as_the_vector_that_training_will_insert():
    embedding = nn.MultiTableEmbedding(3, 5, seed=8)
    ids = np.array([[-(2**63), -1, 2**63 - 1], [0, 0, 0]])
    before = embedding.eval()(ids).numpy().copy()
    assert len(embedding.group.store) == 0
    inserted = embedding.train()(ids).numpy()
    assert len(embedding.group.store) == 6
    assert before.tobytes() == inserted.tobytes() == embedding.eval()(ids).numpy().tobytes()
    np.testing.assert_array_equal(before[1, 0] == before[1, 1], [False] * 5)  # tables differ


def test_vectors_depend_on_the_seed_alone():
    ids = np.arange(6).reshape(3, 2)
    cupyrec.manual_seed(1)
    a, b = nn.MultiTableEmbedding(2, 4), nn.MultiTableEmbedding(2, 4)
    cupyrec.manual_seed(1)
    c, d = nn.MultiTableEmbedding(2, 4), nn.MultiTableEmbedding(2, 4, seed=a.group.initial.seed)
    d(ids[::-1].copy())  # in another order
    vectors = [embedding(ids).numpy().tobytes() for embedding in (a, b, c, d)]
    assert vectors[0] == vectors[2] == vectors[3] != vectors[1]


def test_no_rows_and_strided_ids():
    embedding = nn.MultiTableEmbedding(2, 3)
    vectors = embedding(np.empty((0, 2), np.int64))
    assert vectors.shape == (0, 2, 3)
    vectors.backward(np.empty((0, 2, 3), np.float32))
    assert embedding.group.gradients()[0].size == 0
    ids = np.arange(24).reshape(4, 6)
    np.testing.assert_array_equal(
        embedding(ids[:, ::3]).numpy(), embedding(ids[:, ::3].copy()).numpy()
    )
    np.testing.assert_array_equal(embedding(ids.T[:2].T).numpy(), embedding(ids[:, :2]).numpy())


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        (np.zeros((2, 3)), TypeError, f"{IDS}, got float64."),
        (np.zeros((2, 3), np.int16), TypeError, f"{IDS}, got int16."),
        (np.zeros((2, 3), bool), TypeError, f"{IDS}, got bool."),
        (
            [[1, 2, 3]], TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got list.",
        ),
        (
            cupyrec.Tensor(np.zeros((2, 3), np.int64)), TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got Tensor.",
        ),
        (
            np.zeros((2, 4), np.int64), ValueError,
            "'ids' must have axes (B, 3), got shape (2, 4).",
        ),
        (np.zeros(3, np.int64), ValueError, "'ids' must have axes (B, 3), got shape (3,)."),
    ],
)  # fmt: skip
def test_what_are_no_ids(ids, error, text):
    embedding = nn.MultiTableEmbedding(3, 2)
    with pytest.raises(error, match=sentence(f"MultiTableEmbedding: {text}")):
        embedding(ids)
    assert len(embedding.group.store) == 0


def test_sizes():
    for arguments, name in [((0, 4), "num_tables"), ((4, 0), "embedding_dim")]:
        text = f"MultiTableEmbedding: '{name}' must be at least 1, got 0."
        with pytest.raises(ValueError, match=sentence(text)):
            nn.MultiTableEmbedding(*arguments)
    with pytest.raises(TypeError, match="'num_tables' must be an integer, got 2.0"):
        nn.MultiTableEmbedding(2.0, 4)
    assert nn.MultiTableEmbedding(1, 1)(np.array([[3]])).shape == (1, 1, 1)

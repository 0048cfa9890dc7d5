import numpy as np
import pytest

from cupyrec import nn
from cupyrec.ragged import Bags


@pytest.fixture
def bags():  # samples 0 to 2, fields 0 and 1
    return Bags(np.array([7, 5, 6, 8, 9]), np.array([0, 1, 3, 4, 4, 4, 5]), num_fields=2)


def test_parts_are_the_bags_of_their_samples(bags):
    assert [len(bags.part(a, b)) for a, b in [(0, 3), (1, 3), (2, 2)]] == [3, 2, 0]
    part = bags.part(1, 3)
    assert (part.ids.tolist(), part.offsets.tolist()) == ([8, 9], [0, 1, 1, 1, 2])


def test_joined_they_are_those_of_all_samples(bags):
    joined = Bags.joined([bags.part(0, 2), bags.part(1, 1), bags.part(2, 3), bags])
    assert joined.ids.tolist() == bags.ids.tolist() * 2
    assert np.diff(joined.offsets).tolist() == np.diff(bags.offsets).tolist() * 2
    assert joined.shape == (6, 2)


def test_first_ids_of_a_field(bags):
    assert bags.first_of(0, missing=-1).tolist() == [7, 8, -1]
    assert bags.first_of(1, missing=-1).tolist() == [5, -1, 9]


def test_they_move_between_devices(bags, sim):
    moved = bags.to(sim)
    assert type(moved.ids) is type(moved.offsets) is sim.ndarray
    assert moved.first_of(1, missing=-1).get().tolist() == [5, -1, 9]
    assert moved.to(np).ids.tolist() == bags.ids.tolist()


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_an_embedding_takes_them_for_ids_and_offsets(bags, pooling):
    embedding = nn.MultiTableEmbedding(2, 4, pooling=pooling)
    np.testing.assert_array_equal(
        embedding(bags).numpy(), embedding(bags.ids, bags.offsets).numpy()
    )
    np.testing.assert_array_equal(embedding.rows(bags).numpy(), embedding(bags).numpy())
    embedding.prepare(bags)


def test_offsets_that_do_not_fit(bags):
    with pytest.raises(ValueError, match=r"^Bags: 'offsets' must have B \* 3 \+ 1 numbers, got"):
        Bags(bags.ids, bags.offsets[:-1], 3)
    with pytest.raises(ValueError, match=r"'ids' must be Bags of 3 fields, got 2\.$"):
        nn.MultiTableEmbedding(3, 4, pooling="sum")(bags)
    with pytest.raises(ValueError, match="'offsets' must not be given beside Bags"):
        nn.MultiTableEmbedding(2, 4, pooling="sum")(bags, bags.offsets)
    with pytest.raises(ValueError, match="'offsets' must come with 'pooling'"):
        nn.MultiTableEmbedding(2, 4)(bags)

"""This rank's rows of a group; what is done with them stands in test_group.py."""

import numpy as np
import pytest

from cupyrec.embedding import Constant, InitialVectors
from cupyrec.embedding.shard import Shard
from cupyrec.ops.unique_keys import unique_keys


def keys(*ids: int):
    return unique_keys(np.zeros(len(ids), np.uint32), np.array(ids))


def test_unseen_keys_have_their_initial_vectors_until_they_get_rows() -> None:
    shard = Shard(InitialVectors(2, Constant(3.0), seed=1), "float32")
    rows, unseen = shard._find(keys(5, 7), insert=False)
    assert rows.tolist() == [-1, -2] and unseen.tolist() == [[3, 3], [3, 3]]
    assert shard._find(keys(7), insert=True)[0].tolist() == [0]
    rows, unseen = shard._find(keys(5, 7), insert=False)
    assert rows.tolist() == [-1, 0] and unseen.tolist() == [[3, 3]]
    assert shard.current_vectors(np.array([0])).tolist() == [[3, 3]]


def test_no_keys() -> None:
    shard = Shard(InitialVectors(2, Constant(3.0), seed=1), "bfloat16")
    none = unique_keys(np.zeros(0, np.uint32), np.zeros(0, np.int64))
    for insert in (False, True):
        rows, unseen = shard._find(none, insert=insert)
        assert rows.shape == (0,) and unseen.shape == (0, 2)


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="Group: 'dtype' must be one of .*, got 'int4'"):
        Shard(InitialVectors(2, Constant(3.0), seed=1), "int4")

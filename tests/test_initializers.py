import math

import numpy as np
import oracle
import pytest
from oracle import sentence

from cupyrec.embedding import Uniform

TABLES = np.array([0, 0, 1, 2**32 - 1], np.uint32)
IDS = np.array([-(2**63), 2**63 - 1, -1, 0])


@pytest.mark.parametrize(("low", "high"), [(-0.05, 0.05), (0, 1), (-3.5, -3.25), (0.1, 0.1)])
def test_vectors_are_philoxs(low, high):
    got = Uniform(low, high)(TABLES, IDS, 5, seed=2**64 - 1)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, oracle.uniform_vectors(TABLES, IDS, 5, 2**64 - 1, low, high))


def test_default_range_and_equality():
    vectors = Uniform()(np.zeros(5000, np.uint32), np.arange(5000), 4, seed=1)
    assert -0.05 <= vectors.min() < -0.0499
    assert 0.0499 < vectors.max() <= 0.05
    assert Uniform() == Uniform(-0.05, 0.05) != Uniform(-0.05, 0.06)


@pytest.mark.parametrize(
    ("low", "high"), [(1, 0), (math.nan, 1), (0, math.nan), (-math.inf, 0), (0, math.inf)]
)
def test_bounds_that_are_none(low, high):
    text = f"Uniform: 'low' <= 'high' must be finite, got {low} and {high}."
    with pytest.raises(ValueError, match=sentence(text)):
        Uniform(low, high)

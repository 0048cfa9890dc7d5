"""Values of some bags, in another order."""

import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.ops.take_bags import take_bags


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_bags_are_taken_in_any_order(device):
    xp, generator = arrays.module(device), np.random.default_rng(0)
    offsets = np.array([0, *np.cumsum(generator.integers(0, 4, 17))])
    for order in (generator.permutation(17), np.array([3, 3, 0]), np.empty(0, np.int64)):
        got = take_bags(*(arrays.copy_to(xp, a) for a in (offsets, order)))
        values, cut, bags = map(arrays.to_host, got)
        expected = [list(range(offsets[m], offsets[m + 1])) for m in order]
        assert [values[cut[k] : cut[k + 1]].tolist() for k in range(len(order))] == expected
        assert bags.tolist() == [k for k, bag in enumerate(expected) for _ in bag]


def test_what_is_no_number_of_bags():
    with pytest.raises(TypeError, match=r"^take_bags: 'order' must be int64, got int32\.$"):
        take_bags(np.array([0, 1]), np.zeros(1, np.int32))
    with pytest.raises(
        ValueError, match=r"^take_bags: 'order' must have axes \(K\), got shape \(\)"
    ):
        take_bags(np.array([0, 1]), np.array(0))

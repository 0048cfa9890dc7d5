"""The sum over ranks, under mpirun."""

import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.parallel import all_reduce, world

pytestmark = pytest.mark.ranks
RANKS = world()
N, R = RANKS.size, RANKS.rank


def values_of(rank: int, length: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(length, np.float32)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 1025, 70_001])
def test_sums_in_order_of_rank_with_the_same_bits(device: str, length: int) -> None:
    expected = np.zeros(length, np.float32)
    for rank in range(N):
        expected = expected + values_of(rank, length) if rank else values_of(0, length)
    array = arrays.copy_to(arrays.module(device), values_of(R, length))
    assert all_reduce(RANKS, "a test", array).result() is None
    assert (arrays.to_host(array) == expected).all()


def test_sums_what_a_stream_has_been_given() -> None:
    sim = arrays.module("sim")
    all_reduce(RANKS, "a test", sim.zeros(70, np.float32)).result()  # which compiles
    with sim.cuda.Stream():
        array = arrays.copy_to(sim, values_of(R, 70))
        array *= 2
        all_reduce(RANKS, "a test", array).result()
        doubled = [2 * values_of(rank, 70) for rank in range(N)]
        assert (array.get() == sum(doubled[1:], doubled[0])).all()


def test_as_few_bytes_as_can_be() -> None:
    before = RANKS.bytes_sent.get("sum", 0)
    all_reduce(RANKS, "sum", np.zeros(64 * N * 10, np.float32)).result()
    assert RANKS.bytes_sent.get("sum", 0) - before == 2 * (N - 1) * 640 * 4


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="all_reduce: 'array' must be float32"):
        all_reduce(RANKS, "a test", np.zeros(3))

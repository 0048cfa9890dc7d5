import numpy as np
import pytest

from cupyrec.sim.threads import Group, Threads, padded, warps_of


def places(threads):
    """(block, thread) of each lane that exists."""
    return [(int(b), int(t)) for b, t in zip(threads.block, threads.thread, strict=True) if t < 40]


@pytest.mark.parametrize("seed", [0, 7])
def test_every_thread_has_one_lane(seed):
    threads = Threads((3, 1, 1), (40, 1, 1), seed)
    assert threads.lanes == 3 * 64
    assert sorted(places(threads)) == [(b, t) for b in range(3) for t in range(40)]
    assert (places(threads) == sorted(places(threads))) == (seed == 0)
    assert threads.alive.tolist() == [40] * 3
    assert threads.exists.sum() == 120
    assert not threads.any_exited()


@pytest.mark.parametrize("seed", [0, 7])
def test_a_warp_stays_together(seed):
    threads = Threads((3, 1, 1), (40, 1, 1), seed)
    for start in range(0, 192, 32):
        warp = slice(start, start + 32)
        assert len(set(threads.block[warp])) == 1
        assert len(set(threads.special["%warpid"][warp])) == 1
        lanes = threads.lane_id[warp]
        assert lanes[threads.place_of_lane].tolist() == [*range(32)]
        there = 2**32 - 1 if threads.special["%warpid"][start] == 0 else 255
        assert threads.existing[warp].tolist() == [there] * 32
        exists = threads.exists[warp]
        assert threads.existing_places[start // 32] == sum(1 << i for i in np.flatnonzero(exists))


@pytest.mark.parametrize("seed", [0, 7])
def test_coordinates(seed):
    threads = Threads((2, 3, 4), (4, 2, 3), seed)
    seen = {threads.coordinates(int(lane)) for lane in np.flatnonzero(threads.exists)}
    assert len(seen) == 24 * 24
    assert max(seen) == ((1, 2, 3), (3, 1, 2))
    lane = int(np.flatnonzero((threads.block == 7) & (threads.thread == 13))[0])
    assert threads.coordinates(lane) == ((1, 0, 1), (1, 1, 1))


def test_seeds_differ():
    orders = {tuple(places(Threads((3, 1, 1), (40, 1, 1), seed))) for seed in range(5)}
    assert len(orders) == 5


def test_group():
    whole = Group(np.arange(32, 96))
    assert (whole.t, whole.warps.tolist()) == (slice(32, 96), [1, 2])
    some = whole.where(np.arange(64) % 40 == 0)
    assert (some.t.tolist(), some.lanes.tolist(), some.warps.tolist()) == (
        [32, 72],
        [32, 72],
        [1, 2],
    )
    assert whole.where(np.ones(64, bool)) is whole
    assert whole.where(np.zeros(64, bool)) is None


def test_warps():
    assert padded((3, 2, 1), (4, 5, 2)) == Threads((3, 2, 1), (4, 5, 2), 0).lanes == 6 * 64
    assert warps_of(np.array([31, 32, 63, 160])).tolist() == [0, 1, 5]
    assert Group(np.arange(31, 65)).warps.tolist() == [0, 1, 2]

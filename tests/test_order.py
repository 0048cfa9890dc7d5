"""Three blocks of two warps: lanes 0-63 are block 0, 64-127 block 1, 128-191 block 2."""

import numpy as np
import pytest

from cupyrec.sim.order import Order

A, B = np.array([8]), np.array([16])
ONE = np.array([True])


@pytest.fixture
def order():
    return Order(np.repeat([0, 1, 2], 64))


def lanes(*which):
    return np.array(which)


def test_a_thread_knows_itself_alone(order):
    assert order.ordered(5, 3, 5, 4)
    assert not order.ordered(4, 3, 5, 4)
    assert not order.ordered(5, 6, 5, 4)


def test_barrier_orders_its_block(order):
    order.barrier(10, np.array([1]))
    assert order.ordered(64, 9, 127, 11)
    assert not order.ordered(64, 11, 127, 12)
    assert not order.ordered(64, 9, 127, 9)
    assert not order.ordered(0, 9, 63, 11)
    assert (order.block_time.tolist(), order.warp_time.any()) == ([0, 10, 0], False)


def test_sync_orders_the_lanes_of_its_mask(order):
    order.sync(10, np.array([1]), np.array([0b1011]), np.array([False]))
    order.sync(20, np.array([1]), np.array([0b0110]), np.array([False]))
    assert order.ordered(32, 9, 35, 11)
    assert not order.ordered(34, 9, 35, 11)
    assert order.ordered(32, 9, 34, 21)  # by way of lane 1
    assert not order.ordered(32, 11, 34, 21)
    assert not order.ordered(0, 9, 3, 11)


def test_full_sync_is_seen_by_the_loops(order):
    order.sync(10, np.array([1, 2]), np.array([2**32 - 1] * 2), np.array([True, True]))
    assert order.warp_time.tolist() == [0, 10, 10, 0, 0, 0]


def test_release_and_acquire(order):
    order.write(10, lanes(0), A, True, False)
    order.read(20, lanes(64), A, True, False)
    order.read(20, lanes(128), B, True, False)
    assert order.ordered(0, 9, 64, 21)
    assert not order.ordered(0, 11, 64, 21)
    assert not order.ordered(0, 9, 64, 19)  # it hadn't read yet
    assert not order.ordered(0, 9, 128, 21)  # another address
    assert not order.ordered(1, 9, 64, 21)  # another thread of the block


def test_what_is_read_before_the_release_orders_nothing(order):
    order.read(5, lanes(64), A, True, False)
    order.write(10, lanes(0), A, True, False)
    assert not order.ordered(0, 4, 64, 21)


def test_relaxed_accesses_order_nothing_without_fences(order):
    order.update(10, lanes(0), A, False, False, False, ONE)
    order.read(20, lanes(64), A, False, False)
    assert not order.ordered(0, 9, 64, 21)


@pytest.mark.parametrize(
    ("writer", "reader", "result"), [(8, 22, True), (None, 22, False), (8, None, False)]
)
def test_fences_on_both_sides(order, writer, reader, result):
    if writer:
        order.fence(writer, lanes(0), False)
    order.update(10, lanes(0), A, False, False, False, ONE)
    order.read(20, lanes(64), A, False, False)
    if reader:
        order.fence(reader, lanes(64), False)
    assert order.ordered(0, 7, 64, 23) is result
    assert not order.ordered(0, 9, 64, 23)  # after the fence, before the write


def test_scope_of_a_block_ends_there(order):
    order.write(10, lanes(0), A, True, True)
    order.read(20, lanes(64, 63), A.repeat(2), True, False)
    assert not order.ordered(0, 9, 64, 21)
    assert order.ordered(0, 9, 63, 21)


def test_scope_of_a_fence_counts(order):
    order.fence(8, lanes(0), True)
    order.update(10, lanes(0), A, False, False, False, ONE)
    order.read(20, lanes(64, 63), A.repeat(2), True, False)
    assert not order.ordered(0, 7, 64, 21)
    assert order.ordered(0, 7, 63, 21)


def test_updates_pass_a_release_on_and_stores_end_it(order):
    order.write(10, lanes(0), A, True, False)
    order.update(12, lanes(130), A, False, False, False, ONE)
    order.read(20, lanes(64), A, True, False)
    assert order.ordered(0, 9, 64, 21)
    order.write(22, lanes(130), A, False, False)
    order.read(24, lanes(65), A, True, False)
    assert not order.ordered(0, 9, 65, 25)


def test_chains(order):
    """Block 0 meets, lane 0 releases; lane 64 acquires, block 1 meets; then all of it knows."""
    order.barrier(10, np.array([0]))
    order.write(12, lanes(0), A, True, False)
    order.read(14, lanes(64), A, True, False)
    order.barrier(16, np.array([1]))
    assert order.ordered(63, 9, 100, 17)
    assert not order.ordered(63, 11, 100, 17)
    assert not order.ordered(63, 9, 100, 15)
    assert not order.ordered(63, 9, 128, 17)
    order.update(18, lanes(100), B, False, True, False, ONE)
    order.read(20, lanes(128), B, True, False)
    assert order.ordered(63, 9, 128, 21)


def test_atomics_of_one_instruction_follow_each_other(order):
    """All blocks count themselves at once; the last to do so knows the others."""
    first = lanes(0, 64, 128)
    order.fence(8, first, False)
    order.update(10, first, A.repeat(3), False, False, False, np.array([True, False, True]))
    order.fence(12, first, False)
    assert order.ordered(0, 7, 128, 13)
    assert not order.ordered(64, 7, 128, 13)  # its compare-and-swap failed
    assert not order.ordered(128, 7, 0, 13)


def test_an_acquire_keeps_what_it_read(order):
    order.write(10, lanes(0), A, True, False)
    order.read(12, lanes(64), A, True, False)
    order.write(14, lanes(128), A, False, False)
    assert order.ordered(0, 9, 64, 15)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_block_knows_in_common_is_what_each_of_its_threads_knows(seed, monkeypatch):
    """Barriers, syncs, fences, releases and acquires at random; asked after each of them."""
    rng = np.random.default_rng(seed)
    block = np.arange(128) // 64
    short, full, shared = Order(block), Order(block), 0
    monkeypatch.setattr(full, "_last_news", lambda me: 1 << 40)
    for now in range(1, 60):
        lane = rng.integers(128, size=1)
        address, wide = np.array([8 * rng.integers(2)]), bool(rng.integers(2))
        kind = rng.choice(["barrier", "sync", "fence", "read", "write", "update"])
        given = {
            "barrier": (lane // 64,),
            "sync": (lane // 32, np.array([0xFFFFFFFF >> rng.integers(3)]), np.array([False])),
            "fence": (lane, wide),
            "read": (lane, address, wide, False),
            "write": (lane, address, wide, False),
            "update": (lane, address, wide, wide, False, np.array([True])),
        }[kind]
        for order in (short, full):
            getattr(order, kind)(now, *given)
        for _ in range(20):
            other, me = rng.integers(128, size=2).tolist()
            time = int(rng.integers(1, now + 1))
            if (kind, time) != ("barrier", now):  # it touches no memory
                expected = full.ordered(other, time, me, now + 1)
                assert short.ordered(other, time, me, now + 1) == expected
        shared = len(short._common)
    assert shared > 0

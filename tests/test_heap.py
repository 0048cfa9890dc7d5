import os

import numpy as np
import pytest

from cupyrec.sim import heap as heaps


@pytest.fixture
def heap():
    return heaps.Heap()


def test_allocations_do_not_touch(heap):
    sizes = [1, 256, 1000, 0, 17]
    made = [heap.allocate(size, f"a{i}") for i, size in enumerate(sizes)]
    assert all(a.address % heaps.GUARD == 0 for a in made)
    for a, b in zip(made, made[1:], strict=False):
        assert b.address - (a.address + a.size) >= heaps.GUARD // 2 + 1
    assert heap.live == made
    assert [heap.view(a).size for a in made] == sizes


def test_addresses_are_those_of_the_host(heap):
    a = heap.allocate(8, "a")
    heap.write(a, np.arange(8, dtype=np.uint8))
    assert heap.view(a).ctypes.data == a.address
    assert heap.view(a).tolist() == [*range(8)]


def test_freed_memory_is_used_again_late_and_unwritten(heap):
    size = heaps.QUARANTINE // 4
    first = heap.allocate(size, "a")
    heap.write(first, bytes([7]) * size)
    heap.free(first)
    others = [heap.allocate(size, "b") for _ in range(4)]
    assert first.address not in {a.address for a in others}  # a stale pointer hits nothing
    for a in others:
        heap.free(a)
    again = heap.allocate(size - 10, "c")
    start = again.address - heap.base
    assert again.address == first.address
    assert not heap.view(again).any()
    assert not heap.written[start : start + again.size].any()
    assert heap.live == [again]


def test_freed_neighbours_become_one_block(heap):
    size = heaps.QUARANTINE // 4
    made = [heap.allocate(size, "a") for _ in range(4)]
    heap.allocate(1, "end")
    for i in (2, 0, 1, 3):
        heap.free(made[i])
    for other in [heap.allocate(size + heaps.GUARD, "b") for _ in range(5)]:
        heap.free(other)  # until those four have waited
    assert heap.allocate(4 * size, "c").address == made[0].address


def test_memory_of_many_sizes_is_used_again(heap):
    """What is in use stays small, so what was ever touched does, too."""
    generator, live, top = np.random.default_rng(0), [], 0
    for _ in range(4000):
        if len(live) > 20:
            heap.free(live.pop(int(generator.integers(len(live)))))
        live.append(heap.allocate(int(generator.integers(1 << 20)), "a"))
        assert not heap.view(live[-1])[:64].any()
        heap.write(live[-1], bytes([7]) * min(64, live[-1].size))
        top = max(top, live[-1].address + live[-1].size - heap.base)
    assert top < 3 * heaps.QUARANTINE
    assert heap.live == sorted(live)
    for a in live:
        heap.free(a)
    while heap._waiting:
        heap._end_wait()
    assert heap._by_room == [(heaps.RESERVED - heaps.GUARD, heaps.GUARD)]
    assert heap.live == []


@pytest.mark.parametrize("drops", [True, False])
def test_large_blocks_are_cleared(heap, drops):
    assert heap._drops or not hasattr(os, "posix_fadvise")  # as on Linux
    heap._drops &= drops
    size = heaps.LARGE + 100
    edge = heap.allocate(300, "edge")
    heap.write(edge, bytes([5]) * 300)
    first = heap.allocate(size, "a")
    heap.view(first)[:] = 7
    start = first.address - heap.base
    heap.written[start : start + size] = 1
    heap.free(first)
    assert not heap.bytes[start : start + size].any()
    assert not heap.written[start : start + size].any()
    assert heap.view(edge).tolist() == [5] * 300


def test_written_from_the_start(heap):
    a = heap.allocate(10, "a", written=True)
    start = a.address - heap.base
    assert heap.written[start - 1 : start + 11].tolist() == [0] + [1] * 10 + [0]


def test_too_much(heap):
    text = r"^sim: allocations must fit \d+ bytes, got \d+ more\.$"
    for _ in range(2):
        with pytest.raises(MemoryError, match=text):
            heap.allocate(heaps.RESERVED, "all")
    a = heap.allocate(8, "a")  # it lives on
    heap.free(heap.allocate(heaps.RESERVED // 2, "half"))
    heap.free(a)
    b = heap.allocate(heaps.RESERVED - 2 * heaps.GUARD, "what waits, too")
    assert heap.live == [b]


def test_what_is_freed_meanwhile_is_settled_later(heap):
    """As by the collector in the middle of an allocation."""
    a, b = heap.allocate(8, "a"), heap.allocate(8, "b")
    with heap._lock:
        heap.free(a)
        assert heap.live == [a, b]
    heap.free(b)
    assert heap.live == []

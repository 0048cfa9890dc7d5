import numpy as np
import pytest

from cupyrec.sim import heap as heaps
from cupyrec.sim import memory


@pytest.fixture
def heap():
    return heaps.Heap()


@pytest.fixture
def two(heap):
    """A table of 40 bytes 'a' and 64 bytes 'b'."""
    a, b = heap.allocate(40, "a"), heap.allocate(64, "b")
    return heap, memory.Table(heap, 4), a, b


def located(table, address, nbytes, align, own=-1):
    address = np.array(address)
    found = np.empty(address.size, np.int64)
    bad = memory.locate(address, nbytes, align, np.full(address.size, own), table.starts,
                        table.sizes, table.reached, found)  # fmt: skip
    assert bad == (found < 0).sum()
    return found.tolist()


def test_locate(two):
    _, table, a, b = two
    out, odd = memory.OUTSIDE, memory.MISALIGNED
    where = [a.address, a.address + 36, a.address + 37, a.address - 4, b.address + 2, b.address]
    assert located(table, where, 4, 4) == [0, 0, out, out, odd, 1]
    assert located(table, where, 4, 4, own=1) == [out, out, out, out, odd, 1]
    assert located(table, [0, 2**62], 4, 4) == [out, out]


def test_unwritten(two):
    heap, _, a, b = two
    heap.write(a, bytes(8))
    found = np.array([0, 0, 0, 1])
    address = np.array([a.address, a.address + 4, a.address + 8, b.address])
    assert memory.unwritten(address, 4, heap.base, heap.written, found) == 2
    assert found.tolist() == [0, 0, memory.UNWRITTEN, memory.UNWRITTEN]


class Watch:
    """Lanes 0-63 are block 0, the rest block 1."""

    def __init__(self, table):
        self.table, self.now = table, 0
        self.block = np.repeat([0, 1], 64)
        self.warp_time, self.block_time = np.zeros(4, np.int32), np.zeros(2, np.int32)

    def __call__(self, address, lanes, reads, writes, plain=True, nbytes=4):
        self.now += 1
        suspects = np.zeros((8, 4), np.int64)
        lanes = np.array(lanes)
        count = memory.watch(
            np.broadcast_to(np.int64(address), lanes.size), np.zeros(lanes.size, np.int64),
            nbytes, lanes, self.now, reads, writes, plain, self.table.starts,
            self.table.first_cell, self.table.grain, self.table.cells, self.block,
            self.warp_time, self.block_time, suspects,
        )  # fmt: skip
        return [tuple(row[1:]) for row in suspects[:count].tolist()]


def test_watch(two):
    _, table, a, _ = two
    watch = Watch(table)
    assert watch(a.address, [0], False, True) == []
    assert watch(a.address, [0], True, False) == []
    assert watch(a.address, [3], True, False) == [(0, 1, 1)]  # (lane, time, whether it wrote)
    assert watch(a.address + 4, [3], True, True) == []
    assert watch(a.address, [5], False, True) == [(0, 1, 1), (3, 3, 0), (0, 2, 0)]
    watch.warp_time[0] = 6
    watch.now = 6
    assert watch(a.address, [9], False, True) == []
    assert watch(a.address, [40], True, False) == [(9, 7, 1)]
    watch.block_time[0] = 9
    watch.now = 9
    assert watch(a.address, [40], False, True) == []
    assert watch(a.address, [70], True, False) == [(40, 10, 1)]


def test_watch_atomics(two):
    _, table, a, _ = two
    watch = Watch(table)
    assert watch(a.address, [0, 1, 70], True, True, plain=False) == []
    assert watch(a.address, [2], True, False) == []  # an atomic write and a plain read
    assert watch(a.address, [2], False, True) == [(70, 1, 1), (70, 1, 0)]
    assert watch(a.address, [71], True, True, plain=False) == [(2, 3, 1)]


def test_watch_keeps_two_readers_of_an_instruction(two):
    _, table, a, _ = two
    for writer, other in [(0, 9), (9, 0)]:
        watch = Watch(table)
        table.cells[:] = 0
        assert watch(a.address, range(10), True, False) == []
        assert watch(a.address, [writer], False, True) == [(other, 1, 0)]


def test_watch_remembers_enough_readers(two):
    """A write races with a reader that is kept if it does with any at all."""
    _, table, a, _ = two
    generator, races = np.random.default_rng(0), 0
    for _ in range(500):
        watch, readers = Watch(table), []
        table.cells[:] = 0
        few = generator.choice(generator.choice([64, 128]), 5)
        for _ in range(generator.integers(1, 8)):
            lanes = np.unique(generator.choice(few, generator.integers(1, 4)))
            watch(a.address, lanes, True, False)
            readers += [(int(lane), watch.now) for lane in lanes]
            watch.now += 1
            if generator.random() < 0.4:
                watch.warp_time[generator.integers(4)] = watch.now
            if generator.random() < 0.5:
                watch.block_time[generator.integers(2)] = watch.now
        me = int(generator.choice(few))
        truth = [
            other
            for other, time in readers
            if other != me
            and not (other // 32 == me // 32 and time < watch.warp_time[me // 32])
            and not (other // 64 == me // 64 and time < watch.block_time[me // 64])
        ]
        found = [lane for lane, _, wrote in watch(a.address, [me], False, True) if not wrote]
        assert bool(found) == bool(truth)
        assert set(found) <= set(truth)
        races += bool(truth)
    assert 100 < races < 450


def test_touched(two):
    _, table, a, b = two
    watch = Watch(table)
    assert table.touched() == []

    def access(address, lane, writes, nbytes):
        assert located(table, [address], nbytes, 4) == [0]
        watch(address, [lane], True, writes, nbytes=nbytes)

    access(a.address, 0, False, 8)
    access(a.address + 4, 1, True, 16)
    assert table.touched() == [(a, 20, 16)]
    access(a.address + 36, 1, True, 4)
    assert table.touched() == [(a, 24, 20)]
    assert table.reached.tolist() == [[0, 40], [b.size, 0]]


def traffic(function, address, nbytes, lanes=None):
    address = np.array(address)
    lanes = np.arange(address.size) if lanes is None else lanes
    return function(address, np.zeros(address.size, np.int64), nbytes, lanes)


def test_sectors():
    assert traffic(memory.sectors, 4 * np.arange(64), 4) == (2, 8)
    assert traffic(memory.sectors, 4 * np.arange(32)[::-1], 4) == (1, 4)
    assert traffic(memory.sectors, np.zeros(32, int), 4) == (1, 1)
    assert traffic(memory.sectors, 16 * np.arange(32), 16) == (1, 16)
    assert traffic(memory.sectors, 32 * np.arange(32), 1) == (1, 32)
    assert traffic(memory.sectors, [0, 0], 4, np.array([31, 32])) == (2, 2)


def test_bank_conflicts():
    assert traffic(memory.bank_conflicts, 4 * np.arange(32), 4) == (1, 0)
    assert traffic(memory.bank_conflicts, 128 * np.arange(32), 4) == (32, 31)
    assert traffic(memory.bank_conflicts, 8 * np.arange(32), 8) == (2, 0)
    assert traffic(memory.bank_conflicts, 16 * np.arange(32), 16) == (4, 0)
    assert traffic(memory.bank_conflicts, 32 * np.arange(32), 16) == (8, 4)
    assert traffic(memory.bank_conflicts, np.arange(32), 1) == (1, 0)

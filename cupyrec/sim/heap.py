"""Device memory: allocations at real host addresses.

All allocations lie in one reserved range of the host's address space with a guard between any two,
so that a device address is a host address, whoever stores it, and no stray access hits a neighbour.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import mmap
import threading
from typing import NamedTuple

import numpy as np

__all__ = ["Allocation", "Heap", "the_heap"]

GUARD = 256  # bytes between allocations, and their alignment
RESERVED = 1 << 34
QUARANTINE = 1 << 26  # freed bytes that stay unused, so that stale pointers show
PAGE = mmap.PAGESIZE
LARGE = 1 << 24  # bytes from which pages go back: below, clearing is faster than faulting them in


class Allocation(NamedTuple):
    """`size` bytes from `address` on, `name` in what faults say."""

    address: int
    size: int
    name: str
    space: str


class Heap:
    """Allocations, their bytes, and of each byte whether anything wrote it.

    Freed blocks wait in a queue, so that stale pointers show, and join their free neighbours after
    it. All memory outside of allocations is zero, in both maps.
    """

    def __init__(self) -> None:
        # Addresses alone: without this flag, which Python 3.11 doesn't name, a fork is refused for
        # want of memory that nobody uses.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._maps = [mmap.mmap(-1, RESERVED, flags=flags) for _ in range(2)]
        self.bytes, self.written = (np.frombuffer(m, np.uint8) for m in self._maps)
        self.base = self.bytes.ctypes.data
        self.words = {size: self.bytes.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.live: list[Allocation] = []  # by address
        self._waiting: collections.deque[tuple[int, int]] = collections.deque()  # (start, room)
        self._waiting_bytes = 0
        self._rooms: dict[int, int] = {}  # start of a free block -> its bytes
        self._starts: list[int] = []  # of the free blocks, in order
        self._by_room: list[tuple[int, int]] = []  # (room, start) of the free blocks, in order
        self._give(GUARD, RESERVED - GUARD)
        # The collector may free an array in the middle of any of this, another thread at any time.
        self._lock = threading.Lock()
        self._returned: collections.deque[Allocation] = collections.deque()
        self._drops = self._can_drop()

    def allocate(
        self, size: int, name: str, space: str = "global", written: bool = False
    ) -> Allocation:
        """Return `size` bytes, all zero, that count as written only if `written`."""
        room = _room(size)
        with self._lock:
            self._settle()
            i = bisect.bisect_left(self._by_room, (room, 0))
            while i == len(self._by_room) and self._waiting:
                self._end_wait()
                i = bisect.bisect_left(self._by_room, (room, 0))
            if i == len(self._by_room):
                raise MemoryError(f"sim: allocations must fit {RESERVED} bytes, got {size} more.")
            start = self._take(*self._by_room[i], room)
            allocation = Allocation(self.base + start, size, name, space)
            bisect.insort(self.live, allocation)
        if written:
            self.written[start : start + size] = 1
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back."""
        self._returned.append(allocation)
        if self._lock.acquire(blocking=False):  # else the next to come by settles it
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Clear what was given back, and let it wait."""
        while self._returned:
            allocation = self._returned.popleft()
            del self.live[bisect.bisect_left(self.live, allocation)]
            start, room = allocation.address - self.base, _room(allocation.size)
            self._clear(start, start + allocation.size)
            self._waiting.append((start, room))
            self._waiting_bytes += room
        while self._waiting_bytes > QUARANTINE:
            self._end_wait()

    def _end_wait(self) -> None:
        start, room = self._waiting.popleft()
        self._waiting_bytes -= room
        self._give(start, room)

    def _give(self, start: int, room: int) -> None:
        """Make a block free, as one with those that it touches."""
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == start + room:
            room += self._remove(i)
        if i and (before := self._starts[i - 1]) + self._rooms[before] == start:
            start, room = before, room + self._remove(i - 1)
            i -= 1
        self._starts.insert(i, start)
        self._rooms[start] = room
        bisect.insort(self._by_room, (room, start))

    def _take(self, whole: int, start: int, room: int) -> int:
        """Take the first `room` bytes of a free block of `whole`."""
        i = bisect.bisect_left(self._starts, start)
        self._remove(i)
        if whole > room:
            self._starts.insert(i, start + room)
            self._rooms[start + room] = whole - room
            bisect.insort(self._by_room, (whole - room, start + room))
        return start

    def _remove(self, i: int) -> int:
        """Forget the i-th free block; return its bytes."""
        start = self._starts.pop(i)
        room = self._rooms.pop(start)
        del self._by_room[bisect.bisect_left(self._by_room, (room, start))]
        return room

    def _clear(self, start: int, stop: int) -> None:
        """Make bytes zero and unwritten; those of whole pages go back to the system."""
        low, high = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
        drop = self._drops and stop - start >= LARGE
        for map, bytes in zip(self._maps, (self.bytes, self.written), strict=True):
            if drop:
                map.madvise(mmap.MADV_DONTNEED, low, high - low)
                bytes[start:low] = 0
                bytes[high:stop] = 0
            else:
                bytes[start:stop] = 0

    def _can_drop(self) -> bool:
        """Whether pages that were given back read as zero, as on Linux."""
        self.bytes[0] = 1
        with contextlib.suppress(AttributeError, OSError):
            self._maps[0].madvise(mmap.MADV_DONTNEED, 0, PAGE)
        dropped = self.bytes[0] == 0
        self.bytes[0] = 0
        return bool(dropped)

    def view(self, allocation: Allocation) -> np.ndarray:
        """Return the bytes of an allocation."""
        start = allocation.address - self.base
        return self.bytes[start : start + allocation.size]

    def write(self, allocation: Allocation, data: bytes | np.ndarray) -> None:
        """Copy bytes to the start of an allocation."""
        data = np.frombuffer(data, np.uint8)
        start = allocation.address - self.base
        self.bytes[start : start + data.size] = data
        self.written[start : start + data.size] = 1


def _room(size: int) -> int:
    """Bytes that an allocation takes with the guard behind it."""
    return -(-max(size, 1) // GUARD) * GUARD + GUARD


@functools.cache
def the_heap() -> Heap:
    """Return the device memory of this process."""
    return Heap()

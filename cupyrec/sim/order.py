"""Which of two accesses came first: what barriers, `.sync` instructions, fences and atomics order.

Time is the number of the instruction that the machine executes. Everything a thread did up to some
time is known to another one if a chain of synchronisations leads from there to it: a barrier of
their block, a `.sync` instruction of their warp, or an acquire that read what a release wrote. A
fence turns the atomic writes after it into releases and the atomic reads before it into acquires.

Full barriers are kept in two arrays, which the loops over memory consult. What they leave open is
rare, so the rest goes to a log that is read only when somebody asks.
"""

from __future__ import annotations

import bisect
import collections
from typing import NamedTuple

import numpy as np

__all__ = ["Order"]


# Lane -> time up to which it is known what it did; block -> its latest barrier that is known.
_Knowledge = tuple[dict[int, int], dict[int, int]]


class _Release(NamedTuple):
    """A write by `lane` that publishes all it knew at `known`."""

    lane: int
    known: int
    block_wide: bool  # scope .cta: nothing for other blocks


class _Acquire(NamedTuple):
    """A read, in force from `time` on, that met the first `length` releases of a chain."""

    time: int
    chain: list[_Release]
    length: int
    block_wide: bool


class Order:
    """Synchronisation of one launch; lanes are places in the machine, 32 to a warp."""

    def __init__(self, block: np.ndarray) -> None:
        self.block = block  # of each lane
        lanes = block.size
        self.warp_time = np.zeros(lanes // 32, np.int32)
        self.block_time = np.zeros(int(block.max()) + 1, np.int32)
        self._fence_time = np.zeros(lanes, np.int32)
        self._fence_narrow = np.zeros(lanes, bool)
        self._log: list[tuple] = []
        self._read = 0  # entries of the log that the dictionaries below hold
        self._barriers = collections.defaultdict(list)  # block -> times
        self._syncs = collections.defaultdict(dict)  # warp -> mask of lanes -> times
        # address -> releases since it was last overwritten; updates in between keep them readable
        self._chains: dict[int, list[_Release]] = {}
        self._acquires = collections.defaultdict(list)  # lane -> [_Acquire]
        self._hopeful = collections.defaultdict(dict)  # lane -> reads that a fence makes acquires
        self._acquirers = collections.defaultdict(set)  # block -> lanes
        self._common: dict[tuple[int, int], _Knowledge] = {}  # block, time of a barrier -> answer
        self._known: dict[int, _Knowledge] = {}  # other answers, good for one time
        self._asked = (0, 0)

    # What happens

    def barrier(self, now: int, blocks: np.ndarray) -> None:
        """All threads of these blocks have met."""
        self.block_time[blocks] = now
        self._log.append(("barrier", now, blocks))

    def sync(self, now: int, warps: np.ndarray, masks: np.ndarray, full: np.ndarray) -> None:
        """Lanes of these warps have met; masks are of places in the machine, not of lane ids."""
        self.warp_time[warps[full]] = now
        self._log.append(("sync", now, warps, masks))

    def fence(self, now: int, lanes: np.ndarray, narrow: bool) -> None:
        """Lanes executed a fence, of scope .cta if `narrow`."""
        self._fence_time[lanes] = now
        self._fence_narrow[lanes] = narrow
        self._log.append(("fence", now, lanes, narrow))

    def read(
        self, now: int, lanes: np.ndarray, address: np.ndarray, acquire: bool, narrow: bool
    ) -> None:
        """Lanes read by a volatile, relaxed or acquiring load."""
        self._log.append(("read", now, lanes, address, acquire, narrow))

    def write(
        self, now: int, lanes: np.ndarray, address: np.ndarray, release: bool, narrow: bool
    ) -> None:
        """Lanes wrote by a volatile, relaxed or releasing store."""
        published = self._published(now, lanes, release, narrow)
        self._log.append(("write", now, lanes, address, *published))

    def update(
        self, now: int, lanes: np.ndarray, address: np.ndarray, acquire: bool, release: bool,
        narrow: bool, wrote: np.ndarray,
    ) -> None:  # fmt: skip
        """Lanes read and, where `wrote`, wrote by an atomic instruction, one after the other."""
        published = self._published(now, lanes, release, narrow)
        self._log.append(("update", now, lanes, address, acquire, narrow, wrote, *published))

    def _published(
        self, now: int, lanes: np.ndarray, release: bool, narrow: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Time up to which a write publishes what its lane knew, 0 for not at all; and scope."""
        if release:
            return np.full(lanes.size, now), np.full(lanes.size, narrow)
        return self._fence_time[lanes], narrow | self._fence_narrow[lanes]

    # What follows from it

    def ordered(self, other: int, time: int, me: int, now: int) -> bool:
        """Whether what lane `other` did at `time` is known to lane `me`."""
        known, barriers = self._knowledge(me, now)
        until = now if other == me else known.get(other, 0)
        met = barriers.get(int(self.block[other]), 0)
        return until >= time or met > time  # a barrier's own time touches no memory

    def _knowledge(self, me: int, now: int) -> _Knowledge:
        """What `me` knows at a time; since a barrier often what all threads of its block know."""
        self._index()
        block = int(self.block[me])
        i = bisect.bisect_right(self._barriers[block], now)
        met = self._barriers[block][i - 1] if i else 0
        if met and self._last_news(me) < met:
            if (block, met) not in self._common:
                todo = [(other, met) for other in self._acquirers[block]]
                self._common[block, met] = self._follow(todo, {block: met})
            return self._common[block, met]
        if self._asked != (now, len(self._log)):
            self._asked = (now, len(self._log))
            self._known.clear()
        if me not in self._known:
            self._known[me] = self._follow([(me, now)], {})
        return self._known[me]

    def _last_news(self, me: int) -> int:
        """When `me` last learnt something otherwise than by a barrier."""
        bit = 1 << me % 32
        times = [t[-1] for mask, t in self._syncs.get(me // 32, {}).items() if mask & bit]
        acquires = self._acquires.get(me, ())
        return max([*times, *(a.time for a in acquires[-1:])], default=0)

    def _follow(self, todo: list[tuple[int, int]], barriers: dict[int, int]) -> _Knowledge:
        """What follows from knowing what some lanes knew at some times, and some barriers."""
        known: dict[int, int] = {}
        read: dict[tuple[int, int], int] = {}  # chain, block of its reader -> releases seen
        while todo:
            lane, time = todo.pop()
            if known.get(lane, 0) >= time:
                continue
            known[lane] = time
            block = int(self.block[lane])
            for acquire in self._acquires.get(lane, ()):
                if acquire.time > time:
                    break
                key = (id(acquire.chain), -1 if acquire.block_wide else block)
                start = read.get(key, 0)
                read[key] = max(start, acquire.length)
                for release in acquire.chain[start : acquire.length]:
                    far = self.block[release.lane] != block
                    if not (far and (release.block_wide or acquire.block_wide)):
                        todo.append((release.lane, release.known))
            for mask, times in self._syncs.get(lane // 32, {}).items():
                i = bisect.bisect_right(times, time)
                if i and mask >> lane % 32 & 1:
                    start = lane // 32 * 32
                    todo += [(start + j, times[i - 1]) for j in range(32) if mask >> j & 1]
            i = bisect.bisect_right(self._barriers[block], time)
            if i and self._barriers[block][i - 1] > barriers.get(block, 0):
                barriers[block] = self._barriers[block][i - 1]
                todo += [(other, barriers[block]) for other in self._acquirers[block]]
        return known, barriers

    def _index(self) -> None:
        for kind, now, *what in self._log[self._read :]:
            getattr(self, f"_index_{kind}")(now, *what)
        self._read = len(self._log)

    def _index_barrier(self, now: int, blocks: np.ndarray) -> None:
        for block in blocks.tolist():
            self._barriers[block].append(now)

    def _index_sync(self, now: int, warps: np.ndarray, masks: np.ndarray) -> None:
        for warp, mask in zip(warps.tolist(), masks.tolist(), strict=True):
            self._syncs[warp].setdefault(mask, []).append(now)

    def _index_fence(self, now: int, lanes: np.ndarray, narrow: bool) -> None:
        for lane in set(lanes.tolist()) & self._hopeful.keys():
            for chain, length, block_wide in self._hopeful.pop(lane).values():
                self._acquire(lane, _Acquire(now, chain, length, block_wide or narrow))

    def _index_read(
        self, now: int, lanes: np.ndarray, addresses: np.ndarray, acquire: bool, narrow: bool
    ) -> None:
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            if chain := self._chains.get(address):
                if acquire:
                    self._acquire(lane, _Acquire(now, chain, len(chain), narrow))
                else:
                    self._hopeful[lane][id(chain)] = chain, len(chain), narrow

    def _acquire(self, lane: int, acquire: _Acquire) -> None:
        before = self._acquires[lane]
        if not before or before[-1][1:] != acquire[1:]:  # one that spins learns nothing new
            before.append(acquire)
            self._acquirers[int(self.block[lane])].add(lane)

    def _index_write(
        self, now: int, lanes: np.ndarray, addresses: np.ndarray, known: np.ndarray,
        narrow: np.ndarray,
    ) -> None:  # fmt: skip
        columns = (x.tolist() for x in (lanes, addresses, known, narrow))
        for lane, address, time, block_wide in zip(*columns, strict=True):
            self._chains[address] = [_Release(lane, time, block_wide)] if time else []

    def _index_update(
        self, now: int, lanes: np.ndarray, addresses: np.ndarray, acquire: bool, narrow: bool,
        wrote: np.ndarray, known: np.ndarray, block_wide: np.ndarray,
    ) -> None:  # fmt: skip
        for i in range(lanes.size):
            self._index_read(now, lanes[i : i + 1], addresses[i : i + 1], acquire, narrow)
            if wrote[i] and known[i]:
                release = _Release(int(lanes[i]), int(known[i]), bool(block_wide[i]))
                self._chains.setdefault(int(addresses[i]), []).append(release)

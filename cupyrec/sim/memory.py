"""What a launch touches: the loops that check, count and compare accesses to memory.

A loop here goes over the lanes of one instruction; `lane` is a lane's place in the machine.
"""

from __future__ import annotations

import numpy as np

from cupyrec import cpu
from cupyrec.sim.heap import Allocation, Heap

__all__ = ["Table"]

OUTSIDE, MISALIGNED, UNWRITTEN = -1, -2, -3  # what `locate` and `unwritten` find


class Table:
    """The live allocations as arrays that loops search, with the shadow cells of one launch.

    A cell holds who last wrote `grain` bytes and two who read them since the launch began: (time,
    lane) of the write, of the last reader and of the one before that tells most; the lane of a
    plain write is stored as it is, that of an atomic one as ``~lane``. Time 0 is "never". Local
    memory has no cells.
    """

    def __init__(self, heap: Heap, grain: int) -> None:
        self.allocations = list(heap.live)
        self.grain = grain
        self.starts = np.array([a.address for a in self.allocations], np.int64)
        self.sizes = np.array([a.size for a in self.allocations], np.int64)
        cells = self.starts % grain + self.sizes + grain - 1
        cells = np.where([a.space != "local" for a in self.allocations], cells // grain, 0)
        self.first_cell = np.append(0, np.cumsum(cells))  # of each allocation, and the end
        self.cells = np.zeros((int(self.first_cell[-1]), 6), np.int32)
        # Of each allocation the lowest byte that was touched, and the end of the highest: a chunk
        # of rows is 16 MB, of which a launch meets some.
        self.reached = np.stack([self.sizes, np.zeros_like(self.sizes)], axis=1)

    def touched(self) -> list[tuple[Allocation, int, int]]:
        """Bytes read and written of each allocation in global memory that was touched."""
        result = []
        for i in np.flatnonzero(self.reached[:, 1]):
            allocation, first = self.allocations[i], self.first_cell[i]
            if allocation.space == "global":
                low, high = self.reached[i] // self.grain
                cells = self.cells[first + low : min(first + high + 1, self.first_cell[i + 1])]
                counts = (int(np.count_nonzero(cells[:, c])) * self.grain for c in (2, 0))
                reads, writes = (min(n, allocation.size) for n in counts)
                if reads or writes:
                    result.append((allocation, reads, writes))
        return result


@cpu.exact_loop
def locate(address, nbytes, align, own, starts, sizes, reached, found):
    """found[i] = index of the allocation that holds all of address[i] … + nbytes, else why not.

    Parameters: address int64 (n,); own int64 (n,), the one allocation allowed or -1; reached: see
    `Table`; found (n,).
    Returns the number of accesses that no allocation holds or that are misaligned.
    """
    bad, last = 0, 0
    for i in range(address.size):
        a = address[i]
        k = own[i]
        if k < 0:
            if not (starts[last] <= a < starts[last] + sizes[last]):
                last = max(np.searchsorted(starts, a, side="right") - 1, 0)
            k = last
        if a < starts[k] or a + nbytes > starts[k] + sizes[k]:
            k = OUTSIDE
        elif a % align:
            k = MISALIGNED
        else:
            reached[k, 0] = min(reached[k, 0], a - starts[k])
            reached[k, 1] = max(reached[k, 1], a - starts[k] + nbytes)
        found[i] = k
        bad += k < 0
    return bad


@cpu.exact_loop
def unwritten(address, nbytes, base, written, found):
    """Mark in `found` the reads that meet a byte nothing wrote; return their number."""
    bad = 0
    for i in range(address.size):
        if found[i] >= 0:
            for j in range(address[i] - base, address[i] - base + nbytes):
                if written[j] == 0:
                    found[i] = UNWRITTEN
                    bad += 1
                    break
    return bad


@cpu.exact_loop
def load(address, found, base, words, out):
    """out[i, j] = j-th word at address[i]; 0 where nothing may be read."""
    size = words.itemsize
    for i in range(address.size):
        for j in range(out.shape[1]):
            if found[i] >= 0:  # (as one expression Numba would make uint64 and 0 a float)
                out[i, j] = words[(address[i] - base) // size + j]
            else:
                out[i, j] = 0


@cpu.exact_loop
def store(address, found, base, words, values, written):
    """Write values[i, j] as the j-th word at address[i]."""
    size = words.itemsize
    for i in range(address.size):
        if found[i] >= 0:
            for j in range(values.shape[1]):
                words[(address[i] - base) // size + j] = values[i, j]
            start = address[i] - base
            for j in range(start, start + size * values.shape[1]):
                written[j] = 1


@cpu.exact_loop
def _before(lane, time, me, block, warp_time, block_time):
    """Whether what `lane` did at `time` comes before `me`, by the barriers of warp and block."""
    if lane == me:
        return True
    if lane >> 5 == me >> 5 and time < warp_time[me >> 5]:
        return True
    return block[lane] == block[me] and time < block_time[block[me]]


@cpu.exact_loop
def _distance(lane, time, me, block, in_block, in_warp):
    """How far a reader is: 1 within a warp, 2 within a block, 3 beyond; 0 if `me` knows it done.

    Those of its block or warp who read before the time `in_block` or `in_warp` are done.
    """
    if lane >> 5 == me >> 5:
        return int(time >= in_warp and lane != me)
    if block[lane] == block[me]:
        return 2 * int(time >= in_block)
    return 3


@cpu.exact_loop
def watch(
    address, found, nbytes, lanes, now, reads, writes, plain,
    starts, first_cell, grain, cells, block, warp_time, block_time, suspects,
):  # fmt: skip
    """Keep who touches what; return how many pairs of accesses no barrier orders.

    suspects int64 (m, 4) takes (i, other lane, other time, 1 if that one wrote) of the first m.
    """
    count = 0
    for i in range(address.size):
        k = found[i]
        if k < 0 and k != UNWRITTEN:
            continue
        me = lanes[i]
        if k < 0:
            k = np.searchsorted(starts, address[i], side="right") - 1
        if first_cell[k] == first_cell[k + 1]:
            continue  # local memory: nobody else's
        in_block = block_time[block[me]]
        in_warp = max(in_block, warp_time[me >> 5])
        start = first_cell[k] + address[i] // grain - starts[k] // grain
        for c in range(start, start + max(nbytes // grain, 1)):
            cell = cells[c]
            who = cell[1]
            other = who if who >= 0 else ~who
            clash = cell[0] > 0 and (who >= 0 or (writes and plain))
            if clash and not _before(other, cell[0], me, block, warp_time, block_time):
                if count < suspects.shape[0]:
                    suspects[count, 0] = i
                    suspects[count, 1] = other
                    suspects[count, 2] = cell[0]
                    suspects[count, 3] = 1
                count += 1
            if writes and plain:
                for r in (2, 4):
                    if cell[r] > 0 and not _before(
                        cell[r + 1], cell[r], me, block, warp_time, block_time
                    ):
                        if count < suspects.shape[0]:
                            suspects[count, 0] = i
                            suspects[count, 1] = cell[r + 1]
                            suspects[count, 2] = cell[r]
                            suspects[count, 3] = 0
                        count += 1
            if reads:
                # Of the two readers before, keep the one that tells most. Whoever knows `me` knows
                # what `me` knows done; of the rest the farthest meets most of those that don't.
                if cell[2] > 0 and cell[3] != me:
                    last = _distance(cell[3], cell[2], me, block, in_block, in_warp)
                    other = 0
                    if cell[4] > 0:
                        other = _distance(cell[5], cell[4], me, block, in_block, in_warp)
                    # of equals the later one, but the first reader of an instruction and its last
                    if last > other or (last == other and last > 0 and cell[4] != now):
                        cell[4], cell[5] = cell[2], cell[3]
                    elif other == 0:
                        cell[4] = 0
                cell[2], cell[3] = now, me
            if writes:
                cell[0] = now
                cell[1] = me if plain else ~me
    return count


@cpu.exact_loop
def overwritten(address, found, nbytes, since, first_cell, starts, grain, cells, suspects):
    """Put into `suspects`, as `watch` does, who wrote there after a time; return their number."""
    count = 0
    for i in range(address.size):
        k = found[i]
        if k < 0 and k != UNWRITTEN:
            continue
        if k < 0:
            k = np.searchsorted(starts, address[i], side="right") - 1
        start = first_cell[k] + address[i] // grain - starts[k] // grain
        for c in range(start, start + max(nbytes // grain, 1)):
            if cells[c, 0] > since and count < suspects.shape[0]:
                who = cells[c, 1]
                suspects[count, 0] = i
                suspects[count, 1] = who if who >= 0 else ~who
                suspects[count, 2] = cells[c, 0]
                suspects[count, 3] = 1
                count += 1
                break
    return count


@cpu.exact_loop
def sectors(address, found, nbytes, lanes):
    """Return (requests, distinct 32-byte sectors over all requests): a warp makes one request."""
    seen = np.empty(32 * 17, np.int64)
    requests, total, n, warp = 0, 0, 0, -1
    for i in range(address.size):
        if found[i] < 0 and found[i] != UNWRITTEN:
            continue
        if lanes[i] // 32 != warp:
            warp = lanes[i] // 32
            total += n
            n = 0
            requests += 1
        for sector in range(address[i] // 32, (address[i] + nbytes - 1) // 32 + 1):
            new = True
            for j in range(n - 1, -1, -1):
                if seen[j] == sector:
                    new = False
                    break
            if new:
                seen[n] = sector
                n += 1
    return requests, total + n


@cpu.exact_loop
def bank_conflicts(address, found, nbytes, lanes):
    """Return (wavefronts needed, wavefronts beyond those without conflict) of shared accesses.

    Of 8 and 16 bytes a lane, half and quarter warps go one after the other.
    """
    phase = 32 if nbytes <= 4 else 128 // nbytes
    words = np.empty((32, 32), np.int64)
    depth = np.zeros(32, np.int64)
    ideal, total, deepest, group = 0, 0, 0, -1
    for i in range(address.size):
        if found[i] < 0 and found[i] != UNWRITTEN:
            continue
        if lanes[i] // phase != group:
            group = lanes[i] // phase
            total += deepest
            ideal += 1
            deepest = 0
            depth[:] = 0
        for word in range(address[i] // 4, (address[i] + nbytes - 1) // 4 + 1):
            bank = word % 32
            new = True
            for j in range(depth[bank]):
                if words[bank, j] == word:
                    new = False
            if new:
                words[bank, depth[bank]] = word
                depth[bank] += 1
                deepest = max(deepest, depth[bank])
    total += deepest
    return total, total - ideal

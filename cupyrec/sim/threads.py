"""The threads of a launch, and where each of them stands in the machine's arrays.

A thread's place, its *lane*, follows from its block, its warp and its lane id, each drawn from a
permutation where a seed asks for one. Warps are whole: a block's last one may hold lanes that do
not exist.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["WARP", "Group", "Threads", "padded", "warps_of"]

WARP = 32


class Group:
    """Threads that stand at one instruction, in the order of their lanes."""

    __slots__ = ("lanes", "t", "warps")

    def __init__(self, lanes: np.ndarray) -> None:
        self.lanes = lanes
        start, stop = int(lanes[0]), int(lanes[-1]) + 1
        if stop - start == lanes.size:
            self.t = slice(start, stop)
            self.warps = np.arange(start >> 5, (stop - 1 >> 5) + 1)
        else:
            self.t, self.warps = lanes, warps_of(lanes)

    def where(self, chosen: np.ndarray) -> Group | None:
        """Those of the group for which `chosen` holds."""
        number = np.count_nonzero(chosen)
        if number == chosen.size:
            return self
        return Group(self.lanes[chosen]) if number else None


def warps_of(lanes: np.ndarray) -> np.ndarray:
    """Return the warps that lanes in their order belong to."""
    places = lanes >> 5
    first = np.ones(lanes.size, bool)
    np.not_equal(places[1:], places[:-1], out=first[1:])
    return places[first]


def padded(grid: tuple[int, int, int], block_shape: tuple[int, int, int]) -> int:
    """Return the number of lanes of a launch: its threads, the last warp of a block filled up."""
    return math.prod(grid) * (-(-math.prod(block_shape) // WARP) * WARP)


class Threads:
    """What each lane is, and whether it has ended."""

    def __init__(
        self, grid: tuple[int, int, int], block_shape: tuple[int, int, int], seed: int
    ) -> None:
        gx, gy, gz = grid
        bx, by, bz = block_shape
        blocks, threads = gx * gy * gz, bx * by * bz
        warps = -(-threads // WARP)
        self.lanes = padded(grid, block_shape)
        self.random = np.random.default_rng(seed)
        self.seed = seed
        order = [np.arange(n) for n in (blocks, warps, WARP)]
        if seed:
            order = [self.random.permutation(n) for n in (blocks, warps, WARP)]
        block, warp, lane = (x.ravel() for x in np.meshgrid(*order, indexing="ij"))
        thread = warp * WARP + lane
        self.block, self.thread, self.lane_id = block, thread, lane
        self.bit = np.uint32(1) << lane.astype(np.uint32)
        self.place_of_lane = np.argsort(order[2])  # within a warp
        self.exists = thread < threads
        self.exited = ~self.exists
        self.special = {
            "%tid.x": thread % bx, "%tid.y": thread // bx % by, "%tid.z": thread // (bx * by),
            "%ctaid.x": block % gx, "%ctaid.y": block // gx % gy, "%ctaid.z": block // (gx * gy),
            "%laneid": lane, "%warpid": warp, "%smid": block % 8,
            "%lanemask_eq": 1 << lane, "%lanemask_lt": (1 << lane) - 1,
            "%lanemask_le": (2 << lane) - 1, "%lanemask_gt": 2**32 - (2 << lane),
            "%lanemask_ge": 2**32 - (1 << lane),
        }  # fmt: skip
        sizes = {"%ntid": block_shape, "%nctaid": grid}
        for name, shape in sizes.items():
            self.special |= {f"{name}.{axis}": n for axis, n in zip("xyz", shape, strict=True)}
        self.special |= {"WARP_SZ": WARP, "%nwarpid": warps, "%nsmid": 8, "%gridid": 1}
        self.alive = np.bincount(self.block[self.exists])
        bits = np.where(self.exists, np.int64(1) << self.lane_id, 0).reshape(-1, WARP).sum(axis=1)
        self.existing = bits.astype(np.uint32).repeat(WARP)  # lanes of each thread's warp
        places = np.where(self.exists, np.int64(1) << np.arange(self.lanes) % WARP, 0)
        self.existing_places = places.reshape(-1, WARP).sum(axis=1)

    def any_exited(self) -> bool:
        """Whether a thread has ended."""
        return bool((self.exited & self.exists).any())

    def coordinates(self, lane: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Block and thread index of a lane."""
        block, thread = (
            tuple(int(np.broadcast_to(self.special[f"{name}.{axis}"], self.lanes)[lane])
                  for axis in "xyz") for name in ("%ctaid", "%tid"))  # fmt: skip
        return block, thread

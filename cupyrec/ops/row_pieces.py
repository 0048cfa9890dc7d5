"""How kernels that need whole rows, and sums over them, cut (B, N) matrices into blocks.

A few lanes of a block hold a row, in pieces of as many columns as an instruction moves; a block
adds up what is summed over rows, another launch the sums of the blocks.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cupyrec.kernel import Geometry, Kernel, blocks, vector_width

__all__ = ["add_blocks", "backward_geometry", "block_sums", "forward_geometry", "macros", "turns"]

_WARP_COLUMNS, _BLOCK_COLUMNS = 512, 8192  # of the longest row that a warp or a block holds
_BLOCK_ROWS, _MOST_BLOCKS = 32, 2048  # rows that a block adds up, at least

_add_blocks = Kernel(
    "row_pieces.cu", "add_blocks",
    "const float* x, int64_t rows, int64_t columns, float* out",
    lambda columns: Geometry(blocks(columns, 32), 1024),
)  # fmt: skip


def macros(columns: int, *arrays: Any) -> dict[str, int]:
    """Return the macros of `row_pieces.cuh` for rows of `columns` floats, as `arrays` have them.

    Examples
    --------
    >>> macros(624)
    {'COLUMNS': 624, 'VECTOR': 4, 'LANES': 256, 'HELD': 1, 'ROWS': 4}
    """
    vector = vector_width(columns, *arrays)
    pieces = columns // vector
    lanes = min(32, 1 << (pieces - 1).bit_length()) if columns <= _WARP_COLUMNS else 256
    most = 32 if columns <= _BLOCK_COLUMNS else 16  # floats a lane
    held = min(most // vector, blocks(pieces, lanes))
    rows = max(1, 4 // held)  # so that a lane has 4 loads in flight
    return {"COLUMNS": columns, "VECTOR": vector, "LANES": lanes, "HELD": held, "ROWS": rows}


def turns(rows: int, lanes: int) -> int:
    """Return how many rows the same lanes of a block have one after the other.

    Examples
    --------
    >>> turns(4096, 256), turns(4096, 32), turns(1 << 20, 256)
    (32, 4, 512)
    """
    groups = 256 // lanes
    return max(blocks(_BLOCK_ROWS, groups), blocks(rows, _MOST_BLOCKS * groups))


def forward_geometry(B: int, lanes: int, rows: int) -> Geometry:
    """Return blocks whose lanes have `rows` rows at once.

    Examples
    --------
    >>> forward_geometry(B=100, lanes=32, rows=4).grid
    4
    """
    return Geometry(blocks(B, 256 // lanes * rows), 256)


def backward_geometry(B: int, lanes: int) -> Geometry:
    """Return blocks that add up `turns` rows for each group of lanes.

    Examples
    --------
    >>> backward_geometry(B=100, lanes=32).grid
    4
    """
    return Geometry(blocks(B, 256 // lanes * turns(B, lanes)), 256)


def block_sums(xp: ModuleType, rows: int, columns: int, lanes: int) -> Any:
    """Return a new (blocks, 2, N) array of float32 for the sums of `backward_geometry`'s blocks.

    Examples
    --------
    >>> block_sums(np, 100, 624, 32).shape
    (4, 2, 624)
    """
    return xp.empty((backward_geometry(rows, lanes).grid, 2, columns), np.float32)


def add_blocks(xp: ModuleType, parts: Any) -> Any:
    """Return the sum over blocks, (2, N).

    Examples
    --------
    >>> add_blocks(np, np.ones((1, 2, 3), np.float32)).shape
    (2, 3)
    """
    count, two, columns = parts.shape
    if count == 1:
        return parts[0]
    sums = xp.empty((two, columns), np.float32)
    _add_blocks(parts, count, two * columns, sums, columns=two * columns)
    return sums

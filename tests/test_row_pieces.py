"""Sums over the blocks of a kernel."""

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops import row_pieces


@pytest.mark.parametrize(("count", "columns"), [(1, 3), (2, 1), (33, 17), (70, 130)])
def test_blocks_are_added_up(xp, count, columns):
    parts = oracle.integers((count, 2, columns), -9, 9)
    got = row_pieces.add_blocks(xp, xp.asarray(parts))
    oracle.check_exact(arrays.to_host(got), np.float64(parts).sum(axis=0))


@pytest.mark.parametrize("lanes", [1, 8, 32, 256])
@pytest.mark.parametrize("rows", [1, 255, 256, 1 << 20, 3_000_000])
def test_all_rows_have_a_turn_in_at_most_2048_blocks(rows, lanes):
    groups = 256 // lanes
    grid = row_pieces.backward_geometry(rows, lanes).grid
    assert grid <= 2048
    assert (grid - 1) * groups * row_pieces.turns(rows, lanes) < rows
    assert rows <= grid * groups * row_pieces.turns(rows, lanes)

"""Values of some bags, in another order: field by field, say, in place of sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.ops.bags import bag_numbers

__all__ = ["take_bags"]

_BAGS = 4096  # a block


@cpu.exact_loop
def _take_cpu(first, cut, values, bags, begin, end):
    """Bags number begin .. end - 1."""
    for m in range(begin, end):
        for i in range(cut[m], cut[m + 1]):
            values[i], bags[i] = first[m] + i - cut[m], m


def take_bags(offsets: Any, order: Any) -> tuple[Any, Any, Any]:
    """Return which values are in some of the bags, one bag after another.

    On a device it waits once, for their number.

    Parameters
    ----------
    offsets : (M + 1,) array of int64
        As `check_offsets` returns them.
    order : (K,) array of int64
        Numbers of the bags.

    Returns
    -------
    values : (N,) array of int64
    offsets : (K + 1,) array of int64
        Of the bags among `values`.
    bags : (N,) array of int64
        Their `bag_numbers`.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices that don't agree. Numbers are not checked.

    Examples
    --------
    >>> take_bags(np.array([0, 2, 2, 3]), np.array([2, 0]))
    (array([2, 0, 1]), array([0, 1, 3]), array([0, 1, 1]))
    """
    errors.dtype("take_bags", "offsets", offsets, np.int64)
    errors.dtype("take_bags", "order", order, np.int64)
    errors.axes("take_bags", offsets=(offsets, "M"), order=(order, "K"))
    xp = arrays.namespace("take_bags", offsets, order)
    first = offsets[order]
    ends = xp.cumsum(offsets[order + 1] - first, dtype=np.int64)
    cut = xp.concatenate([xp.zeros(1, np.int64), ends])
    n = int(cut[-1:].item())
    if xp is not np:
        bags = bag_numbers(cut, n)
        return (first - cut[:-1])[bags] + xp.arange(n), cut, bags
    values, bags = arrays.empty(n, np.int64), arrays.empty(n, np.int64)
    cpu.parallel(lambda i, j: _take_cpu(first, cut, values, bags, i, j), len(order), _BAGS)
    return values, cut, bags

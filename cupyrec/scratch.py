"""Words in a device's memory through which the blocks of a launch tell each other what they did.

They would have to be zero before each launch, which would be a launch more. There are two ways out.

Counters: a launch leaves the zeros that it found, if no more than the last block has to put them
back. See kernels/last_block.cuh.

Stamped words: each launch has a stamp, larger than those before, and writes it into the high bits
of every word that it writes: what has another one is from an earlier launch, and as good as zero.
Any number of blocks may still read them when the launch ends; but a graph would replay one stamp.
See kernels/look_back.cuh.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays

__all__ = ["counters", "forget_counters", "share_counters", "stamped"]

_LEAST = 1 << 12  # words
_SHIFT = 33  # bits of a word below the stamp
_STAMPS = 1 << (64 - _SHIFT)

_counters: dict[tuple, Any] = {}  # by array module, thread, stream and number
_kept = threading.local()  # words and last stamp, by array module and stream


def counters(xp: ModuleType, count: int) -> Any:
    """Return what `last_block` of ``last_block.cuh`` counts blocks with: zeros, left as zeros.

    It is the same array each time, one a thread and stream; a graph that is captured before there
    is one clears its own.

    Examples
    --------
    >>> counters(np, 2), counters(np, 2) is counters(np, 2)
    (array([0, 0], dtype=uint32), True)
    """
    key = (*_place(xp), count)
    if key in _counters:
        return _counters[key]
    made = xp.zeros(count, np.uint32)
    if not arrays.is_capturing(xp):
        _counters[key] = made
    return made


def share_counters(xp: ModuleType, stream: Any) -> None:
    """Let a stream that captures have the counters of the current one, where its graphs will run.

    Examples
    --------
    >>> from cupyrec import sim
    >>> share_counters(sim, sim.cuda.Stream())
    """
    here = _place(xp)
    own = {key[-1]: found for key, found in _counters.items() if key[:-1] == here}
    with stream:
        _counters.update({(*_place(xp), count): found for count, found in own.items()})


def forget_counters() -> None:
    """Have new counters made, since a launch stopped halfway and may not have left zeros.

    Examples
    --------
    >>> before = counters(np, 2)
    >>> forget_counters()
    >>> counters(np, 2) is before
    False
    """
    _counters.clear()


def stamped(xp: ModuleType, count: int) -> tuple[Any, int]:
    """Return at least `count` words, and the stamp of what may be written into them.

    The next call on this thread and stream hands the same words out: they serve a launch, or
    several with no other call between.

    Returns
    -------
    words : array of uint64
    stamp : int
        A multiple of 2^33, above all that the words hold.

    Raises
    ------
    RuntimeError
        The stream is capturing a graph, whose launches would have the same stamp each time.

    Examples
    --------
    >>> words, stamp = stamped(np, 3)
    >>> words.size >= 3, stamp > int(words.max())
    (True, True)
    """
    if arrays.is_capturing(xp):
        raise RuntimeError(
            "stamped: launches with a stamp must not be part of a graph, got a capturing stream."
        )
    places = vars(_kept)
    place = _place(xp)
    words, last = places.get(place, (None, 0))
    if words is None or words.size < count or last == _STAMPS - 1:
        size = max(_LEAST, count, 0 if words is None else words.size)
        words, last = xp.zeros(1 << (size - 1).bit_length(), np.uint64), 0
    places[place] = words, last + 1
    return words, (last + 1) << _SHIFT


def _place(xp: ModuleType) -> tuple:
    """Where launches follow on each other: streams of the same name may be several threads'."""
    return xp.__name__, threading.get_ident(), *arrays.stream(xp)

"""Random bits from counters: Philox4x32-10 (Salmon et al. 2011), the same on every device.

A random number here is a function of what it is for, never of when or where it is drawn: an
embedding's initial vector of (seed, table, id, column), a dropout decision of (seed, step, layer,
sample, column). So neither rank, thread nor order of work can change a result.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cupyrec import cpu

__all__ = [
    "generator", "kept", "manual_seed", "philox4x32", "set_step", "step", "step_from",
]  # fmt: skip

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


class _State:
    """What is drawn from next, and the step and sample that are at work."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(np.random.Philox(seed))
        self.step = self.first_sample = 0


_shared = _State(0)  # of all threads
_kept: contextvars.ContextVar[_State | None] = contextvars.ContextVar("kept", default=None)
_step_source: contextvars.ContextVar[Callable[[], Any] | None]
_step_source = contextvars.ContextVar("step_source", default=None)


def _state() -> _State:
    return _kept.get() or _shared


@cpu.exact_loop
def philox4x32(c0, c1, c2, c3, k0, k1) -> tuple:
    """Return four random 32-bit words (as uint64) of a 128-bit counter and a 64-bit key.

    Parameters
    ----------
    c0, c1, c2, c3 : uint64
        The counter's 32-bit words, least significant first.
    k0, k1 : uint64
        The key's 32-bit words, least significant first.

    Examples
    --------
    >>> zero = np.uint64(0)
    >>> [f"{int(word):08x}" for word in philox4x32(zero, zero, zero, zero, zero, zero)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    for _ in range(10):
        p0 = _M0 * c0
        p1 = _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def manual_seed(seed: int) -> None:
    """Seed what models built from now on draw: initial parameters, dropout and embedding seeds.

    Parameters
    ----------
    seed : int
        0 <= seed < 2**64.

    Raises
    ------
    ValueError
        If `seed` is out of range.

    Examples
    --------
    >>> manual_seed(7)
    >>> first = generator().integers(100)
    >>> manual_seed(7)
    >>> bool(first == generator().integers(100))
    True
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"manual_seed: 'seed' must lie in [0, 2**64), got {seed}.")
    _state().generator = np.random.Generator(np.random.Philox(seed))
    set_step(0)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Draw what is drawn outside this context as if nothing were seeded or drawn within it.

    Other threads, which may be training, see nothing of it.

    Examples
    --------
    >>> manual_seed(7)
    >>> first = generator().integers(100)
    >>> manual_seed(7)
    >>> with kept():
    ...     manual_seed(8)
    >>> bool(first == generator().integers(100))
    True
    """
    token = _kept.set(copy.deepcopy(_state()))
    try:
        yield
    finally:
        _kept.reset(token)


def generator() -> np.random.Generator:
    """Return the generator that new modules draw their initial parameters and seeds from.

    Examples
    --------
    >>> generator().random() < 1
    True
    """
    return _state().generator


def step() -> Any:
    """Return the training step that dropout counts by; `Optimizer.step` advances it.

    Examples
    --------
    >>> set_step(3)
    >>> step()
    3
    """
    source = _step_source.get()
    return _state().step if source is None else source()


def first_sample() -> int:
    """Return the number of this rank's first sample among those of the step, of all ranks.

    Examples
    --------
    >>> first_sample()
    0
    """
    return _state().first_sample


def set_first_sample(first: int) -> None:
    """Set the number of this rank's first sample.

    Examples
    --------
    >>> set_first_sample(0)
    """
    _state().first_sample = int(first)


@contextlib.contextmanager
def step_from(source: Callable[[], Any]) -> Iterator[None]:
    """Within this context `step` returns what `source` does.

    That is how kernels of a CUDA graph come to read the step from an array: as a number it would
    be that of the capture for ever.

    Examples
    --------
    >>> with step_from(lambda: np.array([3], np.uint32)):
    ...     step()
    array([3], dtype=uint32)
    """
    token = _step_source.set(source)
    try:
        yield
    finally:
        _step_source.reset(token)


def set_step(step: int) -> None:
    """Set the training step that dropout counts by.

    Examples
    --------
    >>> set_step(0)
    """
    _state().step = int(step)

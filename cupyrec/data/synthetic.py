"""A click log in Criteo's layout with a known model behind it, of any size."""

from __future__ import annotations

import contextlib
import gzip
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from cupyrec import cpu, errors

__all__ = ["write_synthetic"]

logger = logging.getLogger("cupyrec")

_NUMBERS, _TABLES = 13, 26
_CLICK_RATE = 0.25
_CHUNK = 1 << 14  # rows drawn at a time
_PILOT = 1 << 14  # rows that the bias is fitted to
_ROW_BYTES = 2 + _NUMBERS * 12 + _TABLES * 9  # the longest row
_BINS = 1 << 16  # of the probabilities, for the AUC

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NEWLINE, _TAB, _MINUS, _ZERO = b"\n\t-0"
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_ABSENT = np.iinfo(np.int64).min


def write_synthetic(
    path: str | os.PathLike[str],
    rows: int,
    *,
    seed: int = 0,
    ids_per_table: int | Sequence[int] = 100_000,
    zipf: float = 1.2,
    missing: float = 0.1,
) -> dict[str, float]:
    """Write a click log as Criteo's: label, 13 integers, 26 hex categories, separated by tabs.

    The log-odds of a click are planted: a weight for each id (a hash of it, so that no table of
    them is needed), a slope for each integer's logarithm, products of two ids' weights, and
    a bias that makes a quarter of the rows clicks. `seed` draws the rows alone: files of other
    seeds but the same other arguments follow the same model, and serve as its test. Integers have
    heavy tails, and one in a hundred is negative. The best AUC that any model can reach in
    expectation, that of the planted probabilities, is logged and returned; it is counted in 65,536
    bins of probability, which leaves an error below 0.0001.

    Parameters
    ----------
    path : path
        ``.gz`` and ``.zst`` are compressed. It appears once it is whole.
    rows : int
    seed : int
        At least 0.
    ids_per_table : int or 26 ints
        From how many ids each table draws, at most 2^32.
    zipf : float
        The k-th most frequent id occurs in proportion to k^-zipf.
    missing : float
        The share of integers and of ids that is left out.

    Returns
    -------
    dict
        ``rows``, ``click_rate`` and ``best_auc`` (NaN if all labels are the same).

    Raises
    ------
    TypeError, ValueError
        An argument is not such.
    OSError
        The file can't be written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_synthetic(Path(folder, "clicks.tsv.gz"), 1000, ids_per_table=100)["rows"]
    1000
    """
    rows = errors.positive("write_synthetic", "rows", rows)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"write_synthetic: 'seed' must be an integer, got {seed!r}.")
    if not 0 <= seed < 2**63:
        raise ValueError(f"write_synthetic: 'seed' must lie in [0, 2^63), got {seed}.")
    missing = errors.rate("write_synthetic", "missing", missing)
    if not 0 <= zipf < math.inf:
        raise ValueError(f"write_synthetic: 'zipf' must be finite and at least 0, got {zipf}.")
    tables = np.ravel(ids_per_table)
    if tables.dtype.kind not in "iu":
        raise TypeError(f"write_synthetic: 'ids_per_table' must be integers, got {tables.dtype}.")
    if len(tables) not in (1, _TABLES) or tables.min() < 1 or tables.max() > 2**32:
        raise ValueError(
            f"write_synthetic: 'ids_per_table' must be 1 or {_TABLES} numbers from 1 to 2^32, "
            f"got {ids_per_table}."
        )
    tables = np.broadcast_to(tables.astype(np.int64), _TABLES)

    bias = _bias(tables, zipf, missing)
    clicked, passed = np.zeros(_BINS, np.int64), np.zeros(_BINS, np.int64)
    text = np.empty(_CHUNK * _ROW_BYTES, np.uint8)
    with _output(Path(path)) as file:
        for start in range(0, rows, _CHUNK):
            count = min(_CHUNK, rows - start)
            numbers, ids, logits, uniform = _draw(seed, start, count, tables, zipf, missing)
            chance = 1 / (1 + np.exp(-(logits + bias)))
            clicks = uniform < chance
            bins = (chance * _BINS).astype(np.int64).clip(max=_BINS - 1)
            clicked += np.bincount(bins[clicks], minlength=_BINS)
            passed += np.bincount(bins[~clicks], minlength=_BINS)
            file.write(memoryview(text[: _format(clicks, numbers, ids, text)]))

    pairs = int(clicked.sum()) * int(passed.sum())
    below = np.cumsum(passed) - passed / 2  # pairs in one bin count half
    auc = float(clicked @ below) / pairs if pairs else math.nan
    click_rate = int(clicked.sum()) / rows
    logger.info("%s: %d rows, click rate %.4f, best reachable AUC %.4f (of the planted "
                "probabilities, in %d bins)", path, rows, click_rate, auc, _BINS)  # fmt: skip
    return {"rows": rows, "click_rate": click_rate, "best_auc": auc}


def _bias(tables: np.ndarray, zipf: float, missing: float) -> float:
    """Return the bias that gives the click rate, found by bisection on rows of their own."""
    logits = _draw(0, 2**32, _PILOT, tables, zipf, missing)[2]
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        rate = np.mean(1 / (1 + np.exp(-(logits + middle))))
        low, high = (middle, high) if rate < _CLICK_RATE else (low, middle)
    return low


@contextlib.contextmanager
def _output(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write, compressed as its name says; it takes its name once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with errors.naming(path), contextlib.ExitStack() as stack:
            file = stack.enter_context(partial.open("wb"))
            if path.suffix == ".gz":  # level 1: the text is nearly random, more gains little
                file = stack.enter_context(gzip.GzipFile("", "wb", 1, file, mtime=0))
            elif path.suffix == ".zst":
                file = stack.enter_context(pa.CompressedOutputStream(file, "zstd"))
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@cpu.exact_loop
def _mix(x):
    """Hash 64 bits to 64: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cpu.exact_loop
def _uniform(bits):
    """Map 64 bits to a float64 in (0, 1)."""
    return (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52


@cpu.exact_loop
def _weight(kind, place, value):
    """Return a fixed random weight of mean 0 and variance 1 for a value at a place."""
    bits = _mix(_mix(np.uint64(kind * 64 + place) * _GOLDEN) ^ np.uint64(value))
    low, high = bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)
    return (np.float64(low) + np.float64(high) - 2.0**32) * (math.sqrt(6.0) / 2.0**32)


@cpu.exact_loop
def _area(x, s):
    """Return the integral of t^-s from 1 to x."""
    return math.log(x) if s == 1 else math.expm1((1 - s) * math.log(x)) / (1 - s)


@cpu.exact_loop
def _area_inverse(y, s):
    return math.exp(y if s == 1 else math.log1p(max(y * (1 - s), -1.0)) / (1 - s))


@cpu.exact_loop
def _draw(seed, first, count, tables, zipf, missing):
    """Draw rows `first`, ... of a seed; return integers, ids, log-odds without bias, uniforms.

    Ranks are Zipf's by rejection-inversion (Hoermann and Derflinger, 1996); the k-th id is a fixed
    permutation of 32 bits at k. A row depends on seed and number alone.
    """
    numbers = np.empty((count, 13), np.int64)
    ids = np.empty((count, 26), np.int64)
    logits, uniforms = np.zeros(count), np.empty(count)
    floor = _area(1.5, zipf) - 1
    reach = 2 - _area_inverse(_area(2.5, zipf) - 2.0**-zipf, zipf)
    tops = np.empty(26)
    for table in range(26):
        tops[table] = _area(tables[table] + 0.5, zipf)
    for row in range(count):
        state = _mix(_mix(np.uint64(seed)) ^ np.uint64(first + row))
        logit = 0.0
        for place in range(13):
            state += _GOLDEN
            u = _uniform(_mix(state))
            scale = 1 << (place % 7)  # the median
            number = min(int(scale * u / (1 - u)), 2_000_000_000)  # log-logistic
            state += _GOLDEN
            chance = _uniform(_mix(state))
            if chance < missing:
                numbers[row, place] = _ABSENT
                logit += 0.2 * _weight(0, place, 0)
            else:
                if chance > 0.99:
                    number = -1 - (number & 1)
                numbers[row, place] = number
                size = math.copysign(math.log1p(abs(number)), number) - math.log1p(scale)
                logit += 0.08 * _weight(1, place, 0) * size
        for table in range(26):
            state += _GOLDEN
            if _uniform(_mix(state)) < missing:
                ids[row, table] = _ABSENT
            else:
                while True:
                    state += _GOLDEN
                    y = tops[table] + _uniform(_mix(state)) * (floor - tops[table])
                    x = _area_inverse(y, zipf)
                    rank = min(max(int(x + 0.5), 1), tables[table])
                    if rank - x <= reach or y >= _area(rank + 0.5, zipf) - rank**-zipf:
                        break
                ids[row, table] = _permute(rank + 1_000_003 * table)
            logit += 0.2 * _weight(2, table, ids[row, table])
        for table in range(0, 8, 2):
            left = _weight(3, table, ids[row, table])
            logit += 0.3 * left * _weight(3, table + 1, ids[row, table + 1])
        logits[row] = logit
        uniforms[row] = _uniform(_mix(state + _GOLDEN))
    return numbers, ids, logits, uniforms


@cpu.exact_loop
def _permute(x):
    """Permute the numbers of 32 bits: the finalizer of MurmurHash3 (Appleby, 2011)."""
    low = np.uint64(0xFFFFFFFF)
    x = np.uint64(x) & low
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & low
    x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & low
    return np.int64(x ^ (x >> np.uint64(16)))


@cpu.exact_loop
def _put_decimal(text, at, number):
    if number < 0:
        text[at] = _MINUS
        at += 1
        number = -number
    unit = 1
    while unit * 10 <= number:
        unit *= 10
    while unit:
        text[at] = _ZERO + number // unit % 10
        at += 1
        unit //= 10
    return at


@cpu.exact_loop
def _put_hex(text, at, code):
    """Write the lower 32 bits as 8 digits."""
    for shift in range(28, -1, -4):
        text[at] = _HEX[(code >> shift) & 15]
        at += 1
    return at


@cpu.exact_loop
def _format(clicks, numbers, ids, text):
    """Write the rows as text; return how many bytes that took."""
    at = 0
    for row in range(len(clicks)):
        text[at] = _ZERO + clicks[row]
        at += 1
        for place in range(13):
            text[at] = _TAB
            at += 1
            if numbers[row, place] != _ABSENT:
                at = _put_decimal(text, at, numbers[row, place])
        for table in range(26):
            text[at] = _TAB
            at += 1
            if ids[row, table] != _ABSENT:
                at = _put_hex(text, at, ids[row, table])
        text[at] = _NEWLINE
        at += 1
    return at

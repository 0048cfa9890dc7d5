"""The cases of bench_kernels.py by name, their inputs, and the work that they return."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec.ops import embedding_rows, unique_keys

TABLES, FEATURES = 26, 27
IDS, ZIPF = 100_000, 1.2  # of a table
FULL_BATCH = 65_536
PARAMETERS = 2_369_921  # of DLRM's MLPs, 512-256-128 and 1024-1024-512-256-1
CHUNK = 12  # rows lie in chunks of 2^12


@dataclasses.dataclass
class Work:
    """One call of an op, and what it has to move.

    Attributes
    ----------
    call : callable
        Runs the op; returns the arrays that it made or changed.
    ideal : int
        Bytes.
    shape : str
    full : dict
        Sizes of the launch at a batch of 65,536 that do not grow with the batch.
    keys : int
        Keys looked up, where sectors a key are of interest.
    before : callable, optional
        Undoes a call, so that the next one has the same to do.
    naive : callable, optional
        The same by the array module's own functions; returns as much.
    dtype : str
    """

    call: Callable[[], tuple]
    ideal: int
    shape: str
    full: dict[str, int] = dataclasses.field(default_factory=dict)
    keys: int = 0
    naive: Callable[[], tuple] | None = None
    before: Callable[[], Any] = lambda: None
    dtype: str = "float32"


CASES: dict[str, tuple[Callable[..., Work], tuple[int, ...]]] = {}


def case(name: str, *widths: int) -> Callable[[Callable[..., Work]], Callable[..., Work]]:
    """Enter a function among the cases, at these widths D; 0 where it has none."""

    def enter(make: Callable[..., Work]) -> Callable[..., Work]:
        CASES[name] = make, widths or (0,)
        return make

    return enter


@functools.cache
def normals() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1 << 20) + 7, np.float32)


def floats(xp: ModuleType, *shape: int) -> Any:
    """Normal values, which repeat in large arrays: drawing them would take longer than the rest."""
    return xp.asarray(np.resize(normals(), shape))


@functools.cache
def zipf_keys(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys of a batch: the k-th most frequent id of a table occurs in proportion to k^-1.2."""
    rng = np.random.default_rng(1)
    cumulative = np.cumsum(np.arange(1, IDS + 1) ** -ZIPF)
    ranks = np.searchsorted(cumulative, rng.random((batch, TABLES)) * cumulative[-1])
    ids = (ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    tables = np.broadcast_to(np.arange(TABLES, dtype=np.uint32), ids.shape)
    return np.ascontiguousarray(tables).reshape(-1), ids.reshape(-1)


@functools.cache
def batch_keys(batch: int) -> unique_keys.UniqueKeys:
    return unique_keys.unique_keys(*zipf_keys(batch))


@functools.cache
def bag_offsets(batch: int) -> np.ndarray:
    """The keys of a batch in bags of 1 to 8."""
    n = len(batch_keys(batch).inverse)
    ends = np.cumsum(np.random.default_rng(4).integers(1, 9, n))
    return np.concatenate([[0], ends[ends < n], [n]])


class Rows:
    """Twice `count` rows, half of them, in no order, in the batch."""

    def __init__(self, xp: ModuleType, count: int, width: int, parts: int) -> None:
        self.stride = -(-width * parts // 4) * 4
        held = -(-2 * count >> CHUNK)
        self.flat = abs(floats(xp, held << CHUNK, self.stride))  # the chunks, side by side
        addresses = np.arange(held, dtype=np.uint64) * np.uint64(4 * self.stride << CHUNK)
        chunks = xp.asarray(addresses + np.uint64(address(self.flat)))
        self.memory = embedding_rows.RowMemory(chunks, CHUNK, self.stride)
        rows = np.random.default_rng(2).permutation(2 * count)[:count]
        self.rows = xp.asarray(rows.astype(np.int64))
        self.addresses = chunks.nbytes


def address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return array.__cuda_array_interface__["data"][0]

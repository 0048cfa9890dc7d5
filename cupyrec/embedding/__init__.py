"""Embedding tables keyed by raw 64-bit ids."""

from cupyrec.embedding.group import Group
from cupyrec.embedding.initializers import (
    Constant,
    Initializer,
    InitialVectors,
    Normal,
    TruncatedNormal,
    Uniform,
    Xavier,
)
from cupyrec.embedding.life import LIFE, Life
from cupyrec.embedding.look_up import Asked, LookUp
from cupyrec.embedding.memory_store import MemoryStore
from cupyrec.embedding.row_gradients import RowGradients
from cupyrec.embedding.shard import Shard
from cupyrec.embedding.statistics import CacheUse
from cupyrec.embedding.store import Rows, StatePart, Store
from cupyrec.embedding.tables import Tables, widened
from cupyrec.embedding.tier import CachedHost, CachedSSD, Memory, Tier
from cupyrec.embedding.transfer import digest, export_rows, exported, import_vectors

__all__ = [
    "LIFE",
    "Asked",
    "CacheUse",
    "CachedHost",
    "CachedSSD",
    "Constant",
    "Group",
    "InitialVectors",
    "Initializer",
    "Life",
    "LookUp",
    "Memory",
    "MemoryStore",
    "Normal",
    "RowGradients",
    "Rows",
    "Shard",
    "StatePart",
    "Store",
    "Tables",
    "Tier",
    "TruncatedNormal",
    "Uniform",
    "Xavier",
    "digest",
    "export_rows",
    "exported",
    "import_vectors",
    "widened",
]  # fmt: skip

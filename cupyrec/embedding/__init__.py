"""Embedding tables keyed by raw 64-bit ids."""

from cupyrec.embedding.group import Group
from cupyrec.embedding.initializers import (
    Constant,
    InitialVectors,
    Normal,
    TruncatedNormal,
    Uniform,
    Xavier,
)
from cupyrec.embedding.memory_store import MemoryStore
from cupyrec.embedding.store import Rows, StatePart, Store

__all__ = [
    "Constant",
    "Group",
    "InitialVectors",
    "MemoryStore",
    "Normal",
    "Rows",
    "StatePart",
    "Store",
    "TruncatedNormal",
    "Uniform",
    "Xavier",
]

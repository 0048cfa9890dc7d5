"""Embedding tables keyed by raw 64-bit ids."""

from cupyrec.embedding.group import Group
from cupyrec.embedding.initializers import Uniform
from cupyrec.embedding.memory_store import MemoryStore
from cupyrec.embedding.store import Rows, StatePart, Store

__all__ = ["Group", "MemoryStore", "Rows", "StatePart", "Store", "Uniform"]

"""Ranks: what travels between them."""

from cupyrec.parallel.communicator import Communicator, Transfer, world
from cupyrec.parallel.failure import failed

__all__ = ["Communicator", "Transfer", "failed", "world"]

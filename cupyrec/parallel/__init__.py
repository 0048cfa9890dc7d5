"""Ranks: what travels between them."""

from cupyrec.parallel.communicator import Communicator, Transfer, world

__all__ = ["Communicator", "Transfer", "world"]

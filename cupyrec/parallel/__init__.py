"""Ranks: what travels between them."""

from cupyrec.parallel.all_reduce import all_reduce
from cupyrec.parallel.communicator import Communicator, Transfer, world
from cupyrec.parallel.exchange import Exchange, Route
from cupyrec.parallel.failure import OtherRankError, failed

__all__ = [
    "Communicator", "Exchange", "OtherRankError", "Route", "Transfer", "all_reduce", "failed",
    "world",
]  # fmt: skip

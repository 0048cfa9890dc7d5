"""Ranks: what travels between them."""

from cupyrec.parallel.all_reduce import all_reduce
from cupyrec.parallel.communicator import Communicator, Transfer
from cupyrec.parallel.exchange import Exchange, Route
from cupyrec.parallel.failure import OtherRankError, failed
from cupyrec.parallel.world import world

__all__ = [
    "Communicator", "Exchange", "OtherRankError", "Route", "Transfer", "all_reduce", "failed",
    "world",
]  # fmt: skip

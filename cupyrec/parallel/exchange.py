"""Rows of embeddings and their gradients, between ranks that ask for them and those that own them.

    forward    unique keys -> owners;  the owners' rows -> codec -> back to who asked
    backward   a gradient a unique key -> codec -> owners, who sum them in order of rank

A key's owner is a hash of it, the same on every rank and for every batch. A row and a gradient pass
the codec once on their way, those that stay on their rank as well, and those of a single rank.

Gradients of a large batch's mean lie where float16 has few bits or none. With ``fp16`` a rank's are
multiplied by a power of two first, which travels with them and by which the owner divides: nothing
is lost by that, and the largest comes to lie between 2^14 and 2^15.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays
from cupyrec.ops.messages import CODECS, UNIT, decode, encode, sizes
from cupyrec.ops.partition import partition
from cupyrec.ops.reorder import take
from cupyrec.ops.row_memory import Rounding
from cupyrec.parallel import devices
from cupyrec.parallel.communicator import Communicator, Transfer

__all__ = ["Exchange", "Route"]

_ROUNDINGS = ("nearest", "stochastic")
_ODD = 0xD1B54A32D192ED03  # seeds of ranks are apart by it

_SPARE = 1024  # keys of room, besides


class Route(NamedTuple):
    """Which of a rank's U unique keys go where, and which M keys come to it.

    Attributes
    ----------
    order : (U,) array of int64
        Numbers of the keys, those of rank 0 first.
    sent, received : (N,) array of int64, in the host's memory
        How many go to, and come from, each rank.
    tables : (M,) array of uint32
    ids : (M,) array of int64
        The keys that came, those of rank 0 first.
    """

    order: Any
    sent: np.ndarray
    received: np.ndarray
    tables: Any
    ids: Any


class Exchange:
    """What one group of tables exchanges.

    Parameters
    ----------
    ranks : Communicator
    forward, backward : str
        Codec of rows and of gradients in training: ``none`` (float32), ``fp16``, ``bf16`` or
        ``int8``.
    evaluation : str
        Codec of rows in evaluation.
    rounding : str
        Of gradients by a codec: ``nearest``, or ``stochastic``: so that their mean is right, by
        key, column, seed, step and rank.
    num_tables : int
        Tables are numbered below it: on the wire a number takes as few bytes as it needs.

    Raises
    ------
    ValueError
        An unknown codec or rounding.

    Notes
    -----
    OneEmbedding's id, embedding and gradient shuffle, with its int8 communication; here evaluation
    may use the same codec, and a width of 1024 and more is no exception.

    Examples
    --------
    >>> exchange = Exchange(Communicator(), forward="int8", backward="int8")
    >>> tables, ids = np.zeros(2, np.uint32), np.array([7, 8])
    >>> route = exchange.ask(tables, ids).result()
    >>> rows = exchange.rows(route, np.array([[1.0], [2.0]], np.float32), None, training=True)
    >>> rows
    array([[1.],
           [2.]], dtype=float32)
    """

    def __init__(
        self,
        ranks: Communicator,
        *,
        forward: str = "none",
        backward: str = "none",
        evaluation: str = "none",
        rounding: str = "nearest",
        num_tables: int = 2**32,
    ) -> None:
        given = {"forward": forward, "backward": backward, "evaluation": evaluation}
        for name, codec in given.items():
            if codec not in CODECS:
                raise ValueError(
                    f"Exchange: '{name}' must be one of {', '.join(CODECS)}, got {codec!r}."
                )
        if rounding not in _ROUNDINGS:
            raise ValueError(
                f"Exchange: 'rounding' must be one of {', '.join(_ROUNDINGS)}, got {rounding!r}."
            )
        self.ranks, self.forward, self.backward = ranks, forward, backward
        self.evaluation, self.rounding = evaluation, rounding
        self._errors: dict[str, np.ndarray] | None = None
        self.table_dtype = np.min_scalar_type(num_tables - 1)

    def __repr__(self) -> str:
        return (
            f"Exchange({self.ranks.size} ranks, forward={self.forward}, backward={self.backward}, "
            f"evaluation={self.evaluation}, rounding={self.rounding})"
        )

    @property
    def is_local(self) -> bool:
        """Whether there is nothing to do: one rank, no codec."""
        codecs = {self.forward, self.backward, self.evaluation}
        return self.ranks.size == 1 and codecs == {"none"}

    def ask(self, tables: Any, ids: Any) -> Future[Route]:
        """Send unique keys to their owners, and receive those that are asked for here.

        Parameters
        ----------
        tables : (U,) array of uint32
        ids : (U,) array of int64

        Returns
        -------
        Future of Route
            The keys travel while the caller goes on.

        Examples
        --------
        See the class.
        """
        xp, ranks = arrays.namespace("ask", tables, ids), self.ranks
        shares = partition(tables, ids, ranks.size)
        own_tables = take(tables, shares.order).astype(self.table_dtype)
        own_ids = take(ids, shares.order)
        guess = 2 * len(ids) + _SPARE  # owners are as good as drawn: each rank is asked as it asks
        rooms = devices.Room(xp, guess, np.uint32), devices.Room(xp, guess, np.int64)

        def job() -> Route:
            sent = arrays.to_host(shares.counts)
            received = ranks.all_to_all_counts("counts", sent)
            count = int(received.sum())
            coming = devices.empty(xp, count, self.table_dtype)
            tables, ids = (room.of(count) for room in rooms)
            ranks.all_to_all(
                "keys",
                Transfer(own_tables, sent, coming, received),
                Transfer(own_ids, sent, ids, received),
            )
            tables[...] = coming
            devices.finish(xp)  # before the memory of `coming` is given back
            return Route(shares.order, sent, received, tables, ids)

        return ranks.submit("keys", job, xp)

    def rows(self, route: Route, vectors: Any, numbers: Any, training: bool) -> Any:
        """Send rows to who asked for them, and receive those that this rank asked for.

        Parameters
        ----------
        route : Route
        vectors : (V, D) array of float32
        numbers : (M,) array of int64, or None for 0, 1, 2, ...
            Which vector each key that came gets.
        training : bool
            Whether the codec is that of training.

        Returns
        -------
        (U, D) array of float32
            In the order of the keys that this rank asked for.

        Examples
        --------
        See the class.
        """
        codec = self.forward if training else self.evaluation
        message, to = encode(vectors, route.received, codec, order=numbers)
        self._measure("rows", message, route.received, codec, vectors, numbers)
        coming = self._send("rows", message, to, sizes(route.sent, codec, vectors.shape[1]))
        out = _empty(route.order, (len(route.order), vectors.shape[1]))
        return decode(coming.result(), route.sent, codec, out.shape[1], out=out, order=route.order)

    def gradients(self, route: Route, values: Any, by: Rounding | None = None) -> Callable[[], Any]:
        """Send a gradient (U, D) a unique key to the owners.

        Parameters
        ----------
        route : Route
        values : (U, D) array of float32
        by : Rounding, optional
            The unique keys, a seed and the step, for stochastic rounding.

        Returns
        -------
        callable
            It waits for those that come here, and returns them: (M, D) float32, one a key of
            `route`.

        Examples
        --------
        >>> exchange = Exchange(Communicator())
        >>> route = exchange.ask(np.zeros(1, np.uint32), np.array([7])).result()
        >>> exchange.gradients(route, np.ones((1, 2), np.float32))()
        array([[1., 1.]], dtype=float32)
        """
        codec, width, ranks = self.backward, values.shape[1], self.ranks
        if codec == "none" or self.rounding == "nearest":
            by = None
        elif by is not None:  # the same key is rounded by others elsewhere
            by = by._replace(seed=by.seed ^ _ODD * (ranks.rank + 1) % 2**64)
        factor, factors, beside = 1, None, []
        if codec == "fp16":
            factor = _power_of_two(values)
            factors = _empty(values, ranks.size)
            beside = [Transfer(factor, None, factors, [1] * ranks.size)]
            values = values * factor
        message, to = encode(values, route.sent, codec, order=route.order, rounding=by)
        self._measure("gradients", message, route.sent, codec, values, route.order, factor)
        of = sizes(route.received, codec, width)
        coming = self._send("gradients", message, to, of, *beside)
        out = _empty(route.ids, (len(route.ids), width))

        def received() -> Any:
            decode(coming.result(), route.received, codec, width, out=out)
            ends = np.cumsum(route.received)
            for rank, (count, end) in enumerate(zip(route.received, ends, strict=True)):
                if factors is not None and count:
                    out[end - count : end] /= factors[rank : rank + 1]
            return out

        return received

    def measure(self) -> None:
        """From now on note what codecs lose, until `errors` is asked for.

        Examples
        --------
        See `errors`.
        """
        self._errors = {}

    def errors(self) -> dict[str, float]:
        """Return what the codecs lost on all ranks since `measure`; they call it together.

        Returns
        -------
        dict of str to float
            By ``rows`` and ``gradients``: the norm of the errors over the norm of the values.

        Examples
        --------
        >>> exchange = Exchange(Communicator(), forward="int8")
        >>> exchange.measure()
        >>> route = exchange.ask(np.zeros(1, np.uint32), np.array([7])).result()
        >>> _ = exchange.rows(route, np.array([[1, 0.3]], np.float32), None, training=True)
        >>> round(exchange.errors()["rows"], 5)
        0.00075
        """
        own = np.array([(self._errors or {}).get(what, (0, 0)) for what in ("rows", "gradients")])
        self._errors = None
        total = self.ranks.all_gather("errors", own.astype(np.float64)).sum(axis=0)
        relative = np.sqrt(total[:, 0] / np.maximum(total[:, 1], np.finfo(float).tiny))
        return dict(zip(("rows", "gradients"), relative.tolist(), strict=True))

    def _measure(
        self, what: str, message: Any, counts: np.ndarray, codec: str, values: Any, order: Any,
        factor: Any = 1,
    ) -> None:  # fmt: skip
        """Note what was lost of values, which are `factor` times what they stand for."""
        if self._errors is None:
            return
        sent = values if order is None else values[order]
        lost = decode(message, counts, codec, values.shape[1]) - sent
        both = (arrays.to_host(x / factor) for x in (lost, sent))
        squares = [np.square(x, dtype=np.float64).sum() for x in both]
        self._errors[what] = self._errors.get(what, 0) + np.array(squares)

    def _send(
        self, what: str, message: Any, to: np.ndarray, of: np.ndarray, *beside: Transfer
    ) -> Future:
        """Send a message to each rank, of so many units; the future has those that came."""
        xp = arrays.namespace(what, message)
        received = xp.empty(int(of.sum()) * UNIT, np.uint8)
        transfer = Transfer(message.reshape(-1, UNIT), to, received.reshape(-1, UNIT), of)

        def job() -> Any:
            self.ranks.all_to_all(what, transfer, *beside)
            return received

        return self.ranks.submit(what, job, xp)


def _power_of_two(values: Any) -> Any:
    """(1,) float32: what brings the largest magnitude to 2^14 or above, as far as 2^126 can."""
    xp = arrays.namespace("exchange", values)
    if values.size == 0:
        return xp.ones(1, np.float32)
    largest = xp.maximum(values.max(), -values.min()).reshape(1).view(np.uint32)
    exponent = xp.maximum(largest >> np.uint32(23) & np.uint32(255), np.uint32(15))
    return (np.uint32(268) - exponent << np.uint32(23)).view(np.float32)


def _empty(like: Any, shape: int | tuple[int, int]) -> Any:
    xp: ModuleType = arrays.namespace("exchange", like)
    return (arrays.empty if xp is np else xp.empty)(shape, np.float32)

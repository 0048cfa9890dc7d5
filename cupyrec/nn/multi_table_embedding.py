"""Embedding tables as a layer: one id a field, bags of ids, or sequences."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cupyrec import arrays, autograd, errors, random
from cupyrec.embedding import Asked, Group, Initializer, Life, LookUp, Tables, Tier, widened
from cupyrec.nn.module import Module
from cupyrec.ops.array_functions import concatenate, reshape, transpose
from cupyrec.ops.bags import check_offsets, mean_gradient, pad_bags
from cupyrec.ops.cast import cast
from cupyrec.ops.reorder import by_field, repeat, take
from cupyrec.ops.row_vectors import RowVectors, pays
from cupyrec.ops.take_bags import take_bags
from cupyrec.ragged import Bags

__all__ = ["MultiTableEmbedding"]

_NAME, _POOLINGS = "MultiTableEmbedding", (None, "sum", "mean")


class _Vectors(autograd.Function):
    """A look-up on the tape: its gradient goes to the tables, not to a Tensor."""

    def __init__(self, group: Group, look_up: LookUp) -> None:
        self.group, self.look_up = group, look_up

    def backward(self, grad):
        self.group.add_gradient(self.look_up, grad.reshape(-1, self.group.width))
        return ()


class _Pooled(autograd.Function):
    """Bags on the tape: their gradient goes to the tables, and to weights that are learnt."""

    def __init__(
        self, group: Group, look_up: LookUp, offsets: Any, bags: Any, weights: Any, mean: bool,
        moves: bool,
    ) -> None:  # fmt: skip
        self.learns_weights = isinstance(weights, autograd.Tensor) and weights.requires_grad
        self.weights = weights.data if isinstance(weights, autograd.Tensor) else weights
        self.group, self.look_up, self.offsets = group, look_up, offsets
        self.bags, self.mean, self.moves = bags, mean, moves
        self.vectors = group.pooled(look_up, offsets, self.weights, mean)

    def backward(self, grad):
        group, look_up = self.group, self.look_up
        grad = grad.reshape(-1, group.width)
        if self.mean:
            grad = mean_gradient(grad, look_up.inverse, self.offsets)
        if self.moves:
            group.add_gradient(look_up, grad, self.bags, self.weights)
        if not self.learns_weights:
            return (None,)
        return (group.weight_gradient(look_up, self.bags, grad),)


class _Chosen(autograd.Function):
    """x[..., chosen], for numbers of which none comes twice."""

    def forward(self, x, chosen):
        self.like, self.chosen = x, chosen
        return x[..., chosen]

    def backward(self, grad):
        dx = arrays.namespace(_NAME, grad).zeros(self.like.shape, grad.dtype)
        dx[..., self.chosen] = grad
        return dx, None


class MultiTableEmbedding(Tables, Module):
    """Tables keyed by raw 64-bit ids. ids (B, F) -> (B, F, D); column f from table f.

    Training gives an unseen id a row; there is no capacity. Evaluation gives it its initial vector
    and changes nothing.

    Parameters
    ----------
    num_tables : int
    embedding_dim : int or sequence of int
        D, from 1 to 4096; or a width a table: then the output is (B, sum of the fields' widths).
    initializer : Initializer or sequence, optional
        Initial vectors, by default uniform in [-0.05, 0.05); a sequence has one a table. For parts
        of a row that start differently (DeepFM's 16 + 1 columns) see `InitialVectors`.
    fields : sequence of int, optional
        The table of each of the F fields; by default each has its own.
    pooling : {"sum", "mean"}, optional
        How the ids of a bag become one vector.
    max_length : int, optional
        L: without pooling, bags become sequences (B, F, L, D), zeros behind their ends; longer ones
        keep their last L ids.
    padding_idx : int, optional
        An id that has no row, the vector zero and no part in a mean.
    dtype : str
        Of the vectors in memory: ``float32``, ``float16``, ``bfloat16`` or, to serve, ``int8``.
    dense_updates : bool
        Whether optimizers move every row in every step; for tables that are small.
    tier : Memory, CachedHost or CachedSSD, optional
        Where rows are kept, by default in the device's memory: see `cupyrec.embedding.tier`.
    life : Life, optional
        When ids get and lose rows, see `cupyrec.embedding.Life`; by default they keep theirs.
    seed : int, optional
        Of the initial vectors; by default drawn from `cupyrec.manual_seed`'s generator.

    Raises
    ------
    ValueError, TypeError
        Sizes that are not positive integers or don't agree; an unknown pooling or dtype.

    Notes
    -----
    OneFlow's ``one_embedding.MultiTableEmbedding``, without its capacity, persistent path or name.

    Ids are int64. int32 is widened by its sign, uint32 by zeros, and uint64 keeps its 64 bits: so
    -1 of both signed types and 2**64 - 1 are one id.

    Examples
    --------
    >>> embedding = MultiTableEmbedding(num_tables=2, embedding_dim=4)
    >>> embedding(np.array([[-1, 2**62]])).shape, len(embedding.group.store)
    ((1, 2, 4), 2)
    >>> bags = MultiTableEmbedding(2, 4, pooling="sum")  # sample 0 has the ids 5, 6 and 5; 7
    >>> bags(np.array([5, 6, 5, 7]), offsets=np.array([0, 3, 4])).shape
    (1, 2, 4)
    """

    def __init__(
        self,
        num_tables: int,
        embedding_dim: int | Sequence[int],
        *,
        initializer: Initializer | Sequence[Any] | None = None,
        fields: Sequence[int] | None = None,
        pooling: str | None = None,
        max_length: int | None = None,
        padding_idx: int | None = None,
        dtype: str = "float32",
        dense_updates: bool = False,
        tier: Tier | None = None,
        life: Life | None = None,
        seed: int | None = None,
    ) -> None:
        drawn = int(random.generator().integers(2**63))
        super().__init__(
            num_tables, embedding_dim, initializer=initializer, dtype=dtype,
            dense_updates=dense_updates, tier=tier, life=life,
            seed=drawn if seed is None else seed,
        )  # fmt: skip
        self.joined = isinstance(embedding_dim, (Sequence, np.ndarray))
        self.fields = _fields(self.num_tables, fields)
        if pooling not in _POOLINGS:
            raise ValueError(f"{_NAME}: 'pooling' must be one of {_POOLINGS}, got {pooling!r}.")
        self.pooling, self.padding_idx = pooling, _padding(padding_idx)
        self.max_length = None
        if max_length is not None:
            self.max_length = errors.positive(_NAME, "max_length", max_length)
            if pooling is not None:
                raise ValueError(
                    f"{_NAME}: 'max_length' must come without pooling, got {pooling!r}."
                )

    def __repr__(self) -> str:
        tables = f"{self._ranks.shard}tables={self.num_tables}, fields={len(self.fields)}"
        return f"{_NAME}({tables})\n{self.accounts()}"

    def forward(self, ids: Any, offsets: Any = None, weights: Any = None) -> Any:
        """Look ids up.

        Parameters
        ----------
        ids : (B, F), (B, F, L) or with `offsets` (N,) array of int64, uint64, int32 or uint32
            An id a field, L ids a field, or the ids of all bags side by side; or `Bags`, which
            have their offsets.
        offsets : (B * F + 1,) array of int64 or int32, optional
            Bag b * F + f, of sample b and field f, begins at ids[offsets[b * F + f]] and ends where
            the next one begins.
        weights : array or Tensor of float32, of the shape of `ids`, optional
            Factors of the vectors; needs pooling "sum". A Tensor gets its gradient.

        Returns
        -------
        Tensor of float32, with `amp` of that type
            (B, F, D), for sequences and for (B, F, L) without pooling (B, F, L, D). With a width a
            table fields stand side by side: (B, sum of D) and (B, L, sum of D).

        Raises
        ------
        ValueError, TypeError
            Shapes, dtypes or devices that don't agree, or offsets that don't cut `ids`.

        Examples
        --------
        See the class.
        """
        if isinstance(ids, Bags):
            ids, offsets = self._of_bags(ids, offsets)
        given = [a.data if isinstance(a, autograd.Tensor) else a for a in (offsets, weights)]
        xp = self.module(ids, *(a for a in given if a is not None))
        prepared, ids = ids, widened(xp, ids)
        if weights is not None:
            self._check_weights(ids, weights)
        if offsets is not None:
            return self._ragged(xp, ids, offsets, weights)
        if self.max_length is not None:
            raise ValueError(
                f"{_NAME}: 'max_length' must come with 'offsets', got ids {ids.shape} alone."
            )
        axes = f"B {len(self.fields)}" + " L" * (ids.ndim == 3)
        errors.axes(_NAME, ids=(ids, axes))
        if self.pooling is None or (ids.ndim == 2 and weights is None):
            return self._gathered(xp, ids, None, prepared)
        bags, length = ids.shape[0] * ids.shape[1], 1 if ids.ndim == 2 else ids.shape[2]
        weights = None if weights is None else reshape(weights, -1)
        return self._pooled(xp, ids.reshape(-1), xp.arange(bags + 1) * length, weights)

    def rows(self, ids: Any) -> Any:
        """Look ids (B, F) up for an op that reads each vector from its row, as interactions do.

        The same Tensor as `forward` returns. On a device it leaves the vectors where they are, as
        `cupyrec.ops.row_vectors.RowVectors`, where that moves fewer bytes and each id has one: then
        no optimizer step may come before its backward pass.

        Raises
        ------
        ValueError, TypeError
            As `forward`; in the backward pass, if rows have changed since.

        Examples
        --------
        >>> embedding = MultiTableEmbedding(num_tables=2, embedding_dim=4)
        >>> embedding.rows(np.array([[7, 8]])).shape
        (1, 2, 4)
        """
        if isinstance(ids, Bags):
            return self.forward(ids)
        xp, learns = self.module(ids), self.training and autograd.is_recording()
        plain = self.max_length is None and self.padding_idx is None and not self.joined
        plain = plain and self.group.exchange.is_local  # else they come side by side
        if xp is np or not plain or ids.ndim != 2 or not pays(
            self.group.width, self.group.store.value, self.amp or np.float32, learns
        ):  # fmt: skip
            return self.forward(ids)
        errors.axes(_NAME, ids=(ids, f"B {len(self.fields)}"))
        return self._gathered(xp, widened(xp, ids), None, in_rows=True)

    def prepare(self, ids: Any) -> None:
        """Tell the ids (B, F) that `forward` or `rows` is called with after the next time.

        While that one's rows are worked on keys travel to the ranks that own them, and a tier
        beyond memory reads rows. They are found, and unseen ids get theirs, when it is their turn.

        Examples
        --------
        >>> embedding = MultiTableEmbedding(num_tables=2, embedding_dim=4)
        >>> embedding.prepare(np.array([[7, 8]]))
        """
        if isinstance(ids, Bags):  # they are looked up when it is their turn
            return
        given, ids = ids, widened(self.module(ids), ids)
        errors.axes(_NAME, ids=(ids, f"B {len(self.fields)}"))
        for group, _ in self._fields_of_groups():
            ahead = group.store.reads_ahead or not group.exchange.is_local
            group.following = (given, ids) if ahead else None

    def look_up_by_field(self, ids: Any) -> LookUp:
        """Find the rows of ids (B, F); keys are numbered field after field, key f * B + b.

        Raises
        ------
        ValueError, TypeError
            As `forward`.

        Examples
        --------
        >>> embedding = MultiTableEmbedding(num_tables=2, embedding_dim=4)
        >>> embedding.look_up_by_field(np.array([[7, 7], [8, 7]])).inverse
        array([0, 1, 2, 2])
        """
        xp = self.module(ids)
        ids = widened(xp, ids)
        errors.axes(_NAME, ids=(ids, f"B {len(self.fields)}"))
        tables = arrays.copy_to(xp, repeat(self.fields, len(ids)))
        return self.group.look_up(tables, by_field(ids), self.training)

    def _of_bags(self, bags: Bags, offsets: Any) -> tuple[Any, Any]:
        if offsets is not None:
            raise ValueError(f"{_NAME}: 'offsets' must not be given beside Bags, which have them.")
        if bags.num_fields != len(self.fields):
            raise ValueError(
                f"{_NAME}: 'ids' must be Bags of {len(self.fields)} fields, got {bags.num_fields}."
            )
        return bags.ids, bags.offsets

    def _check_weights(self, ids: Any, weights: Any) -> None:
        if self.pooling != "sum":
            raise ValueError(
                f"{_NAME}: 'weights' must come with pooling 'sum', got {self.pooling!r}."
            )
        errors.dtype(_NAME, "weights", weights, np.float32)
        if weights.shape != ids.shape:
            raise ValueError(
                f"{_NAME}: 'weights' must have shape {ids.shape} like 'ids', got {weights.shape}."
            )

    def _ragged(self, xp: ModuleType, ids: Any, offsets: Any, weights: Any) -> Any:
        """Bags of any lengths, pooled or as sequences."""
        errors.axes(_NAME, ids=(ids, "N"))
        offsets = check_offsets(_NAME, offsets, len(ids))
        if (len(offsets) - 1) % len(self.fields):
            raise ValueError(
                f"{_NAME}: 'offsets' must have B * {len(self.fields)} + 1 numbers, "
                f"got shape {offsets.shape}."
            )
        if self.pooling is not None:
            return self._pooled(xp, ids, offsets, weights)
        if self.max_length is None:
            raise ValueError(
                f"{_NAME}: 'offsets' must come with 'pooling' or 'max_length', got neither."
            )
        places = pad_bags(offsets, self.max_length).reshape(-1, len(self.fields), self.max_length)
        some = ids if len(ids) else xp.zeros(1, np.int64)
        return self._gathered(xp, some[xp.maximum(places, 0)], places >= 0)

    def _gathered(
        self, xp: ModuleType, ids: Any, present: Any, prepared: Any = None, in_rows: bool = False
    ) -> Any:
        """A vector each id of (B, F) or (B, F, L); zero where `present` is false or for padding.

        `prepared` is the array that `prepare` may have been told.
        """
        parts = []
        for group, fields in self._fields_of_groups():
            asked = group.asked_ahead(prepared) or self._ask(xp, group, fields, ids, present)
            look_up, own = group.find(asked, self.training), ids[:, fields]
            learns = self.training and autograd.is_recording()
            node = _Vectors(group, look_up) if learns else None
            if in_rows:
                read, inverse = functools.partial(group.read, look_up), look_up.inverse
                inverse = inverse.reshape(own.shape)
                return RowVectors(read, inverse, look_up.unseen, self.amp or np.float32, node)
            vectors = group.vectors(look_up, self.amp or np.float32)
            vectors = vectors.reshape(*own.shape, group.width)
            parts.append(autograd.record(node, vectors, ()) if node else autograd.Tensor(vectors))
        for group, fields in self._fields_of_groups():
            following, group.following = group.following, None
            if following is not None:
                given, ids = following
                group.ahead = given, self._ask(xp, group, fields, ids, None)
                group.read_ahead()
        return self._join(parts)

    def _ask(self, xp: ModuleType, group: Group, fields: Any, ids: Any, present: Any) -> Asked:
        """Begin the look-up of `_gathered` in a group."""
        if self.padding_idx is not None:
            real = ids != self.padding_idx
            present = real if present is None else present & real
        kept = None if present is None else xp.flatnonzero(present[:, fields])
        tables = np.repeat(self.fields[fields], int(np.prod(ids.shape[2:])))
        tables = _repeated(xp, arrays.stream(xp), tables.tobytes(), len(ids))
        return group.ask(tables, xp.ascontiguousarray(ids[:, fields]).reshape(-1), kept)

    def _pooled(self, xp: ModuleType, ids: Any, offsets: Any, weights: Any) -> Any:
        """A vector each bag of (B * F,), which `offsets` cut out of (N,) ids and weights.

        Values are looked up field by field: a table's rows are few enough for caches.
        """
        parts, every = [], np.arange(len(self.fields))
        for group, fields in self._fields_of_groups():
            order = np.arange(len(offsets) - 1).reshape(-1, len(every))[:, fields].T.reshape(-1)
            values, cut, bags = take_bags(offsets, arrays.copy_to(xp, order))
            own, share = (
                take(ids, values),
                None if weights is None else _Chosen.apply(weights, values),
            )
            shape = len(every[fields]), (len(offsets) - 1) // len(every), group.width
            tables = arrays.copy_to(xp, np.repeat(self.fields[fields], shape[1]))
            kept = None if self.padding_idx is None else xp.flatnonzero(own != self.padding_idx)
            look_up = group.look_up(take(tables, bags), own, self.training, kept)
            node = _Pooled(group, look_up, cut, bags, share, self.pooling == "mean", self.training)
            vectors = node.vectors.reshape(shape)
            if autograd.is_recording() and (self.training or node.learns_weights):
                part = autograd.record(node, vectors, (share,))
            else:
                part = autograd.Tensor(vectors)
            parts.append(transpose(part, (1, 0, 2)))
        pooled = self._join(parts)
        return pooled if self.amp is None else cast(pooled, self.amp)

    def _join(self, parts: list[Any]) -> Any:
        """(B, F, [L,] D) of the groups side by side, the fields in order."""
        if not self.joined:
            return parts[0]
        flat = [transpose(p, (0, 2, 1, 3)) if p.ndim == 4 else p for p in parts]
        flat = [reshape(p, (*p.shape[:-2], p.shape[-2] * p.shape[-1])) for p in flat]
        if len(parts) == 1:
            return flat[0]
        order = np.concatenate([fields for _, fields in self._fields_of_groups()])
        widths = np.array(self.widths)[self.fields]
        field_of_column = np.repeat(order, widths[order])
        columns = np.argsort(field_of_column, kind="stable")
        xp = arrays.namespace(_NAME, parts[0].data)
        return _Chosen.apply(concatenate(flat, axis=-1), arrays.copy_to(xp, columns))

    def _fields_of_groups(self) -> Iterator[tuple[Group, Any]]:
        """Yield each group with the numbers of the fields that look up in it."""
        if len(self.groups) == 1:
            yield self.group, slice(None)
            return
        widths = np.array(self.widths)[self.fields]
        for width, group in self.groups.items():
            if (fields := np.flatnonzero(widths == width)).size:
                yield group, fields


@functools.lru_cache(maxsize=8)  # as many sizes of batches are met at a time
def _repeated(xp: ModuleType, stream: tuple[int, int], tables: bytes, samples: int) -> Any:
    """The table of each key, for `samples` times the same; made on this stream."""
    return xp.tile(arrays.copy_to(xp, np.frombuffer(tables, np.uint32)), samples)


def _padding(padding_idx: int | None) -> int | None:
    """Return the id as `widened` would."""
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, (int, np.integer)):
        raise TypeError(f"{_NAME}: 'padding_idx' must be an integer, got {padding_idx!r}.")
    if not -(2**63) <= padding_idx < 2**64:
        raise ValueError(f"{_NAME}: 'padding_idx' must lie in [-2**63, 2**64), got {padding_idx}.")
    return int(padding_idx) - (2**64 if padding_idx >= 2**63 else 0)


def _fields(num_tables: int, fields: Sequence[int] | None) -> np.ndarray:
    """Return the table of each field, (F,) uint32."""
    tables = np.arange(num_tables) if fields is None else np.asarray(fields)
    if tables.ndim != 1 or not tables.size or tables.dtype.kind not in "iu":
        raise TypeError(f"{_NAME}: 'fields' must be a sequence of integers, got {fields!r}.")
    if tables.min() < 0 or tables.max() >= num_tables:
        raise ValueError(
            f"{_NAME}: 'fields' must lie in [0, {num_tables}), "
            f"got {tables.min()} to {tables.max()}."
        )
    return tables.astype(np.uint32)

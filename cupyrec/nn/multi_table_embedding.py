"""Embedding tables of one width as a layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import arrays, autograd, errors, random
from cupyrec.embedding import Group, Uniform
from cupyrec.nn.module import Module

__all__ = ["MultiTableEmbedding"]


class _LookUp(autograd.Function):
    """The tape's node of a look-up: its gradient goes to the tables, not to a Tensor."""

    def __init__(self, group: Group, plan: Any, shape: tuple[int, ...]) -> None:
        self.group, self.plan, self.flat = group, plan, (shape[0] * shape[1], shape[2])

    def backward(self, grad):
        self.group.add_gradient(self.plan, grad.reshape(self.flat))
        return ()


class MultiTableEmbedding(Module):
    """Tables keyed by raw 64-bit ids. ids (B, F) int64 -> (B, F, D) float32; column f, table f.

    Training gives an unseen id a row; there is no capacity. Evaluation gives it its initial vector
    and changes nothing.

    Parameters
    ----------
    num_tables : int
        F.
    embedding_dim : int
        D.
    initializer : Uniform, optional
        Initial vectors, by default uniform in [-0.05, 0.05).
    seed : int, optional
        Of the initial vectors; by default drawn from `cupyrec.manual_seed`'s generator.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer.

    Notes
    -----
    OneFlow's ``one_embedding.MultiTableEmbedding``, without its capacity, persistent path or name.

    Examples
    --------
    >>> embedding = MultiTableEmbedding(num_tables=2, embedding_dim=4)
    >>> embedding(np.array([[-1, 2**62]])).shape, len(embedding.group.store)
    ((1, 2, 4), 2)
    """

    def __init__(
        self,
        num_tables: int,
        embedding_dim: int,
        *,
        initializer: Uniform | None = None,
        seed: int | None = None,
    ) -> None:
        self.num_tables = errors.positive("MultiTableEmbedding", "num_tables", num_tables)
        width = errors.positive("MultiTableEmbedding", "embedding_dim", embedding_dim)
        drawn = int(random.generator().integers(2**63))
        self.group = Group(width, initializer or Uniform(), drawn if seed is None else seed)

    def forward(self, ids: Any) -> Any:
        xp = arrays.namespace("MultiTableEmbedding", ids)
        if xp is not self.group.xp:
            raise TypeError(
                f"MultiTableEmbedding: 'ids' must be on device '{arrays.name(self.group.xp)}' like "
                f"the tables, got '{arrays.name(xp)}'."
            )
        errors.dtype("MultiTableEmbedding", "ids", ids, np.int64)
        (batch,) = errors.axes("MultiTableEmbedding", ids=(ids, f"B {self.num_tables}"))
        tables = xp.tile(xp.arange(self.num_tables, dtype=np.uint32), batch)
        flat = xp.ascontiguousarray(ids).reshape(-1)
        vectors, plan = self.group.look_up(tables, flat, insert=self.training)
        vectors = vectors.reshape(batch, self.num_tables, self.group.store.width)
        if not (self.training and autograd.is_recording()):
            return autograd.Tensor(vectors)
        return autograd.record(_LookUp(self.group, plan, vectors.shape), vectors, ())

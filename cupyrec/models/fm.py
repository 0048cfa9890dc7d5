"""FM: factorization machine (Rendle 2010)."""

from __future__ import annotations

from typing import Any

from cupyrec import errors, nn
from cupyrec.graph import graphed
from cupyrec.models.lr import FirstOrder

__all__ = ["FM"]


class FM(nn.Module):
    """First order, and dot products of all pairs of embeddings.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, 1). A row has an id's
    vector and, as its last column, its weight: one look-up finds both.

    Parameters
    ----------
    num_dense : int
        0 for a log without numeric features; they have a weight each, but no vector.
    num_tables : int
    embedding_dim : int
        D.
    embedding_dtype : str
        Of rows in memory: ``float32``, ``float16``, ``bfloat16``; to serve ``int8``.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> model = FM(num_dense=13, num_tables=26, embedding_dim=8)
    >>> model(np.zeros((4, 13), np.float32), np.zeros((4, 26), np.int64)).shape
    (4, 1)
    """

    by_blocks = True

    def __init__(
        self,
        num_dense: int = 13,
        num_tables: int = 26,
        embedding_dim: int = 16,
        embedding_dtype: str = "float32",
    ) -> None:
        width = errors.positive("FM", "embedding_dim", embedding_dim) + 1
        self.embedding = nn.MultiTableEmbedding(num_tables, width, dtype=embedding_dtype)
        self.first_order = FirstOrder(num_dense)
        self.interaction = nn.FusedDotInteraction(pooling="sum", output_concat=False)

    def forward(self, dense: Any, ids: Any) -> Any:
        return self._towers(dense, self.embedding(ids))

    def prepare(self, ids: Any) -> None:
        self.embedding.prepare(ids)

    @graphed
    def _towers(self, dense: Any, rows: Any) -> Any:
        vectors, weights = rows[:, :, :-1], rows[:, :, -1:]
        return self.first_order(dense, weights) + self.interaction(None, vectors)

"""PNN: an MLP on embeddings and their products (Qu et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyrec import errors, nn
from cupyrec.graph import graphed
from cupyrec.nn.interaction import side_by_side
from cupyrec.ops.array_functions import concatenate, reshape
from cupyrec.ops.cast import widen

__all__ = ["PNN"]


class PNN(nn.Module):
    """An MLP on dense features, embeddings and products of these.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, 1).

    Parameters
    ----------
    num_dense : int
        0 for a log without numeric features.
    num_tables : int
    embedding_dim : int
        D.
    product : {"inner", "outer", "both"}
        "inner": dot products of all pairs of embeddings. "outer": products of all pairs of columns
        of the sum of a sample's embeddings, equation 13 of the paper.
    deep : sequence of int
        Hidden layers of the MLP.
    dropout : float
        Rate in them.
    embedding_dtype : str
        Of embedding vectors in memory: ``float32``, ``float16``, ``bfloat16``; to serve ``int8``.
    batch_norm : bool
        Whether hidden layers of the MLP are normalized over the batch, see `FusedMLP`.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer, another `product`, or a single table, whose embedding has
        none to be multiplied with, for "inner" or "both".

    Examples
    --------
    >>> import numpy as np
    >>> model = PNN(num_dense=13, num_tables=26, embedding_dim=8, deep=[16])
    >>> model(np.zeros((4, 13), np.float32), np.zeros((4, 26), np.int64)).shape
    (4, 1)
    """

    by_blocks = True

    def __init__(
        self,
        num_dense: int = 13,
        num_tables: int = 26,
        embedding_dim: int = 16,
        product: str = "inner",
        deep: Sequence[int] = (400, 400, 400),
        dropout: float = 0.0,
        embedding_dtype: str = "float32",
        batch_norm: bool = False,
    ) -> None:
        if product not in ("inner", "outer", "both"):
            raise ValueError(f"PNN: 'product' must be 'inner', 'outer' or 'both', got {product!r}.")
        tables = errors.positive("PNN", "num_tables", num_tables)
        if tables == 1 and product != "outer":
            raise ValueError(f"PNN: {product!r} products must be of two tables or more, got 1.")
        self.embedding = nn.MultiTableEmbedding(tables, embedding_dim, dtype=embedding_dtype)
        self.num_dense, width = num_dense, num_dense + tables * embedding_dim
        self.inner = self.outer = None
        if product != "outer":
            self.inner = nn.FusedDotInteraction(output_concat=False)
            width += self.inner.width(tables, embedding_dim)
        if product != "inner":
            self.outer = nn.FusedDotInteraction(output_concat=False, self_interaction=True)
            width += self.outer.width(embedding_dim, 1)
        self.deep = nn.FusedMLP(
            width, deep, 1, dropout, skip_final_activation=True, batch_norm=batch_norm
        )

    def forward(self, dense: Any, ids: Any) -> Any:
        return self._towers(dense if self.num_dense else None, self.embedding(ids))

    def prepare(self, ids: Any) -> None:
        self.embedding.prepare(ids)

    @graphed
    def _towers(self, dense: Any, vectors: Any) -> Any:
        batch, _, width = vectors.shape
        signals = [side_by_side(dense, vectors)]
        if self.inner:
            signals.append(self.inner(None, vectors))
        if self.outer:  # of D columns, each taken for a feature of one number
            columns = reshape(widen(vectors).sum(axis=1), (batch, width, 1))
            signals.append(self.outer(None, columns))
        return self.deep(concatenate(signals, axis=1))

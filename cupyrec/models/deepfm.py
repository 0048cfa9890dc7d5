"""DeepFM: a factorization machine and an MLP on the same embeddings (Guo et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyrec import nn
from cupyrec.graph import graphed
from cupyrec.models.fm import FM
from cupyrec.nn.interaction import side_by_side

__all__ = ["DeepFM"]


class DeepFM(FM):
    """First order, dot products of all pairs of embeddings, and an MLP.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, 1).

    Parameters
    ----------
    num_dense, num_tables, embedding_dim, embedding_dtype
        See `FM`; dense features go to the MLP too.
    deep : sequence of int
        Hidden layers of the MLP.
    dropout : float
        Rate in them.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> model = DeepFM(num_dense=13, num_tables=26, embedding_dim=8, deep=[16])
    >>> model(np.zeros((4, 13), np.float32), np.zeros((4, 26), np.int64)).shape
    (4, 1)
    """

    bias = False  # the MLP has one

    def __init__(
        self,
        num_dense: int = 13,
        num_tables: int = 26,
        embedding_dim: int = 16,
        deep: Sequence[int] = (400, 400, 400),
        dropout: float = 0.0,
        embedding_dtype: str = "float32",
    ) -> None:
        super().__init__(num_dense, num_tables, embedding_dim, embedding_dtype)
        self.num_dense = num_dense
        width = num_dense + num_tables * embedding_dim
        self.deep = nn.FusedMLP(width, deep, 1, dropout, skip_final_activation=True)

    @graphed
    def _towers(self, dense: Any, rows: Any) -> Any:
        vectors, weights = rows[:, :, :-1], rows[:, :, -1:]
        deep = self.deep(side_by_side(dense if self.num_dense else None, vectors))
        return self.first_order(dense, weights) + self.interaction(None, vectors) + deep

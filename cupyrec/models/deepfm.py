"""DeepFM: a factorization machine and an MLP on the same embeddings (Guo et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyrec import nn
from cupyrec.models.wide_deep import WideDeep

__all__ = ["DeepFM"]


class DeepFM(WideDeep):
    """First order, dot products of all pairs of embeddings, and an MLP.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, 1).

    Parameters
    ----------
    num_dense, num_tables, embedding_dim, deep, dropout, embedding_dtype, batch_norm
        See `WideDeep`.

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

    by_blocks = True

    def __init__(
        self,
        num_dense: int = 13,
        num_tables: int = 26,
        embedding_dim: int = 16,
        deep: Sequence[int] = (400, 400, 400),
        dropout: float = 0.0,
        embedding_dtype: str = "float32",
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            num_dense, num_tables, embedding_dim, deep, dropout, embedding_dtype, batch_norm
        )
        self.interaction = nn.FusedDotInteraction(pooling="sum", output_concat=False)

    def _logits(self, dense: Any, vectors: Any, weights: Any) -> Any:
        return super()._logits(dense, vectors, weights) + self.interaction(None, vectors)

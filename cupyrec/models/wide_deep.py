"""Wide & Deep: a linear model and an MLP on embeddings (Cheng et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyrec import errors, nn
from cupyrec.graph import graphed
from cupyrec.models.lr import FirstOrder
from cupyrec.nn.interaction import side_by_side
from cupyrec.ops.array_functions import contiguous

__all__ = ["WideDeep"]


class WideDeep(nn.Module):
    """A weight an id and a dense feature, and an MLP on embeddings and dense features.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, 1). A row has an id's
    vector and, as its last column, its weight: one look-up finds both.

    Parameters
    ----------
    num_dense : int
        0 for a log without numeric features.
    num_tables : int
    embedding_dim : int
        D.
    deep : sequence of int
        Hidden layers of the MLP.
    dropout : float
        Rate in them.
    embedding_dtype : str
        Of rows in memory: ``float32``, ``float16``, ``bfloat16``; to serve ``int8``.
    batch_norm : bool
        Whether hidden layers of the MLP are normalized over the batch, see `FusedMLP`.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> model = WideDeep(num_dense=13, num_tables=26, embedding_dim=8, deep=[16])
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
        dim = errors.positive(type(self).__name__, "embedding_dim", embedding_dim)
        self.num_dense, width = num_dense, num_dense + num_tables * dim
        self.embedding = nn.MultiTableEmbedding(num_tables, dim + 1, dtype=embedding_dtype)
        self.first_order = FirstOrder(num_dense, bias=False)  # the MLP has one
        self.deep = nn.FusedMLP(
            width, deep, 1, dropout, skip_final_activation=True, batch_norm=batch_norm
        )

    def forward(self, dense: Any, ids: Any) -> Any:
        return self._towers(dense, self.embedding(ids))

    def prepare(self, ids: Any) -> None:
        self.embedding.prepare(ids)

    @graphed
    def _towers(self, dense: Any, rows: Any) -> Any:
        return self._logits(dense, contiguous(rows[:, :, :-1]), rows[:, :, -1:])

    def _logits(self, dense: Any, vectors: Any, weights: Any) -> Any:
        deep = self.deep(side_by_side(dense if self.num_dense else None, vectors))
        return self.first_order(dense, weights) + deep

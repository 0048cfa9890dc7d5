"""DCN: deep and cross network (Wang et al. 2017), and DCN-v2 (Wang et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyrec import errors, nn
from cupyrec.graph import graphed
from cupyrec.nn.interaction import side_by_side
from cupyrec.ops.array_functions import concatenate
from cupyrec.ops.cast import widen

__all__ = ["DCN", "DCNv2"]


class DCN(nn.Module):
    """A cross network and an MLP side by side, both of dense features and embeddings.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, 1).

    Parameters
    ----------
    num_dense : int
        0 for a log without numeric features.
    num_tables : int
    embedding_dim : int
        D.
    crosses : int
        Layers of the cross network; the products of layer l are of l + 1 features.
    deep : sequence of int
        Layers of the MLP, at least one.
    dropout : float
        Rate in the layers of the MLP.
    embedding_dtype : str
        Of embedding vectors in memory: ``float32``, ``float16``, ``bfloat16``; to serve ``int8``.
    batch_norm : bool
        Whether layers of the MLP are normalized over the batch, see `FusedMLP`.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> model = DCN(num_dense=13, num_tables=26, embedding_dim=8, crosses=2, deep=[16])
    >>> model(np.zeros((4, 13), np.float32), np.zeros((4, 26), np.int64)).shape
    (4, 1)
    """

    by_blocks = True

    mode = "vector"

    def __init__(
        self,
        num_dense: int = 13,
        num_tables: int = 26,
        embedding_dim: int = 16,
        crosses: int = 3,
        deep: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        embedding_dtype: str = "float32",
        batch_norm: bool = False,
    ) -> None:
        name = type(self).__name__
        crosses = errors.positive(name, "crosses", crosses)
        if not deep:
            raise ValueError(f"{name}: 'deep' must have a layer or more, got {deep!r}.")
        self.embedding = nn.MultiTableEmbedding(num_tables, embedding_dim, dtype=embedding_dtype)
        self.num_dense, width = num_dense, num_dense + num_tables * embedding_dim
        self.crosses = [nn.FusedCrossInteraction(width, self.mode) for _ in range(crosses)]
        *hidden, last = deep
        self.deep = nn.FusedMLP(width, hidden, last, dropout, dropout, batch_norm=batch_norm)
        self.head = nn.FusedMLP(width + last, [], 1, skip_final_activation=True)

    def forward(self, dense: Any, ids: Any) -> Any:
        return self._towers(dense if self.num_dense else None, self.embedding(ids))

    def prepare(self, ids: Any) -> None:
        self.embedding.prepare(ids)

    @graphed
    def _towers(self, dense: Any, vectors: Any) -> Any:
        x = x0 = side_by_side(dense, widen(vectors))
        for cross in self.crosses:
            x = cross(x, x0)
        return self.head(concatenate([x, self.deep(x0)], axis=1))


class DCNv2(DCN):
    """`DCN` whose cross layers have a matrix each instead of a vector.

    Examples
    --------
    >>> model = DCNv2(num_dense=0, num_tables=2, embedding_dim=4)
    >>> model.crosses[0].weight.shape
    (8, 8)
    """

    by_blocks = True

    mode = "matrix"

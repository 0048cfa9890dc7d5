"""xDeepFM: a compressed interaction network and an MLP on embeddings (Lian et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyrec import nn
from cupyrec.models.wide_deep import WideDeep

__all__ = ["XDeepFM"]


class XDeepFM(WideDeep):
    """First order, products of embeddings of bounded degree, column by column, and an MLP.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, 1).

    Parameters
    ----------
    num_dense, num_tables, embedding_dim, deep, dropout, embedding_dtype, batch_norm
        See `WideDeep`.
    maps : sequence of int
        Feature maps of each layer of the compressed interaction network; those of layer l are of
        products of l + 2 embeddings.
    split_half : bool
        Whether of each layer but the last one half goes on, and the other half comes out.
    linear_maps : bool
        Whether feature maps go without ReLU.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer, or an odd one is to be split.

    Examples
    --------
    >>> import numpy as np
    >>> model = XDeepFM(num_dense=13, num_tables=26, embedding_dim=8, maps=[8], deep=[16])
    >>> model(np.zeros((4, 13), np.float32), np.zeros((4, 26), np.int64)).shape
    (4, 1)
    """

    by_blocks = True

    def __init__(
        self,
        num_dense: int = 13,
        num_tables: int = 26,
        embedding_dim: int = 16,
        maps: Sequence[int] = (256, 128),
        split_half: bool = True,
        deep: Sequence[int] = (400, 400, 400),
        dropout: float = 0.0,
        embedding_dtype: str = "float32",
        batch_norm: bool = False,
        linear_maps: bool = False,
    ) -> None:
        super().__init__(
            num_dense, num_tables, embedding_dim, deep, dropout, embedding_dtype, batch_norm
        )
        self.interaction = nn.CompressedInteraction(num_tables, maps, split_half, linear_maps)
        self.head = nn.FusedMLP(self.interaction.width, [], 1, skip_final_activation=True)

    def _logits(self, dense: Any, vectors: Any, weights: Any) -> Any:
        explicit = self.head(self.interaction(vectors))
        return super()._logits(dense, vectors, weights) + explicit

"""DLRM: deep learning recommendation model (Naumov et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyrec import nn
from cupyrec.graph import graphed
from cupyrec.nn.interaction import side_by_side
from cupyrec.nn.mlp import cast_together

__all__ = ["DLRM"]


class DLRM(nn.Module):
    """Dense features through a bottom MLP, dot products with the embeddings, a top MLP.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, 1).

    Parameters
    ----------
    num_dense : int
        0 for a log without numeric features: then there is no bottom MLP.
    num_tables : int
    embedding_dim : int
        D.
    bottom, top : sequence of int
        Hidden layers of the two MLPs.
    interaction : {"dot", "cat"}
        What the top MLP sees: "dot": the dense features' vector and the products; "cat": it and all
        embeddings side by side.
    dropout : float
        Rate in the hidden layers of the top MLP.
    self_interaction : bool
        Whether products of a feature with itself are used.
    output_padding : int
        Zero columns after the products.
    embedding_dtype : str
        Of embedding vectors in memory: ``float32``, ``float16``, ``bfloat16``; to serve ``int8``.
    batch_norm : bool
        Whether hidden layers of the top MLP are normalized over the batch, see `FusedMLP`.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer, another `interaction`, or there is but one feature and
        nothing to multiply.

    Examples
    --------
    >>> import numpy as np
    >>> model = DLRM(num_dense=13, num_tables=26, embedding_dim=8, bottom=[16], top=[16])
    >>> model(np.zeros((4, 13), np.float32), np.zeros((4, 26), np.int64)).shape
    (4, 1)
    """

    by_blocks = True

    def __init__(
        self,
        num_dense: int = 13,
        num_tables: int = 26,
        embedding_dim: int = 16,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (128,),
        interaction: str = "dot",
        dropout: float = 0.0,
        self_interaction: bool = False,
        output_padding: int = 0,
        embedding_dtype: str = "float32",
        batch_norm: bool = False,
    ) -> None:
        features = num_tables + (num_dense > 0)
        if interaction not in ("dot", "cat"):
            raise ValueError(f"DLRM: 'interaction' must be 'dot' or 'cat', got {interaction!r}.")
        if interaction == "cat" and (self_interaction or output_padding):
            raise ValueError("DLRM: 'cat' must come without 'self_interaction', 'output_padding'.")
        if features == 1 and not self_interaction and interaction == "dot":
            raise ValueError(
                "DLRM: there must be two features to multiply, "
                f"got num_dense = {num_dense}, num_tables = {num_tables}."
            )
        self.embedding = nn.MultiTableEmbedding(num_tables, embedding_dim, dtype=embedding_dtype)
        self.bottom = nn.FusedMLP(num_dense, bottom, embedding_dim) if num_dense else None
        self.interaction, width = None, features * embedding_dim
        if interaction == "dot":
            self.interaction = nn.FusedDotInteraction(
                self_interaction=self_interaction,
                output_concat=num_dense > 0,
                output_padding=output_padding,
                whole_rows=True,
            )
            width = self.interaction.width(features, embedding_dim)
        self.top = nn.FusedMLP(
            width,
            top,
            1,
            hidden_dropout_rate=dropout,
            skip_final_activation=True,
            batch_norm=batch_norm,
        )

    def forward(self, dense: Any, ids: Any) -> Any:
        vectors = self.embedding.rows(ids) if self.interaction else self.embedding(ids)
        return self._towers(dense if self.bottom else None, vectors)

    def prepare(self, ids: Any) -> None:
        self.embedding.prepare(ids)

    @graphed
    def _towers(self, dense: Any, vectors: Any) -> Any:
        dense, halves = cast_together(dense, [m for m in (self.bottom, self.top) if m])
        dense = self.bottom(dense, halves[0]) if self.bottom else None  # (B, D)
        interact = self.interaction or side_by_side
        return self.top(interact(dense, vectors), halves[-1])

"""An MLP on the embeddings of all fields side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, autograd
from cupyrec.embedding import Group, LookUp
from cupyrec.nn.mlp import FusedMLP
from cupyrec.nn.module import Module
from cupyrec.nn.multi_table_embedding import MultiTableEmbedding
from cupyrec.ops.array_functions import reshape
from cupyrec.ops.embedding_linear import embedding_linear, embedding_linear_backward, pays

__all__ = ["EmbeddingMLP"]


class _FirstLayer(autograd.Function):
    """The first linear layer on the tape: its gradient goes to the weight and to the tables."""

    def __init__(
        self, group: Group, look_up: LookUp, weight: Any, samples: int, moves: bool
    ) -> None:
        keys = look_up.keys
        self.group, self.look_up, self.weight, self.moves = group, look_up, weight, moves
        self.vectors = group.unique_vectors(look_up)
        fields = look_up.inverse.size // samples
        firsts = np.flatnonzero(keys.tables[1:] != keys.tables[:-1]) + 1
        self.starts = np.concatenate([[0], firsts, [len(keys.tables)]])
        self.inverse = np.ascontiguousarray(look_up.inverse.reshape(fields, samples).T)
        self.y = embedding_linear(self.vectors, self.starts, self.inverse, weight)

    def backward(self, grad):
        keys = self.look_up.keys
        dvectors, dweight = embedding_linear_backward(
            np.ascontiguousarray(grad), self.vectors, self.starts, self.inverse, self.weight,
            keys.offsets, keys.positions,
        )  # fmt: skip
        if self.moves:
            self.group.add_unique_gradient(self.look_up, dvectors)
        return (dweight,)


class EmbeddingMLP(Module):
    """``mlp(embedding(ids).reshape(B, F * D))``. ids (B, F) -> (B, out_features).

    On the CPU a narrow first layer (H <= 4 D) is computed once a unique id instead of once an
    occurrence, and the (B, F * D) array and its gradient are never written: see
    `cupyrec.ops.embedding_linear`. The result is the same but for the order of summation.

    Parameters
    ----------
    embedding : MultiTableEmbedding
        Of one width, without pooling.
    hidden_features, out_features, **options
        See `FusedMLP`.

    Raises
    ------
    ValueError
        Tables of several widths, or pooling.

    Examples
    --------
    >>> embedding = MultiTableEmbedding(num_tables=3, embedding_dim=4)
    >>> mlp = EmbeddingMLP(embedding, [8], 1, skip_final_activation=True)
    >>> mlp(np.array([[1, 2, 3], [1, 5, 3]])).shape
    (2, 1)
    """

    def __init__(
        self,
        embedding: MultiTableEmbedding,
        hidden_features: Sequence[int],
        out_features: int,
        **options: Any,
    ) -> None:
        if embedding.pooling is not None or embedding.joined:
            raise ValueError(
                "EmbeddingMLP: 'embedding' must have one width and no pooling, got widths "
                f"{sorted(embedding.groups)} and pooling {embedding.pooling!r}."
            )
        self.embedding = embedding
        columns = len(embedding.fields) * embedding.group.width
        self.mlp = FusedMLP(columns, hidden_features, out_features, **options)

    def _by_unique_ids(self, ids: Any) -> bool:
        """Whether the first layer is computed on unique ids."""
        embedding, columns = self.embedding, len(self.mlp.weights[0])
        fields = embedding.fields
        return (
            arrays.device(ids) == "cpu" and ids.ndim == 2 and len(ids) > 0
            and embedding.padding_idx is None and len(set(fields.tolist())) == len(fields)
            and pays(embedding.group.width, columns)
        )  # fmt: skip

    def forward(self, ids: Any) -> Any:
        if not self._by_unique_ids(ids):
            vectors = self.embedding(ids)
            return self.mlp(reshape(vectors, (len(ids), self.mlp.weights[0].shape[1])))
        look_up = self.embedding.look_up_by_field(ids)
        weight, moves = self.mlp.weights[0], self.embedding.training
        node = _FirstLayer(self.embedding.group, look_up, weight.data, len(ids), moves)
        if autograd.is_recording():
            return self.mlp.after_first(autograd.record(node, node.y, (weight,)))
        return self.mlp.after_first(autograd.Tensor(node.y))

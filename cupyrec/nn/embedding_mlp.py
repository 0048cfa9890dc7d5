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
from cupyrec.ops.relu_dropout import Dropout

__all__ = ["EmbeddingMLP"]


class _FirstLayer(autograd.Function):
    """The first layer on the tape: its gradient goes to weight, bias and tables."""

    def __init__(
        self, group: Group, look_up: LookUp, weight: Any, bias: Any, dropout: Dropout,
        linear_output: bool, samples: int, moves: bool,
    ) -> None:  # fmt: skip
        self.group, self.look_up, self.moves = group, look_up, moves
        self.options = dict(dropout=dropout, linear_output=linear_output)
        inverse = look_up.inverse.reshape(weight.shape[1] // group.width, samples)
        # Keys are numbered as they come: that of a field's first sample is the field's first.
        starts = np.append(inverse[:, :1].max(axis=1, initial=0), len(look_up.keys.ids))
        self.layer = group.unique_vectors(look_up), starts, inverse, weight
        self.y = embedding_linear(*self.layer, bias, **self.options)

    def backward(self, grad):
        dvectors, *gradients, squares = embedding_linear_backward(
            grad, self.y, *self.layer, **self.options
        )
        if self.moves:
            self.group.add_unique_gradient(self.look_up, dvectors, squares)
        return tuple(gradients)


class EmbeddingMLP(Module):
    """``mlp(embedding(ids).reshape(B, F * D))``. ids (B, F) -> (B, out_features).

    On the CPU a narrow first layer (H <= 4 D) is computed once a unique id instead of once an
    occurrence, and the (B, F * D) array and its gradient are never written: see
    `cupyrec.ops.embedding_linear`. The result is the same but for the order of summation.

    Parameters
    ----------
    embedding : MultiTableEmbedding
        Of one width, without pooling or `max_length`.
    hidden_features, out_features, **options
        See `FusedMLP`.

    Raises
    ------
    ValueError
        Tables of several widths, pooling or `max_length`.

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
        if embedding.pooling is not None or embedding.max_length is not None or embedding.joined:
            raise ValueError(
                "EmbeddingMLP: 'embedding' must have one width, no pooling and no max_length, got "
                f"widths {sorted(embedding.groups)}, pooling {embedding.pooling!r} and max_length "
                f"{embedding.max_length}."
            )
        self.embedding = embedding
        columns = len(embedding.fields) * embedding.group.width
        self.mlp = FusedMLP(columns, hidden_features, out_features, **options)

    def _by_unique_ids(self, ids: Any) -> bool:
        """Whether the first layer is computed on unique ids; the same on ranks without rows."""
        embedding, columns = self.embedding, len(self.mlp.weights[0])
        fields = embedding.fields
        return (
            arrays.device(ids) == "cpu" and ids.ndim == 2
            and embedding.padding_idx is None and len(set(fields.tolist())) == len(fields)
            and pays(embedding.group.width, columns) and self.mlp.amp is None and not self.mlp.norms
        )  # fmt: skip

    def forward(self, ids: Any) -> Any:
        if not self._by_unique_ids(ids):
            vectors = self.embedding(ids)
            return self.mlp(reshape(vectors, (len(ids), self.mlp.weights[0].shape[1])))
        mlp, moves = self.mlp, self.embedding.training
        linear = len(mlp.weights) == 1 and mlp.skip_final_activation
        node = _FirstLayer(
            self.embedding.group, self.embedding.look_up_by_field(ids),
            mlp.weights[0].data, mlp.biases[0].data, mlp.dropouts()[0], linear, len(ids), moves,
        )  # fmt: skip
        if autograd.is_recording():
            return mlp.after_first(autograd.record(node, node.y, (mlp.weights[0], mlp.biases[0])))
        return mlp.after_first(autograd.Tensor(node.y))

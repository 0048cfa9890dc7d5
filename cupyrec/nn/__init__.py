"""Layers to build models of."""

from cupyrec.nn.embedding_mlp import EmbeddingMLP
from cupyrec.nn.interaction import (
    CompressedInteraction,
    FusedCrossInteraction,
    FusedDotInteraction,
)
from cupyrec.nn.mlp import FusedMLP
from cupyrec.nn.module import Buffer, Module, Parameter
from cupyrec.nn.multi_table_embedding import MultiTableEmbedding
from cupyrec.nn.normalization import BatchNorm1d, LayerNorm

__all__ = [
    "BatchNorm1d", "Buffer", "CompressedInteraction", "EmbeddingMLP", "FusedCrossInteraction",
    "FusedDotInteraction", "FusedMLP", "LayerNorm", "Module", "MultiTableEmbedding", "Parameter",
]  # fmt: skip

"""Layers to build models of."""

from cupyrec.nn.interaction import FusedDotInteraction
from cupyrec.nn.mlp import FusedMLP
from cupyrec.nn.module import Module, Parameter
from cupyrec.nn.multi_table_embedding import MultiTableEmbedding

__all__ = ["FusedDotInteraction", "FusedMLP", "Module", "MultiTableEmbedding", "Parameter"]

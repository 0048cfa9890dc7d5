"""Feature interactions as layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyrec import errors, random
from cupyrec.nn.module import Module, Parameter
from cupyrec.ops.array_functions import concatenate, contiguous, reshape, transpose
from cupyrec.ops.cast import cast, padded_width, widen
from cupyrec.ops.compressed_interaction import compressed_interaction
from cupyrec.ops.cross_matrix import cross_matrix
from cupyrec.ops.cross_vector import cross_vector
from cupyrec.ops.dot_interaction import dot_interaction, dot_interaction_width
from cupyrec.ops.factorization_machine import factorization_machine
from cupyrec.ops.row_vectors import RowVectors

__all__ = [
    "CompressedInteraction", "FusedCrossInteraction", "FusedDotInteraction", "side_by_side",
]  # fmt: skip


class CompressedInteraction(Module):
    """Products of embeddings, column by column, compressed. vectors (B, F, D) -> (B, width).

    Layer l multiplies each feature map of the layer before with each embedding, and makes
    `layers[l]` feature maps of weighted sums of these products; a map's columns are added up.

    Parameters
    ----------
    features : int
        F.
    layers : sequence of int
        Feature maps of each layer, at least one layer.
    split_half : bool
        Whether of each layer but the last one half goes on, and the other half comes out.
    linear : bool
        Whether feature maps go without ReLU.

    Attributes
    ----------
    width : int
        Number of output columns.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer, there is no layer, or an odd one to be split.

    Notes
    -----
    Lian et al. 2018, "xDeepFM", whose code has ReLU and splits; FuxiCTR's has neither. Weights
    start uniform in +-1/sqrt(fan-in), biases as 0.

    Examples
    --------
    >>> layer = CompressedInteraction(5, [8, 6])
    >>> layer(np.zeros((2, 5, 4), np.float32)).shape, layer.width
    ((2, 10), 10)
    """

    def __init__(
        self,
        features: int,
        layers: Sequence[int] = (256, 128),
        split_half: bool = True,
        linear: bool = False,
    ) -> None:
        features = errors.positive("CompressedInteraction", "features", features)
        sizes = [errors.positive("CompressedInteraction", "layers", n) for n in layers]
        odd = [n for n in sizes[:-1] if n % 2] if split_half else []
        if not sizes or odd:
            raise ValueError(
                "CompressedInteraction: 'layers' must be one or more, those that are split even, "
                f"got {list(layers)}."
            )
        self.split_half, self.linear = split_half, linear
        generator, before = random.generator(), features
        self.weights, self.biases, self.width = [], [], 0
        for i, n in enumerate(sizes):
            bound = 1 / math.sqrt(before * features)
            values = generator.uniform(-bound, bound, (n, before, features))
            self.weights.append(Parameter(values.astype(np.float32)))
            self.biases.append(Parameter(np.zeros(n, np.float32)))
            before = n // 2 if split_half and i < len(sizes) - 1 else n
            self.width += before  # as many come out as go on

    def forward(self, vectors: Any) -> Any:
        batch, features, width = vectors.shape
        columns = contiguous(transpose(widen(vectors), (0, 2, 1)))
        x = x0 = reshape(columns, (batch * width, features))
        maps = []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = compressed_interaction(
                x, x0, weight, bias,
                linear_output=self.linear, rectified=i > 0 and not self.linear, amp=self.amp,
            )  # fmt: skip
            sums = reshape(x, (batch, width, x.shape[1])).sum(axis=1)
            if self.split_half and i < len(self.weights) - 1:
                half = x.shape[1] // 2
                sums, x = sums[:, half:], x[:, :half]
            maps.append(sums)
        return concatenate(maps, axis=1)


class FusedCrossInteraction(Module):
    """A layer of a cross network. x (B, features), x0 (B, features) -> (B, features).

    Parameters
    ----------
    features : int
    mode : {"matrix", "vector"}
        "matrix": x0 * (x @ weight.T + bias) + x of DCN-v2 (Wang et al. 2021), whose matmul is in
        the type of `amp`. "vector": x0 * (x . weight) + bias + x of DCN (Wang et al. 2017), float32
        with any.
    tf32 : bool
        Whether a GPU may round what it multiplies to TF32, 10 bits of the fraction.

    Raises
    ------
    ValueError, TypeError
        `features` is not a positive integer, or another `mode`.

    Notes
    -----
    OneFlow's ``FusedCrossFeatureInteraction``. `weight` starts uniform in +-1/sqrt(features),
    `bias` as 0.

    Examples
    --------
    >>> layer = FusedCrossInteraction(3)
    >>> x0 = np.ones((2, 3), np.float32)
    >>> layer(x0, x0).shape, layer.weight.shape
    ((2, 3), (3, 3))
    """

    def __init__(self, features: int, mode: str = "matrix", tf32: bool = False) -> None:
        features = errors.positive("FusedCrossInteraction", "features", features)
        if mode not in ("matrix", "vector"):
            raise ValueError(
                f"FusedCrossInteraction: 'mode' must be 'matrix' or 'vector', got {mode!r}."
            )
        self.mode, self.tf32 = mode, tf32
        shape = (features, features) if mode == "matrix" else (features,)
        bound = 1 / math.sqrt(features)
        values = random.generator().uniform(-bound, bound, shape)
        self.weight = Parameter(values.astype(np.float32))
        self.bias = Parameter(np.zeros(features, np.float32))

    def forward(self, x: Any, x0: Any) -> Any:
        if self.mode == "vector":
            return cross_vector(x, x0, self.weight, self.bias)
        return cross_matrix(x, x0, self.weight, self.bias, amp=self.amp, tf32=self.tf32)


class FusedDotInteraction(Module):
    """Dot products of all pairs of features. dense (B, D), sparse (B, F, D) -> (B, width).

    With `amp` both are cast to that type, and so are the products; the sum of `pooling` is float32.
    Zero columns then fill the rows up to whole 16 bytes with `whole_rows`.

    Parameters
    ----------
    self_interaction : bool
        Whether a feature's product with itself is among the pairs.
    output_concat : bool
        Whether `dense` is put before the products.
    output_padding : int
        Number of zero columns at the end.
    pooling : {"none", "sum"}
        "sum" adds up all pairs into one column (a factorization machine, Rendle 2010); it takes
        neither `self_interaction`, `output_padding` nor, since there is nothing to put `dense`
        before, `output_concat`: pass False.
    whole_rows : bool
        Whether with `amp` there are as many zero columns more, beyond `width`, as a `FusedMLP` of
        `width` inputs otherwise copies rows for.

    Raises
    ------
    ValueError
        Another `pooling`, or options that it doesn't take.

    Examples
    --------
    >>> import numpy as np
    >>> interaction = FusedDotInteraction()
    >>> dense, sparse = np.ones((2, 4), np.float32), np.ones((2, 3, 4), np.float32)
    >>> interaction(dense, sparse).shape, interaction.width(4, 4)
    ((2, 10), 10)
    """

    def __init__(
        self,
        self_interaction: bool = False,
        output_concat: bool = True,
        output_padding: int = 0,
        pooling: str = "none",
        whole_rows: bool = False,
    ) -> None:
        if pooling not in ("none", "sum"):
            raise ValueError(
                f"FusedDotInteraction: 'pooling' must be 'none' or 'sum', got {pooling!r}."
            )
        if pooling == "sum" and (self_interaction or output_concat or output_padding):
            raise ValueError(
                "FusedDotInteraction: pooling='sum' takes no self_interaction, output_concat or "
                f"output_padding, got {self_interaction}, {output_concat}, {output_padding}."
            )
        self.options = dict(
            self_interaction=self_interaction,
            output_concat=output_concat,
            output_padding=output_padding,
        )
        self.pooling, self.whole_rows = pooling, whole_rows

    def width(self, features: int, embedding_dim: int) -> int:
        """Return the number of output columns for `features` features, `dense` included.

        Examples
        --------
        >>> FusedDotInteraction(self_interaction=True).width(27, 16)
        394
        """
        if self.pooling == "sum":
            return 1
        return dot_interaction_width(features, embedding_dim, **self.options)

    def forward(self, dense: Any, sparse: Any) -> Any:
        if self.amp is not None:
            dense = None if dense is None else cast(dense, self.amp)
            if not isinstance(sparse, RowVectors) or sparse.dtype != self.amp:
                sparse = cast(sparse, self.amp)
        if self.pooling == "sum":
            return factorization_machine(dense, sparse)
        options = dict(self.options)
        if self.whole_rows and self.amp is not None:
            width = self.width(sparse.shape[1] + (dense is not None), sparse.shape[2])
            options["output_padding"] += padded_width(width) - width
        return dot_interaction(dense, sparse, **options)


def side_by_side(dense: Any, vectors: Any) -> Any:
    """Return dense (B, N), if any, and vectors (B, F, D) as (B, N + F D), of the vectors' type.

    Examples
    --------
    >>> dense, vectors = np.zeros((4, 13), np.float32), np.zeros((4, 26, 8), np.float16)
    >>> side_by_side(dense, vectors).shape
    (4, 221)
    """
    batch, fields, width = vectors.shape
    flat = reshape(vectors, (batch, fields * width))
    if dense is None:
        return flat
    return concatenate([cast(dense, vectors.dtype), flat], axis=1)

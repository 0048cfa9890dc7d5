"""Feature interactions as layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyrec import errors, random
from cupyrec.nn.module import Module, Parameter
from cupyrec.ops.array_functions import concatenate, reshape
from cupyrec.ops.cast import cast, padded_width
from cupyrec.ops.cross_matrix import cross_matrix
from cupyrec.ops.cross_vector import cross_vector
from cupyrec.ops.dot_interaction import dot_interaction, dot_interaction_width
from cupyrec.ops.factorization_machine import factorization_machine
from cupyrec.ops.row_vectors import RowVectors

__all__ = ["FusedCrossInteraction", "FusedDotInteraction", "side_by_side"]


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
    """Return dense (B, N), if any, and vectors (B, F, D) as (B, N + F D).

    Examples
    --------
    >>> side_by_side(np.zeros((4, 13)), np.zeros((4, 26, 8))).shape
    (4, 221)
    """
    batch, fields, width = vectors.shape
    flat = reshape(vectors, (batch, fields * width))
    return flat if dense is None else concatenate([dense, flat], axis=1)

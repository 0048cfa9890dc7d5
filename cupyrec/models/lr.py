"""LR: logistic regression on ids and dense features, the baseline of all others."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyrec import nn
from cupyrec.graph import graphed
from cupyrec.nn import Parameter
from cupyrec.ops.cast import widen

__all__ = ["LR", "FirstOrder"]


class FirstOrder(nn.Module):
    """The sum of a sample's weights. dense (B, num_dense), weights (B, F, 1) -> (B, 1).

    Parameters
    ----------
    num_dense : int
        Dense features, each with a weight to be learnt, which starts as 0.
    bias : bool
        Whether a number is added that is the same for all samples; another part of a model may have
        one already.

    Examples
    --------
    >>> FirstOrder(0)(None, np.ones((2, 3, 1), np.float32)).shape
    (2, 1)
    """

    def __init__(self, num_dense: int, bias: bool = True) -> None:
        self.weight = Parameter(np.zeros((num_dense, 1), np.float32)) if num_dense else None
        self.bias = Parameter(np.zeros(1, np.float32)) if bias else None

    def forward(self, dense: Any, weights: Any) -> Any:
        total = widen(weights).sum(axis=1)
        if self.bias is not None:
            total = total + self.bias
        return total if self.weight is None else total + dense @ self.weight


class LR(nn.Module):
    """A weight an id and a dense feature. dense (B, num_dense), ids (B, num_tables) -> (B, 1).

    Parameters
    ----------
    num_dense : int
        0 for a log without numeric features.
    num_tables : int
    embedding_dtype : str
        Of weights of ids in memory: ``float32``, ``float16``, ``bfloat16``; to serve ``int8``.

    Raises
    ------
    ValueError, TypeError
        `num_tables` is not a positive integer.

    Notes
    -----
    McMahan et al. 2013, "Ad click prediction: a view from the trenches", which trains it by FTRL.

    Examples
    --------
    >>> LR(num_dense=1, num_tables=2)(np.ones((4, 1), np.float32), np.zeros((4, 2), np.int64)).shape
    (4, 1)
    """

    by_blocks = True

    def __init__(
        self, num_dense: int = 13, num_tables: int = 26, embedding_dtype: str = "float32"
    ) -> None:
        self.embedding = nn.MultiTableEmbedding(num_tables, 1, dtype=embedding_dtype)
        self.first_order = FirstOrder(num_dense)

    def forward(self, dense: Any, ids: Any) -> Any:
        return self._towers(dense, self.embedding(ids))

    def prepare(self, ids: Any) -> None:
        self.embedding.prepare(ids)

    @graphed
    def _towers(self, dense: Any, weights: Any) -> Any:
        return self.first_order(dense, weights)

"""MMoE: multi-gate mixture of experts (Ma et al. 2018), and the shared bottom it is compared to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyrec import errors, nn
from cupyrec.graph import graphed
from cupyrec.nn.interaction import side_by_side
from cupyrec.ops.array_functions import concatenate, matmul, reshape, softmax, stack
from cupyrec.ops.cast import widen

__all__ = ["MMoE", "SharedBottom", "Towers"]


class Towers(nn.Module):
    """An MLP a task, each on features of its own. T arrays (B, in_features) -> logits (B, T).

    Parameters
    ----------
    in_features, num_tasks : int
    hidden_features : sequence of int
        Hidden layers of each; may be empty.
    dropout : float
        Rate in them.
    batch_norm : bool
        Whether they are normalized over the batch, see `FusedMLP`.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros((4, 8), np.float32)
    >>> Towers(8, num_tasks=2, hidden_features=[5])([x, x]).shape
    (4, 2)
    """

    def __init__(
        self,
        in_features: int,
        num_tasks: int,
        hidden_features: Sequence[int],
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        options = dict(skip_final_activation=True, batch_norm=batch_norm)
        self.mlps = [
            nn.FusedMLP(in_features, hidden_features, 1, dropout, **options)
            for _ in range(errors.positive("Towers", "num_tasks", num_tasks))
        ]

    def forward(self, features: Sequence[Any]) -> Any:
        logits = [mlp(x) for mlp, x in zip(self.mlps, features, strict=True)]
        return concatenate(logits, axis=1)


class SharedBottom(nn.Module):
    """One MLP on dense features and embeddings, on whose output each task has a tower.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, num_tasks).

    Parameters
    ----------
    num_dense : int
        0 for a log without numeric features.
    num_tables : int
    num_tasks : int
    embedding_dim : int
        D.
    bottom : sequence of int
        Layers of the shared MLP, at least one.
    tower : sequence of int
        Hidden layers of each task's MLP; may be empty.
    dropout : float
        Rate in the layers of all MLPs.
    embedding_dtype : str
        Of embedding vectors in memory: ``float32``, ``float16``, ``bfloat16``; to serve ``int8``.
    batch_norm : bool
        Whether layers with ReLU of all MLPs are normalized over the batch, see `FusedMLP`.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer, or there is no layer.

    Examples
    --------
    >>> import numpy as np
    >>> model = SharedBottom(num_dense=13, num_tables=26, num_tasks=3, embedding_dim=8, bottom=[16])
    >>> model(np.zeros((4, 13), np.float32), np.zeros((4, 26), np.int64)).shape
    (4, 3)
    """

    by_blocks = True

    def __init__(
        self,
        num_dense: int = 13,
        num_tables: int = 26,
        num_tasks: int = 2,
        embedding_dim: int = 16,
        bottom: Sequence[int] = (512, 256),
        tower: Sequence[int] = (64,),
        dropout: float = 0.0,
        embedding_dtype: str = "float32",
        batch_norm: bool = False,
    ) -> None:
        *hidden, last = _layers("SharedBottom", "bottom", bottom)
        self.num_dense, self.num_tasks = num_dense, num_tasks
        self.embedding = nn.MultiTableEmbedding(num_tables, embedding_dim, dtype=embedding_dtype)
        width = num_dense + num_tables * embedding_dim
        self.bottom = nn.FusedMLP(width, hidden, last, dropout, dropout, batch_norm=batch_norm)
        self.towers = Towers(last, num_tasks, tower, dropout, batch_norm)

    def forward(self, dense: Any, ids: Any) -> Any:
        return self._towers(dense if self.num_dense else None, self.embedding(ids))

    def prepare(self, ids: Any) -> None:
        self.embedding.prepare(ids)

    @graphed
    def _towers(self, dense: Any, vectors: Any) -> Any:
        shared = self.bottom(side_by_side(dense, widen(vectors)))
        return self.towers([shared] * self.num_tasks)


class MMoE(nn.Module):
    """Experts, MLPs that all tasks share; each task mixes them by a gate and has a tower on top.

    dense (B, num_dense) float32, ids (B, num_tables) int64 -> logits (B, num_tasks). With x dense
    features and embeddings side by side, and W_t (E, N) and b_t the gate of task t,

        logit_t = tower_t(sum over e of softmax(W_t x + b_t)_e * expert_e(x))

    Parameters
    ----------
    num_dense, num_tables, num_tasks, embedding_dim
        See `SharedBottom`.
    experts : int
        E.
    expert : sequence of int
        Layers of each expert, at least one.
    tower, dropout, embedding_dtype, batch_norm
        See `SharedBottom`; gates have no dropout, nor are they normalized.

    Raises
    ------
    ValueError, TypeError
        A size is not a positive integer, or there is no layer.

    Examples
    --------
    >>> import numpy as np
    >>> model = MMoE(num_dense=13, num_tables=26, num_tasks=3, embedding_dim=8, expert=[16])
    >>> model(np.zeros((4, 13), np.float32), np.zeros((4, 26), np.int64)).shape
    (4, 3)
    """

    by_blocks = True

    def __init__(
        self,
        num_dense: int = 13,
        num_tables: int = 26,
        num_tasks: int = 2,
        embedding_dim: int = 16,
        experts: int = 3,
        expert: Sequence[int] = (256, 128),
        tower: Sequence[int] = (64,),
        dropout: float = 0.0,
        embedding_dtype: str = "float32",
        batch_norm: bool = False,
    ) -> None:
        first, *rest = _layers("MMoE", "expert", expert)
        experts = errors.positive("MMoE", "experts", experts)
        self.num_dense, self.num_tasks, self.num_experts = num_dense, num_tasks, experts
        self.embedding = nn.MultiTableEmbedding(num_tables, embedding_dim, dtype=embedding_dtype)
        width = num_dense + num_tables * embedding_dim
        # The first layers of all experts, and all gates, are one matmul each.
        self.first = nn.FusedMLP(
            width, [], experts * first, out_dropout_rate=dropout, batch_norm=batch_norm
        )
        self.rest = [
            nn.FusedMLP(first, rest[:-1], rest[-1], dropout, dropout, batch_norm=batch_norm)
            for _ in range(experts if rest else 0)
        ]
        gates = errors.positive("MMoE", "num_tasks", num_tasks) * experts
        self.gates = nn.FusedMLP(width, [], gates, skip_final_activation=True)
        self.towers = Towers([first, *rest][-1], num_tasks, tower, dropout, batch_norm)

    def forward(self, dense: Any, ids: Any) -> Any:
        return self._towers(dense if self.num_dense else None, self.embedding(ids))

    def prepare(self, ids: Any) -> None:
        self.embedding.prepare(ids)

    @graphed
    def _towers(self, dense: Any, vectors: Any) -> Any:
        x = side_by_side(dense, widen(vectors))
        batch = x.shape[0]
        outputs = self.first(x)
        outputs = reshape(outputs, (batch, self.num_experts, outputs.shape[1] // self.num_experts))
        if self.rest:
            outputs = stack([mlp(outputs[:, e]) for e, mlp in enumerate(self.rest)], axis=1)
        gates = reshape(self.gates(x), (batch, self.num_tasks, self.num_experts))
        mixed = matmul(softmax(gates), outputs)  # (B, T, H)
        return self.towers([mixed[:, task] for task in range(self.num_tasks)])


def _layers(where: str, name: str, sizes: Sequence[int]) -> list[int]:
    if not sizes:
        raise ValueError(f"{where}: '{name}' must have a layer or more, got {sizes!r}.")
    return [errors.positive(where, name, n) for n in sizes]

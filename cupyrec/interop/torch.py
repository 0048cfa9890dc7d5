"""Embedding tables in a PyTorch model: a layer whose look-ups stand on torch's tape.

Arrays cross by DLPack, which copies nothing. Rows are not torch's parameters: an optimizer of
cupyrec updates them. See docs/pytorch.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyrec import arrays, nn
from cupyrec.autograd import Tensor, no_grad
from cupyrec.embedding import InitialVectors, export_rows, import_vectors

try:
    import torch
except ImportError:
    raise ImportError(
        "cupyrec.interop.torch: needs PyTorch, pip install 'cupyrec[torch]'."
    ) from None

__all__ = ["MultiTableEmbedding"]

_NAME = "MultiTableEmbedding"
_DTYPES = {
    "ids": (torch.int64, torch.int32, torch.uint64, torch.uint32),
    "offsets": (torch.int64, torch.int32),
    "weights": (torch.float32,),
}


class _LookUp(torch.autograd.Function):
    """A look-up on torch's tape, from where cupyrec's goes on."""

    @staticmethod
    def forward(ctx, hook, weights, layer, ids, offsets):
        ctx.weights = layer._array("weights", weights)
        if ctx.needs_input_grad[1]:
            ctx.weights = Tensor(ctx.weights, requires_grad=True)
        ctx.vectors = layer.tables(ids, offsets, ctx.weights)
        ctx.stream = _stream(ids)
        return _tensor(ctx.vectors.data)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        with ctx.stream:  # torch walks a GPU's tape in another thread
            ctx.vectors.backward(_shared(grad))
            learnt = _tensor(ctx.weights.grad) if ctx.needs_input_grad[1] else None
        return None, learnt, None, None, None


class MultiTableEmbedding(torch.nn.Module):
    """Tables keyed by raw 64-bit ids, as a layer of torch. ids (B, F) -> (B, F, D).

    Training gives an unseen id a row; evaluation gives it its initial vector and changes nothing.
    The rows are updated by an optimizer of cupyrec for ``tables.parameters()``; `parameters` of
    this layer yields none, so that torch's optimizers pass it by.

    ``state_dict`` holds the ids and vectors of this rank's rows, and takes them back on as many
    ranks; optimizer states, and other numbers of ranks, go through `cupyrec.checkpoint` with
    ``tables`` as the model. ``to`` moves the tables too: make the optimizer afterwards.

    Parameters
    ----------
    num_tables : int
    embedding_dim : int or sequence of int
    **options
        As of `cupyrec.nn.MultiTableEmbedding`.

    Attributes
    ----------
    tables : cupyrec.nn.MultiTableEmbedding

    Raises
    ------
    ValueError, TypeError
        As `cupyrec.nn.MultiTableEmbedding`.

    Examples
    --------
    >>> import cupyrec
    >>> embedding = MultiTableEmbedding(num_tables=2, embedding_dim=4)
    >>> optimizer = cupyrec.optim.Adagrad(embedding.tables.parameters(), lr=0.02)
    >>> vectors = embedding(torch.tensor([[-1, 2**62]]))
    >>> vectors.square().sum().backward()
    >>> optimizer.step()
    >>> vectors.shape, len(embedding.tables.group.store)
    (torch.Size([1, 2, 4]), 2)
    """

    def __init__(self, num_tables: int, embedding_dim: int | Sequence[int], **options: Any) -> None:
        super().__init__()
        self.tables = nn.MultiTableEmbedding(num_tables, embedding_dim, **options)
        self.register_buffer("_place", torch.empty(0), persistent=False)  # goes where `to` says

    def extra_repr(self) -> str:
        """Return what torch's repr shows of the tables."""
        return repr(self.tables)

    @torch.compiler.disable  # a model around it compiles
    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look ids up; of several ranks all do so together, each its own.

        Parameters
        ----------
        ids : (B, F), (B, F, L) or with `offsets` (N,) tensor of int64, uint64, int32 or uint32
        offsets : (B * F + 1,) tensor of int64 or int32, optional
        weights : tensor of float32, of the shape of `ids`, optional
            All three as in `cupyrec.nn.MultiTableEmbedding.forward`.

        Returns
        -------
        tensor of float32
            (B, F, D); other shapes as there. Its gradient may be taken once.

        Raises
        ------
        ValueError, TypeError
            Shapes, dtypes or devices that don't agree, or offsets that don't cut `ids`.

        Examples
        --------
        >>> bags = MultiTableEmbedding(1, 4, pooling="mean")
        >>> bags(torch.tensor([5, 6, 5, 7]), torch.tensor([0, 3, 4])).shape
        torch.Size([2, 1, 4])
        """
        self.tables.train(self.training)
        ids, offsets = self._array("ids", ids), self._array("offsets", offsets)
        factors = self._array("weights", weights)
        learns = self.training or (weights is not None and weights.requires_grad)
        if learns and torch.is_grad_enabled():
            hook = torch.empty(0, requires_grad=True)  # torch records what has such an input
            return _LookUp.apply(hook, weights, self, ids, offsets)
        with no_grad():
            vectors = self.tables(ids, offsets, factors)
        return _tensor(vectors.data)

    def _array(self, name: str, tensor: torch.Tensor | None) -> Any:
        """The memory of an argument as an array of the tables' device."""
        if tensor is None:
            return None
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{_NAME}: '{name}' must be a torch.Tensor, got {type(tensor).__name__}."
            )
        if tensor.device.type != self.tables.device:
            raise TypeError(
                f"{_NAME}: '{name}' must be on device '{self.tables.device}' like the tables, "
                f"got '{tensor.device.type}'."
            )
        if tensor.dtype not in _DTYPES[name]:
            allowed = ", ".join(map(str, _DTYPES[name]))
            raise TypeError(f"{_NAME}: '{name}' must be one of {allowed}, got {tensor.dtype}.")
        return _shared(tensor)

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the tables where torch moves tensors."""
        super()._apply(function, recurse)
        if self._place.device.type != self.tables.device:
            self.tables.to(self._place.device.type)
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Return what torch's ``state_dict`` keeps of the tables: tensors and JSON values.

        Examples
        --------
        >>> embedding = MultiTableEmbedding(1, 2)
        >>> _ = embedding(torch.tensor([[7]]))
        >>> embedding.get_extra_state()["groups"][0]["ids"]
        tensor([7])
        """
        ranks, groups = self.tables.ranks, []
        for group in self.tables.groups.values():
            rows = export_rows(group, 0, len(group.store))
            groups.append({
                "tables": torch.from_numpy(rows.tables.astype(np.int64)),
                "ids": torch.from_numpy(rows.ids),
                "vectors": torch.from_numpy(rows.vectors),
                "initial": group.initial.to_dict(), "seed": group.initial.seed,
            })  # fmt: skip
        widths = list(self.tables.widths)
        return {"rank": ranks.rank, "ranks": ranks.size, "widths": widths, "groups": groups}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take what `get_extra_state` returned in place of all rows, whose state starts anew.

        Raises
        ------
        ValueError
            Tables of other widths, or rows of another rank or number of ranks.

        Examples
        --------
        >>> embedding = MultiTableEmbedding(1, 2)
        >>> embedding.set_extra_state(embedding.get_extra_state())
        """
        ranks, groups = self.tables.ranks, self.tables.groups.values()
        if (got := (state["rank"], state["ranks"])) != (ranks.rank, ranks.size):
            raise ValueError(
                f"{_NAME}: a state must be loaded by the rank that it is of (cupyrec.checkpoint "
                f"has those of all), got rank {got[0]} of {got[1]} in rank {ranks.rank} of "
                f"{ranks.size}."
            )
        if state["widths"] != list(self.tables.widths):
            raise ValueError(
                f"{_NAME}: a state must have tables of widths {list(self.tables.widths)}, "
                f"got {state['widths']}."
            )
        for group, entry in zip(groups, state["groups"], strict=True):
            tables, ids, vectors = (
                entry[name].cpu().numpy() for name in ("tables", "ids", "vectors")
            )
            initial = InitialVectors.from_dict(entry["initial"], group.width, entry["seed"])
            group.clear()
            group.initial = initial.to(group.xp)
            import_vectors(group, tables.astype(np.uint32), ids, vectors)


def _tensor(array: Any) -> torch.Tensor:
    """An array's memory as a tensor, copied only if it has gaps."""
    return torch.from_dlpack(array).contiguous()


def _shared(tensor: torch.Tensor) -> Any:
    """A tensor's memory as an array, copied only if it has gaps."""
    xp = arrays.module("cuda" if tensor.is_cuda else "cpu")
    return xp.from_dlpack(tensor.detach().contiguous())


def _stream(array: Any) -> contextlib.AbstractContextManager:
    """Within it work goes to the stream that is current now, in whatever thread."""
    xp = arrays.namespace(_NAME, array)
    return contextlib.nullcontext() if xp is np else xp.cuda.get_current_stream()

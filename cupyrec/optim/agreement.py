"""That all ranks train the same model by the same rule: what differs would drift apart unseen."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from cupyrec import arrays

if TYPE_CHECKING:
    from cupyrec.optim.optimizer import Optimizer

__all__ = ["check_ranks"]


def check_ranks(optimizer: Optimizer) -> None:
    """See that an optimizer is the same on all ranks, and starts from the same parameters.

    Raises
    ------
    ValueError
        Parameters, embedding seeds, settings of the optimizer or codecs of an exchange differ.

    Examples
    --------
    >>> from cupyrec import Tensor
    >>> from cupyrec.optim import SGD
    >>> check_ranks(SGD([Tensor([1.0], requires_grad=True)], lr=0.1))
    """
    where, ranks = type(optimizer).__name__, optimizer.ranks
    if ranks.size == 1:
        return
    own = [zlib.crc32(arrays.to_host(p.data).tobytes()) for p in optimizer.parameters]
    own += [group.initial.seed for group in optimizer.groups]
    told = ranks.all_gather_json("parameters", [own, _settings(optimizer)])
    if different := [rank for rank, others in enumerate(told) if others[0] != told[0][0]]:
        raise ValueError(
            f"{where}: all ranks must start from the same parameters and embedding seeds "
            "(cupyrec.manual_seed gives them), got others on rank "
            f"{', '.join(map(str, different[:8]))} than on rank 0."
        )
    first = told[0][1]
    for rank, (_, others) in enumerate(told):
        for name in dict.fromkeys([*first, *others]):
            if (got := others.get(name)) != (wanted := first.get(name)):
                raise ValueError(
                    f"{where}: all ranks must have the same {name}, got {got} on rank {rank}, "
                    f"{wanted} on rank 0."
                )


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Its class, its numbers, those of its parameter groups, and the exchanges of its tables."""
    own = {k: value for k, value in vars(optimizer).items() if isinstance(value, (int, float))}
    shares = [[share.lr, share.weight_decay, share.l2] for share in optimizer.parameter_groups]
    return {
        "optimizer": type(optimizer).__name__,
        **own,
        "betas": optimizer.betas,
        **getattr(optimizer, "constants", {}),
        "lr, weight_decay and l2 of parameter groups": shares,
        "exchanges of tables": [repr(group.exchange) for group in optimizer.groups],
    }

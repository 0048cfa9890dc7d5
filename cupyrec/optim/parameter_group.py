"""A parameter group: parameters and tables that share a learning rate, in one flat buffer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyrec import arrays, errors
from cupyrec.autograd import Tensor
from cupyrec.embedding import Group

__all__ = ["ParameterGroup"]

_ALIGNED = 64  # floats, 256 bytes: what cublasLt's fastest algorithms ask for
_OPTIONS = {"params", "lr", "weight_decay", "l2"}


class ParameterGroup:
    """Part of what an optimizer updates, with its own rates.

    Attributes
    ----------
    lr : float or None
        Learning rate; None for the optimizer's.
    weight_decay : float
        Decoupled: each step takes lr * weight_decay of a weight; of rows lazily, as they are met.
    l2 : float
        Times the weight, added to its gradient before clipping; tables need `dense_updates`.
    parameters : list of Tensor
    tables : list of Group
    size : int
        N, of all parameters with what aligns them.
    data, grad : (N,) arrays of float32
        All parameters side by side, and their gradients.
    state : dict of str to (N,) array of float32

    Examples
    --------
    >>> group = ParameterGroup("SGD", {"params": [Tensor([1.0], requires_grad=True)], "lr": 0.1})
    >>> group.lr, len(group.parameters)
    (0.1, 1)
    """

    def __init__(self, where: str, options: dict[str, Any], **defaults: float) -> None:
        if unknown := options.keys() - _OPTIONS:
            raise ValueError(
                f"{where}: a parameter group must have keys of {sorted(_OPTIONS)}, "
                f"got {sorted(unknown)}."
            )
        if "params" not in options:
            raise ValueError(f"{where}: a parameter group must have 'params', got {options}.")
        options = {name: value for name, value in options.items() if value is not None}
        self.lr = options.get("lr")
        self.weight_decay = options.get("weight_decay", defaults.get("weight_decay", 0.0))
        self.l2 = options.get("l2", defaults.get("l2", 0.0))
        for name in ("lr", "weight_decay", "l2"):
            if (value := getattr(self, name)) is not None:
                if not 0 <= errors.number(where, name, value) < math.inf:
                    raise ValueError(
                        f"{where}: '{name}' must be finite and not negative, got {value}."
                    )
                setattr(self, name, float(value))
        held = list({id(p): p for p in _listed(options["params"])}.values())  # each once
        if strangers := [p for p in held if not isinstance(p, (Tensor, Group))]:
            raise TypeError(
                f"{where}: 'parameters' must be Tensors and Groups, as Module.parameters yields "
                f"them, got {type(strangers[0]).__name__}."
            )
        self.tables = [p for p in held if isinstance(p, Group)]
        self.parameters = [p for p in held if not isinstance(p, Group)]
        room = [-(-p.size // _ALIGNED) * _ALIGNED for p in self.parameters]
        *self._starts, self.size = np.cumsum([0, *room]).tolist()
        if self.l2 and any(not table.dense_updates for table in self.tables):
            raise ValueError(
                f"{where}: 'l2' must be 0 for tables whose rows are updated lazily "
                "(MultiTableEmbedding(dense_updates=True) takes it; 'weight_decay' works on both), "
                f"got {self.l2}."
            )

    def flatten(self, state: dict[str, float], grad: Any) -> None:
        """Move the parameters into one buffer; states start from values given.

        Gradients that there are move into `grad` (size,), of zeros and of the parameters' device.

        Examples
        --------
        >>> group = ParameterGroup("SGD", {"params": [Tensor([1.0], requires_grad=True)]})
        >>> group.flatten({"m": 0.0}, np.zeros(group.size, np.float32))
        >>> group.data.size, group.state["m"].size
        (64, 64)
        """
        xp = arrays.namespace("flatten", grad)
        self.data, self.grad = xp.zeros(self.size, np.float32), grad
        self.state = {k: xp.full(self.size, value, np.float32) for k, value in state.items()}
        for p, data, own in zip(
            self.parameters, self.views(self.data), self.views(self.grad), strict=True
        ):
            data[...] = p.data
            if p.grad is not None:
                own[...] = p.grad
                p.grad = own
            p.data, p.grad_buffer = data, own

    def views(self, flat: Any) -> list[Any]:
        """Return each parameter's part of a flat buffer, in its shape.

        Examples
        --------
        >>> group = ParameterGroup("SGD", {"params": [Tensor([1.0], requires_grad=True)]})
        >>> group.flatten({}, np.zeros(group.size, np.float32))
        >>> group.views(group.data)
        [array([1.], dtype=float32)]
        """
        parameters = zip(self._starts, self.parameters, strict=True)
        return [flat[i : i + p.size].reshape(p.shape) for i, p in parameters]

    def taken(self) -> list[str]:
        """Return which parameters another optimizer or device has taken away.

        Examples
        --------
        >>> group = ParameterGroup("SGD", {"params": [Tensor([1.0], requires_grad=True)]})
        >>> group.flatten({}, np.zeros(group.size, np.float32))
        >>> group.taken()
        []
        """
        starts = zip(self._starts, self.parameters, strict=True)
        first = arrays.address(self.data)
        # Addresses, since neither identity nor `base` says what a copy of a model shares.
        return [
            f"parameter {number} of shape {p.shape}"
            for number, (i, p) in enumerate(starts)
            if p.size and arrays.address(p.data) != first + 4 * i
        ]

    def scaled_l2(self, loss_scale: Any = None) -> Any:
        """Return `l2` times the loss scale, an array of one, if there is one; None for an l2 of 0.

        Examples
        --------
        >>> group = ParameterGroup("SGD", {"params": [], "l2": 0.5})
        >>> group.scaled_l2(), group.scaled_l2(np.full(1, 8, np.float32))
        (np.float32(0.5), array([4.], dtype=float32))
        """
        if not self.l2:
            return None
        return np.float32(self.l2) if loss_scale is None else loss_scale * np.float32(self.l2)

    def collect(self) -> None:
        """See that every gradient stands in the flat buffer.

        Examples
        --------
        See `gradient`.
        """
        for p in self.parameters:
            if p.grad is None:
                p.grad_buffer[...] = 0
            elif p.grad is not p.grad_buffer:  # set by hand
                p.grad_buffer[...] = p.grad

    def gradient(self, loss_scale: Any = None) -> Any:
        """Return the flat buffer's gradients with that of `l2`.

        A loss scale, an array of one, says by what the gradients are too large.

        Examples
        --------
        >>> w = Tensor([1.0], requires_grad=True)
        >>> group = ParameterGroup("SGD", {"params": [w], "l2": 0.5})
        >>> group.flatten({}, np.zeros(group.size, np.float32))
        >>> group.collect()
        >>> group.gradient()[0]
        np.float32(0.5)
        """
        l2 = self.scaled_l2(loss_scale)
        return self.grad if l2 is None else self.grad + l2 * self.data


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, (Tensor, Group)) else list(params)

"""Whether a checkpoint is one of a model and its optimizer, by its manifest and tensors' names."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cupyrec.checkpoint_shards import served_groups
from cupyrec.embedding import LIFE
from cupyrec.nn import Module
from cupyrec.optim import Optimizer

__all__ = ["check_fits", "check_states", "parameters", "states"]


def check_fits(
    path: Path, manifest: dict[str, Any], model: Module, optimizer: Optimizer | None = None
) -> None:
    """Raise unless a checkpoint is of such a model and optimizer.

    Parameters
    ----------
    path : path
    manifest : dict
        Of the checkpoint there.
    model : Module
    optimizer : Optimizer, optional

    Raises
    ------
    ValueError
        It is of another class, other groups of tables, state or schedule.

    Examples
    --------
    >>> import tempfile
    >>> from cupyrec import checkpoint
    >>> from cupyrec.models import DLRM
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(folder + "/c", DLRM(2, 3))
    ...     check_fits(Path(folder, "c"), checkpoint.read_manifest(folder + "/c"), DLRM(2, 3))
    """
    if manifest["model"] != type(model).__name__:
        raise ValueError(
            f"checkpoint.load: '{path}' must be of model {type(model).__name__}, "
            f"got {manifest['model']}."
        )
    groups = [(name, group.width, group.dtype) for name, group in model.named_groups()]
    entries = {entry["name"]: entry for entry in manifest["groups"]}
    saved = [(e["name"], e["width"], e["dtype"]) for e in served_groups(manifest)]
    told = slice(None) if optimizer is not None else slice(2)  # what is served may be of any dtype
    if [group[told] for group in groups] != [group[told] for group in saved]:
        raise ValueError(
            f"checkpoint.load: '{path}' must have the model's groups {groups}, got {saved}."
        )
    if optimizer is not None:
        got = (manifest["optimizer"] or {}).get("class")
        if got != type(optimizer).__name__:
            raise ValueError(
                f"checkpoint.load: '{path}' must have the state of {type(optimizer).__name__}, "
                f"got {got}."
            )
        for name, group in model.named_groups():
            entry = entries[name]
            own = None if group.history is None else group.history.constants
            if own != entry["history"]:  # rows would go on by the saved ones, the rest by others
                raise ValueError(
                    f"checkpoint.load: rows of '{name}' catch up by {entry['history']} in "
                    f"'{path}', which the optimizer must have, got {own}."
                )
        state = manifest["optimizer"]["schedule"]
        if state is not None and not hasattr(optimizer.schedule, "load_state_dict"):
            raise ValueError(
                "checkpoint.load: 'optimizer' must have a schedule with a state, as that of "
                f"'{path}' has {state}, got {optimizer.schedule}."
            )
        if state is not None:  # refused or half loaded, it would be a copy
            copy.deepcopy(optimizer.schedule).load_state_dict(state)


def check_states(
    path: Path, manifest: dict[str, Any], names: Iterable[str], model: Module, optimizer: Optimizer
) -> None:
    """Raise unless a checkpoint has the optimizer's states, dense and rows, and no others.

    `names` are those in dense.safetensors, the other parameters those of `check_fits`.

    Raises
    ------
    ValueError
        It hasn't.

    Examples
    --------
    See `cupyrec.checkpoint.load`.
    """
    saved = {name for name in names if name.startswith("optimizer/")}
    own = {name for name, _ in model.named_groups()}
    saved |= {
        f"rows/{entry['name']}/{name}"
        for entry in manifest["groups"] if entry["name"] in own
        for name, *_ in entry["state"] if name != LIFE.name  # whose account may begin or end
    }  # fmt: skip
    wanted = states(model, optimizer).keys() | {
        f"rows/{name}/{part.name}"
        for name, group in model.named_groups()
        for part in group.optimizer_state
    }
    for name in sorted(wanted ^ saved)[:1]:
        what = f"have {name}, got no" if name in wanted else f"not have {name}, got"
        raise ValueError(f"checkpoint.load: '{path}' must {what} such state.")


def parameters(dense: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a model's parameters and buffers, by name, of a checkpoint's dense arrays.

    Examples
    --------
    >>> parameters({"parameter/w": np.ones(1), "optimizer/v/w": np.ones(1)})
    {'w': array([1.])}
    """
    prefix = "parameter/"
    return {key.removeprefix(prefix): a for key, a in dense.items() if key.startswith(prefix)}


def states(model: Module, optimizer: Optimizer | None) -> dict[str, np.ndarray]:
    """Return the optimizer's state of dense parameters: name in the file -> view.

    Raises
    ------
    ValueError
        The optimizer has parameters that the model hasn't.

    Examples
    --------
    >>> from cupyrec.models import DLRM
    >>> states(DLRM(2, 3), None)
    {}
    """
    if optimizer is None:
        return {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if strangers := [p.shape for p in optimizer.parameters if id(p) not in names]:
        raise ValueError(
            f"checkpoint: the optimizer's parameters must be the model's, got also {strangers}."
        )
    return {
        f"optimizer/{state}/{names[id(parameter)]}": view
        for state, views in optimizer.state_arrays().items()
        for parameter, view in zip(optimizer.parameters, views, strict=True)
    }

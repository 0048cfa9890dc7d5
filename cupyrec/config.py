"""The configuration of a training run: defaults, then a TOML file, then single settings."""

from __future__ import annotations

import difflib
import json
import math
import os
import tomllib
from collections.abc import Iterable
from typing import Any

__all__ = ["DEFAULTS", "override", "parse_setting", "read", "to_toml"]

#: Every setting but the model's own, with its default; 0 switches off where it says so.
DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {
        "name": "dlrm",
        "initial_range": 0.05,
        "dense_updates": False,  # whether each step moves rows that aren't in the batch too
        "pooling": "mean",  # or sum: of bags of ids
    },
    "training": {
        "seed": 0,
        "epochs": 1,
        "batch_size": 1024,
        "amp": "float32",  # or float16, bfloat16: the type that is multiplied in
        "eval_every": 0,  # steps; 0: at the end of each epoch alone
        "deltas": 0,  # checkpoints from one that holds all to the next that does; 0: all do
        "save_every": 0,  # steps; 0: at evaluations and epochs' ends alone
        "patience": 0,  # evaluations without a better AUC; 0: never stop early
        "min_delta": 0.0,  # an AUC is better by more than this
        "positive_weight": 1.0,  # factor of the losses of samples whose label is 1
        "task_weights": [],  # factor of each task's loss; []: 1
    },
    "embedding": {
        "tier": "memory",  # or cached_host, cached_ssd: where tables keep their rows
        "cache_mb": 256.0,  # of both: 10^6 bytes of the device's cache, for each width of tables
        "host_cache_mb": 0.0,  # of cached_ssd: of a second cache in the host's memory, 0: none
        "path": "",  # of cached_ssd: the folder of rows; "": "tables" in --out
        "direct": False,  # of cached_ssd: whether files are read past the system's page cache
        "admit_after": 1,  # look-ups until an id gets a row
        "admit_probability": 1.0,  # that a step gives it one
        "expire_after": 0,  # steps without a look-up until it loses it; 0: never
        "expire_below": 0,  # look-ups that it must have had by a check
        "max_ids": 0,  # of each table, beyond which the oldest go; 0: no limit
        "check_every": 1000,  # steps between checks of these
    },
    "optimizer": {
        # sgd, adagrad, rowwise_adagrad, adam, adamw, catch_up_adam, ftrl
        "name": "adagrad",
        "lr": 0.02,
        "momentum": 0.0,  # of sgd
        "weight_decay": 0.0,  # decoupled; of rows that are in the batch
        "embedding_l2": 0.0,  # times a row, added to its gradient; needs dense_updates
        "clip_norm": 0.0,  # 0: no clipping
        "schedule": "polynomial",  # or cosine, step, plateau
        "warmup_steps": 0,
        "decay_start": 0,
        "decay_steps": 0,  # 0: no decay; of step: after how many steps the rate falls
        "decay_power": 2.0,
        "decay_factor": 0.1,  # of step and plateau
        "decay_patience": 0,  # of plateau: evaluations
        "decay_threshold": 1e-4,  # of plateau: an AUC is better by more than this
        "decay_min": 0.0,  # of plateau: of lr, where the fall ends
    },
    "exchange": {  # between ranks: none, fp16, bf16 or int8
        "forward": "none",  # of rows
        "backward": "none",  # of gradients
        "evaluation": "",  # of rows in evaluation; "": that of forward
        "rounding": "nearest",  # of gradients by their codec; or stochastic
    },
    "evaluation": {"group": ""},  # column of ids whose groups GAUC is of; "": none
    "data": {"buckets": True, "on_error": "raise", "shuffle": 0},  # rows, 0: none
}

_KINDS = {int: "an integer", float: "a number", str: "a string", list: "a list"}


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Return a TOML file as nested dicts.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        It is no file.
    ValueError
        It is not TOML.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
    ...     _ = file.write("[training]\\nepochs = 2\\n")
    ...     file.flush()
    ...     read(file.name)
    {'training': {'epochs': 2}}
    """
    try:
        with open(path, "rb") as stream:
            return tomllib.load(stream)
    except (FileNotFoundError, IsADirectoryError) as error:
        found = "nothing" if isinstance(error, FileNotFoundError) else "a folder"
        raise type(error)(f"config: '{path}' must be a file, found {found} there.") from None
    except ValueError as error:
        raise ValueError(f"config: '{path}' must be TOML, got {error}.") from None


def parse_setting(setting: str) -> dict[str, Any]:
    """Return ``section.key=value`` as nested dicts; the value is TOML, or else a string.

    Raises
    ------
    ValueError
        There is no section, key or ``=``.

    Examples
    --------
    >>> parse_setting("optimizer.lr=0.1"), parse_setting("model.top=[64, 32]")
    ({'optimizer': {'lr': 0.1}}, {'model': {'top': [64, 32]}})
    >>> parse_setting("optimizer.name=adam")
    {'optimizer': {'name': 'adam'}}
    """
    name, equals, text = setting.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ValueError(f"config: a setting must be SECTION.KEY=VALUE, got '{setting}'.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()
    return {section: {key: value}}


def override(
    settings: dict[str, dict[str, Any]], changes: Iterable[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return `settings` with changes applied in order.

    Raises
    ------
    ValueError
        An unknown section or key, or a number that is negative or not finite.
    TypeError
        A value of another type than the default; an integer does for a float.

    Examples
    --------
    >>> override({"training": {"epochs": 1}}, [{"training": {"epochs": 3}}])
    {'training': {'epochs': 3}}
    >>> override({"training": {"epochs": 1}}, [{"training": {"epoch": 3}}])
    Traceback (most recent call last):
        ...
    ValueError: config: a key of [training] must be known (did you mean 'epochs'?), got 'epoch'.
    """
    result = {section: dict(keys) for section, keys in settings.items()}
    for change in changes:
        for section, keys in change.items():
            if section not in result:
                raise ValueError(_unknown("a section", section, result))
            if not isinstance(keys, dict):
                raise TypeError(f"config: '{section}' must be a section [{section}], got {keys!r}.")
            for key, value in keys.items():
                if key not in result[section]:
                    raise ValueError(_unknown(f"a key of [{section}]", key, result[section]))
                result[section][key] = _typed(section, key, value, settings[section][key])
    return result


def to_toml(settings: dict[str, dict[str, Any]]) -> str:
    """Return two levels of settings as TOML text.

    Examples
    --------
    >>> print(to_toml({"training": {"epochs": 2}}), end="")
    [training]
    epochs = 2
    """
    lines = []
    for section, keys in settings.items():
        lines += [
            f"[{section}]",
            *(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in keys.items()),
            "",
        ]
    return "\n".join(lines[:-1]) + "\n"


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, 1) or [k for k in known if name and name in k]
    hint = f"did you mean '{close[0]}'?" if close else ", ".join(known)
    return f"config: {what} must be known ({hint}), got '{name}'."


def _typed(section: str, key: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple):
        default = list(default)
    if type(default) is float and type(value) is int:
        value = float(value)
    if type(value) is not type(default):
        kind = _KINDS.get(type(default))
        rule = f"{kind} such as {json.dumps(default)}" if kind else "true or false"
        told = json.dumps(value, default=str)
        raise TypeError(f"config: [{section}] {key} must be {rule}, got {told}.")
    if isinstance(value, (int, float)) and not 0 <= value < math.inf:
        raise ValueError(
            f"config: [{section}] {key} must be finite and not negative, got {value!r}."
        )
    return value

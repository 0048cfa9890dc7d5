"""The model and the optimizer that a run's settings describe."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from cupyrec import config, errors, optim, random
from cupyrec.data import Schema
from cupyrec.embedding import CachedHost, CachedSSD, InitialVectors, Life, Memory, Tier, Uniform
from cupyrec.models import (
    DCN,
    DLRM,
    FM,
    LR,
    PNN,
    DCNv2,
    DeepFM,
    MMoE,
    SharedBottom,
    WideDeep,
    XDeepFM,
)
from cupyrec.nn import Module, MultiTableEmbedding
from cupyrec.parallel import Exchange, world

__all__ = [
    "MODELS", "OPTIMIZERS", "build_model", "build_optimizer", "default_settings", "fit_options",
    "group_field", "keep_tables", "life_of", "tier_of",
]  # fmt: skip

MODELS = {
    "dcn": DCN, "dcn_v2": DCNv2, "deepfm": DeepFM, "dlrm": DLRM, "fm": FM, "lr": LR,
    "mmoe": MMoE, "pnn": PNN, "shared_bottom": SharedBottom, "wide_deep": WideDeep,
    "xdeepfm": XDeepFM,
}  # fmt: skip
OPTIMIZERS = {
    "sgd": optim.SGD, "adagrad": optim.Adagrad, "rowwise_adagrad": optim.RowWiseAdagrad,
    "adam": optim.Adam, "adamw": optim.AdamW, "catch_up_adam": optim.CatchUpAdam,
    "ftrl": optim.FTRL,
}  # fmt: skip

Settings = dict[str, dict[str, Any]]


def default_settings(name: str) -> Settings:
    """Return `config.DEFAULTS` with the own settings of a model: the parameters of its class.

    Parameters
    ----------
    name : str
        A key of `MODELS`.

    Examples
    --------
    >>> default_settings("fm")["model"]["embedding_dim"]
    16
    """
    parameters = inspect.signature(MODELS[name]).parameters
    own = {k: p.default for k, p in parameters.items() if not k.startswith("num_")}
    return config.DEFAULTS | {"model": config.DEFAULTS["model"] | {"name": name} | own}


def build_model(settings: Settings, schema: Schema, device: str) -> Module:
    """Return the model of ``[model]``, ``[training]`` (seed, amp) and ``[exchange]`` on a device.

    It has a task for each label of the schema, and pools bags if the schema has some.

    Raises
    ------
    ValueError, TypeError
        A setting that the model refuses, or several labels and a model of one task.

    Examples
    --------
    >>> from cupyrec.data import criteo_schema
    >>> model = build_model(default_settings("dlrm"), criteo_schema(), "cpu")
    >>> type(model).__name__, len(model.embedding.fields)
    ('DLRM', 39)
    """
    random.manual_seed(settings["training"]["seed"])
    own = {k: v for k, v in settings["model"].items() if k not in config.DEFAULTS["model"]}
    name, span = settings["model"]["name"], settings["model"]["initial_range"]
    if "num_tasks" in inspect.signature(MODELS[name]).parameters:
        own["num_tasks"] = len(schema.task_names)
    elif len(schema.task_names) > 1:
        takes = [n for n, m in MODELS.items() if "num_tasks" in inspect.signature(m).parameters]
        raise ValueError(
            f"config: the schema must have one label for model '{name}', "
            f"got {', '.join(schema.task_names)}. Models for several: {', '.join(takes)}."
        )
    model = MODELS[name](num_dense=schema.num_dense, num_tables=schema.num_tables, **own)
    if schema.has_bags:
        _pool(model, settings["model"]["pooling"])
    for _, group in model.named_groups():
        group.dense_updates = settings["model"].get("dense_updates", False)  # from version 0.3 on
        group.keep_account(life_of(settings))
        group.initial = InitialVectors(group.width, Uniform(-span, span), group.initial.seed)
        group.exchange = Exchange(world(), num_tables=schema.num_tables, **_codecs(settings))
    amp = settings["training"].get("amp", "float32")  # runs before version 0.3 don't say
    model.amp = None if amp == "float32" else amp
    return model.to(device)


def _pool(model: Module, pooling: str) -> None:
    if pooling not in ("mean", "sum"):
        raise ValueError(f"config: [model] pooling must be mean or sum, got '{pooling}'.")
    for module in model.modules():
        if isinstance(module, MultiTableEmbedding):
            module.pooling = pooling


def _codecs(settings: Settings) -> dict[str, str]:
    """The codecs of the exchange; runs before version 0.2 had none."""
    codecs = settings.get("exchange", config.DEFAULTS["exchange"])
    return codecs | {"evaluation": codecs["evaluation"] or codecs["forward"]}


def tier_of(settings: Settings, folder: str | os.PathLike) -> Tier:
    """Return the tier of ``[embedding]``, whose files lie in `folder` if it tells none.

    Raises
    ------
    ValueError, TypeError
        No such tier, one that can't do with dense updates, or a size that is none.

    Examples
    --------
    >>> tier_of(default_settings("lr"), "run/tables")
    Memory()
    """
    values = settings.get("embedding", config.DEFAULTS["embedding"])  # from version 0.4 on
    if values["tier"] != "memory" and settings["model"].get("dense_updates"):
        raise ValueError(
            "config: model.dense_updates must be false unless embedding.tier is memory, "
            f"got tier {values['tier']}."
        )
    match values["tier"]:
        case "memory":
            return Memory()
        case "cached_host":
            return CachedHost(cache_mb=values["cache_mb"])
        case "cached_ssd":
            return CachedSSD(
                path=values["path"] or folder, cache_mb=values["cache_mb"],
                host_cache_mb=values["host_cache_mb"] or None, direct=values["direct"],
            )  # fmt: skip
    raise ValueError(
        "config: [embedding] tier must be memory, cached_host or cached_ssd, "
        f"got '{values['tier']}'."
    )


def life_of(settings: Settings) -> Life | None:
    """Return when ids get and lose rows by ``[embedding]``, None if they keep what they first get.

    Raises
    ------
    ValueError, TypeError
        A number out of range.

    Examples
    --------
    >>> life_of(default_settings("lr")) is None
    True
    """
    defaults = config.DEFAULTS["embedding"]
    values = defaults | settings.get("embedding", {})
    names = ("admit_after", "admit_probability", "expire_below", "check_every")
    life = Life(
        expire_after=values["expire_after"] or None, max_ids=values["max_ids"] or None,
        **{name: values[name] for name in names},
    )  # fmt: skip
    deltas = settings["training"].get("deltas", 0)
    return life if deltas or not life.admits_all or life.expires else None


def keep_tables(tier: Tier, model: Module) -> None:
    """Keep a model's tables in a tier.

    Examples
    --------
    >>> from cupyrec.data import criteo_schema
    >>> model = build_model(default_settings("lr"), criteo_schema(), "cpu")
    >>> keep_tables(CachedHost(cache_mb=1), model)
    >>> [type(group.store).__name__ for _, group in model.named_groups()]
    ['CachedStore']
    """
    for name, group in model.named_groups():
        group.keep_in(tier, quote(name, safe=""))


def fit_options(settings: Settings, schema: Schema) -> dict[str, Any]:
    """Return the arguments of `cupyrec.fit` that ``[training]`` and ``[evaluation]`` tell.

    Raises
    ------
    ValueError, TypeError
        Weights that aren't such, or not one a label; a group that is no column of ids.

    Examples
    --------
    >>> from cupyrec.data import criteo_schema
    >>> fit_options(default_settings("lr"), criteo_schema())["epochs"]
    1
    """
    training, tasks = settings["training"], schema.task_names
    weights = training["task_weights"]
    for weight in weights:
        errors.at_least_0("config: [training]", "task_weights", weight)
    if len(weights) not in (0, len(tasks)):
        raise ValueError(
            f"config: [training] task_weights must be a weight for each of {', '.join(tasks)}, "
            f"got {weights}."
        )
    keys = (
        "epochs", "batch_size", "eval_every", "patience", "min_delta", "save_every",
        "positive_weight", "task_weights",
    )  # fmt: skip
    return {key: training[key] for key in keys} | {"group": group_field(settings, schema)}


def group_field(settings: Settings, schema: Schema) -> int | None:
    """Return the number of the field of ids that ``[evaluation] group`` names, None without one.

    Raises
    ------
    ValueError
        It is no column of ids.

    Examples
    --------
    >>> from cupyrec.data import criteo_schema
    >>> group_field({"evaluation": {"group": "C3"}}, criteo_schema())
    2
    """
    name = settings.get("evaluation", config.DEFAULTS["evaluation"])["group"]
    if name and name not in schema.table_names:
        raise ValueError(
            f"config: [evaluation] group must be one of {', '.join(schema.table_names)}, "
            f"got '{name}'."
        )
    return schema.table_names.index(name) if name else None


def build_optimizer(settings: Settings, model: Module) -> optim.Optimizer:
    """Return the optimizer of ``[optimizer]`` for a model that `build_model` returned.

    Raises
    ------
    ValueError, TypeError
        A setting that the optimizer or its schedule refuses or doesn't have.

    Examples
    --------
    >>> from cupyrec.data import criteo_schema
    >>> settings = default_settings("lr")
    >>> build_optimizer(settings, build_model(settings, criteo_schema(), "cpu")).lr
    0.02
    """
    values = settings["optimizer"]
    own = {"momentum": values["momentum"]} if values["name"] == "sgd" else {}
    if values["momentum"] and not own:
        raise ValueError(f"config: momentum must be 0 but for sgd, got {values['momentum']}.")
    if values["name"] == "adamw" and not values["weight_decay"]:
        raise ValueError("config: weight_decay must be positive for adamw, got 0.")
    l2, parameters = values["embedding_l2"], model.parameters()
    if l2 and not settings["model"]["dense_updates"]:
        raise ValueError(f"config: embedding_l2 must be 0 without model.dense_updates, got {l2}.")
    if l2:
        tables = [group for _, group in model.named_groups()]
        dense = [parameter for _, parameter in model.named_parameters()]
        parameters = [{"params": dense}, {"params": tables, "l2": l2}]
    return OPTIMIZERS[values["name"]](
        parameters, values["lr"], weight_decay=values["weight_decay"],
        schedule=_schedule(values), clip_norm=values["clip_norm"] or None,
        scaler=optim.GradientScaler() if model.amp == "float16" else None, **own,
    )  # fmt: skip


def _schedule(values: dict[str, Any]) -> Callable[[int], float]:
    """The learning-rate schedule that [optimizer] describes."""
    warmup, steps = values["warmup_steps"], values["decay_steps"]
    match values["schedule"]:
        case "polynomial":
            return optim.WarmupPolynomial(
                warmup, values["decay_start"], steps, values["decay_power"]
            )
        case "cosine":
            return optim.Cosine(steps, warmup_steps=warmup)
        case "step":
            return optim.StepDecay(steps, gamma=values["decay_factor"], warmup_steps=warmup)
        case "plateau":
            if warmup:
                raise ValueError(f"config: warmup_steps must be 0 for plateau, got {warmup}.")
            names = "decay_factor", "decay_patience", "decay_threshold", "decay_min"
            return optim.Plateau(*(values[name] for name in names))
    raise ValueError(
        "config: [optimizer] schedule must be polynomial, cosine, step or plateau, "
        f"got '{values['schedule']}'."
    )

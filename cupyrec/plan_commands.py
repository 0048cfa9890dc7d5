"""What ``cupyrec plan`` does: a table on stderr, a JSON line on stdout."""

from __future__ import annotations

import argparse
import dataclasses
import logging

from cupyrec import config
from cupyrec.cli import UsageError
from cupyrec.data import Schema
from cupyrec.from_settings import MODELS, OPTIMIZERS, Settings, default_settings
from cupyrec.hardware import Hardware
from cupyrec.measure_hardware import measure_hardware
from cupyrec.plan import Lack, Plan
from cupyrec.plan import plan as planned
from cupyrec.run_folder import json_line

__all__ = ["plan"]

logger = logging.getLogger("cupyrec")

_UNITS = {"flops": "flop", "ssd_reads": "reads"}  # others are bytes
_TABLES = 8  # that are told one by one
_PLACES = {
    "device": "a GPU's memory", "host": "a host's memory", "files": "a host's SSDs",
    "checkpoint": "a checkpoint",
}  # fmt: skip


def plan(options: argparse.Namespace) -> None:
    """Tell whether and how a training fits by the flags of ``cupyrec plan``; print a JSON line."""
    try:
        settings = _settings(options)
        schema = Schema.load(options.schema)
        ids = _ids(schema, options.ids, options.ids_per_table)
        hardware = _hardware(options)
        device = options.device or ("cuda" if hardware.gpu else "cpu")
        told = planned(
            settings, schema, hardware, ids,
            ranks=options.ranks, device=device, zipf=options.zipf, bag_size=options.bag_size,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise UsageError(error) from None
    _tell(told, settings["training"]["batch_size"])
    if told.lacks:
        raise UsageError(_refusal(told, hardware))
    fields = told._asdict() | {"hardware": dataclasses.asdict(hardware), "device": device}
    print(json_line({k: v for k, v in fields.items() if k not in ("lacks", "ways")}), flush=True)


def _settings(options: argparse.Namespace) -> Settings:
    """Defaults, then --config, then --set, then --batch-size."""
    changes = [config.read(options.config)] if options.config else []
    changes += map(config.parse_setting, options.set)
    if options.batch_size is not None:
        changes.append({"training": {"batch_size": options.batch_size}})
    names = [c["model"]["name"] for c in changes if "name" in c.get("model", {})]
    name = names[-1] if names else config.DEFAULTS["model"]["name"]
    if name not in MODELS:
        raise ValueError(f"plan: model.name must be one of {sorted(MODELS)}, got '{name}'.")
    settings = config.override(default_settings(name), changes)
    optimizer = settings["optimizer"]["name"]
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"plan: optimizer.name must be one of {sorted(OPTIMIZERS)}, got '{optimizer}'."
        )
    return settings


def _ids(schema: Schema, total: float | None, named: list[str]) -> list[float]:
    """Ids of each table: what --ids-per-table says, else an equal part of --ids."""
    own: dict[str, float] = {}
    for text in named:
        name, equals, number = text.rpartition("=")
        if not equals or name not in schema.table_names:
            raise ValueError(
                f"plan: --ids-per-table must be TABLE=N of {', '.join(schema.table_names)}, "
                f"got '{text}'."
            )
        try:
            own[name] = float(number)
        except ValueError:
            raise ValueError(f"plan: --ids-per-table must be TABLE=N, got '{text}'.") from None
    others = schema.num_tables - len(own)
    if others and total is None:
        raise ValueError(f"plan: --ids must tell of {others} tables, got none.")
    return [own[name] if name in own else total / others for name in schema.table_names]


def _hardware(options: argparse.Namespace) -> Hardware:
    if options.hardware is not None:
        return Hardware.load(options.hardware)
    if options.device == "cuda":
        raise UsageError("plan: --measure must come with --device cpu, got cuda.")
    logger.info("measuring this machine, some ten seconds")
    return measure_hardware(options.measure or None)


def _tell(told: Plan, batch: int) -> None:
    for place, parts in told.bytes.items():
        if not parts:
            continue
        logger.info("%-28s %12s", _PLACES[place], amount(sum(parts.values())))
        for name, value in sorted(parts.items(), key=lambda part: -part[1]):
            logger.info("    %-24s %12s", name, amount(value))
    logger.info("%-28s %12s", "tables, without caches", amount(sum(told.tables.values())))
    largest = sorted(told.tables.items(), key=lambda table: -table[1])
    rest = {f"{len(largest) - _TABLES} others": sum(size for _, size in largest[_TABLES:])}
    shown = largest if len(largest) <= _TABLES else [*largest[:_TABLES], *rest.items()]
    for name, value in shown:
        logger.info("    %-24s %12s", name, amount(value))
    logger.info("%-28s %12s %12s", "a step", "work", "seconds")
    for name, value in told.work.items():
        if value:
            unit = _UNITS.get(name, "B")
            mark = "  <- bottleneck" if name == told.bottleneck else ""
            logger.info("    %-24s %12s %12.3g%s", name, amount(value, unit),
                        told.seconds[name], mark)  # fmt: skip
    logger.info("%-28s %12.3g s, %s samples/s of batches of %d", "in all", told.step_seconds,
                f"{told.samples_per_second:,.0f}", batch)  # fmt: skip
    logger.info(
        "%-28s %11.1f%% of %s different rows", "hits of the device's cache", 100 * told.hit_rate,
        f"{told.unique:,.0f}",
    )  # fmt: skip


def _refusal(told: Plan, hardware: Hardware) -> str:
    def sentence(lack: Lack) -> str:
        needs, has = amount(lack.needs), amount(lack.has)
        return f"{_PLACES[lack.place]} must have {needs}, got {has}"

    if told.ways:
        ways = f"What would fit: {'; '.join(told.ways)}."
    elif hardware.link:
        ways = "No other tier, more ranks or rows of fewer bytes would make it fit."
    else:
        ways = (
            "No other tier or rows of fewer bytes would make it fit; "
            "more ranks are planned only for hardware with [link]."
        )
    return f"plan: {'; '.join(map(sentence, told.lacks))}. {ways}"


def amount(value: float, unit: str = "B") -> str:
    """Return a number with its unit in powers of 1,000.

    Examples
    --------
    >>> amount(1.234e12), amount(56, "reads")
    ('1.23 TB', '56 reads')
    """
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"

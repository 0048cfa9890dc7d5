"""Whether and how a training fits into hardware: bytes, seconds a step, what is the bottleneck.

Bytes of tables are counted as stores count them (`cupyrec.table_sizes`), a step's work by formulas
(`cupyrec.step_work`, `cupyrec.dense_work`), its ids by Zipf's law (`cupyrec.zipf`). Seconds are
work over what the hardware gives at best: with published peaks they are a bound, with measured
speeds what to expect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cupyrec import errors, random
from cupyrec.data import Schema
from cupyrec.dense_work import DenseWork, dense_work
from cupyrec.embedding.row_layout import RowLayout
from cupyrec.from_settings import Settings, build_model, build_optimizer, tier_of
from cupyrec.hardware import Hardware
from cupyrec.nn import MultiTableEmbedding
from cupyrec.step_work import (
    Work,
    batch_bytes,
    exchange_bytes,
    group_work,
    step_work,
)
from cupyrec.table_sizes import TableBytes, checkpoint_row, table_bytes

__all__ = ["Lack", "Plan", "plan"]

_MOST_RANKS = 1 << 16


class Lack(NamedTuple):
    """What doesn't fit.

    Attributes
    ----------
    place : str
        ``device``, a GPU's memory; ``host``, a host's; ``files``, a host's SSDs.
    needs, has : float
        Bytes.

    Examples
    --------
    >>> Lack("host", needs=2e9, has=1e9).place
    'host'
    """

    place: str
    needs: float
    has: float


class Plan(NamedTuple):
    """What a training takes.

    Attributes
    ----------
    bytes : dict of str to dict of str to float
        Of ``device``, a rank's (with a GPU); ``host``, all ranks of one host; ``files``, the same;
        ``checkpoint``, one of all ranks: bytes by what they are for.
    tables : dict of str to float
        Bytes of each table on all ranks and in all places, caches apart.
    work : dict of str to float
        A step's: flops, memory, pcie and link of a rank; host_memory, network, ssd_reads and
        ssd_writes of a host.
    seconds : dict of str to float
        What each of these takes a step.
    bottleneck : str
        The one that takes longest.
    step_seconds : float
    samples_per_second : float
    unique : float
        Different ids of a rank's batch.
    hit_rate : float
        Part of a step's different rows that the device's cache has; 1 without one.
    lacks : tuple of Lack
        What doesn't fit: nothing, if it does.
    ways : tuple of str
        Changes of which each makes it fit, if it doesn't.

    Examples
    --------
    See `plan`.
    """

    bytes: dict[str, dict[str, float]]
    tables: dict[str, float]
    work: dict[str, float]
    seconds: dict[str, float]
    bottleneck: str
    step_seconds: float
    samples_per_second: float
    unique: float
    hit_rate: float
    lacks: tuple[Lack, ...]
    ways: tuple[str, ...]


class _Asked(NamedTuple):
    """What a plan is of, but for settings and ranks."""

    hardware: Hardware
    schema: Schema
    ids: list[float]  # of each table
    bags: list[float]  # ids of a sample, of each table
    device: str
    zipf: float


class _Model(NamedTuple):
    """What settings and schema come to, whatever the ranks."""

    settings: Settings
    layouts: list[tuple[RowLayout, list[int]]]  # of each width, and its tables
    dense: DenseWork
    states: int  # numbers of state a parameter


def plan(
    settings: Settings,
    schema: Schema,
    hardware: Hardware,
    ids: Sequence[float],
    *,
    ranks: int = 1,
    device: str = "cuda",
    zipf: float = 1.05,
    bag_size: float = 1.0,
) -> Plan:
    """Return what a training takes, before it is begun: nothing is allocated but its dense part.

    Parameters
    ----------
    settings : dict
        As `cupyrec train` has them: see `cupyrec.from_settings.default_settings`.
    schema : Schema
    hardware : Hardware
    ids : sequence of float
        Ids of each table of the schema, in its order.
    ranks : int
        GPUs, or processes on CPUs.
    device : {"cuda", "cpu"}
    zipf : float
        Exponent of the law by which ids come.
    bag_size : float
        Ids of a bag, on average.

    Raises
    ------
    ValueError, TypeError
        A setting, or a number, that is none; hardware without what the settings need.

    Notes
    -----
    A host has `hardware.host.ranks` ranks, or all if there are fewer. Ranks have as many rows each.

    bytes     device: tables, see `cupyrec.table_sizes`; parameters, gradients and optimizer state
              4 bytes a number, with float16 or bfloat16 2 bytes a parameter more; the batch and the
              exchange, see `cupyrec.step_work`. A process takes some 0.3 GB besides.
              checkpoint: 12 + 4 (D + state) a row, 4 a parameter and its state. A run's folder
              keeps up to two, the best and the last, and a third while it is written.
    seconds   flops: operations / speed; memory: bytes / bandwidth, on CPUs and of hosts also lines
              / random_lines; others alike. Ranks of a host share what is the host's. Of what a rank
              sends, (g - 1) / (N - 1) stays on its host of g ranks, the rest of all of them goes
              by the network.
    step      flops + memory + host_memory + pcie + link + network, one after another; or ssd_reads
              + ssd_writes, if they take longer, as rows are read ahead meanwhile

    Examples
    --------
    >>> from cupyrec.data import criteo_schema
    >>> from cupyrec.from_settings import default_settings
    >>> numbers = dict(memory=16e9, memory_bandwidth=2e10, random_lines=1e8, cores=2, float32=2e11)
    >>> host, schema = Hardware.from_dict({"host": numbers}), criteo_schema()
    >>> told = plan(default_settings("dlrm"), schema, host, [1e6] * schema.num_tables, device="cpu")
    >>> told.bottleneck, told.lacks, round(told.bytes["host"]["rows"] / 1e9, 2)
    ('memory', (), 4.99)
    """
    errors.positive("plan", "ranks", ranks)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"plan: 'device' must be cpu or cuda, got {device!r}.")
    if len(ids) != schema.num_tables or not all(1 <= n < math.inf for n in ids):
        raise ValueError(
            f"plan: 'ids' must be numbers of at least 1 for each of {schema.num_tables} tables, "
            f"got {list(ids)}."
        )
    for name, value in (("zipf", zipf), ("bag_size", bag_size)):
        errors.at_least_0("plan", name, value)
    parts = {
        "gpu": device == "cuda",
        "ssd": settings["embedding"]["tier"] == "cached_ssd",
        "link": ranks > 1 or device == "cuda",
    }
    for part, needed in parts.items():
        if needed and getattr(hardware, part) is None:
            raise ValueError(f"plan: hardware must have [{part}] for these settings, got none.")
    bags = [bag_size if column.bag else 1.0 for column in _table_columns(schema)]
    asked = _Asked(hardware, schema, list(ids), bags, device, zipf)
    told = _plan(_model(settings, schema), asked, ranks)
    return told._replace(ways=_ways(settings, asked, ranks, told)) if told.lacks else told


def _table_columns(schema: Schema) -> list[Any]:
    columns = {column.table: column for column in schema.columns if column.table}
    return [columns[name] for name in schema.table_names]


def _model(settings: Settings, schema: Schema) -> _Model:
    with random.kept():
        model = build_model(settings, schema, "cpu")
        optimizer = build_optimizer(settings, model)
    layouts = []
    for module in model.modules():
        if isinstance(module, MultiTableEmbedding):
            for width, group in module.groups.items():
                tables = [t for t, own in enumerate(module.widths) if own == width]
                layouts.append((RowLayout(width, group.store.value, group.store.state), tables))
    width = max(layout.width for layout, _ in layouts)
    dense = dense_work(model, schema.num_dense, schema.num_tables, width)
    return _Model(settings, layouts, dense, len(optimizer.state))


def _plan(model: _Model, asked: _Asked, ranks: int) -> Plan:
    hardware, schema, ids, bags, device, zipf = asked
    settings, tier = model.settings, tier_of(model.settings, "tables")
    batch = settings["training"]["batch_size"]
    samples, half = batch / ranks, settings["training"]["amp"] != "float32" and device == "cuda"
    codecs = settings["exchange"]["forward"], settings["exchange"]["backward"]
    groups, sizes, tables = [], [], dict.fromkeys(schema.table_names, 0.0)
    checkpoint = 4.0 * (model.dense.parameters * (1 + model.states) + model.dense.buffers)
    rows_saved = 0.0
    for layout, own in model.layouts:
        its_ids, draws = [ids[t] for t in own], [batch * bags[t] for t in own]
        all_at_once = settings["model"]["dense_updates"]
        groups.append(group_work(layout, tier, its_ids, draws, ranks, zipf, all_at_once))
        sizes.append(table_bytes(layout, tier, sum(its_ids) / ranks, device))
        rows_saved += checkpoint_row(layout) * sum(its_ids)
        taken = ranks * _of_rows(sizes[-1])
        for t in own:
            tables[schema.table_names[t]] += taken * ids[t] / sum(its_ids)
    step = {
        "parameters": 4.0 * model.dense.room * 2 + 2.0 * model.dense.room * half,
        "optimizer state": 4.0 * model.dense.room * model.states,
        "batch": batch_bytes(groups, model.dense, samples, half, device),
        "exchange": exchange_bytes(groups, model.dense, ranks, codecs),
    }
    together = min(ranks, int(hardware.host.ranks))
    places = _places(sizes, step, device, together)
    places["checkpoint"] = {"rows": rows_saved, "dense": checkpoint}
    number = 1 if schema.num_tables <= 256 else 2
    work = step_work(
        groups, model.dense, model.states, samples, half, device, ranks, codecs, number
    )
    amounts, seconds = _seconds(work, hardware, device, half, ranks, together)
    ssd = seconds["ssd_reads"] + seconds["ssd_writes"]
    longest = max(sum(seconds.values()) - ssd, ssd)
    rows = sum(group.rows for group in groups)
    return Plan(
        places, tables, amounts, seconds, max(seconds, key=seconds.__getitem__), longest,
        batch / longest, sum(group.unique for group in groups),
        1 - sum(group.missing for group in groups) / rows, _lacks(places, hardware), (),
    )  # fmt: skip


def _of_rows(size: TableBytes) -> float:
    """Bytes in all places that grow with rows: no caches, no buffers."""
    kept = {"rows", "keys", "index", "addresses", "files"}
    return sum(value for place in size.values() for name, value in place.items() if name in kept)


def _places(
    sizes: list[TableBytes], step: dict[str, float], device: str, together: int
) -> dict[str, dict[str, float]]:
    """Bytes of a rank's device, and of a host of `together` ranks."""
    places: dict[str, dict[str, float]] = {"device": dict(step), "host": {}, "files": {}}
    for size in sizes:
        for place, parts in size.items():
            for name, value in parts.items():
                places[place][name] = places[place].get(name, 0.0) + value
    if device == "cpu":
        for name, value in places.pop("device").items():
            places["host"][name] = places["host"].get(name, 0.0) + value
    for place in ("host", "files"):
        places[place] = {name: together * value for name, value in places[place].items()}
    return places


def _seconds(
    work: Work, hardware: Hardware, device: str, half: bool, ranks: int, together: int
) -> tuple[dict[str, float], dict[str, float]]:
    """What a step takes of each resource, and how long."""
    host, gpu, ssd, link = hardware.host, hardware.gpu, hardware.ssd, hardware.link
    near = (together - 1) / max(1, ranks - 1) * work.sent
    away = together * (work.sent - near)
    amounts = {
        "flops": work.flops, "memory": work.memory, "pcie": work.pcie, "link": near,
        "host_memory": together * work.host_memory, "network": away,
        "ssd_reads": together * work.ssd_reads, "ssd_writes": together * work.ssd_writes,
    }  # fmt: skip
    if device == "cpu":  # ranks share the host
        flops, bandwidth = host.float32 / together, host.memory_bandwidth / together
        lines = together * work.lines / host.random_lines
    else:
        flops, bandwidth = gpu.float16 if half else gpu.float32, gpu.memory_bandwidth
        lines = 32 * work.lines / bandwidth  # a GPU reads sectors of 32 bytes anywhere
    seconds = {
        "flops": work.flops / flops,
        "memory": work.memory / bandwidth + lines,
        "pcie": work.pcie / link.pcie if link else 0.0,
        "link": near / link.ranks if link else 0.0,
        "host_memory": together
        * (work.host_memory / host.memory_bandwidth + work.host_lines / host.random_lines),
        "network": away / link.hosts if link else 0.0,
        "ssd_reads": amounts["ssd_reads"] / ssd.random_reads if ssd else 0.0,
        "ssd_writes": amounts["ssd_writes"] / ssd.write_bandwidth if ssd else 0.0,
    }
    return amounts, seconds


def _lacks(places: dict[str, dict[str, float]], hardware: Hardware) -> tuple[Lack, ...]:
    has = {"device": hardware.gpu and hardware.gpu.memory, "host": hardware.host.memory}
    has["files"] = hardware.ssd and hardware.ssd.bytes
    needs = {place: sum(places.get(place, {}).values()) for place in has}
    return tuple(Lack(p, needs[p], has[p]) for p in has if needs[p] and needs[p] > has[p])


def _ways(settings: Settings, asked: _Asked, ranks: int, told: Plan) -> tuple[str, ...]:
    """Changes that make it fit: a tier, more ranks, rows of fewer bytes."""
    hardware, schema = asked.hardware, asked.schema
    ways, model = [], _model(settings, schema)

    def fits(changes: dict[str, dict[str, Any]], count: int = ranks) -> bool:
        other = {section: keys | changes.get(section, {}) for section, keys in settings.items()}
        try:
            changed = _model(other, schema) if changes else model
            return not _plan(changed, asked, count).lacks
        except (ValueError, TypeError):  # settings that don't go together
            return False

    tiers = ["cached_host", "cached_ssd"] if hardware.ssd else ["cached_host"]
    for tier in tiers:
        if settings["embedding"]["tier"] != tier and fits({"embedding": {"tier": tier}}):
            ways.append(f"embedding.tier={tier}")
    if hardware.link:
        share = max(lack.needs / lack.has for lack in told.lacks)
        step = int(hardware.host.ranks)
        count = math.ceil(ranks * share / step) * step
        while count <= _MOST_RANKS and not fits({}, count):
            count = math.ceil(count * 1.1 / step) * step
        if count <= _MOST_RANKS:
            ways.append(f"{count} ranks")
    fewer = {
        "model.embedding_dtype=float16": {"model": {"embedding_dtype": "float16"}},
        "optimizer.name=rowwise_adagrad": {"optimizer": {"name": "rowwise_adagrad"}},
    }
    each = [text for text, changes in fewer.items() if fits(changes)]
    if not each and fits({k: v for changes in fewer.values() for k, v in changes.items()}):
        each = [" and ".join(fewer)]
    return (*ways, *each)

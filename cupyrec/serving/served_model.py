"""A model with the rows of a checkpoint, of evaluation alone: without what optimizers keep."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, random
from cupyrec.checkpoint_deltas import changes, take_rows
from cupyrec.checkpoint_fits import check_fits, parameters
from cupyrec.checkpoint_reshard import chosen
from cupyrec.checkpoint_shards import catch_up_history, served_groups
from cupyrec.data import Schema
from cupyrec.embedding import CachedSSD, Group, InitialVectors, Rows, Tables, Tier
from cupyrec.from_settings import build_model, keep_tables
from cupyrec.nn import Module
from cupyrec.ops.partition import owners
from cupyrec.serving.chain import Chain, near
from cupyrec.serving.unseen import DefaultRows, initial_vectors

__all__ = ["Rules", "ServedModel", "Update", "nearest", "without_rows"]

_NO_KEYS = np.empty(0, np.uint32), np.empty(0, np.int64)

Change = tuple[Rows | None, Rows | None]  # keys to delete, rows to import


class Rules(NamedTuple):
    """What is made of any checkpoint.

    Attributes
    ----------
    device : str
    tier : Tier
        Of rows; the files of `CachedSSD` are in a folder of their own there, which doesn't last.
    dtype : str, optional
        Of vectors in memory, by default the checkpoint's.
    unseen : str, int or list of int
        See `cupyrec.serving.unseen.check_unseen`.
    template : Module, optional
        Without rows; by default the settings in the checkpoint tell the model.
    schema : Schema, optional
        Of checkpoints that don't tell theirs.
    """

    device: str
    tier: Tier
    dtype: str | None
    unseen: Any
    template: Module | None
    schema: Schema | None


class Update(NamedTuple):
    """What a model becomes another checkpoint's by, in place.

    Attributes
    ----------
    base : int
        The crc32 of the checkpoint that it is to be served by.
    chain : Chain
        What is new.
    dense : dict of str to array
    rows : list of (Group, list of Change, initial vectors, DefaultRows or None)
    """

    base: int
    chain: Chain
    dense: dict[str, np.ndarray]
    rows: list[tuple[Group, list[Change], Any, DefaultRows | None]]

    @property
    def version(self) -> str:
        """8 hex digits, of the checkpoint that it leads to."""
        return _version(self.chain.crc32s[-1])


class ServedModel:
    """A model with a checkpoint's rows, in a tier, and nothing that only training asks for.

    Each rank checks and reads its share, without a message to others: what one finds fault with,
    none must serve.

    Parameters
    ----------
    chain : Chain
    rules : Rules

    Attributes
    ----------
    model : Module
        In evaluation.
    path : path
    crc32 : int
        Of the checkpoint's manifest.
    config : dict
        Settings and schema, if the checkpoint has them.
    schema : Schema, optional

    Raises
    ------
    FileNotFoundError, ValueError
        As `cupyrec.checkpoint.load`; a vector that `dtype` can't hold; a default id without a row;
        or a checkpoint that tells no settings, without a template.

    Examples
    --------
    See `cupyrec.serving.Predictor`.
    """

    def __init__(self, chain: Chain, rules: Rules) -> None:
        self._rules, self._stack = rules, contextlib.ExitStack()
        original = _original(chain, rules.template)
        check_fits(chain.path, chain.manifest, original)
        dense = chain.checked(original.ranks)
        saved = {e["name"]: rules.dtype or e["dtype"] for e in served_groups(chain.manifest)}
        self.model = without_rows(original, saved).to(rules.device).eval()
        self.model.load_state_dict(parameters(dense))
        self.config = chain.manifest["config"]
        schema = self.config.get("schema")
        self.schema = rules.schema if schema is None else Schema.from_dict(schema)
        self._defaults: dict[str, DefaultRows | None] = {}
        with contextlib.ExitStack() as stack:
            tier = rules.tier
            if isinstance(tier, CachedSSD):
                Path(tier.path).mkdir(parents=True, exist_ok=True)
                folder = tempfile.TemporaryDirectory(prefix="cupyrec-tables-", dir=tier.path)
                tier = dataclasses.replace(tier, path=stack.enter_context(folder))
            keep_tables(tier, self.model)
            for name, group in self.model.named_groups():
                stack.callback(group.store.close)
                defaults = self._no_defaults(group)
                for change in self._changes(chain, name, group, dense, defaults):
                    take_rows(group, *change)
                group.initial = self._initial(chain, name, defaults).to(group.xp)
                self._defaults[name] = defaults
            self._become(chain, dense)
            self._stack = stack.pop_all()

    def _become(self, chain: Chain, dense: dict[str, np.ndarray]) -> None:
        self.path, self.crc32 = chain.path, chain.crc32s[-1]
        self._shape, self._made = chain.shape(dense), chain.made()

    @property
    def version(self) -> str:
        """8 hex digits, by which clients know the checkpoint."""
        return _version(self.crc32)

    def close(self) -> None:
        """Let rows and their files go.

        Examples
        --------
        See `cupyrec.serving.Predictor.close`.
        """
        self._stack.close()

    def check_like(self, chain: Chain) -> None:
        """Raise ValueError unless a checkpoint is of such a model, and of the same schema.

        Examples
        --------
        See `cupyrec.serving.Predictor.update`.
        """
        for what, value in chain.shape(chain.dense()).items():
            if value != self._shape[what]:
                raise ValueError(
                    f"Predictor: '{chain.path}' must have the {what} of '{self.path}', which is "
                    f"served, {_differing(self._shape[what], value)}."
                )

    def update(self, chain: Chain) -> Update | None:
        """Read what a newer checkpoint has changed, None unless all of it is in its deltas.

        Rows that catch up (`CatchUpAdam`) have all changed.

        Raises
        ------
        FileNotFoundError, ValueError
            As for the class.

        Examples
        --------
        See `cupyrec.serving.Predictor.update`.
        """
        new, made = chain.after(self.crc32), chain.made()
        if new is None or made != self._made or any(e["history"] for e in made["groups"]):
            return None
        dense, rows = new.checked(self.model.ranks), []
        for name, group in self.model.named_groups():
            known = self._defaults[name]
            defaults = None if known is None else known.copy()
            some = list(self._changes(new, name, group, dense, defaults))
            initial = self._initial(new, name, defaults).to(group.xp)
            rows.append((group, some, initial, defaults))
        return Update(self.crc32, new, dense, rows)

    def check_follows(self, update: Update) -> None:
        """Raise RuntimeError if an update was read for another checkpoint than this.

        Examples
        --------
        See `cupyrec.serving.Predictor.take`.
        """
        if update.base != self.crc32:
            raise RuntimeError(
                f"Predictor: an update must be read for version {self.version}, which is served, "
                f"got one for {_version(update.base)}."
            )

    def take(self, update: Update) -> None:
        """Become another checkpoint's; where that fails some rows are as they were, some not.

        Examples
        --------
        See `cupyrec.serving.Predictor.update`.
        """
        self.model.load_state_dict(parameters(update.dense))
        names = [name for name, _ in self.model.named_groups()]
        for name, (group, some, initial, defaults) in zip(names, update.rows, strict=True):
            for change in some:
                take_rows(group, *change)
            group.initial, self._defaults[name] = initial, defaults
        self._become(update.chain, update.dense)

    def _changes(
        self, chain: Chain, name: str, group: Group, dense: dict, defaults: DefaultRows | None
    ) -> Iterator[Change]:
        """What a group becomes the last checkpoint's by: of several ranks this one's rows."""
        history = catch_up_history(chain.links[-1].entry(name), dense)
        ranks, alone, wanted = group.exchange.ranks, group.exchange.ranks.size == 1, None
        keys = _NO_KEYS if defaults is None else defaults.keys()

        def owned(tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
            return owners(tables, ids, ranks.size) == ranks.rank

        if not alone:

            def wanted(tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
                own = owned(tables, ids)
                return own if defaults is None else own | defaults.are(tables, ids)

        for link in chain.links:
            own = link if alone else near(link, name, ranks, *keys)
            for forgotten, rows in changes(own, name, wanted, history, with_state=False):
                if rows is not None:
                    rows = nearest(rows, self._rules.dtype)
                if defaults is not None:
                    defaults.note(forgotten, rows)
                if rows is not None and not alone:
                    rows = chosen(rows, owned(rows.tables, rows.ids))
                yield forgotten, rows

    def _no_defaults(self, group: Group) -> DefaultRows | None:
        """The default rows of a group before there are rows, None if the rule is another."""
        unseen = self._rules.unseen
        if isinstance(unseen, str):
            return None
        for tables in self.model.modules():
            if isinstance(tables, Tables) and any(g is group for g in tables.groups.values()):
                own = [t for t, width in enumerate(tables.widths) if width == group.width]
                ids = [unseen] * tables.num_tables if isinstance(unseen, int) else unseen
                if len(ids) != tables.num_tables:
                    raise ValueError(
                        f"Predictor: 'unseen' must be an id, or one of each of the "
                        f"{tables.num_tables} tables, got {len(ids)}."
                    )
                return DefaultRows(np.array(ids), own, group.width)
        raise ValueError("Predictor: 'unseen' must be 'initial' or 'zero' for such a model.")

    def _initial(self, chain: Chain, name: str, defaults: DefaultRows | None) -> Any:
        if defaults is not None and (missing := defaults.missing()):
            table = missing[0]
            named = "" if self.schema is None else f" ('{self.schema.table_names[table]}')"
            raise ValueError(
                f"Predictor: the default id of 'unseen' must have a row in each table, got none "
                f"in table {table}{named} of '{name}' in '{chain.path}'."
            )
        entry = chain.links[-1].entry(name)
        saved = InitialVectors.from_dict(entry["initial"], entry["width"], entry["seed"])
        return initial_vectors(self._rules.unseen, saved, defaults)


def nearest(rows: Rows, dtype: str | None) -> Rows:
    """Return rows whose vectors are the nearest that a dtype of 16 bits holds.

    Raises
    ------
    ValueError
        One is beyond its largest number.

    Examples
    --------
    >>> rows = Rows(np.zeros(1, np.uint32), np.array([7]), np.array([[1 / 3]], np.float32), {})
    >>> nearest(rows, "bfloat16").vectors
    array([[0.33398438]], dtype=float32)
    """
    halves = {half.name: half for half in arrays.HALVES}
    if dtype not in halves:
        return rows
    with np.errstate(over="ignore"):
        vectors = rows.vectors.astype(halves[dtype]).astype(np.float32)
    good = np.isfinite(vectors).all(axis=1)
    if not good.all():
        row = int(np.argmin(good))
        raise ValueError(
            f"Predictor: vectors of table {rows.tables[row]} must be such as {dtype} holds, "
            f"got {np.abs(rows.vectors[row]).max()} for id {rows.ids[row]}."
        )
    return rows._replace(vectors=vectors)


def without_rows(model: Module, dtypes: dict[str, str] | None = None) -> Module:
    """Return a copy of a model whose tables are empty, without optimizer's state and ids' lives.

    Groups that `dtypes` names keep vectors in such.

    Examples
    --------
    >>> from cupyrec.models import DLRM
    >>> model = DLRM(2, 3)
    >>> _ = model(np.zeros((1, 2), np.float32), np.zeros((1, 3), np.int64))
    >>> len(model.embedding.group.store), len(without_rows(model).embedding.group.store)
    (3, 0)
    """
    groups = {}
    for name, group in model.named_groups():
        dtype = (dtypes or {}).get(name, group.dtype)
        groups[id(group)] = Group(group.initial, dtype=dtype, exchange=group.exchange)
    empty = copy.deepcopy(model, groups)
    for _, parameter in empty.named_parameters():
        parameter.grad = parameter.grad_buffer = None
    return empty


def _original(chain: Chain, template: Module | None) -> Module:
    """Such a model as was saved, without rows."""
    if template is not None:
        return template
    config = chain.manifest["config"]
    if not {"settings", "schema"} <= config.keys():
        raise ValueError(
            f"Predictor: '{chain.path}' must be written by `cupyrec train`, or come with 'model', "
            "got neither."
        )
    with random.kept():  # what is trained meanwhile must not see that seed
        return build_model(config["settings"], Schema.from_dict(config["schema"]), "cpu")


def _version(crc32: int) -> str:
    return f"{crc32:08x}"


def _differing(ours: Any, theirs: Any) -> str:
    if not (isinstance(ours, dict) and isinstance(theirs, dict)) or "columns" in ours:
        return "got another" if not isinstance(ours, str) else f"{ours}, got {theirs}"
    name = next(n for n in sorted(ours | theirs) if ours.get(n) != theirs.get(n))
    return f"with '{name}' {ours.get(name)}, got {theirs.get(name)}"

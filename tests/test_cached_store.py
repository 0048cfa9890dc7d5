"""Every tier against a dict, whatever comes after what."""

import contextlib
import itertools
import tempfile
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_place_segments import place_of

from cupyrec import arrays
from cupyrec.embedding import CachedHost, CachedSSD, Memory, Rows, StatePart, cached_store
from cupyrec.ops.embedding_rows import gather_rows
from cupyrec.ops.key_index import KeyIndex
from cupyrec.ops.sgd import sgd_rows

WIDTH = 3
ENDS = [-(2**63), -1, 0, 1, 2**63 - 1]
STATES = (), (StatePart("sum", 2, 0.5),), (StatePart("last", 1, 7, np.int32),)
TIERS = {
    "memory": lambda folder: Memory(),
    "cached_host": lambda folder: CachedHost(cache_rows=1),
    "cached_ssd": lambda folder: CachedSSD(path=folder, cache_rows=1),
    "both caches": lambda folder: CachedSSD(path=folder, cache_rows=1, host_cache_rows=40),
}
keys = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(ENDS) | st.integers(0, 400)),
    unique=True, max_size=90,
)  # more than the 32 slots of a cache of one row  # fmt: skip


def numbered(tables, ids):
    """Vectors that tell of their key."""
    key = (arrays.to_host(tables).astype(np.int64) * 1000 + arrays.to_host(ids) % 1000)[:, None]
    vectors = (key + np.arange(WIDTH) / 8).astype(np.float32)
    return arrays.copy_to(arrays.namespace("numbered", tables), vectors)


def columns(xp, pairs):
    tables, ids = np.array([t for t, _ in pairs], np.uint32), np.array([i for _, i in pairs])
    return arrays.copy_to(xp, tables), arrays.copy_to(xp, ids.astype(np.int64))


class Machine(RuleBasedStateMachine):
    """A store and a dict: key -> [vector, state]; every number is whole or an eighth."""

    tier, device = "memory", "cpu"

    @initialize()
    def open(self):
        self.stack = contextlib.ExitStack()
        self.folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.store = TIERS[self.tier](self.folder).store("t", WIDTH, arrays.module(self.device))
        self.known, self.saved, self.state = {}, {}, ()
        type(self).opened += 1

    def initial(self, part):
        return np.full(part.columns, part.initial, part.dtype)

    def places(self, pairs):
        """Insert unseen keys."""
        xp = self.store.xp
        asked = np.concatenate([[0], np.cumsum([1 + i % 3 for _, i in pairs], dtype=np.int64)])
        found = self.store.find_or_insert(*columns(xp, pairs), numbered, arrays.copy_to(xp, asked))
        for pair in pairs:
            vector = np.array(numbered(*columns(np, [pair]))[0])
            made = [vector, {part.name: self.initial(part) for part in self.state}]
            self.known.setdefault(pair, made)
        return found

    def vectors(self, places):
        xp = self.store.xp
        out, every = xp.empty((len(places), WIDTH), np.float32), xp.arange(len(places))
        unseen = xp.zeros((1, WIDTH), np.float32)
        self.store.read(places, lambda memory, at: gather_rows(memory, at, every, unseen, out))
        return arrays.to_host(out)

    @rule(pairs=keys)
    def find(self, pairs):
        places = self.store.find(*columns(self.store.xp, pairs))
        got = self.vectors(places)
        for pair, place, vector in zip(pairs, arrays.to_host(places), got, strict=True):
            assert (place >= 0) == (pair in self.known)
            np.testing.assert_array_equal(vector, self.known.get(pair, [np.zeros(WIDTH)])[0])

    @rule(pairs=keys, twice=st.booleans(), steps=st.booleans())
    def train(self, pairs, twice, steps):
        xp = self.store.xp
        places, epoch = self.places(pairs), self.store.epoch
        if twice:  # another look-up of the step
            self.places([(3, i) for i in range(40)])
        if self.store.epoch != epoch:
            places = self.store.find(*columns(xp, pairs), again=True)
        g = np.arange(len(pairs) * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
        device_g = arrays.copy_to(xp, g)
        self.store.update(places, lambda memory, at: sgd_rows(memory, at, device_g, lr=1.0))
        for pair, line in zip(pairs, g, strict=True):
            self.known[pair][0] = self.known[pair][0] - line
        if steps:
            self.store.end_step()

    @rule(pairs=keys)
    def prefetch(self, pairs):
        self.store.prefetch(*columns(self.store.xp, pairs))

    @rule(pairs=keys)
    def delete(self, pairs):
        self.store.delete(*columns(self.store.xp, pairs))
        for pair in pairs:
            self.known.pop(pair, None)

    @rule(pairs=keys)
    def import_rows(self, pairs):
        pairs = [pair for pair in pairs if pair not in self.known]
        tables, ids = columns(np, pairs)
        vectors = np.full((len(pairs), WIDTH), 0.5, np.float32)
        states = {
            p.name: np.full((len(pairs), p.columns), 9, p.dtype) for p in self.state[:1]
        }  # fmt: skip
        self.store.import_rows(Rows(tables, ids, vectors, states))
        for j, pair in enumerate(pairs):
            own = {p.name: np.array(states[p.name][j]) for p in self.state}
            self.known[pair] = [vectors[j].copy(), own]

    @rule(state=st.sampled_from(STATES))
    def set_state(self, state):
        self.store.set_state(state)
        self.state = state
        for row in self.known.values():
            row[1] = {part.name: self.initial(part) for part in state}
        self.saved = None  # rows of another size: `RowFolder` tells what a crash leaves

    @rule()
    def clear(self):
        self.store.clear()
        self.known = {}

    @rule()
    def save(self):
        self.store.save()
        self.saved = {pair: [row[0].copy(), dict(row[1])] for pair, row in self.known.items()}

    @precondition(lambda self: self.tier in ("cached_ssd", "both caches") and self.saved)
    @rule()
    def crash(self):
        self.store.close()
        self.store = TIERS[self.tier](self.folder).store("t", WIDTH, arrays.module(self.device))
        assert self.store.state == self.state
        self.known = {pair: [row[0].copy(), dict(row[1])] for pair, row in self.saved.items()}

    @rule(home=st.booleans())
    def to(self, home):
        self.store.to(arrays.module("cpu" if home else self.device))

    @rule(part=st.integers(0, 1))
    def iterate(self, part):
        first = len(self.store) // 2 * part
        rows = self.store.export_rows(first, len(self.store))
        tables, ids = self.store.keys(first, len(self.store))
        np.testing.assert_array_equal(arrays.to_host(tables), rows.tables)
        np.testing.assert_array_equal(arrays.to_host(ids), rows.ids)
        np.testing.assert_array_equal(
            self.vectors(self.store.places(first, len(self.store))), rows.vectors
        )

    @rule()
    def export(self):
        got = {}
        for rows in self.store.export():
            for j, pair in enumerate(zip(rows.tables.tolist(), rows.ids.tolist(), strict=True)):
                assert pair not in got
                got[pair] = rows.vectors[j], {name: s[j] for name, s in rows.states.items()}
        assert got.keys() == self.known.keys()
        for pair, (vector, states) in got.items():
            np.testing.assert_array_equal(vector, self.known[pair][0])
            for name, state in states.items():
                np.testing.assert_array_equal(state, self.known[pair][1][name])

    @invariant()
    def counts_agree(self):
        assert len(self.store) == len(self.known)
        tables = np.array([table for table, _ in self.known], np.int64)
        assert self.store.table_counts(4).tolist() == np.bincount(tables, minlength=4).tolist()

    def teardown(self):
        if hasattr(self, "store"):
            self.export()
            self.store.close()
            self.stack.close()


class WeakIndex(KeyIndex):
    """It finds the row of another key for many that are not there."""

    _PLACE_BITS = 8
    _SEGMENT_BITS = 2, 4


INDEXED = [(tier, KeyIndex) for tier in TIERS]
INDEXED += [(tier, WeakIndex) for tier in TIERS if tier != "memory"]  # which has another


@pytest.mark.parametrize(("tier", "index"), INDEXED)
def test_against_a_dict(tier, np_or_xp, index, monkeypatch):
    device = arrays.name(np_or_xp)
    monkeypatch.setattr(cached_store, "KeyIndex", index)
    machine = type("Store", (Machine,), {"tier": tier, "device": device, "opened": 0})
    many = settings(
        max_examples=25 if device == "cpu" else 5, stateful_step_count=25, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=many)
    assert machine.opened >= many.max_examples


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "memory"])
def test_a_deleted_key_of_equal_hash_is_not_found(tier, monkeypatch, tmp_path):
    """Another has its number by now, and its payload still stands there."""
    monkeypatch.setattr(cached_store, "KeyIndex", WeakIndex)
    met = (i for i in itertools.count() if place_of(0, i, 8, 4) == 17)
    first, deleted, mover = ([(0, next(met))] for _ in range(3))
    with contextlib.closing(TIERS[tier](tmp_path).store("t", WIDTH)) as store:
        store.find_or_insert(*columns(np, first + deleted), numbered)
        store.delete(*columns(np, first))
        store.find_or_insert(*columns(np, mover), numbered)
        store.delete(*columns(np, deleted))
        assert (store.find(*columns(np, mover + deleted)) >= 0).tolist() == [True, False]
        assert len(store) == 1
        store.find_or_insert(*columns(np, deleted + first), numbered)
        assert store.export_rows(0, 3).ids.tolist() == [mover[0][1], deleted[0][1], first[0][1]]


@pytest.mark.parametrize(
    "change",
    [
        lambda store, keys: store.clear(),
        lambda store, keys: store.set_state(STATES[1]),
        lambda store, keys: store.delete(*keys),
        lambda store, keys: store.close(),
    ],
    ids=["clear", "set_state", "delete", "close"],
)
def test_rows_that_are_read_ahead_stay_until_then(change, monkeypatch):
    store, ended = CachedHost(cache_rows=1).store("t", WIDTH), []
    keys = columns(np, [(0, i) for i in range(300)])
    store.find_or_insert(*keys, numbered)
    store.end_step()
    store.find(keys[0][:1], keys[1][:1])  # after which most have left the cache
    store.save()
    backing = store._backing
    real = {name: getattr(backing, name) for name in ("read", "truncate", "close")}

    def read(rows, out):
        if not ended:
            time.sleep(0.2)
        real["read"](rows, out)
        ended.append("read")

    def goes(name):
        def call(*arguments):
            ended.append(name)
            real[name](*arguments)

        return call

    monkeypatch.setattr(backing, "read", read)
    for name in ("truncate", "close"):
        monkeypatch.setattr(backing, name, goes(name))
    store.prefetch(*keys)
    assert store._ahead._rows.size > 200
    change(store, keys)
    assert ended[0] == "read"
    assert {"truncate", "close"} & set(ended)
    store.close()


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "memory"])
def test_a_row_of_two_keys_of_equal_hash_is_read_once(tier, monkeypatch, tmp_path):
    monkeypatch.setattr(cached_store, "KeyIndex", WeakIndex)
    met = [i for i in range(4000) if place_of(0, i, 8, 4) == 17][:3]
    with contextlib.closing(TIERS[tier](tmp_path).store("t", WIDTH)) as store:
        store.find_or_insert(*columns(np, [(0, met[1]), *((1, i) for i in range(300))]), numbered)
        store.end_step()
        store.find_or_insert(*columns(np, [(1, i) for i in range(300)]), numbered)
        store.end_step()
        real, asked = store._backing.read, []

        def read(rows, out):
            asked.append(sorted(rows.tolist()))
            real(rows, out)

        monkeypatch.setattr(store._backing, "read", read)
        three = columns(np, [(0, i) for i in met])
        store.prefetch(*three)
        store._ahead.forget()
        assert (store.find(*three) >= 0).tolist() == [False, True, False]
        store.end_step()
        assert asked == [[0], [0]]
        places = store.find_or_insert(*three, numbered)
        assert len(store) == 303
        monkeypatch.undo()
        out, every = np.empty((3, WIDTH), np.float32), np.arange(3)
        unseen = np.zeros((1, WIDTH), np.float32)
        store.read(places, lambda memory, at: gather_rows(memory, at, every, unseen, out))
        np.testing.assert_array_equal(out, numbered(*three))


def test_a_deletion_is_whole_though_the_backing_can_not_follow(tmp_path, monkeypatch):
    store = CachedSSD(path=tmp_path, cache_rows=64).store("t", WIDTH)
    tables, ids = np.zeros(200, np.uint32), np.arange(200)
    store.find_or_insert(tables, ids, numbered)
    store.save()

    def full(count):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store._backing, "truncate", full)
        store.delete(tables[:50], ids[:50])
    assert len(store) == 150
    store.find_or_insert(tables[:60], ids[:60] + 1000, numbered)
    got = np.concatenate([rows.ids for rows in store.export()])
    assert sorted(got) == [*range(50, 200), *range(1000, 1060)]
    store.close()

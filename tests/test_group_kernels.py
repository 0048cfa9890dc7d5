"""Group and MultiTableEmbedding on devices: vectors, rows and gradients of the CPU's."""

import copy

import numpy as np
import oracle
import pytest
from test_unique_keys import fields

from cupyrec import arrays, nn, optim
from cupyrec.embedding import Group, InitialVectors, StatePart, Uniform, memory_store
from cupyrec.ops.sgd import sgd_rows


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of few rows, which the simulator watches faster than those of 16 MB."""
    monkeypatch.setattr(memory_store, "_CHUNK_BYTES", 1 << 12)


def pair(xp, width=4):
    """A group on the CPU, and one on a device."""
    here, there = (Group(InitialVectors(width, Uniform(-1, 1), seed=9)) for _ in range(2))
    there.to(xp)
    assert (here.xp, there.xp) == (np, xp)
    for group in (here, there):
        group.set_state((StatePart("sum", width, 0.5),))
    return here, there


def batch(n, seed, largest=2**62):
    """Ids of a log, negative ones too, in 3 tables."""
    generator = np.random.default_rng(seed)
    ids = np.minimum(generator.zipf(1.3, n), largest) * generator.choice([-1, 1], n)
    return generator.integers(0, 3, n).astype(np.uint32), ids


def check_alike(got, truth):
    for a, b in zip(got[:4], truth[:4], strict=True):  # the arrays
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(arrays.to_host(a), b)


def check_stores(here, there):
    a, b = (group.store.export_rows(0, len(group.store)) for group in (here, there))
    check_alike((*b[:3], b.states["sum"]), (*a[:3], a.states["sum"]))


@pytest.mark.parametrize("seed", range(5))
def test_steps_like_the_cpus(xp, seed):
    """Look-ups with and without insertion, several gradients a step, updates; rows bit for bit."""
    here, there = pair(xp)
    for step, n in enumerate((0, 1, 300)):
        for look_up in range(2):
            tables, ids = batch(n, (seed, step, look_up))
            keys = [arrays.copy_to(xp, a) for a in (tables, ids)]
            for insert in (False, True):
                plan = here.look_up(tables, ids, insert=insert)
                plan_there = there.look_up(*keys, insert=insert)
                check_alike(
                    [*fields(plan_there.keys), *plan_there[1:4]], [*fields(plan.keys), *plan[1:4]]
                )
                check_alike([there.vectors(plan_there)], [here.vectors(plan)])
            gradient = oracle.integers((n, 4), -9, 9, seed=step)
            here.add_gradient(plan, gradient)
            there.add_gradient(plan_there, arrays.copy_to(xp, gradient))
        check_alike(there.gradients(), here.gradients())
        for group in (here, there):
            group.update(
                group.gradients(), step,
                lambda memory, rows, g, rounding: sgd_rows(memory, rows, g, lr=0.25),
            )  # fmt: skip
            group.zero_grad()
        check_stores(here, there)


def test_clear_set_state_move_and_copy(xp):
    here, there = pair(xp)
    tables, ids = batch(300, 0)
    plan = there.look_up(*(arrays.copy_to(xp, a) for a in (tables, ids)), insert=True)
    here.look_up(tables, ids, insert=True)
    there.add_gradient(plan, xp.ones((300, 4), np.float32))
    other = copy.deepcopy(there)
    check_alike(other.gradients(), [arrays.to_host(a) for a in there.gradients()[:4]])
    other.to(np)
    assert other.gradients()[0].size == 0
    check_stores(here, other)
    there.clear()
    assert (len(there.store), there.xp) == (0, xp)
    assert there.gradients()[0].shape == (0,)
    check_stores(here, other)
    other.to(xp)
    check_stores(here, other)


def test_thread_order(xp):
    first, second = batch(200, 1), batch(300, 2)

    def call():
        group = Group(InitialVectors(4, Uniform(), seed=1))
        group.to(xp)
        group.look_up(*(arrays.copy_to(xp, a) for a in first), insert=True)
        plan = group.look_up(*(arrays.copy_to(xp, a) for a in second), insert=True)
        vectors = group.vectors(plan)
        group.add_gradient(plan, vectors)
        return [vectors, *group.gradients()]

    oracle.check_thread_order(xp, call)


def test_host_syncs_of_a_look_up(xp):
    if xp is not arrays.module("sim"):
        pytest.skip("the simulator counts them")
    _, there = pair(xp)
    for seed in range(4):
        keys = [xp.asarray(a) for a in batch(400, seed)]
        for insert in (False, True):
            with xp.record() as seen:
                there.look_up(*keys, insert=insert)
            assert seen.syncs <= 2


# The layer


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adagrad])
def test_embedding_trains_like_the_cpus(xp, optimizer):
    layers = [nn.MultiTableEmbedding(3, 4, seed=5) for _ in range(2)]
    layers[1].to(arrays.name(xp))
    steps = [optimizer(layer.parameters(), lr=0.5) for layer in layers]
    for seed in range(3):
        ids = batch(60, seed)[1].reshape(20, 3)
        gradient = oracle.integers((20, 3, 4), -4, 4, seed=seed)
        results = []
        for layer, step in zip(layers, steps, strict=True):
            here = layer.group.xp
            out = layer(arrays.copy_to(here, ids))
            out.backward(arrays.copy_to(here, gradient))
            step.step()
            results.append(arrays.to_host(out.data))
        np.testing.assert_allclose(results[1], results[0], rtol=1e-6)
    for layer in layers:
        layer.eval()
    unseen = np.arange(10**9, 10**9 + 30).reshape(10, 3)
    vectors = [arrays.to_host(la(arrays.copy_to(la.group.xp, unseen)).data) for la in layers]
    np.testing.assert_array_equal(*vectors)
    assert len(layers[0].group.store) == len(layers[1].group.store)


def test_no_rows_and_strided_ids(xp):
    layer = nn.MultiTableEmbedding(2, 3, seed=1)
    layer.to(arrays.name(xp))
    assert layer(xp.empty((0, 2), np.int64)).shape == (0, 2, 3)
    ids = xp.asarray(np.arange(24).reshape(4, 6))
    a, b = layer(ids[:, ::3]), layer(ids[:, ::3].copy())
    np.testing.assert_array_equal(arrays.to_host(a.data), arrays.to_host(b.data))


def test_refuses_ids_of_another_device(xp):
    layer = nn.MultiTableEmbedding(2, 3)
    name = arrays.name(xp)
    text = f"MultiTableEmbedding: 'ids' must be on device 'cpu' like the tables, got '{name}'."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        layer(xp.zeros((1, 2), np.int64))
    layer.to(name)
    text = f"MultiTableEmbedding: 'ids' must be on device '{name}' like the tables, got 'cpu'."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        layer(np.zeros((1, 2), np.int64))


def test_the_tables_of_keys_are_made_once_a_size_of_batch(xp):
    embedding = nn.MultiTableEmbedding(3, 2).to(arrays.name(xp))
    tables = []
    for samples in (2, 4, 2):
        embedding(xp.zeros((samples, 3), np.int64))
        tables.append(embedding.group.statistics._last[0])
    assert tables[0] is tables[2]
    assert arrays.to_host(tables[1]).tolist() == [0, 1, 2] * 4

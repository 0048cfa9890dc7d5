"""The whole of a DLRM's training through the CUDA path."""

import collections
import time

import numpy as np
import oracle
import pytest

import cupyrec
from cupyrec import arrays, checkpoint, optim
from cupyrec.data import Batch
from cupyrec.models import DLRM
from cupyrec.nn import FusedMLP
from cupyrec.sim import recorder

f32 = np.float32
B, F, D = 64, 27, 16
OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, clip_norm=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.02),
    "adam": lambda p: optim.Adam(p, lr=0.01, clip_norm=0.5),
}


def batches(steps, size=B, seed=0):
    """Zipf ids, some negative; some come again, others are new in every batch."""
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        ids = generator.zipf(1.2, (size, F - 1)) % 5000 - 2000
        dense = generator.standard_normal((size, 13)).astype(f32)
        labels = (generator.random((size, 1)) < 0.3).astype(f32)
        yield Batch(dense, ids, labels)


def train(device, optimizer="adagrad", steps=3, size=B):
    """Losses of the steps, as the device has them, and the model and optimizer after them."""
    cupyrec.manual_seed(5)
    model = DLRM(13, F - 1, D, bottom=(64, 32), top=(64, 32), dropout=0.3).to(device)
    made = OPTIMIZERS[optimizer](model.parameters())
    losses = [cupyrec.train_step(model, batch, made).data for batch in batches(steps, size)]
    return losses, model, made


def host(values):
    return np.array([arrays.to_host(value) for value in values])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_steps_with_dropout_give_the_cpus_losses_and_model(xp, optimizer):
    losses, model, _ = train(arrays.name(xp), optimizer)
    expected, cpu_model, _ = train("cpu", optimizer)
    assert model.device == arrays.name(xp)
    np.testing.assert_allclose(host(losses), host(expected), rtol=8 * np.finfo(f32).eps)
    for name, value in cpu_model.state_dict().items():
        got = arrays.to_host(model.state_dict()[name])
        # Adam divides a gradient by its own size, so that rounding errors of tiny ones grow.
        np.testing.assert_allclose(got, value, rtol=1e-3, atol=2e-5, err_msg=name)
    stores = model.embedding.group.store, cpu_model.embedding.group.store
    assert len(stores[0]) == len(stores[1]) > 500
    rows, truth = (store.export_rows(0, len(store)) for store in stores)
    np.testing.assert_array_equal(rows.tables, truth.tables)  # in the order of first occurrence
    np.testing.assert_array_equal(rows.ids, truth.ids)
    np.testing.assert_allclose(rows.vectors, truth.vectors, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("size", [0, 1, 33])
def test_odd_batches(xp, size):
    losses, model, _ = train(arrays.name(xp), size=size, steps=2)
    expected, _, _ = train("cpu", size=size, steps=2)
    np.testing.assert_allclose(host(losses), host(expected), rtol=8 * np.finfo(f32).eps)
    batch = next(batches(1, size))
    before = len(model.embedding.group.store)
    probabilities = cupyrec.predict(model, (batch.dense, batch.ids + 10_000))
    assert probabilities.shape == (size,)
    assert len(model.embedding.group.store) == before


def test_the_same_bits_in_any_order_of_threads(xp):
    def call():
        losses, model, _ = train(arrays.name(xp), steps=1, size=20)
        rows = model.embedding.group.store.export_rows(0, len(model.embedding.group.store))
        return [*losses, *model.state_dict().values(), rows.ids, rows.vectors]

    oracle.check_thread_order(xp, call)


def test_a_step_syncs_twice_and_allocates_nothing_for_its_dense_part(sim, monkeypatch):
    monkeypatch.setattr(recorder, "_idle", collections.Counter())  # blocks of earlier tests
    _, model, optimizer = train("sim", "adam", steps=3)
    batch = next(batches(1, seed=9))
    with sim.record() as step:
        cupyrec.train_step(model, batch, optimizer)
    assert step.syncs <= 2
    dense = sim.asarray(batch.dense)
    vectors = cupyrec.Tensor(model.embedding(sim.asarray(batch.ids)).data, requires_grad=True)
    labels = sim.asarray(batch.labels)
    for _ in range(4):
        vectors.zero_grad()
        optimizer.zero_grad()
        with sim.record() as seen:
            logits = model.top(model.interaction(model.bottom(dense), vectors))
            cupyrec.bce_with_logits(logits, labels).backward()
    assert (seen.syncs, seen.allocations) == (0, 0)
    names = [launch.name for launch in seen.launches]
    layers = sum(len(m.weights) for m in model.modules() if isinstance(m, FusedMLP))
    # The first layer needs no input gradient, and the last has one output.
    assert names.count("cublaslt.matmul") == 3 * layers - 3
    assert {"dot_interaction_forward", "dot_interaction_backward"} <= set(names)
    assert names.count("bce_with_logits") == names.count("single_output_backward") == 1
    assert not {"ones_like", "mul", "sum"} & set(names)


def test_a_step_takes_few_seconds_to_simulate(sim):
    train("sim", steps=1)  # compiles
    start = time.process_time()
    train("sim", steps=1)
    assert time.process_time() - start < 5


def test_a_loss_that_is_not_finite_updates_nothing(xp):
    _, model, optimizer = train(arrays.name(xp), steps=1)
    batch = next(batches(1))
    store = model.embedding.group.store
    rows = len(store)  # the batch is that of the first step: no new ids

    def state():
        (sums,) = optimizer.state_arrays().values()
        found = store.export_rows(0, rows)
        dense = [arrays.to_host(a).copy() for a in (*model.state_dict().values(), *sums)]
        return [*dense, found.vectors.copy(), found.states["sum"].copy()]

    before = state()
    batch.dense[3, 4] = np.inf
    loss = cupyrec.train_step(model, batch, optimizer)
    assert not np.isfinite(float(loss))
    assert len(store) == rows
    for got, value in zip(state(), before, strict=True):
        np.testing.assert_array_equal(got, value)
    batch.dense[3, 4] = 0
    cupyrec.train_step(model, batch, optimizer)
    assert all((a != b).any() for a, b in zip(state(), before, strict=True))


def test_fit_reads_the_losses_and_stops_at_one_that_is_not_finite(xp):
    batch = next(batches(1, size=40))
    lines = {}
    for device in ("cpu", arrays.name(xp)):
        cupyrec.manual_seed(5)
        model = DLRM(13, F - 1, 4, bottom=(8,), top=(8,)).to(device)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        lines[device] = []
        arguments = dict(optimizer=optimizer, batch_size=8, callbacks=[lines[device].append])
        data = (batch.dense, batch.ids, batch.labels)
        result = cupyrec.fit(model, data, data, **arguments)
        assert result["steps"] == 5
    (cpu, here) = lines.values()
    assert [line.keys() for line in cpu] == [line.keys() for line in here]
    np.testing.assert_allclose(cpu[0]["loss"], here[0]["loss"], rtol=1e-6)
    np.testing.assert_allclose(cpu[1]["valid_auc"], here[1]["valid_auc"], atol=0.01)
    model.bottom.weights[0].data[...] = float("nan")
    with pytest.raises(FloatingPointError, match=r"^(fit|train_step): the loss must be finite"):
        cupyrec.fit(model, data, **arguments)


def test_checkpoints_know_no_device(xp, tmp_path):
    _, model, optimizer = train(arrays.name(xp), "adam", steps=2)
    checkpoint.save(tmp_path / "a", model, optimizer)
    loaded = DLRM(13, F - 1, D, bottom=(64, 32), top=(64, 32), dropout=0.3)
    copy = OPTIMIZERS["adam"](loaded.parameters())
    checkpoint.load(tmp_path / "a", loaded, copy)
    checkpoint.save(tmp_path / "b", loaded, copy)
    checkpoint.load(tmp_path / "b", model, optimizer)
    checkpoint.save(tmp_path / "c", model, optimizer)
    for file in (tmp_path / "a").iterdir():
        for other in "bc":
            assert (tmp_path / other / file.name).read_bytes() == file.read_bytes()


def test_a_model_moves(xp):
    _, model, optimizer = train(arrays.name(xp), steps=1)
    ids = next(batches(1, size=5)).ids
    there = arrays.to_host(model.embedding(arrays.copy_to(xp, ids)).data)
    assert model.to("cpu") is model
    assert model.device == "cpu"
    np.testing.assert_array_equal(model.embedding(ids).data, there)
    with pytest.raises(ValueError, match="later optimizer|device"):
        optimizer.step()
    model.to(arrays.name(xp)).to(arrays.name(xp))
    batch = next(batches(1))
    made = OPTIMIZERS["adagrad"](model.parameters())
    model.to(arrays.name(xp))  # is there already: the optimizer stays right
    assert np.isfinite(float(cupyrec.train_step(model, batch, made)))

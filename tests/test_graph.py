"""Replayed steps against eager ones: the same bits, whatever happens between them."""

import contextlib
import copy
import gc
import weakref

import numpy as np
import pytest

import cupyrec
from cupyrec import Tensor, arrays, graph, nn, optim, random
from cupyrec.data import Batch
from cupyrec.graph import graphed
from cupyrec.models import DLRM
from cupyrec.ops.array_functions import transpose

f32 = np.float32
B, F = 8, 3


class Tower(nn.Module):
    """A small model that draws another mask in each step."""

    def __init__(self):
        self.mlp = nn.FusedMLP(4, [6], 1, hidden_dropout_rate=0.5, skip_final_activation=True)
        self.scale = 1.0

    @graphed
    def forward(self, x):
        return self.mlp(x) * self.scale


class Normed(Tower):
    """It moves running statistics, too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    @graphed
    def forward(self, x):
        return self.mlp(self.norm(x)) * self.scale


def batch(step, size=B):
    generator = np.random.default_rng(step)
    dense = generator.standard_normal((size, 4)).astype(f32)
    labels = (generator.random((size, 1)) < 0.4).astype(f32)
    return Batch(dense, generator.integers(0, 9, (size, F)), labels)


def dlrm():
    return DLRM(4, F, 4, bottom=(6,), top=(6, 5), dropout=0.3)


def dlrm16():
    model = dlrm()
    model.amp = "float16"
    return model


def dlrm_brain():
    model = dlrm()
    model.amp = "bfloat16"
    return model


def loss_of(model, data, kept=None):
    data = data.to(model.device)
    logits = model(data.dense) if isinstance(model, Tower) else model(data.dense, data.ids)
    if kept is not None:
        kept.append(logits)
    return cupyrec.bce_with_logits(logits, data.labels)


def run(device, make, act, steps):
    """Losses, all that the model has learnt and how many graphs each step launched."""
    cupyrec.manual_seed(3)
    model = make().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    losses, launched = [], []
    for step in range(steps):
        with counted(device) as seen:
            optimizer = act(model, optimizer, step, losses) or optimizer
        launched.append(getattr(seen, "graphs", None))
    values = [*losses, *model.state_dict().values()]
    for _, group in model.named_groups():
        values += [group.store.export_rows(0, len(group.store)).vectors]
    values = [v.data if isinstance(v, Tensor) else v for v in values]
    return [arrays.to_host(v) for v in values], launched


def counted(device):
    return arrays.module("sim").record() if device == "sim" else contextlib.nullcontext()


def train(model, optimizer, data, losses):
    loss = loss_of(model, data)
    loss.backward()
    optimizer.step(loss)
    losses.append(loss.data)


def plainly(model, optimizer, step, losses):
    train(model, optimizer, batch(step), losses)


def short_batches(model, optimizer, step, losses):
    train(model, optimizer, batch(step, 3 if step in (3, 5) else B), losses)


def evaluation_between(model, optimizer, step, losses):
    train(model, optimizer, batch(step), losses)
    model.eval()
    with cupyrec.no_grad():
        losses.append(loss_of(model, batch(50)).data)
    model.train()


def results_are_kept(model, optimizer, step, losses):
    loss = loss_of(model, batch(step), losses)
    loss.backward()
    optimizer.step(loss)


def accumulation(model, optimizer, step, losses):
    if step % 3 == 0:
        loss_of(model, batch(90 + step)).backward()
    train(model, optimizer, batch(step), losses)


def two_forwards_before_a_backward(model, optimizer, step, losses):
    loss = loss_of(model, batch(step)) + loss_of(model, batch(90 + step))
    loss.backward()
    optimizer.step(loss)
    losses.append(loss.data)


def forwards_without_backward(model, optimizer, step, losses):
    losses.append(loss_of(model, batch(90 + step)).data)
    train(model, optimizer, batch(step), losses)


def a_penalty_on_the_same_weights(model, optimizer, step, losses):
    w = next(p for name, p in model.named_parameters() if "weights.0" in name)
    loss = (w * w).sum() + loss_of(model, batch(step)) + (w * w * w).sum()
    loss.backward()
    optimizer.step(loss)
    losses.append(loss.data)


def optimizer_replaced(model, optimizer, step, losses):
    if step == 3:
        optimizer = optim.Adagrad(model.parameters(), lr=0.02)
    train(model, optimizer, batch(step), losses)
    return optimizer


def moved(model, optimizer, step, losses):
    if step == 3:
        device = model.device
        model.to("cpu").to(device)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, batch(step), losses)
    return optimizer


def frozen(model, optimizer, step, losses):
    if step == 3:
        next(model.modules()).eval()
    train(model, optimizer, batch(step), losses)


def state_loaded(model, optimizer, step, losses):
    if step == 3:
        model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
    train(model, optimizer, batch(step), losses)


ACTS = {  # graphs launched in each step
    plainly: [0, 0, 2, 2],
    short_batches: [0, 0, 2, 0, 2, 0],
    evaluation_between: [0, 0, 2, 2],
    results_are_kept: [0, 0, 2, 2],
    accumulation: [0, 0, 2, 2, 2],
    two_forwards_before_a_backward: [0, 2, 2, 2],
    forwards_without_backward: [0, 3, 3, 3],
    a_penalty_on_the_same_weights: [0, 0, 2, 2],
    optimizer_replaced: [0, 0, 2, 0, 0, 2],
    moved: [0, 0, 2, 0, 0, 2],
    frozen: [0, 0, 2, 0, 0, 2],
    state_loaded: [0, 0, 2, 2, 2],
}
CASES = [(Tower, act) for act in ACTS] + [(Normed, plainly), (dlrm, plainly), (dlrm, short_batches)]
CASES += [(dlrm16, plainly), (dlrm_brain, plainly), (dlrm_brain, state_loaded)]


@pytest.mark.parametrize(
    ("make", "act"), CASES, ids=[f"{make.__name__}-{act.__name__}" for make, act in CASES]
)
def test_steps_end_in_the_bits_of_eager_ones(xp, monkeypatch, make, act):
    device, steps = arrays.name(xp), len(ACTS[act])
    got, launched = run(device, make, act, steps)
    monkeypatch.setattr(graph, "_CALLS", 1 << 30)
    truth, none = run(device, make, act, steps)
    assert len(got) == len(truth)
    for a, b in zip(got, truth, strict=True):
        np.testing.assert_array_equal(a, b)
    if device == "sim":
        assert none == [0] * steps
        assert launched == ACTS[act]


def test_what_a_graph_depends_on_is_seen(sim):
    cupyrec.manual_seed(3)
    model = Normed().to("sim")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    changes = [
        lambda: setattr(model, "scale", 2.0),
        lambda: setattr(model.mlp, "dropout_rates", [0.1, 0.2]),
        lambda: setattr(model.mlp, "tf32", True),
        lambda: setattr(model, "parts", [[1, 2], [3]]),
        lambda: setattr(model, "parts", [[1], [2, 3]]),
        lambda: setattr(model, "parts", {"first": [1], "second": [2, 3]}),
        lambda: setattr(model, "parts", {"second": [1], "first": [2, 3]}),
        lambda: setattr(model.mlp.biases[0], "requires_grad", False),
        lambda: setattr(model.norm.running_mean, "data", sim.zeros(4, f32)),
    ]
    for change in changes:
        for launched in (0, 0, 2):
            with sim.record() as seen:
                train(model, optimizer, batch(0), [])
            assert seen.graphs == launched
        change()


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: Tensor(x, requires_grad=True)])
@pytest.mark.parametrize("lies", ["behind 4 bytes", "by columns"])
def test_inputs_may_lie_anyhow(xp, monkeypatch, lies, kind):
    """Of a layer with one output the order of sums over 300 rows depends on where they lie."""
    results = []
    for most in (3, 1 << 30):
        monkeypatch.setattr(graph, "_CALLS", most)
        cupyrec.manual_seed(3)
        model = Tower()
        model.mlp = nn.FusedMLP(8, [], 1, skip_final_activation=True)
        model.to(arrays.name(xp))
        optimizer, values = optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            numbers = xp.asarray(np.random.default_rng(step).standard_normal(2401).astype(f32))
            x = numbers[1:].reshape((300, 8) if lies == "behind 4 bytes" else (8, 300))
            x = kind(x if len(x) == 300 else x.T)
            model(x).sum().backward()
            values += [arrays.to_host(p.grad) for p in model.parameters()]
            values += [arrays.to_host(x.grad)] if isinstance(x, Tensor) else []
            optimizer.step()
        results.append(values)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


class Turned(Tower):
    @graphed
    def forward(self, x):
        return transpose(self.mlp(x), (1, 0))


def test_results_and_their_gradients_lie_alike(sim):
    """Whether a step is replayed or not."""
    model = Turned()
    model.mlp = nn.FusedMLP(4, [6], 3)
    optimizer, lies = optim.SGD(model.to("sim").parameters(), lr=0.1), []
    for step in range(4):
        x = Tensor(sim.asarray(batch(step).dense), requires_grad=True)
        with sim.record() as seen:
            y = model(x)
            y.backward(sim.ones((B, 3), f32).T)
        lies.append((y.data.flags.c_contiguous, x.grad.flags.c_contiguous))
        optimizer.step()
    assert seen.graphs == 2
    assert lies == [(True, True)] * 4


@pytest.mark.parametrize("calls", [1, 4])  # as it is, and replayed
def test_parameters_must_stay_on_their_device(sim, calls):
    model = Tower().to("sim")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(calls):
        with sim.record() as seen:
            loss = loss_of(model, batch(step))
        if step < calls - 1:
            loss.backward()
            optimizer.step()
    assert seen.graphs == (calls == 4)
    model.to("cpu")
    with pytest.raises(ValueError, match="a Tensor must stay on its device from the forward pass"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_arguments_by_keyword_are_passed_on(sim):
    model = Tower().to("sim")
    x = sim.asarray(batch(0).dense)
    np.testing.assert_array_equal(model(x=x).numpy(), model(x).numpy())


def test_two_models_and_a_copy_have_graphs_of_their_own(sim):
    cupyrec.manual_seed(3)
    models = [Tower().to("sim"), Tower().to("sim")]
    models.append(copy.deepcopy(models[0]))
    optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in models]
    losses = [[], [], []]
    for step in range(5):
        for model, optimizer, own in zip(models, optimizers, losses, strict=True):
            random.set_step(step)
            train(model, optimizer, batch(step), own)
    first, second, third = ([float(x) for x in own] for own in losses)
    assert first == third != second


def test_dense_part_of_a_step_allocates_nothing_and_waits_for_nothing(sim):
    cupyrec.manual_seed(3)
    model = dlrm().to("sim")
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    vectors = [Tensor(sim.ones((B, F, 4), f32), requires_grad=True) for _ in range(2)]
    dense = sim.asarray(batch(0).dense)
    for step in range(6):
        x = vectors[step % 2]
        x.zero_grad()
        with sim.record() as forward:
            logits = model._towers(dense, x)
        grad = sim.ones(logits.shape, f32)
        with sim.record() as backward:
            logits.backward(grad)
        optimizer.step()
    for seen in (forward, backward):
        assert (seen.syncs, seen.allocations, seen.graphs) == (0, 0, 1)
    names = [launch.name for launch in (*forward.launches, *backward.launches)]
    assert {"dot_interaction_forward", "dot_interaction_backward", "cublaslt.matmul"} <= set(names)


def test_a_lent_gradient_is_not_written_over(sim):
    cupyrec.manual_seed(3)
    model = dlrm().to("sim")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    dense, held = sim.asarray(batch(0).dense), []

    class Keep(cupyrec.Function):
        def forward(self, x):
            return x.copy()

        def backward(self, grad):
            held.append((grad.reshape(-1), grad.get()))
            return (grad,)

    launched = []
    for step in range(6):
        vectors = Keep.apply(Tensor(sim.ones((B, F, 4), f32) * (step + 1), requires_grad=True))
        with sim.record() as seen:
            logits = model._towers(dense, vectors)
            logits.backward(sim.ones(logits.shape, f32))
        launched.append(seen.graphs)
        optimizer.step()
        if step == 4:
            held.clear()
    assert launched == [0, 0, 2, 0, 0, 2]
    for grad, then in held:
        np.testing.assert_array_equal(grad.get(), then.reshape(-1))


class Losses(Tower):
    """Its loss is part of the graph, and both passes count blocks."""

    @graphed
    def forward(self, x, labels):
        return cupyrec.bce_with_logits(self.mlp(x), labels)


def test_a_backward_pass_that_is_captured_before_it_ran_leaves_nothing_behind(sim, monkeypatch):
    """Arrays made in a capture have no contents before the graph is launched."""
    results = []
    for most in (3, 1 << 30):
        monkeypatch.setattr(graph, "_CALLS", most)
        monkeypatch.setattr("cupyrec.autograd._units", {})
        monkeypatch.setattr("cupyrec.scratch._counters", {})
        cupyrec.manual_seed(3)
        models = [Losses().to("sim"), Losses().to("sim")]
        optimizers = [optim.SGD(model.parameters(), lr=0.1) for model in models]
        data = batch(0, 300).to("sim")
        for model in models:
            for _ in range(3):
                model(data.dense, data.labels)
        other = Tensor(sim.ones((), f32), requires_grad=True)
        other.backward()
        values = [other.grad.get()]
        for model, optimizer in zip(models[::-1], optimizers[::-1], strict=True):
            loss = model(data.dense, data.labels)
            loss.backward()
            optimizer.step(loss)
            values += [loss.numpy(), *(p.numpy() for p in model.parameters())]
        results.append(values)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_graphs_and_their_memory_go_with_the_model(sim):
    from cupyrec.sim import heap

    def one():
        model = Tower().to("sim")
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            train(model, optimizer, batch(step), [])
        return weakref.ref(model)

    one()
    gc.collect()
    before = len(heap.the_heap().live)
    gc.disable()
    try:
        assert one()() is None  # without the collector
        assert len(heap.the_heap().live) <= before
    finally:
        gc.enable()


def test_few_graphs_are_kept(sim, monkeypatch):
    monkeypatch.setattr(graph, "_MOST", 2)
    model = Tower().to("sim")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for size in range(2, 5):
        for step in range(3):
            train(model, optimizer, batch(step, size), [])
    with sim.record() as seen:
        for size in (2, 4):
            train(model, optimizer, batch(0, size), [])
    assert seen.graphs == 2


def test_on_the_cpu_and_without_an_optimizer_it_is_called_as_it_is(np_or_xp):
    model = Tower().to(arrays.name(np_or_xp))
    with contextlib.suppress(AttributeError), counted(arrays.name(np_or_xp)) as seen:
        for step in range(4):
            loss_of(model, batch(step)).backward()
            for p in model.parameters():
                p.zero_grad()
    assert getattr(seen, "graphs", 0) == 0

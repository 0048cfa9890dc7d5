"""Optimizers through layers, over many steps, against float64 loops over dense tables."""

import math

import numpy as np
import oracle
import pytest

import cupyrec
from cupyrec import arrays, checkpoint, nn, optim
from cupyrec.embedding import Constant, Normal

WIDTH, IDS, STEPS = 3, 40, 300
ADAM = dict(beta1=0.9, beta2=0.999, eps=1e-8)


def schedule(step):
    """Warm-up from nothing, a jump, a decay."""
    return step / 20 if step <= 20 else 2.0 if step < 100 else 0.999 ** (step - 100)


class Dense:
    """All vectors of a table, in float64; every one of them moves in every step."""

    def __init__(self, layer):
        ids = np.arange(IDS)
        initial = layer.group.initial
        self.w = np.float64(initial(np.zeros(IDS, np.uint32), ids))
        self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)

    def adam(self, g, lr, t, l2=0.0, weight_decay=0.0, scale=1.0):
        g = g + l2 * self.w
        if weight_decay:
            self.w -= lr * weight_decay * self.w
        oracle.adam(
            self.w.reshape(-1), self.m.reshape(-1), self.v.reshape(-1), g.reshape(-1), lr=lr, t=t,
            scale=scale, **ADAM,
        )  # fmt: skip


def batches():
    """Ids by Zipf's law and equal gradients for both; the last id never comes."""
    generator = np.random.default_rng(5)
    for _ in range(STEPS):
        ids = np.minimum(generator.zipf(1.3, 6) - 1, IDS - 2)
        yield ids, generator.normal(size=(6, WIDTH)).astype(np.float32)


def layer_of(**options):
    return nn.MultiTableEmbedding(1, WIDTH, initializer=Normal(std=0.5), seed=3, **options)


def check_close(got, truth):
    assert np.abs(got - truth).max() <= 1e-5 * np.abs(truth).max()


def dense_gradient(ids, grad):
    g = np.zeros((IDS, WIDTH))
    np.add.at(g, ids, np.float64(grad))
    return g


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_catch_up_adam_is_adam_on_a_dense_table(weight_decay):
    """Whenever a row is looked up, in training or evaluation, it is where dense Adam has it."""
    layer = layer_of()
    optimizer = optim.CatchUpAdam(
        layer.parameters(), 0.01, schedule=schedule, weight_decay=weight_decay
    )
    truth, updated = Dense(layer), np.zeros(IDS, bool)
    for t, (ids, grad) in enumerate(batches(), 1):
        before = truth.w.copy()
        out = layer(ids[:, None])
        check_close(out.numpy()[:, 0], before[ids])
        out.backward(grad[:, None])
        optimizer.step()
        updated[ids] = True
        truth.adam(dense_gradient(ids, grad), 0.01 * schedule(t), t, weight_decay=weight_decay)
        if weight_decay:  # a row decays from its first update on
            new = ~updated
            truth.w[new] = before[new]
        if t % 50 == 0:
            digest = layer.digest()
            got = layer.eval()(np.arange(IDS)[:, None]).numpy()[:, 0]
            check_close(got, truth.w)
            layer.train()
            assert layer.digest() == digest
    ids, vectors = layer.export_table(0)
    check_close(vectors, truth.w[ids])
    assert updated.sum() > 10


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_dense_updates_with_l2_and_a_norm_that_includes_it(device):
    steps = STEPS if device == "cpu" else 4
    layer = layer_of(dense_updates=True)
    truth = Dense(layer)
    xp = layer.to(device).group.xp
    optimizer = optim.Adam(
        layer.parameters(), 0.01, l2=0.05, clip_norm=2.0, schedule=schedule, eps=ADAM["eps"]
    )
    layer(xp.asarray(np.arange(IDS)[:, None]))  # all rows are there from the start
    for t, (ids, grad) in zip(range(1, steps + 1), batches(), strict=False):
        out = layer(xp.asarray(ids[:, None]))
        out.backward(xp.asarray(grad[:, None]))
        optimizer.step()
        g = dense_gradient(ids, grad)
        norm = math.sqrt(((g + 0.05 * truth.w) ** 2).sum())
        truth.adam(g, 0.01 * schedule(t), t, l2=0.05, scale=min(1, 2 / norm))
    got = layer.eval()(xp.asarray(np.arange(IDS)[:, None]))
    check_close(arrays.to_host(got.data)[:, 0], truth.w)


def test_catch_up_adam_takes_a_gradient_that_comes_steps_after_its_look_up():
    """Of id 7 in steps 1 and 22, the second by a look-up before step 2; rows start at 0."""
    layer = nn.MultiTableEmbedding(1, 1, initializer=Constant(0))
    optimizer = optim.CatchUpAdam(layer.parameters(), 0.1)
    w, m, v = np.zeros((3, 1))
    layer(np.array([[7]])).sum().backward()
    optimizer.step()
    kept = layer(np.array([[7]]))
    for _ in range(20):
        layer(np.array([[8]])).sum().backward()
        optimizer.step()
    kept.sum().backward()
    optimizer.step()
    for t in range(1, 23):
        oracle.adam(w, m, v, np.array([float(t in (1, 22))]), lr=0.1, t=t, **ADAM)
    ids, vectors = layer.export_table(0)
    np.testing.assert_allclose(vectors[ids == 7, 0], w, rtol=1e-5)


def test_catch_up_adam_takes_a_gradient_whose_look_up_was_before_the_optimizer():
    """The look-up is of step 2 of the first optimizer, its gradient of step 3 of the second."""
    ends = []
    for late in (False, True):
        layer = nn.MultiTableEmbedding(1, 1, initializer=Constant(0))
        optimizer = optim.CatchUpAdam(layer.parameters(), 0.1)
        for _ in range(2):
            layer(np.array([[7]])).sum().backward()
            optimizer.step()
        kept = layer(np.array([[7]]))
        optimizer = optim.CatchUpAdam(layer.parameters(), 0.1)
        for key in (7, 8):
            layer(np.array([[key]])).sum().backward()
            optimizer.step()
        (kept if late else layer(np.array([[7]]))).sum().backward()
        optimizer.step()
        ends.append(layer.digest())
    assert ends[0] == ends[1]


def test_catch_up_adam_refuses_another_decay_before_anything_changes():
    layer, parameter = layer_of(), nn.Parameter([1.0])
    optimizer = optim.CatchUpAdam([*layer.parameters(), parameter], 3.0, weight_decay=0.5)
    optimizer.parameter_groups[0].weight_decay = 0.0
    layer(np.array([[7]])).backward(np.ones((1, 1, WIDTH), np.float32))
    parameter.grad = np.ones(1, np.float32)
    before, constants = layer.digest(), dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.5)
    text = (
        "CatchUpAdam.step: tables must keep the constants that former steps are replayed by, "
        f"{constants}, got {constants | dict(weight_decay=0.0)}."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        optimizer.step()
    assert (layer.digest(), parameter.data.tolist(), optimizer.t) == (before, [1.0], 0)
    optimizer.parameter_groups[0].weight_decay, optimizer.lr = 0.5, 0.1
    optimizer.step()
    assert (optimizer.t, len(layer.group.history)) == (1, 1)


OPTIMIZERS = [
    (optim.SGD, {}),
    (optim.SGD, dict(momentum=0.9)),
    (optim.SGD, dict(momentum=0.9, nesterov=True, weight_decay=0.1)),
    (optim.Adagrad, dict(initial_accumulator=0.1)),
    (optim.RowWiseAdagrad, {}),
    (optim.Adam, {}),
    (optim.AdamW, {}),
    (optim.CatchUpAdam, {}),
    (optim.FTRL, dict(lambda1=1e-3, lambda2=1e-3, beta=1.0)),
]
every_optimizer = pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)


def train(kind, options, device="cpu", dtype="float32", steps=4):
    layer = layer_of(dtype=dtype).to(device)
    xp = layer.group.xp
    parameter = nn.Parameter(oracle.normals(5))
    parameter.data = arrays.copy_to(xp, parameter.data)
    optimizer = kind([*layer.parameters(), parameter], 0.05, **options)
    for t, (ids, grad) in zip(range(steps), batches(), strict=False):
        layer(xp.asarray(ids[:, None])).backward(xp.asarray(grad[:, None]))
        parameter.add_grad(xp.asarray(oracle.normals(5, seed=t)))
        optimizer.step()
    return layer, arrays.to_host(parameter.data)


@every_optimizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_devices_agree(kind, options, dtype):
    (here, dense), (there, moved) = (train(kind, options, d, dtype, 3) for d in ("cpu", "sim"))
    np.testing.assert_allclose(moved, dense, rtol=1e-5, atol=1e-6)
    truth = dict(zip(*here.export_table(0), strict=True))
    close = dict(rtol=1e-4, atol=1e-5) if dtype == "float32" else dict(rtol=2e-2, atol=1e-3)
    for key, vector in zip(*there.export_table(0), strict=True):
        np.testing.assert_allclose(vector, truth.pop(key), **close)
    assert not truth


@every_optimizer
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_same_bits_for_any_number_of_threads(kind, options, dtype):
    threads, digests = cupyrec.num_threads(), []
    try:
        for count in (1, 2, 1, 2):
            cupyrec.set_num_threads(count)
            layer, dense = train(kind, options, dtype=dtype, steps=20)
            digests.append((layer.digest(), dense.tobytes()))
    finally:
        cupyrec.set_num_threads(threads)
    assert len(set(digests)) == 1


@every_optimizer
def test_an_id_seen_first_in_evaluation_has_right_state(kind, options):
    layers = [layer_of(), layer_of()]
    for number, layer in enumerate(layers):
        optimizer = kind(layer.parameters(), 0.05, **options)
        ids = np.array([[7], [8]])
        for _ in range(3):
            if number:
                layer.eval()(ids)
                layer.train()
            layer(ids).backward(np.ones((2, 1, WIDTH), np.float32))
            optimizer.step()
            ids = ids + 1
    assert layers[0].digest() == layers[1].digest()


@every_optimizer
@pytest.mark.parametrize("former", [optim.Adagrad, optim.RowWiseAdagrad, optim.CatchUpAdam])
def test_a_new_optimizer_starts_rows_anew_from_what_they_are(former, kind, options):
    first, second = layer_of(), layer_of()
    optimizer = former(first.parameters(), 0.05)
    for ids, grad in list(batches())[:5]:
        first(ids[:, None]).backward(grad[:, None])
        optimizer.step()
    exported = first.export_table(0)  # of rows that catch up, as they would now be
    second.import_table(0, *exported)
    for layer in (first, second):
        optimizer = kind(layer.parameters(), 0.05, **options)
        for now, then in zip(layer.export_table(0), exported, strict=True):
            np.testing.assert_array_equal(now, then)
        for ids, grad in list(batches())[5:8]:
            layer(ids[:, None]).backward(grad[:, None])
            optimizer.step()
    assert first.digest() == second.digest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bad_gradients_are_told_by_table_and_count_and_change_nothing(dtype):
    layer = nn.MultiTableEmbedding(3, 2, dtype=dtype)
    optimizer = optim.Adagrad(layer.parameters(), 0.1)
    layer(np.zeros((2, 3), np.int64))
    before = layer.digest()
    grad = np.ones((4, 3, 2), np.float32)
    grad[0, 2, 1], grad[3, 2, 0], grad[1, 1] = np.nan, np.inf, -np.inf
    layer(np.array([[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 9]])).backward(grad)
    text = (
        "Adagrad.step: gradients must be finite, got those of 1 id of table 1 not, "
        "those of 2 ids of table 2 not in step 1."
    )
    with pytest.raises(FloatingPointError, match=oracle.sentence(text)):
        optimizer.step()
    layer.delete(2, np.array([9]))  # which the look-up has brought
    assert layer.digest() == before
    assert optimizer.t == 0


@pytest.mark.parametrize("decay", [0.5, 0.5 - 2.0**-27])  # float32 has no 1 - 2^-26
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.CatchUpAdam, optim.FTRL])
def test_a_decay_that_would_turn_weights_around_changes_nothing(kind, decay):
    layer, parameter = layer_of(), nn.Parameter([1.0])
    optimizer = kind([*layer.parameters(), parameter], 2.0, weight_decay=decay)
    layer(np.array([[7]])).backward(np.ones((1, 1, WIDTH), np.float32))
    parameter.grad = np.ones(1, np.float32)
    before = layer.digest()
    text = (
        f"{kind.__name__}.step: lr * weight_decay must be less than 1 in float32, "
        f"got 2.0 * {decay}."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        optimizer.step()
    assert (layer.digest(), parameter.data.tolist(), optimizer.t) == (before, [1.0], 0)
    optimizer.lr = 0.1
    optimizer.step()
    assert optimizer.t == 1


def test_ftrl_and_sgd_refuse():
    parameter = nn.Parameter([1.0])
    for build, text in [
        (lambda: optim.FTRL([parameter], 0.1, lambda1=-1),
         "FTRL: 'lambda1' must be finite and not negative, got -1."),
        (lambda: optim.FTRL([parameter], 0.1, initial_accumulator=0.0),
         "FTRL: 'beta' or 'initial_accumulator' must be positive, got 0 and 0."),
        (lambda: optim.FTRL([parameter], 0.1, initial_accumulator=-1.0),
         "FTRL: 'initial_accumulator' must be finite and not negative, got -1.0."),
        (lambda: optim.SGD([parameter], 0.1, momentum=1.0),
         "SGD: 'momentum' must lie in [0, 1), got 1.0."),
        (lambda: optim.SGD([parameter], 0.1, nesterov=True),
         "SGD: 'nesterov' must come with 'momentum', got 0."),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=oracle.sentence(text)):
            build()


def test_dense_updates_begin_where_lazy_ones_ended():
    layer = layer_of()
    optimizer = optim.CatchUpAdam(layer.parameters(), 0.1)
    for step in range(10):
        layer(np.array([[1 if step < 3 else 2]])).sum().backward()
        optimizer.step()
    owed = layer.export_table(0)[1]
    layer.group.dense_updates = True
    assert layer.group.gradients().rows.tolist() == [0, 1]
    np.testing.assert_array_equal(layer.group.store.export_rows(0, 2).vectors, owed)


@pytest.mark.parametrize("saved", [0.0, 0.9])
@pytest.mark.parametrize("dense", [False, True])
def test_momentum_is_neither_lost_nor_made_up_by_a_checkpoint(saved, dense, tmp_path):
    def build(momentum):
        model = nn.FusedMLP(3, [2], 1) if dense else layer_of()
        return model, optim.SGD(model.parameters(), 0.1, momentum=momentum)

    checkpoint.save(tmp_path / "c", *build(saved))
    name = "optimizer/momentum/biases.0" if dense else "rows/groups.3/momentum"
    what = f"not have {name}, got such state" if saved else f"have {name}, got no such state"
    text = f"checkpoint.load: '{tmp_path / 'c'}' must {what}."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        checkpoint.load(tmp_path / "c", *build(0.9 - saved))
    checkpoint.load(tmp_path / "c", *build(saved))

"""Training by several ranks, under mpirun: what one rank alone does, whatever their number."""

import contextlib
import copy
import itertools
import threading

import numpy as np
import pytest

import cupyrec
from cupyrec import arrays, data, models, nn, optim, training
from cupyrec.inference import evaluate, predict
from cupyrec.parallel import Communicator, Exchange, world

pytestmark = pytest.mark.ranks
RANKS = world()
N, R = RANKS.size, RANKS.rank
KINDS = {"sgd": optim.SGD, "adam": optim.Adam, "adagrad": optim.Adagrad}


def log(rows: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.zipf(1.3, (rows, 3)) % 50 - 5
    dense = rng.standard_normal((rows, 2), np.float32)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-dense[:, 0] - 0.1 * ids[:, 0]))).astype("f")
    return dense, ids, labels


def model_of(
    ranks: Communicator, codec: str = "none", rounding: str = "nearest", **options
) -> nn.Module:
    cupyrec.manual_seed(5)
    model = models.DLRM(2, 3, embedding_dim=4, bottom=[8], top=[8], **options)
    model.embedding.group.exchange = Exchange(
        ranks, forward=codec, backward=codec, rounding=rounding, num_tables=3
    )
    return model


def train(
    ranks: Communicator,
    kind: str,
    steps: int,
    batch: int,
    device: str = "cpu",
    codec: str = "none",
    rounding: str = "nearest",
    dense_updates: bool = False,
    **options,
) -> tuple[np.ndarray, ...]:
    """Losses, all vectors and dense parameters after so many steps."""
    model = model_of(ranks, codec, rounding, dropout=0.3).to(device)
    model.embedding.group.dense_updates = dense_updates
    optimizer = KINDS[kind](model.parameters(), 0.05, **options)
    batches = data.RankSlices(data.Arrays(*log(steps * batch)), ranks.rank, ranks.size)
    losses = [
        float(training.train_step(model, part, optimizer).item()) for part in batches.batches(batch)
    ]
    losses = ranks.all_gather("losses", np.array(losses)).sum(axis=0)
    model.eval()
    every = np.repeat(np.arange(-5, 45)[:, None], 3, axis=1)
    vectors = model.embedding(arrays.copy_to(model.embedding.group.xp, every)).data
    return losses, *(arrays.to_host(a) for a in (vectors, optimizer.parameter_groups[0].data))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(float) - b) / np.linalg.norm(b.astype(float)))


@pytest.mark.parametrize(("kind", "steps"), [("sgd", 200), ("adam", 10), ("adagrad", 10)])
def test_any_number_of_ranks_does_what_one_does(kind: str, steps: int) -> None:
    alone, together = (train(ranks, kind, steps, batch=12) for ranks in (Communicator(), RANKS))
    for a, b in zip(together, alone, strict=True):
        assert distance(a, b) <= 1e-6


def test_clipping_sees_the_gradients_of_all_ranks() -> None:
    runs = [train(r, "sgd", 20, batch=12, clip_norm=0.05) for r in (Communicator(), RANKS)]
    free = train(Communicator(), "sgd", 20, batch=12)
    for alone, together, other in zip(*runs, free, strict=True):
        assert distance(together, alone) <= 1e-6 < distance(other, alone)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_l2_of_all_rows_is_that_of_all_ranks(device: str) -> None:
    """In float64 by one rank: tests/test_optimizers.py."""
    steps = 40 if device == "cpu" else 3
    options = dict(l2=0.05, clip_norm=0.05, dense_updates=True)
    together = train(RANKS, "adam", steps, batch=12, device=device, **options)
    alone, free = (
        train(Communicator(), "adam", steps, batch=12, **options | dict(l2=l2)) for l2 in (0.05, 0)
    )
    for a, b, other in zip(together, alone, free, strict=True):
        assert distance(a, b) <= 1e-5 < distance(other, b)


def test_simulated_devices_do_it_too() -> None:
    alone = train(Communicator(), "adam", 3, batch=5)
    for a, b in zip(train(RANKS, "adam", 3, batch=5, device="sim"), alone, strict=True):
        assert distance(a, b) <= 1e-5


@pytest.mark.parametrize("codec", ["int8", "fp16", "bf16"])
def test_the_same_bits_twice(codec: str) -> None:
    once, again = (train(RANKS, "adam", 5, batch=12, codec=codec) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_same_bits_twice_by_stochastic_rounding() -> None:
    once, again, nearest = (
        train(RANKS, "sgd", 5, batch=12, codec="int8", rounding=rounding)
        for rounding in ("stochastic", "stochastic", "nearest")
    )
    for a, b, c in zip(once, again, nearest, strict=True):
        assert a.tobytes() == b.tobytes()
        assert distance(a, c) < 0.01
    assert (once[1] != nearest[1]).any()


def test_all_ranks_have_the_same_dense_parameters() -> None:
    *_, dense = train(RANKS, "adam", 5, batch=12, codec="int8", clip_norm=0.1)
    everyone = RANKS.all_gather("a test", dense)
    assert all((other == dense).all() for other in everyone)


@pytest.mark.parametrize("rows", [1, 2, 13])
def test_ranks_without_rows_and_short_batches(rows: int) -> None:
    """Fewer rows than ranks; a last batch of one row; all rows are trained and evaluated once."""
    x = log(rows)
    model = model_of(RANKS)
    optimizer = optim.SGD(model.parameters(), 0.1)
    result = training.fit(model, x, optimizer=optimizer, batch_size=4)
    assert (result["steps"], result["samples"]) == (-(-rows // 4), rows)
    alone = model_of(Communicator())
    training.fit(alone, x, optimizer=optim.SGD(alone.parameters(), 0.1), batch_size=4)
    ours, theirs = evaluate(model, x, batch_size=4), evaluate(alone, x, batch_size=4)
    assert ours["samples"] == rows
    np.testing.assert_allclose(ours["logloss"], theirs["logloss"], rtol=1e-6)
    assert ours["auc"] == theirs["auc"] or rows < 13
    np.testing.assert_allclose(
        predict(model, x[:2], batch_size=5), predict(alone, x[:2]), rtol=1e-6
    )


def test_groups_are_those_of_all_ranks() -> None:
    x = log(203)
    of_all, alone = (
        evaluate(model_of(ranks), x, batch_size=50, group=1) for ranks in (RANKS, Communicator())
    )
    assert 0.3 < of_all["gauc"] < 0.7
    np.testing.assert_allclose(of_all["gauc"], alone["gauc"], rtol=1e-3)


def test_tasks_and_weights_are_those_of_all_ranks() -> None:
    dense, ids, labels = log(48)
    x = data.Arrays(dense, ids, np.stack([labels, 1 - labels], 1), np.arange(48) % 3)
    told = []
    for ranks in (RANKS, Communicator()):
        cupyrec.manual_seed(5)
        model = models.MMoE(2, 3, 2, embedding_dim=4, experts=2, expert=[8], tower=[])
        model.embedding.group.exchange = Exchange(ranks, num_tables=3)
        optimizer = optim.SGD(model.parameters(), 0.3)
        options = dict(batch_size=12, task_weights=[1, 0.25], positive_weight=2)
        training.fit(model, x, optimizer=optimizer, epochs=3, **options)
        told.append([*evaluate(model, x).values()])
    np.testing.assert_allclose(*told, rtol=1e-4)


def test_keys_travel_ahead_and_rows_do_not(monkeypatch) -> None:
    """Keys of the next batch leave when rows have come; results are those of steps by hand."""
    x, submit, names = log(48), RANKS.submit, []
    by_hand, fitted = model_of(RANKS, "int8"), model_of(RANKS, "int8")
    optimizers = [optim.Adam(model.parameters(), 0.1) for model in (by_hand, fitted)]
    for batch in data.RankSlices(data.Arrays(*x), R, N).batches(16):
        training.train_step(by_hand, batch, optimizers[0])

    def spy(what: str, *given):
        if threading.current_thread() is threading.main_thread():
            names.append(what)
        return submit(what, *given)

    monkeypatch.setattr(RANKS, "submit", spy)
    training.fit(fitted, x, optimizer=optimizers[1], batch_size=16)
    dense = [optimizer.parameter_groups[0].data.tobytes() for optimizer in optimizers]
    assert dense[0] == dense[1]
    order = [name for name in names if name in ("keys", "rows", "gradients")]
    order = [name for name, _ in itertools.groupby(order)]  # of one rank a job's calls count too
    step = ["rows", "keys", "gradients"]
    assert order[:9] == ["keys", *step, *step, "rows", "gradients"]


def test_metrics_tell_of_bytes_and_errors(tmp_path) -> None:
    lines: list[dict] = []
    model = model_of(RANKS, "int8")
    optimizer = optim.SGD(model.parameters(), 0.1)
    training.fit(model, log(40), optimizer=optimizer, batch_size=8, callbacks=[lines.append])
    (line,) = (line for line in lines if "loss" in line)
    assert 1e-4 < line["quantization_error"]["rows"] < 1 / 127
    assert 1e-4 < line["quantization_error"]["gradients"] < 1 / 127
    sent = RANKS.all_gather("sent", np.array([RANKS.bytes_sent.get("rows", 0)])).sum()
    assert line["bytes_sent"].get("rows", 0) <= sent and (N == 1 or line["bytes_sent"]["rows"] > 0)


def test_each_row_is_on_one_rank() -> None:
    model = model_of(RANKS)
    training.fit(model, log(40), optimizer=optim.SGD(model.parameters(), 0.1), batch_size=16)
    counts = RANKS.all_gather("rows", np.array([len(model.embedding.group.store)]))
    x = log(40)[1]
    assert counts.sum() == sum(len(np.unique(x[:, f])) for f in range(3))


def test_ranks_that_start_from_other_parameters_are_refused() -> None:
    cupyrec.manual_seed(R)
    model = models.DLRM(2, 3)
    if N == 1:
        optim.SGD(model.parameters(), 0.1)
        return
    with pytest.raises(ValueError, match="all ranks must start from the same parameters"):
        optim.SGD(model.parameters(), 0.1)


def test_each_rank_imports_the_ids_that_it_owns() -> None:
    tables = nn.MultiTableEmbedding(2, 4).train()
    ids = np.arange(50)
    vectors = np.tile(ids[:, None], 4).astype(np.float32)
    for table in range(2):
        tables.import_table(table, ids, vectors + table)
    counts = RANKS.all_gather("rows", np.array([len(tables.group.store)]))
    assert counts.sum() == 100
    own = slice(R, R + 20)
    got = tables(np.stack([ids[own], ids[own]], axis=1)).data
    np.testing.assert_array_equal(got, np.stack([vectors[own], vectors[own] + 1], axis=1))
    assert (RANKS.all_gather("rows", np.array([len(tables.group.store)])) == counts).all()
    gone = RANKS.all_gather("deleted", np.array([tables.delete(0, ids[:10])]))
    assert gone.sum() == 10


def test_a_model_is_copied_in_the_middle_of_a_step() -> None:
    model = model_of(RANKS, "fp16")
    optimizer = optim.SGD(model.parameters(), 0.1)
    dense, ids, _ = log(2 * N)
    ids, following = np.split(ids[R::N], 2)
    model.prepare(following)
    out = model(dense[R : R + 1], ids)
    out.backward(np.ones(out.shape, np.float32))
    group = copy.deepcopy(model).embedding.group
    assert model.embedding.group.ahead is not None is group.ahead
    own, other = model.embedding.group.gradients(), group.gradients()
    np.testing.assert_array_equal(own.values, other.values)
    optimizer.step()
    model(dense[R : R + 1], following)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64, np.int64])
def test_ids_of_any_type_are_asked_for_once(dtype: type, monkeypatch) -> None:
    embedding = nn.MultiTableEmbedding(2, [4, 8], seed=1)
    asked = []
    for group in embedding.groups.values():
        group.exchange = Exchange(RANKS, forward="fp16")  # something to do for one rank, too
        ask = group.exchange.ask
        monkeypatch.setattr(
            group.exchange, "ask", lambda *keys, ask=ask: asked.append(0) or ask(*keys)
        )
    first, second = (np.arange(6).reshape(3, 2).astype(dtype) + R + k for k in range(2))
    embedding.prepare(second)
    embedding(first)
    assert len(asked) == 4  # of two groups, the second ids' ahead
    vectors = embedding(second).data
    assert len(asked) == 4
    assert (embedding(second.copy()).data == vectors).all()
    assert len(asked) == 6


def test_whole_batches_on_every_rank_are_warned_of(caplog) -> None:
    dense, ids, labels = log(12)
    whole = data.Batch(dense, ids, labels[:, None])
    for batch, told in [(whole.of_rank(R, N), 0), (whole, int(N > 1 and R == 0))]:
        caplog.clear()
        model = model_of(RANKS)
        optimizer = optim.SGD(model.parameters(), 0.1)
        for _ in range(2):  # once, in the first step
            training.train_step(model, batch, optimizer)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == told
        assert not told or f"have {12 * N} rows together, but their totals are 12: " in said[0]


def test_gradients_of_many_look_ups_do_not_pile_up() -> None:
    embedding = nn.MultiTableEmbedding(1, 2, seed=1)
    group = embedding.group
    group.exchange = Exchange(RANKS, backward="fp16")  # something to do for one rank, too
    for _ in range(18):
        embedding(np.array([[7], [8]])).backward(np.ones((2, 1, 2), np.float32))
    assert len(group._coming) <= 1 and len(group._pending) <= 17
    gradients = group.gradients()
    assert (gradients.values == 18 * N).all()
    assert RANKS.all_gather("rows", np.array([len(gradients.ids)])).sum() == 2


def test_checkpoints_of_all_ranks(tmp_path) -> None:
    folder = RANKS.all_gather_json("folder", str(tmp_path / "c"))[0]
    model = model_of(RANKS)
    optimizer = optim.Adam(model.parameters(), 0.1)
    training.fit(model, log(40), optimizer=optimizer, batch_size=16)
    cupyrec.checkpoint.save(folder, model, optimizer)
    assert len(cupyrec.checkpoint.verify(folder)["groups"][0]["shards"]) == N
    again, alone = model_of(RANKS), model_of(Communicator())
    for other in (again, alone):
        cupyrec.checkpoint.load(folder, other, optim.Adam(other.parameters(), 0.1))
    x = log(150, seed=9)[:2]  # a block and a half of one rank, less than one of four
    for other, batch in itertools.product((again, alone), (150, 90, 7)):
        assert (predict(other, x, batch_size=batch) == predict(model, x)).all()
    RANKS.barrier("the end of the folder")


class Normalized(nn.Module):
    """What comes, and hidden activations, are normalized over the batch of all ranks."""

    def __init__(self, ranks: Communicator) -> None:
        cupyrec.manual_seed(5)
        self.table = nn.MultiTableEmbedding(3, 2)
        self.table.group.exchange = Exchange(ranks, num_tables=3)
        self.norm = nn.BatchNorm1d(8, ranks=ranks)
        self.mlp = nn.FusedMLP(8, [6], 1, skip_final_activation=True, batch_norm=True)
        self.mlp.norms = [nn.BatchNorm1d(6, ranks=ranks)]

    @cupyrec.graphed
    def towers(self, dense, vectors):
        return self.mlp(self.norm(cupyrec.concatenate([dense, vectors.reshape(-1, 6)], axis=1)))

    def forward(self, dense, ids):
        return self.towers(dense, self.table(ids))


def shares(rows: int, step: int) -> list[int]:
    """Where each rank's rows begin, and all end: any numbers of them, often none."""
    borders = np.random.default_rng(step).integers(0, rows + 1, N - 1)
    return [0, *np.sort(borders).tolist(), rows]


def normalized(
    ranks: Communicator, steps: int, device: str = "cpu", amp: str | None = None
) -> list[np.ndarray]:
    """Dense parameters and running statistics."""
    model = Normalized(ranks).to(device)
    model.amp = amp
    optimizer = optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        dense, ids, labels = log(12, seed=step)
        borders = shares(12, step) if ranks is RANKS else [0, 12]
        first, end = borders[ranks.rank : ranks.rank + 2]
        given = (a[first:end] for a in (dense + np.float32(2), ids, labels[:, None]))
        training.train_step(model, data.Batch(*given, first, 12), optimizer)
    state = model.state_dict()
    running = [arrays.to_host(state[name]) for name in state if "running" in name]
    for own in running if ranks is RANKS else []:
        assert all((other == own).all() for other in RANKS.all_gather("a test", own))
    return [arrays.to_host(optimizer.parameter_groups[0].data), *running]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_batches_of_all_ranks_are_normalized_together(device: str) -> None:
    steps = 50 if device == "cpu" else 3
    alone, together = normalized(Communicator(), steps), normalized(RANKS, steps, device)
    for a, b in zip(together, alone, strict=True):
        assert distance(a, b) <= 1e-6
    if device == "cpu":
        again = normalized(RANKS, steps)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(together, again, strict=True))


@pytest.mark.parametrize(("device", "amp"), [("cpu", "bfloat16"), ("sim", "float16")])
def test_batches_are_normalized_together_in_16_bits(device: str, amp: str) -> None:
    alone = normalized(Communicator(), 3, "cpu", amp)
    together = normalized(RANKS, 3, device, amp)
    for a, b in zip(together, alone, strict=True):
        assert distance(a, b) <= 1e-3


def test_a_batch_of_one_row_is_refused_by_all_ranks() -> None:
    layer, rows = nn.BatchNorm1d(3, ranks=RANKS), int(R == N - 1)
    with pytest.raises(ValueError, match="'x' must have B of at least 2 in training, got"):
        layer(np.ones((rows, 3), np.float32))
    assert layer.eval()(np.ones((rows, 3), np.float32)).shape == (rows, 3)
    assert layer.train()(np.ones((0, 3), np.float32)).shape == (0, 3)
    assert (layer.running_mean.data == 0).all()


@pytest.mark.parametrize("device", ["sim"])
def test_batches_of_all_ranks_have_no_graph(caplog, device: str) -> None:
    model = Normalized(RANKS).to(device)
    optimizer = optim.SGD(model.parameters(), 0.05)
    dense, ids, labels = log(2 * N + 1)
    batch = data.Batch(dense, ids, labels[:, None]).of_rank(R, N)
    for _ in range(5):
        training.train_step(model, batch, optimizer)
    assert ("BatchNorm1d asks other ranks" in caplog.text) == (N > 1)


class Two(nn.Module):
    """Towers on two embeddings, which they take in another order than they use them."""

    def __init__(self, ranks: Communicator) -> None:
        cupyrec.manual_seed(5)
        self.tables = [nn.MultiTableEmbedding(1, 4) for _ in range(2)]
        for table in self.tables:
            table.group.exchange = Exchange(ranks, num_tables=1)
        self.mlps = [nn.FusedMLP(4, [], 1, skip_final_activation=True) for _ in range(2)]

    @cupyrec.graphed
    def towers(self, a, b):
        return self.mlps[1](b.reshape(-1, 4)) + self.mlps[0](a.reshape(-1, 4))

    def forward(self, dense, ids):
        return self.towers(*(table(ids[:, i : i + 1]) for i, table in enumerate(self.tables)))


@pytest.mark.parametrize("device", ["sim"])
def test_ranks_with_and_without_a_graph_make_the_same_calls(device: str) -> None:
    """A batch has as many rows as others for the first rank, for the last one more."""
    found = []
    for ranks, own in ((Communicator(), "cpu"), (RANKS, device)):
        model = Two(ranks).to(own)
        optimizer = optim.SGD(model.parameters(), 0.05)
        for rows in (2 * N, 2 * N, 2 * N, 3 * N - 1, 2 * N):
            dense, ids, labels = log(rows)
            batch = data.Batch(dense, ids, labels[:, None]).of_rank(ranks.rank, ranks.size)
            training.train_step(model, batch, optimizer)
        found.append(arrays.to_host(optimizer.parameter_groups[0].data))
    assert distance(*found) <= 1e-6


def test_a_loss_that_is_not_finite_is_refused_by_all_ranks() -> None:
    """The one whose values aren't finite says which, and the next step is none the worse."""
    last, (dense, ids, labels) = N - 1, log(4 * N)
    model = model_of(RANKS)
    optimizer = optim.SGD(model.parameters(), 0.1)
    spoilt = dense.copy()
    spoilt[-1, 1] = np.nan
    for values, kind in [(spoilt, ValueError if R == last else FloatingPointError), (dense, None)]:
        batch = data.Batch(values, ids, labels[:, None]).of_rank(R, N)
        told = "row 3, column 1" if kind is ValueError else "must be finite"
        with pytest.raises(kind, match=told) if kind else contextlib.nullcontext():
            assert np.isfinite(training.train_step(model, batch, optimizer).item())
    assert optimizer.t == 1

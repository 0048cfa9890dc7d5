"""Tables in a PyTorch model: what torch's own tables, and the same model of cupyrec, compute."""

import collections
import copy
import doctest
from pathlib import Path

import numpy as np
import pytest

import cupyrec
from cupyrec import checkpoint, nn, optim
from cupyrec.embedding import Constant, Normal
from cupyrec.parallel import world

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install cupyrec[torch]")
from cupyrec.interop.torch import MultiTableEmbedding  # noqa: E402  # it needs torch

F, D = 3, 4
PAGE = Path(__file__).parents[1] / "docs" / "pytorch.md"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


def batches(steps, rows=50, seed=1):
    """Ids that come again within and across batches, and labels."""
    rng = np.random.default_rng(seed)
    ids = rng.zipf(1.5, (steps, rows, F)) % 40 - 5
    return [
        (torch.from_numpy(i), torch.from_numpy(y))
        for i, y in zip(ids, rng.integers(2, size=(steps, rows, 1)).astype("f"), strict=True)
    ]


def bce(logits, labels, **options):
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, **options)


def torch_mlp(mlp):
    """The same perceptron in torch."""
    weights = [torch.from_numpy(p.data.copy()) for p in mlp.parameters()]
    layers = []
    for w, b in zip(weights[:2], weights[2:], strict=True):
        layers += [torch.nn.Linear(w.shape[1], w.shape[0]), torch.nn.ReLU()]
        layers[-2].load_state_dict({"weight": w, "bias": b})
    return torch.nn.Sequential(*layers[:-1])


def vectors_of(tables):
    """(table, id) -> vector of every row."""
    return {
        (t, i): v
        for t in range(tables.num_tables)
        for i, v in zip(*(a.tolist() for a in tables.export_table(t)), strict=True)
    }


class DenseTables(torch.nn.Module):
    """Torch's own tables, of the ids from -5 to 34, with the vectors that ours begin with."""

    def __init__(self, layer, **options):
        super().__init__()
        every = torch.arange(-5, 35)[:, None].repeat(1, layer.tables.num_tables)
        start = layer.eval()(every)
        layer.train()
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag.from_pretrained(start[:, t].clone(), freeze=False, **options)
            for t in range(layer.tables.num_tables)
        )

    def forward(self, ids):
        return torch.stack([bag(ids[:, t, None] + 5) for t, bag in enumerate(self.bags)], dim=1)

    def assert_moved_as(self, tables, **tolerance):
        rows = vectors_of(tables)
        assert rows
        expected = [self.bags[t].weight[i + 5].tolist() for t, i in rows]
        np.testing.assert_allclose(list(rows.values()), expected, **tolerance)


def test_training_equals_the_same_model_of_cupyrec(device):
    ours = nn.MultiTableEmbedding(F, D, seed=7)
    mlp = nn.FusedMLP(F * D, (8,), 1, skip_final_activation=True)
    layer, dense = MultiTableEmbedding(F, D, seed=7).to(device), torch_mlp(mlp).to(device)
    optimizers = [
        optim.SGD(mlp.parameters(), 0.1),
        optim.Adagrad(ours.parameters(), 0.1),
        torch.optim.SGD(dense.parameters(), 0.1),
        optim.Adagrad(layer.tables.parameters(), 0.1),
    ]
    for ids, labels in batches(6):
        logits = mlp(ours(ids.numpy()).reshape(-1, F * D))
        loss = cupyrec.bce_with_logits(logits, labels.numpy())
        loss.backward()
        torch_loss = bce(dense(layer(ids.to(device)).flatten(1)), labels.to(device))
        torch_loss.backward()
        assert loss.item() == pytest.approx(torch_loss.item(), rel=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected, rows = vectors_of(ours), vectors_of(layer.tables)
    assert rows.keys() == expected.keys()
    assert len(rows) > 60
    moved = [rows[key] for key in expected]
    np.testing.assert_allclose(moved, list(expected.values()), rtol=1e-4, atol=1e-6)
    for p, q in zip(torch_mlp(mlp).parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-4, atol=1e-6)


def test_gradients_equal_those_of_dense_tables():
    layer = MultiTableEmbedding(F, D)
    plain, mlp = DenseTables(layer, mode="sum"), torch.nn.Linear(F * D, 1)
    optimizer = optim.SGD(layer.tables.parameters(), 1.0)
    torch_optimizer = torch.optim.SGD(plain.parameters(), 1.0)
    for ids, labels in batches(2):  # two backward passes add up before a step
        for model in (layer, plain):
            bce(mlp(model(ids).flatten(1)), labels).backward()
    optimizer.step()
    torch_optimizer.step()
    plain.assert_moved_as(layer.tables, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_equal_those_of_torch(mode):
    layer = MultiTableEmbedding(1, D, pooling=mode)
    optimizer = optim.SGD(layer.tables.parameters(), 1.0)
    plain = DenseTables(layer, mode=mode, include_last_offset=True).bags[0]
    ids, offsets = torch.tensor([1, 2, 1, 30, 7]), torch.tensor([0, 3, 3, 5])
    weights = [torch.arange(1.0, 6, requires_grad=True) for _ in range(2)]
    given = weights if mode == "sum" else [None, None]
    ours, expected = layer(ids, offsets, given[0]), plain(ids + 5, offsets, given[1])
    torch.testing.assert_close(ours[:, 0], expected)
    factors = torch.arange(12.0).view(3, D)
    (ours.view(3, D) * factors).sum().backward()  # it has no gaps
    (expected * factors).sum().backward()
    if mode == "sum":
        torch.testing.assert_close(weights[0].grad, weights[1].grad)
    optimizer.step()
    for (_, i), vector in vectors_of(layer.tables).items():
        torch.testing.assert_close(
            torch.tensor(vector), (plain.weight - plain.weight.grad)[i + 5].detach()
        )


def test_weights_learn_in_evaluation_too_but_rows_do_not():
    layer = MultiTableEmbedding(1, 2, pooling="sum", initializer=Constant(3.0)).eval()
    weights = torch.ones(2, requires_grad=True)
    layer(torch.tensor([4, 5]), torch.tensor([0, 2]), weights).sum().backward()
    assert weights.grad.tolist() == [6, 6]
    assert len(layer.tables.group.store) == 0
    assert len(layer.tables.group.gradients().rows) == 0


def test_shapes_and_no_copies():
    ids = torch.arange(30).view(5, F, 2)
    assert MultiTableEmbedding(F, D)(ids).shape == (5, F, 2, D)
    joined = MultiTableEmbedding(F, [4, 2, 4])
    assert joined(ids[..., 0]).shape == (5, 10)  # ids with gaps
    assert joined(ids[:0, :, 0]).shape == (0, 10)
    assert list(joined.parameters()) == []


def test_ids_and_vectors_are_not_copied():
    layer, ids, seen = MultiTableEmbedding(F, D), torch.arange(6).view(2, F), []
    forward = layer.tables.forward

    def look_up(*given):
        seen.extend([given[0], forward(*given).data])
        return cupyrec.Tensor(seen[1])

    layer.tables.forward = look_up
    with torch.no_grad():
        vectors = layer(ids)
    assert [x.ctypes.data for x in seen] == [ids.data_ptr(), vectors.data_ptr()]


def test_evaluation_inserts_nothing_and_no_grad_records_nothing():
    layer = MultiTableEmbedding(F, D)
    ids = torch.arange(6).view(2, F)
    unseen = layer.eval()(ids)
    assert not unseen.requires_grad
    assert len(layer.tables.group.store) == 0
    layer.train()
    with torch.no_grad():
        assert not layer(ids).requires_grad
    assert len(layer.tables.group.store) == 6
    assert torch.equal(layer(ids), unseen)  # what training starts from


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_widen(dtype):
    layer = MultiTableEmbedding(F, D, initializer=Normal(std=1.0))
    optimizer = optim.SGD(layer.tables.parameters(), 1.0)
    head = torch.nn.Linear(F * D, 1)
    (ids, _), scale = batches(1)[0], 1024.0
    vectors = layer(ids)
    vectors.register_hook(lambda grad: grad / scale)  # as docs say of a GradScaler
    with torch.autocast("cpu", dtype):
        logits = head(vectors.flatten(1))
    assert (vectors.dtype, logits.dtype) == (torch.float32, dtype)
    (logits.float().sum() * scale).backward()
    optimizer.step()
    step = head.weight.detach().to(dtype).float().view(F, D).numpy()
    counts = [collections.Counter(ids[:, t].tolist()) for t in range(F)]
    after = vectors_of(layer.tables)
    layer.tables.group.clear()
    layer.eval()
    for (t, i), vector in after.items():
        moved = layer(torch.full((1, F), i))[0, t].numpy() - vector
        np.testing.assert_allclose(moved, counts[t][i] * step[t], rtol=1e-4, atol=1e-5)


def test_one_gradient_a_look_up():
    layer = MultiTableEmbedding(1, D)
    loss = layer(torch.tensor([[1]])).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="this tape was used up by an earlier backward"):
        loss.backward()


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ((np.zeros((2, 1), int),), TypeError, "'ids' must be a torch.Tensor, got ndarray"),
        ((torch.zeros(2, 1),), TypeError, "'ids' must be one of .*int64.*, got torch.float32"),
        ((torch.zeros(2, 1).bfloat16(),), TypeError, "'ids' must be one of .*got torch.bfloat16"),
        (
            (torch.zeros(2, 1, dtype=torch.int64, device="meta"),),
            TypeError,
            "'ids' must be on device 'cpu' like the tables, got 'meta'",
        ),
        ((torch.zeros(2, 3, dtype=torch.int64),), ValueError, "'ids' must have axes"),
        (
            (torch.zeros(2, dtype=torch.int64), torch.zeros(2)),
            TypeError,
            "'offsets' must be one of .*got torch.float32",
        ),
        (
            (torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1])),
            ValueError,
            "'offsets' must",
        ),
        (
            (torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), torch.ones(2).half()),
            TypeError,
            "'weights' must be one of torch.float32, got torch.float16",
        ),
        (
            (torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), np.ones(2, np.float32)),
            TypeError,
            "'weights' must be a torch.Tensor, got ndarray",
        ),
    ],
)
def test_what_is_refused(given, error, sentence):
    layer = MultiTableEmbedding(1, D, pooling="sum")
    with pytest.raises(error, match=f"^MultiTableEmbedding: {sentence}"):
        layer(*given)
    with pytest.raises(error, match=f"^MultiTableEmbedding: {sentence}"):
        layer.eval()(*given)


def test_a_model_around_it_compiles():
    model = torch.nn.Sequential(MultiTableEmbedding(F, D), torch.nn.Flatten(), torch.nn.ReLU())
    ids = torch.arange(2 * F).view(2, F)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(ids), model(ids))
    compiled(ids).sum().backward()
    assert len(model[0].tables.group.gradients().rows) == 2 * F


# What is saved


def trained(**options):
    model = torch.nn.Sequential(
        MultiTableEmbedding(F, [4, 2, 4], **options), torch.nn.Linear(10, 1)
    )
    optimizer = optim.Adagrad(model[0].tables.parameters(), 0.1)
    for ids, labels in batches(3):
        bce(model(ids), labels).backward()
        optimizer.step()
    return model


def test_a_state_dict_holds_the_tables(tmp_path):
    model, again = trained(dtype="bfloat16"), trained(dtype="bfloat16")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert vectors_of(again[0].tables) == vectors_of(model[0].tables)
    unseen = torch.arange(1000, 1006).view(2, F)
    assert torch.equal(again.eval()(unseen), model.eval()(unseen))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model[0].train()(unseen)
    assert len(vectors_of(model[0].tables)) == len(vectors_of(copied[0].tables)) + 6


def test_states_that_do_not_fit_are_refused():
    state = MultiTableEmbedding(2, 4).state_dict()
    with pytest.raises(ValueError, match=r"widths \[3, 3\], got \[4, 4\]"):
        MultiTableEmbedding(2, 3).load_state_dict(state)
    with pytest.raises(ValueError, match=r"widths \[4\], got \[4, 4\]"):
        MultiTableEmbedding(1, 4).load_state_dict(state)
    state["_extra_state"] |= {"rank": 1, "ranks": 2}
    with pytest.raises(ValueError, match="got rank 1 of 2 in rank 0 of 1"):
        MultiTableEmbedding(2, 4).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key.*_extra_state"):
        MultiTableEmbedding(2, 4).load_state_dict({})


def test_a_checkpoint_goes_on_in_the_same_bits(tmp_path):
    def layer_and_optimizer():
        layer = MultiTableEmbedding(F, D, seed=3)
        return layer, optim.Adagrad(layer.tables.parameters(), 0.1)

    def train(layer, optimizer, parts):
        for ids, _ in parts:
            layer(ids).square().sum().backward()
            optimizer.step()

    layer, optimizer = layer_and_optimizer()
    train(layer, optimizer, batches(4)[:2])
    checkpoint.save(tmp_path / "tables", layer.tables, optimizer)
    again = layer_and_optimizer()
    checkpoint.load(tmp_path / "tables", again[0].tables, again[1])
    for some in ((layer, optimizer), again):
        train(*some, batches(4)[2:])
    assert again[0].tables.digest() == layer.tables.digest()


def test_tables_go_where_torch_puts_the_model():
    model = torch.nn.Sequential(MultiTableEmbedding(F, D))
    asked = []
    model[0].tables.to = asked.append
    model.half().float().to("cpu")
    assert asked == []
    model.to("meta")
    assert asked == ["meta"]
    assert "tables=3, fields=3" in repr(model)


# Several ranks


@pytest.mark.ranks
def test_ranks_train_what_one_does_on_all_rows(tmp_path):
    ranks = world()
    layer = MultiTableEmbedding(F, D, seed=7)
    torch.manual_seed(1)
    plain, mlp = DenseTables(layer, mode="sum"), torch.nn.Linear(F * D, 1)
    alone = copy.deepcopy(mlp)
    optimizer = optim.SGD(layer.tables.parameters(), 1.0)
    dense = torch.optim.SGD(mlp.parameters(), 1.0)
    whole = torch.optim.SGD([*plain.parameters(), *alone.parameters()], 1.0)
    folder = ranks.all_gather_json("folder", str(tmp_path))[0]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=ranks.rank, world_size=ranks.size
    )
    for ids, labels in batches(4):
        mine = slice(ranks.rank, None, ranks.size)
        logits = mlp(layer(ids[mine]).flatten(1))
        (bce(logits, labels[mine], reduction="sum") / len(ids)).backward()
        for parameter in mlp.parameters():
            torch.distributed.all_reduce(parameter.grad)
        bce(alone(plain(ids).flatten(1)), labels).backward()
        for stepping in (optimizer, dense, whole):
            stepping.step()
            stepping.zero_grad()
    torch.distributed.destroy_process_group()
    for own, expected in zip(mlp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
    plain.assert_moved_as(layer.tables, rtol=1e-4, atol=1e-6)
    counts = layer.tables.statistics()["ids"]
    met = torch.cat([ids for ids, _ in batches(4)])
    assert counts.tolist() == [len(met[:, t].unique()) for t in range(F)]
    state = layer.state_dict()
    assert (state["_extra_state"]["rank"], state["_extra_state"]["ranks"]) == (
        ranks.rank, ranks.size,
    )  # fmt: skip
    before = layer.tables.digest()
    layer.load_state_dict(state)
    assert layer.tables.digest() == before


# The page


def test_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert (result.failed, result.attempted) == (0, 40)

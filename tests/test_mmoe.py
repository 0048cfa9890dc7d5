import numpy as np
import oracle
import pytest
import whole_model
from whole_model import DENSE, TABLES

from cupyrec import nn
from cupyrec.models import MMoE, SharedBottom
from cupyrec.models.mmoe import Towers

SMALL = {
    MMoE: dict(experts=3, expert=[7, 6], tower=[5]),
    SharedBottom: dict(bottom=[7, 6], tower=[5]),
}


@pytest.fixture(params=SMALL)
def make(request):
    kind = request.param
    return lambda **options: kind(
        DENSE, TABLES, **dict(num_tasks=2, embedding_dim=5) | SMALL[kind] | options
    )


def inputs(model, rows=9):
    """A batch's logits, and in float64 dense features and embeddings side by side."""
    batch = next(whole_model.batches(1, rows))
    logits = model(batch.dense, batch.ids).numpy()
    vectors = model.embedding(batch.ids).numpy().astype(np.float64).reshape(rows, -1)
    dense = np.float64(batch.dense)[:, : DENSE if model.num_dense else 0]
    return logits, np.concatenate([dense, vectors], axis=1)


@pytest.mark.parametrize("num_dense", [0, DENSE])
@pytest.mark.parametrize(("tasks", "experts"), [(1, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize(("expert", "tower"), [([6], []), ([7, 6], [5]), ([8, 7, 6], [5, 4])])
def test_mmoe_against_the_paper(num_dense, tasks, experts, expert, tower):
    model = MMoE(num_dense, TABLES, tasks, 5, experts, expert, tower)
    logits, rows = inputs(model)
    assert logits.shape == (9, tasks)
    first, gates = np.float64(model.first.weights[0].data), np.float64(model.gates.weights[0].data)
    wide = len(first) // experts
    for b, x in enumerate(rows):
        found = []
        for e in range(experts):
            own = slice(e * wide, (e + 1) * wide)
            y = np.maximum(first[own] @ x + model.first.biases[0].data[own], 0)
            found.append(whole_model.mlp(model.rest[e], y[None])[0] if model.rest else y)
        for t in range(tasks):
            own = slice(t * experts, (t + 1) * experts)
            gate = np.exp(gates[own] @ x + model.gates.biases[0].data[own])
            mixed = sum(g / gate.sum() * y for g, y in zip(gate, found, strict=True))
            expected = whole_model.mlp(model.towers.mlps[t], mixed[None])[0, 0]
            np.testing.assert_allclose(logits[b, t], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_dense", [0, DENSE])
@pytest.mark.parametrize(("bottom", "tower"), [([6], []), ([7, 6], [5])])
def test_shared_bottom_against_its_formula(num_dense, bottom, tower):
    model = SharedBottom(num_dense, TABLES, 2, 5, bottom, tower)
    logits, rows = inputs(model)
    for b, x in enumerate(rows):
        shared = whole_model.mlp(model.bottom, x[None])
        expected = [whole_model.mlp(tower, shared)[0, 0] for tower in model.towers.mlps]
        np.testing.assert_allclose(logits[b], expected, rtol=1e-4, atol=1e-6)


def test_few_rows(make):
    whole_model.check_few_rows(make())


@pytest.mark.parametrize(("tasks", "batch_norm"), [(1, False), (3, False), (2, True)])
def test_gradient(make, tasks, batch_norm):
    whole_model.check_gradient(make(num_tasks=tasks, batch_norm=batch_norm))


def test_all_layers_with_relu_are_normalized(make):
    for made in (make(batch_norm=True), MMoE(DENSE, TABLES, 2, 5, 3, [6], [], batch_norm=True)):
        for mlp in made.modules():
            if isinstance(mlp, nn.FusedMLP):
                assert len(mlp.norms) == len(mlp.weights) - mlp.skip_final_activation


def test_gradient_of_experts_of_one_layer():
    whole_model.check_gradient(MMoE(DENSE, TABLES, 2, 5, 3, [6], []))


@pytest.mark.parametrize("amp", [None, "float16", "bfloat16"])
def test_devices_agree(make, xp, amp):
    whole_model.check_devices_agree(xp, lambda: make(dropout=0.2), amp)


def test_replays(make, xp):
    whole_model.check_it_replays_what_it_does(xp, lambda: make(dropout=0.2))


def test_a_tasks_loss_moves_its_own_gate_and_tower_alone():
    model = MMoE(DENSE, TABLES, 2, 5, 3, [7, 6], [5])
    batch = next(whole_model.batches(1))
    model(batch.dense, batch.ids)[:, 1].sum().backward()
    gate = model.gates.weights[0].grad
    assert not gate[:3].any() and gate[3:].any()
    own, other = model.towers.mlps[1].weights[0].grad, model.towers.mlps[0].weights[0].grad
    assert own.any() and not other.any()


def test_parameter_counts():
    """Of N inputs: E experts, T gates of E N + E, T towers; a shared bottom and T towers."""
    width = 13 + 26 * 8
    sizes = [array.size for array in MMoE(13, 26, 2, 8, 4, [32, 16], [8]).state_dict().values()]
    expert, tower = (width + 1) * 32 + 33 * 16, 17 * 8 + 9
    assert sum(sizes) == 4 * expert + 2 * 4 * (width + 1) + 2 * tower
    model = SharedBottom(13, 26, 2, 8, [32, 16], [8])
    assert sum(array.size for array in model.state_dict().values()) == expert + 2 * tower


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: MMoE(expert=[]), "MMoE: 'expert' must have a layer or more, got []."),
        (lambda: MMoE(expert=[8, 0]), "MMoE: 'expert' must be at least 1, got 0."),
        (lambda: MMoE(experts=0), "MMoE: 'experts' must be at least 1, got 0."),
        (lambda: MMoE(num_tasks=0), "MMoE: 'num_tasks' must be at least 1, got 0."),
        (
            lambda: SharedBottom(bottom=[]),
            "SharedBottom: 'bottom' must have a layer or more, got [].",
        ),
        (lambda: Towers(3, 0, []), "Towers: 'num_tasks' must be at least 1, got 0."),
    ],
)
def test_refuses(call, text):
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        call()

import numpy as np
import oracle
import pytest
import trial
import whole_model
from oracle import sentence

import cupyrec
from cupyrec import optim
from cupyrec.models import DLRM


def inputs(rows, dense=3, tables=4):
    ids = np.random.default_rng(0).integers(-9, 9, (rows, tables))
    return oracle.normals((rows, dense)), ids


def mlp_loops(layer, x, linear):
    weights, biases = [w.data for w in layer.weights], [b.data for b in layer.biases]
    ones, zeros = [1] * len(weights), [0] * len(weights)
    return oracle.mlp(x, weights, biases, ones, zeros, linear)[-1]


@pytest.mark.parametrize("self_interaction", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("dense", [0, 3])
@pytest.mark.parametrize("tables", [1, 4])
def test_logits_against_the_paper(tables, dense, padding, self_interaction):
    options = dict(self_interaction=self_interaction, output_padding=padding)
    if (dense, tables, self_interaction) == (0, 1, False):
        text = "DLRM: there must be two features to multiply, got num_dense = 0, num_tables = 1."
        with pytest.raises(ValueError, match=sentence(text)):
            DLRM(dense, tables, **options)
        return
    model = DLRM(dense, tables, embedding_dim=5, bottom=[6], top=[7, 3], **options)
    x, ids = inputs(9, dense, tables)
    got = model(x, ids)
    assert got.shape == (9, 1)
    rows = model.embedding(ids).numpy()
    bottom = mlp_loops(model.bottom, x, False) if dense else None
    crossed = oracle.dot_interaction(bottom, rows, self_interaction, dense > 0, padding)
    np.testing.assert_allclose(
        got.numpy(), mlp_loops(model.top, crossed, True), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("dense", [0, 3])
@pytest.mark.parametrize("tables", [1, 4])
def test_logits_of_features_side_by_side(tables, dense):
    model = DLRM(dense, tables, embedding_dim=5, bottom=[6], top=[7, 3], interaction="cat")
    x, ids = inputs(9, dense, tables)
    columns = [mlp_loops(model.bottom, x, False)] if dense else []
    columns.append(model.embedding(ids).numpy().reshape(9, tables * 5))
    expected = mlp_loops(model.top, np.concatenate(columns, axis=1), True)
    np.testing.assert_allclose(model(x, ids).numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("amp", [None, "float16", "bfloat16"])
def test_devices_agree_side_by_side(xp, amp):
    whole_model.check_devices_agree(
        xp, lambda: DLRM(whole_model.DENSE, whole_model.TABLES, 8, [6], [7], interaction="cat"), amp
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(interaction="sum"), "DLRM: 'interaction' must be 'dot' or 'cat', got 'sum'."),
        (dict(interaction="cat", output_padding=1),
         "DLRM: 'cat' must come without 'self_interaction', 'output_padding'."),
    ],
)  # fmt: skip
def test_other_interactions(options, text):
    with pytest.raises(ValueError, match=sentence(text)):
        DLRM(3, 4, **options)


def test_its_parts_have_the_names_of_the_paper():
    model = DLRM(13, 26, embedding_dim=16, bottom=[512, 256], top=[1024, 512])
    shapes = {name: array.shape for name, array in model.state_dict().items()}
    assert shapes["bottom.weights.2"] == (16, 256)
    assert shapes["top.weights.0"] == (1024, 16 + 27 * 26 // 2)
    assert shapes["top.weights.2"] == (1, 512)
    assert [name for name, _ in model.named_groups()] == ["embedding.groups.16"]


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    model = DLRM(3, 4, embedding_dim=2, bottom=[3], top=[3])
    logits = model(*inputs(rows))
    assert logits.shape == (rows, 1)
    logits.backward(np.ones((rows, 1), np.float32))
    assert model.eval()(*inputs(rows)).shape == (rows, 1)


def test_dropout_is_in_the_top_and_in_training_alone():
    model = DLRM(3, 4, embedding_dim=2, bottom=[8], top=[8, 8], dropout=0.5)
    assert model.bottom.dropout_rates == [0, 0]
    assert model.top.dropout_rates == [0.5, 0.5, 0]
    x = inputs(20)
    model(*x)
    trained = model(*x).numpy().copy()
    assert not np.array_equal(trained, model.eval()(*x).numpy())
    np.testing.assert_array_equal(model(*x).numpy(), model(*x).numpy())


@pytest.mark.parametrize(("seed", "optimizer"), list(enumerate(["sgd", "adagrad", "adam"] * 2)))
def test_every_seed_learns_a_planted_signal(seed, optimizer):
    """As the command builds it by default, but for its size."""
    cupyrec.manual_seed(seed)
    model = DLRM(1, 2, embedding_dim=8, bottom=[16], top=[16])
    build, lr = {
        "sgd": (optim.SGD, 0.5), "adagrad": (optim.Adagrad, 0.05), "adam": (optim.Adam, 0.01),
    }[optimizer]  # fmt: skip
    cupyrec.fit(
        model, trial.planted(6000), optimizer=build(model.parameters(), lr), epochs=3, batch_size=64
    )
    assert cupyrec.evaluate(model, trial.planted(3000, seed=1))["auc"] > 0.75  # best: about .87


def test_other_inputs_are_refused():
    model = DLRM(3, 4, embedding_dim=2, bottom=[3], top=[3])
    x, ids = inputs(5)
    text = "MultiTableEmbedding: 'ids' must have axes (B, 4), got shape (5, 3)."
    with pytest.raises(ValueError, match=sentence(text)):
        model(x, ids[:, :3])
    with pytest.raises(ValueError, match=r"^fused_mlp: "):
        model(x[:, :2], ids)
    with pytest.raises(ValueError, match=r"^dot_interaction: .*B = 5"):
        model(x, ids[:4])
    text = "DLRM: there must be two features to multiply, got num_dense = 3, num_tables = 0."
    with pytest.raises(ValueError, match=sentence(text)):
        DLRM(3, 0)

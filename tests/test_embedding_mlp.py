import numpy as np
import oracle
import pytest

import cupyrec
from cupyrec import arrays, nn, optim
from cupyrec.parallel import Communicator, Exchange


def pair(hidden, device="cpu", rate=0.0, linear=True, dtype="float32", width=4, **options):
    """The layer, and what it stands for."""
    made = []
    for _ in range(2):
        cupyrec.manual_seed(3)
        embedding = nn.MultiTableEmbedding(3, width, dtype=dtype, **options)
        made.append(
            nn.EmbeddingMLP(
                embedding, hidden, 2, hidden_dropout_rate=rate, skip_final_activation=linear
            ).to(device)
        )
    return made


def plain(layer, ids):
    return layer.mlp(layer.embedding(ids).reshape(len(ids), -1))


def test_normalized_layers_take_whole_batches():
    cupyrec.manual_seed(3)
    layer = nn.EmbeddingMLP(nn.MultiTableEmbedding(3, 4), [8], 2, batch_norm=True)
    ids = np.random.default_rng(0).integers(0, 5, (9, 3))
    got, expected = layer(ids).numpy(), plain(layer, ids).numpy()
    np.testing.assert_array_equal(got, expected)
    assert len(layer.mlp.norms) == 2
    assert (layer.mlp.norms[0].running_mean.numpy() != 0).all()


def train(layer, forward, optimizer, steps=4):
    outputs = []
    for step in range(steps):
        ids = np.random.default_rng(step).zipf(1.5, (9, len(layer.embedding.fields))) % 20
        out = forward(layer.embedding.group.xp.asarray(ids))
        out.backward(layer.embedding.group.xp.asarray(oracle.normals(out.shape, seed=step)))
        optimizer.step()
        outputs.append(arrays.to_host(out.data))
    return outputs


CASES = [([8], 0.0), ([16, 3], 0.5), ([], 0.0), ([100], 0.0)]  # the last one gains nothing


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(("hidden", "rate"), CASES)
@pytest.mark.parametrize("linear", [True, False])
def test_it_trains_like_an_mlp_on_the_embeddings(device, hidden, rate, linear):
    fused, other = pair(hidden, device, rate, linear)
    optimizers = [optim.Adagrad(layer.parameters(), 0.1, clip_norm=5.0) for layer in (fused, other)]
    got = train(fused, fused, optimizers[0])
    cupyrec.random.set_step(0)
    expected = train(other, lambda ids: plain(other, ids), optimizers[1])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(fused.state_dict().values(), other.state_dict().values(), strict=True):
        np.testing.assert_allclose(arrays.to_host(a), arrays.to_host(b), rtol=1e-4, atol=1e-5)
    for table in range(3):
        rows = dict(zip(*other.embedding.export_table(table), strict=True))
        for key, vector in zip(*fused.embedding.export_table(table), strict=True):
            np.testing.assert_allclose(vector, rows.pop(key), rtol=1e-4, atol=1e-5)
        assert not rows


@pytest.mark.parametrize(
    "options", [dict(fields=[0, 2, 1]), dict(fields=[0, 1, 1]), dict(padding_idx=1)]
)
def test_fields_in_any_order_shared_or_with_padding(options):
    fused, other = pair([8], **options)
    optimizers = [optim.SGD(layer.parameters(), 0.1) for layer in (fused, other)]
    got = train(fused, fused, optimizers[0])
    expected = train(other, lambda ids: plain(other, ids), optimizers[1])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_evaluation_changes_nothing_and_sees_unseen_ids():
    fused, _ = pair([8])
    ids = np.arange(12).reshape(4, 3)
    fused(ids[:2])
    digest = fused.embedding.digest()
    fused.eval()
    np.testing.assert_allclose(fused(ids).numpy(), plain(fused, ids).numpy(), rtol=1e-5, atol=1e-6)
    fused(ids).sum().backward()  # of the weights alone
    assert fused.mlp.weights[0].grad is not None
    assert fused.embedding.group.gradients().rows.size == 0
    with cupyrec.no_grad():
        assert not fused(ids[:1]).requires_grad
    assert fused(np.empty((0, 3), np.int64)).shape == (0, 2)
    assert fused.embedding.digest() == digest


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_rank_without_rows_makes_the_calls_of_the_others(rate, monkeypatch):
    """Also if ids are told ahead, for those who gather vectors."""
    fused, _ = pair([8], rate=rate)
    ranks, calls = Communicator(), []
    fused.embedding.group.exchange = Exchange(ranks, forward="int8", backward="int8")
    optimizer, submit = optim.SGD(fused.parameters(), 0.1), ranks.submit
    monkeypatch.setattr(
        ranks, "submit", lambda what, *job: calls.append(what) or submit(what, *job)
    )
    made = []
    for rows in (4, 0):
        calls.clear()
        ids = np.arange(3 * rows).reshape(rows, 3)
        fused.embedding.prepare(ids)
        fused(ids).sum().backward()
        optimizer.step()
        made.append(list(calls))
    assert made[0] == made[1] and {"keys", "rows", "gradients"} <= set(made[0])


def test_squares_of_gradients_are_known_until_others_are_added():
    layer, ids = pair([8])[0], np.arange(27).reshape(9, 3) % 7
    for known in (True, False):
        layer(ids).backward(oracle.normals((9, 2)))
        gradients = layer.embedding.group.gradients()
        assert (gradients.squares is not None) == known
        if known:
            squares = np.sum(np.float64(gradients.values) ** 2)
            assert gradients.squares == pytest.approx(squares, rel=1e-12)


def test_same_bits():
    def call():
        fused, _ = pair([8], dtype="bfloat16")
        out = train(fused, fused, optim.Adam(fused.parameters(), 0.1))
        return [
            *out,
            *fused.state_dict().values(),
            np.frombuffer(fused.embedding.digest().encode()),
        ]

    oracle.check_same_bits(call)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(pooling="sum"), "got widths [4], pooling 'sum' and max_length None."),
        (dict(width=[4, 5, 4]), "got widths [4, 5], pooling None and max_length None."),
        (dict(max_length=7), "got widths [4], pooling None and max_length 7."),
    ],
)
def test_what_is_refused(options, text):
    rule = "EmbeddingMLP: 'embedding' must have one width, no pooling and no max_length, "
    with pytest.raises(ValueError, match=oracle.sentence(rule + text)):
        pair([8], **options)


@pytest.mark.parametrize("ids", [np.zeros((2, 4), np.int64), np.zeros(3, np.int64)])
def test_wrong_ids(ids):
    fused, _ = pair([8])
    with pytest.raises(ValueError, match="MultiTableEmbedding: 'ids' must have axes"):
        fused(ids)

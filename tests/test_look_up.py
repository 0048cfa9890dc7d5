import numpy as np
import oracle
import pytest

from cupyrec import checkpoint, nn

CHANGES = {
    "delete": lambda layer, folder: layer.delete(0, np.array([1])),
    "import": lambda layer, folder: layer.import_table(0, np.array([4]), np.ones((1, 2), "f")),
    "load": lambda layer, folder: checkpoint.load(folder / "saved", layer),
    "move": lambda layer, folder: layer.to("sim").to("cpu"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("weighted", [False, True])
def test_a_look_up_is_void_once_rows_have_other_numbers(change, weighted, tmp_path):
    layer = nn.MultiTableEmbedding(1, 2, pooling="sum")
    checkpoint.save(tmp_path / "saved", layer)
    weights = nn.Parameter(np.ones((2, 1, 2), np.float32)) if weighted else None
    out = layer(np.array([[[1, 2]], [[3, 4]]]), weights=weights)
    change(layer, tmp_path)
    before = layer.digest()
    text = (
        "MultiTableEmbedding: ids must not be deleted, imported, loaded or moved to another device "
        "between a look-up and its backward pass, got such a look-up."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        out.sum().backward()
    assert layer.group.gradients().rows.size == 0
    assert layer.digest() == before


def test_a_look_up_outlives_insertions_and_evaluation():
    layer = nn.MultiTableEmbedding(1, 2)
    out = layer(np.array([[1], [2]]))
    layer(np.arange(3, 50_000)[:, None])
    layer.eval()(np.array([[1], [-1]]))
    out.backward(np.ones((2, 1, 2), np.float32))
    gradients = layer.group.gradients()
    assert gradients.rows.tolist() == [0, 1]
    assert gradients.ids.tolist() == [1, 2]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_iteration_ends_once_rows_have_other_numbers(change, tmp_path):
    layer = nn.MultiTableEmbedding(1, 2)
    checkpoint.save(tmp_path / "saved", layer)
    layer(np.arange(140_000)[:, None])
    parts = layer.iterate(0)
    next(parts)
    layer(np.array([[-1]]))  # a new id doesn't matter
    next(parts)
    change(layer, tmp_path)
    text = (
        "iterate: ids must not be deleted, imported, loaded or moved to another device meanwhile, "
        "got a table where they were."
    )
    with pytest.raises(RuntimeError, match=oracle.sentence(text)):
        next(parts)


def test_gradients_that_nobody_takes_do_not_pile_up():
    embedding = nn.MultiTableEmbedding(1, 2)
    for _ in range(100):
        embedding(np.array([[5], [6]])).backward(np.ones((2, 1, 2), np.float32))
    assert len(embedding.group._pending) <= 17
    assert (embedding.group.gradients().values == 100).all()

import json
import math
import re
import shutil

import numpy as np
import oracle
import pytest
import trial
from oracle import sentence
from safetensors import numpy as safetensors

import cupyrec
from cupyrec import checkpoint, nn, optim
from cupyrec.embedding import InitialVectors, Uniform
from cupyrec.models import DLRM

IDS = [-(2**63), -1, 0, 1, 2**63 - 1, 7]
OPTIMIZERS = {
    kind.__name__: kind
    for kind in (
        optim.SGD, optim.Adagrad, optim.RowWiseAdagrad, optim.Adam, optim.AdamW,
        optim.CatchUpAdam, optim.FTRL,
    )
}  # fmt: skip


def dlrm(tables=2, width=3, **options):
    return DLRM(2, tables, embedding_dim=width, bottom=[5], top=[4], **options)


def batch(ids, tables=2, seed=0):
    ids = np.repeat(np.asarray(ids, np.int64)[:, None], tables, axis=1)
    dense = oracle.normals((len(ids), 2), seed=seed)
    return cupyrec.data.Batch(dense, ids, (dense[:, :1] > 0).astype(np.float32))


def trained(optimizer_class=optim.Adam, ids=IDS, **options):
    model = dlrm(**options)
    optimizer = optimizer_class(model.parameters(), 0.1)
    for seed in range(3):
        cupyrec.train_step(model, batch(ids, seed=seed), optimizer)
    return model, optimizer


def everything(model, optimizer):
    """Bytes of all that a checkpoint keeps."""
    (group,) = (group for _, group in model.named_groups())
    rows = group.store.export_rows(0, len(group.store))
    arrays = {**model.state_dict(), "tables": rows.tables, "ids": rows.ids, "vectors": rows.vectors}
    arrays |= {f"row {key}": state for key, state in rows.states.items()}
    for key, states in optimizer.state_arrays().items():
        arrays |= {f"dense {key} {i}": state for i, state in enumerate(states)}
    values = {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}
    return values | {"t": optimizer.t, "initial": group.initial}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_round_trip_of_everything(name, tmp_path):
    model, optimizer = trained(OPTIMIZERS[name], dropout=0.5)
    seed = model.embedding.group.initial.seed
    model.embedding.group.initial = InitialVectors(3, Uniform(-0.25, 0.5), seed)
    config, progress = {"a": [1, 2.5, "é"], "b": {"c": None}}, {"step": 3, "best_auc": 0.1 + 0.2}
    checkpoint.save(tmp_path / "c", model, optimizer, config=config, progress=progress)
    fresh = dlrm(dropout=0.5)
    again = OPTIMIZERS[name](fresh.parameters(), 0.1)
    assert everything(fresh, again) != everything(model, optimizer)
    cupyrec.random.set_step(77)
    manifest = checkpoint.load(tmp_path / "c", fresh, again)
    assert cupyrec.random.step() == 3
    assert everything(fresh, again) == everything(model, optimizer)
    assert (manifest["config"], manifest["progress"]) == (config, progress)
    assert manifest["model"] == "DLRM"
    assert manifest["optimizer"] == {"class": name, "t": 3, "schedule": None, "scaler": None}
    # Both go on to the same bits, dropout and rows of new ids included.
    for seed in range(3, 6):
        for m, o in ((model, optimizer), (fresh, again)):
            cupyrec.random.set_step(o.t)
            cupyrec.train_step(m, batch([*IDS, 100 + seed], seed=seed), o)
    assert everything(fresh, again) == everything(model, optimizer)
    # What is loaded over is gone.
    checkpoint.load(tmp_path / "c", model, optimizer)
    checkpoint.save(tmp_path / "d", model, optimizer, config=config, progress=progress)
    assert trial.files(tmp_path / "c") == trial.files(tmp_path / "d")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("saved", [True, False], ids=["optimizer", "alone"])
def test_rows_that_owe_steps_serve_as_they_train(saved, dtype, tmp_path):
    """Ids 100 to 105 were in one batch alone: later steps move them, too."""
    model, optimizer = trained(optim.CatchUpAdam, embedding_dtype=dtype)
    cupyrec.train_step(model, batch(range(100, 106)), optimizer)
    for seed in range(5):
        cupyrec.train_step(model, batch(IDS, seed=seed), optimizer)
    checkpoint.save(tmp_path / "c", model, optimizer if saved else None)
    fresh = dlrm(embedding_dtype=dtype)
    checkpoint.load(tmp_path / "c", fresh)
    assert not fresh.embedding.group.store.state
    x = batch([*range(100, 106), *IDS, 999])
    served, trained_on = (m.eval()(x.dense, x.ids).numpy() for m in (fresh, model))
    close = dict(rtol=0) if dtype == "float32" else dict(atol=0.05)  # rounded once more
    np.testing.assert_allclose(served, trained_on, **close)
    other = dlrm()
    checkpoint.load(tmp_path / "c", other)  # of float32
    np.testing.assert_allclose(other.eval()(x.dense, x.ids).numpy(), trained_on, **close)
    if saved and dtype != "float32":
        optimizer = optim.CatchUpAdam(other.train().parameters(), 0.1)
        with pytest.raises(ValueError, match="must have the model's groups"):
            checkpoint.load(tmp_path / "c", other, optimizer)


def test_a_plateau_goes_on_where_it_stood(tmp_path):
    model = dlrm()
    optimizer = optim.SGD(model.parameters(), 0.1, schedule=optim.Plateau(patience=1))
    for auc in (0.7, 0.6, 0.6):
        optimizer.schedule.observe(auc)
    checkpoint.save(tmp_path / "c", model, optimizer)
    fresh = dlrm()
    again = optim.SGD(fresh.parameters(), 0.1, schedule=optim.Plateau(patience=1))
    checkpoint.load(tmp_path / "c", fresh, again)
    assert again.schedule.state_dict() == optimizer.schedule.state_dict()
    assert again.current_lr() == optimizer.current_lr() < 0.1
    before = everything(fresh, again)
    again.schedule = optim.Cosine(4)  # without state
    with pytest.raises(ValueError, match="have a schedule with a state, as .* got Cosine"):
        checkpoint.load(tmp_path / "c", fresh, again)
    assert everything(fresh, again) == before


def test_files_are_plain(tmp_path):
    model, optimizer = trained(optim.Adagrad)
    checkpoint.save(tmp_path / "c", model, optimizer)
    dense = safetensors.load_file(tmp_path / "c" / "dense.safetensors")
    names = list(model.state_dict())
    prefixes = ("parameter/", "optimizer/sum/")
    assert sorted(dense) == sorted(prefix + name for prefix in prefixes for name in names)
    np.testing.assert_array_equal(dense["parameter/top.weights.0"], model.top.weights[0].data)
    parts = {
        part: np.load(tmp_path / "c" / f"embedding.groups.3.00000-of-00001.{part}.npy")
        for part in ("tables", "ids", "vectors", "state.sum")
    }
    assert {part: (a.dtype.str, a.shape) for part, a in parts.items()} == {
        "tables": ("<u4", (12,)), "ids": ("<i8", (12,)),
        "vectors": ("<f4", (12, 3)), "state.sum": ("<f4", (12, 3)),
    }  # fmt: skip
    assert parts["ids"].tolist() == [i for i in IDS for _ in range(2)]  # in the order they came in
    assert parts["tables"].tolist() == [0, 1] * 6
    group = checkpoint.read_manifest(tmp_path / "c")["groups"][0]
    assert (group["rows"], group["width"], group["state"]) == (12, 3, [["sum", 3, 0.0, "float32"]])
    assert (group["tables"], group["shards"]) == ([0, 1], [{"name": "00000-of-00001", "rows": 12}])
    assert len(list((tmp_path / "c").iterdir())) == 6


def test_without_optimizer_state(tmp_path):
    model, optimizer = trained(optim.Adam)
    checkpoint.save(tmp_path / "model", model)
    checkpoint.save(tmp_path / "both", model, optimizer)
    names = {p.name for p in (tmp_path / "model").iterdir()}
    assert not [name for name in names if "state" in name]
    for name in ("model", "both"):
        fresh = dlrm()
        again = optim.Adam(fresh.parameters(), 0.1)
        cupyrec.train_step(fresh, batch([3, 4]), again)
        assert checkpoint.load(tmp_path / name, fresh)["groups"][0]["rows"] == 12
        rows = fresh.embedding.group.store.export_rows(0, 12)
        assert sorted(rows.states) == ["m", "v"]
        assert not rows.states["m"].any()  # it starts anew
        x = batch([*IDS, 99])
        np.testing.assert_array_equal(
            cupyrec.predict(fresh, (x.dense, x.ids)), cupyrec.predict(model, (x.dense, x.ids))
        )
    text = f"checkpoint.load: '{tmp_path / 'model'}' must have the state of Adam, got None."
    with pytest.raises(ValueError, match=sentence(text)):
        checkpoint.load(tmp_path / "model", fresh, again)


@pytest.mark.parametrize("rows", [0, 1, 65_535, 65_536, 65_537, 140_000])
def test_any_number_of_rows(rows, tmp_path):
    model = nn.MultiTableEmbedding(1, 1)
    optimizer = optim.Adagrad(model.parameters(), 0.5)
    ids = np.random.default_rng(0).permutation(rows).reshape(-1, 1) - 100
    model(ids).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", model, optimizer)
    fresh = nn.MultiTableEmbedding(1, 1)
    checkpoint.load(tmp_path / "c", fresh, optim.Adagrad(fresh.parameters(), 0.5))
    got, expected = (m.group.store.export_rows(0, rows) for m in (fresh, model))
    np.testing.assert_array_equal(got.ids, ids[:, 0])
    np.testing.assert_array_equal(got.vectors, expected.vectors)
    np.testing.assert_array_equal(got.states["sum"], expected.states["sum"])
    fresh.eval()
    np.testing.assert_array_equal(fresh(ids).numpy(), model.eval()(ids).numpy())


class Both(nn.Module):
    """Two groups, one of them without rows, under names that are no file names."""

    def __init__(self):
        self.tables = {"user/id": nn.MultiTableEmbedding(1, 2), "..": nn.MultiTableEmbedding(2, 3)}


def test_several_groups_by_any_name(tmp_path):
    model, fresh = Both(), Both()
    model.tables["user/id"](np.array([[5], [6]]))
    checkpoint.save(tmp_path / "c", model)
    checkpoint.load(tmp_path / "c", fresh)
    assert [len(group.store) for _, group in fresh.named_groups()] == [2, 0]
    assert fresh.tables[".."].group.initial == model.tables[".."].group.initial
    assert len(list((tmp_path / "c").iterdir())) == 8
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_every_flipped_bit_and_missing_byte_is_found(tmp_path):
    model, optimizer = trained(optim.Adagrad)
    checkpoint.save(tmp_path / "c", model, optimizer, progress={"step": 3})
    before = everything(model, optimizer)
    generator = np.random.default_rng(0)
    for file in sorted((tmp_path / "c").iterdir()):
        content = file.read_bytes()
        damaged = [content[:-1], content[: len(content) // 2], b"", content + b"x"]
        for at in generator.integers(0, len(content), 40):
            bit = 1 << int(generator.integers(8))
            damaged.append(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        for wrong in damaged:
            file.write_bytes(wrong)
            if file.name == "manifest.json" and same_json(wrong, content):
                continue  # white space
            with pytest.raises(ValueError, match=re.escape(str(tmp_path / "c"))):
                checkpoint.load(tmp_path / "c", model, optimizer)
        file.unlink()
        with pytest.raises(FileNotFoundError, match=re.escape(str(file))):
            checkpoint.load(tmp_path / "c", model, optimizer)
        file.write_bytes(content)
    assert everything(model, optimizer) == before
    checkpoint.load(tmp_path / "c", model, optimizer)


def same_json(a, b):
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


def test_an_optimizer_of_some_parameters_in_another_order(tmp_path):
    def build():
        model = dlrm()
        return model, optim.Adam([*model.top.parameters(), model.bottom.weights[0]], 0.1)

    model, optimizer = build()
    cupyrec.train_step(model, batch(IDS), optimizer)
    checkpoint.save(tmp_path / "c", model, optimizer)
    dense = safetensors.load_file(tmp_path / "c" / "dense.safetensors")
    moments = optimizer.state_arrays()["m"]
    np.testing.assert_array_equal(dense["optimizer/m/bottom.weights.0"], moments[-1])
    assert moments[-1].any()
    assert "optimizer/m/bottom.weights.1" not in dense
    fresh, again = build()
    checkpoint.load(tmp_path / "c", fresh, again)
    np.testing.assert_array_equal(again.state_arrays()["m"][-1], moments[-1])
    every = optim.Adam(fresh.parameters(), 0.1)
    name = "optimizer/m/bottom.biases.0"
    text = f"checkpoint.load: '{tmp_path / 'c'}' must have {name}, got no such state."
    with pytest.raises(ValueError, match=sentence(text)):
        checkpoint.load(tmp_path / "c", fresh, every)
    text = "checkpoint: the optimizer's parameters must be the model's, got also [(2,)]."
    with pytest.raises(ValueError, match=sentence(text)):
        checkpoint.save(tmp_path / "d", model, optim.Adam([nn.Parameter([1.0, 2.0])], 0.1))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_saved(value, tmp_path):
    model, optimizer = trained(optim.SGD)
    model.bottom.weights[0].data[0, 0] = value
    rule = "parameter/bottom.weights.0 must be finite, got 1 of 10 values that are not."
    text = f"checkpoint.save: {rule}"
    with pytest.raises(FloatingPointError, match=sentence(text)):
        checkpoint.save(tmp_path / "c", model, optimizer)
    model.bottom.weights[0].data[0, 0] = 0
    optimizer.lr = 1e30
    model.embedding(batch(IDS).ids).sum().backward(np.float32(1e30))
    optimizer.step()
    text = "checkpoint.save: vectors of embedding.groups.3 must be finite, got 36 of 36 values"
    with pytest.raises(FloatingPointError, match=re.escape(text)):
        checkpoint.save(tmp_path / "c", model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_a_moved_checkpoint_loads(tmp_path):
    model, optimizer = trained()
    checkpoint.save(tmp_path / "c", model, optimizer)
    shutil.move(tmp_path / "c", tmp_path / "elsewhere")
    fresh = dlrm()
    again = optim.Adam(fresh.parameters(), 0.1)
    checkpoint.load(str(tmp_path / "elsewhere"), fresh, again)
    assert everything(fresh, again) == everything(model, optimizer)

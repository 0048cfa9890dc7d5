import re
import zipfile
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_checkpoint import dlrm

from cupyrec import checkpoint
from cupyrec.checkpoint_import import import_table
from cupyrec.migrate.weights import read_weight

NAMES = (
    "embedding_dict.C1.weight",  # DeepCTR-Torch
    "linear_model.embedding_dict.C1.weight",
    "embedding_layer.embedding_layer.embedding_layers.C1.weight",  # FuxiCTR
    "fm.lr_layer.embedding_layer.embedding_layer.embedding_layers.C1.weight",
)
FORMS = "safetensors", "npz", "compressed"


def numbers(count, width):
    return np.random.default_rng(0).standard_normal((count, width)).astype(np.float32)


def write(folder, form, arrays):
    if form == "safetensors":
        save_file(arrays, folder / "w.safetensors")
        return folder / "w.safetensors"
    (np.savez_compressed if form == "compressed" else np.savez)(folder / "w.npz", **arrays)
    return folder / "w.npz"


def read(file, width, most=7, **options):
    ids, rows = [], []
    for some, vectors, states in read_weight(file, width, most, **options):
        assert (some.dtype, vectors.dtype, states) == (np.int64, np.float32, {})
        assert len(some) == len(vectors) <= most
        ids += some.tolist()
        rows += vectors.tolist()
    return ids, rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [0, 1, 7, 23])
def test_rows_by_their_numbers_and_by_a_vocabulary(rows, form, tmp_path):
    arrays = {name: numbers(rows, 1 if "linear" in name else 5) for name in NAMES}
    file = write(tmp_path, form, arrays)
    for name, array in arrays.items():
        width = array.shape[1]
        assert read(file, width, weight=name) == (list(range(rows)), array.tolist())
        words = np.array([2**64 - 1, 2**63, *range(30)][:rows], np.uint64)
        ids = [-1, -(2**63), *range(30)][:rows]
        got = read(file, width, 65536, weight=name, vocabulary=words)
        assert got == (ids, array.tolist())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("array", "options", "error", "rule"),
    [
        (numbers(3, 4), {"weight": "b"}, ValueError, "'weight' must be one of .*, a, got 'b'."),
        (numbers(3, 5), {}, ValueError,
         r"and 4 columns together, got \['a'\] of shapes \[\(3, 5\)\]."),
        (numbers(3, 4)[0], {}, ValueError, r"'a' of .* must have axes \(N, D\), got shape \(4,\)."),
        (numbers(3, 4).astype(np.float64), {}, TypeError, "must be float32, got (F64|float64)."),
        (numbers(3, 4), {"vocabulary": np.arange(2)}, ValueError,
         r"'vocabulary' must have axes \(3\), got shape \(2,\)."),
        (numbers(3, 4), {"vocabulary": np.arange(3.0)}, TypeError, "'ids' must be int64 or"),
        (np.full((3, 4), np.nan, np.float32), {}, ValueError, "must be finite, got 3 of 3 not."),
    ],
)  # fmt: skip
def test_refuses(array, options, error, rule, form, tmp_path):
    file = write(tmp_path, form, {"a": array})
    with pytest.raises(error, match=rule):
        read(file, 4, **({"weight": "a"} | options))


@pytest.mark.parametrize("form", FORMS)
def test_matrices_side_by_side(form, tmp_path):
    """A row of DeepFM here: a vector, and a weight."""
    arrays = {"v": numbers(23, 5), "w": numbers(23, 1) + 1, "x": numbers(22, 1)}
    file = write(tmp_path, form, arrays)
    expected = np.concatenate([arrays["v"], arrays["w"]], axis=1).tolist()
    assert read(file, 6, weight=["v", "w"]) == (list(range(23)), expected)
    text = r"as many rows and 6 columns together, got .* of shapes \[\(23, 5\), \(22, 1\)\]."
    with pytest.raises(ValueError, match=text):
        read(file, 6, weight=["v", "x"])
    with pytest.raises(ValueError, match=r"and 5 columns together, got"):
        read(file, 5, weight=["v", "w"])


def test_refuses_what_is_cut_short_or_of_another_kind(tmp_path):
    for form in FORMS:
        file = write(tmp_path, form, {"a": numbers(300, 4)})
        content = file.read_bytes()
        for kept in (0, 5, len(content) // 2, len(content) - 9):
            file.write_bytes(content[:kept])
            kind = file.suffix.removeprefix(".").replace("npz", ".npz")
            with pytest.raises(ValueError, match=re.escape(f"'{file}' must be {kind}, got: ")):
                read(file, 4, weight="a")
    with pytest.raises(ValueError, match=r"'path' must end in .safetensors or .npz, got .*w.pt'."):
        read(tmp_path / "w.pt", 4, weight="a")
    with pytest.raises(FileNotFoundError, match="none.npz"):
        read(tmp_path / "none.npz", 4, weight="a")
    with pytest.raises(FileNotFoundError, match="none.safetensors"):
        read(tmp_path / "none.safetensors", 4, weight="a")


def test_refuses_damage_within_an_archive(tmp_path):
    file = write(tmp_path, "npz", {"a": numbers(300, 4)})
    content = bytearray(file.read_bytes())
    content[2000] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="must be .npz, got: Bad CRC-32"):
        read(file, 4, weight="a")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", b"no such thing")
    with pytest.raises(ValueError, match="'a' of .* must be .npy, got ValueError"):
        read(file, 4, weight="a")
    np.savez(file, a=np.asfortranarray(numbers(3, 4)))
    with pytest.raises(ValueError, match="must be stored by rows, got by columns."):
        read(file, 4, weight="a")
    np.savez(file, a=np.array([[{}]]))
    with pytest.raises(TypeError, match="must be float32, got object."):
        read(file, 1, weight="a")


def test_into_a_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "c", dlrm())
    file = write(tmp_path, "safetensors", {NAMES[0]: numbers(20, 3)})
    words = np.arange(20) * 1000
    source = partial(read_weight, weight=NAMES[0], vocabulary=words)
    told = import_table(file, tmp_path / "c", tmp_path / "d", "1", read=source)
    assert told == {"imported": 20, "replaced": 0}
    fresh = dlrm()
    checkpoint.load(tmp_path / "d", fresh)
    ids, vectors = fresh.embedding.export_table(1)
    assert ids.tolist() == words.tolist()
    np.testing.assert_array_equal(vectors, numbers(20, 3))
    words[3] = 0
    with pytest.raises(ValueError, match="must have an id once, got 0 twice or more."):
        import_table(file, tmp_path / "c", tmp_path / "e", "1", read=source)
    assert not (tmp_path / "e").exists()

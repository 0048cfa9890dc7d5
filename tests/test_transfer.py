import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.embedding import (
    Constant,
    Group,
    InitialVectors,
    Normal,
    StatePart,
    digest,
    export_rows,
    exported,
    import_vectors,
)  # fmt: skip


def group(dtype="float32"):
    made = Group(InitialVectors(3, Normal(), seed=1), dtype=dtype)
    made.set_state((StatePart("sum", 3, 0.5), StatePart("last", 1, 7, np.int32)))
    return made


def keys(n):
    return (np.arange(n) % 2).astype(np.uint32), np.arange(n) - 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_out_and_in_again(xp, dtype):
    source, target = group(dtype), group(dtype)
    source.to(xp)
    target.to(xp)
    source.look_up(*(arrays.copy_to(xp, a) for a in keys(9)), insert=True)
    rows = export_rows(source, 0, 9)
    assert (rows.vectors.dtype, rows.states["last"].dtype) == (np.float32, np.int32)
    assert rows.states["last"].tolist() == [[7]] * 9
    assert (rows.states["sum"] == 0.5).all()
    import_vectors(target, rows.tables, rows.ids, rows.vectors)
    again = export_rows(target, 0, 9)
    for name in ("tables", "ids", "vectors"):
        np.testing.assert_array_equal(getattr(again, name), getattr(rows, name))
    np.testing.assert_array_equal(digest(source), digest(target))


def test_import_replaces_and_state_begins_anew():
    made = group()
    look_up = made.look_up(*keys(4), insert=True)
    made.add_gradient(look_up, np.ones((4, 3), np.float32))

    def rule(memory, rows, values, rounding):
        chunk = made.store._chunks[0]
        chunk[rows, 3:6] = 9.0

    made.update(made.gradients(), 1, rule)
    tables, ids = keys(4)
    import_vectors(made, tables[1:2], ids[1:2], np.full((1, 3), 2, np.float32))
    rows = export_rows(made, 0, 4)
    assert made.gradients().rows.size == 0
    found = {int(i): (v.tolist(), s[0]) for i, v, s in
             zip(rows.ids, rows.vectors, rows.states["sum"], strict=True)}  # fmt: skip
    assert found[-1] == ([2.0, 2.0, 2.0], 0.5)
    assert [found[key][1] for key in (-2, 0, 1)] == [9.0] * 3


def test_rows_come_in_parts(monkeypatch):
    monkeypatch.setattr("cupyrec.embedding.transfer._ROWS", 4)
    made = Group(InitialVectors(1, Constant(2.0), seed=1))
    assert list(exported(made)) == []
    made.look_up(*keys(9), insert=True)
    assert [len(rows.ids) for rows in exported(made)] == [4, 4, 1]
    one = digest(made)
    monkeypatch.setattr("cupyrec.embedding.transfer._ROWS", 100)
    np.testing.assert_array_equal(digest(made), one)


def test_what_float16_cannot_hold():
    key, vectors = (np.zeros(1, np.uint32), np.array([5])), np.full((1, 3), 1e6, np.float32)
    text = "import_vectors: 'vectors' must lie within float16, up to 65504, got 1e\\+06."
    with pytest.raises(ValueError, match=text):
        import_vectors(group("float16"), *key, vectors)
    import_vectors(group("bfloat16"), *key, vectors)


def test_no_such_rows():
    with pytest.raises(ValueError, match="export_rows: 0 <= first <= stop <= 0 must hold"):
        export_rows(group(), 0, 1)

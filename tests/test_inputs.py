"""Tensors to what a model takes: as data frames do it, or made ready."""

import re

import numpy as np
import pyarrow as pa
import pytest

from cupyrec.data import Column, Frame, Schema
from cupyrec.serving.inputs import Inputs
from cupyrec.serving.open_inference import Tensor

SCHEMA = Schema(
    [
        Column("click", "label"),
        Column("price", "numeric", transform="log", buckets=True),
        Column("age", "numeric"),
        Column("user", "categorical", "integer"),
        Column("item", "categorical", "hex"),
        Column("city", "categorical", "string"),
        Column("note", "ignore"),
    ]
)
ROWS = {
    "price": [1.5, -3.0, None, 1e6],
    "age": [30, None, 0, 7],
    "user": [2**62, -1, None, 0],
    "item": ["ff", "", None, "0123456789abcdef"],
    "city": ["Bonn", "Köln", None, ""],
}
TYPES = {"price": "FP64", "age": "INT32", "user": "INT64", "item": "BYTES", "city": "BYTES"}
ARROW = {"FP64": pa.float64(), "INT32": pa.int32(), "INT64": pa.int64(), "BYTES": pa.string()}


def inputs(schema=SCHEMA):
    return Inputs(schema, schema.num_dense, schema.num_tables, schema.has_bags)


def tensors(rows=ROWS, **others):
    return {n: Tensor(TYPES[n], (len(v),), v) for n, v in rows.items()} | others


def converted(model, *requests):
    """The arrays of requests of one form, as a server makes them."""
    measured = [model.measured(sent) for sent in requests]
    assert len({form for _, form in measured}) == 1
    dense, ids = model.arrays(requests)
    assert len(dense) == len(ids) == sum(rows for rows, _ in measured)
    return dense, ids


def of_frame(columns, schema):
    (batch,) = Frame(pa.table(columns), schema, labels=False).batches(100)
    return batch


@pytest.mark.parametrize("ndim", [1, 2])
def test_columns_become_what_a_frame_makes_of_them(ndim):
    sent = tensors()
    if ndim == 2:
        sent = {n: t._replace(shape=(4, 1)) for n, t in sent.items()}
    dense, ids = converted(inputs(), sent)
    batch = of_frame({n: pa.array(v, ARROW[TYPES[n]]) for n, v in ROWS.items()}, SCHEMA)
    np.testing.assert_array_equal(dense, batch.dense)
    np.testing.assert_array_equal(ids, batch.ids)
    assert dense[0].tolist() == [np.float32(np.log1p(1.5)), 30]
    assert (ids[0, :2].tolist(), ids[2, 0]) == ([2**62, 255], np.iinfo(np.int64).min)


def test_labels_and_ignored_columns_may_be_there():
    more = {n: Tensor("INT64", (4,), [0, 1, 0, 1]) for n in ("click", "note")}
    expected = converted(inputs(), tensors())
    for a, b in zip(converted(inputs(), tensors(**more)), expected, strict=True):
        np.testing.assert_array_equal(a, b)


BAGS = Schema(
    [Column("tags", "categorical", "string", bag=True), Column("user", "categorical", "integer")]
)
USER = Tensor("UINT64", (3,), [1, 2**63, 3])


def check_bags(sent, tags):
    _, bags = converted(inputs(BAGS), sent)
    expected = of_frame({"tags": tags, "user": pa.array([1, 2**63, 3], pa.uint64())}, BAGS).ids
    assert bags.num_fields == expected.num_fields
    np.testing.assert_array_equal(bags.ids, expected.ids)
    np.testing.assert_array_equal(bags.offsets, expected.offsets)


def test_bags_of_one_length():
    tags = Tensor("BYTES", (3, 2), ["a", "b", "c", "d", "e", None])
    check_bags({"tags": tags, "user": USER}, [["a", "b"], ["c", "d"], ["e", None]])


def test_bags_of_any_lengths():
    lengths = Tensor("INT32", (3,), [2, 0, 1])
    sent = {"tags": Tensor("BYTES", (3,), ["a", "b", "c"]), "user": USER, "tags.lengths": lengths}
    check_bags(sent, [["a", "b"], [], ["c"]])


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"tags": Tensor("BYTES", (3,), ["a"] * 3)}, "'shape' must be [B, L] with L of at least"),
        ({"tags": Tensor("BYTES", (2**30, 0), [])}, "'shape' must be [B, L] with L of at least"),
        ({"tags.lengths": Tensor("INT64", (3,), [1, 1, 2])}, "add up to the 3 that there are"),
        ({"tags.lengths": Tensor("INT64", (3,), [2**62, 2**62, 2**63 - 1])}, "add up to the 3"),
        ({"tags.lengths": Tensor("INT64", (3,), [5, -1, -1])}, "must be at least 0 and add up"),
        ({"tags.lengths": Tensor("INT64", (2,), [1, 2])}, "must have as many rows each, got"),
        ({"tags.lengths": Tensor("INT64", (1, 3), [1, 1, 1])}, "'shape' must be [V], and that of"),
        ({"tags.lengths": Tensor("FP32", (3,), [1, 1, 1])}, "must be integers, got FP32"),
    ],
)
def test_bags_that_are_none(sent, said):
    whole = {"tags": Tensor("BYTES", (3,), ["a"] * 3), "user": USER}
    with pytest.raises((ValueError, TypeError)) as told:
        converted(inputs(BAGS), whole | sent)
    assert said in str(told.value)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("price", Tensor("BYTES", (4,), ["1"] * 4), "inputs, column 'price': must be numbers"),
        ("price", Tensor("FP64", (4,), [1e39] * 4), "'age'"),
        ("item", Tensor("INT64", (4,), [1] * 4), "inputs, column 'item': must be text, as its"),
        ("item", Tensor("BYTES", (4,), ["a", "b", "x", "d"]), "row 2, column 'item': must be 1"),
        ("user", Tensor("FP32", (4,), [1.0] * 4), "inputs, column 'user': must be integers or"),
        ("user", Tensor("BYTES", (4,), ["1", "9" * 30, "1", "1"]), "row 1, column 'user': must"),
        ("user", Tensor("INT64", (3,), [1, 2, 3]), "must have as many rows each, got [3, 4]"),
        ("user", Tensor("INT64", (2, 2), [1] * 4), "'shape' must be [B] or [B, 1], got [2, 2]"),
        ("dense", Tensor("FP32", (4, 2), [1.0] * 8), "must be columns of the schema, got 'dense'"),
    ],
)
def test_columns_that_are_none(name, tensor, said):
    with pytest.raises((ValueError, TypeError)) as told:
        converted(inputs(), tensors(**{name: tensor, "age": Tensor("FP64", (4,), [1e39] * 4)}))
    assert said in str(told.value)


def test_columns_of_another_schema_are_told_both_forms():
    rule = "inputs: must be columns of the schema or dense, ids, got 'zip'."
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        converted(inputs(), {"zip": IDS})


def test_a_column_that_is_missing():
    sent = tensors()
    del sent["city"]
    with pytest.raises(ValueError, match="inputs: must have the column 'city' of the schema, got"):
        converted(inputs(), sent)


DENSE, IDS = Tensor("FP32", (2, 2), [1, 2, 3, 4]), Tensor("INT64", (2, 3), [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("schema", [None, SCHEMA])
def test_arrays_that_are_made_ready(schema):
    of_model = Inputs(schema, 2, 3, False)
    dense, ids = converted(of_model, {"dense": DENSE, "ids": IDS})
    assert (dense.dtype, ids.dtype) == (np.float32, np.int64)
    assert (dense.tolist(), ids.tolist()) == ([[1, 2], [3, 4]], [[1, 2, 3], [4, 5, 6]])
    _, ids = converted(
        of_model,
        {
            "dense": DENSE._replace(datatype="FP64"),
            "ids": Tensor("UINT64", (2, 3), [2**64 - 1] * 6),
        },
    )
    assert set(ids.ravel().tolist()) == {-1}
    dense, ids = converted(
        of_model, {"dense": Tensor("FP32", (0, 2), []), "ids": Tensor("INT8", (0, 3), [])}
    )
    assert (dense.shape, ids.shape, ids.dtype) == ((0, 2), (0, 3), np.int64)


def test_bags_that_are_made_ready():
    lengths = Tensor("INT64", (2, 2), [1, 0, 2, 1])
    _, bags = converted(
        Inputs(None, 0, 2, True), {"ids": Tensor("INT64", (4,), [5, 6, 7, 8]), "lengths": lengths}
    )
    assert (bags.ids.tolist(), bags.offsets.tolist()) == ([5, 6, 7, 8], [0, 1, 1, 3, 4])
    assert bags.shape == (2, 2)
    with pytest.raises(ValueError, match=r"input 'ids': 'shape' must be \[V\], got \[2, 2\]"):
        converted(
            Inputs(None, 0, 2, True),
            {"ids": Tensor("INT64", (2, 2), [5, 6, 7, 8]), "lengths": lengths},
        )


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"dense": Tensor("FP32", (2, 1), [1, 2])}, "'shape' must be [B, 2], got [2, 1]"),
        ({"dense": Tensor("FP32", (4,), [1] * 4)}, "'shape' must be [B, 2], got [4]"),
        ({"dense": Tensor("FP32", (1, 2), [1, 2])}, "must have as many rows each, got 1 of"),
        ({"dense": Tensor("INT64", (2, 2), [1] * 4)}, "must be FP32 or FP64, got INT64"),
        ({"dense": Tensor("FP64", (2, 2), [1e39] * 4)}, "must be finite numbers of 32 bits, got 4"),
        ({"dense": Tensor("FP32", (2, 2), [1e39] * 4)}, "must be finite numbers of 32 bits, got 4"),
        ({"dense": Tensor("FP32", (2, 2), memoryview(b"\0\0\xc0\x7f" * 4))}, "must be finite"),
        ({"ids": Tensor("FP32", (2, 3), [1] * 6)}, "must be integers, got FP32"),
        ({"ids": Tensor("BYTES", (2, 3), ["1"] * 6)}, "must be one of numbers, got BYTES"),
        ({"ids": Tensor("INT64", (3, 2), [1] * 6)}, "'shape' must be [B, 3], got [3, 2]"),
        ({"lengths": IDS}, "inputs: must be dense, ids, got 'dense', 'ids', 'lengths'"),
    ],
)
def test_arrays_that_are_not_ready(sent, said):
    with pytest.raises((ValueError, TypeError)) as told:
        converted(Inputs(None, 2, 3, False), {"dense": DENSE, "ids": IDS} | sent)
    assert said in str(told.value)


def test_metadata():
    assert inputs().metadata() == [
        {"name": "price", "datatype": "FP32", "shape": [-1]},
        {"name": "age", "datatype": "FP32", "shape": [-1]},
        {"name": "user", "datatype": "INT64", "shape": [-1]},
        {"name": "item", "datatype": "BYTES", "shape": [-1]},
        {"name": "city", "datatype": "BYTES", "shape": [-1]},
    ]
    assert inputs(BAGS).metadata()[0] == {"name": "tags", "datatype": "BYTES", "shape": [-1, -1]}
    names = [told["name"] for told in Inputs(None, 2, 3, True).metadata()]
    assert names == ["dense", "ids", "lengths"]


@pytest.mark.parametrize(
    ("sent", "rows"),
    [
        (tensors(), 4),
        ({n: t._replace(shape=(2**30, 1)) for n, t in tensors().items()}, 2**30),
        ({n: Tensor(TYPES[n], (0,), []) for n in ROWS}, 0),
    ],
)
def test_rows_are_counted_by_shapes_alone(sent, rows):
    assert inputs().measured(sent)[0] == rows


def test_forms_differ_where_tensors_cant_be_joined():
    model, tensor = Inputs(None, 2, 3, False), DENSE
    others = [tensor, tensor._replace(datatype="FP64"), tensor._replace(data=memoryview(bytes(16)))]
    others += [tensor._replace(data=np.ones(4, dtype)) for dtype in ("i8", "u8", "f8")]
    assert len({model.measured({"dense": one, "ids": IDS})[1] for one in others}) == 6
    wide, narrow, more = (Tensor("BYTES", (3, n), ["a"] * 3 * n) for n in (2, 1, 2))
    lengths = {"tags.lengths": Tensor("INT32", (3,), [1, 1, 1])}
    flat = {"tags": Tensor("BYTES", (3,), ["a"] * 3)}
    sent = {"tags": wide}, {"tags": narrow}, flat | lengths, {"tags": more}
    forms = [inputs(BAGS).measured({"user": USER} | one)[1] for one in sent]
    assert (len({*forms}), forms[0]) == (3, forms[3])


def test_requests_of_any_rows_have_one_form():
    again = {"dense": Tensor("FP32", (7, 2), [0.5] * 14), "ids": IDS._replace(shape=(7, 3))}
    of_model = Inputs(None, 2, 3, False)
    assert of_model.measured(again)[1] == of_model.measured({"dense": DENSE, "ids": IDS})[1]

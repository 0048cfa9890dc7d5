"""Record batches as rows, against Python loops over `to_pylist`."""

import datetime
import decimal
import itertools
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text_ids import fnv1a

from cupyrec.data import Batch, Column, Schema
from cupyrec.data.arrow import ArrowReader, Records, batched

MISSING = -(2**63)
LABEL = Column("label", "label")
ITEM = Column("item", "categorical", "integer")
TAGS = Column("tags", "categorical", "integer", bag=True)


def signed(bits: int) -> int:
    return (bits + 2**63) % 2**64 - 2**63


def expected_id(value: object, encoding: str) -> int:
    if value is None or value == "":
        return MISSING
    if not isinstance(value, str):
        return signed(int(value))
    if encoding == "string":
        return fnv1a(value.encode())
    return signed(int(value, 16)) if encoding == "hex" else int(value)


def expected(table: pa.Table, schema: Schema) -> dict[str, list]:
    """What the documentation says of a table, row by row; bags as lists of ids."""
    out = {"dense": [], "ids": [], "labels": [], "weights": []}
    for row in table.to_pylist():
        dense, ids, buckets = [], [], []
        for column in schema.columns:
            value = row.get(column.name)
            if column.kind == "numeric":
                x = 0.0 if value is None else float(value)
                bucket = 0 if value is None else 1 if x < 0 else 2 + int(2 * math.log1p(abs(x)))
                buckets += [[bucket]] * column.buckets
                if column.transform == "log":
                    x = math.copysign(math.log1p(abs(x)), x)
                dense.append(np.float32(x))
            elif column.bag:
                ids.append([expected_id(v, column.encoding) for v in value or []])
            elif column.kind == "categorical":
                ids.append([expected_id(value, column.encoding)])
        out["dense"].append(dense)
        out["ids"].append(ids + buckets)
        out["labels"].append([float(row[name]) for name in schema.task_names])
        out["weights"] += [[row[c.name]] * len(schema.task_names)
                           for c in schema.columns if c.kind == "weight"]  # fmt: skip
    return out


def told(batch: Batch, schema: Schema) -> dict[str, list]:
    assert (batch.dense.dtype, batch.ids.ids.dtype if schema.has_bags else batch.ids.dtype) == (
        np.float32, np.int64,
    )  # fmt: skip
    if schema.has_bags:
        offsets = batch.ids.offsets.tolist()
        bags = [batch.ids.ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]
        count = batch.ids.num_fields
        ids = [bags[at : at + count] for at in range(0, len(bags), count)]
        assert offsets[0] == 0 and offsets[-1] == len(batch.ids.ids)
    else:
        ids = [[[value] for value in row] for row in batch.ids.tolist()]
    return {
        "dense": [list(row) for row in batch.dense],
        "ids": ids,
        "labels": [] if batch.labels is None else batch.labels.tolist(),
        "weights": [] if batch.weights is None else batch.weights.tolist(),
    }


def read(table: pa.Table, schema: Schema, labels: bool = True, chunk: int = 1000) -> Batch:
    reader, number, some = ArrowReader(schema, labels), 0, []
    reader.check(table.schema, "clicks")
    for batch in table.to_batches(max_chunksize=chunk):
        some.append(reader.block(Records("clicks", number, batch)))
        number += len(batch)
    return reader.batch(some)


# Any table

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


@st.composite
def numbers(draw, size: int) -> pa.Array:
    kind = draw(st.sampled_from([*INTEGERS, "float32", "float64", "float16", "bool", "decimal"]))
    if kind.startswith(("int", "uint")):
        info = np.iinfo(kind)
        values = st.one_of(st.integers(int(info.min), int(info.max)),
                           st.integers(max(-9, int(info.min)), 100))  # fmt: skip
    elif kind.startswith("float"):
        values = st.floats(-6e4, 6e4, width=int(kind[5:]))
    elif kind == "bool":
        values = st.booleans()
    else:
        values = st.decimals(-999, 999, places=2)
    column = draw(st.lists(st.one_of(st.none(), values), min_size=size, max_size=size))
    if kind == "decimal":
        return pa.array(column, pa.decimal128(9, 2))
    if kind == "float16":
        holes = np.array([v is None for v in column], bool)
        return pa.array(np.array([v or 0 for v in column], np.float16), mask=holes)
    array = pa.array(column, {"bool": pa.bool_()}.get(kind) or pa.type_for_alias(kind))
    return array.dictionary_encode() if draw(st.booleans()) else array


WORDS = {
    "hex": st.from_regex(r"[0-9a-fA-F]{0,16}", fullmatch=True),
    "integer": st.one_of(st.just(""), st.integers(-(2**63), 2**63 - 1).map(str)),
    "string": st.text(max_size=8),
}
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]


@st.composite
def ids(draw, size: int, encoding: str) -> pa.Array:
    if encoding == "integer" and draw(st.booleans()):
        kind = draw(st.sampled_from(INTEGERS))
        values = st.integers(int(np.iinfo(kind).min), int(np.iinfo(kind).max))
        type_ = pa.type_for_alias(kind)
    else:
        values, type_ = WORDS[encoding], draw(st.sampled_from(TEXTS))
    column = draw(st.lists(st.one_of(st.none(), values), min_size=size, max_size=size))
    array = pa.array(column, type_)
    encoded = draw(st.booleans()) and type_ != pa.string_view()
    return array.dictionary_encode() if encoded else array


@st.composite
def lists(draw, size: int, encoding: str) -> pa.Array:
    kind = draw(st.sampled_from(["list", "large_list", "fixed"]))
    holes = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    if kind == "fixed":
        width = draw(st.integers(0, 3))
        values = draw(ids(size * width, encoding))
        type_ = pa.list_(values.type, width)
        if width:
            return pa.FixedSizeListArray.from_arrays(
                values, type=type_, mask=pa.array(holes, pa.bool_())
            )
        return pa.array([None if hole else [] for hole in holes], type_)
    lengths = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    values, offsets = draw(ids(sum(lengths), encoding)), np.cumsum([0, *lengths])
    make, width = {"list": (pa.ListArray, "i4"), "large_list": (pa.LargeListArray, "i8")}[kind]
    offsets = pa.array(offsets.astype(width))
    return make.from_arrays(offsets, values, mask=pa.array(holes, pa.bool_()))


@st.composite
def tables(draw) -> tuple[pa.Table, Schema]:
    size = draw(st.integers(0, 12))
    columns, arrays = [], []
    for number in range(draw(st.integers(0, 3))):
        transform = draw(st.sampled_from(["none", "log"]))
        columns.append(Column(f"n{number}", "numeric", transform=transform,
                              buckets=draw(st.booleans())))  # fmt: skip
        arrays.append(draw(numbers(size)))
    for number in range(draw(st.integers(1, 3))):
        encoding, bag = draw(st.sampled_from(list(WORDS))), draw(st.booleans())
        columns.append(Column(f"c{number}", "categorical", encoding, bag=bag))
        arrays.append(draw((lists if bag else ids)(size, encoding)))
    for number in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from(["bool", *INTEGERS, "float", "double"]))
        values = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
        columns.append(Column(f"l{number}", "label"))
        arrays.append(pa.array(values, pa.int8()).cast(pa.type_for_alias(kind)))
    if draw(st.booleans()):
        columns.append(Column("w", "weight"))
        weights = st.floats(0, 100, width=32)
        arrays.append(pa.array(draw(st.lists(weights, min_size=size, max_size=size))))
    order = draw(st.permutations(range(len(columns))))
    table = pa.table({columns[i].name: arrays[i] for i in order} | {"other": pa.nulls(size)})
    cut = draw(st.integers(0, size))
    table = pa.concat_tables([table[:cut], table[cut:]])
    return table.slice(draw(st.integers(0, size))), Schema(columns)


@settings(max_examples=300)
@given(tables(), st.integers(1, 12))
def test_any_table_is_read_as_a_loop_over_its_rows_does(made, chunk) -> None:
    table, schema = made
    batch = read(table, schema, chunk=chunk)
    truth = expected(table, schema)
    got = told(batch, schema)
    assert got["dense"] == truth["dense"]  # to the last bit
    assert got["ids"] == truth["ids"]
    assert got["labels"] == (truth["labels"])
    assert got["weights"] == truth["weights"]
    unlabelled = read(table.drop_columns(schema.task_names), schema, labels=False, chunk=chunk)
    assert unlabelled.labels is None and unlabelled.weights is None
    assert told(unlabelled, schema)["ids"] == truth["ids"]


# What may not be


@pytest.mark.parametrize(("column", "values", "message"), [
    (LABEL, [0, 2], "row 1, column 'label': the label must be 0 or 1, got 2."),
    (LABEL, [0.5, 1.0], "row 0, column 'label': the label must be 0 or 1, got 0.5."),
    (LABEL, [1.0, 1 + 1e-12], "row 1, column 'label': the label must be 0 or 1, got 1.000000000001."),  # noqa: E501
    (LABEL, [1, None], "row 1, column 'label': the label must be 0 or 1, got a null."),
    (LABEL, [0.0, math.nan], "row 1, column 'label': the label must be 0 or 1, got nan."),
    (Column("w", "weight"), [1.0, -0.5],
     "row 1, column 'w': the weight must be a finite number of at least 0, got -0.5."),
    (Column("w", "weight"), [1.0, None],
     "row 1, column 'w': the weight must be a finite number of at least 0, got a null."),
    (Column("w", "weight"), [math.inf, 1],
     "row 0, column 'w': the weight must be a finite number of at least 0, got inf."),
    (Column("w", "weight"), [1.0, -1e-60],
     "row 1, column 'w': the weight must be a finite number of at least 0, got -1e-60."),
    (LABEL, [decimal.Decimal("0.0"), decimal.Decimal("0.5")],
     "row 1, column 'label': the label must be 0 or 1, got Decimal('0.5')."),
    (Column("x", "numeric"), [0.0, math.nan],
     "row 1, column 'x': must be a finite number, got nan."),
    (Column("x", "numeric", transform="log", buckets=True), [-math.inf, 0.0],
     "row 0, column 'x': must be a finite number, got -inf."),
    (Column("x", "numeric"), [1e300], "row 0, column 'x': must be a finite number, got 1e+300."),
    (Column("c", "categorical", "hex"), ["a", "xyz"],
     "row 1, column 'c': must be 1 to 16 hex digits, got 'xyz'."),
    (Column("c", "categorical", "integer"), ["1", "1.0"],
     "row 1, column 'c': must be an integer of 64 bits, got '1.0'."),
    (Column("c", "categorical", "integer", bag=True), [["1"], [], ["x" * 99]],
     f"row 2, column 'c': must be an integer of 64 bits, got '{'x' * 60}...'."),
])  # fmt: skip
def test_values_that_may_not_be_are_named(column, values, message) -> None:
    table = pa.table({column.name: values, "item": range(len(values))})
    labelled = column.kind in ("label", "weight")
    extra = [] if column.kind == "label" else [LABEL]
    table = table if not extra else table.append_column("label", pa.array([1] * len(values)))
    with pytest.raises(ValueError) as error:
        read(table, Schema([column, ITEM, *extra]))
    assert str(error.value) == f"clicks, {message}"
    if labelled:  # without labels nobody looks
        assert len(read(table, Schema([column, ITEM, *extra]), labels=False)) == len(values)


@pytest.mark.parametrize("bag", [False, True])
def test_words_of_a_dictionary_that_no_row_has_may_be_any(bag) -> None:
    schema = Schema([Column("c", "categorical", "integer", bag=bag), ITEM])

    def table(*words: str) -> pa.Table:
        column = pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.int8()), pa.array(words))
        if bag:
            column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), column)
        return pa.table({"c": column, "item": [1, 2, 3]})

    for words in ("7", "8"), ("7", "8", "x"), ("7", "8", "x", "y", "z"):
        ids = read(table(*words), schema).ids
        assert (ids.first_of(0, 0) if bag else ids[:, 0]).tolist() == [7, MISSING, 8]
    with pytest.raises(ValueError, match="clicks, row 2, column 'c': .* got 'x'"):
        read(table("7", "x"), schema)


@pytest.mark.parametrize("kind", ["i1", "i4", "i8"])
def test_places_of_missing_words_may_be_any(kind) -> None:
    gone = np.array([True, False, True])
    places = pa.array(np.array([-1, 1, 99], kind), mask=gone)
    words = pa.DictionaryArray.from_arrays(places, pa.array(["7", "8"]), safe=False)
    none = pa.DictionaryArray.from_arrays(pa.nulls(3, pa.int32()), pa.array([], pa.string()))
    schema = Schema([Column("c", "categorical", "integer"), Column("d", "categorical", "integer")])
    batch = read(pa.table({"c": words, "d": none}), schema, labels=False)
    assert batch.ids.tolist() == [[MISSING, MISSING], [8, MISSING], [MISSING, MISSING]]


def test_whole_numbers_are_rounded_as_in_text() -> None:
    # Above halfway between two float32, but halfway as a float64, which is rounded to even.
    table = pa.table({"x": [2**60 + 2**36 + 1, None], "item": [1, 2]})
    for some in (table, table[:1]):
        batch = read(some, Schema([Column("x", "numeric"), ITEM]))
        assert batch.dense[0, 0] == np.float32(float(2**60 + 2**36 + 1)) == 2**60


def test_a_column_of_nulls_is_one_of_empty_bags() -> None:
    batch = read(pa.table({"tags": pa.nulls(3), "item": [1, 2, 3]}), Schema([TAGS, ITEM]))
    assert batch.ids.offsets.tolist() == [0, 0, 1, 1, 2, 2, 3]


def test_a_row_is_told_by_its_number_in_the_whole() -> None:
    table = pa.table({"label": [0, 1, 0, 1, 7], "item": [1] * 5})
    with pytest.raises(ValueError, match=r"clicks, row 4, column 'label'"):
        read(table, Schema([LABEL, ITEM]), chunk=2)


@pytest.mark.parametrize(("column", "type_", "message"), [
    (ITEM, pa.list_(pa.int64()), "must not be a list, as its 'bag' is not true, got list<item: int64>."),  # noqa: E501
    (TAGS, pa.int64(), "must be a list, as its 'bag' is true, got int64."),
    (TAGS, pa.list_(pa.float32()), "must be integers or text, as its 'encoding' is integer, got list<item: float>."),  # noqa: E501
    (ITEM, pa.float64(), "must be integers or text, as its 'encoding' is integer, got double."),
    (ITEM, pa.timestamp("s"), "must be integers or text, as its 'encoding' is integer, got timestamp[s]."),  # noqa: E501
    (Column("c", "categorical", "hex"), pa.int64(), "must be text, as its 'encoding' is hex, got int64."),  # noqa: E501
    (Column("x", "numeric"), pa.string(), "must be numbers, as its 'kind' is numeric, got string."),
    (Column("x", "numeric"), pa.list_(pa.int8()), "must be numbers, as its 'kind' is numeric, got list<item: int8>."),  # noqa: E501
    (LABEL, pa.string(), "must be numbers, as its 'kind' is label, got string."),
    (Column("w", "weight"), pa.date32(), "must be numbers, as its 'kind' is weight, got date32[day]."),  # noqa: E501
])  # fmt: skip
def test_types_go_with_kinds(column, type_, message) -> None:
    reader = ArrowReader(Schema([column, Column("other", "numeric")]), labels=True)
    given = pa.schema({column.name: type_, "other": pa.int8()})
    with pytest.raises(TypeError) as error:
        reader.check(given, "a.parquet")
    assert str(error.value) == f"a.parquet, column {column.name!r}: {message}"


def test_columns_must_be_there_once() -> None:
    reader = ArrowReader(Schema([ITEM]), labels=True)
    message = (
        "a.parquet, column 'item': must be there once, for the schema names it, got {} of that"
    )
    with pytest.raises(ValueError, match=message.format(0)):
        reader.check(pa.schema({"Item": pa.int8()}), "a.parquet")
    with pytest.raises(ValueError, match=message.format(2)):
        reader.check(pa.schema([("item", pa.int8())] * 2), "a.parquet")


def test_what_is_ignored_may_be_anything() -> None:
    schema = Schema([ITEM, Column("when", "ignore")])
    table = pa.table({"when": [datetime.date(2026, 1, 1)], "item": [decimal.Decimal(1)]})
    with pytest.raises(TypeError, match="'item'"):
        read(table, schema)
    assert read(pa.table({"item": [7]}), schema).ids.tolist() == [[7]]


def test_no_rows_are_a_batch_too() -> None:
    batch = ArrowReader(Schema([LABEL, TAGS, ITEM]), labels=True).batch([], 3, 5)
    assert (batch.ids.shape, batch.labels.shape, batch.first, batch.total) == ((0, 2), (0, 1), 3, 5)


def test_rows_of_several_blocks_are_batched() -> None:
    reader = ArrowReader(Schema([ITEM]), labels=False)
    blocks = [
        reader.block(Records("a", 0, pa.record_batch({"item": pa.array(range(n), "i8")})))
        for n in (3, 0, 4)
    ]
    got = [
        [reader.batch([part]).ids[:, 0].tolist() for part in some]
        for some in batched(blocks, [0, 2, 4])
    ]
    assert got == [[], [[0, 1]], [[2], [0, 1, 2]]]

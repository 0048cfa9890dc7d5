"""Tables and data frames in memory."""

import itertools
import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import sentence
from test_arrow import expected, tables, told

import cupyrec
from cupyrec import models
from cupyrec.data import Column, Frame, Schema

MISSING = -(2**63)
SCHEMA = Schema([
    Column("click", "label"), Column("price", "numeric"), Column("item", "categorical", "integer"),
    Column("city", "categorical", "string"), Column("tags", "categorical", "integer", bag=True),
])  # fmt: skip
VALUES = {"click": [1, 0, 1], "price": [1.5, math.nan, 3.0], "item": [7, 8, 9],
          "city": ["Ulm", None, "Bonn"], "tags": [[1, 2], [], None]}  # fmt: skip


@settings(max_examples=50)
@given(tables(), st.integers(1, 13), st.integers(1, 4), st.integers(0, 2))
def test_any_table_of_any_number_of_ranks(made, size, ranks, skip) -> None:
    table, schema = made
    truth, data = expected(table, schema), Frame(table, schema)
    parts = [list(data.of_rank(rank, ranks).batches(size, skip=skip)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {max(-(-len(table) // size) - skip, 0)}
    at = skip * size
    for batch in itertools.chain(*zip(*parts, strict=True)):
        assert batch.first + len(batch) <= batch.total <= size
        for key, rows in told(batch, schema).items():
            assert rows == truth[key][at : at + len(batch)]
        at += len(batch)
    assert at >= len(table)


def check_read(data: Frame) -> None:
    (batch,) = data.batches(10)
    assert batch.labels.tolist() == [[1], [0], [1]]
    assert batch.dense.tolist() == [[1.5], [0], [3]]
    assert batch.ids.first_of(0, 0).tolist() == [7, 8, 9]
    cities = batch.ids.first_of(1, 0).tolist()
    assert cities[1] == MISSING and len(set(cities)) == 3
    assert batch.ids.part(0, 1).ids.tolist()[2:] == [1, 2]
    assert batch.ids.offsets.tolist() == [0, 1, 2, 4, 5, 6, 6, 7, 8, 8]


def test_pandas() -> None:
    pandas = pytest.importorskip("pandas", minversion="2.2")
    frame = pandas.DataFrame(VALUES | {"note": ["x"] * 3})
    check_read(Frame(frame, SCHEMA))
    check_read(Frame(frame.sort_values("click").sort_index(), SCHEMA))
    frame["city"] = frame["city"].astype("category")
    frame["item"] = frame["item"].astype("Int64")
    frame["price"] = frame["price"].astype("Float64")
    check_read(Frame(frame, SCHEMA))
    frame["item"] = [1.0, None, 2.0]
    message = (
        "Frame, column 'item': must be integers or text, as its 'encoding' is integer, got double."
    )
    with pytest.raises(TypeError, match=sentence(message)):
        Frame(frame, SCHEMA)
    frame["note"] = [1, "x", [2]]
    with pytest.raises(
        TypeError, match=r"Frame: 'data' must go into an Arrow table, got: [^(]*\.$"
    ):
        Frame(frame, SCHEMA)
    frame["note"] = pandas.Series(["\ud800"] * 3, dtype=object)
    with pytest.raises(
        TypeError, match=r"table, got: 'utf-8' codec can't encode character '\\ud800'"
    ):
        Frame(frame, SCHEMA)
    twice = pandas.concat([frame["item"], frame["item"]], axis=1)
    with pytest.raises(
        TypeError, match="'data' must go into an Arrow table, got: Duplicate column"
    ):
        Frame(twice, SCHEMA)


def test_polars() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(VALUES | {"price": [1.5, None, 3.0]})
    check_read(Frame(frame, SCHEMA))
    frame = frame.with_columns(polars.col("city").cast(polars.Categorical),
                               polars.col("item").cast(polars.UInt64))  # fmt: skip
    check_read(Frame(frame, SCHEMA))


def test_what_data_may_be() -> None:
    table = pa.table(VALUES | {"price": [1.5, None, 3.0]})
    check_read(Frame(table, SCHEMA))
    check_read(Frame(table.to_batches()[0], SCHEMA))
    check_read(Frame(pa.RecordBatchReader.from_batches(table.schema, table.to_batches()), SCHEMA))
    with pytest.raises(
        TypeError, match=r"Frame: 'data' must have __arrow_c_stream__.* got dict\.$"
    ):
        Frame(VALUES, SCHEMA)
    with pytest.raises(ValueError, match="Frame, column 'tags': must be there once"):
        Frame(table.drop_columns("tags"), SCHEMA)
    message = "Frame, row 1, column 'price': must be a finite number, got nan."
    with pytest.raises(ValueError, match=sentence(message)):
        list(Frame(pa.table(VALUES), SCHEMA).batches(1))
    with pytest.raises(ValueError, match="Frame: its schema must have a label column, got none"):
        Frame(table, Schema(SCHEMA.columns[1:]))
    with pytest.raises(ValueError, match="Frame.batches: 'skip' must be at least 0, got -1"):
        Frame(table, SCHEMA).batches(1, skip=-1)


def test_models_say_how_a_frame_is_wrapped() -> None:
    table = pa.table({"click": [0, 1, 1], "price": [1, 2, 3], "item": [7, 8, 7]})
    schema, model = Schema(SCHEMA.columns[:3]), models.DLRM(1, 1)
    for call in (cupyrec.fit, cupyrec.evaluate, cupyrec.predict):
        with pytest.raises(
            TypeError, match=r"cupyrec\.data\.Frame\(frame, schema\).* got Table\.$"
        ):
            call(model, table)
    assert cupyrec.fit(model, Frame(table, schema))["steps"] == 1
    assert cupyrec.evaluate(model, Frame(table, schema))["samples"] == 3
    assert cupyrec.predict(model, Frame(table, schema, labels=False)).shape == (3,)

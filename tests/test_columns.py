"""The loops that write columns into rows; tests/test_arrow.py has tables of all kinds."""

import math

import numpy as np
import pyarrow as pa
import pytest
from test_arrow import ITEM, LABEL, expected, read, told

from cupyrec.data import TSV, Column, Schema, columns


@pytest.mark.parametrize("first", [0, 1, 8, 13])
@pytest.mark.parametrize("size", [1, 51, 57, 63, 64, 65, 3 * columns._TILE + 5])
def test_rows_are_written_tile_by_tile(first, size) -> None:
    rng, count = np.random.default_rng(size), first + size + 3
    values = {"label": rng.integers(0, 2, count), "item": rng.integers(-9, 9, count),
               "n": rng.normal(0, 1e4, count), "k": rng.integers(-9, 9, count)}  # fmt: skip
    table = pa.table({k: pa.array(v, mask=(k != "label") & (rng.random(count) < 0.3))
                      for k, v in values.items()})  # fmt: skip
    schema = Schema([
        LABEL, ITEM, Column("n", "numeric", transform="log", buckets=True), Column("k", "numeric")
    ])  # fmt: skip
    part = table.slice(first, size)
    assert told(read(part, schema), schema) == expected(part, schema) | {"weights": []}


def test_what_lies_where_a_value_is_missing_does_no_harm() -> None:
    gone = pa.array([True, False])
    table = pa.table({
        "x": pa.array(np.array([np.nan, 1.5]), mask=gone.to_numpy(False)),
        "y": pa.array(np.array([np.inf, -2.5], np.float32), mask=gone.to_numpy(False)),
    })  # fmt: skip
    schema = Schema([Column("x", "numeric", transform="log", buckets=True), Column("y", "numeric")])
    assert math.isnan(np.frombuffer(table["x"].chunk(0).buffers()[1])[0])
    batch = read(table, schema, labels=False)
    assert batch.dense.tolist() == [[0, 0], [np.float32(math.log1p(1.5)), -2.5]]
    assert batch.ids.tolist() == [[0], [3]]


def test_numbers_have_the_bits_that_a_text_file_gives_them(tmp_path) -> None:
    rng = np.random.default_rng(0)
    values = [*range(-5000, 5000), *(rng.normal(0, 1, 3000) * 10.0 ** rng.integers(-6, 6, 3000))]
    texts = [f"{value!r}" for value in map(float, values)] + [""]
    both = [Column("x", "numeric", transform="log", buckets=True),
               Column("w", "categorical", "string")]  # fmt: skip
    path = tmp_path / "numbers.tsv"
    path.write_text("".join(f"{text}\t{text}\n" for text in texts))
    (truth,) = TSV(path, Schema(both), labels=False).batches(len(texts))
    table = pa.table({"x": [float(t) if t else None for t in texts], "w": texts})
    batch = read(table, Schema(both), labels=False)
    assert (batch.dense.view(np.int32) == truth.dense.view(np.int32)).all()
    assert (batch.ids == truth.ids).all()

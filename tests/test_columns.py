"""The loops that write columns into rows; tests/test_arrow.py has tables of all kinds."""

import numpy as np
import pyarrow as pa
from test_arrow import ITEM, LABEL, expected, read, told

from cupyrec.data import TSV, Column, Schema, columns


def test_many_rows_are_written_tile_by_tile() -> None:
    rng, size = np.random.default_rng(0), 3 * columns._TILE + 5
    values = {"label": rng.integers(0, 2, size), "item": rng.integers(-9, 9, size),
               "n": rng.normal(0, 1e4, size)}  # fmt: skip
    table = pa.table({k: pa.array(v, mask=(k != "label") & (rng.random(size) < 0.3))
                      for k, v in values.items()})  # fmt: skip
    schema = Schema([LABEL, ITEM, Column("n", "numeric", transform="log", buckets=True)])
    got = told(read(table[3:], schema), schema)
    assert got == expected(table[3:], schema) | {"weights": []}


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

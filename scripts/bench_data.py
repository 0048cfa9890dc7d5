"""Speed of the readers beside others', alternating in one run: one JSON line of ratios on stdout.

    python scripts/bench_data.py --case criteo_tsv
    python scripts/bench_data.py --case parquet

Case `criteo_tsv`: a synthetic log in Criteo's layout, plain and .gz, read by `cupyrec.data.TSV` and
by pandas (its C engine), into the same arrays: the logarithms of 13 numbers, 26 ids and 13 buckets,
labels. `ratio_vs_pandas` is how many times faster ours is, of the two files the smaller. It needs
the `bench` extra.

Case `parquet`: the same log as Parquet, 13 int32 columns with nulls and 26 of int64 ids, and once
of hex strings, read by `cupyrec.data.Parquet` into batches of 8192 rows and scanned by pyarrow
alone, which only decodes the same columns, with its defaults. `ratio_vs_pyarrow` is pyarrow's time
by ours for int64 ids, `ratio_vs_pyarrow_hex` for hex, and `ratio_vs_pyarrow_criteo` for int64 where
ours takes logarithms and makes buckets, too.
"""

from __future__ import annotations

import argparse
import binascii
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

try:
    import pandas
except ModuleNotFoundError:  # one case needs it
    pandas = None

import cupyrec
from cupyrec.data import TSV, Column, Parquet, Schema, criteo_schema
from cupyrec.data.synthetic import write_synthetic

MISSING = -(2**63)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternating(name: str, ours: Callable, peer: Callable, rounds: int) -> tuple[float, float]:
    """Median seconds of ours, and median of how many times as many the peer takes."""
    rows = []
    for i in range(rounds + 1):
        rows.append((seconds(ours), seconds(peer)))
        told = "ours {:.2f} s, peer {:.2f} s".format(*rows[-1])
        print(f"{name}: {told}{'' if i else ' to warm up'}", file=sys.stderr)
    del rows[0]
    return statistics.median(o for o, _ in rows), statistics.median(p / o for o, p in rows)


# Criteo's layout


def read_tsv(path: Path, rows: int) -> tuple[np.ndarray, ...]:
    """All rows by cupyrec: dense, ids and labels."""
    arrays = np.empty((rows, 13), "f"), np.empty((rows, 39), np.int64), np.empty((rows, 1), "f")
    at = 0
    for batch in TSV(path, criteo_schema()).batches(4096):
        for array, part in zip(arrays, (batch.dense, batch.ids, batch.labels), strict=True):
            array[at : at + len(batch)] = part
        at += len(batch)
    return arrays


def read_by_pandas(path: Path, rows: int) -> tuple[np.ndarray, ...]:
    """The same by pandas, in the fastest of its ways that we found: 32k rows at a time, and ids as
    bytes, for strings, categories and converters take longer."""
    numbers, codes = range(1, 14), range(14, 40)
    types = {0: np.float32} | dict.fromkeys(numbers, np.float64) | dict.fromkeys(codes, "S8")
    pieces = pandas.read_csv(
        path, sep="\t", header=None, dtype=types, engine="c", chunksize=1 << 15
    )
    arrays = np.empty((rows, 13), "f"), np.empty((rows, 39), np.int64), np.empty((rows, 1), "f")
    at = 0
    for piece in pieces:
        dense, ids, labels = (array[at : at + len(piece)] for array in arrays)
        x = piece[list(numbers)].to_numpy()
        logarithms = np.log1p(np.abs(x))
        dense[:] = np.where(np.isnan(x), 0, np.copysign(logarithms, x))
        logarithms[np.isnan(x)] = -1  # buckets of missing numbers are 0
        ids[:, 26:] = np.where(x < 0, 1, 2 + np.floor(2 * logarithms))
        for place, column in enumerate(codes):
            ids[:, place] = from_hex(piece[column].to_numpy())
        labels[:, 0] = piece[0]
        at += len(piece)
    return arrays


def from_hex(texts: np.ndarray) -> np.ndarray:
    """Ids of texts of 8 digits, or none."""
    missing = texts == b""
    digits = np.where(missing, b"0" * 8, texts).tobytes()
    ids = np.frombuffer(binascii.unhexlify(digits), ">u4").astype(np.int64)
    ids[missing] = MISSING
    return ids


def criteo_tsv(options: argparse.Namespace) -> dict:
    if pandas is None:
        sys.exit(
            "bench_data.py: pandas must be installed; the extra has it: "
            "python -m pip install --editable '.[bench]'"
        )
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, suffix in (("plain", ""), ("gz", ".gz")):
            path = Path(folder, "log.tsv" + suffix)
            write_synthetic(path, options.rows, seed=1)
            for ours, peers in zip(
                read_tsv(path, options.rows), read_by_pandas(path, options.rows), strict=True
            ):
                np.testing.assert_allclose(ours, peers, rtol=1e-6, atol=0)
            took, ratio = alternating(
                name,
                lambda path=path: read_tsv(path, options.rows),
                lambda path=path: read_by_pandas(path, options.rows),
                options.rounds,
            )
            figures[f"rows_per_second_{name}"] = options.rows / took
            figures[f"ratio_vs_pandas_{name}"] = ratio
    worst = min(figures[f"ratio_vs_pandas_{name}"] for name in ("plain", "gz"))
    return {"ratio_vs_pandas": worst} | figures


# Parquet


def write_parquet(folder: Path, rows: int) -> None:
    """The synthetic log as ids.parquet and hex.parquet, with pyarrow's defaults."""
    write_synthetic(folder / "log.tsv", rows, seed=1)
    names = [column.name for column in criteo_schema().columns]
    types = dict(zip(names, [pa.int8()] + [pa.int32()] * 13 + [pa.string()] * 26, strict=True))
    table = csv.read_csv(
        folder / "log.tsv",
        read_options=csv.ReadOptions(column_names=names),
        parse_options=csv.ParseOptions(delimiter="\t"),
        convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    parquet.write_table(table, folder / "hex.parquet")
    for name in names[14:]:
        ids = from_hex(np.array(table[name].fill_null("").to_pylist(), "S8"))
        place = table.column_names.index(name)
        table = table.set_column(place, name, pa.array(ids, mask=ids == MISSING))
    parquet.write_table(table, folder / "ids.parquet")


def parquet_schema(encoding: str, criteo: bool) -> Schema:
    """Criteo's columns; plain numbers, or logarithms and buckets."""
    columns = []
    for column in criteo_schema().columns:
        if column.kind == "categorical":
            column = Column(column.name, "categorical", encoding)
        elif column.kind == "numeric" and not criteo:
            column = Column(column.name, "numeric")
        columns.append(column)
    return Schema(columns)


def scan(path: Path) -> int:
    names = [column.name for column in criteo_schema().columns]
    with parquet.ParquetFile(path) as file:
        return sum(map(len, file.iter_batches(columns=names)))


def read_parquet(path: Path, schema: Schema) -> int:
    return sum(map(len, Parquet(path, schema).batches(8192)))


def parquet_case(options: argparse.Namespace) -> dict:
    pa.set_cpu_count(options.threads)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Path(folder), options.rows)
        for ending, name, encoding, criteo in (
            ("", "ids", "integer", False), ("_hex", "hex", "hex", False),
            ("_criteo", "ids", "integer", True),
        ):  # fmt: skip
            path, schema = Path(folder, f"{name}.parquet"), parquet_schema(encoding, criteo)
            took, figures[f"ratio_vs_pyarrow{ending}"] = alternating(
                name + ending,
                lambda path=path, schema=schema: read_parquet(path, schema),
                lambda path=path: scan(path),
                options.rounds,
            )
            figures[f"rows_per_second{ending}"] = options.rows / took
    return figures


CASES = {"criteo_tsv": criteo_tsv, "parquet": parquet_case}


def positive(text: str) -> int:
    """A number of rows, rounds or threads, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--rows", type=positive, default=200_000)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args()
    cupyrec.set_num_threads(options.threads)
    told = {"case": options.case, "rows": options.rows, "threads": options.threads}
    print(json.dumps(told | CASES[options.case](options)))


if __name__ == "__main__":
    main()

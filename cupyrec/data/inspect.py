"""A look at a log: what its columns seem to be, as a schema to look over and edit."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from cupyrec import errors
from cupyrec.data.layout import content, split
from cupyrec.data.lines import read_lines
from cupyrec.data.log_files import log_files
from cupyrec.data.numpy_files import NumPyFiles
from cupyrec.data.open_dataset import kind_of
from cupyrec.data.parquet import whole_file
from cupyrec.data.schema import Column, Schema, criteo_schema

__all__ = ["Inspected", "inspect"]

_LABELS = re.compile(
    r"(is_?)?(label|target|y|click(ed)?|clk|conver(sion|ted)|buy|purchased?)", re.I
)
_WEIGHTS = re.compile(r"(sample_?)?weights?", re.I)
_TIMES = re.compile(r"(.*_)?(timestamp|ts|time|date|datetime)", re.I)
_IDS = re.compile(
    r"(.*[_ ])?(ids?|user|item|movie|product|ad|campaign|category|cate|brand|shop|zip|zip_?code"
    r"|code|type|gender|occupation|weekday|hour)|.*I[Dd]s?",
    re.I,
)
_AMOUNTS = re.compile(
    r"(.*_)?(age|price|count|cnt|num|number|amount|size|length|total|sum|avg|mean|rate|ratio|days"
    r"|score|rank|views|visits)(_.*)?",
    re.I,
)
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,2})?")
_HEX = re.compile(r"[0-9a-f]{4,16}|[0-9A-F]{4,16}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([ T].*)?|\d\d/\d\d/\d{4}.*|\d\d:\d\d(:\d\d)?")
_READ = re.compile("(list of )?(bool|integer|number|text)")  # kinds whose values are looked at
_DELIMITERS = "\t", ",", ";", "|", "\x01", " "
_PROSE = "prose"
_FEW = 100  # distinct whole numbers that are taken for codes
_MANY = 10**6  # whole numbers from here on are taken for ids
_WIDE = 100  # the logarithm is taken of numbers that go so far


class Inspected(NamedTuple):
    """What a log seems to be.

    Attributes
    ----------
    schema : Schema
    comments : dict of str
        Why, by names of columns, and of the whole by "": see `Schema.to_toml`.
    """

    schema: Schema
    comments: dict[str, str]


class _Seen(NamedTuple):
    """What was seen of a column: its values, None where one is missing, which are all of a kind."""

    name: str
    kind: str  # integer, number, bool, text, list of ..., or a type that no column can have
    values: Sequence[Any]


def inspect(path: str | os.PathLike[str], rows: int = 10_000) -> Inspected:
    """Return a schema that goes with a log, from names and values of its first rows.

    A column is a label if it has a name such as label, click or target and is 0 or 1 everywhere,
    or if it is the first of a file without names. Whole numbers are ids if a name says so, if they
    are few or very large; hexadecimal digits of one length are, lists and text with ``|`` are bags.
    What can't be read, is the same everywhere, tells of times or is prose is ignored.

    Parameters
    ----------
    path : path
        Of a file that `open_dataset` takes.
    rows : int
        How many are looked at.

    Raises
    ------
    ValueError, OSError
        The file can't be read, or has no column to learn from.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "clicks.csv")
    ...     _ = path.write_text("user_id,price,clicked\\n7,1.5,0\\n8,2.25,1\\n")
    ...     found = inspect(path)
    >>> [(column.name, column.kind) for column in found.schema.columns]
    [('user_id', 'categorical'), ('price', 'numeric'), ('clicked', 'label')]
    >>> found.comments["price"]
    'numbers, 2 distinct among 2 rows, 0 % missing, from 1.5 to 2.25'
    """
    rows = errors.positive("inspect", "rows", rows)
    kind = kind_of(path)
    if kind == "npy":
        data = NumPyFiles(path, labels=False)
        batch = next(data.batches(rows))
        columns = data.schema.columns[1:]
        kinds = ["integer" if column.kind == "categorical" else "number" for column in columns]
        seen = map(_Seen, [column.name for column in columns], kinds,
                   [*batch.dense.T.tolist(), *batch.ids.T.tolist()])  # fmt: skip
        return Inspected(data.schema, {some.name: _told(some) for some in seen})
    (path,) = log_files("inspect", path)
    if kind == "parquet":
        seen, options = _of_parquet(path, rows), {}
    else:
        seen, options = _of_text(path, rows)
        if _is_criteo(seen, options):
            schema = criteo_schema()
            seen = [some._replace(name=column.name)
                    for some, column in zip(seen, schema.columns, strict=True)]  # fmt: skip
            comments = {some.name: _told(some) for some in seen}
            return Inspected(schema, {"": "the layout of Criteo's click logs"} | comments)
    return _guessed(path, seen, options)


def _guessed(path: Path, seen: list[_Seen], options: dict[str, Any]) -> Inspected:
    names, about = collections.Counter(some.name for some in seen), []
    lost = {name for name, count in names.items() if count > 1 or not (name and name.isprintable())}
    if lost:  # a schema can't name them
        about.append(
            f"left out, for they have no names of their own: {_few(map(ascii, sorted(lost)))}"
        )
        seen = [some for some in seen if some.name not in lost]
    columns = {some.name: _column(some, options.get("delimiter")) for some in seen}
    comments = {some.name: _told(some) for some in seen}
    for some in seen:
        kind, values = columns[some.name].kind, _there(some)
        if kind == "ignore" and (why := _unfit(some)):
            comments[some.name] += f"; {why}"
        elif _LABELS.fullmatch(some.name) and kind in ("numeric", "categorical"):
            comments[some.name] += "; named as a label is, which must be 0 or 1 in each row"
            columns[some.name] = Column(some.name, "ignore")
        elif kind == "numeric" and some.kind == "number" and _IDS.fullmatch(some.name):
            if all(value % 1 == 0 for value in values):
                comments[some.name] += "; named as ids are, which must not be written as floats"
    for kind in ("label", "weight"):  # or a model would learn from what it is to tell
        for other in [name for name, column in columns.items() if column.kind == kind][1:]:
            comments[other] += f"; another {kind}, if its kind is that"
            columns[other] = Column(other, "ignore")
    kinds = {column.kind for column in columns.values()}
    if not kinds & {"numeric", "categorical"}:
        told = _few(f"{name} ({comment})" for name, comment in comments.items()) or "none"
        raise ValueError(
            f"{path}: must have a column to learn from, got {'; '.join([told, *about])}."
        )
    if "label" not in kinds:
        about.append("no label was found: one column's kind must be label to train on it")
    if "categorical" not in kinds:
        about.append("no ids were found: buckets of numbers are some, for a model needs tables")
        columns |= {name: dataclasses.replace(column, buckets=True)
                    for name, column in columns.items() if column.kind == "numeric"}  # fmt: skip
    if about:
        comments[""] = "; ".join(about)
    return Inspected(Schema(columns.values(), **options), comments)


def _few(texts: Iterable[str]) -> str:
    first = list(itertools.islice(texts, 6))
    return ", ".join(first[:5]) + ", ..." * (len(first) > 5)


# What is in a file


def _of_parquet(path: Path, rows: int) -> list[_Seen]:
    # Buffered before, all row groups of the file would be read.
    with whole_file(path), parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        batches, missing = [], rows
        for batch in file.iter_batches(rows):  # of which some end with their row group
            batches.append(batch.slice(0, missing))
            missing -= len(batches[-1])
            if not missing:
                break
        table = pa.Table.from_batches(batches, file.schema_arrow)
    if not len(table):
        raise ValueError(f"{path}: must have at least one row, got none.")
    return [
        _Seen(name, kind := _kind_of(column.type), column.to_pylist() if _READ.match(kind) else [])
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]


def _kind_of(type_: pa.DataType) -> str:
    t = pa.types
    if t.is_dictionary(type_):
        return _kind_of(type_.value_type)
    if t.is_list(type_) or t.is_large_list(type_) or t.is_fixed_size_list(type_):
        return f"list of {_kind_of(type_.value_type)}"
    for kind, tests in (
        ("bool", (t.is_boolean,)), ("integer", (t.is_integer,)),
        ("number", (t.is_floating, t.is_decimal)),
        ("text", (t.is_string, t.is_large_string, t.is_string_view)),
    ):  # fmt: skip
        if any(test(type_) for test in tests):
            return kind
    return f"<{type_}>"


def _of_text(path: Path, rows: int) -> tuple[list[_Seen], dict[str, Any]]:
    """Columns of a text file, and what a schema says of the file."""
    lines: list[bytes] = []
    for some in read_lines(path):
        lines += some.text.tobytes().split(b"\n")[:-1]
        if len(lines) > rows:
            break
    lines = lines[: rows + 1]  # one may be the header
    for number, line in enumerate(lines, 1):
        if b"\0" in line:
            raise ValueError(f"{path}, line {number}: must be text, got a zero byte.")
    options = max((_split_by(lines, delimiter) for delimiter in _DELIMITERS),
                  key=lambda found: found[0])[1]  # fmt: skip
    dialect = _dialect(**options)
    table = [[_text(field, dialect.quotes) for field in split(line, dialect)] for line in lines]
    width = len(table[0])
    table = [row for row in table if len(row) == width]
    header = _has_header(table)
    names = table[0] if header else [f"c{number}" for number in range(1, width + 1)]
    columns = list(zip(*table[header : rows + header], strict=True))
    seen = [
        _Seen(name, _kind_of_texts(values), [value or None for value in values])
        for name, values in zip(names, columns, strict=True)
    ]
    if not header and _is_label(seen[0]):
        seen[0] = seen[0]._replace(name="label")
    return seen, options | {"header": header}


def _dialect(delimiter: str, quotes: bool) -> Schema:
    column = Column("any", "categorical", "string")
    return Schema([column], delimiter=delimiter, quotes=quotes)


def _split_by(lines: list[bytes], delimiter: str) -> tuple[tuple, dict[str, Any]]:
    """How well a delimiter does, as what is larger where it is better; and a schema's options."""
    between = re.escape(delimiter.encode())
    quoted = re.compile(rb'(^|%b)"([^"]|"")*"($|%b)' % (between, between))
    options = {"delimiter": delimiter, "quotes": any(map(quoted.search, lines))}
    dialect = _dialect(**options)
    widths = [len(split(line, dialect)) for line in lines[:200]]
    same = widths.count(widths[0]) / len(widths)
    return (widths[0] > 1, same, widths[0]), options


def _text(field: bytes, quotes: bool) -> str:
    inner = content(field) if quotes else field
    return (field if inner is None else inner).decode("utf-8", "backslashreplace")


def _has_header(table: list[list[str]]) -> bool:
    """Whether the first line has names: none is a number, one at most is empty, as that of an index
    which pandas writes, and below one there are numbers."""
    first, below = [name.strip() for name in table[0]], table[1:101]
    if any(map(_NUMBER.fullmatch, first)) or first.count("") > (len(first) > 1):
        return False
    return any(
        any(values) and all(_NUMBER.fullmatch(value) for value in values if value)
        for values in zip(*below, strict=True)
    )


def _kind_of_texts(values: list[str]) -> str:
    there = [value for value in values if value]
    if there and all(map(_INTEGER.fullmatch, there)):
        ids = all(len(value) <= 20 and -(2**63) <= int(value) < 2**63 for value in there)
        return "integer" if ids else "text"
    return "number" if there and all(map(_NUMBER.fullmatch, there)) else "text"


def _is_criteo(seen: list[_Seen], options: dict[str, Any]) -> bool:
    if len(seen) != 40 or options["delimiter"] != "\t" or options["header"]:
        return False
    whole = all(some.kind == "integer" or not any(some.values) for some in seen[1:14])
    hexes = (value for some in seen[14:] for value in some.values if value)
    return _is_label(seen[0]) and whole and all(_HEX.fullmatch(value) for value in hexes)


# What a column seems to be


def _there(some: _Seen) -> list[Any]:
    """The values that are not missing: numbers as such."""
    values = [value for value in some.values if value is not None]
    if some.kind == "integer":
        return [int(value) for value in values]
    return [float(value) for value in values] if some.kind == "number" else values


def _is_label(some: _Seen) -> bool:
    values = _there(some)
    whole = some.kind in ("integer", "number", "bool") and len(values) == len(some.values)
    return whole and bool(values) and set(map(float, values)) <= {0, 1}


def _column(some: _Seen, delimiter: str | None) -> Column:
    """The column of a schema that it seems to be."""
    name, values = some.name, _there(some)
    if _is_label(some) and _LABELS.fullmatch(name):
        return Column(name, "label")
    if some.kind.startswith("list of "):
        inner = [value for values_ in values for value in values_]
        return _categorical(some._replace(kind=some.kind[8:], values=inner), bag=True)
    bag = delimiter not in (None, "|") and some.kind == "text" and any("|" in v for v in values)
    if (why := _unfit(some)) and not (bag and why == _PROSE):
        return Column(name, "ignore")
    if some.kind in ("integer", "number"):
        if _WEIGHTS.fullmatch(name) and min(values) >= 0 and len(values) == len(some.values):
            return Column(name, "weight")
        if some.kind == "number" or not _is_id(name, values):
            return _numeric(name, values)
    if bag:
        inner = [part for value in values for part in value.split("|")]
        return _categorical(some._replace(kind=_kind_of_texts(inner), values=inner), bag=True)
    return _categorical(some)


def _unfit(some: _Seen) -> str:
    """Why nothing can be learnt from a column, or nothing if something can; of lists it may."""
    values = _there(some)
    if some.kind.startswith("list of "):
        return ""
    if not values:
        return "nothing to learn from"
    if not _READ.match(some.kind):
        return "no column can have that type"
    text = some.kind == "text"
    if _TIMES.fullmatch(some.name) or (text and all(map(_DATE.fullmatch, values))):
        return "a time"
    if len(values) == len(some.values) > 1 and len(set(values)) == 1:
        return "the same everywhere"
    if some.kind == "number" and not all(map(np.isfinite, values)):
        return "not finite everywhere"
    if text and np.mean(list(map(len, values))) > 40 and len(set(values)) > len(values) / 2:
        return _PROSE
    return ""


def _is_id(name: str, values: list[int]) -> bool:
    """Whether whole numbers are ids: by name, if they are few, or large."""
    few = min(values) >= 0 and len(set(values)) <= min(_FEW, len(values) // 5)
    few &= not _AMOUNTS.fullmatch(name)
    return bool(_IDS.fullmatch(name)) or few or max(map(abs, values)) >= _MANY


def _numeric(name: str, values: list[float]) -> Column:
    wide = max(abs(value) for value in values) >= _WIDE
    return Column(name, "numeric", transform="log" if wide else "none")


def _categorical(some: _Seen, bag: bool = False) -> Column:
    values = [value for value in some.values if value not in (None, "")]
    if some.kind in ("integer", "bool"):
        return Column(some.name, "categorical", "integer", bag=bag)
    if some.kind != "text":  # lists of floats are vectors
        return Column(some.name, "ignore")
    digits = values and all(_HEX.fullmatch(value) for value in values)
    alike = len(set(map(len, values))) == 1 and len(set(values)) > 1
    letters = any(not value.isdigit() for value in values)
    encoding = "hex" if digits and alike and letters else "string"
    return Column(some.name, "categorical", encoding, bag=bag)


def _told(some: _Seen) -> str:
    """What was seen, in a line."""
    if not _READ.match(some.kind):
        return f"of the type {some.kind}"
    values, count = _there(some), len(some.values)
    kind = {"integer": "whole numbers", "number": "numbers", "bool": "true and false"}.get(
        some.kind, some.kind
    )
    shown = [tuple(value) if isinstance(value, list) else value for value in values]
    missing = 100 * (count - len(values)) / max(count, 1)
    told = f"{kind}, {len(set(shown))} distinct among {count} rows, {missing:.3g} % missing"
    if values and kind.endswith("numbers"):
        return f"{told}, from {min(values):g} to {max(values):g}" if some.kind == "number" else (
            f"{told}, from {min(values)} to {max(values)}"
        )  # fmt: skip
    if values and some.kind == "text":
        return f"{told}, such as {values[0][:40]!a}"
    return told

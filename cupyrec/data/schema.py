"""Which columns a log has, and what each becomes."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Column", "Schema", "criteo_schema"]

_KINDS = ("label", "numeric", "categorical", "weight", "ignore")
_ENCODINGS = ("hex", "integer", "string")
_TRANSFORMS = ("none", "log")
_OPTIONS = ("delimiter", "header", "quotes")
_DELIMITERS = ("\t", ",", ";", "|", " ", "\x01")


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a log.

    Parameters
    ----------
    name : str
    kind : {"label", "numeric", "categorical", "weight", "ignore"}
        A label is 0 or 1. A numeric column is a value of `dense`, 0.0 where its field is empty. A
        categorical column is an id of `ids`, INT64_MIN where its field is empty. A weight, not
        negative, is a factor of the sample's loss.
    encoding : {"hex", "integer", "string"}
        How a categorical field becomes an id: 1 to 16 hex digits are its bits, decimal digits its
        value; any other text is hashed (FNV-1a, 64 bits).
    transform : {"none", "log"}
        Of a numeric column; "log" is sign(x) ln(1 + |x|).
    buckets : bool
        Whether a numeric column is a table too, with the ids 0 missing, 1 negative, else
        2 + floor(2 ln(1 + x)).
    bag : bool
        Whether a categorical column has any number of ids a row, which are pooled: a list of them,
        or in a text file a field in which a separator stands between two.
    separator : str
        One ASCII character, of bags in text files.

    Raises
    ------
    TypeError, ValueError
        A value is none of those above, or does not go with the kind.

    Examples
    --------
    >>> Column("price", "numeric", transform="log").transform
    'log'
    >>> Column("item", "categorical")
    Traceback (most recent call last):
        ...
    ValueError: column 'item': 'encoding' must be one of hex, integer, string, got None.
    """

    name: str
    kind: str
    encoding: str | None = None
    transform: str = "none"
    buckets: bool = False
    bag: bool = False
    separator: str = "|"

    def __post_init__(self) -> None:
        where = f"column {self.name!r}"
        if not isinstance(self.name, str):
            raise TypeError(f"{where}: 'name' must be a string, got {self.name!r}.")
        if not self.name or not self.name.isprintable():
            raise ValueError(f"{where}: 'name' must be printable text, got {self.name!r}.")
        _one_of(where, "kind", self.kind, _KINDS)
        if self.kind == "categorical":
            _one_of(where, "encoding", self.encoding, _ENCODINGS)
        _one_of(where, "transform", self.transform, _TRANSFORMS)
        for key in ("buckets", "bag"):
            if not isinstance(getattr(self, key), bool):
                raise TypeError(
                    f"{where}: {key!r} must be true or false, got {getattr(self, key)!r}."
                )
        text = self.separator
        if not isinstance(text, str) or len(text) != 1 or not text.isascii() or text in '\n\r"':
            raise ValueError(f"{where}: 'separator' must be one ASCII character, got {text!r}.")
        for key, owner in (("encoding", "categorical"), ("transform", "numeric"),
                           ("buckets", "numeric"), ("bag", "categorical"),
                           ("separator", "categorical")):  # fmt: skip
            default = Column.__dataclass_fields__[key].default
            if self.kind != owner and getattr(self, key) != default:
                raise ValueError(
                    f"{where}: {key!r} is for {owner} columns, got kind {self.kind!r}."
                )

    @property
    def table(self) -> str | None:
        """Name of the table that the column's ids belong to, or None."""
        if self.kind == "categorical":
            return self.name
        return f"{self.name} bucket" if self.buckets else None


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns of a log: of a text file without header all of them, in order.

    Parameters
    ----------
    columns : sequence of Column
        Several labels are as many tasks; at most one weight, at least one feature.
    delimiter : str, default tab
        Of text files: tab, space, ``,``, ``;``, ``|`` or ``\\x01``.
    header : bool
        Whether the first line of a text file names its columns. They may then stand in any order,
        and others beside them, which are ignored.
    quotes : bool
        Whether in text files a field that begins with ``"`` ends with the next one, a doubled one
        within standing for one. It must end in its line.

    Raises
    ------
    TypeError, ValueError
        The columns are not such, or two have one name.

    Examples
    --------
    >>> schema = Schema([Column("click", "label"), Column("age", "numeric", buckets=True),
    ...                  Column("item", "categorical", "hex")])
    >>> schema.num_dense, schema.num_tables, schema.table_names
    (1, 2, ['item', 'age bucket'])
    """

    columns: tuple[Column, ...]
    delimiter: str = "\t"
    header: bool = False
    quotes: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        _one_of("schema", "delimiter", self.delimiter, _DELIMITERS)
        for key in ("header", "quotes"):
            if not isinstance(getattr(self, key), bool):
                raise TypeError(
                    f"schema: {key!r} must be true or false, got {getattr(self, key)!r}."
                )
        weights, seen = 0, set()
        for column in self.columns:
            if not isinstance(column, Column):
                raise TypeError(f"schema: 'columns' must be Column objects, got {column!r}.")
            weights += column.kind == "weight"
            for name in {column.name, column.table} - {None}:
                if name in seen:
                    raise ValueError(f"column {name!r}: a name must occur once, got it twice.")
                seen.add(name)
            if weights > 1:
                raise ValueError(
                    f"column {column.name!r}: 'kind' may be weight once, got it twice."
                )
            if column.bag and column.separator == self.delimiter:
                raise ValueError(
                    f"column {column.name!r}: 'separator' must not be the delimiter, "
                    f"got {column.separator!r}."
                )
        if self.num_dense + self.num_tables == 0:
            raise ValueError("schema: a column must be numeric or categorical, got none.")

    @property
    def num_dense(self) -> int:
        """Number of values in a row: the numeric columns, in order."""
        return sum(column.kind == "numeric" for column in self.columns)

    @property
    def table_names(self) -> list[str]:
        """Names of the tables: the categorical columns in order, then the bucketed ones."""
        names = [column.table for column in self.columns if column.kind == "categorical"]
        return names + [column.table for column in self.columns if column.buckets]

    @property
    def num_tables(self) -> int:
        """Number of ids in a row."""
        return len(self.table_names)

    @property
    def task_names(self) -> list[str]:
        """Names of the label columns, in order."""
        return [column.name for column in self.columns if column.kind == "label"]

    @property
    def has_bags(self) -> bool:
        """Whether `ids` are `cupyrec.embedding.Bags`: they are if one column is a bag."""
        return any(column.bag for column in self.columns)

    @property
    def has_weights(self) -> bool:
        """Whether samples have weights."""
        return any(column.kind == "weight" for column in self.columns)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """Read a schema from a TOML file.

        It has ``delimiter``, ``header`` and ``quotes``, all optional, and a ``[[column]]`` table
        for each column, whose keys are the parameters of `Column`.

        Raises
        ------
        ValueError, TypeError
            The file is no such TOML; the sentence starts with its path.
        OSError
            It can't be read.
        """
        try:
            return cls.from_dict(tomllib.loads(Path(path).read_text("utf-8")))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path}: must be a schema, found nothing there. `cupyrec data inspect LOG --out "
                f"'{path}'` writes one by a log."
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: must be TOML, got: {error}.") from None
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}, {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schema to a TOML file, as `load` reads it.

        Examples
        --------
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "schema.toml")
        ...     Schema([Column("item", "categorical", "hex")]).save(path)
        ...     Schema.load(path).table_names
        ['item']
        """
        Path(path).write_text(self.to_toml(), "utf-8")

    def to_toml(self, comments: Mapping[str, str] | None = None) -> str:
        """Return the text of the schema's TOML file.

        Parameters
        ----------
        comments : mapping, optional
            A line for each column by its name, and of the file by "".

        Examples
        --------
        >>> schema = Schema([Column("item", "categorical", "hex")])
        >>> print(schema.to_toml({"item": "8 digits"}))
        delimiter = "\\t"
        <BLANKLINE>
        [[column]]  # 8 digits
        name = "item"
        kind = "categorical"
        encoding = "hex"
        <BLANKLINE>
        """
        comments = {} if comments is None else comments
        data = self.to_dict()
        columns = data.pop("column")
        lines = [f"# {comments['']}"] if "" in comments else []
        lines += [f"{key} = {json.dumps(value)}"  # JSON's escapes are TOML's too
                  for key, value in data.items()]  # fmt: skip
        for column in columns:
            comment = comments.get(column["name"], "")
            comment = "".join(c if c.isprintable() else " " for c in comment)
            lines += ["", f"[[column]]  # {comment}" if comment else "[[column]]"]
            lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}"
                      for key, value in column.items()]  # fmt: skip
        return "\n".join(lines) + "\n"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schema:
        """Return the schema that `to_dict` told of.

        Examples
        --------
        >>> Schema.from_dict({"column": [{"name": "item", "kind": "categorical", "encode": "hex"}]})
        Traceback (most recent call last):
            ...
        ValueError: column 'item': keys must be name, kind, encoding, transform, buckets, bag, separator, got 'encode'.
        """  # noqa: E501 - an error sentence
        _known("schema", data, (*_OPTIONS, "column"))
        entries = data.get("column", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise TypeError(f"schema: 'column' must be [[column]] tables, got {entries!r}.")
        columns = []
        for number, entry in enumerate(entries, 1):
            where = f"column {entry.get('name', number)!r}"
            _known(where, entry, tuple(Column.__dataclass_fields__))
            for key in ("name", "kind"):
                if key not in entry:
                    raise ValueError(f"{where}: {key!r} must be given, got {entry!r}.")
            columns.append(Column(**entry))
        return cls(tuple(columns), **{key: data[key] for key in _OPTIONS if key in data})

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as strings, bools, lists and dicts: what its TOML file holds.

        Examples
        --------
        >>> Schema([Column("item", "categorical", "hex")]).to_dict()["column"]
        [{'name': 'item', 'kind': 'categorical', 'encoding': 'hex'}]
        """
        columns = []
        for column in self.columns:
            fields = dataclasses.fields(column)
            values = {field.name: getattr(column, field.name) for field in fields}
            columns.append({field.name: values[field.name] for field in fields
                            if values[field.name] != field.default})  # fmt: skip
        told = {"delimiter": self.delimiter}
        told |= {key: True for key in ("header", "quotes") if getattr(self, key)}
        return {**told, "column": columns}


def criteo_schema(buckets: bool = True) -> Schema:
    """Return the schema of Criteo's click logs: a label, 13 integers, 26 hex categories.

    Parameters
    ----------
    buckets : bool
        Whether the integers, whose logarithms are taken, are 13 more tables.

    Examples
    --------
    >>> criteo_schema().num_dense, criteo_schema().num_tables
    (13, 39)
    """
    label = Column("label", "label")
    numbers = [Column(f"I{i}", "numeric", transform="log", buckets=buckets) for i in range(1, 14)]
    categories = [Column(f"C{i}", "categorical", "hex") for i in range(1, 27)]
    return Schema((label, *numbers, *categories))


def _one_of(where: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        names = ", ".join(value if value.isalpha() else repr(value) for value in allowed)
        raise ValueError(f"{where}: {name!r} must be one of {names}, got {value!r}.")


def _known(where: str, data: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in data:
        if key not in keys:
            raise ValueError(f"{where}: keys must be {', '.join(keys)}, got {key!r}.")

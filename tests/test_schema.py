import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyrec.data import Column, Schema, criteo_schema

ITEM = Column("item", "categorical", "hex")

columns = st.one_of(
    st.builds(Column, st.text(min_size=1).filter(str.isprintable), st.just("ignore")),
    st.builds(
        Column,
        st.text(min_size=1).filter(str.isprintable),
        st.just("categorical"),
        st.sampled_from(["hex", "integer", "string"]),
    ),
    st.builds(
        Column,
        st.text(min_size=1).filter(str.isprintable),
        st.just("numeric"),
        transform=st.sampled_from(["none", "log"]),
        buckets=st.booleans(),
    ),
)
schemas = st.builds(
    lambda columns, delimiter: Schema([Column("a label", "label"), ITEM, *columns], delimiter),
    st.lists(columns, max_size=5, unique_by=lambda column: column.name).filter(
        lambda columns: (
            not any(c.name in ("a label", "item") or " bucket" in c.name for c in columns)
        )
    ),
    st.sampled_from("\t,;| \x01"),
)


@settings(max_examples=50)
@given(schemas)
def test_toml_and_dict_bring_every_schema_back(tmp_path_factory, schema):
    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    schema.save(path)
    assert Schema.load(path) == schema
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


def test_criteo():
    schema = criteo_schema()
    assert [column.name for column in schema.columns] == (
        ["label"] + [f"I{i}" for i in range(1, 14)] + [f"C{i}" for i in range(1, 27)]
    )
    assert (schema.num_dense, schema.num_tables) == (13, 39)
    assert schema.table_names == (
        [f"C{i}" for i in range(1, 27)] + [f"I{i} bucket" for i in range(1, 14)]
    )
    assert {column.transform for column in schema.columns[1:14]} == {"log"}
    assert {column.encoding for column in schema.columns[14:]} == {"hex"}
    assert (criteo_schema(buckets=False).num_dense, criteo_schema(buckets=False).num_tables) == (
        13,
        26,
    )


def test_defaults_of_the_file(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text('[[column]]\nname = "x"\nkind = "numeric"\n')
    assert Schema.load(path) == Schema((Column("x", "numeric", None, "none", False),), "\t")


X = '[[column]]\nname = "x"\n'
BAD = [
    ('delim = ","\n', ValueError,
     "schema: keys must be delimiter, header, quotes, column, got 'delim'."),
    ('delimiter = "::"\n' + X + 'kind = "numeric"', ValueError,
     "schema: 'delimiter' must be one of '\\t', ',', ';', '|', ' ', '\\x01', got '::'."),
    ("delimiter = 9\n" + X + 'kind = "numeric"', ValueError, "'delimiter' must be one of"),
    ("", ValueError, "schema: a column must be numeric or categorical, got none."),
    (X + 'kind = "label"', ValueError,
     "schema: a column must be numeric or categorical, got none."),
    ("column = 3", TypeError, "schema: 'column' must be [[column]] tables, got 3."),
    ("column = [3]", TypeError, "schema: 'column' must be [[column]] tables, got [3]."),
    (X + 'kind = "number"', ValueError,
     "'kind' must be one of label, numeric, categorical, weight, ignore, got 'number'."),
    (X + "kind = []", ValueError, "column 'x': 'kind' must be one of"),
    (X, ValueError, "column 'x': 'kind' must be given, got {'name': 'x'}."),
    ('[[column]]\nkind = "label"', ValueError, "column 1: 'name' must be given"),
    ('[[column]]\nname = 3\nkind = "label"', TypeError,
     "column 3: 'name' must be a string, got 3."),
    ('[[column]]\nname = ""\nkind = "label"', ValueError, "column '': 'name' must be printable"),
    (X + 'kind = "numeric"\nbucket = true', ValueError,
     "keys must be name, kind, encoding, transform, buckets, bag, separator, got 'bucket'."),
    (X + 'kind = "categorical"', ValueError,
     "column 'x': 'encoding' must be one of hex, integer, string, got None."),
    (X + 'kind = "categorical"\nencoding = "HEX"', ValueError, "'encoding' must be one of"),
    (X + 'kind = "numeric"\nencoding = "hex"', ValueError,
     "column 'x': 'encoding' is for categorical columns, got kind 'numeric'."),
    (X + 'kind = "label"\nbuckets = true', ValueError,
     "column 'x': 'buckets' is for numeric columns, got kind 'label'."),
    (X + 'kind = "ignore"\ntransform = "log"', ValueError,
     "column 'x': 'transform' is for numeric columns, got kind 'ignore'."),
    (X + 'kind = "numeric"\ntransform = "sqrt"', ValueError,
     "column 'x': 'transform' must be one of none, log, got 'sqrt'."),
    (X + 'kind = "numeric"\nbuckets = 1', TypeError,
     "column 'x': 'buckets' must be true or false, got 1."),
    (2 * (X + 'kind = "numeric"\n'), ValueError,
     "column 'x': a name must occur once, got it twice."),
    (X + 'kind = "numeric"\nbuckets = true\n[[column]]\nname = "x bucket"\nkind = "ignore"',
     ValueError, "column 'x bucket': a name must occur once, got it twice."),
    (X + 'kind = "weight"\n[[column]]\nname = "y"\nkind = "weight"', ValueError,
     "column 'y': 'kind' may be weight once, got it twice."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "error", "sentence"), BAD)
def test_bad_files_are_named(tmp_path, text, error, sentence):
    path = tmp_path / "schema.toml"
    path.write_text(text)
    with pytest.raises(error) as caught:
        Schema.load(path)
    assert str(caught.value).startswith(f"{path}, ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("content", [b"not toml", b'delimiter = "\xff"'])
def test_not_toml(tmp_path, content):
    path = tmp_path / "schema.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="schema.toml: must be TOML, got: "):
        Schema.load(path)


def test_missing_file(tmp_path):
    path = tmp_path / "nothing.toml"
    text = f"{path}: must be a schema, found nothing there. `cupyrec data inspect LOG --out "
    text += f"'{path}'` writes one by a log."
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(text)}$"):
        Schema.load(path)


def test_columns_must_be_columns():
    with pytest.raises(TypeError, match="'columns' must be Column objects, got 'x'"):
        Schema(["x"])

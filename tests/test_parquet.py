"""Parquet files, streamed."""

import itertools
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import sentence
from pyarrow import parquet as pq
from test_arrow import expected, expected_id, tables, told

from cupyrec.data import Batch, Column, Parquet, RankSlices, Schema, parquet
from cupyrec.data.arrow import ArrowReader
from cupyrec.ragged import Bags

ITEM = Column("item", "categorical", "integer")
SCHEMA = Schema([Column("label", "label"), ITEM])


@pytest.fixture
def write(tmp_path):
    """Write items 0, 1, ... with labels 0, 1, 0, ... to files of row groups of so many rows."""

    def write(*files: list[int]) -> list[Path]:
        paths, at = [], 0
        for number, groups in enumerate(files):
            paths.append(tmp_path / f"{number}.parquet")
            with pq.ParquetWriter(paths[-1], pa.schema([("label", "i1"), ("item", "i8")])) as out:
                for rows in groups:
                    items = np.arange(at, at + rows)
                    out.write_table(pa.table({"label": (items % 2).astype("i1"), "item": items}))
                    at += rows
        return paths

    return write


@pytest.fixture(params=[1, 3, 1 << 16])
def few_at_once(request, monkeypatch):
    monkeypatch.setattr(parquet, "_ROWS", request.param)


def items(batch: Batch) -> list[int]:
    if batch.labels is not None:
        assert (batch.labels[:, 0] == batch.ids[:, 0] % 2).all()
    return batch.ids[:, 0].tolist()


FILES = ([4, 3], [1], [7, 2, 5])


@pytest.mark.parametrize("size", [1, 4, 5, 22, 100])
@pytest.mark.parametrize("skip", [0, 1, 2, 9])
def test_batches_are_whole_across_row_groups_and_files(write, few_at_once, size, skip) -> None:
    data = Parquet(write(*FILES), SCHEMA)
    for _ in range(2):  # epochs
        got = [items(batch) for batch in data.batches(size, skip=skip)]
        assert got == [[*range(at, min(at + size, 22))] for at in range(skip * size, 22, size)]


def test_row_groups_before_the_first_batch_are_not_decoded(write, monkeypatch) -> None:
    seen, decoded = [], parquet._decoded

    def watched(path, groups, names, coded):
        seen.append((path.name, groups, names))
        return decoded(path, groups, names, coded)

    monkeypatch.setattr(parquet, "_decoded", watched)
    data = Parquet(write(*FILES), SCHEMA)
    assert items(next(data.batches(5, skip=3))) == [15, 16, 17, 18, 19]
    assert seen == [("2.parquet", [1, 2], ["label", "item"])]
    assert list(data.batches(5, skip=5)) == []


def written(kind: pa.DataType) -> pa.DataType:
    """The type nearest to it that the writer takes."""
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(written(kind.value_type))
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.string() if kind == pa.string_view() else kind


@settings(max_examples=50)
@given(tables(), st.integers(1, 13), st.integers(1, 5))
def test_any_table_comes_back(tmp_path_factory, made, size, group) -> None:
    table, schema = made
    if not len(table):
        return
    path = tmp_path_factory.mktemp("any") / "any.parquet"
    plain = {name: pa.array(table[name].to_pylist(), written(table[name].type))
             for name in table.column_names}  # fmt: skip
    pq.write_table(pa.table(plain), path, row_group_size=group)
    data, truth = Parquet(path, schema), expected(table, schema)
    at = 0
    for batch in data.batches(size):
        got = told(batch, schema)
        for key, rows in got.items():
            assert rows == truth[key][at : at + len(batch)]
        at += len(batch)
    assert at == len(table)


def test_bags_of_a_batch_may_lie_in_several_files(tmp_path) -> None:
    schema = Schema([Column("tags", "categorical", "string", bag=True), ITEM])
    for number, tags in enumerate([[["a", "b"], None], [["c"]]]):
        table = pa.table({"item": range(len(tags)), "tags": tags})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    data = Parquet([tmp_path / "0.parquet", tmp_path / "1.parquet"], schema, labels=False)
    (batch,) = data.batches(9)
    assert isinstance(batch.ids, Bags)
    assert batch.ids.offsets.tolist() == [0, 2, 3, 3, 4, 5, 6]


def test_each_file_has_its_order_of_columns_and_types(tmp_path) -> None:
    pq.write_table(pa.table({"label": [1], "item": [7]}), tmp_path / "a")
    other = {"note": ["x"], "item": pa.array(["8"]), "label": [False], "more": [[1]]}
    pq.write_table(pa.table(other), tmp_path / "b")
    (batch,) = Parquet([tmp_path / "a", tmp_path / "b"], SCHEMA).batches(9)
    assert (batch.ids.tolist(), batch.labels.tolist()) == ([[7], [8]], [[1], [0]])


def test_text_that_repeats_is_decoded_as_dictionaries(tmp_path, monkeypatch) -> None:
    rng, size = np.random.default_rng(0), 6000
    words = np.array([f"word {i}" for i in range(40)] + [None])
    columns = {"few": words[rng.integers(0, 41, size)].tolist(),
               "many": [f"{i} is a word" for i in range(size)]}  # fmt: skip
    columns["few"][2000:4000] = [f"other {i % 9}" for i in range(2000)]
    pq.write_table(pa.table(columns), tmp_path / "a", row_group_size=2000)
    seen, block = [], ArrowReader.block

    def watched(self, records):
        types = [str(column.type)[:10] for column in records.columns]
        seen.append(dict(zip(records.columns.schema.names, types, strict=True)))
        return block(self, records)

    monkeypatch.setattr(ArrowReader, "block", watched)
    schema = Schema(
        [Column("few", "categorical", "string"), Column("many", "categorical", "string")]
    )
    data = Parquet(tmp_path / "a", schema, labels=False)
    got = np.concatenate([batch.ids for batch in data.batches(700)]).T.tolist()
    assert seen[0] == {"few": "dictionary", "many": "string"}
    assert got == [[expected_id(value, "string") for value in columns[n]] for n in columns]


# Ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 7, 10, 64])
def test_ranks_have_consecutive_row_groups_and_make_the_same_steps(write, ranks, size) -> None:
    data = Parquet(write([5] * 8, [5] * 4), SCHEMA)  # 12 groups
    parts = [data.of_rank(rank, ranks) for rank in range(ranks)]
    assert all(part.consecutive for part in parts)
    batches = [list(part.batches(size)) for part in parts]
    assert {len(own) for own in batches} == {-(-60 // size)}
    assert [*itertools.chain(*(items(b) for own in batches for b in own))] == [*range(60)]
    for step in zip(*batches, strict=True):
        lengths = [len(batch) for batch in step]
        assert max(lengths) - min(lengths) <= 1
        assert sum(lengths) <= size + ranks - 1
        assert [batch.total for batch in step] == [sum(lengths)] * ranks
        assert [batch.first for batch in step] == [sum(lengths[:r]) for r in range(ranks)]
    for part, own in zip(parts, batches, strict=True):
        later = [items(batch) for batch in part.batches(size, skip=2)]
        assert later == [items(batch) for batch in own[2:]]


def test_a_rank_decodes_its_row_groups_alone(write, monkeypatch) -> None:
    seen, decoded = [], parquet._decoded

    def watched(path, groups, names, coded):
        seen.append((path.name, groups))
        return decoded(path, groups, names, coded)

    monkeypatch.setattr(parquet, "_decoded", watched)
    data = Parquet(write([5, 5, 5], [5, 6, 6]), SCHEMA)
    assert sum(map(len, data.of_rank(1, 3).batches(4))) == 10
    assert seen == [("0.parquet", [2]), ("1.parquet", [0])]


@pytest.mark.parametrize(("files", "ranks"), [(([9, 9],), 3), (([9, 1, 1],), 2), (([7],), 2)])
def test_where_groups_are_too_few_ranks_share_every_batch(write, files, ranks) -> None:
    data = Parquet(write(*files), SCHEMA)
    for start in (data, data.of_rank(0, 1)):
        parts = [start.of_rank(rank, ranks) for rank in range(ranks)]
        assert all(isinstance(part, RankSlices) for part in parts)
        batches = [list(part.batches(4)) for part in parts]
        together = [[*itertools.chain(*map(items, step))] for step in zip(*batches, strict=True)]
        assert together == [items(batch) for batch in data.batches(4)]


def test_a_part_has_parts_of_the_whole(write) -> None:
    part = Parquet(write([5] * 4), SCHEMA).of_rank(1, 2).of_rank(3, 4)
    assert [*itertools.chain(*map(items, part.batches(8)))] == [*range(15, 20)]
    with pytest.raises(
        ValueError, match=sentence("Parquet.of_rank: 'rank' must be less than 2, got 2.")
    ):
        part.of_rank(2, 2)


# What may not be


def test_what_a_path_must_be(tmp_path) -> None:
    with pytest.raises(
        ValueError, match=sentence("Parquet: 'paths' must name at least one file, got none.")
    ):
        Parquet([], SCHEMA)
    missing = tmp_path / "missing.parquet"
    with pytest.raises(FileNotFoundError, match=f"{missing}: must be a file, found nothing"):
        Parquet(missing, SCHEMA)
    with pytest.raises(IsADirectoryError, match=f"{tmp_path}: must be a file, got a folder"):
        Parquet(tmp_path, SCHEMA)
    text = tmp_path / "text.parquet"
    text.write_text("1\t2\n")
    with pytest.raises(ValueError, match=rf"{text}: must be a whole Parquet file, got: .*\.$"):
        Parquet(text, SCHEMA)
    text.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{text}: must be a whole Parquet file, got: .*\.$"):
        Parquet(text, SCHEMA)


def test_an_empty_file_among_many_is_an_error(write) -> None:
    paths = write([3], [], [2])
    with pytest.raises(
        ValueError, match=sentence(f"{paths[1]}: must have at least one row, got none.")
    ):
        Parquet(paths, SCHEMA)


def test_a_truncated_file_is_an_error(write) -> None:
    (path,) = write([50] * 3)
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with pytest.raises(ValueError, match=rf"{path}: must be a whole Parquet file, got: .*\.$"):
        Parquet(path, SCHEMA)
    damaged = bytearray(content)
    damaged[4:300] = bytes(296)  # the metadata are whole
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"{path}: must be a whole Parquet file, got: .*\.$"):
        list(Parquet(path, SCHEMA).batches(10))


def test_a_name_that_is_no_text_is_an_error(tmp_path) -> None:
    path = tmp_path / "latin1.parquet"
    pq.write_table(pa.table({"label": [0], "item": [7], "price_of_it": [1]}), path)
    path.write_bytes(path.read_bytes().replace(b"price_of_it", b"pr\xefce_of_it"))
    with pytest.raises(ValueError, match=rf"^{path}: must be a whole Parquet file, got: .*\.$"):
        Parquet(path, SCHEMA)


def test_columns_are_checked_before_any_is_read(write, tmp_path) -> None:
    (path,) = write([3])
    more = Schema([*SCHEMA.columns, Column("price", "numeric")])
    message = f"{path}, column 'price': must be there once, for the schema names it, got 0 of that name among 2 columns: label, item."  # noqa: E501
    with pytest.raises(ValueError, match=sentence(message)):
        Parquet(path, more)
    bag = Schema([Column("label", "label"), Column("item", "categorical", "integer", bag=True)])
    message = f"{path}, column 'item': must be a list, as its 'bag' is true, got int64."
    with pytest.raises(TypeError, match=sentence(message)):
        Parquet(path, bag)
    pq.write_table(pa.table({"item": [[1]], "label": [0]}), tmp_path / "lists")
    message = f"{tmp_path}/lists, column 'item': must not be a list, as its 'bag' is not true, got list<element: int64>."  # noqa: E501
    with pytest.raises(TypeError, match=sentence(message)):
        Parquet([path, tmp_path / "lists"], SCHEMA)
    no_label = Schema([ITEM])
    with pytest.raises(
        ValueError, match=sentence(f"{path}: its schema must have a label column, got none.")
    ):
        Parquet(path, no_label)
    assert next(Parquet(path, no_label, labels=False).batches(2)).labels is None


def test_rows_are_numbered_within_their_file(tmp_path) -> None:
    pq.write_table(pa.table({"label": [0, 1, 0], "item": [1, 2, 3]}), tmp_path / "a")
    pq.write_table(
        pa.table({"label": [0, 1, 9], "item": [1, 2, 3]}), tmp_path / "b", row_group_size=1
    )
    data = Parquet([tmp_path / "a", tmp_path / "b"], SCHEMA)
    message = f"{tmp_path}/b, row 2, column 'label': the label must be 0 or 1, got 9."
    with pytest.raises(ValueError, match=sentence(message)):
        list(data.batches(4))
    with pytest.raises(ValueError, match=sentence(message)):
        list(data.batches(5, skip=1))


def test_files_must_not_change_between_epochs(write) -> None:
    paths = write([3], [4])
    data = Parquet(paths, SCHEMA)
    assert len(list(data.batches(3))) == 3
    told = paths[1].stat()
    os.utime(paths[1], ns=(told.st_atime_ns, told.st_mtime_ns + 1))
    message = f"{paths[1]}: must stay as it was when the dataset was made, got a file of another"
    with pytest.raises(ValueError, match=message):
        data.batches(3)
    data = Parquet(paths, SCHEMA)
    write([3], [4, 1])
    with pytest.raises(ValueError, match=r"must stay as it was"):
        data.batches(3)


def test_a_file_must_not_change_while_others_are_read(write, monkeypatch) -> None:
    monkeypatch.setattr(parquet, "_ROWS", 10)
    paths = write([100], [4, 4])
    batches = Parquet(paths, SCHEMA).batches(10)
    next(batches)
    pq.write_table(pa.table({"label": [0], "item": ["7"]}), paths[1])
    with pytest.raises(ValueError, match=rf"{paths[1]}: must stay as it was when the dataset was"):
        list(batches)


def test_a_file_is_streamed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parquet, "_ROWS", 1000)
    path, rows = tmp_path / "long.parquet", 500_000
    items = np.random.default_rng(0).integers(0, 2**62, rows)
    pq.write_table(pa.table({"label": items % 2, "item": items}), path, row_group_size=10_000)
    before = pa.total_allocated_bytes()
    batches = Parquet(path, SCHEMA).batches(1000)
    next(batches)
    assert pa.total_allocated_bytes() - before < path.stat().st_size / 2
    os.truncate(path, 100_000)
    with pytest.raises(ValueError, match=rf"^{path}: must be a whole Parquet file, got.*\.$"):
        list(batches)


def test_arguments_of_batches(write) -> None:
    data = Parquet(write([3]), SCHEMA)
    with pytest.raises(ValueError, match=r"Parquet.batches: 'batch_size' must be"):
        data.batches(0)
    message = "Parquet.batches: 'skip' must be at least 0, got -1."
    with pytest.raises(ValueError, match=sentence(message)):
        data.batches(1, skip=-1)

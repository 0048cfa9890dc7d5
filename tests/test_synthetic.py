import logging
import math

import numpy as np
import pytest

from cupyrec.data import TSV, criteo_schema, synthetic
from cupyrec.data.synthetic import write_synthetic

M = 2**64 - 1


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & M
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & M
    return x ^ (x >> 31)


def weight(kind: int, place: int, value: int) -> float:
    bits = mix(mix((kind * 64 + place) * 0x9E3779B97F4A7C15 & M) ^ (value & M))
    return ((bits & 0xFFFFFFFF) + (bits >> 32) - 2**32) * math.sqrt(6) / 2**32


def log_odds(numbers: list[str], ids: list[str]) -> float:
    """The planted model without its bias, from the fields of a row."""
    total = 0.0
    for place, text in enumerate(numbers):
        if text == "":
            total += 0.2 * weight(0, place, 0)
        else:
            size = math.copysign(math.log1p(abs(int(text))), int(text)) - math.log1p(
                2 ** (place % 7)
            )
            total += 0.08 * weight(1, place, 0) * size
    codes = [int(text, 16) if text else -(2**63) for text in ids]
    total += sum(0.2 * weight(2, table, code) for table, code in enumerate(codes))
    for table in range(0, 8, 2):
        pair = weight(3, table, codes[table]) * weight(3, table + 1, codes[table + 1])
        total += 0.3 * pair
    return total


def read(path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "clicks.tsv"
    return write_synthetic(path, 12_000, seed=3, ids_per_table=50), path


def test_criteos_layout(log):
    told, path = log
    data = TSV(path, criteo_schema())
    batches = list(data.batches(10_000))
    assert sum(map(len, batches)) == told["rows"] == 12_000
    clicks = sum(float(batch.labels.sum()) for batch in batches)
    assert clicks / 12_000 == told["click_rate"]
    assert abs(told["click_rate"] - 0.25) < 0.01
    assert all(len(text) in (0, 8) for row in read(path)[:1000] for text in row[14:])


def test_shares_of_missing_and_negative_fields(log):
    fields = np.array(read(log[1]))
    assert np.abs((fields[:, 1:] == "").mean(axis=0) - 0.1).max() < 0.01
    negative = np.char.startswith(fields[:, 1:14], "-").mean(axis=0)
    assert 0.005 < negative.min() < negative.max() < 0.015


def test_the_best_auc_is_that_of_the_planted_chances(log):
    told, path = log
    rows = read(path)
    score = np.array([log_odds(row[1:14], row[14:]) for row in rows])
    label = np.array([row[0] == "1" for row in rows])
    order = np.argsort(score)
    rank = np.empty(len(rows))
    rank[order] = np.arange(1, len(rows) + 1)
    clicks = label.sum()
    auc = (rank[label].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(rows) - clicks))
    assert abs(auc - told["best_auc"]) < 1e-4
    assert 0.7 < auc < 0.9


def test_pairs_in_one_bin_count_half(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "_BINS", 1)
    assert write_synthetic(tmp_path / "clicks.tsv", 100)["best_auc"] == 0.5


def test_clicks_follow_the_planted_chances(log):
    rows = read(log[1])
    score = np.array([log_odds(row[1:14], row[14:]) for row in rows])
    label = np.array([row[0] == "1" for row in rows])
    tenths = np.array_split(np.argsort(score), 10)
    rates = np.array([label[part].mean() for part in tenths])
    odds = np.log(rates / (1 - rates)) - np.array([score[part].mean() for part in tenths])
    assert np.ptp(odds[1:-1]) < 0.4  # one bias for all


@pytest.mark.parametrize("zipf", [0.0, 0.5, 1.0, 1.2, 3.0])
def test_frequencies_are_zipfs(zipf):
    count, ids = 20_000, 20
    _, drawn, _, _ = synthetic._draw(1, 0, count, np.full(26, ids), zipf, 0.0)
    ranks = np.arange(1, ids + 1)
    expected = ranks**-zipf * (count / (ranks**-zipf).sum())
    codes = [
        [synthetic._permute(rank + 1_000_003 * table) for table in range(26)] for rank in ranks
    ]
    seen = np.array([(drawn == row).sum(axis=0) for row in codes])
    assert (seen.sum(axis=0) == count).all()
    # chi-squared of 19 degrees of freedom exceeds 60 once in 250,000 times
    for found, times in [(seen.sum(axis=1), 26), *((column, 1) for column in seen.T)]:
        assert ((found - times * expected) ** 2 / (times * expected)).sum() < 60


def test_sizes_of_tables(tmp_path):
    path = tmp_path / "clicks.tsv"
    sizes = [1 + table % 7 for table in range(25)] + [2**32]
    write_synthetic(path, 3000, ids_per_table=sizes, zipf=0.3, missing=0.0)
    columns = list(zip(*read(path), strict=True))[14:]
    assert [len(set(column)) for column in columns[:25]] == sizes[:25]
    assert len(set(columns[25])) > 2900


def test_the_same_seed_gives_the_same_file_whatever_the_chunks(tmp_path, monkeypatch):
    one, two, other = (tmp_path / name for name in ("one.tsv", "two.tsv", "other.tsv"))
    told = write_synthetic(one, 1000, seed=5)
    monkeypatch.setattr(synthetic, "_CHUNK", 77)
    assert write_synthetic(two, 1000, seed=5) == told
    assert one.read_bytes() == two.read_bytes()
    write_synthetic(other, 1000, seed=6)
    assert one.read_bytes() != other.read_bytes()


def test_compressed_files_hold_the_same_rows(tmp_path):
    plain, *packed = (tmp_path / f"clicks.tsv{end}" for end in ("", ".gz", ".zst"))
    for path in (plain, *packed):
        write_synthetic(path, 500)
    expected = next(TSV(plain, criteo_schema()).batches(500))
    for path in packed:
        batch = next(TSV(path, criteo_schema()).batches(500))
        assert np.array_equal(batch.ids, expected.ids)
        assert path.stat().st_size < plain.stat().st_size
    assert sorted(tmp_path.iterdir()) == sorted((plain, *packed))


def test_a_file_appears_once_it_is_whole(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic, "_format", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_synthetic(tmp_path / "clicks.tsv", 10)
    assert list(tmp_path.iterdir()) == []


def test_one_row_and_the_log(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "cupyrec"):
        told = write_synthetic(tmp_path / "clicks.tsv", 1)
    assert math.isnan(told["best_auc"])
    assert "1 rows, click rate" in caplog.text


@pytest.mark.parametrize(("arguments", "error", "sentence"), [
    ({"rows": 0}, ValueError, "'rows' must be at least 1, got 0"),
    ({"rows": 1.0}, TypeError, "'rows' must be an integer, got 1.0"),
    ({"seed": -1}, ValueError, r"'seed' must lie in \[0, 2\^63\), got -1"),
    ({"seed": 1.5}, TypeError, "'seed' must be an integer, got 1.5"),
    ({"zipf": -0.1}, ValueError, "'zipf' must be finite and at least 0, got -0.1"),
    ({"zipf": math.nan}, ValueError, "'zipf' must be finite and at least 0, got nan"),
    ({"missing": 1.0}, ValueError, r"'missing' must lie in \[0, 1\), got 1.0"),
    ({"ids_per_table": 0}, ValueError, "'ids_per_table' must be 1 or 26 numbers from 1 to"),
    ({"ids_per_table": 2**32 + 1}, ValueError, "'ids_per_table' must be 1 or 26 numbers"),
    ({"ids_per_table": [5, 5]}, ValueError, r"'ids_per_table' must be .*, got \[5, 5\]"),
    ({"ids_per_table": 5.0}, TypeError, "'ids_per_table' must be integers, got float64"),
])  # fmt: skip
def test_bad_arguments(tmp_path, arguments, error, sentence):
    with pytest.raises(error, match=f"write_synthetic: {sentence}"):
        write_synthetic(tmp_path / "clicks.tsv", **{"rows": 1, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_by_the_file(tmp_path):
    (tmp_path / "a.tsv.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'a.tsv'}'"):
        write_synthetic(tmp_path / "a.tsv", 10, seed=1)
    assert list(tmp_path.iterdir()) == []

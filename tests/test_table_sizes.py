"""Bytes by formulas, against the stores themselves."""

import numpy as np
import pytest

from cupyrec import checkpoint, nn, optim
from cupyrec.embedding import CachedHost, CachedSSD, Memory, Rows, StatePart
from cupyrec.embedding.row_layout import RowLayout
from cupyrec.ops.embedding_rows import FLOAT16, FLOAT32
from cupyrec.table_sizes import beside_cache, cache_slots, checkpoint_row, record_bytes, table_bytes


def layout(width, value=FLOAT32):
    return RowLayout(width, value, (StatePart("sum", width, 0.0),))


def filled(tier, width, rows, value=FLOAT32):
    store = tier.store("rows", width, value=value)
    store.set_state(layout(width).state)
    for first in range(0, rows, 1 << 16):
        ids = np.arange(first, min(rows, first + (1 << 16)))
        vectors = np.ones((ids.size, width), np.float32)
        store.import_rows(Rows(np.zeros(ids.size, np.uint32), ids, vectors, {}))
    return store


def total(parts):
    return sum(parts.values())


@pytest.mark.parametrize("value", [FLOAT32, FLOAT16])
@pytest.mark.parametrize(("width", "rows"), [(5, 200_000), (16, 400_000)])
def test_rows_in_memory(width, rows, value):
    told = table_bytes(layout(width, value), Memory(), rows, "cpu")
    store = filled(Memory(), width, rows, value)
    assert told.keys() == {"device"}
    assert total(told["device"]) == pytest.approx(store.nbytes, rel=0.01)
    assert told["device"]["rows"] == store.row_bytes * rows


@pytest.mark.parametrize("width", [5, 16])
def test_rows_of_the_host_below_a_cache(width):
    tier = CachedHost(cache_mb=3)
    told = table_bytes(layout(width), tier, 300_000, "cpu")
    store = filled(tier, width, 300_000)
    assert total(told["device"]) + total(told["host"]) == pytest.approx(store.nbytes, rel=0.01)


@pytest.mark.parametrize("more", [{}, {"host_cache_mb": 2.0}])
def test_rows_in_files_below_caches(more, tmp_path):
    tier = CachedSSD(path=tmp_path, cache_rows=1000, **more)
    told = table_bytes(layout(16), tier, 300_000, "cpu")
    store = filled(tier, 16, 300_000)
    readers = told["host"].pop("readers")  # threads', which a store doesn't count
    assert 8e6 < readers < 9e6
    memory = total(told["device"]) + total(told["host"])
    assert memory == pytest.approx(store.memory_bytes, rel=0.01)
    slots = cache_slots(144, 2.0) if more else 0  # rows that need not be in a file yet
    needed = (300_000 - slots) * record_bytes(layout(16))
    assert needed <= store.nbytes - store.memory_bytes <= total(told["files"])
    store.close()


def test_files_come_to_what_compaction_leaves(tmp_path):
    rows, tier = 100_000, CachedSSD(path=tmp_path, cache_rows=32)
    told = table_bytes(layout(16), tier, rows, "cpu")["files"]
    store = filled(tier, 16, rows)
    rng = np.random.default_rng(0)
    for _ in range(30):
        ids = rng.choice(rows, 10_000, replace=False)
        places = store.find_or_insert(np.zeros(ids.size, np.uint32), ids, None)
        store.update(places, lambda memory, rows: None)
        store.end_step()
    disk = store.nbytes - store.memory_bytes
    assert disk == pytest.approx(told["files"], rel=0.1)
    assert disk <= total(told)
    store.close()


def test_a_cache_has_whole_sets():
    store = CachedHost(cache_mb=0.1).store("", 16)
    assert cache_slots(64, 0.1) == store._cache.capacity == 1568
    assert cache_slots(64, None, 33) == 64


@pytest.mark.parametrize("in_flight", [300, 900, 1200, 3000])
def test_rows_that_find_no_slot(in_flight):
    store = CachedHost(cache_rows=1024).store("", 16)
    ids = np.arange(in_flight)
    store.find_or_insert(np.zeros(ids.size, np.uint32), ids, _ones)
    told = beside_cache(1024, 64, in_flight, "cuda")  # `nbytes` counts whole chunks
    chunks, beside = store._cache.nbytes - 1024 * (64 + 34), len(store._cache._index)
    assert told == pytest.approx(chunks + 39 * beside, abs=39 * 25)


def _ones(tables, ids):
    return np.ones((len(ids), 16), np.float32)


def test_rows_of_a_checkpoint(tmp_path):
    table = nn.MultiTableEmbedding(1, 6, seed=1)
    optimizer = optim.CatchUpAdam(table.parameters(), lr=0.1)
    table(np.arange(5000)[:, None]).sum().backward()
    optimizer.step()
    store = table.group.store
    checkpoint.save(tmp_path / "saved", table, optimizer)
    files = list((tmp_path / "saved").glob("*.npy"))
    row = checkpoint_row(RowLayout(6, FLOAT32, store.state))
    assert row == 12 + 4 * (6 + 13)
    assert sum(path.stat().st_size for path in files) == 5000 * row + 128 * len(files)


def test_a_device_reserves_whole_chunks():
    told = table_bytes(layout(16), Memory(), 1e6, "cuda")["device"]
    chunk = (1 << 17) * 128  # 16 MB of rows of 128 bytes
    assert told["rows"] == -(-128_000_000 // chunk) * chunk
    assert 22 * 1e6 < told["keys"] < 24 * 1e6

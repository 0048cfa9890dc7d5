"""Rows in RocksDB, for `bench_stores.py`: what a store of ours does, by multi-get and write batch.

The peer gets what it can use: keys that sort as they are written, files that were bulk loaded in
order (no level to look through), Bloom filters, no compression (floats gain nothing), no log ahead,
direct and asynchronous reads, and a block cache of as many bytes as our cache has. A cache of rows
in place of blocks was as fast.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

try:
    import rocksdict
except ModuleNotFoundError:  # the extra bench has it
    rocksdict = None

__all__ = ["RocksRows", "have_rocksdb", "keys_of"]

_KEY = np.dtype([("table", ">u4"), ("id", ">i8")])


def have_rocksdb() -> bool:
    return rocksdict is not None


def keys_of(tables: np.ndarray, ids: np.ndarray) -> list[bytes]:
    """12 bytes each."""
    keys = np.empty(ids.size, _KEY)
    keys["table"], keys["id"] = tables, ids
    return _pieces(keys)


def _pieces(rows: np.ndarray) -> list[bytes]:
    """The bytes of each row."""
    size, data = rows.nbytes // max(1, len(rows)), rows.tobytes()
    return [data[i : i + size] for i in range(0, len(data), size)]


class RocksRows:
    """Rows of float32 by key.

    Parameters
    ----------
    folder : Path
        In which the database is made.
    cache_bytes : int
    threads : int
        Of RocksDB's background work.
    """

    def __init__(self, folder: Path, cache_bytes: int, threads: int) -> None:
        self._folder, self._options = folder, rocksdict.Options(raw_mode=True)
        table = rocksdict.BlockBasedOptions()
        table.set_block_cache(rocksdict.Cache(cache_bytes))
        table.set_bloom_filter(10, False)
        options = self._options
        options.set_block_based_table_factory(table)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.increase_parallelism(threads)
        options.create_if_missing(True)
        self._database = rocksdict.Rdict(str(folder / "rocksdb"), options)
        reading = rocksdict.ReadOptions()
        reading.set_async_io(True)
        self._database.set_read_options(reading)
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True
        self._files = itertools.count()

    def load(self, tables: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> None:
        """Take rows whose keys lie in no other call's range, in one file."""
        order = np.lexsort((ids.view(np.uint64), tables))
        path = str(self._folder / f"{next(self._files)}.sst")
        writer = rocksdict.SstFileWriter(self._options)
        writer.open(path)
        keys = keys_of(tables[order], ids[order])
        for key, row in zip(keys, _pieces(rows[order]), strict=True):
            writer[key] = row
        writer.finish()
        self._database.ingest_external_file([path])

    def get(self, keys: list[bytes]) -> np.ndarray:
        """(N, columns) float32."""
        found = b"".join(self._database.get(keys))
        return np.frombuffer(found, np.float32).reshape(len(keys), -1).copy()

    def put(self, keys: list[bytes], rows: np.ndarray) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys, _pieces(rows), strict=True):
            batch.put(key, row)
        self._database.write(batch, self._unlogged)

    def close(self) -> None:
        self._database.close()

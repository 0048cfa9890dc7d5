import numpy as np
import pytest

from cupyrec.embedding.host_cache import HostCache
from cupyrec.embedding.row_folder import RowFolder
from cupyrec.embedding.row_log import RowLog

META = {"width": 4}


def filled(log, count, meta=META):
    log.write(np.arange(count), np.full((count, log.words), count, np.uint32))
    if meta is not None:
        log.commit(meta)
    log.close()


def test_the_newest_that_was_saved_is_opened_and_others_go(tmp_path):
    rows = RowFolder(tmp_path, "group/0")
    assert rows.existing() is None
    filled(rows.make(8), 3)
    filled(rows.make(12), 5)
    filled(rows.make(16), 7, meta=None)  # a crash before its first save
    log = RowFolder(tmp_path, "group/0").existing()
    assert (len(log), log.words, log.meta) == (5, 12, META)
    assert [path.name for path in (tmp_path / "group/0").iterdir()] == ["rows-00002"]
    log.close()
    assert RowFolder(tmp_path, "group/1").existing() is None


def test_a_log_that_is_dropped_takes_its_files(tmp_path):
    rows = RowFolder(tmp_path, "group", host_rows=lambda row_bytes: 10)
    first = rows.make(8)
    assert isinstance(first, HostCache)
    second = rows.make(8)
    rows.drop(first)
    assert [path.name for path in (tmp_path / "group").iterdir()] == ["rows-00002"]
    second.close()


def test_the_size_of_the_host_cache_follows_the_rows(tmp_path):
    asked = []
    rows = RowFolder(tmp_path, "group", host_rows=lambda row_bytes: asked.append(row_bytes) or 1)
    rows.make(8).close()
    rows.make(12).close()
    assert asked == [32, 48]


def test_options_reach_the_log(tmp_path):
    filled(RowFolder(tmp_path, "group").make(8), 50_000)
    file = max((tmp_path / "group/rows-00001").glob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=str(file)):
        RowFolder(tmp_path, "group").existing()
    log = RowFolder(tmp_path, "group", salvage=True).existing()
    assert isinstance(log, RowLog)
    assert len(log) == 49_999
    log.close()

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


@pytest.mark.parametrize("saved", [False, True])
def test_a_log_that_someone_is_at_work_on_stays(saved, tmp_path):
    rows = RowFolder(tmp_path, "group")
    filled(rows.make(8), 3)
    log = rows.make(12)  # as an optimizer is made
    log.write(np.arange(5), np.full((5, 12), 7, np.uint32))
    if saved:
        log.commit(META)
    with pytest.raises(BlockingIOError, match="rows-00002' must be open once"):
        RowFolder(tmp_path, "group").existing()
    log.commit(META)
    log.close()
    assert len(RowFolder(tmp_path, "group").existing()) == 5


def test_what_others_have_put_there_stays(tmp_path):
    note = tmp_path / "group/rows-of-mine/note"
    note.parent.mkdir(parents=True)
    note.write_text("mine")
    rows = RowFolder(tmp_path, "group")
    assert rows.existing() is None
    rows.drop(rows.make(8))
    assert note.read_text() == "mine"


@pytest.mark.parametrize("damage", ["gone", "changed", "cut"])
@pytest.mark.parametrize("salvage", [False, True])
def test_rows_whose_manifest_is_damaged_stay(damage, salvage, tmp_path):
    filled(RowFolder(tmp_path, "group").make(8), 3)
    path = tmp_path / "group/rows-00001/manifest.json"
    text = path.read_text()
    path.unlink()
    if damage == "changed":
        path.write_text(text.replace('"words": 8', '"words": 4'))
    elif damage == "cut":
        path.write_text(text[:20])
    with pytest.raises(ValueError, match=f"'{path}' must be whole"):
        RowFolder(tmp_path, "group", salvage=salvage).existing()
    path.write_text(text)
    assert len(RowFolder(tmp_path, "group").existing()) == 3


def test_a_log_that_was_half_removed_goes(monkeypatch, tmp_path):
    rows = RowFolder(tmp_path, "group")
    log = rows.make(8)
    log.write(np.arange(3), np.ones((3, 8), np.uint32))

    def crash(folder):
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("shutil.rmtree", crash)
        rows.drop(log)
    (tmp_path / "group/rows-00001/manifest.json").unlink()
    assert RowFolder(tmp_path, "group").existing() is None
    assert not list((tmp_path / "group").iterdir())

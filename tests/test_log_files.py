"""The files of a log."""

import os

import pytest
from oracle import sentence

from cupyrec.data.log_files import check_unchanged, log_files, state_of


def test_one_path_or_several(tmp_path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.touch()
    assert log_files("TSV", str(paths[0])) == paths[:1]
    assert log_files("TSV", paths[1]) == paths[1:]
    assert log_files("TSV", map(str, paths)) == paths
    with pytest.raises(
        FileNotFoundError, match=sentence(f"{tmp_path}/c: must be a file, found nothing there.")
    ):
        log_files("TSV", [paths[0], tmp_path / "c"])
    with pytest.raises(
        IsADirectoryError, match=sentence(f"{tmp_path}: must be a file, got a folder.")
    ):
        log_files("TSV", tmp_path)
    os.mkfifo(tmp_path / "pipe")  # whoever opened it would wait for good
    with pytest.raises(
        ValueError, match=sentence(f"{tmp_path}/pipe: must be a file, got a pipe or a device.")
    ):
        log_files("TSV", tmp_path / "pipe")


def test_a_change_is_seen_by_size_or_time(tmp_path) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    state = state_of(path)
    check_unchanged({path: state})
    os.utime(path, ns=(0, state[1] + 1))
    with pytest.raises(ValueError, match="a: must stay as it was when the dataset was made"):
        check_unchanged({path: state})
    path.write_text("12")
    os.utime(path, ns=(0, state[1]))
    with pytest.raises(ValueError, match="must stay as it was"):
        check_unchanged({path: state})
    path.unlink()
    with pytest.raises(ValueError, match="must stay as it was"):
        check_unchanged({path: state})

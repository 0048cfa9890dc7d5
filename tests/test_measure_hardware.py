"""Short measurements of the machine the tests run on."""

import pytest
from oracle import sentence

from cupyrec import cpu
from cupyrec.hardware import Hardware
from cupyrec.measure_hardware import measure_hardware


def test_a_machine_and_its_ssd(tmp_path):
    told = measure_hardware(tmp_path, nbytes=4 << 20)
    assert list(tmp_path.iterdir()) == []
    assert told.host.cores == cpu.num_threads()
    assert 1e8 < told.host.memory < 1e15
    assert 1e7 < told.host.memory_bandwidth < 1e13
    assert 1e4 < told.host.random_lines < told.host.memory_bandwidth
    assert 1e8 < told.host.float32 < 1e15
    assert 10 < told.ssd.random_reads < 1e9
    assert 1e3 < told.ssd.write_bandwidth < 1e12
    assert told.ssd.bytes > 0
    assert told.gpu is None
    sections = {"host": vars(told.host), "ssd": vars(told.ssd)}
    assert Hardware.from_dict(sections) == told


def test_without_a_folder_there_is_no_ssd():
    assert measure_hardware(nbytes=1 << 20).ssd is None


def test_a_folder_that_is_none_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("cupyrec.measure_hardware._bandwidth", None)
    (tmp_path / "file").touch()
    for name, found in (("file", "a file"), ("none", "nothing")):
        text = f"measure_hardware: '{tmp_path / name}' must be a folder, found {found} there."
        with pytest.raises(NotADirectoryError, match=sentence(text)):
            measure_hardware(tmp_path / name)

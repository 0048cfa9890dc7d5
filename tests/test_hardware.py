"""Files that tell what a machine has."""

from pathlib import Path

import pytest

from cupyrec.hardware import Hardware

FOLDER = Path(__file__).parents[1] / "scripts" / "configs" / "hardware"
HOST = dict(memory=16e9, memory_bandwidth=2e10, random_lines=1e8, cores=2, float32=2e11)


def test_the_ready_ones_load():
    files = {path.stem: Hardware.load(path) for path in FOLDER.glob("*.toml")}
    assert files.keys() == {"a100_host", "h200_host", "small_cpu_host"}
    for name, hardware in files.items():
        assert (hardware.gpu is None) == (name == "small_cpu_host")
        assert "ource" in (FOLDER / f"{name}.toml").read_text()  # which says where it is from


def test_toml_and_back(tmp_path):
    hardware = Hardware.load(FOLDER / "h200_host.toml")
    (tmp_path / "h.toml").write_text(hardware.to_toml())
    assert Hardware.load(tmp_path / "h.toml") == hardware


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({}, ValueError, "got none"),
        ({"host": HOST, "disk": {}}, ValueError, "got host, disk"),
        ({"host": 5}, TypeError, "'host' must be a section"),
        ({"host": HOST | {"watts": 5}}, ValueError, "got memory, .*watts"),
        ({"host": {"memory": 1}}, ValueError, "must have the keys memory, .*got memory"),
        ({"host": HOST | {"cores": 0}}, ValueError, "host.cores must be above 0, got 0"),
        ({"host": HOST | {"cores": float("nan")}}, ValueError, "host.cores must be above 0"),
        ({"host": HOST | {"cores": "two"}}, TypeError, "host.cores"),
        ({"host": HOST | {"ranks": 0.5}}, ValueError, "host.ranks must be a whole number"),
        ({"host": HOST | {"ranks": 2.5}}, ValueError, "host.ranks must be a whole number"),
    ],
)
def test_what_is_no_hardware_is_refused(sections, error, message):
    with pytest.raises(error, match=message):
        Hardware.from_dict(sections)

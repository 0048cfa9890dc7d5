"""Processes that are killed as they write row logs; and that what is wrong would be seen."""

import json
import random
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyrec.embedding import row_log_files, row_log_streams
from cupyrec.embedding.row_log import RowLog

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def chaos(monkeypatch):
    """The script, whose small files end with the test."""
    monkeypatch.setattr(row_log_files, "_LEAST", 16 << 10)
    monkeypatch.setattr(row_log_streams, "_BUFFER", 4 << 10)
    return runpy.run_path(str(SCRIPTS / "chaos_stores.py"))


def test_kills_and_damage(chaos, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    arguments = ["chaos.py", "--stores", "--kills", "4", "--seed", "5"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / "chaos.py"), run_name="__main__")
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    result = json.loads(said.out.splitlines()[-1])
    assert result.pop("commits") > 0
    assert result == {"kills": 4, "wrong": 0, "damaged": 2, "unseen": 0}


@pytest.fixture
def folder(tmp_path, chaos):
    """A log after steps 1 to 6 of seed 3, and their truth."""
    truth = chaos["Truth"](3)
    with RowLog(tmp_path / "log", 8) as log:
        for step in range(1, 7):
            for version, (count, rows) in enumerate(chaos["changes"](3, step, len(log))):
                if count < len(log):
                    log.truncate(count)
                log.write(rows, chaos["payloads"](rows, 8 * step + version))
            log.commit({"step": step})
    return tmp_path / "log", truth


def test_what_is_right_passes(chaos, folder):
    path, truth = folder
    assert chaos["check"](path, truth, 7, 6, False) == ""
    assert truth.step == 6 and truth.versions.size > 0
    assert chaos["check"](path, truth, 0, 0, True) == ""  # a child that did not get that far


def test_what_is_wrong_is_told(chaos, folder):
    path, truth = folder
    assert "step must be one of {8, 7}, got 6" in chaos["check"](path, truth, 8, 7, False)
    with RowLog(path, 8) as log:
        log.write(np.array([0]), np.zeros((1, 8), np.uint32))
        log.commit({"step": 6})
    assert "rows of step 6 must be there" in chaos["check"](path, truth, 6, 6, False)
    with RowLog(path, 8) as log:
        log.truncate(len(log) - 1)
        log.commit({"step": 6})
    assert "rows of step 6 must be there" in chaos["check"](path, truth, 6, 6, False)
    (path / "manifest.json").write_text("{}")
    assert "must be whole" in chaos["check"](path, truth, 6, 6, False)


def test_damage_is_done_and_seen(chaos, folder, tmp_path):
    path, _ = folder
    kinds = set()
    for seed in range(12):
        copy = tmp_path / f"copy{seed}"
        shutil.copytree(path, copy)
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        harmed = chaos["damage"](copy, random.Random(seed))
        after = harmed.read_bytes() if harmed.exists() else None
        assert after != before[harmed.name]
        kinds.add((harmed.suffix, after is None, len(after or b"") == len(before[harmed.name])))
        shutil.rmtree(copy)
        shutil.copytree(path, copy)
        assert chaos["check_damaged"](copy, random.Random(seed)) == ""
    assert len(kinds) >= 4


def test_damage_that_is_overlooked_is_told(chaos, folder, monkeypatch):
    path, _ = folder
    monkeypatch.setitem(chaos["check_damaged"].__globals__, "damage", lambda folder, _: folder)
    assert chaos["check_damaged"](path, random.Random(0)).startswith("damage of log must be seen")

"""Random calls of a row log against a dict; a crash is a log that is dropped without a word."""

import gc
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as check_calls

from cupyrec.embedding import row_log_compaction, row_log_files, row_log_streams
from cupyrec.embedding.row_log import RowLog

WORDS = 8
SEEDS = st.integers(0, 1 << 30)


class Model(RuleBasedStateMachine):
    @initialize(direct=st.booleans(), seed=SEEDS)
    def begin(self, direct, seed):
        self.place = tempfile.TemporaryDirectory()
        self.direct, self.rng = direct, np.random.default_rng(seed)
        self.rows = self.kept = np.empty((0, WORDS), np.uint32)
        self.meta, self.step = {}, 0
        self.open()

    def open(self):
        self.log = RowLog(Path(self.place.name, "log"), WORDS, direct=self.direct)
        self.rows = self.kept.copy()
        self.superseded = np.zeros(len(self.kept), bool)  # rows of the commit
        assert self.log.meta == self.meta and len(self.log) == len(self.rows)

    def teardown(self):
        if hasattr(self, "log"):
            self.log.close()
            self.place.cleanup()

    @rule(more=st.integers(0, 40), share=st.floats(0, 1))
    def write(self, more, share):
        before = len(self.rows)
        old = np.flatnonzero(self.rng.random(before) < share)
        rows = self.rng.permutation(np.concatenate([old, np.arange(before, before + more)]))
        payloads = self.rng.integers(0, 1 << 32, (rows.size, WORDS), np.uint32)
        at = int(self.rng.integers(0, rows.size + 1))
        for part in (slice(at, None), slice(at)):  # new rows may come in any order
            self.log.write(rows[part], payloads[part])
        self.rows = np.concatenate([self.rows, np.empty((more, WORDS), np.uint32)])
        self.rows[rows] = payloads
        self.superseded[rows[rows < len(self.kept)]] = True

    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        count = int(share * len(self.rows))
        self.log.truncate(count)
        self.rows = self.rows[:count].copy()
        self.superseded[count:] = True

    @rule()
    def commit(self):
        self.step += 1
        self.log.commit({"step": self.step})
        self.kept, self.meta = self.rows.copy(), {"step": self.step}
        self.superseded = np.zeros(len(self.kept), bool)

    @rule()
    def crash(self):
        del self.log
        gc.collect()
        self.open()

    @rule()
    def records(self):
        seen = np.zeros(len(self.rows), np.int64)
        for rows, payloads in self.log.records():
            seen[rows] += 1
            np.testing.assert_array_equal(payloads, self.rows[rows])
        assert (seen == 1).all()

    @invariant()
    def holds_what_was_written(self):
        if not hasattr(self, "log"):
            return
        count = len(self.rows)
        rows = self.rng.permutation(count)
        out = np.empty((count, WORDS), np.uint32)
        self.log.read(rows, out)
        np.testing.assert_array_equal(out, self.rows[rows])
        files = self.log._state.files
        with self.log._state.lock:
            assert int(files.live.sum()) == count
            assert int(files.held.sum()) == self.superseded.sum()
        self.log._compaction.keep_up()
        assert files.disk_bytes <= 1.5 * files.needed_bytes + 4 * files.file_bytes


@pytest.mark.parametrize("least", [400, 4096])
def test_any_calls(monkeypatch, least):
    monkeypatch.setattr(row_log_files, "_LEAST", least)
    monkeypatch.setattr(row_log_streams, "_BUFFER", 700)
    monkeypatch.setattr(row_log_compaction, "_PIECE", 500)
    check_calls(Model, settings=settings(max_examples=25, stateful_step_count=40))

"""A server as a process, with a predictor that does what tests ask for."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

_LOGGER = logging.getLogger("cupyrec")


class StandIn:
    """Tells the sum of a row; a row that begins with 1000 takes as many seconds as its second
    number says, or until there is a file 'enough' (both are logged when they begin), one with
    2000 is not finite, one with 3000 fails. The version is what the first
    line of its file says, 'bad' one that is no checkpoint, 'slow' one that takes a minute,
    'lost' one after which none is there."""

    name, schema, num_dense, num_tables, has_bags = "sums", None, 2, 1, False

    def __init__(self, file: Path) -> None:
        self.task_names = ["click"]
        self.path, self.version = file, file.read_text().strip()
        self._lock = threading.Lock()

    def probabilities(self, dense, ids):
        with self._lock:
            version = self.version
            first = dense[:, :1]
            self._compute(float(np.where(first == 1000, dense[:, 1:], 0).max(initial=0)))
            if (first == 3000).any():
                raise RuntimeError("asked to fail")
            values = dense.sum(axis=1, keepdims=True) + ids
            return np.where(first == 2000, np.nan, values).astype(np.float32), version

    def _compute(self, seconds):
        if not seconds:
            return
        _LOGGER.info("computing for %g s", seconds)
        enough, end = self.path.with_name("enough"), time.monotonic() + seconds
        while time.monotonic() < end and not enough.exists():
            time.sleep(0.01)
        enough.unlink(missing_ok=True)

    @property
    def is_open(self):
        return self.version != "lost"

    def update(self, file):
        version = Path(file).read_text().strip()
        if version == "slow":
            _LOGGER.info("reading what is slow")
        time.sleep(60 if version == "slow" else 0.05)
        if version == "bad":
            raise ValueError("checkpoint: must be one, got none.")
        if version == "worse":
            raise RuntimeError("out of order")
        with self._lock:
            newer, self.version = version != self.version, version
        return newer


_PROGRAM = """
import logging, pathlib, sys
sys.path.insert(0, {tests!r})
from cupyrec.serving import server
import stand_in
server._MOMENT = 3.0  # a client may wait long for a core
logging.basicConfig(format="%(message)s", stream=sys.stderr)
logging.getLogger("cupyrec").setLevel(logging.INFO)
with server.bind("127.0.0.1", 0) as listening:
    file = pathlib.Path({file!r})
    code = server.run(stand_in.StandIn(file), file, listening, **{options!r})
sys.exit(code)
"""


class Serving:
    """The process, its address, and all that it has said."""

    def __init__(self, folder, **options):
        self.file = Path(folder, "version")
        self.file.write_text("v1")
        tests = str(Path(__file__).parent)
        program = _PROGRAM.format(tests=tests, file=str(self.file), options=options)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )  # fmt: skip
        self.said = ""
        self._reads = threading.Thread(target=self._read, daemon=True)
        self._reads.start()
        found = self.check_says(r"serving (\w+) version \w+ at http://([\d.]+):(\d+)")
        self.name, self.host, self.port = found[1], found[2], int(found[3])

    def _read(self):
        for line in self.process.stderr:
            self.said += line

    def check_says(self, pattern, seconds=60):
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.said)):
            assert time.monotonic() < end, self.said
            assert self.process.poll() is None or not self._reads.is_alive(), self.said
            time.sleep(0.01)
        return found

    def enough(self):
        """Let a request that takes long be answered."""
        self.file.with_name("enough").touch()

    def send(self, number):
        self.process.send_signal(number)

    def code(self, seconds=60):
        code = self.process.wait(seconds)
        self._reads.join()
        return code


@contextlib.contextmanager
def serving(folder, **options):
    """A server that is ended with the context, by SIGKILL if need be."""
    one = Serving(folder, **options)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.send(signal.SIGKILL)
        one.code()
        one.process.stderr.close()


def body(*rows, ids=None, **more):
    """An inference request of these rows."""
    ids = [0] * len(rows) if ids is None else ids
    dense = [value for row in rows for value in row]
    return {
        "inputs": [
            {"name": "dense", "datatype": "FP32", "shape": [len(rows), 2], "data": dense},
            {"name": "ids", "datatype": "INT64", "shape": [len(rows), 1], "data": ids},
        ],
        **more,
    }

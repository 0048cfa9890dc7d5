"""scripts/bench_serving.py on a tiny model, and its peer where PyTorch and FastAPI are."""

import argparse
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cupyrec.data import Frame

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY = argparse.Namespace(ids=50, batches=[1, 3], connections=4, seconds=0.3, rounds=1, reloads=12)


@pytest.fixture(scope="module")
def bench():
    return runpy.run_path(str(SCRIPTS / "bench_serving.py"))


def test_our_server_answers_all_kinds_of_requests(bench, tmp_path):
    bench["saved"](tmp_path / "checkpoint", 50, seed=1)
    given = bench["rows"](7, 50, seed=2)
    with bench["Predictor"](tmp_path / "checkpoint") as predictor:
        expected, _ = predictor.probabilities(*given)
        columns = {name: data for name, (_, data) in bench["as_columns"](*given).items()}
        frame = Frame(pa.table(columns), predictor.schema, labels=False)
        of_frame = predictor.predict(frame)
    with bench["ours"](tmp_path / "checkpoint") as port:
        bench["check"](port, expected[:, 0], given, 0)
        text = bench["asked"](port, *bench["in_binary"](*given))
        assert (np.frombuffer(text[-28:], np.float32) == expected[:, 0]).all()
        (output,) = json.loads(bench["asked"](port, *bench["in_columns"](*given)))["outputs"]
        assert (np.array(output["data"], np.float32) == of_frame).all()
        for kind in ("in_json", "in_binary", "in_columns"):
            requests = [bench["request"](*bench[kind](*given))]
            rate, p99 = bench["drive"](port, requests, 4, 0.3)
            assert rate > 10
            assert 0 < p99 < 1000
        with pytest.raises(SystemExit, match="the server must say"):
            bench["check"](port, expected[:, 0] + 1, given, 1e-3)


def test_reloads_fail_no_answer(bench):
    figures = bench["reload"](TINY)
    assert figures["reloads"] == 12
    assert figures["failed_or_mixed"] == 0
    assert figures["versions"] >= 2
    assert figures["answers"] > 12


def test_what_is_mixed_is_seen(bench):
    class Connection:
        def request(self, *_):
            pass

        def getresponse(self):
            return self

        def read(self):
            head = json.dumps({"model_version": "a"}).encode()
            self.status, self.headers = 200, {"Inference-Header-Content-Length": len(head)}
            return head + np.ones(2, np.float32).tobytes()

    told = {"a": np.ones(2, np.float32)}
    assert bench["judged"](Connection(), b"", {}, told) == "a"
    told["a"][1] = 2
    assert bench["judged"](Connection(), b"", {}, told) == "mixed with a"


def test_the_peer_says_the_same(bench, monkeypatch, capsys):
    """By the PyTorch and FastAPI of this environment: continuous integration installs them."""
    pytest.importorskip("torch", reason="PyTorch is missing: pip install torch==2.13.0")
    pytest.importorskip("fastapi", reason="FastAPI is missing: pip install fastapi")
    monkeypatch.setitem(bench["speed"].__globals__, "peer_python", lambda: Path(sys.executable))
    figures = bench["speed"](TINY)
    assert figures["ratio_vs_fastapi_torch"] > 0
    assert "peer, 2 workers" in capsys.readouterr().err


def test_the_last_line_has_the_figures(bench, monkeypatch, capsys):
    figures = {"requests_per_second": 1.0, "p99_ms": 2.0, "ratio_vs_fastapi_torch": 3.00004}
    monkeypatch.setitem(bench["main"].__globals__, "speed", lambda options: figures)
    monkeypatch.setattr(sys, "argv", ["bench_serving.py"])
    bench["main"]()
    assert json.loads(capsys.readouterr().out) == figures | {"ratio_vs_fastapi_torch": 3.0}

"""Spans of threads as a Chrome trace."""

import json
import threading
import time

import pytest
import trial

from cupyrec import timeline


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
    monkeypatch.setattr(timeline, "_spans", None)


def test_nothing_is_noted_before_it_starts() -> None:
    with timeline.span("forward"):
        pass
    assert timeline.events(0) == []


def test_spans_of_threads_and_ranks(tmp_path) -> None:
    timeline.start()

    def send() -> None:
        with timeline.span("keys"):
            time.sleep(0.02)

    thread = threading.Thread(target=send, name="cupyrec-mpi")
    with timeline.span("forward"):
        thread.start()
        thread.join()
    with pytest.raises(ZeroDivisionError), timeline.span("backward"):
        raise ZeroDivisionError
    told = [timeline.events(rank) for rank in (0, 1)]
    timeline.write(tmp_path / "trace.json", told)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["keys", "forward", "backward"] * 2
    keys, forward = events[:2]
    assert (keys["pid"], keys["tid"], events[3]["pid"]) == (0, "cupyrec-mpi", 1)
    assert min(event["ts"] for event in events) == 0
    assert forward["ts"] <= keys["ts"] and keys["dur"] >= 15_000  # microseconds
    assert keys["ts"] + keys["dur"] <= forward["ts"] + forward["dur"] + 1


def test_late_spans_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr(timeline, "_MOST", 6)
    timeline.start(ranks=3)
    for _ in range(3):
        with timeline.span("forward"):
            pass
    assert len(timeline.events(0)) == 2


def test_the_command_writes_it_after_its_result(tmp_path, capsys) -> None:
    logs = trial.write_logs(tmp_path)
    trace = tmp_path / "trace.json"
    assert trial.train(logs, tmp_path / "run", "--trace", trace) == 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward", "backward", "update"} <= names
    capsys.readouterr()
    nowhere = tmp_path / "none" / "trace.json"
    assert trial.train(logs, tmp_path / "run", "--overwrite", "--trace", nowhere) == 1
    said = capsys.readouterr()
    assert "test_auc" in json.loads(said.out)  # what was trained is not lost
    assert str(nowhere) in said.err

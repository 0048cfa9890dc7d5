"""What each thread does when: spans, which Chrome's trace viewer and Perfetto show.

Nothing is noted, and a span costs next to nothing, before `start`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["events", "span", "start", "write"]

_MOST = 400_000  # spans of all ranks, some 20,000 steps of one; later ones are left out
_spans: list[tuple[str, str, float, float]] | None = None
_room = 0


def start(ranks: int = 1) -> None:
    """Note spans from now on, of each of so many ranks its share: the trace is of all of them.

    Examples
    --------
    See `write`.
    """
    global _spans, _room
    _spans, _room = [], _MOST // ranks


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Note when what is done within this context begins and ends.

    Examples
    --------
    See `write`.
    """
    spans = _spans
    if spans is None or len(spans) >= _room:
        yield
        return
    begin = time.time()  # of one host's processes the same clock
    try:
        yield
    finally:
        spans.append((name, threading.current_thread().name, begin, time.time()))


def events(rank: int) -> list[dict[str, Any]]:
    """Return what was noted, as events of Chrome's trace format with times in microseconds.

    Examples
    --------
    See `write`.
    """
    return [
        {
            "name": name, "ph": "X", "pid": rank, "tid": thread,
            "ts": round(1e6 * begin), "dur": round(1e6 * (end - begin)),
        }
        for name, thread, begin, end in _spans or ()
    ]  # fmt: skip


def write(path: str | Path, told: Sequence[list[dict[str, Any]]]) -> None:
    """Write the events of all ranks to a file.

    Raises
    ------
    OSError
        It can't be written.

    Examples
    --------
    >>> import tempfile
    >>> start()
    >>> with span("forward"):
    ...     pass
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder + "/trace.json", [events(rank=0)])
    ...     json.loads(Path(folder, "trace.json").read_text())["traceEvents"][0]["name"]
    'forward'
    """
    everything = [event for rank in told for event in rank]
    first = min((event["ts"] for event in everything), default=0)
    for event in everything:
        event["ts"] -= first
    Path(path).write_text(json.dumps({"traceEvents": everything}), "utf-8")

"""Streams: who waits for whom."""

from types import SimpleNamespace

import numpy as np
import pytest

from cupyrec import arrays, cublaslt, streams
from cupyrec.sim.gemm import MatmulFault


class Streams:
    """An array module whose streams write down what they are asked."""

    def __init__(self):
        self.seen = []
        self.current = self.Stream(self, "main")
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking: self.Stream(self, f"second {non_blocking}"),
            Event=lambda disable_timing: f"event {disable_timing}",
            Device=lambda: SimpleNamespace(id=0),
            get_current_stream=lambda: self.current,
        )

    class Stream:
        def __init__(self, module, name):
            self.module, self.name = module, name

        def use(self):
            self.module.current = self
            self.module.seen.append(f"use {self.name}")

        def record(self, event):
            assert event == "event True"
            return self.name

        def wait_event(self, event):
            self.module.seen.append(f"{self.name} waits for {event}")


def test_second_stream_waits_for_the_first_and_then_the_first_for_it():
    xp = Streams()
    with streams.second_stream(xp) as second:
        with second():
            xp.seen.append("work")
        xp.seen.append("more")
    one = ["second True waits for main", "use second True", "work", "use main"]
    assert xp.seen == [*one, "more", "main waits for second True"]


def test_second_stream_is_left_and_waited_for_after_an_error():
    xp = Streams()
    with pytest.raises(ZeroDivisionError), streams.second_stream(xp) as second, second():
        raise ZeroDivisionError
    assert xp.seen[-2:] == ["use main", "main waits for second True"]


def test_second_stream_holds_what_it_is_told(xp):
    x, out = xp.ones((3, 1), np.float32), xp.empty((3, 1), np.float32)
    two = xp.full((1, 1), 2, np.float32)
    with streams.second_stream(xp) as second:
        with second(two):
            cublaslt.matmul(x, two, out)
        del two
        xp.zeros((1, 1), np.float32)
    np.testing.assert_array_equal(arrays.to_host(out), np.full((3, 1), 2))


def test_simulator_sees_what_is_not_held(sim):
    x, out = sim.ones((3, 1), np.float32), sim.empty((3, 1), np.float32)
    two = sim.full((1, 1), 2, np.float32)
    with pytest.raises(MatmulFault), streams.second_stream(sim) as second:
        with second():
            cublaslt.matmul(x, two, out)
        del two

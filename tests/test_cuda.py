"""Streams of the simulator."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cupyrec import cublaslt
from cupyrec.ops.relu_dropout import relu_dropout


@pytest.fixture
def streams(sim):
    """The null stream, which is the current one again after the test, and another."""
    main = sim.cuda.get_current_stream()
    yield main, sim.cuda.Stream(non_blocking=True)
    main.use()


def submit(sim, stream, seen, name):
    stream.use()
    sim.cuda.submit(lambda: seen.append(name))


def test_null_stream_runs_at_once_and_others_when_they_are_waited_for(sim, streams):
    (main, other), seen = streams, []
    submit(sim, other, seen, "a")
    submit(sim, other, seen, "b")
    submit(sim, main, seen, "c")
    assert seen == ["c"]
    main.wait_event(other.record())
    assert seen == ["c", "a", "b"]


def test_event_passes_with_what_was_given_before_it(sim, streams):
    (main, other), seen = streams, []
    submit(sim, other, seen, "a")
    first = other.record(sim.cuda.Event(disable_timing=True))
    submit(sim, other, seen, "b")
    second = other.record()
    main.wait_event(first)
    assert seen == ["a"]
    main.wait_event(first)
    main.wait_event(sim.cuda.Event())  # recorded by nobody
    assert seen == ["a"]
    main.wait_event(second)
    assert seen == ["a", "b"]


def test_work_that_waits_for_another_stream(sim, streams):
    (main, other), seen = streams, []
    third = sim.cuda.Stream(non_blocking=True)
    submit(sim, other, seen, "a")
    third.wait_event(other.record())
    submit(sim, third, seen, "b")
    main.wait_event(third.record())
    assert seen == ["a", "b"]


def test_each_thread_has_a_current_stream(sim, streams):
    main, other = streams
    other.use()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(sim.cuda.get_current_stream).result() is main
    assert sim.cuda.get_current_stream() is other


def test_kernels_and_matmuls_wait(sim, streams):
    main, other = streams
    x, bias = sim.ones((2, 3), np.float32), sim.ones(3, np.float32)
    out = sim.zeros((2, 2), np.float32)
    other.use()
    with sim.record() as seen:
        y, _ = relu_dropout(x, bias)
        cublaslt.matmul(y, y, out, transpose_b=True)
        assert (seen.launches, out.get().sum()) == ([], 0)
        main.wait_event(other.record())
    assert [launch.name for launch in seen.launches] == ["relu_dropout", "cublaslt.matmul"]
    np.testing.assert_array_equal(out.get(), np.full((2, 2), 12))

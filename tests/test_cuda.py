"""Streams, graphs and pools of the simulator: work runs when it is waited for, or launched."""

import gc
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracle
import pytest

from cupyrec import cublaslt, sim
from cupyrec.kernel import Geometry, Kernel
from cupyrec.ops.relu_dropout import relu_dropout
from cupyrec.sim import heap
from cupyrec.streams import second_stream

f32 = np.float32
X = np.arange(12, dtype=f32).reshape(3, 4)


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


def test_a_copy_to_the_host_waits_for_its_stream(sim, streams):
    _, other = streams
    x = sim.zeros(2, np.float32)
    other.use()
    x += 1
    assert x.get().tolist() == [1, 1]
    x += 1
    event = other.record()
    x += 1
    event.synchronize()
    assert x._host.tolist() == [2, 2]


def test_kernels_and_matmuls_wait(sim, streams):
    main, other = streams
    x, bias = sim.ones((2, 3), np.float32), sim.ones(3, np.float32)
    out = sim.zeros((2, 2), np.float32)
    other.use()
    with sim.record() as seen:
        y, _ = relu_dropout(x, bias)
        cublaslt.matmul(y, y, out, transpose_b=True)
        main.use()
        assert (seen.launches, out.get().sum()) == ([], 0)
        main.wait_event(other.record())
    assert [launch.name for launch in seen.launches] == ["relu_dropout", "cublaslt.matmul"]
    np.testing.assert_array_equal(out.get(), np.full((2, 2), 12))


# Graphs


def capture(work, *given):
    """What `work` gave while it was captured, its graph and the graph's memory."""
    stream, pool = sim.cuda.Stream(non_blocking=True), sim.cuda.MemoryPool()
    with sim.cuda.using_allocator(pool.malloc), stream:
        stream.begin_capture()
        try:
            result = work(*given)
        finally:
            graph = stream.end_capture()
    return result, graph, pool


def out_of_place(x):
    return sim.where(x > 4, x * 2, -x).sum(axis=0) + sim.exp(x)[0] @ sim.ones((4, 4), f32)


def in_place(x):
    x += 1
    x[1] = x[0] * 3
    x[2].fill(7)
    sim.maximum(x, x[1], out=x)
    return x


def copies(x):
    parts = x[sim.arange(2)], x.T.reshape(-1)[:8].reshape(2, 4), sim.ascontiguousarray(x.T).T[:2]
    return sim.concatenate([*parts, x.astype(np.float64).astype(f32).copy()], axis=0)


def kernels(x):
    y, mask = relu_dropout(x, x[0])
    out = sim.empty((3, 3), f32)
    cublaslt.matmul(y, x, out, transpose_b=True)
    return sim.concatenate([out, y, mask.astype(f32)], axis=1)


@pytest.mark.parametrize("work", [out_of_place, in_place, copies, kernels])
def test_a_graph_gives_what_the_work_gives_and_counts_as_much(work):
    x = sim.asarray(X)
    with sim.record() as seen:
        result, graph, _pool = capture(work, x)
    assert (seen.launches, seen.graphs) == ([], 0)
    np.testing.assert_array_equal(x.get(), X)  # nothing has run
    for factor in (1, 2, -3):
        x[...] = sim.asarray(X) * factor
        truth = sim.asarray(X) * factor
        with sim.record() as own:
            truth = work(truth)
        with sim.record() as seen:
            graph.launch()
        np.testing.assert_array_equal(result.get(), truth.get())
        assert [a[:4] for a in seen.launches] == [a[:4] for a in own.launches]
        assert [a.moved for a in seen.launches] == [a.moved for a in own.launches]
        assert (seen.graphs, seen.syncs, seen.allocations) == (1, 0, 0)


WAITS = {
    "get": lambda x: x.get(),
    "item": lambda x: x[0, 0].item(),
    "flatnonzero": lambda x: sim.flatnonzero(x),
    "array": lambda x: x + sim.asarray(np.ones(4, f32)),
    "an array of the size of what a mask lets through": lambda x: x[x > 2],
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_and_what_comes_from_the_host_are_refused_by_name(name):
    text = (
        "sim: a stream that is capturing must neither wait for the device nor take data from the "
        f"host, got {name}."
    )
    with pytest.raises(RuntimeError, match=oracle.sentence(text)):
        capture(WAITS[name], sim.asarray(X))
    WAITS[name](sim.asarray(X))  # the capture has ended


def test_threads_go_on_meanwhile():
    x, seen = sim.asarray(X), []

    def work():
        thread = threading.Thread(target=lambda: seen.append((x + 1).get()))
        thread.start()
        thread.join()

    capture(work)
    np.testing.assert_array_equal(seen[0], X + 1)


def test_a_stream_that_forks_off_is_part_of_the_graph():
    x, y, z = sim.asarray(X), sim.empty((3, 4), f32), sim.empty((3, 4), f32)

    def work():
        x.fill(2)
        with second_stream(sim) as second:
            with second():
                sim.add(x, 1, out=y)
                with pytest.raises(RuntimeError, match="wait for the device"):
                    y.get()
            sim.add(x, 2, out=z)
        sim.add(y, z, out=x)

    _, graph, _pool = capture(work)
    np.testing.assert_array_equal(x.get(), X)
    for _ in range(2):
        graph.launch()
        np.testing.assert_array_equal(x.get(), np.full((3, 4), 7))


def test_a_fork_that_nobody_waits_for_is_refused_and_forgotten():
    x, other = sim.asarray(X), sim.cuda.Stream()

    def work():
        other.wait_event(sim.cuda.get_current_stream().record())
        with other:
            x.fill(1)

    text = (
        "sim: a stream that is capturing must wait for those that have waited for it, got 1 "
        "launches that nobody waits for."
    )
    with pytest.raises(RuntimeError, match=oracle.sentence(text)):
        capture(work)
    sim.cuda.get_current_stream().wait_event(other.record())
    np.testing.assert_array_equal(x.get(), X)


def test_memory_given_back_in_a_capture_serves_again_and_goes_with_the_pool():
    gc.collect()
    before = len(heap.the_heap().live)
    x = sim.asarray(X)

    def work():
        for _ in range(5):
            x.fill(1)
            y = x * 2
            del y
        return x * 3

    with sim.record() as seen:
        y, graph, pool = capture(work)
    assert (seen.allocations, len(heap.the_heap().live)) == (1, before + 2)
    graph.launch()
    np.testing.assert_array_equal(y.get(), np.full((3, 4), 3))
    del pool
    gc.collect()
    assert len(heap.the_heap().live) == before + 1  # though y is there still
    del y


def test_a_fault_names_its_kernel_when_the_graph_is_launched(tmp_path, monkeypatch):
    (tmp_path / "f.cu").write_text('extern "C" __global__ void f(float* x) { x[threadIdx.x] = 0; }')
    monkeypatch.setattr("cupyrec.kernel.folder", lambda: tmp_path)
    f = Kernel("f.cu", "f", "float* x", lambda n: Geometry(1, n))
    x = sim.ones(3, f32)
    _, graph, _pool = capture(lambda: f(x, n=4))
    with pytest.raises(RuntimeError, match="out of bounds"):
        graph.launch()


def test_names_are_cupys():
    cupy = pytest.importorskip("cupy", reason="CuPy is compared with: pip install cupyrec[cuda12]")
    for name in ("Stream", "Graph", "MemoryPool", "using_allocator"):
        ours, theirs = getattr(sim.cuda, name), getattr(cupy.cuda, name)
        if inspect.isclass(ours):
            public = {n for n in vars(ours) if n[0] != "_"} | {"__class__"}
            assert {n for n in public if not hasattr(theirs, n)} == set()
    known = inspect.signature(cupy.cuda.Stream).parameters
    assert set(inspect.signature(sim.cuda.Stream).parameters) <= set(known)

"""What messages need of arrays."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.kernel import KernelFault
from cupyrec.ops.rank_sum import rank_sum
from cupyrec.parallel import devices


def test_the_simulator_is_told_what_others_have_written(sim) -> None:
    parts = sim.empty((2, 3), np.float32)
    with pytest.raises(KernelFault, match="uninitialized"):
        rank_sum(parts)
    devices.received(parts)
    assert arrays.to_host(rank_sum(parts)).shape == (3,)


@pytest.mark.parametrize("shape", [(0,), (3, 2)])
def test_host_memory_has_the_shape_asked_for(np_or_xp, shape) -> None:
    like = np_or_xp.zeros(shape, np.int64)
    host = devices.pinned_like(like)
    assert isinstance(host, np.ndarray) and (host.shape, host.dtype) == (shape, np.int64)


def test_what_is_sent_has_the_values_that_it_had(np_or_xp) -> None:
    for values in (np.arange(6.0).reshape(2, 3), np.empty((0, 3))):
        host = devices.fetched(np_or_xp.asarray(values))
        assert isinstance(host, np.ndarray) and (host == values).all()


class Gpus:
    """An array module with two GPUs, which writes down what it is asked, by which thread."""

    def __init__(self) -> None:
        self.seen, self.own = [], threading.local()
        self.cuda = SimpleNamespace(
            Device=lambda: Gpus.Device(self, getattr(self.own, "device", 0)),
            Event=lambda block, disable_timing: Gpus.Event(self),
            Stream=lambda non_blocking: Gpus.Stream(self, f"exchange of {self.device}"),
            get_current_stream=lambda: getattr(self.own, "stream", Gpus.Stream(self, "main")),
        )

    device = property(lambda self: getattr(self.own, "device", 0))

    def note(self, text: str) -> None:
        self.seen.append((threading.current_thread().name, text))

    class Device:
        def __init__(self, xp, number: int) -> None:
            self.xp, self.id = xp, number

        def __enter__(self):
            self.before, self.xp.own.device = self.xp.device, self.id

        def __exit__(self, *error) -> None:
            self.xp.own.device = self.before

    class Event:
        def __init__(self, xp) -> None:
            self.xp = xp

        def synchronize(self) -> None:
            self.xp.note(f"waits for {self.stream.name}")

    class Stream:
        def __init__(self, xp, name: str) -> None:
            self.xp, self.name = xp, name

        def __enter__(self):
            self.xp.own.stream = self

        def __exit__(self, *error) -> None:
            del self.xp.own.stream

        def record(self, event):
            self.xp.note(f"records {self.name}")
            event.stream = self
            return event


def test_another_thread_works_on_the_same_gpu_on_a_stream_of_its_own() -> None:
    xp = Gpus()
    xp.own.device = 1
    given = devices.Given(xp, xp)

    def work() -> None:
        with given.taken_up():
            xp.note(f"works on {xp.device}, {xp.cuda.get_current_stream().name}")
        xp.note(f"is back on {xp.device}, {xp.cuda.get_current_stream().name}")

    thread = threading.Thread(target=work, name="other")
    thread.start()
    thread.join()
    assert xp.seen == [
        ("MainThread", "records main"),
        ("other", "waits for main"),
        ("other", "works on 1, exchange of 1"),
        ("other", "records exchange of 1"),
        ("other", "waits for exchange of 1"),
        ("other", "is back on 0, main"),
    ]


def test_simulated_work_is_done_before_and_after(sim) -> None:
    """What nobody waits for never happens there."""
    with sim.cuda.Stream():
        x, y = sim.zeros(3, np.float32), sim.empty(3, np.float32)
        x += 1
        given = devices.Given(sim)
    with given.taken_up():
        sim.add(x, 1, out=y)
    assert y.get().tolist() == [2, 2, 2]


@pytest.mark.parametrize("count", [0, 3, 4, 9])
def test_room_is_memory_of_the_stream_that_it_is_for(sim, count: int, monkeypatch) -> None:
    made = []
    stream = sim.cuda.Stream()
    with stream:
        room = devices.Room(sim, 4, np.int64)
    monkeypatch.setattr(
        devices, "empty", lambda *given: made.append(sim.cuda.get_current_stream()) or sim.empty(9)
    )
    assert len(room.of(count)) == count
    assert made == ([stream] if count == 9 else [])

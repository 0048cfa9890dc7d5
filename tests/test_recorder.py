import gc

import numpy as np
import oracle
import pytest

from cupyrec import sim
from cupyrec.sim import recorder


def test_it_counts_launches_and_syncs():
    x = sim.array(np.arange(6, dtype=np.float32))
    with sim.record() as seen:
        y = (x * 2).sum()
        assert seen.syncs == 0
        assert float(y) == 30
        y.get()
    x + 1  # after the context: not seen
    assert [launch.name for launch in seen.launches] == ["mul", "sum"]
    assert seen.syncs == 2


@pytest.mark.parametrize(
    ("work", "names"),
    [
        (lambda x: x[1:], []),
        (lambda x: x.reshape(2, 3).T, []),
        (lambda x: sim.split(x, [2]), []),
        (lambda x: sim.broadcast_to(x, (2, 6)), []),
        (lambda x: x[sim.array([0, 1])], ["take"]),
        (lambda x: x.astype(np.float64), ["astype"]),
        (lambda x: x.astype(np.float32, copy=False), []),
        (lambda x: x.copy(), ["copy"]),
        (lambda x: x.fill(1), ["setitem"]),
        (lambda x: np.exp(x), ["exp"]),
        (lambda x: sim.concatenate([x, x]), ["concatenate"]),
        (lambda x: x.__iadd__(1), ["iadd"]),
    ],
)
def test_what_makes_no_copy_launches_nothing(work, names):
    x = sim.array(np.arange(6, dtype=np.float32))
    with sim.record() as seen:
        work(x)
    assert [launch.name for launch in seen.launches] == names
    assert seen.syncs == 0


@pytest.mark.parametrize("wait", [float, int, bool, lambda x: x.item(), lambda x: x.get()])
def test_what_brings_a_value_home_waits(wait):
    x = sim.array(np.float32(1))
    with sim.record() as seen:
        wait(x)
    assert seen.syncs == 1


def test_a_freed_block_serves_again():
    size = 123 * 512  # as no other test has it
    with sim.record() as seen:
        x = sim.empty(size, np.uint8)
        assert seen.allocations == 1
        del x
        gc.collect()
        y = sim.empty(size - 511, np.uint8)  # rounded up to the same block
        assert seen.allocations == 1
        z = sim.empty(size, np.uint8)
        assert seen.allocations == 2
        assert y.nbytes + z.nbytes == 2 * size - 511
        y.reshape(-1), y[3:]
        assert seen.allocations == 2


def test_records_may_nest():
    x = sim.array([1, 2])
    with sim.record() as outer:
        x + 1
        with sim.record() as inner:
            x + 1
        x + 1
    assert (len(outer.launches), len(inner.launches)) == (3, 1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(arch=8.0), TypeError, "sim.schedule: 'arch' must be a whole number, got 8.0."),
        (dict(arch=9), ValueError,
         "sim.schedule: 'arch' must be a compute capability times 10, as 80 or 90, got 9."),
        (dict(seed="1"), TypeError, "sim.schedule: 'seed' must be a whole number, got '1'."),
        (dict(seed=-1), ValueError, "sim.schedule: 'seed' must be 0 or more, got -1."),
    ],
)  # fmt: skip
def test_the_schedule_is_checked(options, error, text):
    with pytest.raises(error, match=oracle.sentence(text)), sim.schedule(**options):
        recorder.scheduled()
    assert recorder.scheduled() == (80, 0)


def test_the_schedule_ends_with_its_context():
    with pytest.raises(ZeroDivisionError), sim.schedule(arch=90, seed=4):
        assert recorder.scheduled() == (90, 4)
        _ = 1 / 0
    assert recorder.scheduled() == (80, 0)

"""Memory of HugePages: what lies in it, and that it goes back."""

import copy
import gc
import mmap
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyrec import huge_pages
from cupyrec.huge_pages import HugePages

HUGE = 2 << 20


def resident():
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("shape", [(), 0, 3, np.int64(7), (5, 3), HUGE, (HUGE, 3)])
def test_zeros_to_write_to(shape):
    pages = HugePages()
    for _ in range(3):
        x = pages.zeros(shape, np.int32)
        assert (x.shape, x.dtype) == (np.empty(shape, np.int32).shape, np.int32)
        assert x.flags.c_contiguous and x.flags.writeable
        assert not x.any()
        x[...] = 5
        assert (copy.deepcopy(x) == 5).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3 * HUGE), st.integers(0, 9)), max_size=60))
def test_arrays_that_come_and_go_keep_their_contents(calls):
    """Each call makes an array and lets one of ten go, or keeps no more than a view of it."""
    pages, live = HugePages(), {}
    for number, (nbytes, place) in enumerate(calls):
        x = pages.zeros(nbytes, np.uint8)
        assert not x.any()
        x[...] = number % 255 + 1
        live[place] = (x[nbytes // 2 :], number % 255 + 1)
        assert all((view == value).all() for view, value in live.values())
    assert 0 <= pages.spare < HUGE


def test_memory_goes_back_with_its_array():
    pages, size = HugePages(), 300_000
    before = resident()
    arrays = [pages.zeros(size, np.uint8) for _ in range(300)]
    for x in arrays:
        x[...] = 1
    slack = 4 * HUGE
    assert resident() - before >= 300 * size
    for left in (250, 100, 20):  # the oldest first
        del arrays[: len(arrays) - left]
        x = arrays[0]
        assert resident() - before <= left * size + slack
        assert all((x == 1).all() for x in arrays)
    del arrays, x
    gc.collect()
    assert resident() - before <= slack


def test_a_region_ends_with_its_last_array():
    pages = HugePages()
    x = pages.zeros(HUGE, np.uint8)
    region = weakref.ref(pages._region)
    last = pages.zeros(huge_pages._REGION, np.uint8)
    assert region() is not None
    del x
    assert region() is None
    assert not last.any()


def test_a_view_keeps_its_array():
    pages = HugePages()
    view = pages.zeros((1000, 1000), np.int32)[10:, 3:].T
    others = [pages.zeros(HUGE, np.uint8) for _ in range(5)]
    view[...] = 7
    del others
    assert (view == 7).all()


def test_threads_share_one():
    pages = HugePages()

    def work(number):
        for _ in range(40):
            x = pages.zeros(huge_pages._LEAST + 1000 * number, np.uint8)
            zero = not x.any()
            x[...] = number
            if not zero or not (x == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 5)))


def test_an_array_may_go_while_another_is_made():
    """As the garbage collector has it: the lock is taken by this very thread."""
    pages = HugePages()
    x = pages.zeros(HUGE, np.uint8)
    x[...] = 1
    before = resident()
    with pages._lock:
        del x
    assert resident() <= before - HUGE // 2


def test_a_copy_is_empty():
    pages = HugePages()
    x = pages.zeros(HUGE + 1, np.uint8)
    for other in (copy.deepcopy(pages), pickle.loads(pickle.dumps(pages))):  # noqa: S301
        assert (other.spare, other._region) == (0, None)
    assert x.size + pages.spare <= 2 * HUGE


def test_a_kernel_that_takes_no_advice(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, *of):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Memory)
    pages = HugePages()
    for _ in range(3):
        x = pages.zeros(HUGE, np.uint8)
        assert not x.any()
        x[...] = 1


def test_no_room_for_a_region(monkeypatch):
    pages = HugePages()

    def fail(nbytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages, "_Region", fail)
    assert not pages.zeros(HUGE, np.uint8).any()
    with pytest.raises(MemoryError):
        pages.zeros(1 << 55, np.uint8)
    monkeypatch.undo()
    assert not pages.zeros(HUGE, np.uint8).any()

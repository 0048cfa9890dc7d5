import copy
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.autograd import Tensor


def test_namespace_of_numpy_arrays():
    assert arrays.namespace("f", np.zeros(2), np.zeros((), np.int8)) is np


@pytest.mark.parametrize(
    ("value", "name"),
    [([1.0], "list"), (1.0, "float"), (np.float32(1), "float32"), (None, "NoneType")],
)
def test_namespace_names_the_type_that_is_no_array(value, name):
    text = f"f: arguments must be arrays of NumPy, CuPy or cupyrec.sim, got {name}."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        arrays.namespace("f", np.zeros(2), value)


def test_namespace_takes_no_tensor():
    with pytest.raises(TypeError, match="got Tensor.$"):
        arrays.namespace("f", Tensor([1.0]))


LARGE = 1 << 20


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("shape", [(), 0, 3, (0, 7), (3, 5), (513, 257), LARGE + 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint32, np.int64, np.uint8])
def test_empty_has_the_shape_and_dtype_asked_for(shape, dtype):
    x = arrays.empty(shape, dtype)
    assert (x.shape, x.dtype) == (np.empty(shape).shape, dtype)
    assert x.flags.c_contiguous
    assert x.flags.writeable
    assert address(x) % x.itemsize == 0
    x.fill(3)
    assert (x == 3).all()


def test_arrays_in_use_never_share_memory():
    generator = np.random.default_rng(0)
    live = []
    for i in range(300):
        n = int(generator.integers(LARGE // 8, LARGE // 4))
        live.append(arrays.empty((n // 8, 8), np.float32))
        live[-1].fill(i)
        if len(live) > 20:
            live.pop(int(generator.integers(20)))
        values = [x[0, 0] for x in live]
        assert all((x == value).all() for x, value in zip(live[-3:], values[-3:], strict=True))
    spans = sorted((address(x), address(x) + x.nbytes) for x in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_memory_of_the_dead_is_used_again_but_not_while_a_view_lives():
    x = arrays.empty((LARGE, 3), np.float32)
    where = address(x)
    view = x[10:20, 1:].T.view(np.uint32)
    del x
    assert address(arrays.empty((LARGE, 3), np.float32)) != where
    del view
    assert address(arrays.empty((3, LARGE), np.float32)) == where


def test_memory_begins_with_a_cache_line():
    live = [arrays.empty(LARGE + n, np.uint8) for n in range(0, 4 * LARGE, LARGE // 8)]
    assert [address(x) % 64 for x in live] == [0] * len(live)


def test_large_buffers_have_pages_of_their_own_where_there_are_some():
    n = 9 * LARGE + 4096 * 5  # of a size that no other test asks for
    x = arrays.empty(n, np.uint8)
    assert address(x) % 4096 == 0
    with mock.patch("mmap.mmap", side_effect=OSError):
        y = arrays.empty(n, np.uint8)
    y.fill(1)
    assert address(y) % 64 == 0


def test_threads_get_memory_of_their_own():
    def work(number):
        for _ in range(50):
            x = arrays.empty(LARGE // 2, np.uint8)
            x.fill(number)
            time.sleep(0)
            if not (x == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_pool_forgets_sizes_that_nobody_asks_for_any_more():
    pool = arrays._Pool()
    pool.take(5 * LARGE)
    held = pool.take(3 * LARGE)
    for n in range(arrays._KEPT):
        pool.take(LARGE * (1 + n % 2))
    assert sorted(size for size, same in pool._buffers.items() if same) == [
        LARGE, 2 * LARGE, 3 * LARGE, 5 * LARGE,
    ]  # fmt: skip
    del held
    pool.take(7 * LARGE)  # a new size: what was idle for long is freed
    assert sorted(size for size, same in pool._buffers.items() if same) == [
        LARGE, 2 * LARGE, 7 * LARGE,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_a_device_is_an_array_module(name):
    module = arrays.module(name)
    assert arrays.name(module) == name
    x = module.zeros(3, np.float32)
    assert arrays.device(x) == name
    assert arrays.namespace("f", x, x) is module
    assert arrays.copy_to(module, x) is x
    for other in map(arrays.module, ("cpu", "sim")):
        moved = arrays.copy_to(other, x)
        assert arrays.device(moved) == arrays.name(other)
        np.testing.assert_array_equal(arrays.to_host(moved), np.zeros(3))


def test_devices_do_not_mix():
    text = "f: arguments must be arrays of one device, got cpu, sim."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        arrays.namespace("f", np.zeros(3), arrays.module("sim").zeros(3))


def test_no_other_device():
    with pytest.raises(ValueError, match="must be 'cpu', 'cuda' or 'sim', got 'tpu'"):
        arrays.module("tpu")


def test_without_a_gpu_cuda_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = "^device 'cuda': needs an NVIDIA GPU, its driver and cupyrec"
    with pytest.raises(RuntimeError, match=text):
        arrays.module("cuda")


@pytest.mark.parametrize("shape", [(), 0, 3, np.int64(7), (5, 3), LARGE, (LARGE, 3)])
def test_pages_are_zeros_to_write_to(shape):
    x = arrays.pages(shape, np.int32)
    assert (x.shape, x.dtype) == (np.empty(shape, np.int32).shape, np.int32)
    assert not x.any()
    x[...] = 5
    assert (copy.deepcopy(x) == 5).all()
    assert not arrays.pages(shape, np.int32).any()


def test_no_room_for_pages():
    with pytest.raises(MemoryError):
        arrays.pages(1 << 55, np.uint8)


def test_address(xp):
    for module in (np, xp):
        x = module.zeros((3, 4), np.int32)
        assert arrays.address(x[1:]) - arrays.address(x) == 16


# Streams


def test_streams_are_told_apart(sim):
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            Device=lambda: SimpleNamespace(id=3),
            get_current_stream=lambda: SimpleNamespace(ptr=77),
        ),
    )
    assert [arrays.stream(xp) for xp in (np, cupy)] == [(-1, 0), (3, 77)]
    main = arrays.stream(sim)
    assert arrays.stream(sim) == main
    with sim.cuda.Stream():
        assert arrays.stream(sim) != main

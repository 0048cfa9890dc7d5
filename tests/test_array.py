import copy
import gc
import inspect
import re
import weakref

import numpy as np
import oracle
import pytest
from one_instruction import kernel

from cupyrec import sim
from cupyrec.sim import heap

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def check_like_numpy(got, truth):
    assert type(got) is sim.ndarray
    assert (got.shape, got.dtype) == (np.shape(truth), np.asarray(truth).dtype)
    np.testing.assert_array_equal(got.get(), truth)


def test_there_and_back():
    x = sim.asarray(X)
    check_like_numpy(x, X)
    assert (x.size, x.nbytes, x.ndim, x.itemsize, len(x)) == (24, 96, 3, 4, 2)
    x.get()[:] = 0  # a copy
    check_like_numpy(x, X)
    x.set(X + 1)
    check_like_numpy(x, X + 1)
    assert sim.asarray(x) is x
    assert sim.asarray(x, np.float64).dtype == np.float64
    assert repr(sim.asarray([1, 2])) == "array([1, 2])"


@pytest.mark.parametrize("shape", [-1, (2, -3)])
def test_negative_sizes_are_refused(shape):
    with pytest.raises(ValueError, match=r"^sim\.empty: 'shape' must have no size below 0, got \("):
        sim.empty(shape)


@pytest.mark.parametrize("convert", [np.asarray, np.array, np.add.reduce, memoryview])
def test_it_is_no_numpy_array(convert):
    x = sim.asarray(X)
    assert not isinstance(x, np.ndarray)
    with pytest.raises(TypeError):
        convert(x)


def test_implicit_conversions_are_refused():
    x = sim.asarray(X)
    text = "sim.ndarray: a conversion to NumPy must be asked for, got an implicit one; call .get()."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        np.asarray(x)
    text = "sim: arrays must be of the simulator (device 'sim'), got numpy.ndarray."
    for mixed in (lambda: x + X, lambda: sim.where(X > 3, x, 0), lambda: x.__setitem__(0, X[0])):
        with pytest.raises(TypeError, match=oracle.sentence(text)):
            mixed()
    with pytest.raises(ValueError, match=r"^sim\.ndarray\.set: 'arr' must be float32 \(2, 3"):
        x.set(X[0])


@pytest.mark.parametrize(
    "key", [0, (1, 2, 3), slice(None, None, 2), (..., 1), (None, 1), (slice(None), 2, slice(1, 3))]
)
def test_parts_are_views(key):
    x, truth = sim.asarray(X), X.copy()
    check_like_numpy(x[key], truth[key])
    part = x[key]
    part.fill(7)
    truth[key] = 7
    check_like_numpy(x, truth)
    x[key] = 9
    truth[key] = 9
    check_like_numpy(x, truth)


def test_parts_by_arrays_are_copies():
    x, i = sim.asarray(X), np.array([1, 0, 1])
    check_like_numpy(x[sim.asarray(i)], X[i])
    check_like_numpy(x[x > 5], X[X > 5])
    x[x > 5] = 0
    check_like_numpy(x, np.where(X > 5, 0, X).astype(np.float32))


OPERATIONS = {
    "arithmetic": lambda m, x: (x + 1) * x - x / 3 + 2**x // 5 % 3 - (-x),
    "comparisons": lambda m, x: (x > 3) & (x <= 9) | (x == 1) ^ (x != 2) & ~(x < 1) | (x >= 20),
    "matmul": lambda m, x: x @ x.transpose(0, 2, 1),
    "sum": lambda m, x: x.sum(axis=1, keepdims=True),
    "reductions": lambda m, x: x.max() + x.min() + x.mean() + x.sum(),
    "tests": lambda m, x: (x > 5).any(axis=0) | (x > -1).all(),
    "shapes": lambda m, x: x.reshape(4, 6).T.ravel().reshape((3, 8))[:, None].squeeze(1),
    "transposed reshape": lambda m, x: x.transpose(2, 0, 1).reshape(-1),
    "dtypes": lambda m, x: x.astype(np.int32).view(np.uint8),
    "cumsum": lambda m, x: x.cumsum(axis=-1) + x.argsort(axis=-1),
    "functions": lambda m, x: m.where(x > 3, m.exp(-x), m.sqrt(x)) + m.maximum(m.tanh(x), 0.5),
    "joins": lambda m, x: m.concatenate([x, m.zeros((1, 3, 4), np.float32), m.ones_like(x)]),
    "stack and split": lambda m, x: m.stack(m.split(x, 2, axis=2), axis=0),
    "makers": lambda m, x: m.arange(24, dtype=np.float32).reshape(x.shape) + m.full_like(x, 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    truth = OPERATIONS[name](np, X)
    check_like_numpy(OPERATIONS[name](sim, sim.asarray(X)), truth)


def test_in_place():
    x, y = sim.asarray(X), sim.asarray(X)
    same = x
    x += y
    x *= 2
    x[0] -= 1
    truth = X * 4
    truth[0] -= 1
    check_like_numpy(same, truth)
    assert same is x


def test_scalars():
    one = sim.asarray(X)[1, 2, 3]
    assert (float(one), int(one), bool(one), one.item()) == (23.0, 23, True, 23.0)


def test_address_is_that_of_the_bytes():
    x = sim.asarray(X)
    facts = x[1].__cuda_array_interface__
    assert facts["data"] == (x.__cuda_array_interface__["data"][0] + 48, False)
    assert (facts["shape"], facts["typestr"], facts["strides"]) == ((3, 4), "<f4", None)
    assert x.T.__cuda_array_interface__["strides"] == (4, 16, 48)
    the_heap = heap.the_heap()
    start = facts["data"][0] - the_heap.base
    assert the_heap.bytes[start : start + 48].view(np.float32).tolist() == [*range(12, 24)]


def test_memory_goes_back_with_the_last_view():
    gc.collect()
    before = len(heap.the_heap().live)
    x = sim.asarray(X)
    part = x[0]
    del x
    assert len(heap.the_heap().live) == before + 1
    del part
    assert len(heap.the_heap().live) == before


def test_memory_of_others_is_viewed_and_keeps_its_owner():
    class Owner:
        pass

    x, owner = sim.asarray(X), Owner()
    owner.__cuda_array_interface__ = x[1].__cuda_array_interface__
    alive, view = weakref.ref(owner), sim.asarray(owner)
    del owner
    view += 1
    part = view[1:]
    del view
    check_like_numpy(x[1], X[1] + 1)
    assert alive() is not None
    del part
    assert alive() is None


def test_kernels_see_what_is_written():
    text = "ld.global.u32 %r4, [%rd0]; add.u32 %r4, %r4, 1; st.global.u32 [%rd1], %r4;"
    x, y = sim.empty(8, np.uint32), sim.empty(8, np.uint32)
    x[:5] = 3
    (fault,) = sim.run(kernel(text, [4, 4]), "f", 1, 8, (x, y)).faults
    assert (fault.kind, fault.thread) == ("uninitialized", (5, 0, 0))
    x[5:] = 4
    result = sim.run(kernel(text, [4, 4]), "f", 1, 8, (x, y))
    assert (result.faults, y.get().tolist()) == ([], [4] * 5 + [5] * 3)
    assert sim.run(kernel(text, [4, 4]), "f", 1, 8, (y, x)).faults == []  # y is written now
    with pytest.raises(ValueError, match=r"^sim\.run: 'args\[0\]' must be C-contiguous, got strid"):
        sim.run(kernel(text, [4, 4]), "f", 1, 4, (x[::2], y))


def written(x):
    """Of which elements all bytes are written."""
    return x._written().all(axis=-1).tolist()


@pytest.mark.parametrize(
    "key",
    [(..., 0), (0, ...), ..., (slice(None), 1), (..., [0, 2]), (None, ..., 1), ([1, 0], ...)],
)
def test_what_is_set_is_written_and_nothing_else(key):
    x, truth = sim.empty((2, 3), np.float32), np.zeros((2, 3), bool)
    x[key] = 1
    truth[key] = True
    assert written(x) == truth.tolist()
    assert not x._written()[~truth].any()


COPIES = {
    "copy": lambda x: x.copy(),
    "astype": lambda x: x.astype(np.float32),
    "array": lambda x: sim.array(x),
    "contiguous": lambda x: sim.ascontiguousarray(x.T).T,
    "reshape": lambda x: x.T.reshape(-1).reshape(3, 2).T,
    "take": lambda x: x[sim.asarray([0, 1])],
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_unwritten_where_the_original_is(name):
    x = sim.empty((2, 3), np.float32)
    x[:, 1] = 4
    x[1, 2] = 5
    truth = [[False, True, False], [False, True, True]]
    assert written(COPIES[name](x)) == truth
    y = sim.zeros((3, 2, 3), np.float32)
    y[1:] = COPIES[name](x)
    assert written(y) == [[[True] * 3] * 2, truth, truth]
    assert written(x.astype(np.float64)) == [[True] * 3] * 2  # what is computed is written


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: x.sum(axis=0, out=out),
        lambda x, out: x.max(0, out),
        lambda x, out: sim.add(x[0], x[1], out=out),
        lambda x, out: sim.add(x[0], x[1], out),
        lambda x, out: sim.mean(x, axis=0, out=out),
    ],
)
def test_out_is_written_and_returned(call):
    x, out = sim.asarray(X[0]), sim.empty(4, np.float32)
    small = x[:2]
    result = call(small, out)
    assert result is out
    assert written(out) == [True] * 4
    np.testing.assert_array_equal(out.get(), call(small, sim.empty(4, np.float32)).get())
    assert out.get().any()


def test_text_is_numpys():
    x, one = sim.asarray(X), sim.asarray(np.float32(2.5))
    assert (str(x), f"{x}", f"{one}", f"{one:.4f}") == (str(X), str(X), "2.5", "2.5000")
    assert f"{x[0, 0, 1]:05.1f}" == "001.0"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{x:.4f}"
    with sim.record() as seen:
        str(x), f"{one:.1f}"
    assert seen.syncs == 2


def parameters_of_cupy(method):
    """Names from the first line of a Cython method's docstring, or from its signature."""
    try:
        return list(inspect.signature(method).parameters)
    except ValueError:
        text = re.search(r"\((.*)\)", method.__doc__.split("\n")[0].split(" ->")[0])[1]
        return [re.split(r"[=\s]", p.strip())[0 if "=" in p else -1] for p in text.split(",")]


METHODS = [n for n, m in vars(sim.ndarray).items() if n[0] != "_" and callable(m)]


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_cupys(name):
    cupy = pytest.importorskip("cupy", reason="CuPy is compared with: pip install cupyrec[cuda12]")
    theirs = parameters_of_cupy(getattr(cupy.ndarray, name))
    method = getattr(sim.ndarray, name)
    if not hasattr(method, "__wrapped__"):
        ours = [p.replace("*", "") for p in inspect.signature(method).parameters]
        assert set(ours) <= {p.replace("*", "") for p in theirs}


def test_functions_are_cupys():
    cupy = pytest.importorskip("cupy", reason="CuPy is compared with: pip install cupyrec[cuda12]")
    names = {"array", "asarray", "asnumpy", "empty", "ndarray", *sim.FUNCTIONS}
    assert {n for n in names if not hasattr(cupy, n)} == set()
    ours = {n for n in vars(sim.ndarray) if n[0] != "_" or n[-1] == "_"}
    of_python = {"__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"}
    assert {n for n in ours - of_python if not hasattr(cupy.ndarray, n)} == set()

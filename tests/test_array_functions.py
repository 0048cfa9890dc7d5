import numpy as np
import oracle
import pytest
from threadpoolctl import threadpool_limits

import cupyrec
from cupyrec import Tensor, arrays
from cupyrec.testing import gradcheck

REDUCTIONS = [
    ((), None), ((3,), None), ((3,), 0), ((0,), None), ((0, 3), 0), ((3, 0), 0), ((2, 3, 4), 1),
    ((2, 3, 4), -1), ((2, 3, 4), (0, 2)), ((2, 3, 4), (-1, 0)), ((2, 3, 4), None), ((1025, 3), 0),
]  # fmt: skip


@pytest.mark.parametrize("name", ["sum", "mean"])
@pytest.mark.parametrize(("shape", "axis"), REDUCTIONS, ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
def test_reductions(name, shape, axis, keepdims):
    f, naive = getattr(cupyrec, name), getattr(np, name)
    x = oracle.normals(shape, np.float64)
    got = f(Tensor(x), axis, keepdims)
    np.testing.assert_array_equal(got.data, naive(x, axis=axis, keepdims=keepdims))
    np.testing.assert_array_equal(f(x, axis=axis, keepdims=keepdims), got.data)
    method = getattr(Tensor(x), name)
    np.testing.assert_array_equal(method(axis=axis, keepdims=keepdims).data, got.data)
    if np.isfinite(got.data).all():
        assert gradcheck(lambda t: f(t, axis, keepdims) * 3, [x])


def test_reductions_of_lists():
    assert cupyrec.sum([1.0, 2.0]) == 3
    assert cupyrec.mean([1.0, 2.0]) == 1.5


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(axis):
    x = oracle.normals((5, 7), np.float64)
    truth = np.apply_along_axis(lambda v: np.exp(v) / sum(np.exp(v)), axis, x)
    np.testing.assert_allclose(cupyrec.softmax(x, axis), truth, rtol=1e-14)
    assert gradcheck(lambda t: cupyrec.softmax(t, axis), [x])


def test_softmax_at_the_ends():
    y = cupyrec.softmax(np.array([[1e30, 0, -np.inf], [np.nan, 0, 1]], np.float32))
    np.testing.assert_array_equal(y, [[1, 0, 0], [np.nan] * 3])
    assert y.dtype == np.float32
    assert cupyrec.softmax(np.zeros((0, 3))).shape == (0, 3)


def test_softmax_error():
    x = 4 * oracle.normals((17, 130))
    e = np.exp(x)
    truth = np.exp(x.astype(np.float64))
    oracle.check_error(
        cupyrec.softmax(x), e / e.sum(axis=1, keepdims=True), truth / truth.sum(axis=1)[:, None]
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.reshape(4, 6),
        lambda x: x.reshape((6, -1)),
        lambda x: x.reshape(-1),
        lambda x: cupyrec.reshape(x, (2, 12)),
        lambda x: x.transpose(),
        lambda x: x.T,
        lambda x: x.transpose(1, 2, 0),
        lambda x: x.transpose((2, 0, 1)),
        lambda x: x.transpose(-1, 0, -2),
        lambda x: cupyrec.transpose(x, [0, -1, 1]),
        lambda x: x.astype(np.float64),
        lambda x: x[0],
        lambda x: x[-1, 2],
        lambda x: x[1, 2, 3],
        lambda x: x[...],
        lambda x: x[:, 1:3],
        lambda x: x[::-1, ::2, -1],
        lambda x: x[:, None, 0],
        lambda x: x[..., 0],
        lambda x: x[0:0],
        lambda x: x[[1, 1, 0]],
        lambda x: x[:, [0, 2, 2], [1, 1, 1]],
        lambda x: x[np.array([[1, 0], [1, 1]]), :, 3],
        lambda x: x[x > 0] if isinstance(x, np.ndarray) else x[x.data > 0],
        lambda x: x[np.int64(1)],
        lambda x: x[Tensor(np.array([1, 1]))] if isinstance(x, Tensor) else x[[1, 1]],
    ],
)
def test_shapes(call):
    x = oracle.normals((2, 3, 4), np.float64)
    np.testing.assert_array_equal(call(Tensor(x)).data, call(x))
    assert gradcheck(call, [x])
    assert gradcheck(call, [np.asfortranarray(x)])


def test_transpose_of_one_axis():
    x = Tensor(np.arange(3.0), requires_grad=True)
    x.transpose(0).backward(np.arange(3.0))
    np.testing.assert_array_equal(x.grad, [0, 1, 2])


def test_reshape_to_a_scalar_and_of_nothing():
    assert Tensor([3.0]).reshape(()).shape == ()
    x = Tensor(np.zeros((0, 3)), requires_grad=True)
    x.reshape(3, -1).sum().backward()
    assert x.grad.shape == (0, 3)


def test_index_that_repeats_adds_up():
    x = Tensor(np.zeros(3), requires_grad=True)
    x[[0, 2, 2, 2]].backward(np.array([1.0, 2.0, 4.0, 8.0]))
    np.testing.assert_array_equal(x.grad, [1, 0, 14])


def test_astype_gives_the_gradient_its_own_dtype():
    x = Tensor([1.0], requires_grad=True)
    y = x.astype(np.float64)
    assert y.dtype == np.float64
    (y * y).sum().backward()
    assert x.grad.dtype == np.float32


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concatenate(axis):
    shapes = [(2, 3, 4), (2, 3, 4), (0, 3, 4) if axis == 0 else (2, 3, 1)]
    if axis == 1:
        shapes[2] = (2, 0, 4)
    arrays = [oracle.normals(shape, np.float64, seed=i) for i, shape in enumerate(shapes)]
    expected = np.concatenate(arrays, axis)
    np.testing.assert_array_equal(cupyrec.concatenate(arrays, axis), expected)
    mixed = cupyrec.concatenate([Tensor(arrays[0]), *arrays[1:]], axis)
    np.testing.assert_array_equal(mixed.data, expected)
    assert gradcheck(lambda *t: cupyrec.concatenate(t, axis), arrays)
    assert gradcheck(lambda t: cupyrec.concatenate([t, t], axis), arrays[:1])


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_stack(axis):
    arrays = [oracle.normals((2, 3), np.float64, seed=i) for i in range(3)]
    np.testing.assert_array_equal(cupyrec.stack(arrays, axis), np.stack(arrays, axis))
    assert gradcheck(lambda *t: cupyrec.stack(t, axis), arrays)


@pytest.mark.parametrize("call", [cupyrec.concatenate, cupyrec.stack])
def test_joins_refuse_what_numpy_refuses(call):
    with pytest.raises(ValueError, match="dimensions"):
        call([Tensor(np.zeros((2, 3))), Tensor(np.zeros((2, 4)))], 0)
    with pytest.raises(np.exceptions.AxisError):
        call([Tensor(np.zeros(2)), Tensor(np.zeros(2))], 2)


def test_concatenate_flat():
    arrays = [oracle.normals((2, 3), np.float64), oracle.normals((), np.float64, seed=1)]
    joined = cupyrec.concatenate([Tensor(a) for a in arrays], axis=None)
    np.testing.assert_array_equal(joined.data, np.concatenate(arrays, axis=None))
    assert gradcheck(lambda *t: cupyrec.concatenate(t, None), arrays)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (np.sum, "numpy.sum: arguments must be arrays, cupyrec.sum takes Tensors."),
        (np.mean, "numpy.mean: arguments must be arrays, cupyrec.mean takes Tensors."),
        (
            lambda t: np.concatenate([t, t]),
            "numpy.concatenate: arguments must be arrays, cupyrec.concatenate takes Tensors.",
        ),
        (
            lambda t: np.where([True, False], t, 0),
            "numpy.where: arguments must be arrays, cupyrec.where takes Tensors.",
        ),
        (np.median, "numpy.median: arguments must be arrays, pass a Tensor's .data."),
        (np.linalg.norm, "numpy.linalg.norm: arguments must be arrays, pass a Tensor's .data."),
    ],
)
def test_numpys_own_functions_do_not_swallow_the_tape(call, text):
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        call(Tensor([1.0, 2.0], requires_grad=True))


MATMULS = [
    ((2, 3), (3, 4)), ((0, 3), (3, 4)), ((2, 0), (0, 4)), ((1, 1), (1, 1)), ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)), ((5, 1, 2, 3), (6, 3, 4)), ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)),
    ((5, 2, 3), (3,)), ((3,), (5, 3, 2)), ((127, 17), (17, 130)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", MATMULS, ids=str)
def test_matmul(shapes):
    a, b = (oracle.integers(shape, -4, 4, np.float64, i) for i, shape in enumerate(shapes))
    oracle.check_exact((Tensor(a) @ Tensor(b)).data, np.matmul(a, b))
    oracle.check_exact((a @ Tensor(b)).data, np.matmul(a, b))
    oracle.check_exact((Tensor(a) @ b).data, np.matmul(a, b))
    oracle.check_exact(cupyrec.matmul(a, b), np.matmul(a, b))
    assert gradcheck(cupyrec.matmul, [a, b])
    assert gradcheck(cupyrec.matmul, [np.asfortranarray(a), b[::-1] if b.ndim == 1 else b])


@pytest.mark.parametrize("other", [2.0, np.zeros((4, 2)), "text"], ids=str)
def test_matmul_refuses_what_numpy_refuses(other):
    with pytest.raises((ValueError, TypeError)):
        Tensor(np.zeros((2, 3))) @ other


@pytest.mark.parametrize(
    "shapes",
    [
        ((1025, 1025), (1025, 130)), ((17, 1025), (1025, 1300)), ((5, 127, 300), (300, 130)),
        ((3, 1, 300, 130), (4, 130, 127)),
    ],
    ids=str,
)  # fmt: skip
def test_matmul_in_blocks(shapes):
    """Products that are cut, by rows, columns or matrices."""
    a, b = (oracle.integers(shape, -4, 4, seed=i) for i, shape in enumerate(shapes))
    x, y = Tensor(a, requires_grad=True), Tensor(b, requires_grad=True)
    z = x @ y
    truth = np.matmul(np.float64(a), np.float64(b))
    oracle.check_exact(z.data, truth)
    grad = oracle.integers(truth.shape, -1, 1, seed=2)
    z.backward(grad)
    for got, full in [
        (x.grad, np.matmul(np.float64(grad), np.float64(b).swapaxes(-1, -2))),
        (y.grad, np.matmul(np.float64(a).swapaxes(-1, -2), np.float64(grad))),
    ]:
        stretched = tuple(
            i for i, n in enumerate((1,) * (full.ndim - got.ndim) + got.shape) if n == 1
        )
        oracle.check_exact(got, full.sum(axis=stretched).reshape(got.shape))


@pytest.mark.parametrize(
    "shapes",
    [
        ((1025,), (1025, 1025)), ((2, 5000), (5000, 130)), ((17, 1025), (1025, 130)),
        ((1025, 1025), (1025, 130)), ((3, 2, 5000), (5000, 130)),
    ],
    ids=str,
)  # fmt: skip
def test_matmul_gives_the_same_bits_whatever_blas_may_use(shapes):
    a, b = (oracle.normals(shape, seed=i) for i, shape in enumerate(shapes))

    def call():
        x, y = Tensor(a, requires_grad=True), Tensor(b, requires_grad=True)
        z = x @ y
        z.backward(np.cos(z.data))
        return z.data, x.grad, y.grad

    results = set()
    for threads in (1, 2, 3):
        with threadpool_limits(threads, user_api="blas"):
            oracle.check_same_bits(call)
            results.add(b"".join(array.tobytes() for array in call()))
    assert len(results) == 1


def test_from_dlpack_shares_memory():
    x = np.arange(6.0).reshape(2, 3)
    for source in (x, Tensor(x), Tensor(x, requires_grad=True)):
        y = cupyrec.from_dlpack(source)
        assert isinstance(y, Tensor)
        assert np.shares_memory(y.data, x)
        assert not y.requires_grad


def test_integer_data_is_exact():
    x = oracle.integers((1025, 17), -8, 8)
    t = Tensor(x, requires_grad=True)
    oracle.check_exact(t.sum(axis=0).data, x.astype(np.float64).sum(axis=0))
    (t @ t.T).sum().backward()
    oracle.check_exact(t.grad, 2 * np.ones((1025, 1)) * x.astype(np.float64).sum(axis=0))


def test_same_bits():
    a, b = oracle.normals((127, 130)), oracle.normals((130, 17), seed=1)

    def call():
        x, y = Tensor(a, requires_grad=True), Tensor(b, requires_grad=True)
        z = cupyrec.softmax(x @ y) + (x @ y).mean(axis=0)
        z.backward(np.ascontiguousarray(b[:127]))
        return z.data, x.grad, y.grad

    oracle.check_same_bits(call)


def test_a_model_of_ones_own_learns():
    """Logistic regression by NumPy's operators alone."""
    x = oracle.normals((200, 3))
    y = (x @ np.array([1, -2, 0.5], np.float32) > 0.3).astype(np.float32)
    w, b = Tensor(np.zeros(3, np.float32), True), Tensor(0.0, requires_grad=True)
    losses = []
    for _ in range(50):
        p = cupyrec.sigmoid(x @ w + b)
        loss = -(y * cupyrec.log(p) + (1 - y) * cupyrec.log(1 - p)).mean()
        loss.backward()
        losses.append(loss.item())
        for t in (w, b):
            t.data -= t.grad
            t.zero_grad()
    assert loss.dtype == np.float32
    assert losses[-1] < 0.3 * losses[0]


def test_gradient_of_one_element_and_of_a_mask_on_any_device(sim):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    mask = x % 3 == 0
    for xp in (np, sim):
        for key, times in [((1, 2), 1.5), (np.int64(1), 2.0), (xp.asarray(mask), 3.0)]:
            tensor = Tensor(xp.asarray(x), requires_grad=True)
            (tensor[key] * times).sum().backward()
            expected = np.zeros((3, 4))
            expected[mask if xp is sim and not isinstance(key, (tuple, np.int64)) else key] = times
            np.testing.assert_array_equal(arrays.to_host(tensor.grad), expected)
    tensor = Tensor(sim.asarray(x), requires_grad=True)
    with pytest.raises(TypeError, match="got one of an array of indices"):
        tensor[sim.asarray(np.array([0, 0]))].sum().backward()

import operator

import numpy as np
import oracle
import pytest

import cupyrec
from cupyrec import Tensor
from cupyrec.ops.elementwise import sum_to
from cupyrec.testing import gradcheck

CONDITION = np.array([True, False, True])
BINARY = {
    "add": (operator.add, np.add),
    "subtract": (operator.sub, np.subtract),
    "multiply": (operator.mul, np.multiply),
    "divide": (operator.truediv, np.divide),
    "power": (operator.pow, np.power),
    "maximum": (cupyrec.maximum, np.maximum),
    "where": (
        lambda a, b: cupyrec.where(CONDITION, a, b),
        lambda a, b: np.where(CONDITION, a, b),
    ),
}
UNARY = {
    "exp": (cupyrec.exp, np.exp),
    "log": (cupyrec.log, np.log),
    "sqrt": (cupyrec.sqrt, np.sqrt),
    "tanh": (cupyrec.tanh, np.tanh),
    "relu": (cupyrec.relu, lambda x: np.maximum(x, 0)),
    "sigmoid": (cupyrec.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "negative": (operator.neg, np.negative),
}
SHAPES = [
    ((3,), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (3,)), ((3,), ()), ((0, 3), (1, 3)),
    ((1,), (4, 1, 3)), ((127, 1), (3,)), ((1025, 3), (1, 1)),
]  # fmt: skip

binary = pytest.mark.parametrize(("f", "naive"), BINARY.values(), ids=BINARY)
unary = pytest.mark.parametrize(("f", "naive"), UNARY.values(), ids=UNARY)


def positive(shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 2, shape).astype(dtype)


@binary
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_binary(f, naive, shapes):
    a, b = (positive(shape, seed=i) for i, shape in enumerate(shapes))
    np.testing.assert_array_equal(f(Tensor(a), Tensor(b)).data, naive(a, b))
    assert gradcheck(f, [a, b])


@binary
def test_binary_operands(f, naive):
    a, b = positive(3, np.float32), positive(3, np.float32, seed=1)
    tensor = Tensor(a, requires_grad=True)
    others = (b, Tensor(b), 2, 1.5, np.float32(1.5), np.array(2, np.float32))
    for other in others:
        plain = other.data if isinstance(other, Tensor) else other
        for result, expected in (
            (f(tensor, other), naive(a, plain)),
            (f(other, tensor), naive(plain, a)),
        ):
            assert isinstance(result, Tensor)
            assert result.requires_grad
            assert result.dtype == np.float32
            np.testing.assert_array_equal(result.data, expected)
            tensor.zero_grad()
            result.sum().backward()
            assert (tensor.grad.dtype, tensor.grad.shape) == (np.float32, (3,))


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "power", "maximum"])
def test_numbers_follow_numpy_but_float64_scalars_count_as_pythons(name):
    f, naive = BINARY[name]
    x = Tensor(positive(3, np.float32))
    assert f(x, np.float64(2)).dtype == np.float32
    assert f(np.float64(2), x).dtype == np.float32
    whole = np.array([1, 2, 3])
    np.testing.assert_array_equal(f(Tensor(whole), 0.5).data, naive(whole, 0.5))
    assert f(Tensor(whole), 0.5).dtype == np.float64
    assert f(x, np.ones(3)).dtype == np.float64


def test_mixed_precision_gives_each_its_own_dtype():
    a = Tensor(positive(3, np.float32), requires_grad=True)
    b = Tensor(positive(3), requires_grad=True)
    (cupyrec.exp(a) * b + cupyrec.where([True, False, True], a, b)).sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (np.float32, np.float64)


def test_arrays_stay_arrays():
    a, b = positive(3), positive(3, seed=1)
    assert isinstance(cupyrec.maximum(a, b), np.ndarray)
    assert isinstance(cupyrec.where(a > b, a, b), np.ndarray)
    assert cupyrec.maximum(1.0, 2.0) == 2
    assert cupyrec.relu(-1.0) == 0


@pytest.mark.parametrize("other", ["text", [1.0], None, {}], ids=str)
def test_operators_leave_what_they_do_not_know(other):
    for f in (operator.sub, operator.pow):
        with pytest.raises(TypeError, match="unsupported operand"):
            f(Tensor([1.0]), other)
        with pytest.raises(TypeError, match="unsupported operand"):
            f(other, Tensor([1.0]))


def test_numpys_own_functions_do_not_swallow_the_tape():
    with pytest.raises(TypeError, match="ufunc"):
        np.exp(Tensor([1.0], requires_grad=True))
    x = np.ones(3, np.float32)
    with pytest.raises(TypeError):
        x += Tensor([1.0, 2.0, 3.0], requires_grad=True)


def test_comparisons():
    x = Tensor([1.0, 2.0, 3.0])
    for f in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        for other in (2, np.array([2.0, 2.0, 2.0]), Tensor([3.0, 2.0, 1.0])):
            plain = other.data if isinstance(other, Tensor) else other
            np.testing.assert_array_equal(f(x, other), f(x.data, plain))
            np.testing.assert_array_equal(f(other, x), f(plain, x.data))
            assert isinstance(f(x, other), np.ndarray)
            assert isinstance(f(other, x), np.ndarray)
    np.testing.assert_array_equal(cupyrec.where(x > 1, x, 0.5).data, [0.5, 2, 3])


def test_tensors_are_keys_by_identity():
    x, y = Tensor([1.0, 2.0]), Tensor([1.0, 2.0])
    assert {x: 1, y: 2}[x] == 1
    assert len({x, y, x}) == 2
    assert x not in {y}


@unary
@pytest.mark.parametrize("shape", [(), (0,), (1,), (17,), (0, 3), (3, 1, 4), (1025,)], ids=str)
def test_unary(f, naive, shape):
    x = positive(shape)
    np.testing.assert_array_almost_equal_nulp(f(Tensor(x)).data, naive(x), 4)
    assert gradcheck(f, [x])
    assert gradcheck(f, [np.asfortranarray(np.broadcast_to(x, (2, *shape)))])


@unary
def test_unary_keeps_nan_and_float32(f, naive):
    x = positive(5, np.float32)
    x[2] = np.nan
    y = f(Tensor(x, requires_grad=True))
    assert y.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(y.data), np.isnan(x))


def test_error():
    x = 3 * oracle.normals(1025)
    truth = 1 / (1 + np.exp(-x.astype(np.float64)))
    oracle.check_error(cupyrec.sigmoid(x), 1 / (1 + np.exp(-x)), truth)


def test_sigmoid_at_the_ends():
    with np.errstate(all="raise", under="ignore"):
        x = np.array([-np.inf, -1e30, -80, 0, 80, 1e30, np.inf], np.float32)
        y = cupyrec.sigmoid(x)
    np.testing.assert_allclose(y, [0, 0, np.exp(-80), 0.5, 1, 1, 1], rtol=1e-6)
    assert cupyrec.sigmoid(np.array([0, 1])).dtype == np.float64


def test_relu_at_0():
    x = Tensor([-1.0, -0.0, 0.0, 1.0], requires_grad=True)
    cupyrec.relu(x).sum().backward()
    np.testing.assert_array_equal(x.grad, [0, 0, 0, 1])


def test_maximum_shares_the_gradient_of_a_tie():
    a, b = (Tensor(v, requires_grad=True) for v in ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]))
    y = cupyrec.maximum(a, b)
    y.backward(np.array([2, 4, 8], np.float32))
    np.testing.assert_array_equal([a.grad, b.grad], [[0, 2, 8], [2, 2, 0]])


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, 0.5])
def test_power_of_a_number(exponent):
    x = Tensor(np.array([-2.0, 0.0, 3.0]), requires_grad=True)
    with np.errstate(all="ignore"):
        (x**exponent).backward(np.ones(3))
        expected = exponent * x.data ** (exponent - 1.0) if exponent else np.zeros(3)
    np.testing.assert_array_equal(x.grad, expected)


def test_power_by_its_exponent_where_the_base_is_not_positive():
    b = Tensor(np.array([2.0, 3.0]), requires_grad=True)
    (np.array([0.0, -1.0]) ** b).backward(np.ones(2))
    np.testing.assert_array_equal(b.grad, [0, 0])


def test_where_takes_a_tensor_condition_without_gradient():
    x = Tensor(np.array([0.0, 1.0]), requires_grad=True)
    condition = x * 1
    cupyrec.where(condition, x, 2 * x).backward(np.ones(2))
    np.testing.assert_array_equal(x.grad, [2, 1])


@pytest.mark.parametrize(
    ("start", "end"), [((2, 3), (2, 3)), ((2, 3), (3,)), ((4, 2, 3), (2, 1)), ((2, 3), ())]
)
def test_sum_to(start, end):
    grad = oracle.integers(start, -5, 5)
    truth = np.zeros(end)
    for index in np.ndindex(start):
        tail = index[len(start) - len(end) :]
        truth[tuple(0 if n == 1 else i for i, n in zip(tail, end, strict=True))] += grad[index]
    oracle.check_exact(sum_to(grad, end), truth)


def test_same_bits():
    a, b = positive((127, 130), np.float32), positive((130,), np.float32, seed=1)

    def call():
        x, y = Tensor(a, requires_grad=True), Tensor(b, requires_grad=True)
        z = cupyrec.maximum(x * y + x**y, 1.5) / cupyrec.sigmoid(x - y)
        z.backward(a)
        return z.data, x.grad, y.grad

    oracle.check_same_bits(call)

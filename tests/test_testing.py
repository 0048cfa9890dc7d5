import numpy as np
import oracle
import pytest

import cupyrec
from cupyrec import Function, Tensor
from cupyrec.testing import gradcheck


class Cube(Function):
    """x^3 with a gradient that is wrong by a factor."""

    def forward(self, x, factor=1.0):
        self.x, self.factor = x, factor
        return x**3

    def backward(self, grad):
        return (self.factor * 3 * self.x**2 * grad,)


X = np.array([0.5, -1.0, 2.0])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_takes_right_gradients(scale):
    assert gradcheck(Cube.apply, [X]) is True
    assert gradcheck(lambda x, y: scale * x * y.sum(), [X, np.ones((2, 2))])
    assert gradcheck(lambda x: x.sum() + 1e4, [X])  # rounding of a large constant
    assert gradcheck(lambda x: x * 2, [np.empty((0, 3))])
    assert gradcheck(lambda x: x * x, [np.array(3.0)])


@pytest.mark.parametrize("factor", [0.0, -1.0, 1 - 1e-4, 1 + 1e-4, 2.0, np.nan])
def test_finds_wrong_ones(factor):
    pattern = (
        r"^gradcheck: the derivative along a direction of 'inputs\[1\]' must be "
        r"-?[\d.e+-]+, got [-\d.e+na]+\.$"
    )
    with pytest.raises(AssertionError, match=pattern):
        gradcheck(lambda a, b: a + Cube.apply(b, factor=factor), [X, X])


def test_finds_one_wrong_element_and_a_transposed_gradient():
    def one_wrong(x):
        return cupyrec.concatenate([x[:999], Cube.apply(x[999:], factor=1.5)])

    with pytest.raises(AssertionError, match=r"inputs\[0\]"):
        gradcheck(one_wrong, [oracle.normals(1000, np.float64)])

    class Transposed(Function):
        def forward(self, x):
            return x * 1

        def backward(self, grad):
            return (np.ascontiguousarray(grad.T),)

    with pytest.raises(AssertionError, match=r"inputs\[0\]"):
        gradcheck(Transposed.apply, [np.ones((3, 3))])


def test_finds_a_gradient_that_is_missing():
    with pytest.raises(AssertionError, match=r"inputs\[1\]"):
        gradcheck(lambda a, b: a + b.detach(), [X, X])
    assert gradcheck(lambda a, b: a * 2, [X, X])  # one that isn't needed


def test_passes_on_what_is_no_float():
    ids, flag = np.array([2, 0]), object()

    def f(x, i, other):
        assert i is ids
        assert other is flag
        return x[i] * 2

    assert gradcheck(f, [X, ids, flag])
    assert gradcheck(f, [Tensor(X), ids, flag])


def test_inputs_stay_as_they_are():
    x = X.copy()
    tensor = Tensor(x, requires_grad=True)
    assert gradcheck(lambda t: t * t, [tensor])
    np.testing.assert_array_equal(x, X)
    assert tensor.grad is None


def test_seed_chooses_the_direction():
    directions = []

    def f(x):
        directions.append(x.data - X)
        return x * 2

    for seed in (0, 0, 1):
        assert gradcheck(f, [X], seed=seed, step=0.5)
    first, again, other = directions[1], directions[4], directions[7]
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()


def test_refuses_what_has_too_few_digits():
    text = "gradcheck: 'inputs[1]' must be float64, got float32."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        gradcheck(lambda a, b: a * b, [X, X.astype(np.float32)])
    text = "gradcheck: the output of 'f' must be float64, got float32."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        gradcheck(lambda a: a.astype(np.float32), [X])

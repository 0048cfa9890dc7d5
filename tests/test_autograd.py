import gc
import threading
import warnings

import numpy as np
import oracle
import pytest

from cupyrec import Tensor, autograd, exp, matmul, no_grad, softmax
from cupyrec.autograd import Function, is_recording, record, unit_gradient
from cupyrec.ops.fused_mlp import fused_mlp


def leaf(*values):
    return Tensor(np.array(values), requires_grad=True)


# Tensor


def test_data_and_its_dtype():
    assert Tensor([1, 2]).dtype == np.float32
    assert Tensor(3).shape == ()
    x = np.arange(3)
    assert Tensor(x).data is x
    assert Tensor(Tensor(x)).data is x
    assert (Tensor(x).shape, Tensor(x).ndim, Tensor(x).size, len(Tensor(x))) == ((3,), 1, 3, 3)
    assert isinstance(Tensor(np.float64(2)).data, np.ndarray)
    assert Tensor(np.float64(2)).dtype == np.float64


@pytest.mark.parametrize("dtype", [np.int64, bool, np.complex64])
def test_only_floats_may_require_a_gradient(dtype):
    text = f"Tensor: only floating data may require a gradient, got {np.dtype(dtype)}."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        Tensor(np.zeros(2, dtype), requires_grad=True)


@pytest.mark.parametrize("shape", [(), (0,), (2,), (2, 3), (0, 3), (40, 40)])
def test_prints_like_numpy(shape):
    x = oracle.normals(shape)
    assert str(Tensor(x)) == str(x)
    body = repr(Tensor(x))
    assert body.replace("Tensor(", "array(").replace("\n ", "\n") == repr(x)
    tracked = repr(Tensor(x, requires_grad=True))
    assert tracked == body[:-1] + ", requires_grad=True)"


def test_repr_keeps_columns_aligned():
    text = "Tensor([[1., 2.],\n        [3., 4.]], dtype=float32)"
    assert repr(Tensor([[1.0, 2.0], [3.0, 4.0]])) == text

    class Parameter(Tensor):
        pass

    text = "Parameter([[1., 2.],\n           [3., 4.]], dtype=float32)"
    assert repr(Parameter([[1.0, 2.0], [3.0, 4.0]])) == text


def test_numbers():
    x = Tensor([2.5])
    assert x.item() == 2.5
    assert isinstance(x.item(), float)
    assert float(x.sum()) == 2.5
    assert f"{x.sum():.2f}" == "2.50"
    assert f"{x}" == "[2.5]"
    assert bool(x)
    assert not Tensor([0.0])
    with pytest.raises(ValueError, match="ambiguous"):
        bool(Tensor([1.0, 2.0]))


def test_arrays_share_memory():
    x = Tensor([1.0, 2.0], requires_grad=True)
    x.numpy()[0] = 5
    assert x.data[0] == 5
    assert x.detach().data is x.data
    assert not x.detach().requires_grad
    assert np.shares_memory(np.from_dlpack(x), x.data)
    assert x.__dlpack_device__() == (1, 0)
    assert np.shares_memory(np.asarray(x), x.data)
    assert np.array(x, np.float64).dtype == np.float64


def test_iteration_ends():
    rows = list(Tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert [row.numpy().tolist() for row in rows] == [[1, 2], [3, 4]]


# backward


def test_gradients_add_up_over_backward():
    x = leaf(1.0, 2.0)
    (x * x).sum().backward()
    first = x.grad
    (3 * x).sum().backward()
    np.testing.assert_array_equal(x.grad, [5, 7])
    assert x.grad is first
    x.zero_grad()
    assert x.grad is None


def test_gradient_of_a_leaf_is_a_copy():
    x, y = leaf(1.0), leaf(2.0)
    grad = np.ones(1)
    (x + y).backward(grad)
    x.grad[0] = 9
    assert (grad[0], y.grad[0]) == (1, 1)
    x.backward(grad)  # a leaf's gradient by itself
    assert (x.grad[0], grad[0]) == (10, 1)


def test_one_tensor_used_twice():
    x = leaf(3.0)
    (x * x * x).backward()
    np.testing.assert_array_equal(x.grad, [27])


@pytest.mark.parametrize("order", [1, -1])
def test_node_that_is_input_of_two_at_different_depths(order):
    x = leaf(0.5)
    a = x * 2
    b = exp(a)
    (a * b if order == 1 else b * a).backward()
    np.testing.assert_allclose(x.grad, 4 * np.e, rtol=1e-15)  # 2 (1 + a) exp(a) at a = 1


@pytest.mark.parametrize("order", [1, -1])
def test_what_was_made_last_has_its_gradient_first(order):
    """However it is used: look-ups send gradients to other ranks, which all must do in turn."""
    done = []

    class Noted(Function):
        def __init__(self, name):
            self.name = name

        def backward(self, grad):
            done.append(self.name)
            return ()

    a, b, c = (record(Noted(name), np.ones(1), ()) for name in "abc")
    sum([exp(a) * b, c][::order]).backward()
    assert done == ["c", "b", "a"]


def test_ladder_of_diamonds():
    x = leaf(1.0)
    y = x
    for _ in range(60):  # 2^60 paths, 60 nodes
        y = y + y
    y.backward()
    assert x.grad[0] == 2**60


def test_random_graphs_against_forward_mode():
    generator = np.random.default_rng(0)
    for _ in range(30):
        x = leaf(1.5)
        nodes, slopes = [x], [1.0]
        for _ in range(30):
            i, j = generator.integers(len(nodes), size=2)
            a, b = nodes[i], nodes[j]
            if generator.random() < 0.5:
                nodes.append(a + b)
                slopes.append(slopes[i] + slopes[j])
            else:
                nodes.append(a * b * 0.5)
                slopes.append((slopes[i] * b.item() + a.item() * slopes[j]) * 0.5)
        if not np.isfinite(slopes[-1]):
            continue
        nodes[-1].backward()
        np.testing.assert_allclose(x.grad, slopes[-1], rtol=1e-10)


def test_deep_chain_needs_no_recursion():
    x = leaf(1.0)
    y = x
    for _ in range(5000):
        y = y + 1
    y.backward()
    assert x.grad[0] == 1
    for _ in range(50_000):  # a tape that is dropped unused
        y = y + x
    assert y.requires_grad
    del y
    gc.collect()


def test_second_backward_is_an_error():
    x = leaf(1.0)
    a = x * 2
    y, z = a * 3, a * 4
    y.backward()
    text = "backward: this tape was used up by an earlier backward()."
    for tensor in (y, z):
        with pytest.raises(ValueError, match=oracle.sentence(text)):
            tensor.backward()
    np.testing.assert_array_equal(x.grad, [6])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: Tensor([1.0]).backward(),
            "backward: the Tensor must come from one that requires a gradient.",
        ),
        (
            lambda: (leaf(1.0, 2.0) * 2).backward(),
            "backward: without 'grad' one element is needed, got (2,).",
        ),
        (
            lambda: (leaf(1.0, 2.0) * 2).backward(np.ones((2, 1))),
            "backward: 'grad' must have shape (2,), got (2, 1).",
        ),
    ],
)
def test_backward_refuses(call, text):
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        call()


def test_backward_takes_gradients_as_numpy_makes_them():
    x = Tensor([1.0, 2.0], requires_grad=True)
    exp(x).backward([1, 0])
    assert x.grad.dtype == np.float32
    (x * 2).backward(Tensor([1.0, 1.0]))
    np.testing.assert_allclose(x.grad, [np.e + 2, 2], rtol=1e-6)


def test_tape_is_freed_by_backward():
    class Remember(Function):
        def forward(self, x):
            self.big = x.copy()
            return x.copy()

        def backward(self, grad):
            return (grad,)

    x = leaf(1.0)
    y = Remember.apply(x)
    node = y._node
    y.backward()
    assert vars(node) == {"inputs": None}


# Function


class Product(Function):
    """The product of a and b, with a gradient for a alone if `one`."""

    def forward(self, a, b, one=False):
        self.a, self.b, self.one = a, b, one
        return a * b

    def backward(self, grad):
        assert self.needs[0]
        return grad * self.b, None if self.one else grad * self.a


def test_function_gives_arrays_for_arrays_and_tensors_for_tensors():
    a, b = np.array([2.0]), np.array([3.0])
    assert isinstance(Product.apply(a, b), np.ndarray)
    assert isinstance(Product.apply(a, Tensor(b)), Tensor)
    assert not Product.apply(a, Tensor(b)).requires_grad
    assert Product.apply(leaf(2.0), b).requires_grad


def test_input_without_gradient_leaves_the_rest_of_the_tape_alone():
    x, y = leaf(2.0), leaf(3.0)
    ((Product.apply(x * 1, y * 1, one=True)) + y * 5).backward()
    np.testing.assert_array_equal(x.grad, [3])
    np.testing.assert_array_equal(y.grad, [5])


def test_untracked_inputs_get_no_gradient():
    x, y = leaf(2.0), Tensor(np.array([3.0]))
    Product.apply(x, y).backward()
    assert y.grad is None


def test_wrong_number_of_gradients_is_an_error():
    class Wrong(Function):
        def forward(self, a, b):
            return a + b

        def backward(self, grad):
            return (grad,)

    with pytest.raises(ValueError, match="zip"):
        Wrong.apply(leaf(1.0), leaf(2.0)).backward()


@pytest.mark.parametrize("shape", [(), (1, 1), (2,)])
def test_gradient_of_another_shape_is_an_error(shape):
    class Wide(Function):
        def forward(self, x):
            return x * 1

        def backward(self, grad):
            return (np.ones(shape),)

    text = f"backward: Wide must give a gradient of shape (1,), got {shape}."
    for x in (leaf(1.0), leaf(1.0) * 2):
        with pytest.raises(ValueError, match=oracle.sentence(text)):
            Wide.apply(x).backward()


def test_integer_output_is_not_recorded():
    y = Tensor([1.5, 2.5], requires_grad=True).astype(np.int64)
    assert not y.requires_grad
    np.testing.assert_array_equal(y.numpy(), [1, 2])


def test_record_may_have_no_inputs():
    received = []

    class Sink(Function):
        def backward(self, grad):
            received.append(grad)
            return ()

    (record(Sink(), np.zeros(2), ()) * 3).backward(np.ones(2))
    np.testing.assert_array_equal(received, [[3, 3]])


def test_function_without_formula():
    with pytest.raises(NotImplementedError):
        Function.apply(leaf(1.0))
    with pytest.raises(NotImplementedError):
        Function().backward(np.ones(1))


def test_no_grad():
    x = leaf(1.0)
    with no_grad():
        assert not is_recording()
        with no_grad():
            assert not (x * 2).requires_grad
        assert not (x * 2).requires_grad
        with pytest.raises(RuntimeError), no_grad():
            raise RuntimeError
        assert not is_recording()
    assert is_recording()
    assert (x * 2).requires_grad


def test_no_grad_is_of_its_thread():
    """Two contexts that overlap without one holding the other."""
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def work():
        with no_grad():
            inside.set()
            leave.wait(30)
            seen.append(is_recording())
        seen.append(is_recording())

    thread = threading.Thread(target=work)
    with no_grad():
        thread.start()
        assert inside.wait(30)
    assert is_recording()
    leave.set()
    thread.join(30)
    assert seen == [False, True]
    assert is_recording()


def test_backward_names_a_tensor_that_has_moved_since(sim):
    weight, bias = leaf([1.0, 2.0]), leaf(0.0)
    y = fused_mlp(np.ones((4, 2)), [weight], [bias]).sum()
    weight.data = sim.asarray(weight.data)
    text = (
        "backward: a Tensor must stay on its device from the forward pass on, cpu, "
        "got one of shape (1, 2) on sim."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        y.backward()
    assert weight.grad is None
    assert bias.grad is None


def test_backward_begins_with_one_array_for_all_on_a_device(sim):
    """Whoever writes to a gradient that a leaf got must not change it."""
    for data in (sim.full((), 3.0, np.float32), sim.full((1, 1), 3.0, np.float32)):
        unit = unit_gradient(data)
        assert (unit.shape, unit.dtype, unit.item()) == (data.shape, np.float32, 1)
        x = Tensor(data, requires_grad=True)
        with sim.record() as seen:
            x.backward()
            x.backward()
        assert "ones_like" not in [launch.name for launch in seen.launches]
        x.grad *= 5
        assert x.grad.item() == 10
        assert unit_gradient(data) is unit
        assert unit.item() == 1


def test_leaves_are_what_backward_leaves_a_gradient_in():
    x, y, z = (Tensor([1.0], requires_grad=grad) for grad in (True, True, False))
    total = x * z + (y * x).detach() * x
    total = total + total
    assert [leaf is x for leaf in autograd.leaves(total)] == [True]
    assert [leaf is x for leaf in autograd.leaves(x)] == [True]
    assert autograd.leaves(z) == []


def test_gradients_that_overflow_are_no_warning():
    """With a scaler they are expected, and the optimizer tells of others."""
    x, weight = leaf([1.0, 2.0]), leaf([1.0], [0.0])
    with warnings.catch_warnings(action="error"):
        softmax(matmul(x, weight) * 2).backward(np.array([[np.inf]]))
        matmul(x, weight).backward(np.array([[np.inf]]))
    assert np.isnan(x.grad).any()

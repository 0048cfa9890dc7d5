"""Methods that can't be captured as graphs are called as they are, and errors are the caller's."""

import logging

import numpy as np
import pytest

from cupyrec import Tensor, arrays, nn, optim
from cupyrec.graph import graphed

f32 = np.float32


class Wrong(nn.Module):
    """Does what can't be captured."""

    def __init__(self, work):
        self.w, self.other = nn.Parameter([2.0]), [Tensor([3.0], requires_grad=True)]
        self.work, self.calls = work, 0

    @graphed
    def forward(self, x):
        return self.work(self, x)


def fails_in_the_third_call(module, x):
    CALLS.append(x)
    if len(CALLS) == 3:
        raise ZeroDivisionError("no third call")
    return x * module.w


CALLS = []
OUTSIDE = Tensor([1.0], requires_grad=True)
WRONG = {
    "got item": lambda m, x: x * m.w * float((x.data if isinstance(x, Tensor) else x).sum().item()),
    "got array": lambda m, x: x * m.w * _host(x),
    "no third call": fails_in_the_third_call,
    "must be an input or a parameter of the module": lambda m, x: x * m.w * _outside(x),
    "must return a Tensor with a gradient": lambda m, x: (x * m.w).detach(),
}


def _host(x):
    return Tensor(arrays.namespace("test", x).asarray(np.full(1, 2, f32)))


def _outside(x):
    if arrays.device(OUTSIDE.data) != arrays.device(x):
        OUTSIDE.data = arrays.namespace("test", x).asarray(np.ones(1, f32))
    return OUTSIDE


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_captured_is_said_once_and_stays_eager(sim, caplog, text):
    model = Wrong(WRONG[text]).to("sim")
    optim.SGD([model.w], lr=0.1)
    model.other.clear()
    x = sim.ones((2, 1), f32)
    with caplog.at_level(logging.WARNING, logger="cupyrec"):
        results = []
        for _ in range(5):
            y = model(x)
            results.append(y.numpy().tolist())
            if y.requires_grad:
                y.backward(sim.ones(y.shape, f32))
            model.w.grad = None
    assert results == results[:1] * 5
    (message,) = caplog.messages
    assert message.startswith("Wrong.forward runs without a CUDA graph: ")
    assert text in message


def test_an_error_of_the_method_is_the_callers(sim, caplog):
    def work(module, x):
        raise ValueError("wrong shape")

    model = Wrong(work).to("sim")
    model.other.clear()
    optim.SGD([model.w], lr=0.1)
    for _ in range(4):
        with pytest.raises(ValueError, match="wrong shape"):
            model(sim.ones((2, 1), f32))
    assert not sim.cuda.get_current_stream().is_capturing()

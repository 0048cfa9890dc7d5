"""Cases of bench_kernels.py, as in kernel_cases.py, of what updates parameters and rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kernel_naive as naive
import numpy as np
from kernel_inputs import FEATURES, FULL_BATCH, PARAMETERS, Rows, Work, case, floats

from cupyrec.ops import (
    adagrad,
    adam,
    adam_history,
    catch_up_adam,
    clip_scale,
    ftrl,
    momentum,
    rowwise_adagrad,
    sgd,
)

_Update = Callable[..., None]
OPTIMIZERS: list[tuple[str, int, _Update, _Update, _Update, dict[str, float]]] = [
    ("sgd", 0, sgd.sgd_dense, sgd.sgd_rows, naive.sgd, dict(lr=0.01)),
    (
        "momentum", 1, momentum.momentum_dense, momentum.momentum_rows, naive.momentum,
        dict(lr=0.01, momentum=0.9),
    ),
    (
        "adagrad", 1, adagrad.adagrad_dense, adagrad.adagrad_rows, naive.adagrad,
        dict(lr=0.01, eps=1e-8),
    ),
    (
        "adam", 2, adam.adam_dense, adam.adam_rows, naive.adam,
        dict(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, t=2),
    ),
    (
        "ftrl", 2, ftrl.ftrl_dense, ftrl.ftrl_rows, naive.ftrl,
        dict(lr=0.01, lambda1=0.1, lambda2=0.01, beta=1.0),
    ),
]  # fmt: skip


def _dense(
    states: int, op: _Update, plain: _Update, constants: dict, xp: ModuleType, batch: int, _: int
) -> Work:
    n = PARAMETERS if batch >= FULL_BATCH else 1024 * batch
    g, *values = (floats(xp, n) for _ in range(states + 2))
    values[1:] = [abs(value) for value in values[1:]]

    def run(update: _Update) -> tuple:
        update(*values, g, **constants)
        return tuple(values)

    return Work(
        lambda: run(op), 4 * n * (2 * len(values) + 1), f"N={n}", {"N": PARAMETERS},
        naive=lambda: run(plain),
    )  # fmt: skip


def _rows(
    states: int, op: _Update, plain: _Update, constants: dict, xp: ModuleType, batch: int,
    width: int,
) -> Work:  # fmt: skip
    u = batch * FEATURES // 4
    held = Rows(xp, u, width, states + 1)
    g = floats(xp, u, width)
    plain = functools.partial(plain, **constants)

    def call() -> tuple:
        op(held.memory, held.rows, g, **constants)
        return (held.flat,)

    ideal = u * (8 + 4 * width + 8 * width * (states + 1)) + held.addresses
    return Work(
        call, ideal, f"U={u} D={width}",
        naive=lambda: (naive.update_rows(plain, held.flat, held.rows, g, states + 1),),
    )  # fmt: skip


for _name, _states, _on_vectors, _on_rows, _plain, _constants in OPTIMIZERS:
    case(f"{_name}_dense")(functools.partial(_dense, _states, _on_vectors, _plain, _constants))
    case(f"{_name}_rows", 128, 16)(functools.partial(_rows, _states, _on_rows, _plain, _constants))


@case("rowwise_adagrad_rows", 128, 16)
def _rowwise_adagrad_rows(xp: ModuleType, batch: int, width: int) -> Work:
    u, constants = batch * FEATURES // 4, dict(lr=0.01, eps=1e-8)
    held, g = Rows(xp, u, width + 1, 1), floats(xp, u, width)

    def call() -> tuple:
        rowwise_adagrad.rowwise_adagrad_rows(held.memory, held.rows, g, **constants)
        return (held.flat,)

    ideal = u * (8 + 4 * width + 8 * (width + 1)) + held.addresses
    return Work(
        call, ideal, f"U={u} D={width}",
        naive=lambda: (naive.rowwise_adagrad_rows(held.flat, held.rows, g, **constants),),
    )  # fmt: skip


HISTORY = adam_history.AdamHistory(beta1=0.9, beta2=0.999, eps=1e-8, rates=[0.001] * 40)


class _Idle(Rows):
    """Rows of catch-up Adam whose last step was 8 of 40."""

    def __init__(self, xp: ModuleType, count: int, width: int) -> None:
        super().__init__(xp, count, 3 * width + 1, 1)
        self.last = self.flat.view(np.int32)[:, 3 * width]
        self.leave()
        self.bytes = 4 * (3 * width + 1) * count
        self.read = 8 * count + self.addresses + self.bytes + 16 * 32

    def leave(self) -> None:
        self.last[...] = 8


def _idle(w: Any, m: Any, v: Any, g: float) -> None:
    for t in range(9, 41):
        naive.adam(w, m, v, g, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-8, t=t)


@case("catch_up_rows", 128, 16)
def _catch_up_rows(xp: ModuleType, batch: int, width: int) -> Work:
    held = _Idle(xp, batch * FEATURES // 4, width)
    g = xp.zeros((len(held.rows), width), np.float32)

    def call() -> tuple:
        catch_up_adam.catch_up_rows(held.memory, held.rows, width, HISTORY)
        return (held.flat,)

    return Work(
        call, held.read + held.bytes, f"U={len(g)} D={width}", before=held.leave,
        naive=lambda: (naive.update_rows(_idle, held.flat, held.rows, g, 3),),
    )  # fmt: skip


@case("caught_up_vectors", 128, 16)
def _caught_up_vectors(xp: ModuleType, batch: int, width: int) -> Work:
    held = _Idle(xp, batch * FEATURES // 4, width)

    def plain() -> tuple:
        values = held.flat[held.rows]
        w, m, v = (values[:, i * width : (i + 1) * width] for i in range(3))
        _idle(w, m, v, 0.0)
        return (w,)

    return Work(
        lambda: (catch_up_adam.caught_up_vectors(held.memory, held.rows, width, HISTORY),),
        held.read + 4 * len(held.rows) * width, f"U={len(held.rows)} D={width}", naive=plain,
    )  # fmt: skip


@case("clip_scale")
def _clip(xp: ModuleType, batch: int, width: int) -> Work:
    """Gradients of the MLPs, and of two groups of rows."""
    n = PARAMETERS if batch >= FULL_BATCH else 1024 * batch
    gradients = [floats(xp, n), floats(xp, n // 2), floats(xp, n // 4)]
    loss = xp.ones((), np.float32)

    def call() -> tuple:
        scale = clip_scale.clip_scale(gradients, 1.0, loss)
        return (np.full(1, scale, np.float32) if xp is np else scale,)

    return Work(
        call, 7 * n + 12, f"N={n} + {n // 2} + {n // 4}", {"grid": 7 * PARAMETERS // 4 // 2048},
        naive=lambda: (naive.clip_scale(xp, gradients, 1.0, loss).reshape(1),),
    )  # fmt: skip

"""Cases of bench_kernels.py for what a perceptron does beside its matmuls, in 32 and in 16 bits."""

from __future__ import annotations

import functools
from types import ModuleType

import kernel_naive as naive
import numpy as np
from kernel_inputs import FULL_BATCH, Work, case, floats

from cupyrec.ops import relu_dropout
from cupyrec.ops.cast import cast_array, cast_matrices
from cupyrec.ops.single_output import single_output_backward

DROPOUT = relu_dropout.Dropout(0.5, seed=1, step=2, layer=3)
COLUMNS = 1024


@case("relu_dropout_forward")
def _relu_dropout_forward(xp: ModuleType, batch: int, width: int, dtype: type = np.float32) -> Work:
    x, bias = (floats(xp, *shape).astype(dtype) for shape in ((batch, COLUMNS), (COLUMNS,)))
    ideal = 2 * x.nbytes + bias.nbytes + batch * COLUMNS // 8
    return Work(
        lambda: relu_dropout.relu_dropout(x, bias, DROPOUT),
        ideal, f"B={batch} N={COLUMNS}", {"N": COLUMNS}, dtype=str(x.dtype),
        naive=lambda: naive.relu_dropout(xp, x, bias, DROPOUT.rate),
    )  # fmt: skip


@case("relu_dropout_backward")
def _relu_dropout_backward(
    xp: ModuleType, batch: int, width: int, dtype: type = np.float32
) -> Work:
    x, bias = (floats(xp, *shape).astype(dtype) for shape in ((batch, COLUMNS), (COLUMNS,)))
    _, mask = relu_dropout.relu_dropout(x, bias, DROPOUT)
    return Work(
        lambda: (relu_dropout.relu_dropout_backward(x, mask, DROPOUT),),
        2 * x.nbytes + batch * COLUMNS // 8, f"B={batch} N={COLUMNS}", {"N": COLUMNS},
        naive=lambda: (naive.relu_dropout_backward(xp, x, mask, DROPOUT.rate),),
        dtype=str(x.dtype),
    )  # fmt: skip


case("relu_dropout_16_forward")(functools.partial(_relu_dropout_forward, dtype=np.float16))
case("relu_dropout_16_backward")(functools.partial(_relu_dropout_backward, dtype=np.float16))


@case("cast_rows", 4096, 128)
def _cast(xp: ModuleType, batch: int, width: int) -> Work:
    x = floats(xp, batch, width)
    return Work(
        lambda: (cast_array(x, np.float16),), 6 * x.size, f"B={batch} N={width}",
        {"pieces": FULL_BATCH * width // 8}, dtype="float16",
        naive=lambda: (x.astype(np.float16),),
    )  # fmt: skip


@case("cast_matrices", 1024)
def _cast_matrices(xp: ModuleType, batch: int, width: int) -> Work:
    xs = [floats(xp, width), floats(xp, width, width), floats(xp, batch, width)]
    return Work(
        lambda: tuple(cast_matrices(xs[:2], np.float16, xs[2])), sum(6 * x.size for x in xs),
        f"B={batch} N={width}", dtype="float16",
        naive=lambda: tuple(x.astype(np.float16) for x in xs),
    )  # fmt: skip


@case("single_output_backward", 1024, 128)
def _single_output(xp: ModuleType, batch: int, width: int, dtype: type = np.float32) -> Work:
    rows = batch if batch > 16 else 16 * batch  # few would be one block
    dy, x = floats(xp, rows, 1), xp.maximum(floats(xp, rows, width), np.float32(0)).astype(dtype)
    weight, scale = floats(xp, 1, width).astype(dtype), np.float32(2)
    shapes = ((1, width), np.float32), (1, np.float32), (x.shape, dtype), (width, np.float32)
    outputs = tuple(xp.empty(*shape) for shape in shapes)

    def call() -> tuple:
        single_output_backward(dy, x, weight, *outputs, scale=2.0)
        return outputs

    ideal = sum(a.nbytes for a in (dy, x, weight, *outputs))
    return Work(
        call, ideal, f"B={rows} N={width}", {"N": width}, dtype=str(x.dtype),
        naive=lambda: naive.single_output_backward(xp, dy, x, weight, scale),
    )  # fmt: skip


case("single_output_16_backward", 1024)(functools.partial(_single_output, dtype=np.float16))

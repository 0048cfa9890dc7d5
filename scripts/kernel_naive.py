"""The ops of the bench in a few lines of the array module's functions, as a user would write them.

bench_kernels.py times them on a GPU beside the kernels; a test runs them under NumPy against the
CPU's ops. There is none for what keys decide, look-ups in a hash table and the rounding of rows:
array functions can't express it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

# Optimizers, in place


def sgd(w: Any, g: Any, *, lr: float) -> None:
    w -= lr * g


def momentum(w: Any, m: Any, g: Any, *, lr: float, momentum: float) -> None:
    m[...] = momentum * m + g
    w -= lr * m


def adagrad(w: Any, s: Any, g: Any, *, lr: float, eps: float) -> None:
    s += g * g
    w -= lr * g / (s**0.5 + eps)


def adam(
    w: Any, m: Any, v: Any, g: Any, *, lr: float, beta1: float, beta2: float, eps: float, t: int
) -> None:
    m[...] = beta1 * m + (1 - beta1) * g
    v[...] = beta2 * v + (1 - beta2) * g * g
    w -= lr / (1 - beta1**t) * m / (v**0.5 / (1 - beta2**t) ** 0.5 + eps)


def ftrl(
    w: Any, n: Any, z: Any, g: Any, *, lr: float, lambda1: float, lambda2: float, beta: float
) -> None:
    before, edge = n**0.5, lr * lambda1
    z -= (z == 0) * (beta + before) * w  # of weights not moved yet
    n += g * g
    z += lr * g - (n**0.5 - before) * w
    w[...] = (z.clip(-edge, edge) - z) / (beta + n**0.5 + lr * lambda2)


def rowwise_adagrad_rows(memory: Any, rows: Any, g: Any, *, lr: float, eps: float) -> Any:
    width = g.shape[1]
    s = memory[rows, width] + (g * g).mean(axis=1)
    memory[rows, width] = s
    memory[rows, :width] -= lr * g / (s**0.5 + eps)[:, None]
    return memory


def update_rows(update: Callable[..., None], memory: Any, rows: Any, g: Any, parts: int) -> Any:
    """Copy rows out, update them, copy them back."""
    width = g.shape[1]
    columns = [slice(i * width, (i + 1) * width) for i in range(parts)]
    values = [memory[rows, part] for part in columns]
    update(*values, g)
    for part, value in zip(columns, values, strict=True):
        memory[rows, part] = value
    return memory


# Embedding


def write_rows(memory: Any, first: int, values: Any) -> Any:
    count, width = values.shape
    memory[first : first + count, :width] = values
    memory[first : first + count, width:] = 0
    return memory


def initial_uniform(xp: ModuleType, count: int, width: int) -> Any:
    """Other numbers: the module's generators know no keys."""
    return xp.random.default_rng(0).random((count, width), dtype=np.float32) - np.float32(0.5)


def initial_normal(xp: ModuleType, count: int, width: int) -> Any:
    generator = xp.random.default_rng(0)
    return generator.standard_normal((count, width), dtype=np.float32) * np.float32(0.25)


def segment_sum(xp: ModuleType, x: Any, inverse: Any, count: int) -> Any:
    out = xp.zeros((count, x.shape[1]), np.float32)
    xp.add.at(out, inverse, x.astype(np.float32))
    return out


def int8_vectors(rows: Any, width: int) -> Any:
    """The vectors of rows of int8: a scale, then codes."""
    codes = rows.view(np.int8)[:, 4 : 4 + width]
    return codes.astype(np.float32) * (rows[:, :1] / np.float32(127))


def pool_rows(xp: ModuleType, vectors: Any, weights: Any, numbers: Any, count: int) -> Any:
    """Vectors (N, D) that were gathered before."""
    out = xp.zeros((count, vectors.shape[1]), np.float32)
    xp.add.at(out, numbers, vectors * weights[:, None])
    return out


def int8_encode(xp: ModuleType, x: Any) -> tuple[Any, Any]:
    scales = abs(x).max(axis=1)
    t = x / scales[:, None] * 127
    return xp.trunc(t + xp.copysign(0.5, t)).astype(np.int8), scales


def int8_decode(codes: Any, scales: Any) -> Any:
    return codes * (scales / 127)[:, None]


def encode_messages(xp: ModuleType, x: Any, counts: list[int], codec: str) -> Any:
    """Peer by peer, of rows in their order."""
    parts, first = [], 0
    for count in counts:
        rows, first = x[first : first + count], first + count
        if codec == "int8":
            codes, scales = int8_encode(xp, rows)
            message = [scales.view(np.uint8), codes.reshape(-1).view(np.uint8)]
        else:
            message = [rows.astype(np.float16).reshape(-1).view(np.uint8)]
        parts += [*message, xp.zeros(-sum(map(len, message)) % 16, np.uint8)]
    return xp.concatenate(parts)


def decode_messages(
    xp: ModuleType, messages: Any, counts: list[int], sizes: Any, codec: str, width: int
) -> Any:
    parts, end = [], 0
    for count, size in zip(counts, sizes, strict=True):
        message, end = messages[end : end + 16 * size], end + 16 * size
        if codec == "int8":
            codes = message[4 * count : (4 + width) * count].view(np.int8)
            scales = message[: 4 * count].view(np.float32)
            parts.append(int8_decode(codes.reshape(count, width), scales))
        else:
            numbers = message[: 2 * width * count].view(np.float16)
            parts.append(numbers.astype(np.float32).reshape(count, width))
    return xp.concatenate(parts)


def owners(tables: Any, ids: Any, ranks: int) -> Any:
    """In as many launches as there are signs here."""
    h = ids.astype(np.uint64) ^ np.uint64(0x5851F42D4C957F2D)
    h = (h ^ h >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    h = h + (tables.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ h >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    h = (h ^ h >> np.uint64(31)) >> np.uint64(32)
    return (h * np.uint64(ranks) >> np.uint64(32)).astype(np.int32)


def partition(xp: ModuleType, tables: Any, ids: Any, ranks: int) -> tuple[Any, Any]:
    owned = owners(tables, ids, ranks)
    return xp.argsort(owned, kind="stable"), xp.bincount(owned, minlength=ranks)


def unique_keys(xp: ModuleType, tables: Any, ids: Any) -> tuple:
    """By sorting: unique keys come in their order, not in that of their first occurrence."""
    positions = xp.lexsort(xp.stack([ids, tables.astype(np.int64)]))
    tables, ids = tables[positions], ids[positions]
    first = xp.ones(len(ids), bool)
    first[1:] = (tables[1:] != tables[:-1]) | (ids[1:] != ids[:-1])
    starts = xp.flatnonzero(first)
    inverse = xp.empty_like(positions)
    inverse[positions] = xp.cumsum(first) - 1
    offsets = xp.concatenate([starts, xp.asarray([len(ids)])])
    return tables[starts], ids[starts], inverse, offsets, positions


# Dense ops


def _joined(xp: ModuleType, dense: Any, sparse: Any) -> tuple[Any, Any, Any]:
    """All features of a sample in float32, rows and columns of the pairs."""
    x = xp.concatenate([dense[:, None], sparse], axis=1, dtype=np.float32)
    return x, *xp.tril_indices(x.shape[1], -1)


def dot_interaction(xp: ModuleType, dense: Any, sparse: Any, padding: int) -> Any:
    x, rows, columns = _joined(xp, dense, sparse)
    products = xp.matmul(x, x.transpose(0, 2, 1))[:, rows, columns]
    zeros = xp.zeros((len(x), padding), np.float32)
    return xp.concatenate([dense, products, zeros], axis=1).astype(dense.dtype)


def dot_interaction_backward(xp: ModuleType, grad: Any, dense: Any, sparse: Any) -> tuple:
    x, rows, columns = _joined(xp, dense, sparse)
    batch, features, width = x.shape
    s = xp.zeros((batch, features, features), np.float32)
    s[:, rows, columns] = grad[:, width : width + len(rows)]
    dx = xp.matmul(s + s.transpose(0, 2, 1), x)
    dx[:, 0] += grad[:, :width]
    return dx[:, 0].astype(dense.dtype), dx[:, 1:].astype(dense.dtype)


def factorization_machine(xp: ModuleType, dense: Any, sparse: Any) -> Any:
    x, *_ = _joined(xp, dense, sparse)
    return (x.sum(axis=1) ** 2 - (x * x).sum(axis=1)).sum(axis=1, keepdims=True) * np.float32(0.5)


def factorization_machine_backward(xp: ModuleType, grad: Any, dense: Any, sparse: Any) -> tuple:
    x, *_ = _joined(xp, dense, sparse)
    dx = (grad[:, :, None] * (x.sum(axis=1, keepdims=True) - x)).astype(dense.dtype)
    return dx[:, 0], dx[:, 1:]


def relu_dropout(xp: ModuleType, x: Any, bias: Any, rate: float) -> tuple[Any, Any]:
    """Other units: the module's generators know no samples. N is a multiple of 128."""
    keep = xp.random.default_rng(0).random(x.shape, dtype=np.float32) >= rate
    y = xp.maximum(x + bias, 0) * keep * np.float32(1 / (1 - rate))
    mask = xp.packbits(y > 0, bitorder="little").view(np.uint32)
    return y.astype(x.dtype), mask.reshape(len(x), -1)


def relu_dropout_backward(xp: ModuleType, dy: Any, mask: Any, rate: float) -> Any:
    live = xp.unpackbits(mask.view(np.uint8), bitorder="little").reshape(dy.shape)
    return (dy * live * np.float32(1 / (1 - rate))).astype(dy.dtype)


def single_output_backward(
    xp: ModuleType, dy: Any, x: Any, weight: Any, scale: Any
) -> tuple[Any, Any, Any, Any]:
    wide = x.astype(np.float32)
    dx = xp.where(wide > 0, dy * weight.astype(np.float32) * scale, np.float32(0))
    return xp.matmul(dy.T, wide), dy.sum(axis=0), dx.astype(x.dtype), dx.sum(axis=0)


def bce(xp: ModuleType, z: Any, y: Any) -> Any:
    return (xp.maximum(z, 0) - z * y + xp.log1p(xp.exp(-abs(z)))).mean()


def bce_weighted(xp: ModuleType, z: Any, y: Any, w: Any) -> Any:
    return (w * (xp.maximum(z, 0) - z * y + xp.log1p(xp.exp(-abs(z))))).sum() / len(z)


def bce_backward(xp: ModuleType, z: Any, y: Any) -> Any:
    return (1 / (1 + xp.exp(-z)) - y) / z.size


def clip_scale(xp: ModuleType, gradients: list[Any], limit: float, loss: Any) -> Any:
    norm = xp.sqrt(sum((g * g).sum(dtype=np.float64) for g in gradients))
    scale = xp.minimum(1, limit / xp.maximum(norm, 1e-30))
    return xp.where(xp.isfinite(norm) & xp.isfinite(loss), scale, np.nan).astype(np.float32)


def _normalized(x: Any, axis: int, eps: float) -> tuple[Any, Any]:
    """xhat and 1 / std."""
    rstd = 1 / (x.var(axis=axis, keepdims=True) + np.float32(eps)) ** 0.5
    return (x - x.mean(axis=axis, keepdims=True)) * rstd, rstd


def _normalization_gradient(g: Any, xhat: Any, rstd: Any, axis: int) -> Any:
    slope = (g * xhat).mean(axis=axis, keepdims=True)
    return rstd * (g - g.mean(axis=axis, keepdims=True) - xhat * slope)


def cross_vector(x: Any, x0: Any, weight: Any, bias: Any) -> Any:
    return x0 * (x @ weight)[:, None] + bias + x


def cross_vector_backward(grad: Any, x: Any, x0: Any, weight: Any) -> tuple:
    slope = (grad * x0).sum(axis=1, keepdims=True)
    dweight, dbias = (slope * x).sum(axis=0), grad.sum(axis=0)
    return slope * weight + grad, grad * (x @ weight)[:, None], dweight, dbias


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return _normalized(x, 1, eps)[0] * weight + bias


def layer_norm_backward(grad: Any, x: Any, weight: Any, eps: float) -> tuple:
    xhat, rstd = _normalized(x, 1, eps)
    dx = _normalization_gradient(grad * weight, xhat, rstd, 1)
    return dx, (grad * xhat).sum(axis=0), grad.sum(axis=0)


def batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, eps: float
) -> tuple:
    running_mean[...] = 0.9 * running_mean + 0.1 * x.mean(axis=0)
    running_var[...] = 0.9 * running_var + 0.1 * x.var(axis=0) * (len(x) / (len(x) - 1))
    return _normalized(x, 0, eps)[0] * weight + bias, running_mean, running_var


def batch_norm_backward(grad: Any, x: Any, weight: Any, eps: float) -> tuple:
    xhat, rstd = _normalized(x, 0, eps)
    dx = _normalization_gradient(grad * weight, xhat, rstd, 0)
    return dx, (grad * xhat).sum(axis=0), grad.sum(axis=0)

"""What ops must give: plain loops in float64 or Python integers, written from the formulas.

They share no code with the ops. The `check_` functions hold what a result has to keep.
"""

import fractions
import functools
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cupyrec import arrays, cpu

# Cases


def covering(*axes: Iterable[int], most: int | None = None) -> list[tuple[int, ...]]:
    """Few combinations in which any two values of different axes stand together once.

    `most` bounds the product of a combination, so that the largest values don't all meet.
    """
    combinations = [c for c in itertools.product(*axes) if not most or math.prod(c) <= most]

    def pairs(combination: tuple[int, ...]) -> set:
        return set(itertools.combinations(enumerate(combination), 2))

    missing = set().union(*map(pairs, combinations))
    chosen = []
    while missing:
        chosen.append(max(combinations, key=lambda c: len(pairs(c) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def integers(shape: Any, low: int, high: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Whole numbers from low to high, as floats."""
    return np.random.default_rng(seed).integers(low, high + 1, shape).astype(dtype)


def normals(shape: Any, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def sentence(text: str) -> str:
    """A pattern for `pytest.raises` that only the whole sentence fits."""
    return f"^{re.escape(text)}$"


# Checks


def check_exact(got: np.ndarray, truth: np.ndarray) -> None:
    """Whole numbers that float32 holds come out right to the last bit, in whatever order."""
    assert np.abs(truth).max(initial=0) < 2**24, "the case is too large to be exact"
    np.testing.assert_array_equal(got, truth)


def check_error(got: np.ndarray, naive: np.ndarray, truth: np.ndarray) -> None:
    """The error is at most twice that of the plain NumPy version in the same precision.

    Its root mean square: the largest of a few errors would be a matter of luck.
    """
    assert got.dtype == naive.dtype != truth.dtype
    error, naive_error = (np.linalg.norm(x.astype(truth.dtype) - truth) for x in (got, naive))
    assert naive_error > 0, "the case is too easy to tell"
    assert error <= 2 * naive_error


def check_same_bits(call: Callable[[], Any]) -> None:
    """`call` gives the same bytes twice, and with 1, 2 and 3 threads."""
    before = cpu.num_threads()
    results = []
    try:
        for threads in (1, 1, 2, 3):
            cpu.set_num_threads(threads)
            results.append([np.asarray(a).tobytes() for a in call()])
    finally:
        cpu.set_num_threads(before)
    assert results[0]
    assert results == results[:1] * 4


def check_thread_order(xp: Any, call: Callable[[], Any]) -> None:
    """`call`, which returns arrays of `xp`, gives the same bytes in any order of threads.

    On the simulator five seeds fix the order of two architectures' code: NVRTC makes the same
    instructions for 90 as for 80. A GPU takes the order it likes, five times.
    """
    runs = [(80, 0), (80, 1), (80, 2), (100, 3), (100, 4)]
    results = []
    for arch, seed in runs:
        if xp is arrays.module("sim"):
            with xp.schedule(arch, seed):
                results.append([arrays.to_host(a).tobytes() for a in call()])
        else:
            results.append([arrays.to_host(a).tobytes() for a in call()])
    assert results[0]
    assert results == results[:1] * len(runs)


# Random bits


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x32-10 of Salmon et al. 2011, section 4.3, in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


_philox4x32 = functools.lru_cache(philox4x32)  # eight columns in a row have the same words


def halves(number: int) -> tuple[int, int]:
    """Low and high 32 bits of a 64-bit integer, negative ones in two's complement."""
    return number % 2**32, number % 2**64 // 2**32


def keep(rows: int, columns: int, rate: float, seed: int, step: int, layer: int, first: int = 0):
    """(rows, columns) of bool: the units that dropout keeps."""
    kept = np.ones((rows, columns), bool)
    for b in range(rows if rate else 0):
        for n in range(columns):
            if n % 4 == 0:
                words = philox4x32((n // 4, first + b, step, layer), halves(seed))
            kept[b, n] = words[n % 4] >= round(rate * 2**32)
    return kept


def uniform_vectors(tables, ids, width: int, seed: int, low: float, high: float) -> np.ndarray:
    low, high = np.float32(low), np.float32(high)
    out = np.empty((len(ids), width), np.float32)
    for i, (table, key) in enumerate(zip(tables, ids, strict=True)):
        for n in range(width):
            words = philox4x32((*halves(int(key)), int(table), n // 4), halves(seed))
            u = np.float32((words[n % 4] >> 8) / 2**24)
            out[i, n] = low + u * (high - low)
    return out


def truncated_normal_vectors(tables, ids, width: int, seed: int, mean, std, low, high):
    """float64, of values within [low, high], which should not lie in one tail alone."""
    normal = statistics.NormalDist(mean, std)
    below, mass = normal.cdf(low), normal.cdf(high) - normal.cdf(low)
    out = np.empty((len(ids), width))
    for i, (table, key) in enumerate(zip(tables, ids, strict=True)):
        for n in range(width):
            if n % 4 == 0:
                words = philox4x32((*halves(int(key)), int(table), n // 4), halves(seed))
            out[i, n] = normal.inv_cdf(below + mass * (words[n % 4] + 0.5) / 2**32)
    return out


def rounding_bits(table: int, key: int, column: int, seed: int, step: int) -> int:
    """16 random bits that decide which way a column of a row is rounded."""
    seed = (seed + (column // 8 + 1) * 0x9E3779B97F4A7C15) % 2**64
    words = _philox4x32((*halves(key), table, step), halves(seed))
    return words[column % 8 // 2] >> 16 * (column % 2) & 0xFFFF


def round_rows(x, tables, ids, seed: int, step: int, value: int) -> np.ndarray:
    """By each number's random bits."""
    codes = np.empty(x.shape, np.uint16)
    for (i, d), number in np.ndenumerate(x):
        bits = rounding_bits(int(tables[i]), int(ids[i]), d, seed, step)
        codes[i, d] = rounded(float(number), bits, value)
    return codes


def rounded(x: float, bits: int, value: int) -> int:
    """Code of float16 (value 1) or bfloat16 (2): of x's two neighbours the upper one if it is
    nearer than `bits` * 2^-16 of their distance to where x stands, in whole 2^-16 of it."""
    digits, least, largest = (10, -14, 0x7BFF) if value == 1 else (7, -126, 0x7F7F)
    sign = 0x8000 if math.copysign(1, x) < 0 else 0
    if math.isnan(x):
        return 0x7E00 if value == 1 else 0x7FC0
    if x == 0 or math.isinf(x):
        return sign | (largest + 1 if x else 0)
    exponent = max(least, math.frexp(x)[1] - 1)
    steps = fractions.Fraction(abs(x)) / fractions.Fraction(2) ** (exponent - digits)
    below = math.floor(steps)
    up = math.floor((steps - below) * 2**16) + bits >= 2**16
    return sign | min(largest, ((exponent - least) << digits) + below + up)


def hash_key(table: int, key: int) -> int:
    """MurmurHash3's finalizer; (table + 1) * 2^64 / golden ratio is added after its first round."""
    h = key % 2**64
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD % 2**64
    h = (h + (table + 1) * 0x9E3779B97F4A7C15) % 2**64
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
    return h ^ h >> 33


def keys_of_equal_hash(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(tables, ids): the first round of each id undoes what its table adds after it."""
    inverse = pow(0xFF51AFD7ED558CCD, -1, 2**64)
    ids = []
    for table in range(count):
        h = -(table + 1) * 0x9E3779B97F4A7C15 * inverse % 2**64
        ids.append(h ^ h >> 33)
    return np.arange(count, dtype=np.uint32), np.array(ids, np.uint64).view(np.int64)


def row_digest(tables, ids, words) -> list[int]:
    """Two sums over rows of MurmurHash3's finalizer, chained over id, table and pairs of words."""
    sums = [0, 0]
    for table, key, row in zip(tables.tolist(), ids.tolist(), words.tolist(), strict=True):
        pairs = [sum(w << 32 * j for j, w in enumerate(row[i : i + 2])) for i in range(len(row))]
        for lane, start in enumerate((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)):
            h = start + len(row)
            for x in (key % 2**64, table, *pairs[::2]):
                h ^= x
                h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD % 2**64
                h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
                h ^= h >> 33
            sums[lane] = (sums[lane] + h) % 2**64
    return sums


def with_moments(shape: Any, seed: int = 0) -> tuple[np.ndarray, float]:
    """(x, eps): whole numbers; each row has a whole mean, and variance + eps is 16.

    So deviations are +-2 in pairs; of an odd number of columns some +-4 and one 0 instead.
    """
    rows, columns = shape
    fours = 0 if columns % 2 == 0 else -(-(columns + 1) // 6)
    twos = columns // 2 if columns % 2 == 0 else columns - 4 * fours
    half = [4] * fours + [2] * twos
    deviations, eps = [*half, *(-d for d in half)], 12.0 if columns % 2 == 0 else 8.0
    if columns in (1, 3):
        deviations, eps = ([], 16.0) if columns == 1 else ([3, -3], 10.0)
    deviations += [0] * (columns - len(deviations))
    generator = np.random.default_rng(seed)
    x = [generator.permutation(deviations) + generator.integers(-50, 51) for _ in range(rows)]
    return np.reshape(x, shape).astype(np.float32), eps


# Forward and backward, in float64


def dot_interaction(dense, sparse, self_interaction=False, concat=True, padding=0):
    """Section 4.1 of the fused op: [dense | lower triangle of X X^T, row by row | zeros]."""
    x = np.float64(sparse)
    columns = []
    if dense is not None:
        x = np.concatenate([np.float64(dense)[:, None], x], axis=1)
    if concat:
        columns += [x[:, 0, d] for d in range(x.shape[2])]
    for r in range(x.shape[1]):
        for c in range(r + 1 if self_interaction else r):
            columns.append((x[:, r] * x[:, c]).sum(axis=1))
    columns += [np.zeros(len(x))] * padding
    return np.stack(columns, axis=1) if columns else np.empty((len(x), 0))


def dot_interaction_gradient(grad, dense, sparse, self_interaction=False, concat=True):
    """d(x.y) = y dx + x dy for every pair, one after the other."""
    grad, x = np.float64(grad), np.float64(sparse)
    if dense is not None:
        x = np.concatenate([np.float64(dense)[:, None], x], axis=1)
    dx = np.zeros_like(x)
    at = 0
    if concat:
        at = x.shape[2]
        dx[:, 0] += grad[:, :at]
    for r in range(x.shape[1]):
        for c in range(r + 1 if self_interaction else r):
            dx[:, r] += grad[:, at, None] * x[:, c]
            dx[:, c] += grad[:, at, None] * x[:, r]
            at += 1
    return (dx[:, 0], dx[:, 1:]) if dense is not None else (None, dx)


def factorization_machine(dense, sparse, grad):
    """(out, gradient of dense, gradient of sparse), one pair of features after the other."""
    x = np.float64(sparse)
    if dense is not None:
        x = np.concatenate([np.float64(dense)[:, None], x], axis=1)
    out, dx = np.zeros((len(x), 1)), np.zeros_like(x)
    for r, c in itertools.combinations(range(x.shape[1]), 2):
        out[:, 0] += (x[:, r] * x[:, c]).sum(axis=1)
        dx[:, r] += grad * x[:, c]
        dx[:, c] += grad * x[:, r]
    return (out, None, dx) if dense is None else (out, dx[:, 0], dx[:, 1:])


def cross_vector(dy, x, x0, weight, bias) -> list[np.ndarray]:
    """y, dx, dx0, dweight, dbias."""
    y, dx, dx0 = np.empty(x.shape), np.empty(x.shape), np.empty(x.shape)
    dweight = np.zeros(x.shape[1])
    for b, (a, a0, g) in enumerate(zip(np.float64(x), np.float64(x0), np.float64(dy), strict=True)):
        product, slope = math.fsum(a * weight), math.fsum(g * a0)
        y[b], dx[b], dx0[b] = a0 * product + bias + a, slope * np.float64(weight) + g, g * product
        dweight += slope * a
    return [y, dx, dx0, dweight, np.float64(dy).sum(axis=0)]


def mlp(x, weights, biases, keeps, rates, linear_output: bool) -> list[np.ndarray]:
    """Outputs of all layers, x first; keeps[l] is layer l's dropout mask."""
    layers = [np.float64(x)]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        z = layers[-1] @ np.float64(weight).T + np.float64(bias)
        last = linear_output and i == len(weights) - 1
        layers.append(z if last else np.where(z > 0, z, 0) * keeps[i] / (1 - rates[i]))
    return layers


def mlp_gradient(dy, layers, weights, rates, linear_output: bool):
    """(dx, dweights, dbiases) from the outputs of `mlp`."""
    grad, dweights, dbiases = np.float64(dy), [], []
    for i in reversed(range(len(weights))):
        if not (linear_output and i == len(weights) - 1):
            grad = grad * (layers[i + 1] > 0) / (1 - rates[i])
        dweights.insert(0, grad.T @ layers[i])
        dbiases.insert(0, grad.sum(axis=0))
        grad = grad @ np.float64(weights[i])
    return grad, dweights, dbiases


def bce_with_logits(logits, labels, total: int, weights=None) -> tuple[float, np.ndarray]:
    """w times -(y ln p + (1 - y) ln(1 - p)) with p = 1 / (1 + e^-z), and its gradient by z."""
    losses, gradient = [], []
    weights = np.ones(np.shape(logits)) if weights is None else weights
    rows = (np.ravel(x).tolist() for x in (logits, labels, weights))
    for z, y, w in zip(*rows, strict=True):
        softplus = max(z, 0) + math.log1p(math.exp(-abs(z)))  # ln(1 + e^z) = -ln(1 - p)
        losses.append(w * (y * (softplus - z) + (1 - y) * softplus))
        p = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
        gradient.append(w * (p - y) / total)
    return math.fsum(losses) / max(1, total), np.reshape(gradient, np.shape(logits))


def layer_norm(x, weight, bias, eps: float) -> np.ndarray:
    y = np.empty(x.shape)
    for b, row in enumerate(np.float64(x)):
        mean = math.fsum(row) / len(row)
        variance = math.fsum((row - mean) ** 2) / len(row)
        y[b] = (row - mean) / math.sqrt(variance + eps) * weight + bias
    return y


def layer_norm_gradient(dy, x, weight, eps: float):
    """(dx, dweight, dbias) by the chain rule through variance and mean, step by step."""
    dx, dweight, dbias = np.empty(x.shape), np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for b, (row, grad) in enumerate(zip(np.float64(x), np.float64(dy), strict=True)):
        n, mean = len(row), math.fsum(row) / len(row)
        centred = row - mean
        variance = math.fsum(centred**2) / n
        deviation = math.sqrt(variance + eps)
        dxhat = grad * weight
        dvariance = math.fsum(dxhat * centred) * -0.5 * deviation**-3
        dmean = -math.fsum(dxhat) / deviation - 2 * dvariance * math.fsum(centred) / n
        dx[b] = dxhat / deviation + dvariance * 2 * centred / n + dmean / n
        dweight += grad * centred / deviation
        dbias += grad
    return dx, dweight, dbias


def segment_sum(x, offsets, positions, index=None, weights=None) -> np.ndarray:
    out = np.zeros((len(offsets) - 1, x.shape[1]))
    for u in range(len(out)):
        for i in positions[offsets[u] : offsets[u + 1]]:
            row = np.float64(x[i if index is None else index[i]])
            out[u] += row if weights is None else np.float64(weights[i]) * row
    return out


def pool(vectors, inverse, offsets, weights=None, mean=False) -> np.ndarray:
    """Values of inverse -1 don't count."""
    out = np.zeros((len(offsets) - 1, vectors.shape[1]))
    for m in range(len(out)):
        counted = [i for i in range(offsets[m], offsets[m + 1]) if inverse[i] >= 0]
        for i in counted:
            out[m] += np.float64(vectors[inverse[i]]) * (1 if weights is None else weights[i])
        if mean and counted:
            out[m] /= len(counted)
    return out


# Optimizers: state is changed in place, float64


def sgd(w, g, *, lr, weight_decay=0.0, scale=1.0) -> None:
    w *= 1 - lr * weight_decay
    w -= lr * scale * np.float64(g)


def momentum(w, m, g, *, lr, momentum, nesterov=False, weight_decay=0.0, scale=1.0) -> None:
    """torch.optim.SGD's: the learning rate stands outside the sum, and no gradient is damped."""
    g = scale * np.float64(g)
    m[:] = momentum * m + g
    w *= 1 - lr * weight_decay
    w -= lr * (g + momentum * m if nesterov else m)


def adagrad(w, s, g, *, lr, eps, weight_decay=0.0, scale=1.0) -> None:
    w *= 1 - lr * weight_decay
    g = scale * np.float64(g)
    s += g**2
    w -= lr * g / (np.sqrt(s) + eps)


def adam(w, m, v, g, *, lr, beta1, beta2, eps, t, weight_decay=0.0, scale=1.0) -> None:
    """Algorithm 1 of Kingma and Ba 2015, with the bias corrections written out; before the step
    the decay of Algorithm 2 of Loshchilov and Hutter 2019, with the schedule in lr."""
    w *= 1 - lr * weight_decay
    g = scale * np.float64(g)
    m[:] = beta1 * m + (1 - beta1) * g
    v[:] = beta2 * v + (1 - beta2) * g**2
    w -= lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)


def rowwise_adagrad(w, s, g, *, lr, eps, weight_decay=0.0, scale=1.0) -> None:
    """Of one row, whose s is one number."""
    g = scale * np.float64(g)
    s += (g**2).sum() / len(g)
    w -= lr * weight_decay * w
    w -= lr * g / (np.sqrt(s) + eps)


def ftrl(
    w, n, z, g, *, lr, lambda1=0.0, lambda2=0.0, beta=0.0, weight_decay=0.0, scale=1.0
) -> None:
    """Algorithm 1 of McMahan et al. 2013; here z is lr times theirs. What decay takes off a weight
    is made up in z, so that the closed form gives the smaller weight."""
    g, theirs = scale * np.float64(g), z / lr
    own = -(beta + np.sqrt(n)) / lr * w  # of weights that nothing has moved yet: the first centre
    theirs = np.where((theirs == 0) & (w != 0), own, theirs)
    sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / lr
    theirs += g - sigma * w
    n += g**2
    curvature = (beta + np.sqrt(n)) / lr + lambda2
    theirs += curvature * lr * weight_decay * w
    shrunk = np.sign(theirs) * np.maximum(abs(theirs) - lambda1, 0)
    w[:] = np.divide(-shrunk, curvature, out=np.zeros_like(w), where=shrunk != 0)
    z[:] = lr * theirs

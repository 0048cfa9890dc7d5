"""Initial vectors of embedding rows, a function of (seed, table, id, column) alone.

    word = philox4x32(counter = (id low, id high, table, column // 4), key = seed)[column % 4]
    uniform:  x = a + b * ((word >> 8) * 2^-24)           in float32
    normal:   p = low + mass * ((word + 1/2) * 2^-32)     in float64, as is
              x = a + b * (where the standard normal distribution function is p)

Each operation is rounded once, and none is a mathematical library's. So a row has the same first
vector, bit for bit, on every rank, tier and device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyrec import arrays, cpu, errors
from cupyrec.kernel import Geometry, Kernel, blocks, vector_width
from cupyrec.ops.hash_key import check_keys
from cupyrec.random import philox4x32

__all__ = ["Distributions", "initial_vectors", "normal_probability", "normal_quantile"]

_WORDS = 16384  # a block
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROOT_HALF = np.int64(0x3FE6A09E667F3BCD)  # bits of sqrt(1/2)

# PPND16 of Wichura 1988, AS 241: numerators and denominators, highest powers first.
_MIDDLE_ABOVE = (
    2509.0809287301227, 33430.57558358813, 67265.7709270087, 45921.95393154987, 13731.69376550946,
    1971.5909503065513, 133.14166789178438, 3.3871328727963665,
)  # fmt: skip
_MIDDLE_BELOW = (
    5226.495278852854, 28729.085735721943, 39307.89580009271, 21213.794301586597, 5394.196021424751,
    687.1870074920579, 42.31333070160091, 1.0,
)  # fmt: skip
_TAIL_ABOVE = (
    0.0007745450142783414, 0.022723844989269184, 0.2417807251774506, 1.2704582524523684,
    3.6478483247632045, 5.769497221460691, 4.630337846156546, 1.4234371107496835,
)  # fmt: skip
_TAIL_BELOW = (
    1.0507500716444169e-09, 0.0005475938084995345, 0.015198666563616457, 0.14810397642748008,
    0.6897673349851, 1.6763848301838038, 2.053191626637759, 1.0,
)  # fmt: skip
_FAR_ABOVE = (
    2.0103343992922881e-07, 2.7115555687434876e-05, 0.0012426609473880784, 0.026532189526576124,
    0.29656057182850487, 1.7848265399172913, 5.463784911164114, 6.657904643501103,
)  # fmt: skip
_FAR_BELOW = (
    2.0442631033899397e-15, 1.421511758316446e-07, 1.8463183175100548e-05, 0.0007868691311456133,
    0.014875361290850615, 0.1369298809227358, 0.599832206555888, 1.0,
)  # fmt: skip


class Distributions(NamedTuple):
    """What vectors are drawn from: each table has ranges of columns, each range a distribution.

    Attributes
    ----------
    first : (T,) array of int32
        Each table's first range, which tables may share. The last table speaks for all after it.
    stops : (R,) array of int32
        Where each range ends; a table's next range starts there, its last one ends at D.
    parameters : (R, 6) array of float64
        low, mass, a, b of each range, and the bounds that a normal x is clamped to. A uniform
        distribution has mass 0, and a and b that are float32.
    """

    first: Any
    stops: Any
    parameters: Any


@cpu.exact_loop
def _log(x):
    """Logarithm of a positive float64 that is not subnormal; off by 7e-10 at most."""
    bits = np.float64(x).view(np.int64)
    exponent = (bits - _ROOT_HALF) >> np.int64(52)
    m = np.int64(bits - (exponent << np.int64(52))).view(np.float64)  # sqrt(1/2) <= m < sqrt(2)
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    series = (((t * (1 / 9) + 1 / 7) * t + 1 / 5) * t + 1 / 3) * t + 1.0
    return exponent * 0.6931471805599453 + 2.0 * s * series


@cpu.exact_loop
def _ratio(above, below, r):
    top, bottom = above[0], below[0]
    for n in range(1, 8):
        top, bottom = top * r + above[n], bottom * r + below[n]
    return top / bottom


@cpu.exact_loop
def _middle_quantile(p):
    q = p - 0.5
    return q * _ratio(_MIDDLE_ABOVE, _MIDDLE_BELOW, 0.180625 - q * q)


@cpu.exact_loop
def _tail_quantile(p):
    r = np.sqrt(-_log(min(p, 1.0 - p)))
    if r <= 5.0:
        x = _ratio(_TAIL_ABOVE, _TAIL_BELOW, r - 1.6)
    else:
        x = _ratio(_FAR_ABOVE, _FAR_BELOW, r - 5.0)
    return -x if p < 0.5 else x


@cpu.exact_loop
def _in_tail(p) -> bool:
    return abs(p - 0.5) > 0.425


@cpu.exact_loop
def normal_quantile(p) -> float:
    """Return x where the standard normal distribution function is `p`, in [2^-1022, 1 - 2^-53].

    By Wichura 1988, AS 241; off by 3e-10 of x at most.

    Examples
    --------
    >>> round(normal_quantile(0.975), 6)
    1.959964
    """
    return _tail_quantile(p) if _in_tail(p) else _middle_quantile(p)


@cpu.exact_loop
def normal_probability(x) -> float:
    """Return the p at which `normal_quantile` gives `x`, to the last bits of p.

    Examples
    --------
    >>> round(normal_probability(-1.0), 6)
    0.158655
    """
    least, most = np.int64(1 << 52), np.int64(0x3FE << 52)  # bits of 2^-1022 and 1/2, of which
    while most - least > 1:  # the larger is the larger number's
        middle = (least + most) // 2
        if normal_quantile(np.int64(middle).view(np.float64)) <= -abs(x):
            least = middle
        else:
            most = middle
    p = np.int64(least).view(np.float64)
    return p if x < 0.0 else 1.0 - p


@cpu.exact_loop
def _words_cpu(tables, ids, seed, words):
    for i in range(ids.size):
        table, key = np.uint64(tables[i]), np.uint64(ids[i])
        for n in range(0, words.shape[1], 4):
            quad = philox4x32(
                key & _LOW, key >> _32, table, np.uint64(n // 4), seed & _LOW, seed >> _32
            )
            for m in range(4):
                words[i, n + m] = quad[m]


@cpu.exact_loop
def _uniform_cpu(tables, distributions, words, out):
    first, stops, parameters = distributions
    for i in range(out.shape[0]):
        r, start = first[min(np.int64(tables[i]), first.size - 1)], 0
        while start < out.shape[1]:
            if parameters[r, 1] == 0.0:
                a, b = np.float32(parameters[r, 2]), np.float32(parameters[r, 3])
                for n in range(start, stops[r]):
                    u = np.float32(np.int32(words[i, n] >> np.uint32(8))) * np.float32(2.0**-24)
                    out[i, n] = a + b * u
            r, start = r + 1, stops[r]


@cpu.exact_loop
def _normal(words, of, out):
    low, mass, a, b, least, most = of[0], of[1], of[2], of[3], of[4], of[5]
    for n in range(out.size):  # several at a time, which the tails' branch would forbid
        p = low + mass * ((words[n] + 0.5) * 2.0**-32)
        x = a + b * _middle_quantile(p)
        out[n] = least if x < least else most if x > most else x
    for n in range(out.size):
        p = low + mass * ((words[n] + 0.5) * 2.0**-32)
        if _in_tail(p):
            x = a + b * _tail_quantile(p)
            out[n] = least if x < least else most if x > most else x


@cpu.exact_loop
def _normal_cpu(tables, distributions, words, out):
    first, stops, parameters = distributions
    for i in range(out.shape[0]):
        r, start = first[min(np.int64(tables[i]), first.size - 1)], 0
        while start < out.shape[1]:
            of = parameters[r]
            if of[1] != 0.0:
                _normal(words[i, start : stops[r]], of, out[i, start : stops[r]])
            r, start = r + 1, stops[r]


_vectors = Kernel(
    "initial_vectors.cu", "initial_vectors",
    "const uint32_t* tables, const int64_t* ids, uint64_t seed, const int32_t* first,"
    " uint32_t last, const int32_t* stops, const double* parameters, float* x, int64_t n",
    lambda N, D: Geometry(blocks(N * blocks(D, 4), 256), 256),
)  # fmt: skip


def initial_vectors(
    tables: Any, ids: Any, width: int, seed: int, distributions: Distributions
) -> Any:
    """Return a vector for each key.

    Parameters
    ----------
    tables : (N,) array of uint32
    ids : (N,) array of int64
    width : int
        D, the length of a vector.
    seed : int
        0 <= seed < 2**64.
    distributions : Distributions
        Of arrays on the device of the keys.

    Returns
    -------
    (N, D) array of float32 on the device of the keys

    Raises
    ------
    ValueError, TypeError
        Arrays of another shape or dtype. What stands in the distributions is not checked.

    Examples
    --------
    >>> uniform = Distributions(
    ...     first=np.array([0], np.int32), stops=np.array([2], np.int32),
    ...     parameters=np.array([[0.0, 0.0, 0.0, 1.0, 0.0, 1.0]]),
    ... )
    >>> initial_vectors(np.array([0], np.uint32), np.array([-1]), 2, 1, uniform).shape
    (1, 2)
    """
    where = "initial_vectors"
    n = check_keys(where, tables, ids)
    first, stops, parameters = distributions
    errors.axes(where, first=(first, "T"), stops=(stops, "R"), parameters=(parameters, "R 6"))
    xp = arrays.namespace(where, tables, ids, *distributions)
    out = xp.empty((n, errors.positive(where, "width", width)), np.float32)
    if xp is not np:
        _vectors(
            xp.ascontiguousarray(tables), xp.ascontiguousarray(ids), seed, first,
            len(first) - 1, stops, parameters, out, n,
            macros={"DIM": width, "VECTOR": vector_width(width, out)}, N=n, D=width,
        )  # fmt: skip
        return out

    loops = [_uniform_cpu]
    if (parameters[:, 1] != 0).any():
        loops.append(_normal_cpu)  # takes a second to compile

    def block(i: int, j: int) -> None:
        words = np.empty((j - i, blocks(width, 4) * 4), np.uint32)
        _words_cpu(tables[i:j], ids[i:j], np.uint64(seed), words)
        for loop in loops:
            loop(tables[i:j], distributions, words, out[i:j])

    cpu.parallel(block, n, blocks(_WORDS, width))
    return out

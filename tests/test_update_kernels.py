"""Optimizers on devices: the updates of dense parameters and rows, one formula each."""

import dataclasses
from collections.abc import Callable

import numpy as np
import oracle
import pytest
from test_embedding_rows import keys

from cupyrec import arrays
from cupyrec.ops import adagrad, adam, ftrl, momentum, sgd
from cupyrec.ops.embedding_rows import BFLOAT16, FLOAT16, RowMemory

f32 = np.float32


def naive_sgd(w, g, *, lr, weight_decay, scale):
    w *= f32(1 - lr * weight_decay)
    w -= f32(lr) * (f32(scale) * g)


def naive_momentum(w, m, g, *, lr, momentum, nesterov, weight_decay, scale):
    g = f32(scale) * g
    w *= f32(1 - lr * weight_decay)
    m *= f32(momentum)
    m += g
    w -= f32(lr) * (g + f32(momentum) * m if nesterov else m)


def naive_adagrad(w, s, g, *, lr, eps, weight_decay, scale):
    w *= f32(1 - lr * weight_decay)
    g = f32(scale) * g
    s += g * g
    w -= f32(lr) * g / (np.sqrt(s) + f32(eps))


def naive_adam(w, m, v, g, *, lr, beta1, beta2, eps, t, weight_decay, scale):
    """PyTorch's way in float32: scalars in Python, one rounding an operation."""
    g = f32(scale) * g
    w *= f32(1 - lr * weight_decay)
    m *= f32(beta1)
    m += f32(1 - beta1) * g
    v *= f32(beta2)
    v += f32(1 - beta2) * g * g
    denominator = np.sqrt(v) / f32((1 - beta2**t) ** 0.5) + f32(eps)
    w -= f32(lr / (1 - beta1**t)) * (m / denominator)


def naive_ftrl(w, n, z, g, *, lr, lambda1=0, lambda2=0, beta=0, weight_decay=0, scale):
    g, before, edge = f32(scale) * g, np.sqrt(n), f32(lr * lambda1)
    n += g * g
    c = f32(beta) + np.sqrt(n) + f32(lr * lambda2)
    z[:] = np.where((z == 0) & (w != 0), -(f32(beta) + before) * w, z)
    z += f32(lr) * g - (np.sqrt(n) - before) * w + f32(lr * weight_decay) * c * w
    w[:] = (np.clip(z, -edge, edge) - z) / c


@dataclasses.dataclass
class Rule:
    """An optimizer's ops, oracle and naive loop; `exact` options keep whole numbers whole."""

    name: str
    dense: Callable
    rows: Callable
    truth: Callable
    naive: Callable
    parts: int
    exact: dict
    usual: dict

    def options(self, t: int = 1) -> dict:
        return self.usual | ({"t": t} if self.name == "adam" else {})


ADAM_EXACT = dict(lr=2.0, beta1=0.5, beta2=0.75, eps=0.0, t=1, weight_decay=0.25, scale=0.5)
RULES = [
    Rule(
        "sgd", sgd.sgd_dense, sgd.sgd_rows, oracle.sgd, naive_sgd, 1,
        dict(lr=0.5, weight_decay=0.5, scale=0.5), dict(lr=0.1, weight_decay=0.3, scale=0.7),
    ),
    *(
        Rule(
            "momentum", momentum.momentum_dense, momentum.momentum_rows, oracle.momentum,
            naive_momentum, 2,
            dict(lr=0.5, momentum=0.5, nesterov=nesterov, weight_decay=0.5, scale=0.5),
            dict(lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.3, scale=0.7),
        )
        for nesterov in (False, True)
    ),
    Rule(
        "adagrad", adagrad.adagrad_dense, adagrad.adagrad_rows, oracle.adagrad, naive_adagrad, 2,
        dict(lr=2.0, eps=0.0, weight_decay=0.25, scale=0.5),
        dict(lr=0.1, eps=1e-8, weight_decay=0.3, scale=0.7),
    ),
    Rule(
        "adam", adam.adam_dense, adam.adam_rows, oracle.adam, naive_adam, 3,
        ADAM_EXACT,
        dict(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.3, scale=0.7),
    ),
    Rule(
        "ftrl", ftrl.ftrl_dense, ftrl.ftrl_rows, oracle.ftrl, naive_ftrl, 3,
        dict(lr=2.0, scale=0.5),
        dict(lr=0.1, lambda1=0.3, lambda2=0.01, beta=0.5, weight_decay=0.02, scale=0.7),
    ),
]  # fmt: skip
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def gradient(shape, seed=1):
    """Multiples of 4, none of them 0, of both signs."""
    g = 4 * oracle.integers(shape, 1, 99, seed=seed)
    return g * (2 * oracle.integers(shape, 0, 1, seed=seed + 1) - 1)


def chunked(xp, rows, k):
    """(memory, chunks) of (N, stride) rows, in chunks of 2^k rows; the rest of the last is NaN."""
    size, chunks = 1 << k, []
    for first in range(0, len(rows), size):
        chunk = np.full((size, rows.shape[1]), np.nan, f32)
        chunk[: len(rows) - first] = rows[first : first + size]
        chunks.append(xp.asarray(chunk))
    interface = "__array_interface__" if xp is np else "__cuda_array_interface__"
    addresses = [getattr(chunk, interface)["data"][0] for chunk in chunks]
    return RowMemory(xp.asarray(np.array(addresses, np.uint64)), k, rows.shape[1]), chunks


def unchunked(chunks, n):
    return np.concatenate([arrays.to_host(chunk) for chunk in chunks])[:n]


def row_parts(rows, width, parts):
    return [rows[..., i * width : (i + 1) * width] for i in range(parts)]


def start_rows(n, width, parts, whole=False):
    """Rows with zero state; 9 is in the padding."""
    rows = np.full((n, (parts * width + 3) // 4 * 4), 9, f32)
    rows[:, : parts * width] = 0
    rows[:, :width] = oracle.integers((n, width), -99, 99) if whole else oracle.normals((n, width))
    return rows


# Exact


@every_rule
@pytest.mark.parametrize(
    ("n", "offset"),
    [(0, 0), (1, 0), (3, 0), (17, 0), (127, 0), (1025, 0), (1024, 0), (17, 1), (127, 2), (5, 3)],
)
def test_dense_is_exact_at_any_alignment(xp, rule, n, offset):
    """Beside views of larger arrays nothing is written."""
    g = gradient(n)
    w = oracle.integers(n, -99, 99)
    truth = [np.float64(w), *(np.zeros(n) for _ in range(rule.parts - 1))]
    buffers = []
    for values in [*truth, g]:
        buffer = np.full(n + offset + 4, 9, f32)
        buffer[offset : offset + n] = values
        buffers.append(xp.asarray(buffer))
    rule.dense(*(b[offset : offset + n] for b in buffers), **rule.exact)
    rule.truth(*truth, g, **rule.exact)
    for buffer, expected in zip(buffers, truth, strict=False):
        got = arrays.to_host(buffer)
        oracle.check_exact(got[offset : offset + n], expected)
        assert (got[:offset] == 9).all()
        assert (got[offset + n :] == 9).all()


@every_rule
@pytest.mark.parametrize(
    ("n", "width"),
    [*oracle.covering([1, 3, 17, 127], [1, 3, 4, 10, 16, 128, 130], most=3000), (0, 4), (2, 1025)],
)
def test_rows_are_exact_and_others_untouched(xp, rule, n, width):
    rows = start_rows(n + 3, width, rule.parts, whole=True)
    k = (n + width) % 5
    memory, chunks = chunked(xp, rows, k)
    touched = np.random.default_rng(0).permutation(n + 3)[:n]
    g = gradient((n, width))
    rule.rows(memory, xp.asarray(touched), xp.asarray(g), **rule.exact)
    truth = np.float64(rows)
    for row, x in zip(touched, g, strict=True):
        rule.truth(*row_parts(truth[row], width, rule.parts), x, **rule.exact)
    oracle.check_exact(unchunked(chunks, n + 3), truth)


# Rounding


@every_rule
def test_dense_error_over_steps(xp, rule):
    start = [oracle.normals(255), *(np.zeros(255, f32) for _ in range(rule.parts - 1))]
    got = [xp.asarray(a) for a in start]
    truth, naive = [np.float64(a) for a in start], [a.copy() for a in start]
    for t in range(1, 21):
        g = oracle.normals(255, seed=t)
        rule.dense(*got, xp.asarray(g), **rule.options(t))
        rule.truth(*truth, g, **rule.options(t))
        rule.naive(*naive, g, **rule.options(t))
    for a, b, c in zip(got, naive, truth, strict=True):
        oracle.check_error(arrays.to_host(a), b, c)


@every_rule
@pytest.mark.parametrize("width", [3, 16, 130])
def test_rows_error_over_steps(xp, rule, width):
    """Rows come and go; one that is away keeps its bytes."""
    n = 11
    start = start_rows(n, width, rule.parts)
    memory, chunks = chunked(xp, start, 2)
    naive, truth = start.copy(), np.float64(start)
    generator = np.random.default_rng(0)
    for t in range(1, 16):
        touched = generator.permutation(n - 1)[: generator.integers(1, n)]
        g = oracle.normals((len(touched), width), seed=t)
        rule.rows(memory, xp.asarray(touched), xp.asarray(g), **rule.options(t))
        for row, x in zip(touched, g, strict=True):
            rule.naive(*row_parts(naive[row], width, rule.parts), x, **rule.options(t))
            rule.truth(*row_parts(truth[row], width, rule.parts), x, **rule.options(t))
    after = unchunked(chunks, n)
    for a, b, c in zip(*(row_parts(x, width, rule.parts) for x in (after, naive, truth)),
                       strict=True):  # fmt: skip
        oracle.check_error(a, b, c)
    assert after[-1].tobytes() == start[-1].tobytes()
    assert (after[:, rule.parts * width :] == 9).all()


@every_rule
def test_devices_agree_and_dense_and_rows_are_one_formula(xp, rule):
    n, width = 9, 12
    rows = np.abs(start_rows(n, width, rule.parts))
    g = oracle.normals((n, width), seed=1)
    memory, chunks = chunked(xp, rows, 2)
    rule.rows(memory, xp.arange(n), xp.asarray(g), **rule.options(3))
    parts = [part.ravel() for part in row_parts(rows, width, rule.parts)]
    moved = [xp.asarray(part) for part in parts]
    rule.dense(*moved, xp.asarray(g.ravel()), **rule.options(3))
    rule.dense(*parts, g.ravel(), **rule.options(3))
    after = row_parts(unchunked(chunks, n), width, rule.parts)
    for of_rows, dense, cpu in zip(after, moved, parts, strict=True):
        np.testing.assert_array_equal(of_rows.ravel(), arrays.to_host(dense))
        np.testing.assert_allclose(of_rows.ravel(), cpu, rtol=1e-6, atol=1e-7)


@every_rule
def test_nan_and_inf_stay_in_their_element(xp, rule):
    g = np.array([1, np.nan, np.inf, -1, 2], f32)
    got = [xp.zeros(5, f32) for _ in range(rule.parts)]
    rule.dense(*got, xp.asarray(g), **rule.options())
    for part in got:
        np.testing.assert_array_equal(np.isfinite(arrays.to_host(part)), np.isfinite(g))


# Rows of 16 bits


# Both types of every rule, one of them with loads of several numbers.
HALVES = [
    (rule, *case)
    for i, rule in enumerate(RULES)
    for case in ([(FLOAT16, 5), (BFLOAT16, 12)], [(FLOAT16, 12), (BFLOAT16, 7)])[i % 2]
]


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize(("rule", "value", "width"), HALVES, ids=lambda it: getattr(it, "name", it))
def test_rows_of_16_bits_are_those_of_32_rounded(xp, rule, device, value, width):
    """To the bit on their own device; state is the same words, behind fewer of the vector."""
    xp, n = arrays.module(device) if device else xp, 9
    rows = start_rows(n, width, rule.parts, whole=True)
    rows[:, width : rule.parts * width] = abs(oracle.normals((n, (rule.parts - 1) * width)))
    begin = (width + 1) // 2
    short = np.full((n, rows.shape[1]), 9, f32)
    codes = oracle.round_rows(rows[:, :width], *keys(n), value)  # whole: exact
    short.view(np.uint16)[:, :width] = codes
    short[:, begin : begin + (rule.parts - 1) * width] = rows[:, width : rule.parts * width]
    memory, chunks = chunked(xp, rows, 2)
    touched, g = xp.asarray(np.random.default_rng(0).permutation(n)), gradient((n, width))
    rule.rows(memory, touched, xp.asarray(g), **rule.options(2))
    after = unchunked(chunks, n)
    short_memory, short_chunks = chunked(xp, short, 2)
    rounding = keys(n)
    on_device = rounding._replace(tables=xp.asarray(rounding.tables), ids=xp.asarray(rounding.ids))
    rule.rows(
        short_memory._replace(value=value), touched, xp.asarray(g), **rule.options(2),
        rounding=on_device,
    )  # fmt: skip
    got, expected = unchunked(short_chunks, n), short.copy()
    order = arrays.to_host(touched)
    codes = oracle.round_rows(after[order, :width], *rounding, value)
    expected.view(np.uint16)[order, :width] = codes
    expected[:, begin : begin + (rule.parts - 1) * width] = after[:, width : rule.parts * width]
    assert got.tobytes() == expected.tobytes()


# The factor of all gradients


@every_rule
@pytest.mark.parametrize("device", ["cpu", None])
def test_scale_lies_on_the_device_and_nan_updates_nothing(xp, rule, device):
    xp = arrays.module(device) if device else xp
    results = []
    for scale in (0.5, xp.full(1, 0.5, f32), float("nan"), xp.full(1, np.nan, f32)):
        dense = [xp.full(5, value, f32) for value in (1, 0, 0)[: rule.parts]]
        g = xp.asarray(gradient(5))
        options = rule.options() | {"scale": scale}
        rule.dense(*dense, g, **options)
        results.append([arrays.to_host(part) for part in dense])
        rows = start_rows(3, 5, rule.parts)
        memory, chunks = chunked(xp, rows, 2)
        rule.rows(memory, xp.arange(3), xp.asarray(gradient((3, 5))), **options)
        results[-1].append(unchunked(chunks, 3))
    started = [np.full(5, value, f32) for value in (1, 0, 0)[: rule.parts]]
    started.append(start_rows(3, 5, rule.parts))
    for a, b, c, d, e in zip(*results, started, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != e).any()
        np.testing.assert_array_equal(c, e)
        np.testing.assert_array_equal(d, e)


# Order, cost, refusals


@every_rule
def test_same_bits_in_any_order(xp, rule):
    start, g = np.abs(start_rows(40, 10, rule.parts)), oracle.normals((37, 10), seed=1)
    order = np.random.default_rng(0).permutation(40)[:37]

    def call():
        dense = [xp.asarray(oracle.normals(1025, seed=0) ** 2) for _ in range(rule.parts)]
        rule.dense(*dense, xp.asarray(oracle.normals(1025, seed=2)), **rule.options(2))
        memory, chunks = chunked(xp, start, 3)
        rule.rows(memory, xp.asarray(order), xp.asarray(g), **rule.options(2))
        return [*dense, *chunks]

    oracle.check_thread_order(xp, call)


def moved(launch):
    """Distinct bytes, and bytes of all sectors asked for."""
    counts = launch.result.counts
    return counts["bytes_read"] + counts["bytes_written"], 32 * counts["sectors"]


@every_rule
def test_what_moves(rule):
    sim = arrays.module("sim")
    n = 8192
    dense = [sim.full(n, 1, f32) for _ in range(rule.parts)]
    scale = sim.full(1, 0.5, f32)
    options = rule.options() | {"scale": scale}
    with sim.record() as seen:
        rule.dense(*dense, sim.asarray(oracle.normals(n)), **options)
    assert [launch.name for launch in seen.launches] == [f"{rule.name}_dense"]
    assert seen.syncs == 0
    ideal = 4 * n * (2 * rule.parts + 1) + 4
    distinct, sectors = moved(seen.launches[0])
    assert distinct <= 1.01 * ideal
    assert sectors <= 1.10 * ideal
    for width in (16, 128):
        memory, _chunks = chunked(sim, start_rows(300, width, rule.parts), 4)
        touched = sim.asarray(np.random.default_rng(0).permutation(300)[:256])
        g = sim.asarray(oracle.normals((256, width)))
        with sim.record() as seen:
            rule.rows(memory, touched, g, **options)
        assert len(seen.launches) == 1
        ideal = 256 * (4 * width * (2 * rule.parts + 1) + 8)
        distinct, sectors = moved(seen.launches[0])
        assert distinct <= 1.02 * ideal
        assert sectors <= 1.5 * ideal


def test_grids_fill_a_gpu():
    """132 SMs of 8 blocks, with the widths of OneFlow's DLRM at batch 65,536."""
    for module in (sgd, momentum, adagrad, adam, ftrl):
        assert module._dense.geometry(N=2_400_000).grid >= 132 * 8
        assert module._rows.geometry(U=100_000, D=128, vector=4).grid >= 132 * 8
        assert module._rows.geometry(U=100_000, D=16, vector=4).grid >= 132 * 8


@every_rule
def test_strided_gradients_are_copied_and_strided_parameters_refused(xp, rule):
    g = gradient((6, 8))
    dense = [xp.zeros(6, f32) for _ in range(rule.parts)]
    rule.dense(*dense, xp.asarray(g)[:, 3], **rule.options())
    expected = [xp.zeros(6, f32) for _ in range(rule.parts)]
    rule.dense(*expected, xp.asarray(g[:, 3].copy()), **rule.options())
    rows = start_rows(6, 4, rule.parts)
    memory, chunks = chunked(xp, rows, 1)
    rule.rows(memory, xp.arange(12)[::2] // 2, xp.asarray(g)[:, ::2], **rule.options())
    other, others = chunked(xp, rows, 1)
    rule.rows(other, xp.arange(6), xp.asarray(g[:, ::2].copy()), **rule.options())
    for a, b in zip([*dense, *chunks], [*expected, *others], strict=True):
        np.testing.assert_array_equal(arrays.to_host(a), arrays.to_host(b))
    dense[0] = xp.zeros(12, f32)[::2]
    text = f"{rule.name}_dense: 'w' must be C-contiguous, got shape (6,) with strides (8,)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        rule.dense(*dense, xp.zeros(6, f32), **rule.options())


@every_rule
def test_what_is_refused(xp, rule):
    name, options = rule.name, rule.options()
    dense = [xp.zeros(3, f32) for _ in range(rule.parts)]
    g = xp.zeros(3, f32)
    memory, _ = chunked(xp, start_rows(3, 3, rule.parts), 2)
    cases = [
        (
            lambda: rule.dense(*dense, g.astype(float), **options), TypeError,
            f"{name}_dense: 'g' must be float32, got float64.",
        ),
        (
            lambda: rule.dense(*dense, np.zeros(3, f32), **options), TypeError,
            f"{name}_dense: arguments must be arrays of one device, got ",
        ),
        (
            lambda: rule.rows(memory, np.arange(3), xp.zeros((3, 3), f32), **options), TypeError,
            f"{name}_rows: arguments must be arrays of one device, got ",
        ),
        (
            lambda: rule.rows(memory, xp.arange(3), xp.empty((3, 0), f32), **options), ValueError,
            f"{name}_rows: 'g' must have D of at least 1, got shape (3, 0).",
        ),
        (
            lambda: rule.dense(*dense, g, **options | {"scale": xp.ones(2, f32)}), ValueError,
            "scale: must be one number, got shape (2,).",
        ),
        (
            lambda: rule.dense(*dense, g, **options | {"scale": xp.ones(1)}), TypeError,
            f"{name}_dense: 'scale' must be float32, got float64.",
        ),
        (
            lambda: rule.dense(*dense, g, **options | {"scale": np.ones(1, f32)}), TypeError,
            f"{name}_dense: 'scale' must be an array of device 'cuda' or 'sim', got ndarray.",
        ),
    ]  # fmt: skip
    for call, error, text in cases:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(text)

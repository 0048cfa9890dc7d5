"""Optimizers on rows of 16 bits: the update in float32, then the documented rounding."""

import numpy as np
import oracle
import pytest
from test_embedding_rows import keys
from test_update_kernels import RULES, every_rule, gradient, row_parts

from cupyrec import arrays
from cupyrec.ops.embedding_rows import (
    BFLOAT16,
    FLOAT16,
    Rounding,
    RowMemory,
    gather_rows,
    vector_words,
    write_rows,
)

both_formats = pytest.mark.parametrize("value", [FLOAT16, BFLOAT16])
everywhere = pytest.mark.parametrize("device", ["cpu", None])


class Table:
    """Rows of 16 bits in one chunk on a device: vectors, and a state of zeros."""

    def __init__(self, xp, vectors, parts, value):
        self.xp, (self.n, self.width), self.value = xp, vectors.shape, value
        self.begin = vector_words(self.width, value)
        stride = (self.begin + (parts - 1) * self.width + 3) // 4 * 4
        self.chunk = xp.full((self.n, stride), np.nan, np.float32)
        place = self.chunk.ctypes if xp is np else self.chunk.__cuda_array_interface__
        address = place.data if xp is np else place["data"][0]
        self.memory = RowMemory(xp.asarray(np.array([address], np.uint64)), 20, stride, value)
        self.keys = keys(self.n)
        states = xp.zeros((1, (parts - 1) * self.width), np.float32)
        write_rows(self.memory, 0, xp.asarray(vectors), states, self.rounding(range(self.n), 0))

    def rounding(self, rows, step):
        rows = list(rows)
        tables, ids = (self.xp.asarray(array[rows]) for array in self.keys[:2])
        return Rounding(tables, ids, 7, step)

    def vectors(self):
        out = self.xp.empty((self.n, self.width), np.float32)
        every = self.xp.arange(self.n)
        gather_rows(self.memory, every, every, self.xp.empty((0, self.width), np.float32), out)
        return arrays.to_host(out)

    def codes(self):
        return arrays.to_host(self.chunk).view(np.uint16)[:, : self.width]

    def states(self):
        return arrays.to_host(self.chunk)[:, self.begin :]

    def update(self, rule, rows, g, step, options):
        rows_there, g = self.xp.asarray(np.asarray(rows)), self.xp.asarray(g)
        rule.rows(self.memory, rows_there, g, rounding=self.rounding(rows, step), **options)

    def rounded(self, x, rows, step):
        """What the oracle makes of vectors."""
        tables, ids = (array[list(rows)] for array in self.keys[:2])
        return oracle.round_rows(x, tables, ids, 7, step, self.value)


# Its weight is a difference in which float32 errs by more than a rounding: see test_ftrl.py.
all_but_ftrl = pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.name != "ftrl"], ids=lambda rule: rule.name
)


@everywhere
@both_formats
@all_but_ftrl
def test_steps_stay_within_a_rounding_of_float64(xp, rule, value, device):
    """Each code lies where the oracle rounds the float64 step to, give or take float32's error."""
    xp = arrays.module(device) if device else xp
    n, width = 20, 12
    table = Table(xp, oracle.normals((n, width)), rule.parts, value)
    state = [np.zeros((n, width)) for _ in range(rule.parts - 1)]
    generator = np.random.default_rng(0)
    sure = total = 0
    for step in range(1, 11):
        rows = generator.permutation(n)[: generator.integers(1, n)]
        g = oracle.normals((len(rows), width), seed=step)
        w = np.float64(table.vectors()[rows])
        table.update(rule, rows, g, step, rule.options(step))
        parts = [w, *(part[rows] for part in state)]
        rule.truth(*parts, g, **rule.options(step))
        for part, changed in zip(state, parts[1:], strict=True):
            part[rows] = changed
        error = 1e-6 * (abs(w) + 1)
        low, high = (
            wide(table.rounded(np.float32(w + e), rows, step), value) for e in (-error, error)
        )
        got = wide(table.codes()[rows], value)
        assert (low <= got).all()
        assert (got <= high).all()
        sure, total = sure + (low == high).sum(), total + got.size
    assert sure > 0.95 * total
    for got, part in zip(row_parts(table.states(), width, rule.parts - 1), state, strict=True):
        np.testing.assert_allclose(got, part, rtol=1e-5, atol=1e-6)


def wide(codes, value):
    if value == FLOAT16:
        return codes.view(np.float16).astype(float)
    return (codes.astype(np.uint32) << 16).view(np.float32).astype(float)


@both_formats
def test_small_steps_add_up_where_rounding_to_nearest_stalls(value):
    """1,000 steps of an eighth of the distance of two numbers, from 1 on."""
    distance = 2.0**-10 if value == FLOAT16 else 2.0**-7
    table = Table(np, np.ones((64, 32), np.float32), 1, value)
    sgd = next(rule for rule in RULES if rule.name == "sgd")
    for step in range(1, 1001):
        g = np.full((64, 32), -1, np.float32)
        table.update(sgd, range(64), g, step, dict(lr=distance / 8))
    moved = np.float64(table.vectors() - 1) / distance
    assert abs(moved.mean() - 125) < 5 * np.sqrt(1000 * 7 / 64 / moved.size)
    assert np.float16(np.float16(1) + np.float32(2.0**-10 / 8)) == 1


@every_rule
def test_rounding_is_needed(rule):
    table = Table(np, oracle.normals((5, 6)), rule.parts, FLOAT16)
    text = f"{rule.name}_rows: 'rounding' must be given for rows of 16 bits, got None."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        rule.rows(table.memory, np.arange(5), gradient((5, 6)), **rule.options())
    text = f"{rule.name}_rows: 'rounding' must be None for rows of float32, got one of step 1."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        memory = table.memory._replace(value=0, stride=32)
        options = rule.options() | {"rounding": table.rounding(range(5), 1)}
        rule.rows(memory, np.arange(5), gradient((5, 6)), **options)


@every_rule
def test_same_bits(rule):
    def call():
        table = Table(np, oracle.normals((1500, 10)), rule.parts, BFLOAT16)
        table.update(rule, range(1500), oracle.normals((1500, 10), seed=1), 3, rule.options())
        return [table.chunk]

    oracle.check_same_bits(call)


@every_rule
def test_thread_order(xp, rule):
    def call():
        table = Table(xp, oracle.normals((40, 10)), rule.parts, FLOAT16)
        table.update(rule, range(40), oracle.normals((40, 10), seed=1), 3, rule.options())
        return [table.chunk]

    oracle.check_thread_order(xp, call)


@every_rule
def test_what_moves(rule):
    sim = arrays.module("sim")
    n, width = 256, 128
    table = Table(sim, oracle.normals((n, width)), rule.parts, FLOAT16)
    order = np.random.default_rng(0).permutation(n)
    with sim.record() as seen:
        table.update(rule, order, oracle.normals((n, width)), 3, rule.options())
    counts = seen.launches[-1].result.counts
    ideal = n * (8 + 12 + 4 * width + 2 * (2 * width + 4 * width * (rule.parts - 1)))
    assert counts["bytes_read"] + counts["bytes_written"] <= 1.02 * ideal
    assert counts["sectors"] * 32 <= 1.5 * ideal

import numpy as np
import oracle
import pytest

from cupyrec.ops.embedding_linear import embedding_linear, embedding_linear_backward, pays
from cupyrec.ops.relu_dropout import Dropout
from cupyrec.ops.unique_keys import unique_keys


def case(samples, fields, width, columns, whole=False):
    """Keys field after field, and the arrays of a layer; integers where sums must be exact."""
    ids = np.random.default_rng(0).integers(0, 5, (samples, fields))
    tables = np.repeat(np.arange(fields, dtype=np.uint32), samples)
    keys = unique_keys(tables, np.ascontiguousarray(ids.T).reshape(-1))
    starts = np.searchsorted(keys.tables, np.arange(fields + 1))
    inverse = keys.inverse.reshape(fields, samples)
    shapes = (len(keys.ids), width), (columns, fields * width), (samples, columns), (columns,)
    if whole:
        v, w, dy, bias = (oracle.integers(s, -4, 4, seed=i) for i, s in enumerate(shapes))
    else:
        v, w, dy, bias = (oracle.normals(s, seed=i) for i, s in enumerate(shapes))
    return (v, starts, inverse, w), bias, dy


def loops(v, inverse, w, bias, dy, relu):
    """float64, one sample and field after the other."""
    v, w, bias, dy = (np.float64(a) for a in (v, w, bias, dy))
    (fields, samples), width = inverse.shape, v.shape[1]
    y, dv, dw = np.zeros((samples, len(w))), np.zeros_like(v), np.zeros_like(w)
    for b, f in np.ndindex(samples, fields):
        u, own = inverse[f, b], slice(f * width, (f + 1) * width)
        y[b] += w[:, own] @ v[u]
    y += bias
    if relu:
        dy, y = dy * (y > 0), np.maximum(y, 0)
    for b, f in np.ndindex(samples, fields):
        u, own = inverse[f, b], slice(f * width, (f + 1) * width)
        dv[u] += w[:, own].T @ dy[b]
        dw[:, own] += np.outer(dy[b], v[u])
    return y, dv, dw, dy.sum(axis=0)


def naive(v, inverse, w, bias, dy):
    """What is fused, in float32."""
    x = v[inverse.T].reshape(len(dy), -1)
    dv = np.zeros_like(v)
    np.add.at(dv, inverse.T.reshape(-1), (dy @ w).reshape(-1, v.shape[1]))
    return x @ w.T + bias, dv, dy.T @ x, dy.sum(axis=0)


SHAPES = [(1, 1, 1, 1), (17, 3, 4, 5), (127, 26, 16, 64), (300, 2, 130, 3), (3, 64, 3, 17)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
def test_integers_are_exact(shape, relu):
    layer, bias, dy = case(*shape, whole=True)
    dropout = Dropout() if relu else None
    y = embedding_linear(*layer, bias, dropout)
    got = y, *embedding_linear_backward(dy, y, *layer, dropout)
    v, _, inverse, w = layer
    for mine, truth in zip(got, loops(v, inverse, w, bias, dy, relu), strict=True):
        oracle.check_exact(mine, truth)


@pytest.mark.parametrize("shape", SHAPES[1:])  # the first one rounds too little to tell
def test_against_loops(shape):
    layer, bias, dy = case(*shape)
    y = embedding_linear(*layer, bias)
    got = y, *embedding_linear_backward(dy, y, *layer)
    v, _, inverse, w = layer
    plain, truths = naive(v, inverse, w, bias, dy), loops(v, inverse, w, bias, dy, False)
    for mine, other, truth in zip(got, plain, truths, strict=True):
        oracle.check_error(mine, other, truth)


def test_same_bits():
    layer, bias, dy = case(2500, 7, 8, 16)
    dropout = Dropout(0.5, seed=1, step=2)

    def call():
        y = embedding_linear(*layer, bias, dropout)
        return [y, *embedding_linear_backward(dy, y, *layer, dropout)]

    oracle.check_same_bits(call)


def test_where_it_pays():
    assert pays(32, 64)
    assert pays(16, 64)
    assert not pays(16, 65)


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        (0, np.zeros((5, 3)), TypeError, "'vectors' must be float32, got float64."),
        (1, np.zeros(3, np.int64), ValueError, "'starts' must have F + 1 = 3 numbers, "
         "got shape (3,)."),
        (2, np.zeros((2, 4), np.int32), TypeError, "'inverse' must be int64, got int32."),
        (3, np.zeros((6, 7), np.float32), ValueError,
         "'weight' must have axes (H, 6), got shape (6, 7)."),
        (4, np.zeros(5, np.float32), ValueError,
         "'bias' must have H = 6 like 'weight', got shape (5,)."),
    ],
)  # fmt: skip
def test_refuses(name, value, error, text):
    given = [
        np.zeros((5, 3), np.float32), np.array([0, 2, 5]), np.zeros((2, 4), np.int64),
        np.zeros((6, 6), np.float32), np.zeros(6, np.float32),
    ]  # fmt: skip
    if name == 1:
        given[1], text = np.array([0, 5]), "'starts' must have F + 1 = 3 numbers, got shape (2,)."
    else:
        given[name] = value
    with pytest.raises(error, match=oracle.sentence(f"embedding_linear: {text}")):
        embedding_linear(*given)

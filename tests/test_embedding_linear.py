import numpy as np
import oracle
import pytest

from cupyrec.ops.embedding_linear import embedding_linear, embedding_linear_backward, pays
from cupyrec.ops.unique_keys import unique_keys


def case(samples, fields, width, columns, whole=False):
    """Keys field after field, and the arrays of a layer; integers where sums must be exact."""
    ids = np.random.default_rng(0).integers(0, 5, (samples, fields))
    tables = np.repeat(np.arange(fields, dtype=np.uint32), samples)
    keys = unique_keys(tables, np.ascontiguousarray(ids.T).reshape(-1))
    starts = np.searchsorted(keys.tables, np.arange(fields + 1))
    inverse = np.ascontiguousarray(keys.inverse.reshape(fields, samples).T)
    shapes = (len(keys.ids), width), (columns, fields * width), (samples, columns)
    if whole:
        v, w, dy = (oracle.integers(s, -4, 4, seed=i) for i, s in enumerate(shapes))
    else:
        v, w, dy = (oracle.normals(s, seed=i) for i, s in enumerate(shapes))
    return keys, (v, starts, inverse, w), dy


def loops(v, inverse, w, dy):
    """float64, one sample and field after the other."""
    v, w, dy = np.float64(v), np.float64(w), np.float64(dy)
    (samples, fields), width = inverse.shape, v.shape[1]
    y, dv, dw = np.zeros((samples, len(w))), np.zeros_like(v), np.zeros_like(w)
    for b, f in np.ndindex(samples, fields):
        u, own = inverse[b, f], slice(f * width, (f + 1) * width)
        y[b] += w[:, own] @ v[u]
        dv[u] += w[:, own].T @ dy[b]
        dw[:, own] += np.outer(dy[b], v[u])
    return y, dv, dw


def naive(v, inverse, w, dy):
    """What is fused, in float32."""
    x = v[inverse].reshape(len(inverse), -1)
    dv = np.zeros_like(v)
    np.add.at(dv, inverse.reshape(-1), (dy @ w).reshape(-1, v.shape[1]))
    return x @ w.T, dv, dy.T @ x


SHAPES = [(1, 1, 1, 1), (17, 3, 4, 5), (127, 26, 16, 64), (300, 2, 130, 3), (3, 64, 3, 17)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("whole", [True, False])
def test_against_loops(shape, whole):
    keys, (v, starts, inverse, w), dy = case(*shape, whole=whole)
    got = (
        embedding_linear(v, starts, inverse, w),
        *embedding_linear_backward(dy, v, starts, inverse, w, keys.offsets, keys.positions),
    )
    plain = naive(v, inverse, w, dy)
    for mine, other, truth in zip(got, plain, loops(v, inverse, w, dy), strict=True):
        if whole:
            oracle.check_exact(mine, truth)
        else:
            oracle.check_error(mine, other, truth)


def test_same_bits():
    keys, forward, dy = case(500, 7, 8, 16)

    def call():
        back = embedding_linear_backward(dy, *forward, keys.offsets, keys.positions)
        return [embedding_linear(*forward), *back]

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
        (2, np.zeros((4, 2), np.int32), TypeError, "'inverse' must be int64, got int32."),
        (3, np.zeros((6, 7), np.float32), ValueError,
         "'weight' must have axes (H, 6), got shape (6, 7)."),
    ],
)  # fmt: skip
def test_refuses(name, value, error, text):
    given = [
        np.zeros((5, 3), np.float32), np.array([0, 2, 5]), np.zeros((4, 2), np.int64),
        np.zeros((6, 6), np.float32),
    ]  # fmt: skip
    if name == 1:
        given[1], text = np.array([0, 5]), "'starts' must have F + 1 = 3 numbers, got shape (2,)."
    else:
        given[name] = value
    with pytest.raises(error, match=oracle.sentence(f"embedding_linear: {text}")):
        embedding_linear(*given)

import numpy as np
import oracle
import pytest

from cupyrec.ops.embedding_linear import embedding_linear, embedding_linear_backward, pays
from cupyrec.ops.relu_dropout import Dropout
from cupyrec.ops.unique_keys import unique_keys

NO_DROPOUT = Dropout()


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


def loops(v, inverse, w, bias, dy, dropout=NO_DROPOUT, linear_output=False):
    """float64, one sample and field after the other."""
    v, w, bias, dy = (np.float64(a) for a in (v, w, bias, dy))
    (fields, samples), width = inverse.shape, v.shape[1]
    y, dv, dw = np.zeros((samples, len(w))), np.zeros_like(v), np.zeros_like(w)
    for b, f in np.ndindex(samples, fields):
        u, own = inverse[f, b], slice(f * width, (f + 1) * width)
        y[b] += w[:, own] @ v[u]
    y += bias
    if not linear_output:
        y = np.maximum(y, 0) * oracle.keep(*y.shape, *dropout) / (1 - dropout.rate)
        dy = dy * (y > 0) / (1 - dropout.rate)
    for b, f in np.ndindex(samples, fields):
        u, own = inverse[f, b], slice(f * width, (f + 1) * width)
        dv[u] += w[:, own].T @ dy[b]
        dw[:, own] += np.outer(dy[b], v[u])
    return y, dv, dw, dy.sum(axis=0)


def naive(v, inverse, w, bias, dy, dropout=NO_DROPOUT, linear_output=False):
    """What is fused, in float32."""
    x = v[inverse.T].reshape(len(dy), -1)
    y = x @ w.T + bias
    if not linear_output:
        kept = oracle.keep(*y.shape, *dropout) / np.float32(1 - dropout.rate)
        y, dy = np.maximum(y, np.float32(0)) * kept, dy * (y > 0) * kept
    dv = np.zeros_like(v)
    np.add.at(dv, inverse.T.reshape(-1), (dy @ w).reshape(-1, v.shape[1]))
    return y, dv, dy.T @ x, dy.sum(axis=0)


def run(layer, bias, dy, **options):
    y = embedding_linear(*layer, bias, **options)
    return y, *embedding_linear_backward(dy, y, *layer, **options)


# The last one's samples are more than a block.
SHAPES = [
    (1, 1, 1, 1), (17, 3, 4, 5), (127, 26, 16, 64), (300, 2, 130, 3), (40, 64, 3, 17),
    (1030, 5, 3, 6),
]  # fmt: skip
OPTIONS = [
    dict(linear_output=True),
    dict(),
    dict(dropout=Dropout(0.5, seed=2**40, step=11, layer=2)),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_integers_are_exact(shape, options):
    layer, bias, dy = case(*shape, whole=True)
    v, _, inverse, w = layer
    truths = loops(v, inverse, w, bias, dy, **options)
    for mine, truth in zip(run(layer, bias, dy, **options)[:4], truths, strict=True):
        oracle.check_exact(mine, truth)


@pytest.mark.parametrize("shape", SHAPES[1:])  # the first one rounds too little to tell
@pytest.mark.parametrize("options", OPTIONS)
def test_against_loops(shape, options):
    layer, bias, dy = case(*shape)
    v, _, inverse, w = layer
    plain, truths = (f(v, inverse, w, bias, dy, **options) for f in (naive, loops))
    got = run(layer, bias, dy, **options)[:4]
    for mine, other, truth in zip(got, plain, truths, strict=True):
        oracle.check_error(mine, other, truth)


@pytest.mark.parametrize("shape", SHAPES)
def test_squares_are_those_of_the_gradient_of_vectors(shape):
    _, dvectors, _, _, squares = run(*case(*shape))
    assert squares == pytest.approx(sum(float(x) ** 2 for x in dvectors.flat), rel=1e-12)


@pytest.mark.filterwarnings("error")
def test_what_is_too_large_is_inf_in_its_samples_alone():
    (vectors, *others), bias, _ = case(17, 3, 4, 5)
    vectors[0] = 3e38
    y, hit = embedding_linear(vectors, *others, bias, linear_output=True), others[1][0] == 0
    assert np.isinf(y[hit]).any()
    assert np.isfinite(y[~hit]).all()


def test_same_bits():
    layer, bias, dy = case(2500, 7, 8, 16)
    dropout = Dropout(0.5, seed=1, step=2)

    oracle.check_same_bits(lambda: run(layer, bias, dy, dropout=dropout))


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


def test_refuses_a_rate_of_1():
    layer, bias, _ = case(2, 3, 4, 5)
    text = "embedding_linear: 'dropout.rate' must lie in [0, 1), got 1.0."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        embedding_linear(*layer, bias, dropout=Dropout(1.0))

import numpy as np
import oracle
import pytest

from cupyrec import Tensor, dot_interaction, no_grad
from cupyrec.ops.dot_interaction import dot_interaction_width
from cupyrec.testing import gradcheck

f32 = np.float32

# B, F with `dense` among them, D; the largest three never meet
SHAPES = oracle.covering(
    (0, 1, 3, 17, 127, 1025), (1, 2, 4, 7, 27, 64), (1, 3, 10, 16, 130, 1025), most=1_200_000
)
OPTIONS = [
    dict(self_interaction=False, output_concat=True, output_padding=0),
    dict(self_interaction=True, output_concat=True, output_padding=5),
    dict(self_interaction=True, output_concat=False, output_padding=0),
    dict(self_interaction=False, output_concat=False, output_padding=1),
]


def case(batch, features, width, dtype=f32):
    return (
        oracle.normals((batch, width), dtype),
        oracle.normals((batch, features - 1, width), dtype, seed=1),
    )


def run(dense, sparse, grad, **options):
    """(output, gradient of dense, gradient of sparse), as arrays."""
    dense = None if dense is None else Tensor(dense, requires_grad=True)
    sparse = Tensor(sparse, requires_grad=True)
    out = dot_interaction(dense, sparse, **options)
    out.backward(grad)
    return out.data, None if dense is None else dense.grad, sparse.grad


def truth(dense, sparse, grad, self_interaction, output_concat, output_padding):
    out = oracle.dot_interaction(dense, sparse, self_interaction, output_concat, output_padding)
    gradients = oracle.dot_interaction_gradient(
        grad, dense, sparse, self_interaction, output_concat
    )
    return out, *gradients


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integer_data_is_exact(shape):
    batch, features, width = shape
    dense = oracle.integers((batch, width), -4, 4)
    sparse = oracle.integers((batch, features - 1, width), -4, 4, seed=1)
    options = OPTIONS[(batch + features + width) % len(OPTIONS)]
    columns = dot_interaction_width(features, width, **options)
    grad = oracle.integers((batch, columns), -4, 4, seed=2)
    got, expected = (f(dense, sparse, grad, **options) for f in (run, truth))
    assert got[0].shape == (batch, columns)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == f32
        oracle.check_exact(a, b)


def test_few_enough_cases_and_all_options():
    assert len(SHAPES) <= 40
    assert {sum(shape) % 4 for shape in SHAPES} == {0, 1, 2, 3}


@pytest.mark.parametrize("features", [0, 1, 2, 3, 4, 5, 27])
@pytest.mark.parametrize("self_interaction", [False, True])
def test_without_dense(features, self_interaction):
    sparse = oracle.integers((17, features, 10), -4, 4)
    options = dict(self_interaction=self_interaction, output_concat=False, output_padding=2)
    grad = oracle.integers((17, dot_interaction_width(features, 10, **options)), -4, 4, seed=1)
    got, expected = (f(None, sparse, grad, **options) for f in (run, truth))
    oracle.check_exact(got[0], expected[0])
    oracle.check_exact(got[2], expected[2])


def test_order_of_pairs():
    """Features 1, 10, 100, 1000: a product says which pair it is."""
    x = 10.0 ** np.arange(4)[None, :, None]
    pairs = dot_interaction(x[:, 0], x[:, 1:], output_concat=False)
    np.testing.assert_array_equal(pairs, [[10, 100, 1000, 1000, 10_000, 100_000]])
    own = dot_interaction(x[:, 0], x[:, 1:], output_concat=False, self_interaction=True)
    rows = [1, 10, 100, 100, 1000, 10_000, 1000, 10_000, 100_000, 1_000_000]
    np.testing.assert_array_equal(own, [rows])


@pytest.mark.parametrize("width", [4, 16, 128, 1025])
def test_error(width):
    dense, sparse = case(127, 27, width)
    x = np.concatenate([dense[:, None], sparse], axis=1)
    options = OPTIONS[1]
    columns = dot_interaction_width(27, width, **options)
    grad = oracle.normals((127, columns), seed=2)
    rows, cols = np.tril_indices(27)
    naive = np.matmul(x, x.transpose(0, 2, 1))[:, rows, cols]
    s = np.zeros((127, 27, 27), f32)
    s[:, rows, cols] = grad[:, width : columns - 5]
    naive_dx = np.matmul(s + s.transpose(0, 2, 1), x)
    naive_dx[:, 0] += grad[:, :width]
    got, expected = (f(dense, sparse, grad, **options) for f in (run, truth))
    pairs = slice(width, columns - 5)
    oracle.check_error(got[0][:, pairs], naive, expected[0][:, pairs])
    oracle.check_error(got[1], naive_dx[:, 0], expected[1])
    oracle.check_error(got[2], naive_dx[:, 1:], expected[2])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_directional_derivative(options):
    assert gradcheck(lambda d, s: dot_interaction(d, s, **options), case(5, 6, 7, np.float64))
    if not options["output_concat"]:
        sparse = case(5, 6, 7, np.float64)[1]
        assert gradcheck(lambda s: dot_interaction(None, s, **options), [sparse])


def test_same_bits():
    dense, sparse = case(1025, 27, 16)
    grad = oracle.normals((1025, dot_interaction_width(27, 16)), seed=2)
    oracle.check_same_bits(lambda: run(dense, sparse, grad))


def test_a_sample_does_not_depend_on_the_others():
    dense, sparse = case(130, 7, 16)
    out = dot_interaction(dense, sparse)
    for i, j in [(0, 1), (63, 65), (100, 130)]:
        np.testing.assert_array_equal(dot_interaction(dense[i:j], sparse[i:j]), out[i:j])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_reach_every_product_of_their_feature(value):
    dense, sparse = case(3, 5, 10)
    sparse[1, 2, 4] = value  # feature 3 of sample 1
    pairs = dot_interaction(dense, sparse, output_concat=False)
    rows, cols = np.tril_indices(5, -1)
    touched = (rows == 3) | (cols == 3)
    np.testing.assert_array_equal(np.isfinite(pairs[1]), ~touched)
    assert np.isfinite(pairs[[0, 2]]).all()


def test_nan_gradient_reaches_both_features_of_its_pair():
    dense, sparse = case(3, 5, 10)
    grad = np.zeros((3, 20), f32)
    grad[1, 10 + 2] = np.nan  # pair (2, 1)
    _, ddense, dsparse = run(dense, sparse, grad)
    assert np.isfinite(ddense).all()
    np.testing.assert_array_equal(
        np.isnan(dsparse).all(axis=2), [[False] * 4, [True, True, False, False], [False] * 4]
    )


def test_gradient_of_the_padding_is_ignored():
    dense, sparse = case(3, 4, 10)
    grad = np.zeros((3, 16 + 2), f32)
    grad[:, 16:] = np.nan
    _, ddense, dsparse = run(dense, sparse, grad, output_padding=2)
    assert not ddense.any()
    assert not dsparse.any()


def test_arrays_give_an_array_and_tensors_a_tensor():
    dense, sparse = case(3, 4, 10)
    out = dot_interaction(dense, sparse)
    assert isinstance(out, np.ndarray)
    mixed = dot_interaction(dense, Tensor(sparse, requires_grad=True))
    assert mixed.requires_grad
    np.testing.assert_array_equal(mixed.data, out)
    assert not dot_interaction(Tensor(dense), sparse).requires_grad
    with no_grad():
        assert not dot_interaction(dense, Tensor(sparse, requires_grad=True)).requires_grad


def test_views_give_what_copies_give():
    dense, sparse = case(17, 5, 10)
    grad = oracle.normals((17, 20), seed=2)
    views = np.asfortranarray(dense), np.asfortranarray(sparse), np.asfortranarray(grad)
    for a, b in zip(run(*views), run(dense, sparse, grad), strict=True):
        np.testing.assert_array_equal(a, b)
    row = np.broadcast_to(sparse[:1], sparse.shape)
    np.testing.assert_array_equal(dot_interaction(dense, row), dot_interaction(dense, row.copy()))


@pytest.mark.parametrize(
    ("features", "width", "options", "columns"),
    [
        (27, 128, {}, 479),
        (27, 128, {"output_padding": 1}, 480),
        (27, 128, {"self_interaction": True}, 506),
        (27, 128, {"output_concat": False}, 351),
        (1, 16, {}, 16),
        (0, 16, {"output_concat": False}, 0),
    ],
)
def test_width(features, width, options, columns):
    assert dot_interaction_width(features, width, **options) == columns


@pytest.mark.parametrize(
    ("dense", "sparse", "options", "error", "text"),
    [
        (
            np.ones((4, 16), f32), np.ones((4, 3, 8), f32), {}, ValueError,
            "'sparse' must have D = 16 like 'dense', got shape (4, 3, 8).",
        ),
        (
            np.ones((4, 16), f32), np.ones((5, 3, 16), f32), {}, ValueError,
            "'sparse' must have B = 4 like 'dense', got shape (5, 3, 16).",
        ),
        (
            np.ones(16, f32), np.ones((4, 3, 16), f32), {}, ValueError,
            "'dense' must have axes (B, D), got shape (16,).",
        ),
        (
            None, np.ones((4, 16), f32), {"output_concat": False}, ValueError,
            "'sparse' must have axes (B, F, D), got shape (4, 16).",
        ),
        (
            None, np.ones((4, 3, 16), f32), {}, ValueError,
            "'output_concat' needs 'dense', got None.",
        ),
        (
            np.ones((4, 0), f32), np.ones((4, 3, 0), f32), {}, ValueError,
            "D must be at least 1, got shape (4, 3, 0).",
        ),
        (
            np.ones((4, 16), f32), np.ones((4, 3, 16), f32), {"output_padding": -1}, ValueError,
            "'output_padding' must be at least 0, got -1.",
        ),
        (
            np.ones((4, 16), f32), np.ones((4, 3, 16), f32), {"output_padding": 1.5}, TypeError,
            "'output_padding' must be an integer, got 1.5.",
        ),
        (
            np.ones((4, 16)), np.ones((4, 3, 16), f32), {}, TypeError,
            "'dense' must be float32, got float64.",
        ),
        (
            np.ones((4, 16), f32), np.ones((4, 3, 16), int), {}, TypeError,
            "'sparse' must be float32 or float64 or float16 or bfloat16, got int64.",
        ),
        (
            np.ones((4, 16), f32), None, {}, TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got NoneType.",
        ),
        (
            [[1.0]], np.ones((1, 1, 1), f32), {}, TypeError,
            "arguments must be arrays of NumPy, CuPy or cupyrec.sim, got list.",
        ),
    ],
)  # fmt: skip
def test_refuses(dense, sparse, options, error, text):
    with pytest.raises(error, match=oracle.sentence(f"dot_interaction: {text}")):
        dot_interaction(dense, sparse, **options)

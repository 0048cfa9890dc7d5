import numpy as np
import oracle
import pytest

from cupyrec.ops import thin_matmul as module
from cupyrec.ops.thin_matmul import thin_matmul

# Columns by tiles and not, whole tiles of rows and not, no term, more terms than are taken at once.
SHAPES = [(1, 1, 16), (3, 0, 16), (0, 3, 16), (17, 127, 32), (127, 1025, 48), (5, 17, 3)]


def factors(n, k, m, transposed, make):
    a, b = make((k, n) if transposed else (n, k)), make((k, 3 * m), seed=1)[:, m : 2 * m]
    return a.T if transposed else a, b


def product(a, b):
    out = np.full((len(a), 3 * b.shape[1]), np.nan, np.float32)
    thin_matmul(a, b, out[:, b.shape[1] : 2 * b.shape[1]])
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact_and_nothing_else_is_written(shape, transposed):
    a, b = factors(*shape, transposed, lambda s, seed=0: oracle.integers(s, -4, 4, seed=seed))
    before, got, behind = np.split(product(a, b), 3, axis=1)
    oracle.check_exact(got, np.einsum("nk,km->nm", np.float64(a), np.float64(b)))
    assert np.isnan([before, behind]).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_against_float64(transposed):
    a, b = factors(127, 1025, 48, transposed, oracle.normals)
    truth = np.einsum("nk,km->nm", np.float64(a), np.float64(b))
    oracle.check_error(product(a, b)[:, 48:96], np.einsum("nk,km->nm", a, b), truth)


def test_same_bits_wherever_a_row_is():
    a, b = factors(127, 1025, 48, False, oracle.normals)
    oracle.check_same_bits(lambda: product(a, b))
    assert np.array_equal(product(a, b)[126:, 48:96], product(a[126:], b)[:, 48:96])


@pytest.mark.parametrize("columns", [1, 3, 16, 100])
def test_few_rows_have_the_same_bits_wherever_they_are(columns, monkeypatch):
    """Whatever the BLAS, and whatever the number of columns."""
    monkeypatch.setattr(module, "FEW_ROWS", 512)
    a, b = factors(64, 351, columns, False, oracle.normals)
    whole = product(a, b)[:, columns : 2 * columns]
    truth = np.einsum("nk,km->nm", np.float64(a), np.float64(b))
    oracle.check_error(whole, np.einsum("nk,km->nm", a, b), truth)
    order = np.random.default_rng(1).permutation(64)
    for rows in (order, order[:1], order[:37]):
        got = product(a[rows], b)
        assert np.array_equal(got[:, columns : 2 * columns], whole[rows])
        assert np.isnan(np.delete(got, slice(columns, 2 * columns), axis=1)).all()


def test_inf_and_nan_stay_in_their_rows():
    a, b = factors(17, 5, 16, False, oracle.normals)
    a[3, 1], a[16, 2] = np.inf, np.nan
    finite = np.isfinite(product(a, b)[:, 16:32]).all(axis=1)
    assert np.flatnonzero(~finite).tolist() == [3, 16]

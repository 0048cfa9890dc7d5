import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.ops.halves import in_float32, value_macros


def add(a, b, factor, total, product):
    assert {x.dtype for x in (a, b, total, product)} == {np.dtype(np.float32)}
    total[...], product[...] = a + b, factor * a * b


@pytest.mark.parametrize("dtype", arrays.HALVES, ids=str)
def test_results_are_rounded_once(dtype):
    """Those of float32 are not, and what is too large is infinite without a warning."""
    a, b = np.array([1.0, 60000.0], dtype), np.array([0.001, 60000.0], np.float32)
    total, product = np.empty(2, np.float32), np.empty(2, dtype)
    in_float32(add, [a, b], [3], [total, product])
    np.testing.assert_array_equal(total, a.astype(np.float32) + b)
    with np.errstate(over="ignore"):
        expected = (np.float32(3) * a.astype(np.float32) * b).astype(dtype)
    np.testing.assert_array_equal(product, expected)


def test_what_kernels_get():
    for i, dtype in enumerate(arrays.HALVES):
        assert value_macros(dtype) == {"value_t": "uint16_t", "BRAIN": i}
    assert value_macros(np.dtype(np.float32)) == {"value_t": "float", "BRAIN": 0}

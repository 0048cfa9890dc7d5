import numpy as np
import oracle
import pytest

from cupyrec import arrays
from cupyrec.ops.reorder import by_field, repeat, take


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("samples", [0, 1, 63, 65, 1025, 2049])
def test_by_field(device, samples):
    xp = arrays.module(device)
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (samples, 3))
    copy, turned, wide = (
        arrays.copy_to(xp, a) for a in (ids, np.ascontiguousarray(ids.T), np.repeat(ids, 2, axis=1))
    )
    for view in (copy, turned.T, wide[:, ::2]):
        np.testing.assert_array_equal(arrays.to_host(by_field(view)), ids.T.reshape(-1))


def test_read_only_arrays():
    ids = np.arange(2049 * 26).reshape(2049, 26)
    ids.flags.writeable = False
    np.testing.assert_array_equal(by_field(ids), ids.T.reshape(-1))
    np.testing.assert_array_equal(take(ids[:, 1], ids[:70, 0]), ids[ids[:70, 0], 1])


def test_by_field_takes_two_axes():
    text = "by_field: 'ids' must have axes (B, F), got shape (3,)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        by_field(np.zeros(3, np.int64))


@pytest.mark.parametrize("times", [0, 1, 100_000])
def test_repeat(times):
    x = np.arange(12, dtype=np.uint32)[::3]
    np.testing.assert_array_equal(repeat(x, times), np.repeat(x, times))
    assert repeat(x, times).dtype == x.dtype


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("n", [0, 1, 100_000])
def test_take(device, n):
    xp, generator = arrays.module(device), np.random.default_rng(0)
    index = generator.integers(0, 50, n)
    for x in (np.arange(50) * 2**40, np.arange(100, dtype=np.uint32)[::2]):
        got = take(*(arrays.copy_to(xp, a) for a in (x, index)))
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(arrays.to_host(got), x[index])

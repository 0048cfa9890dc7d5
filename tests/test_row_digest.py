import numpy as np
import oracle
import pytest

from cupyrec.ops.row_digest import row_digest


def some(n, width, seed=0):
    """Rows that repeat neither table nor id with one another."""
    rng = np.random.default_rng(seed)
    tables = rng.integers(0, 2**32, n, np.uint32)
    ids = rng.integers(-(2**63), 2**63 - 1, n)
    return tables, ids, rng.integers(0, 2**32, (n, width), np.uint32)


@pytest.mark.parametrize("n", [0, 1, 3, 17, 127, 1025])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 10])
def test_every_bit_is_what_the_formula_says(n, width):
    got = row_digest(*some(n, width))
    assert (got.dtype, got.shape) == (np.uint64, (2,))
    assert got.tolist() == oracle.row_digest(*some(n, width))


@pytest.mark.parametrize("n", [2, 17, 1025])
def test_order_does_not_matter_and_blocks_add_up(n):
    tables, ids, values = some(n, 7)
    whole, order = row_digest(tables, ids, values), np.random.default_rng(1).permutation(n)
    tables, ids, values = tables[order], ids[order], values[order]
    np.testing.assert_array_equal(row_digest(tables, ids, values), whole)
    borders = np.array([0, 0, 1, n // 2, n])
    blocks = [
        row_digest(tables[i:j], ids[i:j], values[i:j])
        for i, j in zip(borders, borders[1:], strict=False)
    ]
    np.testing.assert_array_equal(sum(blocks), whole)


@pytest.mark.parametrize("width", [1, 4, 5])
def test_every_bit_matters_in_both_lanes(width):
    tables, ids, values = some(3, width)
    seen = [row_digest(tables, ids, values)]
    for array in (tables, ids.view(np.uint64), values):
        for at in np.ndindex(array.shape):
            for bit in range(8 * array.itemsize):
                array[at] ^= array.dtype.type(1 << bit)
                seen.append(row_digest(tables, ids, values))
                array[at] ^= array.dtype.type(1 << bit)
    assert len(seen) == 1 + 3 * (32 + 64 + 32 * width)
    for lane in np.transpose(seen):
        assert len(set(lane.tolist())) == len(seen)


def test_half_of_the_bits_turn():
    """Of 64, with each bit of a row that turns; 22 are 5.5 standard deviations."""
    tables, ids, values = some(1, 4)
    before, turned = row_digest(tables, ids, values), []
    for at, bit in np.ndindex(4, 32):
        values[0, at] ^= np.uint32(1 << bit)
        turned += [int(x).bit_count() for x in before ^ row_digest(tables, ids, values)]
        values[0, at] ^= np.uint32(1 << bit)
    assert abs(np.mean(turned) - 32) < 1
    assert 10 <= min(turned)
    assert max(turned) <= 54


def test_what_a_xor_or_a_sum_of_words_would_not_tell():
    tables, ids, values = some(4, 6)
    whole = row_digest(tables, ids, values)
    twice = row_digest(*(np.concatenate([a, a]) for a in (tables, ids, values)))
    others = [
        twice,
        row_digest(*(np.concatenate([a, a[:1], a[:1]]) for a in (tables, ids, values))),
        row_digest(tables, ids, values[:, [1, 0, 2, 3, 4, 5]]),  # within a pair of words
        row_digest(tables, ids, values[:, [0, 1, 4, 5, 2, 3]]),  # of pairs
        row_digest(tables, ids, values[[1, 0, 2, 3]]),  # vectors of other keys
        row_digest(tables[[1, 0, 2, 3]], ids, values),
        row_digest(tables, ids, np.concatenate([values, np.zeros((4, 1), np.uint32)], axis=1)),
        row_digest(tables, ids, np.concatenate([values, np.zeros((4, 2), np.uint32)], axis=1)),
        np.zeros(2, np.uint64),
    ]
    for lane in range(2):
        assert len({int(whole[lane]), *(int(other[lane]) for other in others)}) == 10
    np.testing.assert_array_equal(twice, whole + whole)


def test_floats_count_by_their_bits():
    tables, ids, values = some(5, 4)
    values[0] = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0x7F800001])
    expected = row_digest(tables, ids, values)
    np.testing.assert_array_equal(row_digest(tables, ids, values.view(np.float32)), expected)
    zeros = np.zeros((2, 1, 1), np.float32)
    zeros[1] = -0.0
    key = tables[:1], ids[:1]
    assert (row_digest(*key, zeros[0]) != row_digest(*key, zeros[1])).all()


def test_views():
    tables, ids, values = some(10, 8)
    expected = row_digest(tables[::2], ids[::2].copy(), values[::2, 1:6].copy())
    np.testing.assert_array_equal(row_digest(tables[::2], ids[::2], values[::2, 1:6]), expected)
    np.testing.assert_array_equal(
        row_digest(tables, ids, np.asfortranarray(values)), row_digest(tables, ids, values)
    )


def test_same_bits():
    oracle.check_same_bits(lambda: [row_digest(*some(5000, 9))])


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(tables=np.zeros(3, int)), TypeError, "'tables' must be uint32, got int64."),
        (dict(ids=np.zeros(3)), TypeError, "'ids' must be int64, got float64."),
        (dict(ids=np.zeros(2, int)), ValueError,
         "'ids' must have N = 3 like 'tables', got shape (2,)."),
        (dict(values=np.zeros((3, 2))), TypeError,
         "'values' must be uint32 or float32, got float64."),
        (dict(values=np.zeros((2, 2), np.float32)), ValueError,
         "'values' must have N = 3 like 'ids', got shape (2, 2)."),
        (dict(values=np.zeros(3, np.float32)), ValueError,
         "'values' must have axes (N, W), got shape (3,)."),
    ],
)  # fmt: skip
def test_refuses(wrong, error, text):
    right = dict(zip(("tables", "ids", "values"), some(3, 2), strict=True))
    with pytest.raises(error, match=oracle.sentence(f"row_digest: {text}")):
        row_digest(**right | wrong)


def test_refuses_arrays_of_devices(sim):
    device = [sim.asarray(a) for a in some(3, 2)]
    text = "row_digest: arrays must be on the host, got ndarray."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        row_digest(*device)

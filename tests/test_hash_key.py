import math

import numpy as np
import oracle
import pytest
from hypothesis import given
from test_hash_table import HIGH, REFUSED, adversarial_ids, table_numbers

from cupyrec.ops.hash_key import check_keys, hash_key


@given(table_numbers, adversarial_ids)
def test_hash_key_in_pythons_integers(table, key):
    assert int(hash_key(np.uint32(table), np.int64(key))) == oracle.hash_key(table, key)


@pytest.mark.parametrize("shift", [0, 1, 8, 16, 32, 40, 47])
@pytest.mark.parametrize("bits", [slice(0, 10), slice(22, 32), slice(46, 56), slice(54, 64)])
def test_hash_spreads_regular_ids(shift, bits):
    """Chi-square of 1,024 cells: slots take the high bits, tags of devices the low ones."""
    n, cells = 1 << 15, 1 << 10
    hashes = [int(hash_key(np.uint32(1), np.int64(i << shift))) for i in range(n)]
    counts = np.bincount([h >> bits.start & (cells - 1) for h in hashes], minlength=cells)
    chi_square = ((counts - n / cells) ** 2 / (n / cells)).sum()
    assert abs(chi_square - (cells - 1)) < 6 * math.sqrt(2 * (cells - 1))


def test_hash_spreads_one_id_over_tables():
    counts = np.bincount([int(hash_key(np.uint32(t), np.int64(0))) & 255 for t in range(1 << 13)])
    chi_square = ((counts - 32) ** 2 / 32).sum()
    assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)


def test_each_bit_of_a_key_changes_half_of_the_hash():
    flips = []
    for bit in range(64):
        for key in range(32):
            a, b = (hash_key(np.uint32(0), np.int64(k)) for k in (key, (key ^ 1 << bit) - 2**64
                    if (key ^ 1 << bit) > HIGH else key ^ 1 << bit))  # fmt: skip
            flips.append((int(a) ^ int(b)).bit_count())
    assert abs(np.mean(flips) - 32) < 0.5
    assert min(flips) > 10


@pytest.mark.parametrize(("tables", "ids", "error", "text"), REFUSED)
def test_refuses(tables, ids, error, text):
    with pytest.raises(error, match=oracle.sentence(f"f: {text}")):
        check_keys("f", tables, ids)

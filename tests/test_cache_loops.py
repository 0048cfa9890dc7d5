"""What sets decide by; what the loops do is tested by test_cache_sets.py."""

import math

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hash_table import adversarial_ids, table_numbers

from cupyrec.ops import cache_loops
from cupyrec.ops.partition import owners


def place(table, key, sets):
    return [int(x) for x in cache_loops._place(np.uint32(table), np.int64(key), np.uint64(sets))]


@given(table_numbers, adversarial_ids, st.integers(1, 2**32 - 1))
def test_place_in_pythons_integers(table, key, sets):
    h = oracle.hash_key(table, key) * 0xD1342543DE82EF95 % 2**64
    assert place(table, key, sets) == [(h >> 32) * sets >> 32, h % 2**32 >> 16 or 1]


@pytest.mark.parametrize("shift", [0, 16, 40])
@pytest.mark.parametrize("kept", [0, 29, 61, "owner"])
def test_keys_spread_over_the_sets(shift, kept):
    """Chi-square of 256 sets and of 256 tags, of keys of whose other hash three bits agree."""
    ids = np.arange(1 << 14) << shift
    if kept == "owner":
        ids = ids[owners(np.ones(len(ids), np.uint32), ids, 8) == 3]
    else:
        ids = [key for key in ids.tolist() if oracle.hash_key(1, key) >> kept & 7 == 3]
    places = np.array([place(1, key, 256) for key in ids])
    for found in (places[:, 0], places[:, 1] >> 8, places[:, 1] & 255):
        counts, mean = np.bincount(found, minlength=256), len(ids) / 256
        chi_square = ((counts - mean) ** 2 / mean).sum()
        assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_score_in_pythons_integers(used, count):
    record = np.zeros(1, cache_loops._RECORD)
    record["used"], record["count"] = used, count
    whole = max(1, count).bit_length() - 1
    sixteenths = 16 * whole + 16 * max(1, count) // 2**whole - 16
    score = 16 * used + cache_loops.HALF_LIFE * sixteenths
    assert cache_loops._score(record[0]) == score

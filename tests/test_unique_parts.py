"""Unique keys on the CPU, part by part."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies
from test_hash_table import arrays, keys
from test_unique_keys import check_unique

from cupyrec.ops.hash_key import hash_key
from cupyrec.ops.unique_parts import _borders


@given(keys, strategies.integers(1, 20))
def test_a_batch_of_several_parts(batch, size):
    with (
        mock.patch("cupyrec.ops.unique_parts._PART", size),
        mock.patch("cupyrec.cpu.num_threads", return_value=5),
    ):
        check_unique(*arrays(batch))


@given(keys, strategies.integers(1, 20))
def test_tables_that_come_one_after_another(batch, least):
    tables, ids = arrays(sorted(batch, key=lambda key: key[0]))
    with mock.patch("cupyrec.ops.unique_parts._borders", borders_of(least)):
        check_unique(tables, ids)


def borders_of(least):
    return lambda tables, _: _borders(tables, least)


@pytest.mark.parametrize("different", [300, 11_000, 16_000])
def test_slots_of_parts_apart_grow(different):
    """A part is 20,000 keys of one table: there are three."""
    ids = np.random.default_rng(different).permutation(60_000) % different * 2**44
    check_unique(np.repeat(np.array([0, 3, 4], np.uint32), 20_000), ids)


def test_the_key_whose_hash_is_0():
    """It must not be taken for what an empty slot holds."""
    none = -3996381627990649955
    assert hash_key(np.uint32(0), none) == 0
    check_unique(np.zeros(4, np.uint32), np.array([none, 5, none, none]))
    n = 40_000
    tables = np.repeat(np.arange(2, dtype=np.uint32), n)
    check_unique(tables, np.where(np.arange(2 * n) % 7, np.arange(2 * n) % 900, none))


def test_borders():
    """Parts of 3 keys and more, which end where tables do."""
    tables = np.array([0, 0, 1, 1, 1, 1, 1, 7, 8, 9, 9], np.uint32)
    assert _borders(tables, 3).tolist() == [0, 7, 11]
    assert _borders(tables, 20).tolist() == [0, 11]
    assert _borders(tables[::-1].copy(), 3).tolist() == [0, 11]


@pytest.mark.parametrize("different", [300, 11_000, 16_000])
def test_slots_grow(different):
    """Of the first of two parts, which gets the keys of the second."""
    ids = np.random.default_rng(different).permutation(16_000) % different * 2**44
    with (
        mock.patch("cupyrec.ops.unique_parts._PART", 8000),
        mock.patch("cupyrec.cpu.num_threads", return_value=2),
    ):
        check_unique(np.zeros(16_000, np.uint32), ids)

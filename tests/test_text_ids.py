"""Strings as ids: those that a text file's fields get."""

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyrec.data import fields
from cupyrec.data.text_ids import text_ids

MISSING = -(2**63)


def fnv1a(text: bytes) -> int:
    value = 14695981039346656037
    for byte in text:
        value = (value ^ byte) * 1099511628211 % 2**64
    return (value + 2**63) % 2**64 - 2**63


def expected(text: bytes | None, encoding: int) -> int | None:
    """What the documentation says, or None if the text is malformed."""
    if not text:
        return MISSING
    if encoding == fields.STRING:
        return fnv1a(text)
    if encoding == fields.HEX:
        good = re.fullmatch(rb"[0-9a-fA-F]{1,16}", text)
        return (int(text, 16) + 2**63) % 2**64 - 2**63 if good else None
    good = re.fullmatch(rb"[+-]?[0-9]+", text) and -(2**63) <= int(text) < 2**63
    return int(text) if good else None


def run(texts: list[bytes | None], encoding: int, first: int = 0) -> tuple[int, list[int]]:
    array = pa.array([None, b"zz"] * first + texts, pa.binary())[2 * first :]
    bits, offsets, data = array.buffers()
    offsets = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    data = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    bits = np.empty(0, np.uint8) if bits is None else np.frombuffer(bits, np.uint8)
    ids = np.zeros(len(texts), np.int64)
    return text_ids(data, offsets, bits, array.offset, encoding, ids), ids.tolist()


@pytest.mark.parametrize(("encoding", "text", "value"), [
    (fields.STRING, b"a", 0xAF63DC4C8601EC8C - 2**64),  # the published test vectors
    (fields.STRING, b"foobar", 0x85944171F73967E8 - 2**64),
    (fields.HEX, b"DEADbeef", 0xDEADBEEF),
    (fields.HEX, b"ffffffffffffffff", -1),
    (fields.HEX, b"10000000000000000", None),
    (fields.HEX, b"0x1", None),
    (fields.INTEGER, b"9223372036854775807", 2**63 - 1),
    (fields.INTEGER, b"9223372036854775808", None),
    (fields.INTEGER, b"-9223372036854775808", MISSING),
    (fields.INTEGER, b"-9223372036854775809", None),
    (fields.INTEGER, b"18446744073709551616", None),
    (fields.INTEGER, b"+007", 7),
    (fields.INTEGER, b"-", None),
    (fields.INTEGER, b"1/", None),
    (fields.INTEGER, b"1:", None),
])  # fmt: skip
def test_ids(encoding: int, text: bytes, value: int | None) -> None:
    bad, ids = run([text], encoding)
    assert (bad, ids) == ((0, [0]) if value is None else (-1, [value]))


TEXT = st.one_of(st.none(), st.from_regex(rb"[+-]?[0-9a-fA-F]{0,20}", fullmatch=True), st.binary())


@given(st.lists(TEXT), st.sampled_from([fields.HEX, fields.INTEGER, fields.STRING]),
       st.integers(0, 5))  # fmt: skip
def test_columns_are_read_up_to_the_first_bad_string(texts, encoding, first) -> None:
    truth = [expected(text, encoding) for text in texts]
    end = truth.index(None) if None in truth else len(truth)
    bad, ids = run(texts, encoding, first)
    assert bad == (end if end < len(truth) else -1)
    assert ids[:end] == truth[:end]

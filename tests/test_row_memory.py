import numpy as np
import oracle
import pytest
from test_embedding_rows import chunked, keys

from cupyrec import cpu
from cupyrec.ops.row_memory import (
    INT8,
    RowMemory,
    check_room,
    check_rounding,
    read_vector,
    rounding_block,
    row_addresses,
    row_at,
    row_of,
    scratch,
    state_at,
    vector_words,
    write_vector,
)
from cupyrec.ops.stochastic_rounding import BFLOAT16, FLOAT16, FLOAT32

EVERY_VALUE = pytest.mark.parametrize("value", [FLOAT32, FLOAT16, BFLOAT16])


@cpu.exact_loop
def _double(memory, addresses, width, scratch, rounding):
    """A loop as updates are: vectors are doubled, and added to the state."""
    for u in range(addresses.size):
        words = row_of(memory, addresses, u)
        w, s = read_vector(memory, words, width, scratch), state_at(memory, words, width)
        for d in range(width):
            w[d] *= 2
            s[d] += w[d]
        write_vector(memory, words, w, rounding, u)


@EVERY_VALUE
@pytest.mark.parametrize("width", [1, 4, 5, 130])
def test_a_loop_reads_and_writes(width, value):
    begin = vector_words(width, value)
    rows = np.full((7, (begin + width + 4) // 4 * 4), 9, np.float32)
    vectors = oracle.integers((7, width), -99, 99)  # exact in all formats
    place = {FLOAT32: rows, FLOAT16: rows.view(np.float16), BFLOAT16: rows.view(np.uint16)}[value]
    place[:, :width] = vectors if value != BFLOAT16 else vectors.view(np.uint32) >> 16
    memory, chunks = chunked(rows, 1, value)
    touched = np.array([6, 1, 2, 5, 0, 3])
    rounding = None if value == FLOAT32 else rounding_block(keys(6), 0, 6)
    _double(memory, row_addresses(memory, touched), width, scratch(memory, width), rounding)
    rows[touched, begin : begin + width] += 2 * vectors[touched]
    doubled = 2 * vectors[touched]
    place[touched, :width] = doubled if value != BFLOAT16 else doubled.view(np.uint32) >> 16
    assert np.concatenate(chunks)[:7].tobytes() == rows.tobytes()


def test_words_of_a_vector():
    assert [vector_words(d) for d in (1, 2, 3)] == [1, 2, 3]
    for value in (FLOAT16, BFLOAT16):
        assert [vector_words(d, value) for d in (1, 2, 3, 4096)] == [1, 1, 2, 2048]
    assert [vector_words(d, INT8) for d in (1, 4, 5, 4096)] == [2, 2, 3, 1025]


def test_row_at_is_a_view_of_the_whole_row():
    rows = oracle.integers((5, 4), 0, 9)
    memory, chunks = chunked(rows, 1)
    row = row_at(memory, 3)
    np.testing.assert_array_equal(row, rows[3])
    row[2] = 77
    assert chunks[1][1, 2] == 77


def test_vectors_of_float32_are_not_copied():
    memory, _ = chunked(oracle.integers((5, 8), 0, 9), 1)
    words = row_at(memory, 3)
    vector = read_vector(memory, words, 3, scratch(memory, 3))
    assert (vector.ctypes.data, vector.size) == (words.ctypes.data, 3)


ROOMY = RowMemory(np.empty(0, np.uint64), 0, 8)


@pytest.mark.parametrize(
    ("value", "width", "state"),
    [(FLOAT32, 4, 5), (FLOAT16, 9, 4), (BFLOAT16, 17, 0), (INT8, 17, 3)],
)
def test_room_is_needed(value, width, state):
    memory = ROOMY._replace(value=value)
    check_room("f", memory, "g", np.empty((2, width - 1), np.float32), state)
    text = f"f: rows must have 9 words for 'g' (2, {width}) and the state, got a stride of 8."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        check_room("f", memory, "g", np.empty((2, width), np.float32), state)


@pytest.mark.parametrize(
    ("value", "rounding", "error", "text"),
    [
        (FLOAT16, None, ValueError, "'rounding' must be given for rows of 16 bits, got None."),
        (FLOAT32, keys(2), ValueError,
         "'rounding' must be None for rows of float32, got one of step 3."),
        (FLOAT16, keys(2)._replace(tables=np.zeros(2, int)), TypeError,
         "'rounding.tables' must be uint32, got int64."),
        (FLOAT16, keys(2)._replace(ids=np.zeros(2)), TypeError,
         "'rounding.ids' must be int64, got float64."),
        (BFLOAT16, keys(3), ValueError,
         "'rounding.tables' must have shape (2,), a key a row, got (3,)."),
        (BFLOAT16, keys(2)._replace(ids=np.zeros((2, 1), int)), ValueError,
         "'rounding.ids' must have shape (2,), a key a row, got (2, 1)."),
        (INT8, keys(2), ValueError,
         "'rounding' must be None for rows of int8, got one of step 3."),
        (BFLOAT16, keys(2)._replace(seed=-1), ValueError,
         "'seed' must lie in [0, 2**64), got -1."),
        (BFLOAT16, keys(2)._replace(step=2**32), ValueError,
         "'step' must lie in [0, 2**32), got 4294967296."),
    ],
)  # fmt: skip
def test_rounding_is_needed_just_for_16_bits(value, rounding, error, text):
    with pytest.raises(error, match=oracle.sentence(f"f: {text}")):
        check_rounding("f", ROOMY._replace(value=value), rounding, 2)


def test_rounding_that_fits():
    assert check_rounding("f", ROOMY, None, 2) == ()
    assert check_rounding("f", ROOMY._replace(value=INT8), None, 2) == ()
    assert len(check_rounding("f", ROOMY._replace(value=FLOAT16), keys(2), 2)) == 2

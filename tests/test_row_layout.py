import numpy as np
import pytest
from oracle import sentence

from cupyrec import arrays
from cupyrec.embedding import Rows, StatePart
from cupyrec.embedding.row_layout import RowLayout, lines_as_memory
from cupyrec.ops.embedding_rows import BFLOAT16, FLOAT16, FLOAT32, INT8
from cupyrec.ops.move_rows import move_rows

STATE = StatePart("sum", 3, 0.5), StatePart("last", 1, 7, np.int32)
KEYS = np.zeros(5, np.uint32), np.arange(5)
VECTORS = np.arange(15, dtype=np.float32).reshape(5, 3) / 8


@pytest.mark.parametrize(
    ("width", "value", "words", "stride"),
    [
        (3, FLOAT32, 7, 8),
        (3, FLOAT16, 6, 8),
        (4, BFLOAT16, 6, 8),
        (5, FLOAT32, 9, 12),
        (5, INT8, 7, 8),
    ],
)
def test_words_and_stride(width, value, words, stride):
    layout = RowLayout(width, value, STATE)
    assert (layout.words, layout.stride) == (words, stride)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("value", [FLOAT32, FLOAT16, BFLOAT16])
def test_what_is_written_is_taken_apart_again(device, value):
    xp, layout = arrays.module(device), RowLayout(3, value, STATE)
    lines = xp.zeros((5, layout.stride), np.float32)
    given = {"sum": arrays.copy_to(xp, VECTORS * 2)}
    keys = [arrays.copy_to(xp, key) for key in KEYS]
    memory = lines_as_memory(lines, value)
    layout.write(memory, 0, *keys, arrays.copy_to(xp, VECTORS), given)
    vectors, states = layout.taken_apart(lines)
    np.testing.assert_array_equal(arrays.to_host(vectors), VECTORS)  # eighths: 16 bits hold them
    np.testing.assert_array_equal(arrays.to_host(states["sum"]), VECTORS * 2)
    np.testing.assert_array_equal(arrays.to_host(states["last"]), np.full((5, 1), 7, np.int32))
    assert (arrays.to_host(lines)[:, layout.words :] == 0).all()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_every_line_is_a_row(count):
    lines = np.arange(count * 4, dtype=np.float32).reshape(count, 4)
    before, memory = lines.copy(), lines_as_memory(lines)
    if count > 1:
        move_rows(memory, np.array([count - 1]), np.array([0]))
    np.testing.assert_array_equal(lines[0], before[count - 1])


@pytest.mark.parametrize(
    ("states", "error", "text"),
    [
        ({"sum": np.zeros((5, 2), np.float32)}, ValueError,
         sentence("import_rows: 'sum' must have axes (N, 3), got shape (5, 2).")),
        ({"last": np.zeros((5, 1), np.float32)}, TypeError,
         sentence("import_rows: 'last' must be int32, got float32.")),
    ],
)  # fmt: skip
def test_rows_of_another_layout_are_refused(states, error, text):
    with pytest.raises(error, match=text):
        RowLayout(3, FLOAT32, STATE).received(Rows(*KEYS, VECTORS, states), np)

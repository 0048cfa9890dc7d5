import numpy as np
import pytest
from oracle import sentence

from cupyrec.ops.payload_rows import copy_in, copy_out
from cupyrec.ops.row_memory import RowMemory

STRIDE = 8


def memory_of(chunks):
    return RowMemory(np.array([c.ctypes.data for c in chunks], np.uint64), k=2, stride=STRIDE)


def chunks_of(count):
    words = np.arange(count * 4 * STRIDE, dtype=np.uint32) | 0x7FC00000  # NaNs, which stay as such
    return list(words.reshape(count, 4, STRIDE))


@pytest.mark.parametrize("words", [4, 5, 8])
@pytest.mark.parametrize("count", [0, 1, 3, 9000])
def test_lines_and_rows(words, count):
    chunks, rows = chunks_of(3000), np.random.default_rng(0).permutation(12_000)[:count]
    lines = np.empty((count, words), np.uint32)
    copy_out(memory_of(chunks), rows, lines)
    every = np.concatenate(chunks)
    np.testing.assert_array_equal(lines, every[rows, :words])
    copy_in(memory_of(chunks), rows, lines ^ 1)
    every[rows, :words] ^= 1
    np.testing.assert_array_equal(np.concatenate(chunks), every)


@pytest.mark.parametrize("copy", [copy_in, copy_out])
def test_what_is_refused(copy):
    memory, rows, lines = (
        memory_of(chunks_of(1)),
        np.zeros(1, np.int64),
        np.zeros((1, 9), np.uint32),
    )
    text = f"{copy.__name__}: 'lines' must have at most 8 words like a row, got 9."
    with pytest.raises(ValueError, match=sentence(text)):
        copy(memory, rows, lines)
    with pytest.raises(TypeError, match="'lines' must be uint32"):
        copy(memory, rows, lines[:, :8].astype(np.float32))
    with pytest.raises(ValueError, match="must have N = 1 like 'rows'"):
        copy(memory, rows, np.zeros((2, 8), np.uint32))

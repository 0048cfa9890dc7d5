"""Words that launches share: counters and stamps."""

import threading

import numpy as np
import pytest

from cupyrec import scratch
from cupyrec.scratch import counters, share_counters, stamped


def test_counters_are_zeros_and_kept(sim):
    zeros = counters(sim, 3)
    assert (zeros.get().tolist(), zeros.dtype) == ([0, 0, 0], np.uint32)
    zeros[:] = 2
    assert counters(sim, 3) is zeros
    assert counters(sim, 2).get().tolist() == [0, 0]
    zeros[:] = 0


def test_streams_have_counters_of_their_own_until_they_share(sim):
    zeros, stream = counters(sim, 3), sim.cuda.Stream()
    with stream:
        assert counters(sim, 3) is not zeros
    share_counters(sim, stream)
    with stream:
        assert counters(sim, 3) is zeros


def test_threads_have_counters_of_their_own(sim):
    """On a device a stream runs their launches one by one; on `sim`, and on CUDA's streams of a
    thread each, all of one name, they run at once."""
    zeros, seen = counters(sim, 3), []
    thread = threading.Thread(target=lambda: seen.append(counters(sim, 3)))
    thread.start()
    thread.join()
    assert seen[0] is not zeros


def test_counters_of_a_graph_are_its_own(sim):
    with sim.cuda.Stream() as stream:
        stream.begin_capture()
        captured = counters(sim, 7)
        stream.end_capture().launch()
        kept = counters(sim, 7)
    assert captured.get().tolist() == kept.get().tolist() == [0] * 7
    assert kept is not captured


def test_stamps_grow_and_words_are_kept():
    words, stamp = stamped(np, 5)
    words[:] = stamp | 7
    again, later = stamped(np, words.size)
    assert again is words
    assert later > again.max()
    assert later % 2**33 == 0


def test_more_words_are_new_and_stamps_begin_again():
    before, _ = stamped(np, 1)
    words, stamp = stamped(np, before.size + 1)
    assert words.size > before.size
    assert (words.max(), stamp) == (0, 2**33)
    assert stamped(np, 1)[0] is words


def test_after_the_last_stamp_words_are_new(monkeypatch):
    monkeypatch.setattr(scratch, "_STAMPS", 4)
    monkeypatch.setattr(scratch, "_kept", threading.local())
    seen = [stamped(np, 1) for _ in range(7)]
    assert [stamp >> 33 for _, stamp in seen] == [1, 2, 3, 1, 2, 3, 1]
    assert seen[2][0] is not seen[3][0]


def test_threads_have_their_own():
    words, found = stamped(np, 1)[0], []
    thread = threading.Thread(target=lambda: found.append(stamped(np, 1)[0]))
    thread.start()
    thread.join()
    assert found[0] is not words


def test_streams_have_their_own(sim):
    words = stamped(sim, 1)[0]
    with sim.cuda.Stream():
        assert stamped(sim, 1)[0] is not words
    assert stamped(sim, 1)[0] is words


def test_refuses_to_be_part_of_a_graph(sim):
    text = "^stamped: launches with a stamp must not be part of a graph, got a capturing stream.$"
    with sim.cuda.Stream() as stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=text):
            stamped(sim, 1)
        stream.end_capture()

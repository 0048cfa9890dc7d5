"""RowBits against a set of numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cupyrec.ops.row_bits import RowBits

numbers = st.integers(0, 5000) | st.sampled_from([0, 63, 64, 65, 127, 128, 1023, 1024])
calls = st.lists(
    st.tuples(st.sampled_from(["set", "clear"]), st.lists(numbers, max_size=30))
    | st.tuples(st.sampled_from(["fill", "truncate"]), numbers),
    max_size=12,
)


@given(calls, st.lists(st.integers(-200, 6000) | st.integers(-(2**63), 2**63 - 1)))
def test_behaves_like_a_set(calls, asked):
    bits, model = RowBits(), set()
    for name, given_ in calls:
        if name in ("set", "clear"):
            getattr(bits, name)(np.array(given_, np.int64))
            model = model | set(given_) if name == "set" else model - set(given_)
        else:
            getattr(bits, name)(given_)
            low = set(range(given_))
            model = model | low if name == "fill" else model & low
        for some in (asked, list(range(-70, 5100)), [*model]):
            found = bits.has(np.array(some, np.int64))
            assert found.dtype == bool
            assert found.tolist() == [number in model for number in some]


def test_bytes_of_many_numbers():
    bits, last = RowBits(), 10**7
    assert bits.nbytes == 0
    for first in range(0, last, 10**6):
        bits.set(np.arange(first, first + 10**6))
        assert bits.nbytes <= 2 * (first + 10**6) / 8 + 8
    assert bits.has(np.arange(last)).all()
    assert not bits.has(np.arange(last, last + 10**6)).any()

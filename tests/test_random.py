import threading

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyrec import random

words = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def _restore_step():
    before = random.step()
    yield
    random.set_step(before)


def philox(counter, key):
    return [int(word) for word in random.philox4x32(*map(np.uint64, (*counter, *key)))]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # philox4x32 10 of Random123's kat_vectors; the last are digits of pi
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_known_answers(counter, key, expected):
    counter, key, expected = (
        [int(word, 16) for word in text.split()] for text in (counter, key, expected)
    )
    assert philox(counter, key) == expected
    assert oracle.philox4x32(counter, key) == expected


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_philox_in_pythons_integers(counter, key):
    assert philox(counter, key) == oracle.philox4x32(counter, key)


def draws(seed):
    random.manual_seed(seed)
    return random.generator().random(3).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_manual_seed_starts_anew(seed):
    assert draws(seed) == draws(seed)
    assert draws(seed) != draws(seed ^ 1)
    random.set_step(5)
    random.manual_seed(seed)
    assert random.step() == 0


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_manual_seed_refuses(seed):
    first = draws(3)
    random.manual_seed(3)
    text = f"manual_seed: 'seed' must lie in [0, 2**64), got {seed}."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        random.manual_seed(seed)
    assert random.generator().random(3).tolist() == first  # nothing was changed


def test_set_step():
    random.set_step(np.int64(7))
    assert (type(random.step()), random.step()) == (int, 7)


def test_step_may_come_from_elsewhere():
    random.set_step(2)
    with pytest.raises(ZeroDivisionError), random.step_from(lambda: "there"):
        assert random.step() == "there"
        _ = 1 / 0
    assert random.step() == 2


def test_kept_puts_back_what_was_seeded_and_drawn():
    random.manual_seed(3)
    random.set_step(5)
    expected = np.random.Generator(np.random.Philox(3)).integers(2**60, size=2)
    first = random.generator().integers(2**60)
    with pytest.raises(RuntimeError), random.kept():
        random.generator().integers(2**60)
        random.manual_seed(4)
        raise RuntimeError
    assert [first, random.generator().integers(2**60)] == expected.tolist()
    assert random.step() == 5


def test_other_threads_see_nothing_of_what_is_kept():
    random.manual_seed(3)
    random.set_step(5)
    seen = []

    def train():
        seen.append((random.step(), random.first_sample(), random.generator()))
        random.set_step(6)

    with random.kept():
        random.manual_seed(4)
        random.set_step(9)
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        assert random.step() == 9
    assert seen == [(5, 0, random.generator())]
    assert random.step() == 6

"""JSON by two readers that must agree: lists of numbers as arrays, all else as orjson has it."""

import json
import time

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cupyrec.serving import json_numbers
from cupyrec.serving.json_numbers import loads

INTEGERS = st.integers(-(2**63), 2**64 - 1)
NUMBERS = INTEGERS | st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.integers(0, 3).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n)))
DATA = st.lists(INTEGERS) | st.lists(NUMBERS) | ROWS
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda own: st.lists(own) | st.dictionaries(st.text() | st.just("data"), own),
)


@pytest.fixture(autouse=True, scope="module")
def long():
    """Take texts of any length for long ones."""
    patch = pytest.MonkeyPatch()
    patch.setattr(json_numbers, "_SHORT", -1)
    patch.setattr(json_numbers, "_FEW", 0)
    yield
    patch.undo()


def plain(said):
    """Arrays as lists, and numbers as floats, as which lists are read that have one."""
    if isinstance(said, dict):
        return {key: plain(own) for key, own in said.items()}
    if isinstance(said, (list, np.ndarray)):
        return [plain(own) for own in (said.tolist() if isinstance(said, np.ndarray) else said)]
    return float(said) if type(said) is int else said


@given(DATA | ANY | st.fixed_dictionaries({"data": DATA | ANY, "of": ANY}))
@example({"data": [1, [2], 3]})
@example({"data": [[1, [2, 3]], [4, []]]})
@example({"data": [-1, 2**64 - 1]})
@example({"[": {"data": [1.5, 2]}})
def test_both_readers_say_the_same(said):
    text = json.dumps(said).encode()
    assert plain(loads(text)) == plain(orjson.loads(text))


@pytest.mark.skipif(json_numbers.simdjson is None, reason="simdjson has no wheels for this Python")
@pytest.mark.parametrize(
    ("data", "dtype"),
    [([1, -2], "i8"), ([1, 2**63], "u8"), ([1, 2.5], "f8"), ([[1], [2]], "i8"), ([], "i8")],
)
def test_numbers_come_as_arrays(data, dtype):
    got = loads(json.dumps({"inputs": [{"data": data}]}).encode())["inputs"][0]["data"]
    assert isinstance(got, np.ndarray)
    assert (got.dtype, got.tolist()) == (dtype, data)


@pytest.mark.parametrize(
    "data", [[True, 1], [None], ["1"], [1, [2]], [[1], [2, 3]], [{}], [[1], 2]]
)
def test_other_lists_stay_lists(data):
    assert loads(json.dumps({"data": data}).encode()) == {"data": data}


@pytest.mark.parametrize(
    "text",
    [b'{"data": [1], "data": [2]}', b'{"data": {"a": 1, "a": 2}}', b'[{"b": [1], "b": [2, 3]}]'],
)
def test_of_names_that_are_there_twice_the_last_one_holds(text):
    assert plain(loads(text)) == plain(orjson.loads(text))


def test_many_names_are_read_in_linear_time():
    said = {str(number): 1 for number in range(100_000)}
    start = time.thread_time()
    assert loads(json.dumps(said).encode()) == said
    assert time.thread_time() - start < 10  # each looked for from the first one on takes a minute


def test_many_lists_are_left_to_orjson(monkeypatch):
    monkeypatch.setattr(json_numbers, "_FEW", 64)
    text = b'{"data": [' + b"[1], " * 5000 + b"[1]]}"
    assert type(loads(text)["data"]) is list
    assert type(loads(b'{"data": [' + b"1, " * 5000 + b"1]}")["data"]) is not list


@pytest.mark.parametrize(
    "text", [b"", b"[NaN]", b'{"data": [1e999]}', b"[1,", b"\xff", b"[" * 5000]
)
def test_what_is_no_json(text):
    with pytest.raises(ValueError):
        loads(text)


def test_without_simdjson(monkeypatch):
    monkeypatch.setattr(json_numbers, "simdjson", None)
    assert loads(b'{"data": [1, 2]}') == {"data": [1, 2]}

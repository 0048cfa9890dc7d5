"""Bodies of requests to tensors, and answers to bytes; what is no such body is told."""

import json
import random
import struct

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyrec.serving import json_numbers
from cupyrec.serving.open_inference import (
    Request,
    Tensor,
    answer,
    column_of,
    joined,
    numbers_of,
    read_request,
)

DTYPES = {"FP32": "f4", "FP64": "f8"} | {f"INT{8 * n}": f"i{n}" for n in (1, 2, 4, 8)}
DTYPES |= {f"UINT{8 * n}": f"u{n}" for n in (1, 2, 4, 8)}


@pytest.fixture(autouse=True, params=["orjson", "simdjson"], scope="module")
def reader(request):
    """Which reads JSON: as if all texts were short, or long."""
    patch = pytest.MonkeyPatch()
    patch.setattr(json_numbers, "_SHORT", 10**9 if request.param == "orjson" else -1)
    yield request.param
    patch.undo()


def body(*inputs, **more):
    return json.dumps({"inputs": inputs, **more}).encode()


def entry(data, datatype="INT64", shape=None, **more):
    shape = [len(data)] if shape is None else shape
    return {"name": "x", "datatype": datatype, "shape": shape, "data": data, **more}


def binary(data, datatype, shape, size=None):
    """A body with one tensor as bytes behind the JSON, and how much of it is JSON."""
    size = len(data) if size is None else size
    parameters = {"binary_data_size": size}
    text = body({"name": "x", "datatype": datatype, "shape": shape, "parameters": parameters})
    return text + data, len(text)


@pytest.mark.parametrize("datatype", DTYPES)
@pytest.mark.parametrize("shape", [[6], [2, 3], [6, 1], [0], [0, 3]])
def test_numbers_come_as_they_were_sent(datatype, shape):
    rng = np.random.default_rng(len(shape))
    dtype = np.dtype(DTYPES[datatype])
    if dtype.kind == "f":
        values = rng.standard_normal(shape).astype(dtype)
    else:
        values = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    nested, flat = values.tolist(), values.ravel().tolist()
    for data in (nested, flat):
        tensor = read_request(body(entry(data, datatype, shape))).inputs["x"]
        got = numbers_of("x", tensor)
        assert (got.dtype, got.shape) == (dtype, values.shape)
        assert got.tobytes() == values.tobytes()
    got = numbers_of("x", read_request(*binary(values.tobytes(), datatype, shape)).inputs["x"])
    assert (got.dtype, got.shape, got.tobytes()) == (dtype, values.shape, values.tobytes())
    assert column_of("x", tensor).to_pylist() == flat


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name[0] != "F"])
def test_integers_are_never_cut_off(datatype):
    limits = np.iinfo(DTYPES[datatype])
    for bad in (1.5, 1.0, True, "1", None, [1], {}, int(limits.max) + 1, int(limits.min) - 1):
        request = read_request(body(entry([1, bad, 1], datatype)))
        with pytest.raises((TypeError, ValueError), match=r"^input 'x': 'data' must be "):
            numbers_of("x", request.inputs["x"])
        if bad is not None:
            with pytest.raises((TypeError, ValueError), match=r"^input 'x': 'data' must be "):
                column_of("x", request.inputs["x"])


@pytest.mark.parametrize("bad", [True, "1", [1], {}])
def test_floats_are_numbers(bad):
    tensor = read_request(body(entry([1.5, bad], "FP32"))).inputs["x"]
    for convert in (numbers_of, column_of):
        with pytest.raises(TypeError, match="must be numbers, got an? "):
            convert("x", tensor)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
def test_what_json_has_no_number_for(number):
    with pytest.raises(ValueError, match="^body: must be JSON, got: "):
        read_request(body(entry([7], "FP32")).replace(b"7", number.encode()))


def test_nulls_are_missing_values_of_columns():
    assert column_of("x", Tensor("INT64", (2,), [None, 2**62])).to_pylist() == [None, 2**62]
    assert column_of("x", Tensor("FP64", (2,), [None, 2**60])).to_pylist() == [None, 2.0**60]
    assert column_of("x", Tensor("BYTES", (2,), [None, "é"])).to_pylist() == [None, "é"]


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_bytes_come_as_they_were_sent(elements):
    data = b"".join(struct.pack("<I", len(e)) + e for e in elements)
    tensor = read_request(*binary(data, "BYTES", [len(elements)])).inputs["x"]
    assert column_of("x", tensor).to_pylist() == elements
    with pytest.raises(TypeError, match="must be one of numbers, got BYTES"):
        numbers_of("x", tensor)


def test_numbers_are_no_texts():
    for values in ([1, 2], [0.5] * 3, [1, "a"], [2**64 - 1]):
        tensor = read_request(body(entry(values, "BYTES"))).inputs["x"]
        with pytest.raises(
            TypeError, match="'x': 'data' must be strings, got (an integer|a float)"
        ):
            column_of("x", tensor)


def test_tensors_are_joined_in_order():
    def sent(values, dtype):
        whole = np.array(values, dtype)
        return Tensor("INT32", (len(whole), 2), memoryview(whole.tobytes()))

    some = [sent([[1, 2]], "<i4"), sent(np.empty((0, 2)), "<i4"), sent([[3, 4], [5, 6]], "<i4")]
    whole = joined("x", some)
    assert numbers_of("x", whole).tolist() == [[1, 2], [3, 4], [5, 6]]
    some = [Tensor("FP32", (2,), np.array(values)) for values in ([0.5, 1], [2, 3.5])]
    assert numbers_of("x", joined("x", some)).tolist() == [0.5, 1, 2, 3.5]
    some = [Tensor("BYTES", (2,), ["a", None]), Tensor("BYTES", (0,), [])]
    assert column_of("x", joined("x", some)).to_pylist() == ["a", None]
    some = [
        Tensor("BYTES", (1,), memoryview(b"\1\0\0\0\xff")),
        Tensor("BYTES", (0,), memoryview(b"")),
    ]
    assert column_of("x", joined("x", some)).to_pylist() == [b"\xff"]
    with pytest.raises(TypeError, match="must be one of numbers, got BYTES"):
        numbers_of("x", joined("x", some))


@pytest.mark.parametrize(
    ("data", "shape"),
    [(b"\1\0\0\0", [1]), (b"\1\0\0", [1]), (b"\0\0\0\0", [2]), (b"\xff\xff\xff\xffa", [1]),
     (b"\0\0\0\0a", [1]), (b"", [1])],
)  # fmt: skip
def test_bytes_that_end_elsewhere(data, shape):
    tensor = read_request(*binary(data, "BYTES", shape)).inputs["x"]
    with pytest.raises(ValueError, match="bytes must be . elements, each after 4 bytes"):
        column_of("x", tensor)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([entry([1], shape=[2**62])], "'shape' must be one or two integers"),
        ([entry([1], shape=[2**31 - 1] * 2)], "'data' must have 4611686014132420609 elements"),
        ([entry([1], shape=[-1])], "'shape' must be one or two integers"),
        ([entry([1], shape=[1.0])], "'shape' must be one or two integers"),
        ([entry([1], shape=[True])], "'shape' must be one or two integers"),
        ([entry([1], shape=[])], "'shape' must be one or two integers"),
        ([entry([1], shape=[1, 1, 1])], "'shape' must be one or two integers"),
        ([entry([1], shape="1")], "'shape' must be one or two integers"),
        ([entry([1], shape=10**30)], "'shape' must be one or two integers"),
        ([entry([[1], [2, 3]], shape=[2, 1])], "'data' must be nested as its shape is"),
        ([entry([[1], 2], shape=[2, 1])], "'data' must be nested as its shape is"),
        ([entry([[1, 2]], shape=[2, 1])], "'data' must be nested as its shape is"),
        ([entry([1, 2], shape=[3])], "'data' must have 3 elements"),
        ([entry("ab", shape=[2])], "'data': must be a list"),
        ([entry(None, shape=[2])], "'data': must be a list"),
        ([entry([1]), entry([2])], "'x': must occur once"),
        ([entry([1], "INT128")], "'datatype' must be one of FP32,"),
        ([entry([1], ["INT8"])], "'datatype' must be one of FP32,"),
        ([entry([1], name=5)], "the name of an input: must be a string"),
        ([[]], "an input: must be an object, got"),
        ([entry([1], parameters=[])], "'parameters': must be an object"),
        ([entry([1], parameters={"shared_memory_region": "a"})], "shared memory"),
        ([entry([1], parameters={"binary_data_size": 8})], "'data' or 'binary_data_size'"),
    ],
)
def test_inputs_that_are_none(inputs, said):
    with pytest.raises((ValueError, TypeError), match=r"\.$") as told:
        read_request(body(*inputs))
    assert said in str(told.value)
    assert len(str(told.value)) < 300


@pytest.mark.parametrize("size", [0, 7, 9, 16, 2**62, 10**30, -8, 8.0, True, "8", []])
def test_binary_data_of_another_size(size):
    with pytest.raises((ValueError, TypeError), match=r"\.$"):
        read_request(*binary(bytes(8), "INT64", [1], size if size != 0 else False))


@pytest.mark.parametrize("length", [-1, 10**9, 10**17])
def test_json_that_is_longer_than_the_body(length):
    with pytest.raises(ValueError, match="must be at most the length of the body, 14, got"):
        read_request(b'{"inputs": []}', length)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "must be JSON"), (b"[" * 100_000, "must be JSON"), (b"[]", "must be an object"),
        (b'{"a":' * 5000, "must be JSON"), (b"\xff\xfe", "must be JSON"), (b"{}", "'inputs'"),
        (b'{"inputs": {}}', "'inputs': must be a list"), (b'{"inputs": [5]}', "an input"),
        (b'{"inputs": [], "id": 5}', "'id': must be a string"),
        (b'{"inputs": [], "id": "\\ud800"}', "must be JSON"),
        (b'{"inputs": [], "outputs": {}}', "'outputs': must be a list"),
        (b'{"inputs": [], "outputs": [[]]}', "an output: must be an object"),
        (b'{"inputs": [], "outputs": [{"name": 1}]}', "the name of an output"),
        (b'{"inputs": [], "parameters": 5}', "'parameters': must be an object"),
        (b'{"inputs": [], "parameters": {"binary_data_output": 1}}', "'binary_data_output'"),
        (b'{"inputs": [], "outputs": [{"name": "x", "parameters": {"classification": 3}}]}',
         "'classification' must not be asked for"),
    ],
)  # fmt: skip
def test_bodies_that_are_none(text, said):
    with pytest.raises((ValueError, TypeError)) as told:
        read_request(text)
    assert said in str(told.value)


def sentence_of(text, length):
    """What is wrong with a body, None if nothing."""
    try:
        for name, tensor in read_request(text, length).inputs.items():
            numbers_of(name, tensor)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def test_random_bytes_only_raise_sentences():
    draw = random.Random(3)
    good, length = binary(bytes(16), "INT64", [2])
    for trial in range(2000):
        text = bytearray(good)
        for _ in range(draw.randrange(1, 5)):
            text[draw.randrange(len(text))] = draw.randrange(256)
        told = sentence_of(bytes(text), draw.choice([length, None, draw.randrange(200)]))
        assert told is None or told.endswith("."), trial


def test_numbers_of_an_answer_have_all_bits():
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 0x3F800000, 20_000, np.uint32)
    values = bits.view(np.float32)[:, None]  # of [0, 1), tiny ones among them
    _, text = answer(Request(None, {}, None, False), "m", "v", ["probability"], values)
    (output,) = json.loads(text)["outputs"]
    assert output["shape"] == [20_000]
    doubles = np.array(output["data"])
    assert doubles.astype(np.float32).tobytes() == values.tobytes()
    assert (doubles == values[:, 0]).all()  # nothing is left to a second rounding


def test_answers_of_several_tasks():
    values = np.array([[0.25, 0.5], [0.75, 1]], np.float32)
    names = ["probability_a", "probability_b"]
    _, text = answer(Request("q", {}, None, False), "m", "v", names, values)
    said = orjson.loads(text)
    assert (said["model_name"], said["model_version"], said["id"]) == ("m", "v", "q")
    assert [(o["name"], o["data"]) for o in said["outputs"]] == [
        ("probability_a", [0.25, 0.75]),
        ("probability_b", [0.5, 1]),
    ]
    wanted = Request(None, {}, [("probability_b", True), ("probability_a", False)], False)
    headers, text = answer(wanted, "m", "v", names, values)
    length = int(dict(headers)[b"inference-header-content-length"])
    b, a = orjson.loads(text[:length])["outputs"]
    assert (a["data"], b["parameters"]) == ([0.25, 0.75], {"binary_data_size": 8})
    assert text[length:] == values[:, 1].tobytes()


@pytest.mark.parametrize("wanted", [["y"], ["probability", "probability"], ["probability", "y"]])
def test_outputs_that_there_are_not(wanted):
    request = Request(None, {}, [(name, False) for name in wanted], False)
    with pytest.raises(ValueError, match="'outputs': must be among probability, each once, got"):
        answer(request, "m", "v", ["probability"], np.zeros((1, 1), "f"))

"""Requests converted together: each gets what it gets alone, and none what is another's."""

import asyncio
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyrec.data import Column, Schema
from cupyrec.ragged import Bags
from cupyrec.serving.batching import Batcher
from cupyrec.serving.inputs import Inputs
from cupyrec.serving.open_inference import Tensor

MIXED = Schema(
    [
        Column("price", "numeric", transform="log", buckets=True),
        Column("age", "numeric"),
        Column("user", "categorical", "integer"),
        Column("item", "categorical", "hex"),
        Column("tags", "categorical", "string", bag=True),
        Column("marks", "categorical", "integer", bag=True),
    ]
)
FLOATS = st.floats(-1e6, 1e6, width=32)
SMALL = st.integers(-100, 100)
VALUES = {  # by column: of each datatype what it may have, and last what it may not
    "price": ({"FP64": FLOATS, "FP32": FLOATS}, 1e39),
    "age": ({"FP32": FLOATS, "INT8": SMALL, "INT32": SMALL}, 1.5),
    "user": (
        {"INT64": st.integers(-(2**63), 2**63 - 1), "UINT64": st.integers(0, 2**64 - 1),
         "BYTES": SMALL.map(str)},
        "x",
    ),
    "item": ({"BYTES": st.sampled_from(["", "f", "ff", "0123456789abcdef"])}, "xyz"),
    "tags": ({"BYTES": st.text(max_size=3)}, 7),
    "marks": ({"INT64": SMALL, "INT16": SMALL}, 2**70),
}  # fmt: skip
NUMPY = {"FP32": "f4", "FP64": "f8", "INT8": "i1", "INT16": "i2", "INT32": "i4", "INT64": "i8"}
NUMPY["UINT64"] = "u8"


def packed(texts, wrong=0):
    """Texts as binary data, the last one's length wrong by so much."""
    parts = [text if isinstance(text, bytes) else str(text).encode() for text in texts]
    last = len(parts) - 1
    heads = [struct.pack("<I", len(p) + wrong * (n == last)) for n, p in enumerate(parts)]
    return memoryview(b"".join(head + part for head, part in zip(heads, parts, strict=True)))


def as_sent(datatype, shape, values, kind):
    if kind == "array":
        values = np.array(values, np.float64 if datatype.startswith("F") else NUMPY[datatype])
    elif kind == "binary" and datatype == "BYTES":
        values = packed(values)
    elif kind == "binary":
        values = memoryview(np.array(values, NUMPY[datatype]).tobytes())
    return Tensor(datatype, shape, values)


@st.composite
def forms(draw):
    """Of each column a datatype, how it is sent, and what its shape is behind B."""
    form = {}
    for column in MIXED.columns:
        datatype = draw(st.sampled_from([*VALUES[column.name][0]]))
        kinds = ["list", "binary"] + ["array"] * (datatype != "BYTES")
        width = st.sampled_from([None, 1, 3]) if column.bag else st.sampled_from([(), (1,)])
        form[column.name] = datatype, draw(st.sampled_from(kinds)), draw(width)
    return form


@st.composite
def requests(draw, form):
    """A request of up to 3 rows."""
    rows, sent = draw(st.integers(0, 3)), {}
    for name, (datatype, kind, width) in form.items():
        shape, count = (rows,), rows
        if width is None:
            lengths = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
            sent[name + ".lengths"] = Tensor("INT32", (rows,), lengths)
            shape, count = (sum(lengths),), sum(lengths)
        elif isinstance(width, int):
            shape, count = (rows, width), rows * width
        else:
            shape += width
        some = VALUES[name][0][datatype]
        some = st.none() | some if kind == "list" else some
        values = draw(st.lists(some, min_size=count, max_size=count))
        sent[name] = as_sent(datatype, shape, values, kind)
    return sent


def same_bits(got, expected):
    """Whether arrays, or bags, are the same."""
    if isinstance(got, Bags):
        pairs = [(got.ids, expected.ids), (got.offsets, expected.offsets)]
    else:
        pairs = [(got, expected)]
    return all((a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes()) for a, b in pairs)


def inputs(schema):
    return Inputs(schema, schema.num_dense, schema.num_tables, schema.has_bags)


@given(st.data())
@settings(max_examples=60)
def test_requests_of_one_form_together_have_the_rows_of_each(data):
    form = data.draw(forms())
    some = data.draw(st.lists(requests(form), min_size=1, max_size=4))
    model = inputs(MIXED)
    measured = [model.measured(one) for one in some]
    assert {alike for _, alike in measured} == {measured[0][1]}
    dense, ids = model.arrays(some)
    alone = [model.arrays([one]) for one in some]
    assert [len(one) for one, _ in alone] == [rows for rows, _ in measured]
    assert same_bits(dense, np.concatenate([one for one, _ in alone]))
    assert same_bits(ids, Bags.joined([one for _, one in alone]))


@given(st.data())
@settings(max_examples=60)
def test_a_batch_gives_each_request_what_it_gets_alone(data):
    kinds = data.draw(st.lists(forms(), min_size=1, max_size=2))
    some = data.draw(st.lists(st.sampled_from(kinds).flatmap(requests), min_size=1, max_size=6))
    model = inputs(MIXED)
    for one in some:
        if data.draw(st.integers(0, 3)) == 0:
            spoil(one, data.draw(st.sampled_from([*VALUES])))
    alone = [outcome_of(lambda one=one: values_of(*model.arrays([one]))) for one in some]
    together = asyncio.run(asked(model, some))
    for got, expected in zip(together, alone, strict=True):
        assert type(got) is type(expected)
        if isinstance(got, Exception):
            assert str(got) == str(expected)
            assert isinstance(got, (ValueError, TypeError))
        else:
            assert same_bits(got[0], expected[0])


def spoil(sent, name):
    """Let a request's last value be wrong, in its bytes if it is binary."""
    tensor = sent[name]
    if not len(tensor.data):
        return
    if isinstance(tensor.data, list):
        sent[name] = tensor._replace(data=[*tensor.data[:-1], VALUES[name][1]])
    elif isinstance(tensor.data, memoryview) and tensor.datatype == "BYTES":
        data = bytes(tensor.data)
        sent[name] = tensor._replace(data=memoryview(data + b"x"))
    elif tensor.datatype.startswith("FP"):
        array = np.full(tensor.shape, np.nan, NUMPY[tensor.datatype])
        sent[name] = tensor._replace(data=memoryview(array.tobytes()))


def values_of(dense, ids):
    """Numbers in which all bits of a row count, or nearly so."""
    hashes = [hash((dense[n].tobytes(), ids.part(n, n + 1).ids.tobytes(),
                    ids.part(n, n + 1).offsets.tobytes())) for n in range(len(dense))]  # fmt: skip
    return np.array(hashes, np.int64)[:, None], "v1"


def outcome_of(call):
    try:
        return call()
    except Exception as error:
        return error


async def asked(model, some):
    """What requests get that are one batch."""
    batcher = Batcher(model.arrays, values_of, block=10**6, max_delay=60)
    batcher._expected = len(some)
    answers = []
    for sent in some:
        rows, form = model.measured(sent)
        answers.append(batcher.submit(sent, rows, form))
    try:
        return await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), 60)
    finally:
        batcher.close()


TEXTS = Schema([Column("item", "categorical", "hex"), Column("city", "categorical", "string")])


@pytest.mark.parametrize("eaten", [0, 5, 6, 11])
def test_no_request_takes_the_bytes_of_its_neighbour(eaten):
    def sent(texts, wrong=0):
        data = packed(texts, wrong)
        city = Tensor("BYTES", (len(texts),), packed(["x"] * len(texts)))
        return {"item": Tensor("BYTES", (len(texts),), data), "city": city}

    greedy = sent(["a", "b"], eaten)  # takes an element of the next one, in whole or in part
    robbed = [sent(["c"]), sent(["d", "e"])]
    short = {**sent(["f", "f"]), "item": Tensor("BYTES", (2,), packed(["f"]))}
    long = {**sent(["f"]), "item": Tensor("BYTES", (1,), packed(["f", "f"]))}
    model = inputs(TEXTS)
    outcomes = []

    def compute(dense, ids):
        return ids[:, :1].astype(np.float32), "v1"

    async def ask():
        batcher = Batcher(model.arrays, compute, block=10**6, max_delay=60)
        some = [greedy, *robbed, short, long]
        batcher._expected = len(some)
        asked = [batcher.submit(one, *model.measured(one)) for one in some]
        outcomes.extend(await asyncio.gather(*asked, return_exceptions=True))
        batcher.close()

    asyncio.run(ask())
    assert [outcomes[n][0].ravel().tolist() for n in (1, 2)] == [[12], [13, 14]]
    if eaten:
        assert str(outcomes[0]) == (
            "input 'item': its 10 bytes must be 2 elements, each after 4 bytes of its length, "
            f"got 2 that take {10 + eaten}."
        )
    else:
        assert outcomes[0][0].ravel().tolist() == [10, 11]
    assert "must be 2 elements, each after 4 bytes of its length, got 1" in str(outcomes[3])
    assert "must be 1 elements, each after 4 bytes of its length, got 2" in str(outcomes[4])


@pytest.mark.parametrize("ready", [False, True])
def test_no_request_takes_the_bags_of_its_neighbour(ready):
    def sent(elements, lengths):
        elements, count = Tensor("INT64", (len(elements),), elements), len(lengths)
        if ready:
            return {"ids": elements, "lengths": Tensor("INT64", (count, 1), lengths)}
        return {"tags": elements, "tags.lengths": Tensor("INT64", (count,), lengths)}

    schema = Schema([Column("tags", "categorical", "integer", bag=True)])
    model = Inputs(None, 0, 1, True) if ready else inputs(schema)
    some = [sent([1], [2]), sent([3, 4], [1]), sent([5, 6], [0, 2])]
    with pytest.raises(ValueError, match="must be at least 0 and add up to the 5 that there are"):
        model.arrays(some)
    with pytest.raises(ValueError, match="add up to the 1 that there are, got 2 to 2"):
        model.arrays(some[:1])
    _, bags = model.arrays([some[2], sent([], []), sent([7], [1])])
    assert (bags.ids.tolist(), bags.offsets.tolist()) == ([5, 6, 7], [0, 0, 2, 3])

"""Messages on every device, against the layout and the formats in Python's integers and floats."""

import math

import ml_dtypes
import numpy as np
import oracle
import pytest
from test_int8_codec import EDGES, decode_in_numpy, encode_exactly

from cupyrec import arrays
from cupyrec.ops import messages
from cupyrec.ops.row_memory import Rounding

CODECS = ("none", "fp16", "bf16", "int8")
COUNTS = [3, 0, 1, 20, 0, 7, 0]
ROWS, KEYS = np.ones((3, 2), np.float32), (np.zeros(3, np.uint32), np.arange(3))


def rows_of(count, width, seed=0):
    """Rows of all magnitudes, and some with what no format holds."""
    x = oracle.normals((count, width), seed=seed)
    x *= np.float32(10.0) ** np.random.default_rng(seed).integers(-40, 38, (count, 1))
    for i, edge in enumerate(EDGES[:count]):
        x[i, i % width] = edge
    return x


def case(width, seed=0):
    """More rows than are sent, and which are sent in what order."""
    x = rows_of(40, width, seed)
    return x, np.random.default_rng(seed).permutation(40)[: sum(COUNTS)]


def nearest(x, codec):
    """The bits of 16-bit numbers: NumPy's and ml_dtypes', but for NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        halves = x.astype(np.float16 if codec == "fp16" else ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), halves)


def encoded(rows, codec):
    """The message of rows."""
    numbers = {
        "none": lambda: [rows], "int8": lambda: encode_exactly(rows)[::-1],
    }.get(codec, lambda: [nearest(rows, codec)])()  # fmt: skip
    body = b"".join(part.tobytes() for part in numbers)
    return body + bytes(-len(body) % 16)


def decoded(message, count, width, codec):
    """The rows of a message."""
    if codec == "int8":
        codes = np.frombuffer(message, np.int8, count * width, 4 * count)
        scales = np.frombuffer(message, np.float32, count)
        return decode_in_numpy(codes.reshape(count, width), scales)
    kinds = {"none": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
    numbers = np.frombuffer(message, kinds[codec], count * width)
    return numbers.astype(np.float32).reshape(count, width)


def exact(x, counts, codec):
    """Each peer's message, and what it is decoded to."""
    sent = [encoded(rows, codec) for rows in np.split(x, np.cumsum(counts)[:-1])]
    read = [decoded(*one, x.shape[1], codec) for one in zip(sent, counts, strict=True)]
    return sent, np.concatenate(read)


def on(xp, array):
    return arrays.copy_to(xp, array)


def check_codec(xp, x, counts, codec, order):
    """Bytes, sizes and values, gathered and scattered."""
    sent, values = exact(x[order], counts, codec)
    got, sizes = messages.encode(on(xp, x), counts, codec, order=on(xp, order))
    assert arrays.namespace("test", got) is xp
    assert arrays.to_host(got).tobytes() == b"".join(sent)
    assert (sizes * 16).tolist() == [len(message) for message in sent]
    np.testing.assert_array_equal(sizes, messages.sizes(counts, codec, x.shape[1]))
    out = xp.full(x.shape, 7, np.float32)
    same = messages.decode(got, counts, codec, x.shape[1], order=on(xp, order), out=out)
    assert same is out
    truth = np.full(x.shape, 7, np.float32)
    truth[order] = values
    np.testing.assert_array_equal(arrays.to_host(out), truth)
    if codec == "none":
        np.testing.assert_array_equal(values.view("u4"), x[order].view("u4"))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [1, 3, 10, 16, 130, 1025])
def test_every_width(np_or_xp, width, codec):
    x, order = case(width)
    check_codec(np_or_xp, x, COUNTS, codec, order)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("counts", [[0], [0, 0], [1], [17], [0, 1025, 0], [1] * 300], ids=len)
def test_counts(np_or_xp, counts, codec):
    x = rows_of(sum(counts), 5)
    check_codec(np_or_xp, x, counts, codec, np.arange(len(x))[::-1])


@pytest.mark.parametrize("codec", CODECS)
def test_without_order(np_or_xp, codec):
    x, _ = case(12)
    x = x[: sum(COUNTS)]
    sent, values = exact(x, COUNTS, codec)
    got, _ = messages.encode(on(np_or_xp, x), COUNTS, codec)
    assert arrays.to_host(got).tobytes() == b"".join(sent)
    np.testing.assert_array_equal(
        arrays.to_host(messages.decode(got, COUNTS, codec, 12)), values
    )  # fmt: skip


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_every_half_and_what_lies_between(np_or_xp, codec):
    """All numbers of 16 bits, those amid two of them, and the float32 on both sides."""
    kind = np.float16 if codec == "fp16" else ml_dtypes.bfloat16
    halves = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    amid = ((halves[1:].astype(float) + halves[:-1]) / 2).astype(np.float32)
    x = np.concatenate([
        halves, amid, *(np.nextafter(amid, np.float32(way)) for way in (-np.inf, np.inf)),
        np.float32([65519.996, 65520, -65520, 3.3961776e38, 3.4e38, np.inf, -np.inf, np.nan]),
    ])  # fmt: skip
    x = np.append(x, np.zeros(-len(x) % 64, np.float32)).reshape(-1, 64)
    got, _ = messages.encode(on(np_or_xp, x), [len(x)], codec)
    np.testing.assert_array_equal(
        arrays.to_host(got).view(np.uint16), nearest(x, codec).reshape(-1)
    )  # fmt: skip
    read = arrays.to_host(messages.decode(got, [len(x)], codec, 64))
    np.testing.assert_array_equal(read, nearest(x, codec).view(kind).astype(np.float32))


def keys_of(count, seed=0):
    generator = np.random.default_rng(seed)
    tables = generator.integers(0, 2**32, count, np.uint32)
    return tables, generator.integers(-(2**63), 2**63, count)


def code_at_random(x, s, r):
    """int8's floor(x / s * 127 + (r + 1/2) / 2^16), each operation rounded to float32."""
    t = np.float32(np.float32(x / s) * np.float32(127)) if abs(x) >= 2.0**-126 else np.float32(0)
    return math.floor(np.float32(t + np.float32((r + 0.5) / 2**16)))


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("width", [1, 3, 16, 130])
def test_rounding_at_random(np_or_xp, width, codec):
    """By the random bits of row, column, seed and step."""
    x, order = case(width)
    tables, ids = keys_of(40)
    by = Rounding(on(np_or_xp, tables), on(np_or_xp, ids), 2**64 - 3, 12)
    got, _ = messages.encode(
        on(np_or_xp, x), COUNTS, codec, order=on(np_or_xp, order), rounding=by
    )  # fmt: skip
    sent = []
    for own in np.split(order, np.cumsum(COUNTS)[:-1]):
        if codec == "int8":
            codes, scales = encode_exactly(x[own])
            for (i, d), _ in np.ndenumerate(codes):
                if scales[i] > 0:
                    key = int(tables[own[i]]), int(ids[own[i]])
                    r = oracle.rounding_bits(*key, d, 2**64 - 3, 12)
                    codes[i, d] = code_at_random(x[own[i], d], scales[i], r)
            body = scales.tobytes() + codes.tobytes()
        else:
            value = 1 if codec == "fp16" else 2
            body = oracle.round_rows(x[own], tables[own], ids[own], 2**64 - 3, 12, value).tobytes()
        sent.append(body + bytes(-len(body) % 16))
    assert arrays.to_host(got).tobytes() == b"".join(sent)


@pytest.mark.parametrize(("codec", "least"), [("fp16", 1024), ("bf16", 128), ("int8", 0)])
def test_rounding_at_random_is_unbiased(codec, least):
    """Numbers amid two neighbours 1 apart: the mean of n roundings is x within 5 sigma."""
    n, part = 500, np.float32([0.1, 0.25, 0.5, 0.75, 0.9])
    x = np.arange(60, dtype=np.float32)[:, None] * 2 + least + part
    x[::2] *= -1
    x = np.concatenate([np.full((60, 1), 127, np.float32), x], axis=1)  # the scale of int8
    keys = keys_of(60)
    draws = np.array([
        messages.decode(
            messages.encode(x, [60], codec, rounding=Rounding(*keys, 3, step))[0], [60], codec, 6
        )
        for step in range(n)
    ])  # fmt: skip
    assert set(np.unique(np.abs(draws - x).round(2))) <= set(np.float32(part.round(2))) | {0}
    error = draws.mean(axis=0, dtype=float) - x
    assert (error[:, 0] == 0).all()
    sigma = np.sqrt(part * (1 - part) / n)
    assert (np.abs(error[:, 1:]) < 5 * sigma).all()
    assert abs((error[:, 1:] / sigma).mean()) < 5 / np.sqrt(300)


def test_out_and_views(np_or_xp):
    xp, (x, order) = np_or_xp, case(12)
    expected, _ = messages.encode(np.ascontiguousarray(x[:, ::2]), COUNTS, "int8", order=order)
    out = xp.full(len(expected) + 100, 255, np.uint8)
    got, _ = messages.encode(
        on(xp, x)[:, ::2], COUNTS, "int8", order=on(xp, np.repeat(order, 2))[::2], out=out
    )  # fmt: skip
    assert arrays.address(got) == arrays.address(out)
    assert arrays.to_host(out).tobytes() == expected.tobytes() + b"\xff" * 100
    values = messages.decode(out, COUNTS, "int8", 6, order=on(xp, np.repeat(order, 2))[::2],
                             out=xp.zeros((40, 6), np.float32))  # fmt: skip
    truth = np.zeros((40, 6), np.float32)
    messages.decode(expected, COUNTS, "int8", 6, order=order, out=truth)
    np.testing.assert_array_equal(arrays.to_host(values), truth)


@pytest.mark.parametrize("codec", CODECS)
def test_one_launch(sim, codec):
    x, order = (on(sim, array) for array in case(16))
    out, values = sim.empty(40 * 16 * 4, np.uint8), sim.empty((40, 16), np.float32)
    with sim.record() as seen:
        messages.encode(x, COUNTS, codec, order=order, out=out)
        messages.decode(out, COUNTS, codec, 16, order=order, out=values)
    assert [launch.name for launch in seen.launches] == ["encode_messages", "decode_messages"]
    assert seen.syncs == 0
    with sim.record() as seen:
        messages.encode(x[:0], [0, 0], codec)
        messages.decode(out, [0, 0], codec, 16)
    assert [launch.name for launch in seen.launches if launch.result] == []


@pytest.mark.parametrize("codec", CODECS)
def test_same_bits_on_the_cpu(codec):
    x = oracle.normals((9000, 20))
    order, counts = np.random.default_rng(0).permutation(9000), [2000, 7000]
    by = None if codec == "none" else Rounding(*keys_of(9000), 1, 2)

    def call():
        sent, sizes = messages.encode(x, counts, codec, order=order, rounding=by)
        return sent, sizes, messages.decode(sent, counts, codec, 20, order=order)

    oracle.check_same_bits(call)


@pytest.mark.parametrize("codec", CODECS)
def test_thread_order(xp, codec):
    x, order = (on(xp, array) for array in case(20))
    by = None if codec == "none" else Rounding(*(on(xp, array) for array in keys_of(40)), 1, 2)

    def call():
        sent, _ = messages.encode(x, COUNTS, codec, order=order, rounding=by)
        return sent, messages.decode(sent, COUNTS, codec, 20)

    oracle.check_thread_order(xp, call)


@pytest.mark.parametrize(("codec", "width", "most"), [("int8", 128, 0.26), ("int8", 16, 0.32)])
def test_messages_are_small(codec, width, most):
    counts = [1000, 0, 1, 500]
    assert messages.sizes(counts, codec, width).sum() * 16 <= most * 4 * width * sum(counts)


SENT = np.zeros(64, np.uint8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: messages.encode(ROWS, [3], "int4"), ValueError,
         "encode: 'codec' must be 'none', 'fp16', 'bf16' or 'int8', got 'int4'."),
        (lambda: messages.encode(ROWS.astype(float), [3], "int8"), TypeError,
         "encode: 'rows' must be float32, got float64."),
        (lambda: messages.encode(ROWS[0], [3], "int8"), ValueError,
         "encode: 'rows' must have axes (V, D), got shape (2,)."),
        (lambda: messages.encode(ROWS[:, :0], [3], "int8"), ValueError,
         "encode: 'rows' must have D of at least 1, got shape (3, 0)."),
        (lambda: messages.encode(ROWS, [1, 1], "int8"), ValueError,
         "encode: 'counts' must add up to 3, the length of 'rows', got 2."),
        (lambda: messages.encode(ROWS, [3], "int8", order=np.arange(2)), ValueError,
         "encode: 'counts' must add up to 2, the length of 'order', got 3."),
        (lambda: messages.encode(ROWS, [3], "int8", order=np.arange(3.0)), TypeError,
         "encode: 'order' must be int64, got float64."),
        (lambda: messages.encode(ROWS, [4, -1], "int8"), ValueError,
         "encode: 'counts' must be an integer of at least 0 a peer, got [4, -1]."),
        (lambda: messages.encode(ROWS, [], "int8"), ValueError,
         "encode: 'counts' must be an integer of at least 0 a peer, got []."),
        (lambda: messages.encode(ROWS, [3.0], "int8"), ValueError,
         "encode: 'counts' must be an integer of at least 0 a peer, got [3.0]."),
        (lambda: messages.encode(ROWS, [3], "int8", out=SENT[:16]), ValueError,
         "encode: 'out' must be at least 32 contiguous bytes from a multiple of 16 on, "
         "got 16 from 0 on."),
        (lambda: messages.encode(ROWS, [3], "int8", out=SENT[4:]), ValueError,
         "encode: 'out' must be at least 32 contiguous bytes from a multiple of 16 on, "
         "got 60 from 4 on."),
        (lambda: messages.encode(ROWS, [3], "int8", out=ROWS), TypeError,
         "encode: 'out' must be uint8, got float32."),
        (lambda: messages.encode(ROWS, [3], "fp16", rounding=Rounding(KEYS[0], KEYS[1][:2], 0, 0)),
         ValueError, "encode: 'rounding.ids' must have V = 3 like 'rows', got shape (2,)."),
        (lambda: messages.encode(ROWS, [3], "fp16", rounding=Rounding(*KEYS, 0, -1)), ValueError,
         "encode: 'step' must lie in [0, 2**32), got -1."),
        (lambda: messages.decode(SENT, [9], "int8", 16), ValueError,
         "decode: 'messages' must be at least 192 contiguous bytes from a multiple of 16 on, "
         "got 64 from 0 on."),
        (lambda: messages.decode(SENT, [3], "int8", 0), ValueError,
         "decode: 'width' must be at least 1, got 0."),
        (lambda: messages.decode(SENT, [3], "int8", 3, out=ROWS), ValueError,
         "decode: 'out' must have axes (U, 3), got shape (3, 2)."),
        (lambda: messages.decode(SENT, [2], "int8", 2, out=ROWS), ValueError,
         "decode: 'counts' must add up to 3, the length of 'out', got 2."),
        (lambda: messages.decode(SENT, [3], "int8", 2, out=ROWS.T.copy().T), ValueError,
         "decode: 'out' must be C-contiguous, got strides (4, 12)."),
        (lambda: messages.sizes([3], "fp8", 2), ValueError,
         "sizes: 'codec' must be 'none', 'fp16', 'bf16' or 'int8', got 'fp8'."),
    ],
)  # fmt: skip
def test_refuses(call, error, text):
    with pytest.raises(error, match=oracle.sentence(f"messages.{text}")):
        call()


def test_no_rounding_of_float32():
    with pytest.raises(ValueError, match=r"messages.encode: 'rounding' must be None for codec"):
        messages.encode(ROWS, [3], "none", rounding=Rounding(*KEYS, 0, 0))


def test_devices_do_not_mix(xp):
    with pytest.raises(TypeError, match=r"messages.encode: arguments must be arrays of one device"):
        messages.encode(on(xp, ROWS), [3], "int8", order=np.arange(3))
    with pytest.raises(TypeError, match=r"messages.encode: 'counts' must be on the host, got an"):
        messages.encode(on(xp, ROWS), on(xp, np.array([3])), "int8")

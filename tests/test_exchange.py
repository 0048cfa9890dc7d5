"""Keys, rows and gradients between ranks: any number of them, under mpirun."""

import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.ops.partition import owners
from cupyrec.ops.row_memory import Rounding
from cupyrec.parallel import Communicator, Exchange, world

pytestmark = pytest.mark.ranks
RANKS = world()
N, R = RANKS.size, RANKS.rank
CODECS = {"none": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 254}


@pytest.fixture(params=["cpu", "sim"])
def xp(request):
    return arrays.module(request.param)


def keys_of(rank: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Unique keys of a rank, of which neighbours have some too."""
    ids = np.arange(count, dtype=np.int64) * 7 - 100 + 3 * rank
    return (np.arange(count) % 5).astype(np.uint32), ids


def vector_of(tables: np.ndarray, ids: np.ndarray, width: int) -> np.ndarray:
    seeds = ids.astype(float)[:, None] * 0.37 + tables[:, None] * 1.7
    return np.sin(seeds + np.arange(width)).astype(np.float32)


def counts_of(how: str) -> list[int]:
    return {"even": [40] * N, "some none": [40 * (r % 2) for r in range(N)], "none": [0] * N}[how]


@pytest.mark.parametrize("how", ["even", "some none", "none"])
def test_keys_come_to_their_owners_in_order_of_rank(how: str, xp) -> None:
    counts = counts_of(how)
    own = keys_of(R, counts[R])
    exchange = Exchange(RANKS, num_tables=5)
    route = exchange.ask(*(arrays.copy_to(xp, a) for a in own)).result()
    expected: list[tuple] = []
    for rank in range(N):
        tables, ids = keys_of(rank, counts[rank])
        mine = owners(tables, ids, N) == R if len(ids) else np.zeros(0, bool)
        assert route.received[rank] == mine.sum()
        expected += zip(tables[mine].tolist(), ids[mine].tolist(), strict=True)
    got = [arrays.to_host(a) for a in (route.tables, route.ids)]
    assert got[0].dtype == np.uint32
    assert list(zip(*(a.tolist() for a in got), strict=True)) == expected
    assert route.sent.sum() == counts[R]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [1, 3, 16, 130])
@pytest.mark.parametrize("how", ["even", "some none", "none"])
def test_rows_and_gradients(codec: str, width: int, how: str, xp) -> None:
    counts = counts_of(how)
    tables, ids = keys_of(R, counts[R])
    exchange = Exchange(RANKS, forward=codec, backward=codec, num_tables=5)
    route = exchange.ask(*(arrays.copy_to(xp, a) for a in (tables, ids))).result()
    came = arrays.to_host(route.tables), arrays.to_host(route.ids)
    # An owner has each vector once, and tells which each key that came gets.
    unique, numbers = np.unique(
        np.stack([c.astype(np.int64) for c in came]), axis=1, return_inverse=True
    )
    owned = vector_of(unique[0], unique[1], width)
    numbers = arrays.copy_to(xp, numbers.reshape(-1).astype(np.int64))
    rows = exchange.rows(route, arrays.copy_to(xp, owned), numbers, training=True)
    check_rows(arrays.to_host(rows), vector_of(tables, ids, width), codec)
    # A gradient a key, which tells the rank that it is of.
    gradient = vector_of(tables, ids, width) + np.float32(R)
    wait = exchange.gradients(route, arrays.copy_to(xp, gradient))
    of = np.repeat(np.arange(N), route.received).astype(np.float32)
    check_rows(arrays.to_host(wait()), vector_of(*came, width) + of[:, None], codec)


def test_more_keys_come_than_there_is_room_for(xp, monkeypatch) -> None:
    monkeypatch.setattr("cupyrec.parallel.exchange._SPARE", 0)
    count = 300 if R == 0 else 1
    tables, ids = (arrays.copy_to(xp, a) for a in keys_of(R, count))
    route = Exchange(RANKS, num_tables=5).ask(tables, ids).result()
    came = {
        tuple(map(int, key))
        for key in zip(*map(arrays.to_host, (route.tables, route.ids)), strict=True)
    }
    expected = set()
    for rank in range(N):
        asked = keys_of(rank, 300 if rank == 0 else 1)
        mine = owners(*asked, N) == R
        expected |= {(int(t), int(i)) for t, i in zip(*(a[mine] for a in asked), strict=True)}
    assert came == expected


def check_rows(got: np.ndarray, expected: np.ndarray, codec: str) -> None:
    assert got.shape == expected.shape and got.dtype == np.float32
    scale = np.abs(expected).max(axis=1, keepdims=True, initial=0)
    assert (np.abs(got.astype(float) - expected) <= 1.001 * CODECS[codec] * scale).all()


def test_evaluation_has_a_codec_of_its_own() -> None:
    exchange = Exchange(RANKS, forward="int8", backward="int8")
    tables, ids = keys_of(R, 9)
    route = exchange.ask(tables, ids).result()
    vectors = vector_of(route.tables, route.ids, 4)
    exact = vector_of(tables, ids, 4)
    assert (exchange.rows(route, vectors, None, training=False) == exact).all()
    assert (exchange.rows(route, vectors, None, training=True) != exact).any()


def test_what_travels() -> None:
    """Bytes to other ranks: 8 of an id, 1 of a table, and a padded message of rows a rank."""
    before = dict(RANKS.bytes_sent)
    tables, ids = keys_of(R, 100)
    exchange = Exchange(RANKS, forward="int8", num_tables=256)
    route = exchange.ask(tables, ids).result()
    exchange.rows(route, vector_of(route.tables, route.ids, 16), None, training=True)

    def sent(what: str) -> int:
        return RANKS.bytes_sent.get(what, 0) - before.get(what, 0)

    assert sent("keys") == 9 * (route.sent.sum() - route.sent[R])
    others = np.delete(route.received, R)
    assert sent("rows") == (-(-others * 20 // 16) * 16).sum()


def test_one_rank_passes_the_codec_too() -> None:
    exchange = Exchange(Communicator(), forward="int8")
    assert not exchange.is_local and Exchange(Communicator()).is_local
    route = exchange.ask(*keys_of(0, 3)).result()
    x = np.array([[1.0, 0.4], [0, 0], [127, 0.6]], np.float32)
    rows = exchange.rows(route, x, None, training=True)
    np.testing.assert_allclose(rows, [[1.0, 51 / 127], [0, 0], [127, 1]], rtol=1e-6)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1e30])
def test_gradients_of_any_magnitude_keep_the_bits_of_float16(magnitude: float, xp) -> None:
    """Of a mean over many samples they are near float16's least number, 6e-8, or below."""
    exchange = Exchange(RANKS, backward="fp16")
    tables, ids = keys_of(R, 40)
    route = exchange.ask(*(arrays.copy_to(xp, a) for a in (tables, ids))).result()
    came = arrays.to_host(route.tables), arrays.to_host(route.ids)
    scales = magnitude * 100.0 ** -np.arange(N)  # another on each rank
    gradient = (scales[R] * vector_of(tables, ids, 6)).astype(np.float32)
    exchange.measure()
    got = arrays.to_host(exchange.gradients(route, arrays.copy_to(xp, gradient))())
    expected = np.repeat(scales, route.received)[:, None] * vector_of(*came, 6)
    assert (np.abs(got - expected) <= 1.001 * 2.0**-11 * np.abs(expected)).all()
    assert (got != expected).any() or not len(got)
    assert 0 < exchange.errors()["gradients"] < 2.0**-11


def test_gradients_that_float16_cannot_scale(xp) -> None:
    """None but zeros stay zeros, what is infinite stays so; the least of all lose least."""
    exchange = Exchange(RANKS, backward="fp16")
    tables, ids = np.zeros(3, np.uint32), np.arange(3) + 3 * R
    route = exchange.ask(*(arrays.copy_to(xp, a) for a in (tables, ids))).result()
    which = arrays.to_host(route.ids) % 3
    for values in ([0, 0, 0], [1, np.inf, -np.inf], [np.nan, 0, 0], [2.0**-120, -(2.0**-110), 0]):
        given = np.array(values, np.float32)[:, None]
        got = arrays.to_host(exchange.gradients(route, arrays.copy_to(xp, given))())[:, 0]
        expected = given[which, 0]
        if np.inf in values:
            got, expected = got[which > 0], expected[which > 0]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_gradients_are_rounded_at_random(codec: str, xp) -> None:
    """The mean over steps is the value; steps and ranks draw others, a seed draws the same."""
    exchange = Exchange(RANKS, backward=codec, rounding="stochastic")
    tables, ids = (arrays.copy_to(xp, a) for a in (np.zeros(60, np.uint32), np.arange(60)))
    route = exchange.ask(tables, ids).result()  # the same keys on each rank
    own = (1e-6 * vector_of(np.zeros(60), np.arange(60), 16)).astype(np.float32)

    def sent(seed: int, step: int) -> np.ndarray:
        by = Rounding(tables, ids, seed, step)
        return arrays.to_host(exchange.gradients(route, arrays.copy_to(xp, own), by)())

    steps = [sent(7, step) for step in range(30 if xp is np else 10)]
    expected = own[arrays.to_host(route.ids)].astype(float)
    assert (sent(7, 3) == steps[3]).all()
    if not len(expected):
        return
    assert (steps[3] != steps[4]).mean() > 0.2
    error = np.array(steps) - expected
    assert np.abs(error).max() <= 2 * CODECS[codec] * 1e-6 * 1.001
    of_means, of_all = (np.sqrt(np.square(e).mean()) for e in (error.mean(axis=0), error))
    assert 0 < of_means < 1.3 / np.sqrt(len(steps)) * of_all  # of independent ones 1
    parts = np.split(steps[0], np.cumsum(route.received)[:-1])
    if N > 1:
        assert (parts[0] != parts[1]).mean() > 0.2


def test_nearest_is_the_default_and_others_are_refused() -> None:
    exchange = Exchange(RANKS, backward="bf16")
    tables, ids = keys_of(R, 9)
    route, own = exchange.ask(tables, ids).result(), vector_of(tables, ids, 4)
    by = Rounding(tables, ids, 7, 0)
    nearest = exchange.gradients(route, own)()
    assert (exchange.gradients(route, own, by)() == nearest).all()
    exact = Exchange(RANKS, rounding="stochastic").gradients(route, own, by)()
    assert (exact == vector_of(route.tables, route.ids, 4)).all()
    with pytest.raises(ValueError, match="'rounding' must be one of nearest, stochastic, got 'up'"):
        Exchange(Communicator(), rounding="up")


def test_unknown_codecs_are_refused() -> None:
    with pytest.raises(ValueError, match="'backward' must be one of none, .*int8, got 'int4'"):
        Exchange(Communicator(), backward="int4")

"""The communicator: by itself here, and between ranks under mpirun (marked `ranks`)."""

import copy
import pickle
import threading
import time

import numpy as np
import pytest

from cupyrec import arrays, models
from cupyrec.parallel import Communicator, Transfer, world

pytestmark = pytest.mark.ranks
RANKS = world()
N, R = RANKS.size, RANKS.rank


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("rows", [lambda a, b: a + 2 * b, lambda a, b: (a * b) % 2, lambda a, b: 0])
def test_all_to_all_gives_every_rank_its_rows(device: str, rows) -> None:
    xp = arrays.module(device)

    def values(source: int, target: int) -> np.ndarray:
        count = rows(source, target)
        return (1000 * source + 100 * target + np.arange(3 * count)).reshape(count, 3)

    send = arrays.copy_to(xp, np.concatenate([values(R, k) for k in range(N)]))
    expected = np.concatenate([values(k, R) for k in range(N)])
    receive = xp.zeros(expected.shape, np.int64)
    to, of = [rows(R, k) for k in range(N)], [rows(k, R) for k in range(N)]
    before = RANKS.bytes_sent.get("numbers", 0)
    RANKS.all_to_all("numbers", Transfer(send, to, receive, of))
    assert (arrays.to_host(receive) == expected).all()
    sent = 24 * (sum(to) - to[R])
    assert RANKS.bytes_sent.get("numbers", 0) - before == sent


def test_work_of_a_stream_is_done_before_it_travels() -> None:
    """And what came may be used by any stream, with no wait for another."""
    sim = arrays.module("sim")
    with sim.cuda.Stream():
        send = sim.full((N, 2), R, np.int64)
        send += 10
        receive = sim.empty((N, 2), np.int64)
        RANKS.all_to_all("late", Transfer(send, [1] * N, receive, [1] * N))
        got = receive + 0
        assert got.get().tolist() == [[k + 10] * 2 for k in range(N)]


def test_a_work_done_together_counts_as_alive() -> None:
    assert RANKS.together("a test", lambda: list(RANKS.doing)) == ["a test"]
    assert RANKS.doing == []


def test_ranks_hear_what_rank_0_says_and_sleep_until_then() -> None:
    said = {"do": "answer", "rows": 3, "of": "ä" * 1000}
    assert RANKS.broadcast_json("command", said if R == 0 else None) == said
    RANKS.barrier("start")
    if R == 0:
        time.sleep(1.0)
    before = time.process_time()
    assert RANKS.broadcast_json("command", [] if R == 0 else None) == []
    assert R == 0 or time.process_time() - before < 0.2  # of one second


def test_several_arrays_travel_together() -> None:
    ids, out = np.arange(N) + 10 * R, np.empty(N, np.int64)
    tables, out_tables = np.full(N, R, np.uint8), np.empty(N, np.uint8)
    ones = [1] * N
    RANKS.all_to_all(
        "keys", Transfer(ids, ones, out, ones), Transfer(tables, ones, out_tables, ones)
    )
    assert out.tolist() == [10 * k + R for k in range(N)]
    assert out_tables.tolist() == list(range(N))


def test_large_messages() -> None:
    words = 3_000_000
    send = np.full((N, words), R, np.int64)
    receive = np.empty_like(send)
    RANKS.all_to_all("a lot", Transfer(send, [1] * N, receive, [1] * N))
    assert (receive == np.arange(N)[:, None]).all()


def test_messages_of_more_bytes_than_mpi_counts(monkeypatch) -> None:
    monkeypatch.setattr("cupyrec.parallel.communicator._MOST", 20)
    send = np.arange(7) + 10 * R  # to all: 56 bytes in three messages
    receive = np.empty((N, 7), np.int64)
    RANKS.all_to_all("large", Transfer(send, None, receive.reshape(-1), [7] * N))
    assert (receive == np.arange(7) + 10 * np.arange(N)[:, None]).all()


def test_copies_of_a_model_have_the_same_ranks() -> None:
    model = models.DLRM(1, 1)
    other = copy.deepcopy(model)
    assert other.ranks is model.ranks is RANKS
    assert other.embedding.group.store is not model.embedding.group.store
    alone = Communicator()
    assert copy.deepcopy(alone) is alone
    assert pickle.loads(pickle.dumps(model)).ranks is RANKS  # noqa: S301


def test_all_gather() -> None:
    before = RANKS.bytes_sent["parts"]
    assert RANKS.all_gather("parts", np.full((2, 1), R)).tolist() == [[[k], [k]] for k in range(N)]
    assert RANKS.bytes_sent["parts"] - before == (N - 1) * 16
    assert RANKS.all_gather("nothing", np.empty(0)).shape == (N, 0)


def test_all_gather_json_of_any_length() -> None:
    told = RANKS.all_gather_json("names", {"rank": R, "text": "ä" * 1000 * R})
    assert told == [{"rank": k, "text": "ä" * 1000 * k} for k in range(N)]


def test_jobs_are_done_in_order_beside_the_caller() -> None:
    went_on, order = threading.Event(), []

    def job(i: int) -> int:
        if N > 1:  # by itself a rank does it at once
            assert went_on.wait(60)
        order.append(i)
        RANKS.barrier("in between")
        return i

    futures = [RANKS.submit("a test", lambda i=i: job(i)) for i in range(3)]
    went_on.set()
    assert [future.result() for future in futures] == order == [0, 1, 2]


def test_an_error_reaches_who_waits_and_the_next_call_works() -> None:
    with pytest.raises(ZeroDivisionError):
        RANKS.submit("a test", lambda: 1 / 0).result()
    RANKS.barrier("after it")


@pytest.mark.parametrize("columns", [0, 1, 3])
def test_counts(columns: int) -> None:
    own = 100 * R + 10 * np.arange(N)[:, None] + np.arange(columns)
    before = RANKS.bytes_sent.get("counts of a test", 0)
    came = RANKS.all_to_all_counts("counts of a test", own)
    assert came.tolist() == (100 * np.arange(N)[:, None] + 10 * R + np.arange(columns)).tolist()
    sent = RANKS.bytes_sent.get("counts of a test", 0) - before
    assert sent == (N - 1) * own[0].nbytes


class Posted:
    """MPI's communicator, whose messages are counted."""

    def __init__(self, ranks) -> None:
        self._ranks, self.messages = ranks, 0

    def __getattr__(self, name: str):
        self.messages += name in ("Isend", "Irecv")
        return getattr(self._ranks, name)


def test_messages_go_to_ranks_with_rows_alone(monkeypatch) -> None:
    """Here each sends to the next one."""
    posted = Posted(RANKS._ranks)
    monkeypatch.setattr(RANKS, "_ranks", posted)
    to = [int(k == (R + 1) % N) for k in range(N)]
    of = [int(k == (R - 1) % N) for k in range(N)]
    received = np.empty(1, np.int64)
    RANKS.all_to_all("few", Transfer(np.array([R]), to, received, of))
    assert received == (R - 1) % N
    assert posted.messages == (2 if N > 1 else 0)


def test_own_rows_that_do_not_fit_are_refused() -> None:
    x = np.arange(2)
    with pytest.raises(ValueError, match="broadcast"):
        Communicator().all_to_all("a test", Transfer(x, [2], np.empty(3, np.int64), [3]))


def test_world_is_made_once_and_alone_needs_no_mpi() -> None:
    assert world() is RANKS
    assert (Communicator().rank, Communicator().size) == (0, 1)

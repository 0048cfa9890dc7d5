"""Requests to batches: which are computed together, and what each gets."""

import asyncio
import threading

import numpy as np
import pytest

from cupyrec.ragged import Bags
from cupyrec.serving.batching import Batcher, Full, Gone


class Worker:
    """Computes row sums, when it may; knows the rows of each call."""

    def __init__(self):
        self.may, self.calls = threading.Semaphore(0), []

    def __call__(self, dense, ids):
        assert self.may.acquire(timeout=30)
        self.calls.append(len(dense))
        if (dense < 0).any():
            raise RuntimeError("negative")
        return dense.sum(axis=1, keepdims=True), f"v{len(self.calls)}"

    def go(self, times=1):
        self.may.release(times)


def rows(count, value=1.0, form=None):
    """A request of rows that have this value."""
    return np.full((count, 2), value, np.float32), count, form


def convert(inputs):
    dense = np.concatenate(inputs)
    return dense, np.zeros((len(dense), 1), np.int64)


def recorded(batcher):
    """The first number of each request that is converted, in a list a conversion."""
    converted, convert = [], batcher._convert

    def record(inputs):
        converted.append([one[0, 0] for one in inputs])
        return convert(inputs)

    batcher._convert = record
    return converted


def tried(check, **options):
    """Run ``check(batcher, worker)`` in an event loop."""

    async def run():
        worker = Worker()
        batcher = Batcher(convert, worker, **options)
        try:
            await asyncio.wait_for(check(batcher, worker), 60)
        finally:
            worker.go(100)
            batcher.close()

    asyncio.run(run())


def test_what_comes_while_one_is_computed_is_the_next_batch():
    async def check(batcher, worker):
        asked = [batcher.submit(*rows(1, value)) for value in range(5)]
        await asyncio.sleep(0.01)
        worker.go(2)
        answers = [await one for one in asked]
        assert worker.calls == [1, 4]
        assert [values.tolist() for values, _ in answers] == [[[2.0 * v]] for v in range(5)]
        assert [version for _, version in answers] == ["v1", "v2", "v2", "v2", "v2"]

    tried(check)


def test_one_alone_waits_for_nobody():
    async def check(batcher, worker):
        worker.go(20)
        for _ in range(20):
            await asyncio.wait_for(batcher.submit(*rows(1)), 10)
        assert worker.calls == [1] * 20

    tried(check, max_delay=60)


def test_clients_that_take_turns_come_to_be_one_batch():
    async def check(batcher, worker):
        async def client(number):
            await asyncio.sleep(0.001 * number)
            for _ in range(10):
                await batcher.submit(*rows(1))
                await asyncio.sleep(0.001 * (number % 4))

        async def work():
            while True:
                await asyncio.sleep(0.02)
                worker.go()

        working = asyncio.create_task(work())
        await asyncio.gather(*map(client, range(8)))
        working.cancel()
        assert worker.calls.count(8) >= 8
        assert sum(worker.calls) == 80

    tried(check, max_delay=5)


def test_a_client_that_stays_away_is_waited_for_once():
    async def check(batcher, worker):
        asked = [batcher.submit(*rows(1)) for _ in range(4)]
        worker.go()
        await asked[0]
        asked.append(batcher.submit(*rows(1)))  # who was answered
        worker.go(100)
        await asyncio.gather(*asked)
        assert worker.calls == [1, 4]
        start = asyncio.get_running_loop().time()
        await batcher.submit(*rows(1))
        waited = asyncio.get_running_loop().time() - start
        assert 2 <= waited < 30
        for _ in range(20):
            await batcher.submit(*rows(1))
        assert asyncio.get_running_loop().time() - start - waited < 20 * 2

    tried(check, max_delay=2)


def test_full_blocks_wait_for_nobody():
    async def check(batcher, worker):
        worker.go(100)
        await asyncio.gather(*(batcher.submit(*rows(64)) for _ in range(4)))
        await asyncio.wait_for(batcher.submit(*rows(64)), 10)
        assert sum(worker.calls) == 5 * 64

    tried(check, max_delay=60, block=64)


def test_no_request_is_in_two_batches():
    async def check(batcher, worker):
        asked = [batcher.submit(*rows(count, count)) for count in (1, 5, 4, 3, 12, 1)]
        worker.go(10)
        sizes = [len((await one)[0]) for one in asked]
        assert sizes == [1, 5, 4, 3, 12, 1]
        assert worker.calls == [1, 9, 3, 12, 1]

    tried(check, max_batch=10)


def test_a_full_queue():
    async def check(batcher, worker):
        asked = [batcher.submit(*rows(1)), batcher.submit(*rows(6)), batcher.submit(*rows(4))]
        assert batcher.rows == 10
        with pytest.raises(Full):
            batcher.submit(*rows(1))
        worker.go(10)
        assert [len((await one)[0]) for one in asked] == [1, 6, 4]
        assert batcher.rows == 0
        assert len((await batcher.submit(*rows(11)))[0]) == 11  # for a while there is nothing else

    tried(check, max_queue=10)


def test_rows_of_clients_that_are_gone_are_not_computed():
    async def check(batcher, worker):
        first = batcher.submit(*rows(1))
        gone = batcher.submit(*rows(7), is_gone=lambda: True)
        cancelled = batcher.submit(*rows(20))
        cancelled.cancel()
        stays = batcher.submit(*rows(2), is_gone=lambda: False)
        worker.go(10)
        await first
        assert len((await stays)[0]) == 2
        assert worker.calls == [1, 2]
        with pytest.raises(Gone):
            await gone
        assert batcher.rows == 0

    tried(check)


def test_one_that_fails_takes_none_along():
    async def check(batcher, worker):
        asked = [batcher.submit(*rows(1, value)) for value in (0, 1, -1, 2)]
        worker.go(100)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert [o if isinstance(o, Exception) else o[0].item() for o in outcomes][:2] == [0, 2]
        assert isinstance(outcomes[2], RuntimeError)
        assert outcomes[3][0].item() == 4
        assert worker.calls == [1, 3, 1, 1, 1]

    tried(check)


def test_requests_of_one_form_are_converted_together():
    async def check(batcher, worker):
        converted = recorded(batcher)
        forms = "?ababc"
        asked = [batcher.submit(*rows(1 + n % 2, n, form)) for n, form in enumerate(forms)]
        asked.insert(4, batcher.submit(*rows(3, 9, "b"), is_gone=lambda: True))
        worker.go(2)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(outcomes.pop(4), Gone)
        told = [values.ravel().tolist() for values, _ in outcomes]
        assert told == [[2.0 * n] * (1 + n % 2) for n in range(6)]
        assert converted == [[0], [1, 3], [2, 4], [5]]
        assert worker.calls == [1, 8]

    tried(check)


def test_inputs_that_are_refused_take_none_along():
    async def check(batcher, worker):
        def strict(inputs):
            if any((one == 7).any() for one in inputs):
                raise ValueError(f"7 among {len(inputs)}")
            return convert(inputs)

        batcher._convert = strict
        converted = recorded(batcher)
        asked = [batcher.submit(*rows(2, value)) for value in (0, 1, 7, 2, 7, 3, 5)]
        asked.append(batcher.submit(*rows(1, 4, "other")))
        worker.go(2)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(outcomes.pop(n)) for n in (4, 2)] == ["7 among 1"] * 2
        assert [values[0, 0] for values, _ in outcomes] == [0, 2, 4, 6, 10, 8]
        assert converted[:3] == [[0], [1, 7, 2, 7, 3, 5], [1, 7, 2]]
        assert [one for one in converted[3:] if 7 not in one] == [[1], [2], [3, 5], [4]]
        assert worker.calls == [2, 9]
        assert (batcher.rows, batcher._busy) == (0, False)
        with pytest.raises(ValueError, match="7 among 1"):
            await batcher.submit(*rows(1, 7))
        assert worker.calls == [2, 9]

    tried(check)


def test_bags_are_put_side_by_side():
    async def check(batcher, worker):
        seen = []

        def compute(dense, ids):
            assert worker.may.acquire(timeout=30)
            seen.append(ids)
            if len(ids) == 3 or 3 in ids.ids:
                raise RuntimeError("three")
            return dense[:, :1], "v"

        batcher._compute = compute
        batcher._convert = lambda bags: (np.zeros((len(bags), 1), np.float32), Bags.joined(bags))
        bags = [Bags(np.arange(n), np.array([0, 1, n]), 2) for n in (2, 3, 4)]
        asked = [batcher.submit(one, 1, form) for one, form in zip(bags, "abb", strict=True)]
        asked.append(batcher.submit(bags[1], 1, "c"))
        worker.go(10)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(one, RuntimeError) for one in outcomes] == [False, False, True, False]
        assert [ids.shape for ids in seen] == [(1, 2), (3, 2), (1, 2), (1, 2), (1, 2)]
        assert seen[1].ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
        assert seen[1].offsets.tolist() == [0, 1, 3, 4, 7, 8, 10]
        assert [ids.ids.tolist() for ids in seen[2:]] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2]]
        assert [ids.offsets.tolist() for ids in seen[2:]] == [[0, 1, 3], [0, 1, 4], [0, 1, 3]]

    tried(check)


def test_closing_cancels_who_waits():
    async def run():
        worker = Worker()
        batcher = Batcher(convert, worker)
        asked = [batcher.submit(*rows(1)) for _ in range(2)]
        worker.go(1)
        batcher.close()
        await asyncio.sleep(0.01)
        assert (len((await asked[0])[0]), asked[1].cancelled()) == (1, True)
        await asyncio.to_thread(batcher._thread.join, 60)
        assert not batcher._thread.is_alive()

    asyncio.run(run())


def test_rows_that_were_not_announced_are_nobodys():
    """Else a neighbour would get them."""

    async def check(batcher, worker):
        worker.go(10)
        _, _, form = rows(1)
        first = batcher.submit(*rows(1, 1))
        liar = batcher.submit(np.full((2, 2), 5, np.float32), 1, form)
        last = batcher.submit(*rows(1, 2))
        with pytest.raises(RuntimeError, match="as many rows as was said"):
            await liar
        assert [(await one)[0].tolist() for one in (first, last)] == [[[2]], [[4]]]

    tried(check)


def test_what_fails_between_calls_leaves_the_thread_at_work():
    async def check(batcher, worker):
        worker.go(10)
        held = batcher.submit(*rows(1, 7))
        wide = np.ones((1, 3), np.float32), 1, "wide"
        asked = [batcher.submit(*rows(1)), batcher.submit(*wide)]  # not to be put together
        assert (await held)[0].tolist() == [[14]]
        for one in asked:
            with pytest.raises(ValueError, match="dimensions"):
                await one
        assert (await batcher.submit(*rows(1, 4)))[0].tolist() == [[8]]

    tried(check)

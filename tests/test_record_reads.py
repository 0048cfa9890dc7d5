"""Reads of records from files, whatever their order and the pages they lie on."""

import concurrent.futures
import errno
import os
import threading
import time

import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.ops import log_records, record_reads
from cupyrec.ops.log_records import CHUNK, FILES, SLOT_BITS, Places
from cupyrec.ops.record_reads import Failure, aligned, read_records


@pytest.fixture(scope="module")
def pool():
    with concurrent.futures.ThreadPoolExecutor(record_reads.READERS) as pool:
        yield pool


def write(path, slots, words, number):
    """A file whose slot s has row 1000 number + s; return payloads."""
    chunk = arrays.pages(CHUNK, np.uint8)
    chunks = np.array([chunk.ctypes.data], np.uint64)
    log_records.reserve(chunks, 0, 1 << 20)
    zeros = [np.zeros(FILES, np.int64) for _ in range(3)]
    places = Places(chunks, *zeros, np.zeros(FILES, np.uint64))
    payloads = np.random.default_rng(number).integers(0, 1 << 63, (slots, words), np.uint64)
    records = np.zeros((slots, 2 + words), np.uint64)
    rows = 1000 * number + np.arange(slots)
    log_records.append(places, rows, payloads, records, number << SLOT_BITS, 1)
    path.write_bytes(records.tobytes())
    return payloads


@pytest.fixture(params=[0, os.O_DIRECT])
def flags(request):
    return request.param


def opened(paths, flags):
    descriptors = np.full(FILES, -1, np.int32)
    for number, path in paths.items():
        descriptors[number] = os.open(path, os.O_RDONLY | flags)
    return descriptors


def close(descriptors):
    for descriptor in descriptors[descriptors >= 0].tolist():
        os.close(descriptor)


@pytest.mark.parametrize("words", [4, 10, 514, 40_000])
@pytest.mark.parametrize("n", [0, 1, 7, 300])
def test_any_order_from_any_files(tmp_path, pool, flags, words, n):
    slots = 200 if words < 10_000 else 9
    numbers = [0, 5, FILES - 1]
    paths = {number: tmp_path / str(number) for number in numbers}
    held = {number: write(path, slots, words, number % 7) for number, path in paths.items()}
    rng = np.random.default_rng(n)
    files, at = rng.choice(numbers, n), rng.integers(0, slots, n)
    addresses = files << SLOT_BITS | at
    rows = 1000 * (files % 7) + at
    passed_over = rng.random(n) < 0.2
    addresses[passed_over] = -1
    out = np.zeros((n, words), np.uint64)
    descriptors = opened(paths, flags)
    nbytes, failure = read_records(pool, descriptors, addresses, rows, out)
    close(descriptors)
    assert failure is None
    want = np.array([held[f][a] for f, a in zip(files, at, strict=True)]).reshape(n, words)
    np.testing.assert_array_equal(out, np.where(passed_over[:, None], 0, want))
    assert nbytes >= len(np.unique(addresses[~passed_over])) * 8 * (2 + words)


def test_neighbours_are_read_together(tmp_path, pool, flags):
    payloads = write(tmp_path / "0", 1000, 10, 0)
    descriptors, out = opened({0: tmp_path / "0"}, flags), np.zeros((1000, 10), np.uint64)
    nbytes, failure = read_records(pool, descriptors, np.arange(1000), np.arange(1000), out)
    close(descriptors)
    assert failure is None and nbytes <= 96_000 + record_reads.READERS * 2 * 4096
    np.testing.assert_array_equal(out, payloads)


@pytest.mark.parametrize("harm", ["bit", "row", "end", "descriptor"])
def test_says_where_it_failed(tmp_path, pool, flags, harm):
    path = tmp_path / "0"
    write(path, 100, 10, 0)
    rows, descriptors = np.arange(100), opened({0: path}, flags)
    if harm == "bit":
        data = bytearray(path.read_bytes())
        data[70 * 96 + 50] ^= 4
        path.write_bytes(data)
    elif harm == "row":
        rows[70] = 99
    elif harm == "end":
        os.truncate(path, 70 * 96 + 95)
    else:
        close(descriptors)
        descriptors[:] = -1
    addresses = np.arange(100)
    got = read_records(pool, descriptors, addresses, rows, np.empty((100, 10), np.uint64))[1]
    if harm != "descriptor":
        close(descriptors)
    assert got == (Failure(0, errno.EBADF) if harm == "descriptor" else Failure(70, 0))


def test_aligned_memory():
    for nbytes in (1, 17, 4096, 100_000):
        memory = aligned(nbytes)
        assert memory.size == nbytes and memory.ctypes.data % 4096 == 0


def test_the_end_of_a_file_that_grows(tmp_path, pool, flags):
    write(tmp_path / "all", 4000, 4, 0)
    records, path = (tmp_path / "all").read_bytes(), tmp_path / "0"
    path.write_bytes(records[: 48 * 10])
    written, descriptors = [10], opened({0: path}, flags)

    def append():
        with open(path, "ab", buffering=0) as stream:
            for n in range(10, 4000):
                stream.write(records[48 * n : 48 * (n + 1)])
                written[0] = n + 1
                while n % 100 == 0 and len(failures) < n // 100 and time.monotonic() < end:
                    time.sleep(0.001)  # for reads in between

    out, nine = np.empty((1, 4), np.uint64), np.array([9])
    failures = [read_records(pool, descriptors, nine, nine, out)[1]]  # now it is compiled
    writer, end = threading.Thread(target=append), time.monotonic() + 60
    writer.start()
    while written[0] < 4000:
        last = np.array([written[0] - 1])
        failures.append(read_records(pool, descriptors, last, last, out)[1])
    writer.join()
    close(descriptors)
    assert len(failures) > 10 and not any(failures)

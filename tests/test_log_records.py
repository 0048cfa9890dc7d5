"""Records, the addresses of rows, and which records are needed, against plain Python."""

import numpy as np
import pytest

from cupyrec import arrays
from cupyrec.ops import log_records
from cupyrec.ops.log_records import CHUNK, CHUNK_BITS, FILES, NOWHERE, SLOT_BITS, Places

WORDS = 4  # uint64 a payload


class Log:
    """Places of `rows` rows, none of which is anywhere yet, and files of 64 slots."""

    def __init__(self, rows):
        count = -(-rows // (1 << CHUNK_BITS))
        self.chunks = [arrays.pages(CHUNK, np.uint8) for _ in range(count)]
        chunks = np.array([chunk.ctypes.data for chunk in self.chunks], np.uint64)
        zeros = [np.zeros(FILES, np.int64) for _ in range(3)]
        self.places = Places(chunks, *zeros, np.zeros(FILES, np.uint64))
        self.files = {}

    def file(self, number, committed=0):
        records, bits = np.zeros((64, 2 + WORDS), np.uint64), np.zeros(1, np.uint64)
        self.files[number] = records, bits
        self.places.committed[number] = committed
        self.places.bits[number] = bits.ctypes.data
        return records

    def find(self, *rows):
        addresses = np.empty(len(rows), np.int64)
        log_records.find(self.places.chunks, np.array(rows), addresses)
        return addresses.tolist()


def payloads(n, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 63, (n, WORDS), np.uint64)


def is_whole(record):
    log, sequences = Log(4), np.zeros(4, np.uint64)
    done, _ = log_records.scan(log.places, sequences, record.reshape(1, -1), 0, 1 << 55)
    return done == 1


def test_each_flipped_bit_is_seen():
    log = Log(4)
    log_records.reserve(log.places.chunks, 0, 4)
    records = log.file(0)
    log_records.append(log.places, np.array([3]), payloads(1), records, 0, 5)
    assert is_whole(records[0])
    for bit in range(64 * (2 + WORDS)):
        flipped = records[0].copy()
        flipped[bit // 64] ^= np.uint64(1 << bit % 64)
        assert not is_whole(flipped), bit


def test_zeros_and_another_records_end_are_not_whole():
    log = Log(4)
    log_records.reserve(log.places.chunks, 0, 4)
    records = log.file(0)
    log_records.append(log.places, np.array([2, 3]), payloads(2), records, 0, 5)
    torn = records[0].copy()
    torn[4:] = records[1, 4:]
    assert not is_whole(np.zeros(2 + WORDS, np.uint64))
    assert not is_whole(torn)


def test_rows_and_addresses_beyond_32_bits():
    rows = np.array([10**9, 10**9 + 1, 0, (1 << CHUNK_BITS) - 1, 1 << CHUNK_BITS, 10**9 - 1])
    log = Log(int(rows.max()) + 1)  # five gigabytes of addresses, of which 5 pages are written to
    for row in rows.tolist():
        log_records.reserve(log.places.chunks, row, row + 1)
    assert log.find(*rows) == [NOWHERE] * rows.size
    last = FILES - 1 << SLOT_BITS | (1 << SLOT_BITS) - 64
    log_records.append(log.places, rows, payloads(6), log.file(FILES - 1), last, 1 << 54)
    assert log.find(*rows) == [last + i for i in range(6)]
    assert log.places.live[FILES - 1] == 6
    out, got = np.empty(64, np.int64), np.empty((64, WORDS), np.uint64)
    records = log.files[FILES - 1][0]
    n = log_records.live_records(log.places.chunks, 10**9 + 2, records[:6], last, out, got)
    assert (n, out[:n].tolist()) == (6, rows.tolist())
    np.testing.assert_array_equal(got[:n], payloads(6))


def test_superseded_records_are_held_where_committed():
    log = Log(10)
    log_records.reserve(log.places.chunks, 0, 10)
    old, new = log.file(0, committed=3), log.file(1)
    log_records.append(log.places, np.arange(5), payloads(5), old, 0, 1)
    log_records.append(log.places, np.array([1, 4, 1]), payloads(3), new, 1 << SLOT_BITS, 6)
    assert log.find(0, 1, 2, 3, 4) == [0, 1 << SLOT_BITS | 2, 2, 3, 1 << SLOT_BITS | 1]
    assert log.places.live[:2].tolist() == [3, 2]
    assert log.places.held[:2].tolist() == [1, 0]
    assert log.files[0][1].tolist() == [0b10]  # record 4 was not committed
    log_records.leave(log.places, np.array([2, 3, 7]))  # 7 is nowhere
    assert log.places.live[:2].tolist() == [1, 2]
    assert log.files[0][1].tolist() == [0b110]


def test_moves_what_is_needed():
    log = Log(10)
    log_records.reserve(log.places.chunks, 0, 10)
    source, newer = log.file(0, committed=4), log.file(1)
    target = log.file(2, committed=64)
    log_records.append(log.places, np.arange(6), payloads(6), source, 0, 1)
    log_records.append(log.places, np.array([1, 5]), payloads(2), newer, 1 << SLOT_BITS, 7)
    to = 2 << SLOT_BITS | 10
    # Needed: 0, 2 and 3, 4 as the newest, 1 as held; of those two find room at first.
    done, moved = log_records.move(log.places, 6, source, 0, target[10:12], to)
    assert (done, moved) == (2, 2)
    assert log.places.held[:3].tolist() == [0, 0, 1]
    assert log.files[2][1].tolist() == [1 << 11]
    done, moved = log_records.move(log.places, 6, source[2:6], 2, target[12:], to + 2)
    assert (done, moved) == (4, 3)
    assert log.find(0, 1, 2, 3, 4) == [to, 1 << SLOT_BITS, to + 2, to + 3, to + 4]
    assert log.places.live[:3].tolist() == [0, 2, 4]
    np.testing.assert_array_equal(target[10:15], source[:5])
    assert log_records.move(log.places, 6, source, 0, target[15:], to + 5) == (64, 0)


def test_move_stops_at_a_damaged_record_that_is_needed():
    log = Log(4)
    log_records.reserve(log.places.chunks, 0, 4)
    source, target = log.file(0), log.file(1)
    log_records.append(log.places, np.arange(4), payloads(4), source, 0, 1)
    log_records.append(log.places, np.array([0]), payloads(1), target, 1 << SLOT_BITS, 5)
    source[0, 3] ^= np.uint64(1)  # nobody needs it
    source[2, 5] ^= np.uint64(1)
    to = 1 << SLOT_BITS | 1
    assert log_records.move(log.places, 4, source[:4], 0, target[1:], to) == (-3, 1)


def test_scan_takes_the_newest():
    log = Log(10)
    log_records.reserve(log.places.chunks, 0, 10)
    first, second = log.file(0), log.file(1)
    log_records.append(log.places, np.array([0, 1, 2, 9]), payloads(4), first, 0, 5)
    log_records.append(log.places, np.array([1, 0]), payloads(2), second, 1 << SLOT_BITS, 1)
    log_records.void(second[2:4])
    log.places.live[:] = 0
    sequences = np.zeros(9, np.uint64)
    log_records.reserve(log.places.chunks, 0, 10)
    scan = log_records.scan
    assert scan(log.places, sequences, second[:4], 1 << SLOT_BITS, 8) == (4, 2)
    assert scan(log.places, sequences, first[:4], 0, 8) == (4, 8)
    assert sequences[:4].tolist() == [5, 6, 7, 0]
    assert log.find(0, 1, 2, 3, 9) == [0, 1, 2, NOWHERE, NOWHERE]
    assert log.places.live[:2].tolist() == [3, 0]
    assert scan(log.places, sequences, first[:4], 0, 7) == (3, 7)  # 8 is of no commit
    assert scan(log.places, sequences, first, 0, 8) == (4, 8)  # then zeros


@pytest.mark.parametrize("n", [0, 1, 3, 17])
def test_copies_what_is_buffered(n):
    log = Log(64)
    log_records.reserve(log.places.chunks, 0, 64)
    log_records.append(log.places, np.arange(n), payloads(n), log.file(3), 3 << SLOT_BITS | 5, 1)
    addresses = np.concatenate([np.arange(n)[::-1] + (3 << SLOT_BITS | 5), [7, -1]])
    out = np.zeros((n + 2, WORDS), np.uint64)
    log_records.copy_buffered(addresses, log.files[3][0][:n], 3 << SLOT_BITS | 5, out)
    np.testing.assert_array_equal(out[:n], payloads(n)[::-1])
    assert addresses.tolist() == [-1] * n + [7, -1] and not out[n:].any()

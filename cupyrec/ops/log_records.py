"""Records of a log of rows, where the newest record of each row lies, and which ones are needed.

A record is a row of uint64: two words of header, then the row's payload. The first word is a
checksum of all that follows it, and in its high half the low half of the row number; the second is
the high 8 bits of the row number and, above them, the record's sequence number. An *address* says
where a record lies: file << SLOT_BITS | slot. It has 40 bits, as a row number has; the addresses of
2^20 rows are a chunk of 5 MB, low words first, then the high bytes.

The checksum multiplies 8 bytes at a time into 64 bits, of which 32 are kept: 15 ns for a record of
96 bytes, where crc32 by tables takes 75.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from cupyrec import cpu

__all__ = [
    "CHUNK", "CHUNK_BITS", "FILES", "HEADER", "NOWHERE", "SLOT_BITS", "Places", "append",
    "copy_buffered", "find", "first_damaged", "leave", "live_records", "move", "reserve", "row_in",
    "scan", "void", "whole",
]  # fmt: skip

HEADER = 2  # uint64 words
SLOT_BITS, _FILE_BITS = 26, 14
FILES = 1 << _FILE_BITS
NOWHERE = (1 << 40) - 1  # address of a row without record
_VOID = (1 << 40) - 1  # row number of a record that is of none: it fills a page up
CHUNK_BITS = 20
CHUNK = 5 << CHUNK_BITS  # bytes
_AHEAD = 16  # rows whose cache misses overlap
_SLOT = (1 << SLOT_BITS) - 1
_SEED, _TIMES = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_1, _8, _29, _32, _63 = map(np.uint64, (1, 8, 29, 32, 63))
_LOW_8, _LOW_32 = np.uint64(0xFF), np.uint64(0xFFFFFFFF)


class Places(NamedTuple):
    """Where records lie, and of each file how many are needed.

    Attributes
    ----------
    chunks : (C,) array of uint64
        Addresses in memory of the chunks of addresses of rows 0 .. 2^20 C - 1.
    live, held : (FILES,) arrays of int64
        Records that are some row's newest, and that the last commit needs though they are not.
    committed : (FILES,) array of int64
        Slots from 0 on whose records are part of the last commit.
    bits : (FILES,) array of uint64
        Addresses in memory of a bit for each of these slots, in words of uint64: it is held.

    Examples
    --------
    See `append`.
    """

    chunks: Any
    live: Any
    held: Any
    committed: Any
    bits: Any


@cpu.exact_inline
def _address(chunks, row):
    chunk, at = chunks[row >> CHUNK_BITS], row & ((1 << CHUNK_BITS) - 1)
    low = carray(cpu.pointer(chunk), (1 << CHUNK_BITS,), np.uint32)[at]
    high = carray(cpu.pointer(chunk + np.uint64(4 << CHUNK_BITS)), (1 << CHUNK_BITS,), np.uint8)[at]
    return np.int64(low) | np.int64(high) << 32


@cpu.exact_inline
def _place(chunks, row, address):
    chunk, at = chunks[row >> CHUNK_BITS], row & ((1 << CHUNK_BITS) - 1)
    low = carray(cpu.pointer(chunk), (1 << CHUNK_BITS,), np.uint32)
    high = carray(cpu.pointer(chunk + np.uint64(4 << CHUNK_BITS)), (1 << CHUNK_BITS,), np.uint8)
    low[at], high[at] = np.uint32(address & 0xFFFFFFFF), np.uint8(address >> 32)


@cpu.exact_inline
def _ask_for(chunks, row):
    chunk, at = chunks[row >> CHUNK_BITS], row & ((1 << CHUNK_BITS) - 1)
    cpu.prefetch(chunk + np.uint64(4 * at))
    cpu.prefetch(chunk + np.uint64((4 << CHUNK_BITS) + at))


@cpu.exact_inline
def _ask(chunks, rows, i):
    if i < rows.size:
        _ask_for(chunks, rows[i])


# A record as loops see it: `words` words from `at` on of a flat array of uint64.


@cpu.exact_inline
def _checksum(flat, at, words):
    h = (_SEED ^ flat[at] >> _32) * _TIMES
    for j in range(at + 1, at + words):
        h = (h ^ h >> _29 ^ flat[j]) * _TIMES
    return (h ^ h >> _29) * _TIMES >> _32


@cpu.exact_inline
def whole(flat, at, words) -> bool:
    """Whether a record is what was written."""
    return flat[at] & _LOW_32 == _checksum(flat, at, words)


@cpu.exact_inline
def row_in(flat, at) -> int:
    """Row number of a record."""
    return np.int64(flat[at] >> _32 | (flat[at + 1] & _LOW_8) << _32)


@cpu.exact_inline
def _head(flat, at, words, row, sequence):
    flat[at + 1] = np.uint64(row >> 32) | np.uint64(sequence) << _8
    flat[at] = np.uint64(row) << _32
    flat[at] |= _checksum(flat, at, words)


@cpu.exact_inline
def _held(places, address):
    """A view of the word of a slot's bit, and the bit."""
    slot = np.uint64(address & _SLOT)
    word = cpu.pointer(places.bits[address >> SLOT_BITS] + (slot >> np.uint64(6)) * _8)
    return carray(word, (1,), np.uint64), _1 << (slot & _63)


@cpu.exact_inline
def _leave(places, address):
    """A record is no longer the newest of its row."""
    if address == NOWHERE:
        return
    file = address >> SLOT_BITS
    places.live[file] -= 1
    if address & _SLOT < places.committed[file]:
        word, bit = _held(places, address)
        word[0] |= bit
        places.held[file] += 1


@cpu.exact_loop
def reserve(chunks, first, stop) -> None:
    """Let rows `first` .. `stop` - 1 have no record."""
    for row in range(first, stop):
        _place(chunks, row, NOWHERE)


@cpu.exact_loop
def find(chunks, rows, addresses) -> None:
    """Address of each row's newest record, into int64 (N,)."""
    for i in range(rows.size):
        _ask(chunks, rows, i + _AHEAD)
        addresses[i] = _address(chunks, rows[i])


@cpu.exact_loop
def append(places, rows, payloads, records, address, sequence) -> None:
    """Make new versions of rows.

    Parameters
    ----------
    places : Places
    rows : (N,) array of int64
    payloads : (N, W) array of uint64
    records : (N or more, 2 + W) array of uint64
        Where the records are written to.
    address : int
        That of the first of them.
    sequence : int
        That of the first.
    """
    flat, words = records.reshape(-1), records.shape[1]
    for i in range(rows.size):
        _ask(places.chunks, rows, i + _AHEAD)
        for j in range(payloads.shape[1]):
            flat[i * words + HEADER + j] = payloads[i, j]
        _head(flat, i * words, words, rows[i], sequence + i)
        _leave(places, _address(places.chunks, rows[i]))
        _place(places.chunks, rows[i], address + i)
        places.live[address >> SLOT_BITS] += 1


@cpu.exact_loop
def void(records) -> None:
    """Make records that are of no row."""
    flat, words = records.reshape(-1), records.shape[1]
    for at in range(0, flat.size, words):
        flat[at : at + words] = 0
        _head(flat, at, words, _VOID, 0)


@cpu.exact_loop
def first_damaged(records) -> int:
    """Number of the first record that is not what was written; how many there are if all are."""
    flat, words = records.reshape(-1), records.shape[1]
    for i in range(len(records)):
        if not whole(flat, i * words, words):
            return i
    return len(records)


@cpu.exact_loop
def leave(places, rows) -> None:
    """The newest records of these rows are not that any more; what is, the caller knows."""
    for i in range(rows.size):
        _ask(places.chunks, rows, i + _AHEAD)
        _leave(places, _address(places.chunks, rows[i]))


@cpu.exact_loop
def copy_buffered(addresses, records, first, payloads) -> None:
    """Copy what lies in a buffer, whose first record has address `first`.

    The payloads (N, W) of uint64 of records that lie there; their addresses become -1.
    """
    for i in range(addresses.size):
        at = addresses[i] - first
        if addresses[i] >= 0 and 0 <= at < len(records):
            for j in range(payloads.shape[1]):
                payloads[i, j] = records[at, HEADER + j]
            addresses[i] = -1


@cpu.exact_loop
def move(places, count, source, address, target, to) -> tuple[int, int]:
    """Copy records that are needed to another file.

    Parameters
    ----------
    places : Places
    count : int
        Rows there are.
    source, target : (N, 2 + W), (M, 2 + W) arrays of uint64
        Records of a file, and room in another.
    address, to : int
        Those of their first records.

    Returns
    -------
    done : int
        Records at the start of `source` that are not needed there any more; -1 - i if record i is
        damaged.
    moved : int
        Records written to `target`.
    """
    start, end, moved = address >> SLOT_BITS, to >> SLOT_BITS, 0
    flat, words = source.reshape(-1), source.shape[1]
    for i in range(len(source)):
        row, here = row_in(flat, i * words), address + i
        live = row < count and _address(places.chunks, row) == here
        held = False
        if not live and here & _SLOT < places.committed[start]:
            word, bit = _held(places, here)
            held = word[0] & bit != 0
        if not live and not held:
            continue
        if moved == len(target):
            return i, moved
        if not whole(flat, i * words, words):
            return -1 - i, moved
        for j in range(words):
            target[moved, j] = source[i, j]
        if live:
            _place(places.chunks, row, to + moved)
            places.live[start] -= 1
            places.live[end] += 1
        else:
            word[0] &= ~bit
            places.held[start] -= 1
            word, bit = _held(places, to + moved)
            word[0] |= bit
            places.held[end] += 1
        moved += 1
    return len(source), moved


@cpu.exact_loop
def live_records(chunks, count, source, address, rows, payloads) -> int:
    """Copy the newest records of rows out of a file's.

    Row numbers (N,) and payloads (N, W), in the order of `source` (N, 2 + W); returns how many
    there are, or -1 - i if record i is damaged.
    """
    flat, words, n = source.reshape(-1), source.shape[1], 0
    for i in range(len(source)):
        row = row_in(flat, i * words)
        if row < count and _address(chunks, row) == address + i:
            if not whole(flat, i * words, words):
                return -1 - i
            rows[n] = row
            for j in range(payloads.shape[1]):
                payloads[n, j] = source[i, HEADER + j]
            n += 1
    return n


@cpu.exact_loop
def scan(places, sequences, source, address, latest) -> tuple[int, int]:
    """Learn from a file's records where rows lie.

    Parameters
    ----------
    places : Places
    sequences : (rows,) array of uint64
        Sequence number of the newest record that is known of each row, 0 if none is.
    source : (N, 2 + W) array of uint64
    address : int
        That of the first of them.
    latest : int
        No record has a larger sequence number.

    Returns
    -------
    done : int
        Number of the first record that is damaged; N if none is.
    newest : int
        The largest sequence number of those before it.
    """
    flat, words, newest = source.reshape(-1), source.shape[1], np.uint64(0)
    memory = np.uint64(sequences.ctypes.data)
    for i in range(len(source)):
        if i + _AHEAD < len(source):
            ahead = row_in(flat, (i + _AHEAD) * words)
            if ahead < sequences.size:
                cpu.prefetch(memory + np.uint64(8 * ahead))
                _ask_for(places.chunks, ahead)
        row, sequence = row_in(flat, i * words), source[i, 1] >> _8
        if not whole(flat, i * words, words) or sequence > np.uint64(latest):
            return i, np.int64(newest)
        newest = max(newest, sequence)
        if row < sequences.size and sequence > sequences[row]:
            if sequences[row]:
                places.live[_address(places.chunks, row) >> SLOT_BITS] -= 1
            sequences[row] = sequence
            _place(places.chunks, row, address + i)
            places.live[address >> SLOT_BITS] += 1
    return len(source), np.int64(newest)

"""Slots of places, against a dict and against what the module says of their order."""

import copy

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyrec import arrays, huge_pages
from cupyrec.ops import place_segments
from cupyrec.ops.place_segments import PlaceSegments

FULL = 42, 7, 28  # as an index has them at first
WEAK = 8, 2, 4


def place_of(table, key, place_bits, nonzero_bits):
    place = oracle.hash_key(table, key) >> 64 - place_bits
    return place + (place % 2**nonzero_bits == 0)


def id_of_hash(table, h):
    """The id whose key has a hash: each step of `oracle.hash_key` undone."""
    h = (h ^ h >> 33) * pow(0xC4CEB9FE1A85EC53, -1, 2**64) % 2**64
    h = ((h ^ h >> 33) - (table + 1) * 0x9E3779B97F4A7C15) % 2**64
    h = h * pow(0xFF51AFD7ED558CCD, -1, 2**64) % 2**64
    h ^= h >> 33
    return h - (h >> 63 << 64)


def stand(segments, place_bits, segment_bits):
    """(place, row) in the order of slots, after checks of where each stands."""
    bits, result = place_bits - segment_bits, []
    assert len(segments._slots) == 2**segment_bits
    for s, slots in enumerate(segments._slots):
        words, size = slots.tolist(), slots.size
        taken = [at for at in range(size) if words[at]]
        assert len(taken) == segments._table[s, 2] < size
        assert segments._table[s, :2].tolist() == [slots.ctypes.data, size]
        points = []
        for at in taken:
            row, fraction = divmod(words[at], 2**bits)
            assert fraction > 0
            home = fraction * size >> bits
            steps = (at - home) % size
            assert all(words[(home + i) % size] for i in range(steps))  # a search comes here
            points.append((at - steps, fraction))  # below 0 if it went around the end
            result.append((s << bits | fraction, row))
        around = [home < 0 for home, _ in points]
        assert around == sorted(around, reverse=True)
        fractions = [fraction for _, fraction in points]
        turn = sum(around)
        in_turn = fractions[turn:] + fractions[:turn]
        assert in_turn == sorted(set(in_turn))
    return result


def random_places(n, seed=0, bits=42):
    places = np.random.default_rng(seed).integers(1, 2**bits, n, dtype=np.uint64)
    return np.unique(places | np.uint64(1))


weak_places = st.lists(
    st.integers(1, 255).filter(lambda place: place % 16), max_size=40, unique=True
)
steps = st.lists(st.tuples(st.sampled_from(["put", "remove", "replace"]), weak_places), max_size=8)


@settings(max_examples=100)
@given(steps)
def test_behaves_like_a_dict(steps):
    segments, model = PlaceSegments(*WEAK), {}
    for number, (name, batch) in enumerate(steps):
        places = np.array(batch, np.uint64)
        rows = np.arange(places.size) + 1000 * number
        pairs = list(zip(batch, rows.tolist(), strict=True))
        if name == "put":
            taken = segments.put(places, rows)
            assert taken.tolist() == [place in model for place in batch]
            model |= {place: row for place, row in pairs if place not in model}
        elif name == "remove":
            segments.remove(places)
            model = {place: row for place, row in model.items() if place not in batch}
        else:
            segments.replace(places, rows)
            model |= {place: row for place, row in pairs if place in model}
        assert sorted(stand(segments, *WEAK[:2])) == sorted(model.items())
        assert len(segments) == len(model)


def test_of_one_call_the_first_takes_the_place():
    segments = PlaceSegments(*WEAK)
    places = np.array([17, 17, 18, 17, 18], np.uint64)
    taken = segments.put(places, np.arange(5))
    assert taken.tolist() == [False, True, False, True, True]
    assert stand(segments, *WEAK[:2]) == [(17, 0), (18, 2)]


@pytest.mark.parametrize("bits", [FULL, (42, 14, 28), (20, 3, 12), (41, 9, 30)])
def test_places_are_the_top_bits_of_the_hash(bits):
    segments = PlaceSegments(*bits)
    ids = np.array([0, 1, -1, -(2**63), 2**63 - 1, *range(2, 2000)])
    tables = np.arange(ids.size, dtype=np.uint32) * np.uint32(2_000_003)
    places = segments.places(tables, ids)
    expected = [
        place_of(t, i, bits[0], bits[2]) for t, i in zip(tables.tolist(), ids.tolist(), strict=True)
    ]
    assert places.tolist() == expected
    taken = segments.put(places, np.arange(ids.size))
    rows = np.empty(ids.size, np.int64)
    segments.find(tables, ids, rows)
    assert rows.tolist() == [expected.index(place) for place in expected]
    assert taken.tolist() == (rows != np.arange(ids.size)).tolist()


def test_no_fraction_is_0():
    """Nor what of it is one with more segments: then the place is the next one."""
    tables = np.arange(6, dtype=np.uint32)
    lows = [0, 1, 2**28, 2**28 + 1, 2**34, 2**34 + 2]
    ids = np.array([id_of_hash(t, (5 << 35 | low) << 22 | 7) for t, low in enumerate(lows)])
    for segment_bits in (7, 14):
        segments = PlaceSegments(42, segment_bits, 28)
        places = segments.places(tables, ids)
        assert (places - np.uint64(5 << 35)).tolist() == [
            1, 1, 2**28 + 1, 2**28 + 1, 2**34 + 1, 2**34 + 2]  # fmt: skip
        assert segments.put(places, np.arange(6)).tolist() == [False, True] * 2 + [False] * 2


@pytest.mark.parametrize("around", [False, True])
def test_a_segment_grows_and_shrinks_to_slots_in_order(around):
    """In one pass; with and without slots around the end, and of places that crowd."""
    generator, bits = np.random.default_rng(0), np.uint64(35)
    for n, top in [(5000, 2**35), (40, 2**35), (300, 2**28), (3, 2**35)]:
        fractions = generator.choice(top - 1, n, replace=False).astype(np.uint64) + np.uint64(1)
        fractions = np.uint64(2**35) - fractions if around else fractions
        slots = np.zeros(int(n / 0.9) + 1, np.uint64)
        segments = PlaceSegments(35, 0, 28)
        place_segments._refill_cpu(np.sort(fractions), bits, slots)
        for size in (slots.size, 2 * slots.size, n + 1, slots.size * 11 // 10, n + 2):
            filled = np.zeros(size, np.uint64)
            place_segments._refill_cpu(slots, bits, filled)
            segments._slots = [filled]
            segments._table[0] = filled.ctypes.data, size, n
            assert sorted(stand(segments, 35, 0)) == [(f, 0) for f in sorted(fractions.tolist())]
            slots = filled


@pytest.mark.parametrize("n", [3000, 300_000])
def test_searches_are_short(n):
    """Mean steps of linear probing at load a are (1 / (1 - a) - 1) / 2 (Knuth, 6.4), and with
    places in order the longest are some ln(n) / 0.2 instead of thousands."""
    places = random_places(n)
    segments = PlaceSegments(*FULL)
    segments.put(places, np.arange(places.size))
    steps = []
    for slots in segments._slots:
        at = np.flatnonzero(slots)
        fractions = (slots[at] % np.uint64(2**35)).tolist()
        homes = np.array([fraction * slots.size >> 35 for fraction in fractions], np.int64)
        steps.append((at - homes) % slots.size)
    steps = np.concatenate(steps)
    load = len(segments) / segments.size
    assert 0.75 < load < 0.88
    assert steps.mean() <= 1.1 * (1 / (1 - load) - 1) / 2
    assert steps.max() <= np.log(places.size) / 0.2


def test_sizes_are_a_growth_apart_and_staggered():
    for count in (0, 1, 3, 100, 5000, 10**7):
        sizes = place_segments._sizes(np.full(128, count))
        assert (count <= 0.88 * sizes + 1e-6).all()
        assert (sizes <= np.maximum(1.1 * count / 0.88 + 2, 5)).all()
        assert len(set(sizes.tolist())) == 128 or count < 5000


def test_memory_and_work_are_even_while_segments_grow():
    """No jump; some of the segments at a time."""
    places = np.random.default_rng(1).permutation(random_places(600_000))
    segments, rows = PlaceSegments(*FULL), np.arange(places.size)
    segments.put(places[:400_000], rows[:400_000])
    for first in range(400_000, 590_000, 10_000):
        before = segments._table[:, 1].copy()
        segments.put(places[first : first + 10_000], rows[first : first + 10_000])
        grown = (before != segments._table[:, 1]).sum()
        assert 5 <= grown <= 70  # 32 of the 128, were their places as many as on average
        assert 9 < segments.nbytes / len(segments) <= 10


def test_memory_of_removed_places_is_given_back():
    places = random_places(200_000)
    segments = PlaceSegments(*FULL)
    empty = segments.nbytes
    segments.put(places, np.arange(places.size))
    full = segments.nbytes
    segments.remove(places[::2])
    segments.put(places[::2], np.arange(places[::2].size))
    assert segments.nbytes <= 1.05 * full
    segments.remove(places[100:])
    assert segments.nbytes <= 2 * empty
    assert [place for place, _ in stand(segments, 42, 7)] == places[:100].tolist()
    segments.remove(places)
    assert (len(segments), segments.nbytes) == (0, empty)


def test_contents_are_all_that_stands():
    places = random_places(5000)
    segments = PlaceSegments(*FULL)
    segments.put(places, np.arange(places.size))
    parts = list(segments.contents())
    assert len(parts) == 128
    got = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
    assert sorted(zip(*(a.tolist() for a in got), strict=True)) == sorted(stand(segments, 42, 7))


def test_no_memory_leaves_what_stands(monkeypatch):
    places = random_places(90_000)
    segments = PlaceSegments(*FULL)
    segments.put(places[:30_000], np.arange(30_000))
    before, real, left = stand(segments, 42, 7), arrays.pages, iter(range(40))

    def pages(shape, dtype):
        if next(left, None) is None:
            raise MemoryError("no room")
        return real(shape, dtype)

    monkeypatch.setattr(arrays, "pages", pages)
    with pytest.raises(MemoryError, match="no room"):
        segments.put(places, np.arange(places.size))
    assert sorted(stand(segments, 42, 7)) == sorted(before)
    segments.remove(places[:29_000])  # has no room for smaller segments
    assert len(segments) == 1000
    monkeypatch.undo()
    assert segments.put(places, np.arange(places.size)).sum() == 1000
    assert len(stand(segments, 42, 7)) == places.size


def test_huge_pages_change_no_slot(monkeypatch):
    def grown():
        segments, places = PlaceSegments(*FULL), random_places(60_000)
        for first in range(0, places.size, 20_000):
            segments.put(places[first : first + 20_000], np.arange(20_000)[: places.size - first])
        segments.remove(places[::3])
        return segments

    plain = grown()
    assert plain._pages.spare == 0
    monkeypatch.setattr(huge_pages, "_LEAST", 1 << 10)
    huge = grown()
    assert huge._pages.spare > 0
    assert [a.tobytes() for a in huge._slots] == [a.tobytes() for a in plain._slots]


def test_a_copy_is_its_own():
    places = random_places(3000)
    segments = PlaceSegments(*FULL)
    segments.put(places, np.arange(places.size))
    other = copy.deepcopy(segments)
    segments.remove(places)
    assert (len(segments), len(stand(other, 42, 7))) == (0, places.size)

"""A rank's rows of each batch."""

import numpy as np
import pytest

from cupyrec.data import Arrays, RankSlices

IDS = np.arange(23)[:, None]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 30])
@pytest.mark.parametrize("size", [1, 4, 23, 100])
def test_all_rows_go_to_one_rank_each_in_order(ranks: int, size: int) -> None:
    data = Arrays(None, IDS, np.arange(23) % 2)
    parts = [list(data.of_rank(rank, ranks).batches(size)) for rank in range(ranks)]
    whole = list(data.batches(size))
    assert {len(batches) for batches in parts} == {len(whole)}
    for b, batch in enumerate(whole):
        mine = [batches[b] for batches in parts]
        for name in ("dense", "ids", "labels"):
            together = np.concatenate([getattr(part, name) for part in mine])
            assert (together == getattr(batch, name)).all()
        assert [part.total for part in mine] == [len(batch)] * ranks
        firsts = np.cumsum([0, *(len(part) for part in mine)])[:-1]
        assert [part.first for part in mine] == firsts.tolist()
        lengths = [len(part) for part in mine]
        assert max(lengths) - min(lengths) <= 1


def test_batches_are_skipped_for_all_ranks() -> None:
    data = Arrays(None, IDS)
    for rank in range(3):
        batches = [b.ids.tolist() for b in RankSlices(data, rank, 3).batches(5)]
        assert [b.ids.tolist() for b in RankSlices(data, rank, 3).batches(5, skip=2)] == batches[2:]


def test_devices_keep_what_a_batch_is_part_of() -> None:
    batch = next(RankSlices(Arrays(None, IDS), 1, 2).batches(23)).to("cpu")
    assert (batch.first, batch.total, len(batch)) == (11, 23, 12)


def test_a_rank_is_one_of_so_many() -> None:
    part = Arrays(None, IDS).of_rank(2, 3)
    assert isinstance(part, RankSlices)
    assert (part.rank, part.ranks) == (2, 3)
    assert next(part.of_rank(0, 2).batches(4)).ids.ravel().tolist() == [0, 1]  # not a part's part
    with pytest.raises(ValueError, match="RankSlices: 'rank' must be less than 3, got 3"):
        RankSlices(Arrays(None, IDS), 3, 3)


def test_views_of_arrays_are_all_that_a_rank_takes() -> None:
    ids = IDS.astype(np.int64)
    batch = next(Arrays(None, ids).of_rank(1, 4).batches(20))
    assert np.shares_memory(batch.ids, ids)
    assert batch.ids.ravel().tolist() == [5, 6, 7, 8, 9]

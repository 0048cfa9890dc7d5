"""Work of a step, by hand."""

import math

import pytest

from cupyrec.dense_work import DenseWork
from cupyrec.embedding import CachedSSD, Memory
from cupyrec.embedding.row_layout import RowLayout
from cupyrec.step_work import (
    GroupWork,
    batch_bytes,
    exchange_bytes,
    group_work,
    message_bytes,
    step_work,
)
from cupyrec.table_sizes import beside_cache

DENSE = DenseWork(parameters=100, room=128, buffers=0, flops=600, activations=20)
LAYOUT = RowLayout(8, 0, ())  # R = 32
GROUP = GroupWork(LAYOUT, 1000.0, 500.0, 300.0, 400.0, 100.0, 50.0, 400.0)
NONE = "none", "none"


def test_a_step_of_one_rank():
    work = step_work([GROUP], DENSE, 2, 10, False, "cpu", 1, NONE, 1)
    layers = 6 * 4 * 10 * 20 + 4 * 10 * 128
    tables = 24 * 500 + 2 * 4 * 8 * 500 + (32 + 64) * 300 + (64 + 32) * 400 + 4 * 48 * 100
    assert work.flops == 6000
    assert work.memory == layers + tables
    assert work.lines == 500 + 4 * 400 + 3 * 100
    assert work.sent == work.pcie == work.host_memory == 0
    assert work.ssd_reads == 50
    assert work.ssd_writes == pytest.approx(2.1 * 64 * 50)


def test_a_gpu_moves_rows_by_its_host():
    work = step_work([GROUP], DENSE, 0, 10, True, "cuda", 1, NONE, 1)
    assert work.pcie == 48 * 100
    assert work.host_memory == 4 * 48 * 100
    assert work.host_lines == 300


@pytest.mark.parametrize(("codec", "row"), [("none", 32), ("fp16", 16), ("int8", 12)])
def test_what_ranks_send(codec, row):
    assert message_bytes(codec, 8) == row
    work = step_work([GROUP], DENSE, 0, 10, False, "cpu", 4, (codec, codec), 1)
    assert work.sent == pytest.approx(0.75 * (300 * (9 + 2 * row) + 8 * 128))
    assert exchange_bytes([GROUP], DENSE, 4, (codec, codec)) == 512 + 300 * (48 + 4 * row)


def test_arrays_of_a_batch():
    def more(group):
        return batch_bytes([group], DENSE, 10, False, "cuda") - 2 * 4 * 10 * 20

    assert batch_bytes([], DENSE, 10, True, "cuda") == 2 * 2 * 10 * 20
    assert batch_bytes([], DENSE, 10, False, "cpu") == 2 * 4 * 10 * 20 + (12 << 20)
    usual = 24 * 500 + 64 * 300
    assert more(GROUP) == pytest.approx(
        usual + 3 * 48 * 100
    )  # 400 rows of 1,000 slots: all find one
    assert more(GROUP._replace(slots=math.inf)) == usual
    assert more(GROUP._replace(slots=320.0)) == pytest.approx(
        usual + 3 * 48 * 100 + beside_cache(320, 32, 400.0, "cuda")
    )


def test_ranks_share_rows_and_a_second_cache_saves_reads(tmp_path):
    ids, draws = [10_000.0, 10_000.0], [4000.0, 4000.0]
    alone = group_work(LAYOUT, Memory(), ids, draws, 1, 1.0)
    four = group_work(LAYOUT, Memory(), ids, draws, 4, 1.0)
    assert (alone.unique, alone.missing, alone.absent) == (alone.rows, 0, 0)
    assert four.rows == pytest.approx(alone.rows / 4)
    assert four.unique > four.rows
    small = CachedSSD(path=tmp_path, cache_rows=500)
    larger = CachedSSD(path=tmp_path, cache_rows=500, host_cache_rows=2000)
    one, two = (group_work(LAYOUT, tier, ids, draws, 1, 1.0) for tier in (small, larger))
    assert one.missing == one.absent == two.missing > two.absent > 0
    for n in (1e5, 1e6 / 7, 3e5):  # sums of which were a bit off
        roomy = group_work(
            LAYOUT, CachedSSD(path=tmp_path, cache_mb=512), [n] * 7, [1024] * 7, 1, 1.05
        )
        assert (roomy.missing, roomy.absent) == (0, 0)
    everything = group_work(LAYOUT, Memory(), ids, draws, 2, 1.0, dense_updates=True)
    assert everything.moved == 10_000

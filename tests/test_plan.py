"""Plans: what fits, what doesn't and what would, what takes longest."""

import dataclasses

import numpy as np
import pytest

from cupyrec import config, random
from cupyrec.data import Batch, Column, Schema, criteo_schema
from cupyrec.from_settings import MODELS, build_model, build_optimizer, default_settings
from cupyrec.hardware import Hardware
from cupyrec.parallel import world
from cupyrec.plan import plan
from cupyrec.training import train_step

HARDWARE = Hardware.from_dict({
    "gpu": dict(memory=8e9, memory_bandwidth=1e12, float32=1e13, float16=1e14),
    "host": dict(memory=64e9, memory_bandwidth=1e11, random_lines=1e9, cores=8, float32=1e12,
                 ranks=4),
    "ssd": dict(bytes=1e12, random_reads=1e5, write_bandwidth=1e9),
    "link": dict(ranks=1e11, hosts=1e10, pcie=1e10),
})  # fmt: skip
SCHEMA = Schema((
    Column("click", "label"), Column("age", "numeric"),
    Column("user", "categorical", "hex"), Column("tags", "categorical", "hex", bag=True),
))  # fmt: skip


def settings(name="dlrm", **sections):
    return config.override(default_settings(name), [sections])


def total(parts):
    return sum(parts.values())


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_is_planned(name):
    told = plan(settings(name), SCHEMA, HARDWARE, [1e6, 1e5], ranks=4)
    assert not told.lacks and not told.ways
    assert told.bottleneck == max(told.seconds, key=told.seconds.get)
    assert told.samples_per_second == pytest.approx(1024 / told.step_seconds)
    row = 12 + 4 * {"lr": 2, "fm": 34, "deepfm": 34, "wide_deep": 34, "xdeepfm": 34}.get(name, 32)
    assert told.bytes["checkpoint"]["rows"] == 1.1e6 * row


def test_tables_by_name_and_ranks_of_a_host():
    one = plan(settings(), SCHEMA, HARDWARE, [3e6, 1e6])
    assert one.tables["user"] == pytest.approx(3 * one.tables["tags"])
    assert total(one.tables) == pytest.approx(4e6 * (128 + 22.7), rel=0.02)
    four = plan(settings(), SCHEMA, HARDWARE, [3e6, 1e6], ranks=4)
    assert four.bytes["device"]["rows"] == pytest.approx(one.bytes["device"]["rows"] / 4, rel=0.1)
    assert four.work["network"] == 0 < four.work["link"]
    eight = plan(settings(), SCHEMA, HARDWARE, [3e6, 1e6], ranks=8)
    assert eight.work["network"] > 0
    cpu = plan(settings(), SCHEMA, HARDWARE, [3e6, 1e6], ranks=4, device="cpu")
    assert "device" not in cpu.bytes
    alone = plan(settings(), SCHEMA, HARDWARE, [3e6, 1e6], device="cpu")
    assert cpu.bytes["host"]["rows"] == pytest.approx(alone.bytes["host"]["rows"])
    assert cpu.seconds["flops"] == pytest.approx(alone.seconds["flops"])  # of the same cores


def test_bags_ask_for_more():
    one, ten = (
        plan(settings("fm"), SCHEMA, HARDWARE, [1e6, 1e6], bag_size=size, zipf=0.0)
        for size in (1, 10)
    )
    assert ten.unique == pytest.approx(11 / 2 * one.unique, rel=0.02)


def test_what_does_not_fit_is_told_with_what_would():
    told = plan(settings(), SCHEMA, HARDWARE, [2e8, 1e8])
    (lack,) = told.lacks
    assert (lack.place, lack.has) == ("device", 8e9)
    assert lack.needs == total(told.bytes["device"]) > 3e8 * 150
    assert told.ways == ("embedding.tier=cached_host", "embedding.tier=cached_ssd", "8 ranks")
    for way in told.ways[:2]:
        change = config.parse_setting(way)
        assert not plan(settings(**change), SCHEMA, HARDWARE, [2e8, 1e8]).lacks
    assert not plan(settings(), SCHEMA, HARDWARE, [2e8, 1e8], ranks=8).lacks
    assert plan(settings(), SCHEMA, HARDWARE, [2e8, 1e8], ranks=4).lacks
    halves = plan(settings(), SCHEMA, HARDWARE, [6e7, 1e6])
    assert "optimizer.name=rowwise_adagrad" in halves.ways
    both = plan(settings(), SCHEMA, HARDWARE, [1e8, 1e6])
    assert both.ways[-1] == "model.embedding_dtype=float16 and optimizer.name=rowwise_adagrad"


def test_no_way_is_told_where_there_is_none():
    small = dataclasses.replace(HARDWARE, ssd=None, link=None)
    told = plan(settings(), SCHEMA, small, [1e12, 1e12], device="cpu")
    assert [lack.place for lack in told.lacks] == ["host"]
    assert told.ways == ()


def test_files_that_do_not_fit():
    tier = settings(embedding={"tier": "cached_ssd"})
    told = plan(tier, SCHEMA, HARDWARE, [5e9, 1e9])
    assert [lack.place for lack in told.lacks] == ["host", "files"]
    assert told.lacks[1].needs == total(told.bytes["files"])


def test_what_takes_longest():
    many = settings(model={"top": [4096, 4096]})
    assert plan(many, SCHEMA, HARDWARE, [1e6, 1e6]).bottleneck == "flops"
    assert plan(settings("fm"), SCHEMA, HARDWARE, [1e6, 1e6]).bottleneck == "memory"
    tier = settings("fm", embedding={"tier": "cached_ssd", "cache_mb": 0.1})
    told = plan(tier, SCHEMA, HARDWARE, [1e7, 1e7])
    assert told.bottleneck == "ssd_reads"
    assert told.hit_rate < 0.9
    assert told.step_seconds == told.seconds["ssd_reads"] + told.seconds["ssd_writes"]
    assert plan(settings("fm"), SCHEMA, HARDWARE, [1e7, 1e7], ranks=64).bottleneck == "network"


def test_planning_changes_nothing_that_is_drawn():
    random.manual_seed(5)
    expected = np.random.Generator(np.random.Philox(5)).integers(2**60)
    plan(settings(training={"seed": 9}), criteo_schema(), HARDWARE, [1e4] * 39)
    assert random.generator().integers(2**60) == expected


@pytest.mark.ranks
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_ranks_send_what_is_planned(codec):
    ranks, ids, batch = world(), 20_000, 8192
    if ranks.size == 1:
        assert plan(settings(), SCHEMA, HARDWARE, [ids, ids]).work["link"] == 0
        return
    chosen = settings(exchange={"forward": codec, "backward": codec},
                      training={"batch_size": batch})  # fmt: skip
    numbers = Schema([column for column in SCHEMA.columns if not column.bag]
                     + [Column("item", "categorical", "hex")])  # fmt: skip
    model = build_model(chosen, numbers, "cpu")
    optimizer = build_optimizer(chosen, model)
    rng = np.random.default_rng(0)
    weights = np.arange(1.0, ids + 1) ** -1.05
    before = None
    for _ in range(2):  # the first also compares settings
        drawn = rng.choice(ids, (batch, 2), p=weights / weights.sum())
        dense = np.zeros((batch, 1), np.float32)
        whole = Batch(dense, drawn, np.zeros((batch, 1), np.float32))
        before = sum(ranks.bytes_sent.values())
        train_step(model, whole.of_rank(ranks.rank, ranks.size), optimizer)
    sent = sum(ranks.bytes_sent.values()) - before
    hardware = dataclasses.replace(
        HARDWARE, host=dataclasses.replace(HARDWARE.host, ranks=ranks.size)
    )
    told = plan(chosen, numbers, hardware, [ids, ids], ranks=ranks.size)
    assert told.work["link"] == pytest.approx(sent, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [1e6]}, r"each of 2 tables, got \[1000000.0\]"),
        ({"ids": [1e6, 0]}, "at least 1 for each"),
        ({"ids": [1e6, float("inf")]}, "at least 1 for each"),
        ({"ranks": 0}, "'ranks' must be"),
        ({"device": "sim"}, "cpu or cuda, got 'sim'"),
        ({"zipf": -1.0}, "'zipf'"),
        ({"hardware": dataclasses.replace(HARDWARE, gpu=None)}, r"must have \[gpu\]"),
        ({"hardware": dataclasses.replace(HARDWARE, link=None)}, r"must have \[link\]"),
        (
            {"hardware": dataclasses.replace(HARDWARE, ssd=None),
             "settings": settings(embedding={"tier": "cached_ssd"})},
            r"must have \[ssd\]",
        ),
        ({"settings": settings(embedding={"tier": "tape"})}, "tier must be"),
    ],
)  # fmt: skip
def test_what_can_not_be_planned_is_refused(options, message):
    given = dict(settings=settings(), schema=SCHEMA, hardware=HARDWARE, ids=[1e6, 1e6]) | options
    with pytest.raises(ValueError, match=message):
        plan(**given)

"""Expected ids of a batch, against sums over all ranks and against draws."""

import numpy as np
import pytest

from cupyrec.zipf import asked, not_in_cache


def chances(ids, exponent, draws):
    total = sum(k**-exponent for k in range(1, ids + 1))
    return [1 - (1 - k**-exponent / total) ** draws for k in range(1, ids + 1)]


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.2])
@pytest.mark.parametrize(("ids", "draws"), [(1, 5), (1000, 300), (50_000, 20_000)])
def test_unique_ids_are_the_sum_over_all(ids, exponent, draws):
    expected = sum(chances(ids, exponent, draws))
    assert asked(ids, exponent, draws).unique == pytest.approx(expected, rel=1e-4)


def test_draws_are_as_expected():
    rng, ids, draws = np.random.default_rng(0), 20_000, 5000
    weights = np.arange(1.0, ids + 1) ** -1.05
    p = weights / weights.sum()
    seen = np.mean([np.unique(rng.choice(ids, draws, p=p)).size for _ in range(20)])
    assert asked(ids, 1.05, draws).unique == pytest.approx(seen, rel=0.01)


def test_many_ids_take_few_bins():
    told = asked(1e12, 1.05, 65536)
    assert told.counts.size < 7000
    assert told.counts.sum() == pytest.approx(1e12)
    assert asked(1e6, 0.0, 1000).unique == pytest.approx(999.5, rel=1e-4)  # hardly one twice


def test_a_cache_has_those_that_come_most():
    sizes, draws, rows = (5000, 300), (400, 1000), 700
    every = sorted((c for n, m in zip(sizes, draws, strict=True) for c in chances(n, 1.1, m)))
    tables = [asked(n, 1.1, m) for n, m in zip(sizes, draws, strict=True)]
    assert not_in_cache(tables, rows) == pytest.approx(sum(every[:-rows]), rel=1e-3)
    assert not_in_cache(tables, 0) == pytest.approx(sum(every), rel=1e-3)
    assert not_in_cache(tables, 1e9) == 0

"""Parquet by several ranks, under mpirun: each decodes its own row groups."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import cupyrec
from cupyrec import models
from cupyrec.data import Column, Parquet, Schema
from cupyrec.parallel import Exchange, world

pytestmark = pytest.mark.ranks
RANKS = world()


@pytest.mark.parametrize(("groups", "consecutive"), [(20, True), (1, RANKS.size == 1)])
def test_predictions_stand_in_the_order_of_the_files(tmp_path, groups, consecutive) -> None:
    schema = Schema([Column("label", "label"), Column("x", "numeric"),
                     Column("item", "categorical", "integer")])  # fmt: skip
    rng, paths = np.random.default_rng(0), []
    table = pa.table({"x": rng.normal(size=200), "item": rng.integers(0, 50, 200),
                      "label": rng.integers(0, 2, 200)})  # fmt: skip
    for number, part in enumerate([table[:100], table[100:]][: 1 if groups == 1 else 2]):
        paths.append(tmp_path / f"{number}.parquet")
        parquet.write_table(table if groups == 1 else part, paths[-1], row_group_size=200 // groups)
    cupyrec.manual_seed(5)
    model = models.DLRM(1, 1, embedding_dim=4, bottom=[4], top=[4])
    truth = cupyrec.predict(
        model, (table["x"].to_numpy()[:, None], table["item"].to_numpy()[:, None])
    )
    cupyrec.manual_seed(5)
    model = models.DLRM(1, 1, embedding_dim=4, bottom=[4], top=[4])
    model.embedding.group.exchange = Exchange(RANKS, num_tables=1)
    data = Parquet(paths, schema)
    own = data.of_rank(RANKS.rank, RANKS.size)
    assert getattr(own, "consecutive", False) == consecutive
    got = cupyrec.predict(model, data, batch_size=30)
    np.testing.assert_allclose(got, truth, rtol=1e-6)
    assert np.ptp(truth) > 1e-3
    assert cupyrec.evaluate(model, data, batch_size=30)["samples"] == 200
    assert cupyrec.fit(model, data, batch_size=30)["samples"] == 200

"""The tier changes no bit of what is trained, and what a tier is asked for is checked."""

import numpy as np
import pytest
from oracle import sentence

import cupyrec
from cupyrec import arrays, nn, optim
from cupyrec.embedding import CachedHost, CachedSSD, Memory, Tables

FIELDS, BATCH, STEPS = 3, 24, 200


class Model(nn.Module):
    """A vector and a weight an id, so that there are two groups; a perceptron on top."""

    def __init__(self, dtype="float32"):
        self.vectors = nn.MultiTableEmbedding(FIELDS, 4, dtype=dtype, seed=1)
        self.weights = nn.MultiTableEmbedding(FIELDS, 1, dtype=dtype, seed=2)
        self.top = nn.FusedMLP(FIELDS * 4, [8], 1, skip_final_activation=True)

    def forward(self, ids):
        vectors = cupyrec.reshape(self.vectors(ids), (len(ids), -1))
        return self.top(vectors) + cupyrec.sum(self.weights(ids), axis=1)

    def prepare(self, ids):
        self.vectors.prepare(ids)
        self.weights.prepare(ids)


class Small(nn.Module):
    """The sum of an id's numbers: few kernels a step, for the simulator."""

    def __init__(self, dtype="float32"):
        self.vectors = nn.MultiTableEmbedding(FIELDS, 4, dtype=dtype, seed=1)

    def forward(self, ids):
        return cupyrec.sum(self.vectors(ids), axis=(1, 2)).reshape(-1, 1)

    def prepare(self, ids):
        self.vectors.prepare(ids)


def batches(xp, steps):
    """Zipf ids, some negative; labels that follow from them."""
    generator = np.random.default_rng(0)
    for _ in range(steps):
        ids = generator.zipf(1.05, (BATCH, FIELDS)) % 1000 - 500
        labels = (ids.sum(axis=1, keepdims=True) % 3 == 0).astype(np.float32)
        yield arrays.copy_to(xp, ids), arrays.copy_to(xp, labels)


def trained(device, tier, make, steps=STEPS, dtype="float32", kind=Model):
    """Digests, and every loss."""
    cupyrec.manual_seed(5)
    xp, model = arrays.module(device), kind(dtype)
    for number, (_, group) in enumerate(model.named_groups()):
        group.keep_in(tier, f"group-{number}")
    model.to(device)
    optimizer, losses = make(model.parameters()), []
    following = list(batches(xp, steps))
    for step, (ids, labels) in enumerate(following):
        loss = cupyrec.bce_with_logits(model(ids), labels)
        if step + 1 < steps:
            model.prepare(following[step + 1][0])
        loss.backward()
        optimizer.step()
        losses.append(loss.data)
        if step % 50 == 25:  # which must change nothing
            model.eval()
            model(ids + 700)
            model.train()
    state = {name: arrays.to_host(a).tobytes() for name, a in model.state_dict().items()}
    stores = [group.store for _, group in model.named_groups()]
    told = [store.metrics() for store in stores]
    result = (
        [table.digest() for table in model.modules() if isinstance(table, Tables)],
        arrays.to_host(xp.stack(losses)).tobytes(),
        state,
    )
    rows = sum(map(len, stores))
    for store in stores:
        store.close()
    return result, told, rows


OPTIMIZERS = {
    "sgd": lambda parameters: optim.SGD(parameters, 0.5),
    "adagrad": lambda parameters: optim.Adagrad(parameters, 0.1),
    "adam": lambda parameters: optim.Adam(parameters, 0.01),
    "catch_up_adam": lambda parameters: optim.CatchUpAdam(parameters, 0.01),
    "ftrl": lambda parameters: optim.FTRL(parameters, 0.1),
}


CASES = [(name, "float32") for name in OPTIMIZERS]
# Of 16 bits: a tier sees shorter rows and their keys, of whatever optimizer; one that catches up.
CASES += [("sgd", "bfloat16"), ("catch_up_adam", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_an_ssd_trains_to_the_same_bits(name, dtype, tmp_path):
    make = OPTIMIZERS[name]
    truth, _, rows = trained("cpu", Memory(), make, dtype=dtype)
    tenth = CachedSSD(path=tmp_path, cache_rows=rows // 20)  # of each of two groups
    got, told, _ = trained("cpu", tenth, make, dtype=dtype)
    assert got == truth
    assert all(metrics["evictions"] > rows and metrics["read_bytes"] for metrics in told)


def test_host_memory_trains_to_the_same_bits_on_devices(xp):
    """30 steps suffice: nearly every look-up evicts and writes back a cacheful, hundreds of rows
    that were evicted come back with what they had learnt, and the host's memory grows."""
    make, device = OPTIMIZERS["adagrad"], arrays.name(xp)
    truth, _, rows = trained(device, Memory(), make, steps=30, kind=Small)
    got, (told,), _ = trained(device, CachedHost(cache_rows=1), make, steps=30, kind=Small)
    assert got == truth
    assert told["evictions"] > 1.4 * rows > 1500
    assert told["misses"] - rows > 600


def test_all_caches_train_to_the_same_bits_on_devices(tmp_path, xp):
    make, device = OPTIMIZERS["catch_up_adam"], arrays.name(xp)
    truth, *_ = trained(device, Memory(), make, steps=8)
    both = CachedSSD(path=tmp_path, cache_rows=40, host_cache_rows=64, direct=True)
    assert trained(device, both, make, steps=8)[0] == truth


def test_a_model_may_move_before_the_batch_that_it_was_told_of():
    tier = CachedHost(cache_rows=1)
    embedding = nn.MultiTableEmbedding(1, 4, tier=tier, seed=1).to("sim")
    xp = arrays.module("sim")
    ids = arrays.copy_to(xp, np.arange(6).reshape(3, 2, 1))
    for told in ids[1:]:  # one is on its way, one waits for the next look-up
        embedding.prepare(told)
        embedding(ids[0])
    embedding.prepare(ids[2])
    embedding.to("cpu")
    assert embedding(np.arange(6)[:, None]).shape == (6, 1, 4)
    assert len(embedding.group.store) == 6


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [CachedHost, CachedSSD])
def test_every_rank_keeps_its_own_rows(kind, tmp_path):
    make, where = OPTIMIZERS["adam"], {} if kind is CachedHost else {"path": tmp_path}
    truth, *_ = trained("cpu", Memory(), make, steps=30)
    got, told, _ = trained("cpu", kind(cache_rows=1, **where), make, steps=30)
    assert got == truth
    assert all(metrics["evictions"] for metrics in told)


def test_rows_move_between_tiers(tmp_path):
    tables = Tables(2, 4, seed=1)
    tables.group.look_up(np.zeros(200, np.uint32), np.arange(200), insert=True)
    before = tables.digest()
    for tier in (
        CachedHost(cache_mb=0.01), CachedSSD(path=tmp_path, cache_rows=1), Memory(),
    ):  # fmt: skip
        tables.keep_in(tier)
        assert tables.group.tier == tier
        assert tables.digest() == before


def test_rows_that_were_saved_are_found_again(tmp_path):
    tier = CachedSSD(path=tmp_path, cache_rows=64)
    embedding = nn.MultiTableEmbedding(1, 4, tier=tier, seed=3)
    optimizer = optim.Adagrad(embedding.parameters(), 0.1)
    cupyrec.sum(embedding(np.arange(300)[:, None])).backward()
    optimizer.step()
    embedding.save()
    saved = embedding.digest()
    embedding(np.arange(300, 400)[:, None])
    embedding.close()
    again = nn.MultiTableEmbedding(1, 4, seed=3)
    optim.Adagrad(again.parameters(), 0.1)
    again.keep_in(tier)  # after the optimizer, of the same class: it keeps the state
    assert len(again.group.store) == 300
    assert again.digest() == saved
    again.close()
    with pytest.raises(ValueError, match="must have width and type") as refused:
        Tables(1, 5, seed=3).group.keep_in(tier, "width-4")
    assert refused.tb is not None  # which has the store: it must have let the files go
    tables = Tables(1, 4, seed=3, tier=tier)
    assert len(tables.group.store) == 300
    tables.close()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: CachedHost(), ValueError,
         "CachedHost: one of cache_rows and cache_mb must be given, got None, None."),
        (lambda: CachedHost(cache_rows=1, cache_mb=1), ValueError,
         "CachedHost: one of cache_rows and cache_mb must be given, got 1, 1."),
        (lambda: CachedHost(cache_rows=0), ValueError,
         "CachedHost: 'cache_rows' must be at least 1, got 0."),
        (lambda: CachedHost(cache_mb=-1), ValueError,
         "CachedHost: 'cache_mb' must be above 0, got -1."),
        (lambda: CachedHost(cache_mb="1"), TypeError,
         "CachedHost: 'cache_mb' must be a number, got '1'."),
        (lambda: CachedSSD(path="x", cache_rows=1, host_cache_mb=0), ValueError,
         "CachedSSD: 'host_cache_mb' must be above 0, got 0."),
        (lambda: CachedSSD(path=__file__, cache_rows=1), NotADirectoryError,
         f"CachedSSD: '{__file__}' must be a folder, got a file."),
        (lambda: Tables(1, 4, seed=1, tier="memory"), TypeError,
         "MultiTableEmbedding: 'tier' must be Memory, CachedHost or CachedSSD, got 'memory'."),
        (lambda: Tables(1, 4, seed=1, dense_updates=True, tier=CachedHost(cache_rows=1)),
         ValueError,
         "MultiTableEmbedding: tables with dense_updates must be in tier Memory, "
         "got CachedHost(cache_rows=1, cache_mb=None)."),
    ],
)  # fmt: skip
def test_what_a_tier_refuses(make, error, text):
    with pytest.raises(error, match=sentence(text)):
        make()

"""MultiTableEmbedding in every shape, on every device, against loops over dicts in float64."""

import itertools

import numpy as np
import oracle
import pytest

import cupyrec
from cupyrec import arrays, nn, optim
from cupyrec.embedding import Constant, InitialVectors, Uniform

PAD = -7
DEVICES = ["cpu", "sim"]


class Dict:
    """Tables as dicts of float64 vectors."""

    def __init__(self, embedding):
        self.embedding, self.rows = embedding, {}

    def vector(self, table, key):
        if key == self.embedding.padding_idx:
            return np.zeros(self.embedding.widths[table])
        if (table, key) not in self.rows:
            width = self.embedding.widths[table]
            initial = self.embedding.groups[width].initial
            tables, ids = np.array([table], np.uint32), np.array([key])
            self.rows[table, key] = np.float64(InitialVectors(
                width, initial.initializers, initial.seed)(tables, ids)[0])  # fmt: skip
        return self.rows[table, key]

    def bags(self, bags, weights, fields):
        """(B, F) lists of ids and weights -> for each sample and field its vector."""
        return [
            [
                self.pooled(fields[f], ids, own)
                for f, (ids, own) in enumerate(zip(row, w, strict=True))
            ]
            for row, w in zip(bags, weights, strict=True)
        ]

    def pooled(self, table, ids, weights):
        total = np.zeros(self.embedding.widths[table])
        for key, weight in zip(ids, weights, strict=True):
            total += weight * self.vector(table, key)
        real = sum(key != self.embedding.padding_idx for key in ids)
        return total / real if self.embedding.pooling == "mean" and real else total

    def step(self, bags, weights, fields, grads, lr):
        """SGD by the gradient of each sample and field."""
        moves = {}
        for row, w, grad in zip(bags, weights, grads, strict=True):
            for f, (ids, own) in enumerate(zip(row, w, strict=True)):
                real = [key for key in ids if key != self.embedding.padding_idx]
                share = 1 / len(real) if self.embedding.pooling == "mean" and real else 1
                for key, weight in zip(ids, own, strict=True):
                    if key != self.embedding.padding_idx:
                        moves.setdefault((fields[f], key), 0)
                        moves[fields[f], key] += share * weight * np.float64(grad[f])
        for key, move in moves.items():
            self.vector(*key)
            self.rows[key] = self.rows[key] - lr * move


def ragged(bags):
    flat = list(itertools.chain.from_iterable(bags))
    return (
        np.array(list(itertools.chain.from_iterable(flat)), np.int64),
        np.cumsum([0, *map(len, flat)]),
    )


def random_bags(generator, samples, fields, most):
    ids = [PAD, -(2**63), -1, 0, 3, 2**63 - 1]
    return [
        [[ids[k] for k in generator.integers(0, 6, generator.integers(0, most + 1))]
         for _ in range(fields)]
        for _ in range(samples)
    ]  # fmt: skip


def rows_of(grad, embedding):
    """(B, F, D), or (B, sum of D), as lists of the fields' vectors."""
    if not embedding.joined:
        return list(grad)
    cuts = np.cumsum([embedding.widths[t] for t in embedding.fields])[:-1]
    return [np.split(row, cuts) for row in grad]


def to(device, *given):
    xp = arrays.module(device)
    return [arrays.copy_to(xp, a) for a in given]


CASES = [
    dict(num_tables=3, embedding_dim=4),
    dict(num_tables=2, embedding_dim=3, fields=[0, 1, 0]),
    dict(num_tables=3, embedding_dim=[2, 5, 2]),
    dict(num_tables=3, embedding_dim=[1, 4, 3], fields=[2, 0, 1, 2]),
    dict(num_tables=1, embedding_dim=1),
]

# The simulator, which takes its time, has those where most can go wrong.
every_case = pytest.mark.parametrize(
    ("device", "case"), [*(("cpu", case) for case in CASES), ("sim", CASES[1]), ("sim", CASES[3])],
    ids=str,
)  # fmt: skip


@every_case
@pytest.mark.parametrize("pooling", ["sum", "mean", "weighted"])
def test_bags_against_dicts(device, case, pooling):
    generator = np.random.default_rng(3)
    embedding = nn.MultiTableEmbedding(
        **case, pooling="sum" if pooling == "weighted" else pooling, padding_idx=PAD, seed=5,
        initializer=Uniform(-1, 1),
    ).to(device)  # fmt: skip
    optimizer = optim.SGD(embedding.parameters(), 0.25)
    truth, fields = Dict(embedding), embedding.fields.tolist()
    for step, samples in enumerate((4, 0, 7)):
        bags = random_bags(generator, samples, len(fields), 4)
        ids, offsets = ragged(bags)
        weights = np.ones(len(ids), np.float32)
        if pooling == "weighted":
            weights = oracle.normals(len(ids), seed=step)
        lists = iter(weights.tolist())
        of_bags = [[[next(lists) for _ in own] for own in row] for row in bags]
        given = to(device, ids, offsets, weights)
        learnt = cupyrec.Tensor(given[2], requires_grad=True) if pooling == "weighted" else None
        out = embedding(given[0], given[1], learnt)
        expected = truth.bags(bags, of_bags, fields)
        flat = [np.concatenate(row) if embedding.joined else np.stack(row) for row in expected]
        np.testing.assert_allclose(
            arrays.to_host(out.data), np.reshape(flat, out.shape), rtol=1e-5, atol=1e-6
        )
        grad = oracle.integers(out.shape, -4, 4, seed=step)
        by_weights = [
            float(truth.vector(fields[f], key) @ np.float64(part[f]))
            for row, part in zip(bags, rows_of(grad, embedding), strict=True)
            for f, own in enumerate(row) for key in own
        ]  # fmt: skip
        out.backward(*to(device, grad))
        if learnt is not None:
            np.testing.assert_allclose(
                arrays.to_host(learnt.grad), np.reshape(by_weights, -1), rtol=1e-5, atol=1e-5
            )
        optimizer.step()
        truth.step(bags, of_bags, fields, rows_of(grad, embedding), 0.25)
    check_rows(embedding, truth)


def check_rows(embedding, truth):
    seen = 0
    for table in range(embedding.num_tables):
        for key, vector in zip(*embedding.export_table(table), strict=True):
            np.testing.assert_allclose(vector, truth.rows[table, key], rtol=1e-5, atol=1e-6)
            seen += 1
    assert seen == len(truth.rows)


@every_case
def test_one_id_a_field_is_a_bag_of_one(device, case):
    generator = np.random.default_rng(1)
    plain, bags = (
        nn.MultiTableEmbedding(**case, pooling=pooling, padding_idx=PAD, seed=5).to(device)
        for pooling in (None, "sum")
    )
    fields = len(plain.fields)
    ids = np.array([PAD, -1, 0, 8])[generator.integers(0, 4, (5, fields))]
    flat, offsets = ids.reshape(-1), np.arange(5 * fields + 1)
    expected = bags(*to(device, flat, offsets))
    for got in (plain(*to(device, ids)), bags(*to(device, ids)), bags(*to(device, ids[..., None]))):
        np.testing.assert_array_equal(arrays.to_host(got.data), arrays.to_host(expected.data))
    grad = oracle.integers(expected.shape, -4, 4)
    before = plain.digest()
    for layer in (plain, bags):
        optimizer = optim.SGD(layer.parameters(), 0.5)
        layer(*to(device, ids)).backward(*to(device, grad))
        optimizer.step()
    assert plain.digest() == bags.digest() != before


@every_case
def test_sequences_are_padded_and_keep_their_last_ids(device, case):
    generator = np.random.default_rng(2)
    length = 3
    embedding = nn.MultiTableEmbedding(**case, max_length=length, padding_idx=PAD, seed=5).to(
        device
    )
    truth, fields = Dict(embedding), embedding.fields.tolist()
    optimizer = optim.SGD(embedding.parameters(), 0.5)
    bags = random_bags(generator, 6, len(fields), 5)
    out = embedding(*to(device, *ragged(bags)))
    kept = [[own[-length:] + [PAD] * (length - len(own)) for own in row] for row in bags]
    widths = [embedding.widths[t] for t in fields]
    if embedding.joined:
        assert out.shape == (6, length, sum(widths))
    else:
        assert out.shape == (6, len(fields), length, widths[0])
    expected = [
        [
            [truth.vector(fields[f], own[place]) for f, own in enumerate(row)]
            for place in range(length)
        ]
        for row in kept
    ]  # fmt: skip
    flat = [[np.concatenate(place) for place in row] for row in expected]
    got = arrays.to_host(out.data)
    if not embedding.joined:
        got = got.transpose(0, 2, 1, 3).reshape(6, length, -1)
    np.testing.assert_allclose(got, flat, rtol=1e-6)
    out.backward(*to(device, np.ones(out.shape, np.float32)))
    optimizer.step()
    moves = {}
    for row in kept:
        for f, own in enumerate(row):
            for key in own:
                if key != PAD:
                    moves[fields[f], key] = moves.get((fields[f], key), 0) + 1
    for key, count in moves.items():
        truth.rows[key] = truth.rows[key] - 0.5 * count
    check_rows(embedding, truth)
    embedding.max_length = None  # which is for bags
    same = embedding.eval()(*to(device, np.array(kept).reshape(6, len(fields), length)))
    assert same.shape == out.shape


def test_training_has_the_same_bits_in_every_order_of_threads(xp):
    """Look-ups, bags of all kinds and updates of several steps, under 5 seeds of the scheduler."""
    generator = np.random.default_rng(3)
    batches = [ragged(random_bags(generator, 9, 3, 6)) for _ in range(2)]

    def call():
        held = []
        for pooling in ("sum", "mean"):
            embedding = nn.MultiTableEmbedding(3, 4, pooling=pooling, padding_idx=PAD, seed=5)
            optimizer = optim.Adagrad(embedding.to(arrays.name(xp)).parameters(), 0.5)
            for ids, offsets in batches:
                given = [xp.asarray(ids), xp.asarray(offsets)]
                weights = cupyrec.Tensor(xp.asarray(oracle.normals(len(ids))), requires_grad=True)
                out = embedding(*given, *([weights] if pooling == "sum" else []))
                out.backward(xp.asarray(oracle.normals(out.shape, seed=1)))
                optimizer.step()
                held += [out.data, weights.grad] if pooling == "sum" else [out.data]
            rows = embedding.group.store.export_rows(0, len(embedding.group.store))
            held += [rows.ids, rows.vectors, rows.states["sum"]]
        return [arrays.to_host(a) for a in held]

    oracle.check_thread_order(xp, call)


@pytest.mark.parametrize("device", DEVICES)
def test_a_thousand_tables_and_wide_ones(device):
    count = 1000 if device == "cpu" else 8
    embedding = nn.MultiTableEmbedding(count, [1, 2, 4, 4096] * (count // 4), seed=3).to(device)
    optimizer = optim.SGD(embedding.parameters(), 1.0)
    ids = np.arange(2 * count).reshape(2, count)
    out = embedding(*to(device, ids))
    assert out.shape == (2, count // 4 * 4103)
    out.backward(*to(device, np.ones(out.shape, np.float32)))
    before = arrays.to_host(out.data).copy()
    optimizer.step()
    after = arrays.to_host(embedding.eval()(*to(device, ids)).data)
    np.testing.assert_allclose(after, before - 1, atol=1e-6)
    assert embedding.statistics()["ids"].tolist() == [2] * count


@pytest.mark.parametrize("device", DEVICES)
def test_narrow_ids_are_widened_by_the_rule(device):
    embedding = nn.MultiTableEmbedding(1, 2, seed=3).to(device)
    signed = np.array([[-1], [5], [-(2**31)]], np.int32)
    vectors = arrays.to_host(embedding(*to(device, signed)).data)
    same = arrays.to_host(embedding(*to(device, signed.astype(np.int64))).data)
    np.testing.assert_array_equal(vectors, same)
    unsigned = np.array([[2**32 - 1], [5]], np.uint32)
    np.testing.assert_array_equal(
        arrays.to_host(embedding(*to(device, unsigned)).data),
        arrays.to_host(embedding(*to(device, np.array([[2**32 - 1], [5]]))).data),
    )
    wide = np.array([[2**64 - 1], [2**63]], np.uint64)
    np.testing.assert_array_equal(
        arrays.to_host(embedding(*to(device, wide)).data),
        arrays.to_host(embedding(*to(device, np.array([[-1], [-(2**63)]]))).data),
    )
    assert sorted(embedding.export_table(0)[0].tolist()) == [-(2**63), -(2**31), -1, 5, 2**32 - 1]


@pytest.mark.parametrize("device", DEVICES)
def test_several_queries_of_all_kinds_are_one_step(device):
    """Adagrad squares what all look-ups of the step have summed up."""
    embedding = nn.MultiTableEmbedding(2, 2, pooling="sum", seed=3).to(device)
    optimizer = optim.Adagrad(embedding.parameters(), 1.0)
    for _ in range(2):
        out = embedding(*to(device, np.array([[7, 7]])))
        out.backward(*to(device, np.full(out.shape, 2, np.float32)))
    out = embedding(*to(device, np.array([7, 7, 8]), np.array([0, 2, 3])))
    out.backward(*to(device, np.ones(out.shape, np.float32)))
    optimizer.step()
    rows = embedding.group.store.export_rows(0, 3)
    squares = {
        (int(t), int(i)): s[0] for t, i, s in zip(*rows[:2], rows.states["sum"], strict=True)
    }
    assert squares == {(0, 7): 36.0, (1, 7): 16.0, (1, 8): 1.0}


BAD = [
    (dict(), (np.zeros((2, 2)),), TypeError,
     "'ids' must be int64 or uint64 or int32 or uint32, got float64."),
    (dict(), (np.zeros((2, 3), np.int64),), ValueError,
     "'ids' must have axes (B, 2), got shape (2, 3)."),
    (dict(), (np.zeros((2, 3, 2), np.int64),), ValueError,
     "'ids' must have axes (B, 2, L), got shape (2, 3, 2)."),
    (dict(), (np.zeros(4, np.int64), np.array([0, 1, 4])), ValueError,
     "'offsets' must come with 'pooling' or 'max_length', got neither."),
    (dict(max_length=1), (np.zeros((2, 2), np.int64),), ValueError,
     "'max_length' must come with 'offsets', got ids (2, 2) alone."),
    (dict(max_length=1), (np.zeros((2, 2, 3), np.int64),), ValueError,
     "'max_length' must come with 'offsets', got ids (2, 2, 3) alone."),
    (dict(pooling="sum"), (np.zeros(4, np.int64), np.array([0, 3, 1, 2, 4])), ValueError,
     "'offsets' must never decrease, got 1 after 3 at 2."),
    (dict(pooling="sum"), (np.zeros(4, np.int64), np.array([0, 1, 5])), ValueError,
     "'offsets' must end at N = 4, the values, got 5."),
    (dict(pooling="sum"), (np.zeros(4, np.int64), np.array([0, 4])), ValueError,
     "'offsets' must have B * 2 + 1 numbers, got shape (2,)."),
    (dict(pooling="sum"), (np.zeros(4, np.int64), np.array([0.0, 1, 4])), TypeError,
     "'offsets' must be int64 or int32, got float64."),
    (dict(pooling="sum"), (np.zeros(4, np.int64), np.array([0, 1, 4]), np.ones(3, np.float32)),
     ValueError, "'weights' must have shape (4,) like 'ids', got (3,)."),
    (dict(pooling="sum"), (np.zeros(4, np.int64), np.array([0, 1, 4]), np.ones(4)), TypeError,
     "'weights' must be float32, got float64."),
    (dict(pooling="mean"), (np.zeros(4, np.int64), np.array([0, 1, 4]), np.ones(4, np.float32)),
     ValueError, "'weights' must come with pooling 'sum', got 'mean'."),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("options", "given", "error", "text"), BAD)
def test_what_is_refused_changes_nothing(device, options, given, error, text):
    embedding = nn.MultiTableEmbedding(2, 3, **options).to(device)
    with pytest.raises(error, match=oracle.sentence(f"MultiTableEmbedding: {text}")):
        embedding(*to(device, *given))
    assert len(embedding.group.store) == 0


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((2, 0), {}, ValueError, "'embedding_dim' must be at least 1, got 0."),
        ((2, [4, 0]), {}, ValueError, "'embedding_dim' must be at least 1, got 0."),
        ((2, 4097), {}, ValueError, "'embedding_dim' must be at most 4096, got 4097."),
        ((2, [4]), {}, ValueError,
         "'embedding_dim' must have one width each of the 2 tables, got 1."),
        ((2, 4), dict(fields=[0, 2]), ValueError, "'fields' must lie in [0, 2), got 0 to 2."),
        ((2, 4), dict(fields=[]), TypeError, "'fields' must be a sequence of integers, got []."),
        ((2, 4), dict(fields=[0.5]), TypeError,
         "'fields' must be a sequence of integers, got [0.5]."),
        ((2, 4), dict(pooling="max"), ValueError,
         "'pooling' must be one of (None, 'sum', 'mean'), got 'max'."),
        ((2, 4), dict(max_length=3, pooling="sum"), ValueError,
         "'max_length' must come without pooling, got 'sum'."),
        ((2, 4), dict(max_length=0), ValueError, "'max_length' must be at least 1, got 0."),
        ((2, 4), dict(padding_idx=0.5), TypeError, "'padding_idx' must be an integer, got 0.5."),
        ((2, 4), dict(padding_idx=2**64), ValueError,
         f"'padding_idx' must lie in [-2**63, 2**64), got {2**64}."),
        ((2, 4), dict(padding_idx=-(2**63) - 1), ValueError,
         f"'padding_idx' must lie in [-2**63, 2**64), got {-(2**63) - 1}."),
        ((2, 4), dict(initializer="normal"), TypeError,
         "'initializer' must be an initializer, or a sequence of one a table, got 'normal'."),
        ((2, 4), dict(initializer=[Uniform()]), ValueError,
         "'initializer' must be one, or one of each of the 2 tables, got 1."),
    ],
)  # fmt: skip
def test_what_no_embedding_is_made_of(arguments, options, error, text):
    with pytest.raises(error, match=oracle.sentence(f"MultiTableEmbedding: {text}")):
        nn.MultiTableEmbedding(*arguments, **options)


def test_padding_may_be_an_id_that_is_widened():
    embedding = nn.MultiTableEmbedding(1, 2, padding_idx=2**64 - 1)
    vectors = embedding(np.array([[2**64 - 1], [2**63]], np.uint64)).numpy()
    assert not vectors[0].any()
    assert vectors[1].all()
    found = embedding.group.store.find(np.zeros(2, np.uint32), np.array([-1, -(2**63)]))
    assert found.tolist() == [-1, 0]


def test_tables_of_several_widths_split_their_columns():
    split = [(2, Constant(1.0)), (1, Constant(2.0))]
    embedding = nn.MultiTableEmbedding(2, [3, 5], initializer=[split, Constant(3.0)])
    assert embedding(np.array([[7, 7]])).numpy().tolist() == [[1, 1, 2, 3, 3, 3, 3, 3]]

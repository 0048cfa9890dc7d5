import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyrec import arrays, nn, optim
from cupyrec.embedding import Tables, widened

IDS = st.sampled_from([-(2**63), -1, 0, 3, 2**63 - 1])


CALLS = st.tuples(st.sampled_from(["train", "import", "delete"]), st.sets(IDS))


@given(st.lists(CALLS, max_size=8))
def test_against_dicts(calls):
    """Ids come by look-ups and imports, and go by deletion; tables of two widths."""
    embedding = nn.MultiTableEmbedding(2, [2, 3], seed=4)
    known = [{}, {}]
    for number, (kind, ids) in enumerate(calls):
        array = np.array(sorted(ids), np.int64)
        for table, width in enumerate([2, 3]):
            vectors = oracle.normals((len(ids), width), seed=number)
            if kind == "import":
                embedding.import_table(table, array, vectors)
                known[table] |= dict(zip(array.tolist(), vectors, strict=True))
            elif kind == "delete":
                gone = embedding.delete(table, array)
                assert gone == sum(known[table].pop(key, None) is not None for key in ids)
        if kind == "train":
            out = embedding(np.stack([array, array], axis=1)).numpy()
            for key, vector in zip(array.tolist(), out, strict=True):
                known[0].setdefault(key, vector[:2])
                known[1].setdefault(key, vector[2:])
        for table in range(2):
            ids_now, vectors_now = embedding.export_table(table)
            assert sorted(ids_now.tolist()) == sorted(known[table])
            for key, vector in zip(ids_now.tolist(), vectors_now, strict=True):
                np.testing.assert_array_equal(vector, known[table][key])


def test_iteration_is_export_in_parts(monkeypatch):
    monkeypatch.setattr("cupyrec.embedding.transfer._ROWS", 7)
    embedding = nn.MultiTableEmbedding(2, 3)
    embedding(np.arange(60).reshape(30, 2))
    parts = list(embedding.iterate(1))
    assert len(parts) > 5
    ids, vectors = embedding.export_table(1)
    np.testing.assert_array_equal(np.concatenate([i for i, _ in parts]), ids)
    np.testing.assert_array_equal(np.concatenate([v for _, v in parts]), vectors)
    assert ids.tolist() == list(range(1, 60, 2))


def test_deletion_on_a_device_and_the_rows_after_it(xp):
    embedding = nn.MultiTableEmbedding(1, 3, seed=2).to(arrays.name(xp))
    optimizer = optim.Adagrad(embedding.parameters(), 0.5)
    ids = np.arange(40)[:, None]
    embedding(xp.asarray(ids)).backward(xp.asarray(oracle.integers((40, 1, 3), 1, 9)))
    optimizer.step()
    before = dict(zip(*embedding.export_table(0), strict=True))
    assert embedding.delete(0, xp.asarray(np.array([39, 0, 7, 7, 99]))) == 3
    after = dict(zip(*embedding.export_table(0), strict=True))
    assert sorted(after) == [*range(1, 7), *range(8, 39)]
    for key, vector in after.items():
        np.testing.assert_array_equal(vector, before[key])
    squares = embedding.group.store.export_rows(0, 37)
    assert (squares.states["sum"] > 0).all()  # the state came along
    again = arrays.to_host(embedding(xp.asarray(np.array([[7], [8]]))).data)
    fresh = nn.MultiTableEmbedding(1, 3, seed=2)(np.array([[7]])).numpy()
    np.testing.assert_array_equal(again[:1], fresh)  # it begins anew
    np.testing.assert_array_equal(again[1, 0], before[8])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_digest_knows_no_order_and_misses_nothing(dtype):
    a, b = (nn.MultiTableEmbedding(2, [2, 3], seed=4, dtype=dtype) for _ in range(2))
    ids = np.arange(20).reshape(10, 2)
    a(ids)
    b(ids[::-1].copy())
    assert a.digest() == b.digest() != nn.MultiTableEmbedding(2, [2, 3]).digest()
    assert len(a.digest()) == 32
    ids, vectors = a.export_table(1)
    vectors[3, 1] += np.float32(0.25)
    b.import_table(1, ids, vectors)
    assert a.digest() != b.digest()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_evaluation_changes_no_byte(device):
    embedding = nn.MultiTableEmbedding(2, 4, pooling="sum").to(device)
    xp = embedding.group.xp
    optimizer = optim.CatchUpAdam(embedding.parameters(), 0.1)
    for _ in range(2):
        out = embedding(xp.asarray(np.arange(20).reshape(10, 2)))
        out.backward(xp.ones(out.shape, np.float32))
        optimizer.step()
        embedding(xp.asarray(np.array([[100, 100]])))
    state = embedding.digest(), embedding.group.store.nbytes, len(embedding.group.store)
    embedding.eval()
    embedding(xp.asarray(np.arange(-300, 300).reshape(300, 2)))
    embedding(xp.asarray(np.arange(9)), xp.asarray(np.array([0, 4, 9])))
    assert (embedding.digest(), embedding.group.store.nbytes, len(embedding.group.store)) == state


def test_a_million_unseen_ids_leave_digest_and_memory_alone():
    embedding = nn.MultiTableEmbedding(1, 4)
    embedding(np.arange(1000)[:, None])
    state = embedding.digest(), embedding.group.store.nbytes, embedding.statistics()["ids"].tolist()
    embedding.eval()
    for first in range(10**6, 2 * 10**6, 10**5):
        embedding(np.arange(first, first + 10**5)[:, None])
    after = embedding.digest(), embedding.group.store.nbytes, embedding.statistics()["ids"].tolist()
    assert after == state


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.uint32])
def test_narrow_ids_may_be_imported_and_deleted(dtype):
    embedding = nn.MultiTableEmbedding(1, 1)
    ids = np.array([np.iinfo(dtype).max, 5], dtype)
    embedding.import_table(0, ids, np.ones((2, 1), np.float32))
    assert sorted(embedding.export_table(0)[0].tolist()) == sorted(widened(np, ids).tolist())
    assert embedding.delete(0, ids) == 2


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda t: t.export_table(2), ValueError,
         "export_table: 'table' must lie in [0, 2), got 2."),
        (lambda t: t.export_table("0"), TypeError,
         "export_table: 'table' must be an integer, got '0'."),
        (lambda t: t.delete(-1, np.array([1])), ValueError,
         "delete: 'table' must lie in [0, 2), got -1."),
        (lambda t: t.delete(0, np.array([1.0])), TypeError,
         "MultiTableEmbedding: 'ids' must be int64 or uint64 or int32 or uint32, got float64."),
        (lambda t: t.import_table(0, np.array([5, 6, 5]), np.zeros((3, 4), np.float32)),
         ValueError, "import_vectors: a key must occur once, got id 5 of table 0 2 times."),
        (lambda t: t.import_table(0, np.array([5]), np.zeros((1, 3), np.float32)), ValueError,
         "import_vectors: 'vectors' must have axes (N, 4), got shape (1, 3)."),
        (lambda t: t.import_table(0, np.array([5, 6]), np.zeros((1, 4), np.float32)), ValueError,
         "import_vectors: 'vectors' must have N = 2 like 'tables', got shape (1, 4)."),
        (lambda t: t.import_table(0, np.array([5]), np.zeros((1, 4))), TypeError,
         "import_vectors: 'vectors' must be float32, got float64."),
        (lambda t: t.import_table(0, np.array([5]), np.full((1, 4), np.nan, np.float32)),
         ValueError, "import_vectors: 'vectors' must be finite, got 1 of 1 not."),
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing(call, error, text):
    tables = Tables(2, 4, seed=1)
    tables.import_table(0, np.array([5]), np.ones((1, 4), np.float32))
    before = tables.digest()
    with pytest.raises(error, match=oracle.sentence(text)):
        call(tables)
    assert tables.digest() == before


def test_padding_is_not_imported():
    tables = nn.MultiTableEmbedding(1, 2, padding_idx=2**64 - 1)
    text = "import_table: 'ids' must not hold 'padding_idx', got -1."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        tables.import_table(0, np.array([5, -1]), np.ones((2, 2), np.float32))
    assert len(tables.group.store) == 0


def test_it_prints_an_account_of_its_tables():
    embedding = nn.MultiTableEmbedding(14, [2, 3] * 7)
    embedding(np.ones((4, 14), np.int64))
    first, head, *lines, rest = repr(embedding).splitlines()
    assert first == "MultiTableEmbedding(tables=14, fields=14)"
    assert head.split() == ["table", "width", "ids", "bytes", "load", "unique", "inserted"]
    assert len(lines) == 12
    told = lines[1].split()
    assert (told[:3], told[5:]) == (["1", "3", "1"], ["0.25", "1"])
    assert rest.strip() == "... and 2 more"


def test_one_group_of_all_tables():
    text = "MultiTableEmbedding.group: tables must have one width, got [4, 2]."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        _ = Tables(2, [4, 2], seed=1).group

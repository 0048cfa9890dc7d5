"""Tables of int8: rows come in, are served from every tier and device, and never learn."""

import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import batch, dlrm, trained
from test_int8_codec import decode_in_numpy
from test_int8_rows import NO_STATE, words

import cupyrec
from cupyrec import arrays, checkpoint, nn, optim
from cupyrec.embedding import (
    CachedHost,
    CachedSSD,
    Group,
    InitialVectors,
    Life,
    Memory,
    Normal,
    digest,
    exported,
    import_vectors,
)  # fmt: skip
from cupyrec.models import LR

REFUSED = "rows must be of float32, float16 or bfloat16 to learn, got int8."


def decoded(vectors):
    """What rows keep of vectors."""
    lines, width = words(vectors, NO_STATE, vectors.shape[1] + 8), vectors.shape[1]
    return decode_in_numpy(lines.view(np.int8)[:, 4 : 4 + width], lines[:, 0])


def keys(n):
    return (np.arange(n) % 3).astype(np.uint32), np.arange(n) * 7 - 9


def group(n=0, width=5, **options):
    made = Group(InitialVectors(width, Normal(), seed=1), dtype="int8", **options)
    if n:
        import_vectors(made, *keys(n), oracle.normals((n, width)))
    return made


def rows_of(made):
    return {
        (int(t), int(i)): v.tobytes()
        for rows in exported(made)
        for t, i, v in zip(*rows[:3], strict=True)
    }


def looked_up(made, tables, ids):
    at = (arrays.copy_to(made.xp, a) for a in (tables, ids))
    return arrays.to_host(made.vectors(made.look_up(*at, insert=False)))


@pytest.mark.parametrize("width", [1, 3, 16, 130])
def test_initial_vectors_are_such_as_rows_hold(np_or_xp, width):
    made, at = group(width=width), keys(20)
    made.to(np_or_xp)
    got = looked_up(made, *at)
    assert got.tobytes() == decoded(InitialVectors(width, Normal(), seed=1)(*at)).tobytes()
    import_vectors(made, *at, got)
    assert looked_up(made, *at).tobytes() == got.tobytes()
    assert len(made.store) == 20


def test_rows_go_through_all_tiers_and_devices(np_or_xp, tmp_path):
    vectors, (tables, ids) = oracle.normals((300, 5)), keys(300)
    made, expected = group(300), decoded(vectors)
    before = digest(made)
    assert made.store.row_bytes == 16
    for tier in (
        CachedHost(cache_rows=40), CachedSSD(path=tmp_path / "a", cache_rows=40), Memory(),
        CachedSSD(path=tmp_path / "b", cache_rows=40, host_cache_rows=64),
    ):  # fmt: skip
        made.keep_in(tier, "t")
        made.to(np_or_xp)
        for start in range(0, 300, 90):
            some = slice(start, start + 90)
            got = looked_up(made, tables[some], ids[some])
            assert got.tobytes() == expected[some].tobytes()
        np.testing.assert_array_equal(digest(made), before)
        made.to(np)
    made.delete(tables[::2], ids[::2])
    left = {(int(t), int(i)): v.tobytes() for t, i, v in zip(tables, ids, expected, strict=True)}
    left = {key: left[key] for key in list(left)[1::2]}
    assert rows_of(made) == left
    made.store.save()
    made.store.close()
    again = group()
    again.keep_in(CachedSSD(path=tmp_path / "b", cache_rows=40), "t")
    assert rows_of(again) == left
    again.store.close()


pairs = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-50, 50)), unique=True, min_size=1, max_size=60
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(["in", "out", "ask", "move", "state"]), pairs)))
def test_against_a_dict(calls):
    made, known, moves = group(width=3), {}, 0
    initial = InitialVectors(3, Normal(), seed=1)
    for number, (call, some) in enumerate(calls):
        tables = np.array([table for table, _ in some], np.uint32)
        ids = np.array([one for _, one in some])
        if call == "in":
            vectors = oracle.normals((len(some), 3), seed=number)
            import_vectors(made, tables, ids, vectors)
            known |= dict(zip(some, decoded(vectors), strict=True))
        elif call == "out":
            made.delete(tables, ids)
            known = {key: vector for key, vector in known.items() if key not in some}
        elif call == "ask":
            unseen = decoded(initial(tables, ids))
            expected = [known.get(key, u) for key, u in zip(some, unseen, strict=True)]
            np.testing.assert_array_equal(looked_up(made, tables, ids), expected)
        elif call == "move":
            made.keep_in((CachedHost(cache_rows=1), Memory())[moves % 2])
            moves += 1
        else:
            made.set_state(())
        assert rows_of(made) == {key: vector.tobytes() for key, vector in known.items()}


def tables_of(vectors, dtype, device, **options):
    made = nn.MultiTableEmbedding(2, vectors.shape[1], dtype=dtype, seed=3, **options)
    ids = np.setdiff1d(np.arange(20), [made.padding_idx])
    for table in range(2):
        made.import_table(table, ids, vectors[20 * table :][ids])
    return made.eval().to(device)


@pytest.mark.parametrize(
    ("options", "shape"),
    [({}, (9, 2)), ({"padding_idx": 2}, (9, 2, 4)), ({"pooling": "sum"}, (9, 2, 4)),
     ({"pooling": "mean", "padding_idx": 2}, (9, 2, 4))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("amp", [None, "float16"])
def test_layers_give_what_float32_tables_of_decoded_vectors_do(np_or_xp, options, shape, amp):
    vectors, device = oracle.normals((40, 6)), arrays.name(np_or_xp)
    ids = np_or_xp.asarray(np.random.default_rng(0).integers(0, 20, shape))
    coded, wide = (tables_of(v, dtype, device, **options) for v, dtype in
                   ((vectors, "int8"), (decoded(vectors), "float32")))  # fmt: skip
    coded.amp = wide.amp = amp
    assert coded(ids).numpy().tobytes() == wide(ids).numpy().tobytes()
    assert coded.rows(ids).numpy().tobytes() == wide.rows(ids).numpy().tobytes()
    assert coded.digest() == wide.digest()


def test_nothing_learns(np_or_xp):
    made = tables_of(oracle.normals((40, 6)), "int8", arrays.name(np_or_xp), pooling="sum")
    before, ids = made.digest(), np_or_xp.asarray(np.arange(20).reshape(10, 2))
    with pytest.raises(ValueError, match=oracle.sentence(f"Adam: {REFUSED}")):
        optim.Adam(made.parameters(), 0.1)
    with pytest.raises(ValueError, match=oracle.sentence(f"Group.update: {REFUSED}")):
        made.group.update(made.group.gradients(), 1, lambda *_: None)
    with pytest.raises(ValueError, match=oracle.sentence(f"Group.look_up: {REFUSED}")):
        made.train()(ids)
    weights = cupyrec.Tensor(np_or_xp.ones((10, 2), np.float32), requires_grad=True)
    out = made.eval()(ids, weights=weights)
    with pytest.raises(ValueError, match=oracle.sentence(f"weight_gradient: {REFUSED}")):
        out.sum().backward()
    assert made.digest() == before and made.group.optimizer_state == ()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_checkpoints_of_trained_tables_are_served(dtype, tmp_path):
    """From any dtype to int8, again as int8, and back to float32."""
    model, optimizer = trained(optim.CatchUpAdam, embedding_dtype=dtype)
    for seed in range(3):
        cupyrec.train_step(model, batch(range(50), seed=seed), optimizer)
    checkpoint.save(tmp_path / "a", model, optimizer)
    truth, coded, again, wide = dlrm(), *(dlrm(embedding_dtype="int8") for _ in range(2)), dlrm()
    checkpoint.load(tmp_path / "a", truth)
    checkpoint.load(tmp_path / "a", coded)
    for table in range(2):
        _, vectors = truth.embedding.export_table(table)
        assert coded.embedding.export_table(table)[1].tobytes() == decoded(vectors).tobytes()
    checkpoint.save(tmp_path / "b", coded)
    checkpoint.load(tmp_path / "b", again)
    checkpoint.load(tmp_path / "b", wide)
    assert again.embedding.digest() == coded.embedding.digest() == wide.embedding.digest()
    x = batch(range(50))
    served = [m.eval()(x.dense, x.ids).numpy() for m in (truth, coded, again, wide)]
    assert served[1].tobytes() == served[2].tobytes() == served[3].tobytes()
    np.testing.assert_allclose(served[1], served[0], atol=0.05)
    text = "checkpoint.load: '.*' must have the model's groups .*'float32'.*, got .*'int8'.*"
    with pytest.raises(ValueError, match=text):
        checkpoint.load(tmp_path / "b", wide, optim.SGD(wide.parameters(), 0.1))


def test_deltas_and_accounts_of_lives_come_along(tmp_path):
    model, *served = dlrm(), dlrm(), dlrm(embedding_dtype="int8")
    for one in (model, *served):
        one.embedding.group.keep_account(Life())
    optimizer = optim.SGD(model.parameters(), 0.1)
    for name, ids, base in [("a", range(9), None), ("b", range(6, 20), tmp_path / "a")]:
        cupyrec.train_step(model, batch(ids), optimizer)
        if base:
            model.embedding.delete(0, np.array([2, 7]))
        checkpoint.save(tmp_path / name, model, optimizer, base=base)
    for one in served:
        checkpoint.load(tmp_path / "b", one)
    wide, coded = (one.embedding for one in served)
    assert [part.name for part in coded.group.store.state] == ["life"]
    for table in range(2):
        (ids, vectors), got = wide.export_table(table), coded.export_table(table)
        assert len(ids) == (18, 20)[table]
        np.testing.assert_array_equal(got[0], ids)
        assert got[1].tobytes() == decoded(vectors).tobytes()


def test_weights_of_width_one_lose_nothing_but_a_last_bit():
    model, vectors = LR(0, 1, embedding_dtype="int8"), oracle.normals((50, 1))
    tables = next(m for m in model.modules() if isinstance(m, nn.MultiTableEmbedding))
    tables.import_table(0, np.arange(50), vectors)
    np.testing.assert_allclose(tables.export_table(0)[1], vectors, rtol=2.0**-22)


def test_what_is_not_finite_or_might_become_so_is_refused():
    made, vectors = group(), np.full((2, 5), 2.0**127, np.float32)
    import_vectors(made, *keys(2), vectors)
    assert looked_up(made, *keys(2)).tobytes() == vectors.tobytes()
    text = "import_vectors: 'vectors' must lie within int8, up to 1.70141e+38, got 3.40282e+38."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        import_vectors(made, *keys(2), 2 * (vectors - np.float32(2.0**103)))
    vectors = np.array([[1, 2, np.inf, 3, 4]], np.float32)
    text = "import_vectors: 'vectors' must be finite, got 1 of 1 not."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        import_vectors(group(), *keys(1), vectors)

"""Interactions that read vectors from their rows: the bits of those that get them gathered."""

import numpy as np
import oracle
import pytest
from test_dot_interaction import OPTIONS, truth
from test_dot_interaction_kernels import home
from test_embedding_rows_kernels import chunked, moved

import cupyrec
from cupyrec import Tensor, arrays, dot_interaction, nvrtc
from cupyrec.autograd import Function, numbered, record
from cupyrec.ops import dot_interaction as op
from cupyrec.ops.dot_interaction import dot_interaction_width
from cupyrec.ops.embedding_rows import BFLOAT16, FLOAT16, FLOAT32, INT8, RowMemory
from cupyrec.ops.row_vectors import RowVectors, pays
from cupyrec.ops.stochastic_rounding import round_rows

f32 = np.float32
VALUES, DTYPES = (FLOAT32, FLOAT16, BFLOAT16), (np.dtype(f32), *arrays.HALVES)

# B, F with `dense` among them, D, number of VALUES, of DTYPES and of OPTIONS
CASES = oracle.covering((1, 5), (2, 7, 27), (1, 3, 10, 16, 128), *[range(3)] * 2)
CASES += [(2, 33, 260, 0, 0), (1, 64, 130, 1, 2)]  # in chunks
CASES = [(*case, number % 4) for number, case in enumerate(CASES)]


class Kept(Function):
    """What a look-up leaves on the tape: it takes the vectors' gradient."""

    inputs = ()

    def __init__(self, kept):
        self.kept = kept

    def backward(self, grad):
        self.kept.append(grad.copy())
        return ()


def made(batch, features, width, number, draw):
    """Rows in memory order, row numbers (two ids are unseen), their inverse, unseen vectors."""
    value, fields = VALUES[number], features - 1
    unique = max(1, batch * fields // 2)
    vectors = draw((2 * unique + 3, width))
    words = width if value == FLOAT32 else (width + 1) // 2
    rows = np.full((len(vectors), (words + 7) // 4 * 4), np.nan, f32)
    if value == FLOAT32:
        rows[:, :width] = vectors
    else:
        keys = np.zeros(len(vectors), np.uint32), np.arange(len(vectors))
        codes = round_rows(vectors, *keys, 0, 0, value)
        rows.view(np.uint16)[:, :width] = codes
        halves = codes.view(np.float16) if value == FLOAT16 else codes.astype(np.uint32) << 16
        vectors = halves.astype(f32) if value == FLOAT16 else halves.view(f32)
    generator = np.random.default_rng(1)
    numbers = generator.permutation(len(vectors))[:unique]
    numbers[: min(2, unique - 1)] = (-1, -2)[: min(2, unique - 1)]
    unseen = draw((2, width))
    inverse = generator.integers(unique, size=(batch, fields))
    table = np.concatenate([vectors, unseen[::-1]])  # numbers -1 and -2 are its last rows
    return rows, numbers, inverse, unseen, table[numbers][inverse]


def in_rows(xp, rows, numbers, inverse, unseen, number, dtype, kept):
    """RowVectors on a device, in chunks of 4 rows."""
    if xp is np:
        memory, chunks = RowMemory(np.array([rows.ctypes.data], np.uint64), 20, rows.shape[1],
                                   VALUES[number]), rows  # fmt: skip
    else:
        memory, chunks = chunked(xp, rows, 2, VALUES[number])
    numbers, inverse, unseen = moved(xp, numbers, inverse, unseen)
    held = numbers, chunks  # for as long as `read` is
    return RowVectors(lambda reader: reader(memory, held[0]), inverse, unseen, dtype, Kept(kept))


def run(xp, dense, vectors, grad, kept, **options):
    """(output, gradient of dense, gradient of the vectors)"""
    dense = None if dense is None else Tensor(arrays.copy_to(xp, dense), requires_grad=True)
    out = dot_interaction(dense, vectors, **options)
    out.backward(arrays.copy_to(xp, grad))
    return out.data, None if dense is None else dense.grad, kept.pop()


def run_both(xp, batch, features, width, number, dtype, draw, **options):
    """What rows give, what vectors side by side give, and what both are made of."""
    dtype = DTYPES[dtype]
    *given, vectors = made(batch, features, width, number, draw)
    dense = draw((batch, width)).astype(dtype) if options["output_concat"] else None
    count = features - (dense is None)
    grad = draw((batch, dot_interaction_width(count, width, **options))).astype(dtype)
    kept = []
    source = in_rows(xp, *given, number, dtype, kept)
    got = home(run(xp, dense, source, grad, kept, **options))
    gathered = record(Kept(kept), arrays.copy_to(xp, vectors.astype(dtype)), ())
    expected = home(run(xp, dense, gathered, grad, kept, **options))
    return got, expected, (dense, vectors.astype(dtype), grad)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_of_gathered_vectors(xp, case):
    *shape, number, dtype, options = case
    got, expected, _ = run_both(xp, *shape, number, dtype, oracle.normals, **OPTIONS[options])
    for a, b in zip(got, expected, strict=True):
        assert a is None or a.dtype == b.dtype == DTYPES[dtype]
        np.testing.assert_array_equal(a, b)


def test_few_enough_cases_of_all_kinds():
    assert len(CASES) <= 25
    assert {case[3:5] for case in CASES} == {(i, j) for i in range(3) for j in range(3)}
    assert {case[5] for case in CASES} == set(range(4))


def small_integers(shape):
    return oracle.integers(shape, -2, 2, seed=sum(shape))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("dtype", range(3))
def test_integer_data_is_exact(np_or_xp, number, dtype):
    case = np_or_xp, 3, 9, (10, 16)[number == dtype], number, dtype, small_integers
    got, _, inputs = run_both(*case, **OPTIONS[1])
    for a, exact in zip(got, truth(*inputs, **OPTIONS[1]), strict=True):
        np.testing.assert_array_equal(a, exact.astype(DTYPES[dtype]))


# Staged and not, in chunks, of 16 bits
@pytest.mark.parametrize(
    "case", [(17, 7, 16, 0, 0), (3, 27, 128, 1, 0), (2, 33, 260, 0, 0), (5, 27, 128, 0, 2)], ids=str
)
def test_same_bits_in_any_thread_order(xp, case):
    *shape, number, dtype = case
    *given, _ = made(*shape, number, oracle.normals)
    dense = oracle.normals((shape[0], shape[2])).astype(DTYPES[dtype])
    grad = oracle.normals((shape[0], dot_interaction_width(*shape[1:]))).astype(DTYPES[dtype])
    kept = []
    source = in_rows(xp, *given, number, DTYPES[dtype], kept)

    def call():
        source._node = numbered(Kept(kept))
        return run(xp, dense, source, grad, kept)

    oracle.check_thread_order(xp, call)


def test_all_other_ops_get_them_gathered(np_or_xp):
    *given, vectors = made(3, 5, 4, 0, oracle.normals)
    kept = []
    source = in_rows(np_or_xp, *given, 0, f32, kept)
    assert (source.shape, source.dtype, source.ndim, len(source)) == ((3, 4, 4), f32, 3, 3)
    assert source.size == source.data.size
    np.testing.assert_array_equal(source.numpy(), vectors)
    (source * 2).sum().backward()
    np.testing.assert_array_equal(arrays.to_host(kept.pop()), np.full(vectors.shape, 2, f32))


def test_refuses(xp):
    *given, _ = made(2, 66, 4, 0, oracle.normals)
    source = in_rows(xp, *given, 0, f32, [])
    dense = xp.zeros((2, 4), f32)
    text = "dot_interaction: on a device there must be at most 64 features, 'dense' among them, "
    with pytest.raises(ValueError, match=oracle.sentence(text + "got 66.")):
        dot_interaction(dense, source)
    with pytest.raises(TypeError, match=r"^dot_interaction: arguments must be arrays of one devi"):
        dot_interaction(np.zeros((2, 4), f32), source)
    text = "dot_interaction: 'dense' must be float32, got float16."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        dot_interaction(dense.astype(np.float16), source)


@pytest.mark.parametrize(
    ("width", "value", "dtype", "learns", "expected"),
    [
        (128, FLOAT32, f32, True, True),
        (16, FLOAT32, f32, True, True),
        (6, FLOAT32, f32, True, True),
        (5, FLOAT32, f32, True, False),
        (1, FLOAT32, f32, False, True),  # read once either way
        (5, FLOAT16, f32, True, False),
        (6, FLOAT16, f32, True, True),
        (12, FLOAT32, np.float16, True, False),
        (16, FLOAT32, np.float16, True, True),  # no more bytes, and one launch less
        (16, BFLOAT16, arrays.HALVES[1], True, True),
        (128, INT8, f32, False, False),  # no op but those of rows decodes them
    ],
)
def test_where_it_pays(width, value, dtype, learns, expected):
    assert pays(width, value, dtype, learns) is expected


# In a model


def model(xp, width=16, dtype="float32", amp=None, **options):
    cupyrec.manual_seed(3)
    made = cupyrec.models.DLRM(4, 5, width, (8,), (8,), embedding_dtype=dtype, **options)
    made.amp = amp
    return made.to(arrays.name(xp))


def ids_of(xp, step, size=7):
    """Few ids, so that samples share rows; negative ones among them."""
    return xp.asarray(np.random.default_rng(step).integers(-3, 4, (size, 5)))


@pytest.mark.parametrize(
    ("dtype", "amp"),
    [("float32", None), ("float16", None), ("float32", "bfloat16"), ("bfloat16", "float16")],
)
def test_a_model_learns_the_same_bits(xp, monkeypatch, dtype, amp):
    results = []
    for in_place in (True, False):
        monkeypatch.setattr("cupyrec.nn.multi_table_embedding.pays", lambda *_: in_place)  # noqa: B023
        it = model(xp, dtype=dtype, amp=amp)
        optimizer = cupyrec.optim.Adam(it.parameters(), lr=0.1)
        dense, result = xp.asarray(oracle.normals((7, 4))), []
        for step in range(4):  # in the last ones the towers are replayed
            it.train()
            ids = ids_of(xp, step)
            assert isinstance(it.embedding.rows(ids), RowVectors) is in_place
            out = it(dense, ids)
            out.backward(xp.ones(out.shape, out.dtype))
            optimizer.step()
            result.append(out.data)
            it.eval()
            if step in (0, 3):
                with cupyrec.no_grad():
                    result.append(it(dense, ids + 2).data)  # some of these ids are unseen
        group = it.embedding.group
        result += [*it.state_dict().values(), group.store.export_rows(0, len(group.store)).vectors]
        results.append([arrays.to_host(a) for a in result])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_stays_in_its_rows(np_or_xp):
    xp, MultiTableEmbedding = np_or_xp, cupyrec.nn.MultiTableEmbedding
    layers = {
        "of one width": (MultiTableEmbedding(5, 16), xp is not np),
        "with shared tables": (MultiTableEmbedding(2, 16, fields=[0, 1, 1, 0, 1]), xp is not np),
        "narrow": (MultiTableEmbedding(5, 4), False),
        "of several widths": (MultiTableEmbedding(5, [16] * 5), False),
        "pooled": (MultiTableEmbedding(5, 16, pooling="sum"), xp is not np),
        "padded": (MultiTableEmbedding(5, 16, padding_idx=0), False),
    }
    for name, (layer, expected) in layers.items():
        layer.to(arrays.name(xp))
        ids = ids_of(xp, 0)
        got, vectors = layer.rows(ids), layer(ids)
        assert isinstance(got, RowVectors) is expected, name
        assert got.requires_grad
        np.testing.assert_array_equal(got.numpy(), vectors.numpy(), err_msg=name)
    text = "MultiTableEmbedding: 'ids' must have axes (B, 5), got shape (7, 4)."
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        layers["of one width"][0].rows(ids_of(xp, 0)[:, :4])


CHANGES = {
    "step": lambda it, optimizer: optimizer.step(),
    "optimizer": lambda it, optimizer: cupyrec.optim.Adam(it.parameters()),
}


@pytest.mark.parametrize("calls", [1, 4])  # as it is, and replayed
@pytest.mark.parametrize("change", CHANGES)
def test_rows_must_not_change_before_the_backward_pass(sim, change, calls):
    it = model(sim)
    optimizer = cupyrec.optim.Adagrad(it.parameters(), lr=0.1)
    dense = sim.asarray(oracle.normals((7, 4)))
    for step in range(calls):
        with sim.record() as seen:
            out = it(dense, ids_of(sim, step))
        if step < calls - 1:
            out.backward(sim.ones(out.shape, f32))
            optimizer.step()
    assert seen.graphs == (calls == 4)
    CHANGES[change](it, optimizer)
    text = (
        "MultiTableEmbedding: no optimizer may step or be made between a look-up whose vectors are "
        "read from their rows and its backward pass, got such a look-up."
    )
    with pytest.raises(ValueError, match=oracle.sentence(text)):
        out.backward(sim.ones(out.shape, f32))


def test_graphs_follow_tables_that_grow(sim, monkeypatch):
    """Chunks of 4 rows: steps replayed between those that make more give the bits of eager ones."""
    monkeypatch.setattr("cupyrec.embedding.memory_store._CHUNK_BYTES", 1024)
    results, graphs = [], []
    for most in (3, 1 << 30):
        monkeypatch.setattr("cupyrec.graph._CALLS", most)
        it = model(sim)
        optimizer = cupyrec.optim.Adagrad(it.parameters(), lr=0.1)
        dense = sim.asarray(oracle.normals((7, 4)))
        for step in range(9):
            with sim.record() as seen:
                out = it(dense, ids_of(sim, step) + step // 2)
                out.backward(sim.ones(out.shape, f32))
            optimizer.step()
            graphs.append(seen.graphs)
        store = it.embedding.group.store
        results.append([out.numpy(), store.export_rows(0, len(store)).vectors])
    assert graphs[9:] == [0] * 9
    assert 2 in graphs[:9]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_graphs_follow_a_table_that_grows_before_the_backward_pass(sim, monkeypatch):
    results = []
    for most in (3, 1 << 30):
        monkeypatch.setattr("cupyrec.graph._CALLS", most)
        it, dense = model(sim), sim.asarray(oracle.normals((7, 4)))
        optimizer, store = cupyrec.optim.SGD(it.parameters(), lr=0.1), it.embedding.group.store
        for step in range(5):
            with sim.record() as seen:
                out = it(dense, ids_of(sim, 0))
                if step == 4:
                    former = store._chunks[0]
                    it.embedding(sim.asarray(np.arange(300).reshape(60, 5)))
                    assert store._chunks[0] is not former
                    former[...] = np.nan  # memory that others have by now
                out.backward(sim.ones(out.shape, f32))
            optimizer.step()
        assert seen.graphs == (2 if most == 3 else 0)
        results.append(store.export_rows(0, 20).vectors)
    np.testing.assert_array_equal(*results)


# Costs


def launches(sim, batch, features, width, dtype, padding=1):
    """Of forward and backward, with the bytes that each must move; rows of float32."""
    rows, numbers, inverse, unseen, _ = made(batch, features, width, 0, oracle.normals)
    numbers = np.arange(len(numbers))  # no unseen ones
    source = in_rows(sim, rows, numbers, inverse, unseen, 0, dtype, kept := [])
    columns = dot_interaction_width(features, width, output_padding=padding)
    dense, grad = (oracle.normals((batch, n)).astype(dtype) for n in (width, columns))
    with sim.record() as seen:
        run(sim, dense, source, grad, kept, output_padding=padding)
    used = len(np.unique(inverse))
    read = dense.nbytes + inverse.nbytes + used * (8 + 4 * width) + 8 * -(-len(rows) // 4)
    written = dense.itemsize * batch * features * width
    return [k for k in seen.launches if k.result], (
        read + grad.nbytes, read + grad.nbytes + written,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "dtype", "most_conflicts"),
    [
        ((16, 27, 128), f32, 0.02),
        ((32, 27, 16), f32, 0.02),
        ((16, 27, 128), np.float16, 0.02),
    ],
    ids=str,
)
def test_cost(sim, shape, dtype, most_conflicts):
    """No byte is moved twice, and few banks conflict."""
    for launch, ideal in zip(*launches(sim, *shape, dtype), strict=True):
        counts = launch.result.counts
        assert counts["bytes_read"] + counts["bytes_written"] <= 1.01 * ideal
        assert counts["bank_conflicts"] <= most_conflicts * counts["shared_wavefronts"]
        assert counts["longest_warp"] <= 1.1 * counts["mean_warp"]


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_registers(sim, arch):
    """No warning, nothing spills, and two blocks of each fit on a multiprocessor."""
    for dtype in (f32, np.float16):
        with sim.schedule(arch):
            kernels, _ = launches(sim, 2, 27, 128, dtype)
        for launch in kernels:
            found = nvrtc.ptxas(launch.ptx, arch)[launch.name]
            assert (found.spills, found.warnings) == (0, ())
            assert 2 * launch.block * found.registers <= 65_536


@pytest.mark.parametrize("features", range(2, 65))
def test_addresses_find_room(features):
    sources = op._sources(features, 1)
    assert sources % 4 == 0
    assert sources >= 2 * features
    for width in [1, 3, 10, 16, 64, 128, 130, 256, 1025, 4096]:
        pairs = features * (features - 1) // 2
        forward = op._cut_forward(features, width, pairs, width, sources)
        backward = op._cut_backward(features, width, pairs, width, 1, sources)
        floats = forward["STRIDE"] + forward["PAIRS_STRIDE"] + sources
        assert 4 * floats * forward["SAMPLES"] <= 96 << 10
        floats = backward["S_STRIDE"] + backward["GRAD_STRIDE"] + backward["STRIDE"] + sources
        assert 4 * floats * backward["SAMPLES"] <= 96 << 10

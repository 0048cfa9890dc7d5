import ctypes
import logging
from types import SimpleNamespace

import numpy as np
import oracle
import pytest

from cupyrec import arrays, cublaslt
from cupyrec.cublaslt import CublasLtError, Epilogue, matmul
from cupyrec.cublaslt_library import Desc, HeuristicResult, Matrix, Status, library

f32, u32 = np.float32, np.uint32
SHAPES = oracle.covering((0, 1, 3, 17, 127), (0, 1, 13, 130), (0, 1, 16, 257))
TYPES = [(f32, f32), *((t, t) for t in arrays.HALVES), *((t, f32) for t in arrays.HALVES)]
FORWARD = {"BIAS", "RELU_BIAS", "RELU_AUX_BIAS"}


@pytest.fixture(autouse=True)
def no_refusals():
    cublaslt.refused.clear()
    yield
    cublaslt.refused.clear()


def bits(mask, columns):
    """(rows, columns) of bool out of the mask's words."""
    mask = np.ascontiguousarray(mask).view(np.uint8)
    return np.unpackbits(mask, axis=1, bitorder="little")[:, :columns].astype(bool)


class Case:
    """Arguments of a matmul on a device, and what must come of them."""

    def __init__(self, xp, epilogue, sizes, transposes=(False, False), alpha=1.0, types=(f32, f32)):
        m, n, k = sizes
        self.xp, self.epilogue = xp, Epilogue[epilogue]
        self.options = dict(epilogue=self.epilogue, alpha=alpha)
        self.options |= {f"transpose_{x}": t for x, t in zip("ab", transposes, strict=True)}
        a, b = oracle.integers((m, k), -3, 3), oracle.integers((k, n), -3, 3, seed=1)
        bias = oracle.integers(n, -9, 9, seed=2)
        live = np.random.default_rng(3).random((m, -(-n // 128) * 128)) < 0.5
        z = alpha * np.float64(a) @ np.float64(b)
        if epilogue in FORWARD:
            z += bias
        self.before = z.copy()
        if epilogue.startswith("RELU"):
            z *= z > 0
        elif epilogue.startswith("DRELU"):
            z *= live[:, :n]
        self.z = z
        sums = {"DRELU_BGRAD": z.sum(axis=0), "BGRADA": np.float64(b).sum(axis=0)}
        self.sums = sums | {"BGRADB": np.float64(a).sum(axis=1)}
        a, b = (x.T.copy() if t else x for x, t in zip((a, b), transposes, strict=True))
        self.a, self.b = (xp.asarray(x.astype(types[0])) for x in (a, b))
        self.out = xp.empty((m, n), types[1])
        if epilogue in FORWARD:
            self.options["bias"] = xp.asarray(bias.astype(types[1]))
        elif "BGRAD" in epilogue:
            self.options["bias"] = xp.empty(m if epilogue == "BGRADB" else n, types[1])
        words = np.packbits(live, axis=1, bitorder="little").view(u32)
        if epilogue.startswith("DRELU"):
            self.options["aux"] = xp.asarray(words)
        elif "AUX" in epilogue:
            self.options["aux"] = xp.empty(words.shape, u32)

    def check(self):
        matmul(self.a, self.b, self.out, **self.options)
        kind = self.out.dtype  # what is exact in float32 is rounded once
        oracle.check_exact(arrays.to_host(self.out), self.z.astype(kind).astype(np.float64))
        if self.epilogue.name in self.sums:
            sums = self.sums[self.epilogue.name].astype(kind).astype(np.float64)
            oracle.check_exact(arrays.to_host(self.options["bias"]), sums)
        if self.epilogue is Epilogue.RELU_AUX_BIAS:
            mask = arrays.to_host(self.options["aux"])
            told = self.before != 0  # at 0 the bit is cublasLt's own
            live = bits(mask, self.z.shape[1])
            np.testing.assert_array_equal(live[told], self.before[told] > 0)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("epilogue", Epilogue.__members__)
def test_integer_data_is_exact(xp, epilogue, types):
    for i, sizes in enumerate(SHAPES):
        transposes = i % 2 == 1, i % 3 == 1
        case = Case(xp, epilogue, sizes, transposes, alpha=2.0, types=types)
        # As NVIDIA's own Python binding says: a GPU takes the detour then.
        one_term = sizes[2] == 1 and epilogue in ("DRELU", "DRELU_BGRAD", "BGRADA", "BGRADB")
        narrow = 1 in sizes[:2] and epilogue in ("BGRADA", "BGRADB")
        if (one_term or narrow) and 0 not in sizes and xp is arrays.module("sim"):
            with pytest.raises(CublasLtError, match="needs .* > 1, got .*NOT_SUPPORTED"):
                case.check()
        else:
            case.check()
    if xp is arrays.module("sim"):
        assert not cublaslt.refused


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("plain", [False, True])
def test_what_is_added(xp, types, plain, monkeypatch):
    if plain:
        monkeypatch.setattr(cublaslt, "_simulate", lambda *arguments: False)
        monkeypatch.setattr(cublaslt, "_run", lambda *arguments: False)
    for sizes in ((17, 130, 13), (5, 8, 0), (1, 1, 3)):
        added = oracle.integers((sizes[0], sizes[1]), -9, 9, seed=4)
        for epilogue in ("DEFAULT", "BGRADB") if 1 < min(sizes) else ("DEFAULT",):
            case = Case(xp, epilogue, sizes, types=types)
            case.z = case.z + added
            case.options["added"] = xp.asarray(added.astype(types[1]))
            case.check()
            case.out[...] = case.options["added"]
            case.options["added"] = case.out
            case.check()
    assert bool(cublaslt.refused) == plain


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("epilogue", Epilogue.__members__)
def test_plain_gemm_gives_the_same_and_is_warned_of_once(xp, epilogue, types, monkeypatch, caplog):
    monkeypatch.setattr(cublaslt, "_simulate", lambda *arguments: False)
    monkeypatch.setattr(cublaslt, "_run", lambda *arguments: False)
    with caplog.at_level(logging.WARNING, "cupyrec"):
        for _ in range(3):
            Case(xp, epilogue, (17, 130, 13), (True, False), alpha=2.0, types=types).check()
    names = {"float32": "R_32F", "float16": "R_16F", "bfloat16": "R_16BF"}
    kinds = " to ".join(dict.fromkeys(names[np.dtype(t).name] for t in types))
    what = f"{epilogue} of NT 130 x 17 x 13, ld (130, 17, 130), {kinds}"
    text = f"cublasLt refuses {what}: a plain GEMM runs instead."
    assert [r.getMessage() for r in caplog.records] == [text]
    assert list(cublaslt.refused.values()) == [3]


def test_rows_may_be_apart(xp):
    wide = xp.asarray(oracle.integers((17, 30), -3, 3))
    out = xp.zeros((17, 30), f32)
    a, b = wide[:, :13], wide[:13, 20:]
    matmul(a, b, out[:, 5:15])
    host = arrays.to_host(wide)
    oracle.check_exact(arrays.to_host(out)[:, 5:15], np.float64(host[:, :13]) @ host[:13, 20:])
    assert not arrays.to_host(out)[:, :5].any()
    assert not arrays.to_host(out)[:, 15:].any()


def test_error(xp):
    a, b, bias = oracle.normals((127, 130)), oracle.normals((130, 65)), oracle.normals(65, seed=1)
    out = xp.empty((127, 65), f32)
    on_device = [xp.asarray(x) for x in (a, b)]
    matmul(*on_device, out, epilogue=Epilogue.BIAS, bias=xp.asarray(bias))
    oracle.check_error(arrays.to_host(out), a @ b + bias, np.float64(a) @ np.float64(b) + bias)


def test_tf32_only_where_asked(xp):
    a, b = oracle.normals((127, 130)), oracle.normals((130, 65))
    truth, errors = np.float64(a) @ np.float64(b), []
    for tf32 in (False, True):
        out = xp.empty((127, 65), f32)
        matmul(xp.asarray(a), xp.asarray(b), out, tf32=tf32)
        errors.append(np.abs(arrays.to_host(out) - truth).max())
    assert errors[0] < 1e-4
    if xp is arrays.module("sim"):
        assert 1e-3 < errors[1] < 1e-1


def test_same_bits(xp):
    def call():
        case = Case(xp, "DRELU_BGRAD", (17, 130, 13))
        matmul(case.a, case.b, case.out, **case.options)
        return case.out, case.options["bias"]

    oracle.check_thread_order(xp, call)


# On the simulator


@pytest.fixture
def sim():
    pytest.importorskip("cupy", reason="pip install cupyrec[sim]")
    return arrays.module("sim")


def address(array):
    return array.__cuda_array_interface__["data"][0]


def test_descriptors_hold_what_was_asked_for(sim, monkeypatch):
    """Row-major out (17, 130) = a (17, 13) @ b (130, 13).T, as cublasLt sees it."""
    seen = []
    monkeypatch.setattr(cublaslt, "_simulate", lambda xp, *plan: seen.append(plan) or True)
    case = Case(sim, "RELU_AUX_BIAS", (17, 130, 13), (False, True), alpha=0.5)
    matmul(case.a, case.b, case.out, **case.options)
    ((plan, alpha, beta, addresses),) = seen
    assert (alpha, beta) == (0.5, 0)
    assert addresses == [address(x) for x in (case.b, case.a, case.out, case.out)]
    desc = plan.desc
    assert [desc[d] for d in Desc] == [
        68, 0, 1, 0, 134, address(case.options["bias"]), address(case.options["aux"]), 256,
    ]  # fmt: skip
    sizes = [(Matrix.ROWS, Matrix.COLS, Matrix.LD)] * 3
    read = [tuple(x[m] for m in s) for x, s in zip(plan.layouts, sizes, strict=True)]
    assert read == [(13, 130, 13), (13, 17, 13), (130, 17, 130)]


def test_what_the_simulator_does_is_read_back(sim):
    case = Case(sim, "BIAS", (5, 7, 3))
    operands = case.b, case.a, case.out, case.out
    matmul(case.a, case.b, case.out, **case.options)
    key = cublaslt._Key(
        -1, 7, 5, 3, (cublaslt.Cuda.R_32F,) * 2, (False, False), (7, 3, 7), Epilogue.BIAS, 0,
        cublaslt.Cublas.COMPUTE_32F, (256,) * 6,
    )  # fmt: skip
    plan = cublaslt._plan(key)
    for change, expected in (
        (lambda: None, 1),
        (lambda: plan.desc.__setitem__(Desc.EPILOGUE, 1), 0),
    ):
        change()
        plan.point(address(case.options["bias"]), 0)
        cublaslt._simulate(sim, plan, 1.0, 0.0, [address(x) for x in operands])
        bias = case.options["bias"].get() * expected
        oracle.check_exact(case.out.get(), case.a.get() @ case.b.get() + bias)
    cublaslt._plan.cache_clear()


def test_pointers_are_those_of_the_call(sim):
    """A plan is kept by shape; its bias and mask are not."""
    for _ in range(2):
        first, second = (Case(sim, "RELU_AUX_BIAS", (17, 130, 13)) for _ in range(2))
        second.options["bias"] += 1
        for case in (first, second, first):
            matmul(case.a, case.b, case.out, **case.options)
        z = first.a.get() @ first.b.get()
        for case in (first, second):
            np.testing.assert_array_equal(
                case.out.get(), np.maximum(z + case.options["bias"].get(), 0)
            )
            live = bits(case.options["aux"].get(), 130)
        np.testing.assert_array_equal(live, z + case.options["bias"].get() >= 0)


def test_launches_are_counted_and_nothing_waits_or_allocates(sim):
    case = Case(sim, "DRELU_BGRAD", (17, 130, 13))
    with sim.record() as seen:
        matmul(case.a, case.b, case.out, **case.options)
    assert [launch.name for launch in seen.launches] == ["cublaslt.matmul"]
    assert (seen.syncs, seen.allocations) == (0, 0)


def test_the_simulator_keeps_the_refusals_of_cublaslt(sim):
    case = Case(sim, "RELU_AUX_BIAS", (5, 20, 3))
    case.options["aux"] = sim.empty((5, 1), u32)
    text = (
        "cublaslt.matmul: the auxiliary leading dimension must be a multiple of 128 bits and at "
        "least the 20 rows of D, got 32 (CUBLAS_STATUS_INVALID_VALUE)."
    )
    with pytest.raises(CublasLtError, match=oracle.sentence(text)):
        matmul(case.a, case.b, case.out, **case.options)
    case.options["aux"] = sim.empty((5, 6), u32)[:, 2:]
    with pytest.raises(CublasLtError, match="pointer aligned to 16 bytes"):
        matmul(case.a, case.b, case.out, **case.options)


def refusals():
    def ones(xp, *shape):
        return xp.ones(shape, f32)

    shape = {"a": (5, 3), "b": (3, 7), "out": (5, 7)}
    changes = [
        (
            {"a": lambda xp: np.ones((5, 3), f32)}, {}, TypeError,
            "arguments must be arrays of one device, got cpu, sim, sim.",
        ),
        (
            {"b": lambda xp: ones(xp, 3)}, {}, ValueError,
            "'b' must have axes (3, N), got shape (3,).",
        ),
        (
            {"b": lambda xp: ones(xp, 4, 7)}, {}, ValueError,
            "'b' must have axes (3, N), got shape (4, 7).",
        ),
        (
            {"a": lambda xp: xp.ones((5, 3), float)}, {}, TypeError,
            "'a' must be float32 or float16 or bfloat16, got float64.",
        ),
        (
            {"out": lambda xp: ones(xp, 7, 5)}, {}, ValueError,
            "'out' must have axes (5, 7), got shape (7, 5).",
        ),
        (
            {"a": lambda xp: ones(xp, 3, 5).T}, {}, ValueError,
            "'a' must have rows of consecutive elements, got strides (4, 20).",
        ),
        (
            {}, {"epilogue": Epilogue.BIAS}, ValueError,
            "'bias' must be given for BIAS, got None.",
        ),
        (
            {"bias": lambda xp: ones(xp, 5)}, {"epilogue": Epilogue.BGRADA}, ValueError,
            "'bias' must have axes (7), got shape (5,).",
        ),
        (
            {"bias": lambda xp: ones(xp, 14)[::2]}, {"epilogue": Epilogue.BIAS}, ValueError,
            "'bias' must be C-contiguous, got strides (8,).",
        ),
        ({}, {"epilogue": Epilogue.DRELU}, ValueError, "'aux' must be given for DRELU, got None."),
        (
            {"aux": lambda xp: xp.ones((4, 4), u32)}, {"epilogue": Epilogue.DRELU}, ValueError,
            "'aux' must have axes (5, words), got shape (4, 4).",
        ),
        (
            {"aux": lambda xp: xp.ones((5, 0), u32)}, {"epilogue": Epilogue.DRELU}, ValueError,
            "'aux' must have a bit for each of 7 columns, got shape (5, 0).",
        ),
        (
            {"added": lambda xp: xp.ones((5, 8), f32)}, {}, ValueError,
            "'added' must have axes (5, 7), got shape (5, 8).",
        ),
        (
            {"added": lambda xp: xp.ones((5, 8), f32)[:, :7]}, {}, ValueError,
            "'added' must have the strides of 'out', (28, 4), got (32, 4).",
        ),
    ]  # fmt: skip
    makes = {name: lambda xp, s=s: ones(xp, *s) for name, s in shape.items()}
    return [(makes | change, *rest) for change, *rest in changes]


@pytest.mark.parametrize(("makes", "options", "error", "text"), refusals())
def test_refuses(sim, makes, options, error, text):
    given = {name: make(sim) for name, make in makes.items()}
    with pytest.raises(error, match=oracle.sentence(f"cublaslt.matmul: {text}")):
        matmul(**given, **options)


def test_refuses_the_cpu():
    x = np.ones((2, 2), f32)
    text = "cublaslt.matmul: arrays must be of device 'cuda' or 'sim', got 'cpu'."
    with pytest.raises(TypeError, match=oracle.sentence(text)):
        matmul(x, x, x)


# The calls that need a GPU, by a library that answers in their place


class Gpu:
    """CuPy's part, and the three functions of the library; memory is the simulator's."""

    def __init__(self, sim, monkeypatch):
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(id=3),
            get_current_stream=lambda: SimpleNamespace(ptr=77),
            Memory=self.memory,
        )
        self.calls = []
        self.heuristic_status, self.count, self.matmul_status = 0, 1, 0
        monkeypatch.setattr(library(), "cublasLtCreate", self.create, raising=False)
        monkeypatch.setattr(library(), "cublasLtMatmulAlgoGetHeuristic", self.heuristic)
        monkeypatch.setattr(library(), "cublasLtMatmul", self.matmul)
        for cache in (cublaslt._handle, cublaslt._plan):
            cache.cache_clear()
        monkeypatch.setattr(cublaslt, "_workspaces", {})
        monkeypatch.setattr(cublaslt, "_simulate", lambda _, *rest: cublaslt._run(self, *rest))

    def memory(self, nbytes):
        self.calls.append("memory")
        return SimpleNamespace(ptr=512, size=nbytes)

    def create(self, handle):
        handle._obj.value = 55
        return 0

    def heuristic(self, handle, desc, a, b, c, d, preference, count, result, found):
        self.calls.append("heuristic")
        assert (handle.value, count, c) == (55, 1, d)  # layouts
        assert preference.value
        result._obj.algo[0], result._obj.state = 99, 0
        found._obj.value = self.count
        return self.heuristic_status

    def matmul(self, handle, desc, alpha, *rest):
        a, _, b, _, beta, c, _, d, _, algo, workspace, nbytes, stream = rest
        self.calls.append((alpha._obj.value, a, b, d))
        self.added = beta._obj.value, c
        assert beta._obj.value or c == d
        assert (algo._obj.algo[0], stream) == (99, 77)
        assert workspace % 256 == 0
        assert nbytes == 32 << 20
        assert isinstance(algo._obj, HeuristicResult)
        assert ctypes.addressof(algo._obj.algo) == ctypes.addressof(algo._obj)
        return self.matmul_status


@pytest.fixture
def gpu(sim, monkeypatch):
    yield Gpu(sim, monkeypatch)
    cublaslt._handle.cache_clear()
    cublaslt._plan.cache_clear()


def test_gpu_adds_what_it_is_given(sim, gpu):
    case = Case(sim, "DEFAULT", (5, 7, 3))
    added = sim.ones((5, 7), f32)
    matmul(case.a, case.b, case.out, added=added)
    assert gpu.added == (1.0, address(added))


def test_gpu_is_asked_once_a_shape(sim, gpu):
    case = Case(sim, "BIAS", (5, 7, 3), alpha=0.5)
    for _ in range(2):
        matmul(case.a, case.b, case.out, **case.options)
    call = (0.5, address(case.b), address(case.a), address(case.out))
    assert gpu.calls == ["heuristic", "memory", call, call]
    matmul(case.a, case.b, case.out)
    assert gpu.calls[4:] == ["heuristic", (1.0, *call[1:])]
    matmul(case.a, case.b, case.out[:, :], **case.options | {"bias": sim.ones(8, f32)[1:]})
    assert gpu.calls[6:] == ["heuristic", call], "another alignment is another algorithm"


@pytest.mark.parametrize(
    "answer",
    [
        {"heuristic_status": Status.STATUS_NOT_SUPPORTED},
        {"heuristic_status": Status.STATUS_INVALID_VALUE},
        {"count": 0},
        {"matmul_status": Status.STATUS_NOT_SUPPORTED},
    ],
    ids=lambda a: "-".join(f"{key}={value}" for key, value in a.items()),
)
def test_what_the_gpu_refuses_runs_as_a_plain_gemm(sim, gpu, answer):
    vars(gpu).update(answer)
    for _ in range(2):
        Case(sim, "RELU_AUX_BIAS", (5, 7, 3)).check()
    assert gpu.calls.count("heuristic") == 1
    assert list(cublaslt.refused.values()) == [2]


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ({"heuristic_status": 13}, "the heuristic for BIAS of NN 7 x 5 x 3, ld (7, 3, 7), R_32F"),
        ({"matmul_status": 13}, "cublasLtMatmul of BIAS of NN 7 x 5 x 3, ld (7, 3, 7), R_32F"),
    ],
    ids=["heuristic", "matmul"],
)
def test_what_fails_on_the_gpu_is_an_error(sim, gpu, answer, what):
    vars(gpu).update(answer)
    case = Case(sim, "BIAS", (5, 7, 3))
    text = f"cublaslt: {what} must succeed, got CUBLAS_STATUS_EXECUTION_FAILED."
    with pytest.raises(CublasLtError, match=oracle.sentence(text)):
        matmul(case.a, case.b, case.out, **case.options)

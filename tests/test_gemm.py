import itertools

import numpy as np
import oracle
import pytest

from cupyrec import sim
from cupyrec.sim import gemm
from cupyrec.sim.gemm import Layout, MatmulFault, Problem

f32 = np.float32
M, N, K = 37, 5, 13  # cublasLt's: rows and columns of D
AUX_LD = 128


def address(array):
    return array.__cuda_array_interface__["data"][0]


def matrix(rows, columns, ld=None):
    return Layout("R_32F", "ORDER_COL", rows, columns, ld or rows, 1)


class Case:
    """A problem, its arrays by name, and what they hold as column-major matrices."""

    def __init__(self, epilogue="DEFAULT", transposes=("OP_N", "OP_N"), ld=0, **changes):
        shapes = [(M, K), (K, N), (M, N)]
        layouts = []
        for (rows, columns), t in zip(shapes, (*transposes, "OP_N"), strict=True):
            rows, columns = (rows, columns) if t == "OP_N" else (columns, rows)
            layouts.append(matrix(rows, columns, rows + ld))
        self.host = {}
        self.arrays = {"D": sim.empty((N, M + ld), f32)}
        for seed, (name, layout) in enumerate(zip("AB", layouts, strict=False)):
            self.host[name] = oracle.integers((layout.columns, layout.ld), -3, 3, seed=seed)
        length = {"BGRADB": N}.get(epilogue, M)
        self.host["bias"] = oracle.integers(length, -9, 9, seed=3)
        self.live = np.random.default_rng(4).random((N, AUX_LD)) < 0.5
        self.host["aux"] = np.packbits(self.live, axis=1, bitorder="little").view(np.uint32)
        self.arrays |= {name: sim.asarray(a) for name, a in self.host.items()}
        if "BGRAD" in epilogue:
            self.arrays["bias"] = sim.empty(length, f32)
        if "RELU_AUX" in epilogue:
            self.arrays["aux"] = sim.empty((N, AUX_LD // 32), np.uint32)
        at = {name: address(a) for name, a in self.arrays.items()}
        self.problem = Problem(
            "COMPUTE_32F", "R_32F", transposes, epilogue, at["bias"], at["aux"], AUX_LD,
            tuple(layouts), (at["A"], at["B"], at["D"], at["D"]), 2.0, 0.0,
        )._replace(**changes)  # fmt: skip

    def operand(self, name):
        i = "AB".index(name)
        x = np.float64(self.host[name][:, : self.problem.layouts[i].rows]).T
        return x if self.problem.transposes[i] == "OP_N" else x.T

    def run(self):
        assert not list(gemm.refusals(self.problem))
        gemm.execute(self.problem)
        return self.arrays["D"].get()[:, :M].T


@pytest.mark.parametrize("ld", [0, 3])
@pytest.mark.parametrize("transposes", list(itertools.product(("OP_N", "OP_T"), repeat=2)))
@pytest.mark.parametrize("epilogue", sorted(gemm._EPILOGUES))
def test_epilogues_are_exact_on_integers(epilogue, transposes, ld):
    case = Case(epilogue, transposes, ld)
    d = case.run()
    z = 2 * case.operand("A") @ case.operand("B")
    if "BIAS" in epilogue:
        z += case.host["bias"][:, None]
    if "DRELU" in epilogue:
        z *= case.live[:, :M].T
    bits = z >= 0  # at 0 either would do
    if "RELU" in epilogue and "DRELU" not in epilogue:
        z *= bits
    oracle.check_exact(d, z)
    bias = case.arrays["bias"].get()
    gradients = {"BGRADA": case.operand("A").sum(axis=1), "BGRADB": case.operand("B").sum(axis=0)}
    if "BGRAD" in epilogue:
        oracle.check_exact(bias, gradients.get(epilogue, z.sum(axis=1)))
    if "RELU_AUX" in epilogue:
        written = case.arrays["aux"]._written()
        assert written[:, :2].all()
        assert not written[:, 2:].any(), "nothing says what the words beyond m hold"
        mask = np.unpackbits(case.arrays["aux"].get().view(np.uint8), axis=1, bitorder="little")
        np.testing.assert_array_equal(mask[:, :M].T, bits)
        assert mask[:, M:64].all()


@pytest.mark.parametrize("epilogue", ["DEFAULT", "RELU_BIAS", "DRELU_BGRAD"])
@pytest.mark.parametrize("in_place", [True, False])
def test_c_is_added_before_the_epilogue(epilogue, in_place):
    case = Case(epilogue, beta=1.0)
    added = oracle.integers((N, M), -9, 9, seed=5)
    case.arrays["C"] = sim.asarray(added)
    if in_place:
        case.arrays["D"][...] = case.arrays["C"]
    else:
        c, (a, b, _, d) = address(case.arrays["C"]), case.problem.addresses
        case.problem = case.problem._replace(addresses=(a, b, c, d))
    z = 2 * case.operand("A") @ case.operand("B") + added.T
    if epilogue == "RELU_BIAS":
        z = np.maximum(z + case.host["bias"][:, None], 0)
    elif epilogue == "DRELU_BGRAD":
        z *= case.live[:, :M].T
        oracle.check_exact(case.run(), z)
        oracle.check_exact(case.arrays["bias"].get(), z.sum(axis=1))
        return
    oracle.check_exact(case.run(), z)


def test_nan_stays_nan_and_is_live():
    case = Case("RELU_AUX_BIAS")
    case.arrays["bias"][0] = np.nan
    assert np.isnan(case.run()[0]).all()
    assert (case.arrays["aux"].get()[:, 0] & 1).all()


def test_drelu_drops_nan_where_the_unit_is_dead():
    case = Case("DRELU")
    case.arrays["A"][...] = np.nan
    np.testing.assert_array_equal(np.isnan(case.run()), case.live[:, :M].T)


def test_tf32_keeps_ten_bits():
    case = Case(compute="COMPUTE_32F_FAST_TF32")
    case.arrays["A"][...] = np.float32(1 + 2**-10 + 2**-12)
    case.arrays["B"][...] = np.float32(1)
    assert (case.run() == 2 * K * (1 + 2**-10)).all()
    case.arrays["A"][...] = np.float32(1 + 2**-11)  # ties away from zero
    assert (case.run() == 2 * K * (1 + 2**-10)).all()


# Refusals


def layouts(case, **changes):
    a, b, d = case.problem.layouts
    by_name = {"a": a, "b": b, "d": d}
    for name, change in changes.items():
        by_name[name] = by_name[name]._replace(**change)
    return {"layouts": tuple(by_name.values())}


REFUSALS = [
    (
        "DEFAULT", lambda c: layouts(c, a={"type": "R_16F"}),
        "NOT_SUPPORTED", "B must be R_16F, got R_32F",
    ),
    (
        "DEFAULT", lambda c: layouts(c, a={"type": "R_8I"}),
        "NOT_SUPPORTED", "A must be R_32F or R_16F or R_16BF, got R_8I",
    ),
    (
        "DEFAULT", lambda c: layouts(c, d={"type": "R_16F"}),
        "NOT_SUPPORTED", "D must be R_32F, got R_16F",
    ),
    (
        "DEFAULT",
        lambda c: layouts(c, a={"type": "R_16F"}, b={"type": "R_16F"}, d={"type": "R_16BF"}),
        "NOT_SUPPORTED", "D must be R_16F or R_32F, got R_16BF",
    ),
    (
        "DEFAULT",
        lambda c: layouts(c, a={"type": "R_16F"}, b={"type": "R_16F"})
        | {"compute": "COMPUTE_32F_FAST_TF32"},
        "NOT_SUPPORTED", "COMPUTE_32F_FAST_TF32 needs A of R_32F, got R_16F",
    ),
    (
        "DEFAULT", lambda c: layouts(c, d={"order": "ORDER_ROW"}),
        "NOT_SUPPORTED", "D must be column-major, got ORDER_ROW",
    ),
    (
        "DEFAULT", lambda c: layouts(c, b={"batch": 2}),
        "NOT_SUPPORTED", "B must be one matrix, got a batch of 2",
    ),
    (
        "DEFAULT", lambda c: layouts(c, b={"columns": 0}, d={"columns": 0}),
        "INVALID_VALUE", "B must have rows and columns, got (13, 0)",
    ),
    (
        "DEFAULT", lambda c: layouts(c, b={"columns": 2**31}, d={"columns": 2**31}),
        "NOT_SUPPORTED", "B must have sizes below 2**31, got (13, 2147483648)",
    ),
    (
        "DEFAULT", lambda c: layouts(c, a={"ld": 36}),
        "INVALID_VALUE", "the leading dimension of A must be at least its 37 rows, got 36",
    ),
    (
        "DEFAULT", lambda c: layouts(c, b={"rows": 12}),
        "INVALID_VALUE",
        "A, B and D must be m x k, k x n and m x n, got (37, 13), (12, 5) and (37, 5)",
    ),
    (
        "DEFAULT", lambda c: {"compute": "64"},
        "NOT_SUPPORTED",
        "compute and scale type must be COMPUTE_32F or COMPUTE_32F_FAST_TF32 and R_32F, "
        "got 64 and R_32F",
    ),
    (
        "DEFAULT", lambda c: {"addresses": (0, *c.problem.addresses[1:])},
        "INVALID_VALUE", "A must be aligned to its elements, got address 0x0",
    ),
    (
        "DEFAULT", lambda c: {"addresses": (*c.problem.addresses[:3], 6)},
        "INVALID_VALUE", "D must be aligned to its elements, got address 0x6",
    ),
    ("GELU", lambda c: {}, "NOT_SUPPORTED", "the epilogue must be one of "),
    *(
        (
            epilogue, lambda c: {"bias": 0},
            "INVALID_VALUE", f"{epilogue} needs an aligned bias pointer, got 0x0",
        )
        for epilogue in ("BIAS", "RELU_BIAS", "RELU_AUX_BIAS", "DRELU_BGRAD", "BGRADA", "BGRADB")
    ),
    ("BIAS", lambda c: {"bias": 2}, "INVALID_VALUE", "BIAS needs an aligned bias pointer, got 0x2"),
    *(
        (
            epilogue, lambda c, aux=aux: {"aux": aux}, "INVALID_VALUE",
            f"{epilogue} needs an auxiliary pointer aligned to 16 bytes, got {aux:#x}",
        )
        for epilogue, aux in [("RELU_AUX", 0), ("RELU_AUX_BIAS", 8), ("DRELU", 4)]
    ),
    *(
        (
            epilogue, lambda c, ld=ld: {"aux_ld": ld}, "INVALID_VALUE",
            "the auxiliary leading dimension must be a multiple of 128 bits and at least the 37 "
            f"rows of D, got {ld}",
        )
        for epilogue, ld in [("RELU_AUX", 64), ("RELU_AUX_BIAS", 0), ("DRELU_BGRAD", 130)]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("epilogue", "change", "status", "rule"), REFUSALS)
def test_refuses_what_cublaslt_refuses(epilogue, change, status, rule):
    case = Case(epilogue)
    got = list(gemm.refusals(case.problem._replace(**change(case))))
    assert got[0][0] == f"STATUS_{status}"
    assert got[0][1].startswith(rule)


# Faults


def test_reading_unwritten_bytes_is_a_fault():
    case = Case()
    case.arrays["B"] = sim.empty((N, K), f32)
    problem = case.problem
    problem = problem._replace(
        addresses=(problem.addresses[0], address(case.arrays["B"]), *problem.addresses[2:])
    )
    with pytest.raises(MatmulFault, match="B must be written before it is read"):
        gemm.execute(problem)


def test_leaving_an_array_is_a_fault():
    case = Case()
    wide = case.problem._replace(**layouts(case, d={"ld": M + 1}))
    with pytest.raises(
        MatmulFault, match=r"D must lie in one array, got 756 bytes of float32 \(5, 37\)"
    ):
        gemm.execute(wide)
    before = case.problem._replace(addresses=(4, *case.problem.addresses[1:]))
    with pytest.raises(MatmulFault, match="A must lie in one array"):
        gemm.execute(before)


@pytest.mark.parametrize("name", ["A", "B", "bias"])
def test_outputs_that_overlap_inputs_are_a_fault(name):
    case = Case("BIAS")
    d = address(case.arrays[name])
    problem = case.problem._replace(addresses=(*case.problem.addresses[:2], d, d))
    with pytest.raises(MatmulFault, match=f"D must not overlap {name}"):
        gemm.execute(problem)


def test_same_bits():
    def call():
        case = Case("RELU_AUX_BIAS")
        return [case.run(), *(case.arrays[name].get() for name in ("D", "bias"))]

    oracle.check_same_bits(call)

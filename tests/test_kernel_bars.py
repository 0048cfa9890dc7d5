"""The bars that the kernel bench's counts hold every kernel to."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import bench_kernels
import kernel_cases

ALL = [(name, width) for name, (_, widths) in kernel_cases.CASES.items() for width in widths]

NEAR_IDEAL = {
    "sgd_dense", "momentum_dense", "adagrad_dense", "adam_dense", "ftrl_dense", "clip_scale",
    "gather_rows", "round_rows", "int8_encode", "int8_decode", "bce", "bce_and_gradient",
    "bce_weighted_and_gradient",
    "pool_rows", "weight_gradient", "bag_numbers", "layer_norm_forward", "layer_norm_backward",
    "batch_norm_forward", "batch_norm_backward", "batch_norm_of_a_rank", "cast_rows",
    "cast_matrices", "gather_rows_16", "gather_rows_int8", "pool_rows_int8",
    "single_output_backward", "single_output_16_backward", "owners", "rank_sum", "encode_at_random",
    *(f"{way}_messages{n}" for way in ("encode", "decode") for n in ("", "_16")),
    *(f"{op}{n}_{way}" for n in ("", "_16") for way in ("forward", "backward") for op in
      "dot_interaction dot_interaction_rows factorization_machine relu_dropout".split()),
    *(f"{op}_{way}" for op in ("cross_matrix", "cross_vector") for way in ("forward", "backward")),
    "cross_matrix_16_backward", "compressed_products", "compressed_products_16", "compressed_sums",
    *(f"cache_{call}" for call in "find plan put mark remove".split()), "fill_rows", "take_rows",
    "touch_rows",
}  # fmt: skip
ROW_WISE = {
    "sgd_rows", "momentum_rows", "adagrad_rows", "rowwise_adagrad_rows", "adam_rows",
    "catch_up_rows", "caught_up_vectors", "ftrl_rows", "segment_sum", "segment_sum_bags",
    "segment_sum_16", "partition",
}  # fmt: skip
# 65,536 samples, or weights, don't fill a GPU
SMALL = {"bce", "bce_and_gradient", "bce_weighted_and_gradient", "cast_matrices"}
NO_STREAM = SMALL | {
    "initial_uniform", "initial_normal",  # 12 bytes a vector are read; what is drawn bounds them
    "bag_numbers",  # a search, in offsets that L1 and L2 hold
    "compressed_products", "compressed_products_16",  # of few numbers, which L1 holds
    "unique_keys", "partition",  # look-ups in a table that L2 holds; 2 bytes are read to place 8
    "cache_plan", "cache_mark", "cache_remove",  # few bytes of each sector are needed
}  # fmt: skip
# Their samples are worked on alike: what is barred is at 64 of them what it is at 256.
ALIKE = "dot_interaction", "factorization_machine", "compressed", "relu_dropout", "cross_matrix"


@pytest.fixture(scope="module")
def rows():
    """The bench at its main shapes: each kernel at all its widths."""
    return [
        bench_kernels.counted(name, 64 if name.startswith(ALIKE) else 256, width)
        for name, width in ALL
    ]


def of(rows, names):
    return [row for row in rows if row["kernel"] in names]


def over(rows, key, most):
    return {(row["kernel"], row["shape"]): row[key] for row in rows if not row[key] <= most}


def under(rows, key, least):
    return {(row["kernel"], row["shape"]): row[key] for row in rows if not row[key] >= least}


def test_bytes_are_near_the_ideal(rows):
    assert {row["kernel"] for row in rows} >= NEAR_IDEAL | ROW_WISE
    assert over(of(rows, NEAR_IDEAL), "bytes_ratio", 1.1) == {}
    assert over(of(rows, ROW_WISE), "bytes_ratio", 1.5) == {}
    assert over(rows, "bytes_ratio", 4) == {}
    assert under(rows, "bytes_ratio", 0.999) == {}  # else the ideal is wrong


def test_keys_take_few_sectors(rows):
    tables = of(rows, {"hash_find", "hash_find_or_insert"})
    assert len(tables) == 2
    assert over(tables, "sectors_per_key", 4) == {}
    assert over(of(rows, {"cache_find"}), "sectors_per_key", 6) == {}


def test_banks_spills_and_balance(rows):
    assert over(rows, "bank_conflicts", 0.02) == {}
    assert over(rows, "spills", 0) == {}
    assert over(rows, "balance", 4) == {}


def test_launches_fill_a_gpu_and_keep_its_memory_busy(rows):
    """All but those that have too little work, or don't stream."""
    names = {row["kernel"] for row in rows}
    assert under(of(rows, names - SMALL), "waves", 1) == {}
    assert under(of(rows, names - NO_STREAM), "in_flight_kb", 32) == {}

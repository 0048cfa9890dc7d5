"""Every kernel compiles for three architectures without a complaint: as the bench launches it, and
as users' widths, options and alignments specialise it.
"""

import collections
import contextlib
import importlib
import itertools
import pkgutil
import re
import sys
from pathlib import Path

import kernel_builds
import numpy as np
import oracle
import pytest
from kernel_builds import ARCHITECTURES, KERNEL

from cupyrec import Tensor, arrays, kernel, ops
from cupyrec.autograd import Function
from cupyrec.kernel import Kernel
from cupyrec.ops import (
    bags,
    batch_norm,
    bce_with_logits,
    cache_rows,
    cache_sets,
    cast,
    catch_up_adam,
    clip_scale,
    compressed_interaction,
    cross_matrix,
    cross_vector,
    dot_interaction,
    embedding_rows,
    factorization_machine,
    initial_vectors,
    int8_codec,
    layer_norm,
    messages,
    move_rows,
    relu_dropout,
    row_life,
    row_vectors,
    rowwise_adagrad,
    segment_sum,
    single_output,
    stochastic_rounding,
    unique_keys,
)

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import bench_kernels
import kernel_cases

BATCH = 10  # widths make most specialisations; and unique keys are sorted in two passes
KEYS = 64, 128, 256, 512  # of 6, 7, 8 and twice 5 bits

# Specialisations of users. An array that starts `shift` floats into its memory may be read by 4, 1
# or 2 floats at a time, where the width lets it.
FEATURES, WIDTHS = (3, 7, 27, 33, 64), (1, 4, 10, 16, 128, 130, 512, 1025)
ROW_WIDTHS = 1, 3, 10, 16, 130, 1025
NORMALIZED = 1, 3, 10, 16, 128, 130, 512, 1025, 8192, 8193, 8196
SHIFTS = 0, 1, 2
CONCAT, NO_CONCAT, NO_DENSE = range(3)


def floats(*shape, shift=0, dtype=np.float32):
    sim = arrays.module("sim")
    return sim.empty(int(np.prod(shape)) + shift, dtype)[shift:].reshape(shape)


def interact(features, width, shape, self_interaction, padding, shift, dtype=np.float32):
    options = dict(self_interaction=bool(self_interaction), output_padding=padding)
    dense = Tensor(floats(1, width, dtype=dtype), requires_grad=True) if shape != NO_DENSE else None
    sparse = floats(1, features - (shape != NO_DENSE), width, shift=shift, dtype=dtype)
    out = dot_interaction.dot_interaction(
        dense, Tensor(sparse, requires_grad=True), output_concat=shape == CONCAT, **options
    )
    out._node.backward(floats(*out.shape, dtype=dtype))


def interact_all():
    choices = (CONCAT, NO_CONCAT, NO_DENSE), (0, 1), (0, 1), SHIFTS
    for case in oracle.covering(FEATURES, WIDTHS, *choices):
        interact(*case)
    for *case, half in oracle.covering(FEATURES, WIDTHS, *choices[:-1], (0, 1, 2, 4), (0, 1)):
        interact(*case, dtype=arrays.HALVES[half])


def interact_in_rows():
    choices = (CONCAT, NO_CONCAT, NO_DENSE), (0, 1), (0, 1, 2), (0, 1, 2), SHIFTS
    sizes = (7, 27, 64), (1, 10, 16, 128, 130, 512)
    for features, width, shape, self_interaction, value, number, shift in oracle.covering(
        *sizes, *choices
    ):
        dtype = (np.float32, *arrays.HALVES)[number]
        memory = embedding_rows.RowMemory(floats(1, dtype=np.uint64), 1, width + 4, value)
        inverse = floats(1, features - (shape != NO_DENSE), dtype=np.int64)
        vectors = row_vectors.RowVectors(
            lambda reader, memory=memory: reader(memory, floats(2, dtype=np.int64)),
            inverse, floats(1, width, shift=shift), dtype, Function(),
        )  # fmt: skip
        dense = None if shape == NO_DENSE else Tensor(floats(1, width, dtype=dtype))
        out = dot_interaction.dot_interaction(
            dense, vectors, self_interaction=bool(self_interaction), output_concat=shape == CONCAT
        )
        out._node.backward(floats(*out.shape, dtype=dtype))


def factorize_all():
    choices = (1, 8, 27, 64, 130), (1, 4, 10, 16, 128, 130, 1025), (0, 1), (0, 1, 2), (0, 1, 2, 4)
    for features, width, with_dense, number, shift in oracle.covering(*choices):
        dtype = (np.float32, *arrays.HALVES)[number]
        dense = Tensor(floats(1, width, dtype=dtype), requires_grad=True) if with_dense else None
        sparse = floats(1, features - with_dense, width, shift=shift, dtype=dtype)
        tensor = Tensor(sparse, requires_grad=True)
        factorization_machine.factorization_machine(dense, tensor)._node.backward(floats(1, 1))


def rows_of(width, shift):
    """Whatever works on rows of one width."""
    keys, chunks = floats(2, dtype=np.int64), floats(1, dtype=np.uint64)
    tables = floats(2, dtype=np.uint32)
    x, codes = floats(2, width, shift=shift), floats(2, width, dtype=np.int8)
    halves = [floats(2, width, shift=shift, dtype=dtype) for dtype in arrays.HALVES]
    rounding = embedding_rows.Rounding(tables, keys, 0, 0)
    for _, states, _, update, _, constants in kernel_cases.OPTIMIZERS:
        memory = embedding_rows.RowMemory(chunks, 1, ((states + 1) * width + 3) // 4 * 4)
        update(memory, keys, x, **constants)
        update(memory._replace(value=1), keys, x, **constants, rounding=rounding)
    catching_up = embedding_rows.RowMemory(chunks, 1, (3 * width + 4) // 4 * 4)
    catch_up_adam.catch_up_rows(catching_up, keys, width, kernel_cases.HISTORY)
    catch_up_adam.caught_up_vectors(catching_up, keys, width, kernel_cases.HISTORY)
    halved = catching_up._replace(value=1)
    catch_up_adam.catch_up_rows(halved, keys, width, kernel_cases.HISTORY, rounding)
    for value in (0, 1, 2):
        memory = embedding_rows.RowMemory(chunks, 1, (width + 4) // 4 * 4, value)
        by = rounding if value else None
        embedding_rows.write_rows(memory, 0, x, floats(1, 1), by)
        looked_up = memory, keys, keys, floats(0, width)
        embedding_rows.gather_rows(*looked_up, x)
        embedding_rows.gather_rows(*looked_up, halves[value % 2])
        bags.weight_gradient(*looked_up, keys, x)
        weights, mean = (floats(2), False) if value else (None, True)
        bags.pool_rows(*looked_up, keys, weights, mean, x[:1])
        move_rows.move_rows(memory, keys, keys)
        row_life.touch_rows(memory, keys, floats(3, dtype=np.int64), value, 7)
        payloads = floats(2, memory.stride + 4, dtype=np.uint32)
        cache_rows.fill_rows(memory, keys, payloads)
        cache_rows.take_rows(memory, cache_sets.CacheSets(1, arrays.module("sim")), keys, payloads)
        rowwise_adagrad.rowwise_adagrad_rows(memory, keys, x, lr=0.1, eps=1e-8, rounding=by)
        if value:
            stochastic_rounding.round_rows(x, tables, keys, 0, 0, value)
    coded = embedding_rows.RowMemory(chunks, 1, (width + 11) // 4 * 4, embedding_rows.INT8)
    embedding_rows.write_rows(coded, 0, x, floats(1, 1))
    for out in (x, *halves):
        embedding_rows.gather_rows(coded, keys, keys, floats(0, width), out)
    for weights in (floats(2), None):
        bags.pool_rows(coded, keys, keys, floats(0, width), keys, weights, weights is None, x[:1])
    segment_sum.segment_sum(x, keys, keys)
    for half in halves:
        segment_sum.segment_sum(half, keys, keys)
    segment_sum.segment_sum(x, keys, keys, index=keys)
    segment_sum.segment_sum(x, keys, keys, index=keys, weights=floats(2))
    int8_codec.int8_encode(x)
    int8_codec.int8_decode(codes, floats(2), out=x)
    sent = floats(8 * width + 16, dtype=np.uint8)
    for codec in messages.CODECS:
        messages.encode(x, [2], codec)
        if codec != "none":
            messages.encode(x, [2], codec, rounding=rounding)
        messages.decode(sent, [2], codec, width, out=x)
    ranges = floats(1, dtype=np.int32), floats(1, dtype=np.int32), floats(1, 6, dtype=np.float64)
    distributions = initial_vectors.Distributions(*ranges)
    initial_vectors.initial_vectors(tables, keys, width, 0, distributions)


def cast_all():
    for half in arrays.HALVES:
        x = floats(3, 13)
        cast.cast_array(floats(3, 13, dtype=half), np.float32)
        cast.padded(cast.cast_array(x, half)[:, :5], half)
        cast.cast_matrices([x], half)
        for columns in (13, 16):
            x = floats(3, columns, dtype=half)
            _, mask = relu_dropout.relu_dropout(x, floats(columns, dtype=half))
            relu_dropout.relu_dropout_backward(x, mask)


def normalize(width, shift):
    parameters = [Tensor(floats(width), requires_grad=True) for _ in range(2)]
    x = Tensor(floats(40, width, shift=shift), requires_grad=True)
    layer_norm.layer_norm(x, *parameters)._node.backward(floats(40, width))
    for gather in (None, lambda own: own[None]):
        given = *parameters, floats(width), floats(width)
        y = batch_norm.batch_norm(x, *given, training=True, gather=gather)
        y._node.backward(floats(40, width))


def cross(width, shift):
    vectors = [Tensor(floats(width), requires_grad=True) for _ in range(2)]
    x = Tensor(floats(40, width, shift=shift), requires_grad=True)
    cross_vector.cross_vector(x, x, *vectors)._node.backward(floats(40, width))
    cross_matrix.combine(x.data, x.data, x.data)
    for half in (None, *arrays.HALVES):
        cross_matrix.combine_backward(x.data, x.data, x.data, half)


def compress(shift):
    for h, m in itertools.product((1, 8, 33), (1, 4, 39, 130)):
        x, x0 = floats(10, h, shift=shift), floats(10, m)
        for dtype in (np.float32, *arrays.HALVES):
            compressed_interaction.compressed_products(x, x0, dtype)
        compressed_interaction.compressed_sums(floats(10, h * m, shift=shift), x, x0, x, x0)


def single_outputs(width, shift, dtype):
    x, weight = floats(200, width, shift=shift, dtype=dtype), floats(1, width, dtype=dtype)
    given = floats(200, 1), x, weight, floats(1, width), floats(1)
    single_output.single_output_backward(*given, x, floats(width), 2.0)
    single_output.single_output_backward(*given)


def vectors(shift):
    """Whatever works on elements."""
    a, b, c, d = (floats(8, shift=shift) for _ in range(4))
    for _, states, update, _, _, constants in kernel_cases.OPTIMIZERS:
        update(*(a, b, c, d)[: states + 2], **constants)
    clip_scale.clip_scale([a])
    bce_with_logits.bce_with_logits(Tensor(a, requires_grad=True), b)
    bce_with_logits.bce_with_logits(Tensor(a, requires_grad=True), b, c)
    x, bias = floats(2, 8, shift=shift), floats(8)
    _, mask = relu_dropout.relu_dropout(x, bias)
    relu_dropout.relu_dropout_backward(x, mask)


@contextlib.contextmanager
def noted():
    """Kernels are not launched in this context; yields what would be."""
    made, call = [], Kernel.__call__

    def note(self, *arguments, macros=kernel._NO_MACROS, **sizes):
        made.append(bench_kernels.Launched(self, dict(macros), sizes))

    Kernel.__call__ = note
    try:
        yield made
    finally:
        Kernel.__call__ = call


def specialisation(one):
    return one.kernel.file, one.kernel.name, tuple(sorted(one.macros.items()))


@pytest.fixture(scope="module")
def launched():
    """What all cases of the bench launch, and where they differ from the CPU's ops."""
    wrong = {}
    with bench_kernels.watched() as made:
        for name, (_, widths) in bench_kernels.CASES.items():
            for width in widths:
                batch = 3 * BATCH if name == "unique_keys" else BATCH  # more than 8 bits of keys
                check = bench_kernels.agrees(name, arrays.module("sim"), batch, width)
                if check != "ok":
                    wrong[name, width] = check
    return {specialisation(one): one for one in made}, wrong


@pytest.fixture(scope="module")
def special():
    """Specialisations of users, most of which the bench doesn't launch."""
    with noted() as made:
        interact_all()
        interact_in_rows()
        factorize_all()
        cast_all()
        for width, shift in itertools.product(ROW_WIDTHS, SHIFTS):
            rows_of(width, shift)
        for width, shift in itertools.product(NORMALIZED, SHIFTS):
            normalize(width, shift)
            cross(width, shift)
        for width, shift, dtype in itertools.product(
            (1, 3, 6, 16, 512), SHIFTS, (np.float32, *arrays.HALVES)
        ):
            single_outputs(width, shift, dtype)
        for shift in SHIFTS:
            vectors(shift)
            compress(shift)
        for n in KEYS:
            _ = unique_keys.unique_keys(
                floats(n, dtype=np.uint32), floats(n, dtype=np.int64)
            ).positions
    return {specialisation(one): one for one in made}


@pytest.fixture(scope="module")
def built(launched, special):
    return kernel_builds.built(launched[0], special)


def declared():
    """Kernels of all modules of cupyrec.ops."""
    for module in pkgutil.iter_modules(ops.__path__, "cupyrec.ops."):
        values = vars(importlib.import_module(module.name)).values()
        yield from (value for value in values if isinstance(value, Kernel))


def test_ops_of_the_bench_agree_with_the_cpus(launched):
    assert launched[1] == {}


def test_every_declared_kernel_is_launched_by_the_bench(launched):
    names = {(file, name) for file, name, _ in launched[0]}
    assert [(k.file, k.name) for k in declared() if (k.file, k.name) not in names] == []


def test_every_kernel_of_the_folder_is_built(launched):
    in_files = {
        (path.name, name)
        for path in kernel.folder().glob("*.cu")
        for name in re.findall(KERNEL, path.read_text())
    }
    assert {path.name for path in kernel.folder().glob("*.cu")} == {file for file, _ in in_files}
    assert in_files - {(file, name) for file, name, _ in launched[0]} == set()


def test_nvrtc_does_not_warn(built):
    assert built[1] == []


def test_ptxas_neither_warns_nor_spills(built, launched, special):
    names = {(one.file, one.name, one.macros, one.arch) for one in built[0]}
    assert names >= {(*one, arch) for one in launched[0] for arch in ARCHITECTURES}
    assert {one[:3] for one in names} >= set(special)
    met = {(name, value, arch) for _, name, macros, arch in names for value in macros}
    wanted = collections.Counter((name, value) for _, name, macros in special for value in macros)
    often = [one for one, n in wanted.items() if n >= len(ARCHITECTURES)]
    assert met >= {(*one, arch) for one in often for arch in ARCHITECTURES}
    complaints = [
        f"{one.name} {dict(one.macros)} for sm_{one.arch}: {one.resources}"
        for one in built[0]
        if one.resources.warnings or one.resources.spills or one.resources.registers == 0
    ]
    assert not complaints, "\n".join(complaints)


def test_special_cases_cover_what_users_have(special):
    """Every width with every number of features, and pairwise with all else."""
    forward = [dict(m) for _, name, m in special if name == "dot_interaction_forward"]
    backward = [dict(m) for _, name, m in special if name == "dot_interaction_backward"]
    for found in forward, backward:
        sizes = {(macros["FEATURES"], macros["WIDTH"]) for macros in found}
        assert sizes == set(itertools.product(FEATURES, WIDTHS))
        for option in ("DENSE", "SELF", "CONCAT", "PADDING"):
            assert {macros[option] for macros in found} == {0, 1}
        assert {macros["VECTOR"] for macros in found} == {1, 2, 4}
    assert any(macros["CHUNK"] < macros["WIDTH"] for macros in forward)
    assert {macros["STAGED"] for macros in backward} == {0, 1}
    halves = [dict(m) for file, _, m in special if file == "dot_interaction_16.cu"]
    sizes = {(macros["FEATURES"], macros["WIDTH"]) for macros in halves}
    assert sizes == set(itertools.product(FEATURES, WIDTHS))
    assert {(macros["BRAIN"], macros["VECTOR"]) for macros in halves} == set(
        itertools.product((0, 1), (1, 2, 4, 8))
    )
    assert any(macros["CHUNK"] < macros["WIDTH"] for macros in halves)
    names = (
        "gather_rows write_rows round_rows adam_rows segment_sum int8_decode layer_norm batch_norm"
        " encode_messages decode_messages cross_vector cross_matrix"
    )
    for name in names.split():
        assert {dict(m)["VECTOR"] for _, kernel, m in special if kernel == name} == {1, 2, 4}

"""Every kernel, as the bench launches it, compiles for three architectures without a complaint."""

import importlib
import itertools
import logging
import pkgutil
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cupyrec import arrays, kernel, nvrtc, ops
from cupyrec.kernel import Kernel

pytest.importorskip("cupy", reason="CuPy brings NVRTC: pip install cupyrec[sim]")
sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import bench_kernels

BATCH = 4  # as many specialisations as at 256: they follow from the widths
ARCHITECTURES = 80, 90, 100


def specialisation(one):
    return one.kernel.file, one.kernel.name, tuple(sorted(one.macros.items()))


@pytest.fixture(scope="module")
def launched():
    """What all cases of the bench launch, and where they differ from the CPU's ops."""
    wrong = {}
    with bench_kernels.watched() as made:
        for name, (_, widths) in bench_kernels.CASES.items():
            for width in widths:
                check = bench_kernels.agrees(name, arrays.module("sim"), BATCH, width)
                if check != "ok":
                    wrong[name, width] = check
    return {specialisation(one): one for one in made}, wrong


@pytest.fixture(scope="module")
def built(launched):
    """What NVRTC and ptxas say of each specialisation; two processes at a time."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())

    def build(job):
        (_, name, macros), arch = job
        text = launched[0][job[0]].kernel.ptx(arch, dict(macros))
        return *job, nvrtc.ptxas(text, arch)[name]

    logger = logging.getLogger("cupyrec")
    logger.addHandler(handler)
    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(build, itertools.product(launched[0], ARCHITECTURES))), said
    finally:
        logger.removeHandler(handler)


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
        for name in re.findall(
            r'extern "C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(',
            path.read_text(),
        )
    }
    assert {path.name for path in kernel.folder().glob("*.cu")} == {file for file, _ in in_files}
    assert in_files - {(file, name) for file, name, _ in launched[0]} == set()


def test_nvrtc_does_not_warn(built):
    assert built[1] == []


def test_ptxas_neither_warns_nor_spills(built):
    assert len(built[0]) >= 3 * 20
    complaints = [
        f"{file} {name} {dict(macros)} for sm_{arch}: {found}"
        for (file, name, macros), arch, found in built[0]
        if found.warnings or found.spills or found.registers == 0
    ]
    assert not complaints, "\n".join(complaints)

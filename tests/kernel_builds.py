"""What NVRTC and ptxas say of kernels' specialisations, and for which architectures to ask.

A specialisation is a file, a kernel in it and a sorted tuple of macros, (name, value) each; a build
is that and an architecture.
"""

import collections
import itertools
import logging
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from cupyrec import kernel, nvrtc

ARCHITECTURES = 80, 90, 100
KERNEL = r'extern "C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\('


class Built(NamedTuple):
    """A kernel of a build."""

    file: str
    name: str
    macros: tuple
    arch: int
    resources: nvrtc.Resources


def built(main, others):
    """(all that was built, what NVRTC said) of two sets of specialisations.

    `main` is built for all architectures and `others` are spread over them, for no kernel asks what
    it is compiled for; but where a kernel takes most registers it is built for all.
    """
    first = everywhere(main)
    first |= spread(sorted(set(others) - set(main)), first)
    processes = multiprocessing.get_context("spawn")  # NVRTC compiles one at a time in a process
    with ProcessPoolExecutor(os.cpu_count(), processes) as pool:
        found, said = assemble(pool, first)
        more, said_of_more = assemble(pool, everywhere(heaviest(found)) - first)
    return found + more, said + said_of_more


def everywhere(specialisations):
    return {(*one, arch) for one in specialisations for arch in ARCHITECTURES}


def spread(wanted, already):
    """Builds of each specialisation on one architecture, and of each value of a macro on all.

    Of a value that few specialisations have, such as a stride, those builds are enough.
    """
    common = collections.Counter(value for one in everywhere(wanted) for value in values(*one))
    common = {value for value, n in common.items() if n >= len(ARCHITECTURES)}
    missing = common - set().union(*itertools.starmap(values, already))
    chosen, count = set(), collections.Counter()
    for one in wanted:
        arch = max(
            ARCHITECTURES, key=lambda arch: (len(values(*one, arch) & missing), -count[arch])
        )
        chosen.add((*one, arch))
        count[arch] += 1
        missing -= values(*one, arch)
    for one in sorted(everywhere(wanted)):
        if values(*one) & missing:
            chosen.add(one)
            missing -= values(*one)
    return chosen


def values(file, kernel, macros, arch):
    return {(file, kernel, value, arch) for value in macros}


def heaviest(found):
    """Of each kernel the specialisation that takes most registers."""
    most = {}
    for one in found:
        most[one.name] = max(one, most.get(one.name, one), key=lambda one: one.resources.registers)
    return {(one.file, one.name, one.macros) for one in most.values()}


def assemble(pool, builds):
    """What `built` returns; many a source, for each takes its time."""
    jobs = []
    ordered = sorted({(file, arch, macros) for file, _, macros, arch in builds})
    for (file, arch), found in itertools.groupby(ordered, lambda one: one[:2]):
        most = 1 if re.search(r"[\s=(]::\w", kernel.source(file)) else 12  # ::x of one namespace
        jobs += [(file, group, arch) for group in batched([macros for *_, macros in found], most)]
    sources = [one_source(file, group) for file, group, _ in jobs]
    files, architectures = [f"kernels/{file}" for file, *_ in jobs], [arch for *_, arch in jobs]
    results = [*pool.map(assembled, sources, architectures, files)]
    found = [
        Built(file, name.rpartition("_")[0], group[int(name.rpartition("_")[2])], arch, resources)
        for (file, group, arch), (kernels, _) in zip(jobs, results, strict=True)
        for name, resources in kernels.items()
    ]
    return found, [message for _, said in results for message in said]


def batched(items, count):
    return [items[i : i + count] for i in range(0, len(items), count)]


def one_source(file, specialisations):
    """A source with a file's kernels for several sets of macros; of the i-th they end in _i."""
    text, parts = kernel.source(file), []
    for i, macros in enumerate(specialisations):
        macros = dict(macros) | {name: f"{name}_{i}" for name in re.findall(KERNEL, text)}
        parts += [f"#define {name} {value}\n" for name, value in macros.items()]
        parts += [f"namespace s{i} {{\n", text, "\n}\n"] if len(specialisations) > 1 else [text]
        parts += [f"#undef {name}\n" for name in macros]
    return "".join(parts)


def assembled(source, arch, file):
    """(resources of each kernel by name, what was said)."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("cupyrec")
    logger.addHandler(handler)
    try:
        return nvrtc.ptxas(nvrtc.ptx(source, arch=arch, file=file), arch), said
    finally:
        logger.removeHandler(handler)

"""What each kernel moves, takes and is bound by: a table on stderr, one JSON line on stdout.

    python scripts/bench_kernels.py --device sim                     # counts; needs no GPU
    python scripts/bench_kernels.py --device cuda --kernel gather_rows adam_rows
    python scripts/bench_kernels.py --device sim --kernel sgd_rows --shape B=64,D=32
    python scripts/bench_kernels.py --device sim --json k.json --plot k.png --html k.html

`sim` counts what PTX does at B = 256 and reads ptxas and the launch geometry for an H100. `cuda`
checks each op against the CPU's, then times it at B = 65,536. docs/kernels.md explains the columns,
the plot and the page.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import kernel_figures as figures
import kernel_page
import kernel_plot
import kernel_shapes
import numpy as np
from kernel_cases import CASES
from kernel_inputs import FULL_BATCH, Work

from cupyrec import arrays, nvrtc
from cupyrec.kernel import Kernel
from cupyrec.scratch import stamped

CHECKED = 256  # batch that is counted, and on which a GPU is compared with the CPU
GROWING = {"B", "M", "N", "U", "n"}  # sizes of a launch that grow with the batch
SUMMED = [
    "sectors", "requests", "bank_conflicts", "shared_wavefronts", "bytes_read", "bytes_written",
    "instructions",
]  # fmt: skip
COUNTED = {
    "kernel": "33", "shape": "22", "bytes_ratio": "6.2f", "sectors_ratio": "7.2f",
    "sectors_per_request": "7.1f", "bank_conflicts": "6.3f", "registers": "4d", "spills": "3d",
    "occupancy": "5.2f", "waves": "6.2f", "in_flight_kb": "6.1f", "balance": "5.2f",
    "instructions": "9d", "bound": "7",
}  # fmt: skip
TIMED = {
    "kernel": "33", "shape": "28", "ms": "8.3f", "gb_per_s": "7.0f", "percent_of_copy": "7.1f",
    "naive_ms": "8.3f", "registers": "4d", "spills": "3d", "check": "7",
}  # fmt: skip
HEADS = {
    "bytes_ratio": "bytes", "sectors_ratio": "sectors", "sectors_per_request": "/req",
    "bank_conflicts": "bank", "registers": "reg", "spills": "spill", "occupancy": "occ",
    "in_flight_kb": "KB", "balance": "bal", "instructions": "instr", "gb_per_s": "GB/s",
    "percent_of_copy": "% copy", "naive_ms": "naive ms",
}  # fmt: skip


class Launched(NamedTuple):
    """A launch as the op asked for it."""

    kernel: Kernel
    macros: dict[str, object]
    sizes: dict[str, int]


@contextlib.contextmanager
def watched() -> Iterator[list[Launched]]:
    """Yield the launches of cupyrec's kernels within this context."""
    made: list[Launched] = []
    call = Kernel.__call__

    def watch(self: Kernel, *arguments: Any, macros: Any = None, **sizes: int) -> None:
        call(self, *arguments, macros=macros or {}, **sizes)
        if min(np.atleast_1d(self.geometry(**sizes).grid)) > 0:
            made.append(Launched(self, dict(macros or {}), sizes))

    Kernel.__call__ = watch
    try:
        yield made
    finally:
        Kernel.__call__ = call


# Counted


def counted(
    name: str, batch: int, width: int, launches: list | None = None, **more: int
) -> dict[str, Any]:
    """The figures of one case, from the simulator; its launches are added to `launches`."""
    xp = arrays.module("sim")
    work = CASES[name][0](xp, batch, width, **more)
    stamped(xp, 1 << 20)  # what launches share is made once, and not by a call
    with watched() as launched, xp.schedule(figures.ARCH), xp.record() as seen:
        work.call()
    ours = [launch for launch in seen.launches if launch.result]
    if launches is not None:
        launches += ours
    counts = {key: sum(launch.result.counts[key] for launch in ours) for key in SUMMED}
    main = max(range(len(ours)), key=lambda i: ours[i].result.counts["sectors"])
    others = sum(launch.moved for launch in seen.launches)  # bytes, by the array module
    moved = counts["bytes_read"] + counts["bytes_written"] + others
    flops = sum(
        one.threads * figures.flops(one.opcode)
        for launch in ours for one in launch.result.executed
    )  # fmt: skip
    resources = [nvrtc.ptxas(launch.ptx, figures.ARCH)[launch.name] for launch in ours]
    full = at_full_batch(launched[main], batch, work.full)
    lies = figures.residency(
        resources[main].registers, resources[main].shared + full.shared, full.block,
        int(np.prod(full.grid)),
    )  # fmt: skip
    ptx, classes = ours[main].ptx, ours[main].result.classes
    in_flight = lies.threads * max(
        figures.loads_in_flight(ptx, ours[main].name), figures.copies_in_flight(ptx, classes)
    )
    row = {
        "kernel": name,
        "shape": work.shape,
        "dtype": work.dtype,
        "bytes_ratio": moved / work.ideal,
        "sectors_ratio": (32 * counts["sectors"] + others) / work.ideal,
        "sectors_per_request": counts["sectors"] / max(1, counts["requests"]),
        "bank_conflicts": counts["bank_conflicts"] / max(1, counts["shared_wavefronts"]),
        "registers": resources[main].registers,
        "spills": max(r.spills for r in resources),
        "occupancy": lies.occupancy,
        "waves": lies.waves,
        "in_flight_kb": in_flight / 1024,
        "balance": max(map(balance, ours)),
        "instructions": counts["instructions"],
        "flop_per_byte": flops / moved,
        "bound": figures.bound(counts, in_flight),
        "launches": len(ours),
        "other_calls": len(seen.launches) - len(ours),
    }
    if work.keys:
        row["sectors_per_key"] = counts["sectors"] / work.keys
    return {key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}


def balance(launch: Any) -> float:
    """Instructions of the longest warp over those of the mean one."""
    return launch.result.counts["longest_warp"] / launch.result.counts["mean_warp"]


def at_full_batch(launched: Launched, batch: int, full: dict[str, int]) -> Any:
    """The geometry that the same launch has at a batch of 65,536."""
    grown = {
        size: full.get(size, n * FULL_BATCH // batch if size in GROWING else n)
        for size, n in launched.sizes.items()
    }
    return launched.kernel.geometry(**grown)


# Timed


class Timer:
    """Medians of CUDA events, with a cold L2."""

    COPIED, FLUSHED = 1 << 30, 256 << 20  # bytes; an L2 is smaller

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        properties = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)
        self.gpu = properties["name"].decode()
        self.flush = xp.empty(max(self.FLUSHED, 2 * properties["l2CacheSize"]), np.uint8)
        source, target = (xp.zeros(self.COPIED, np.uint8) for _ in range(2))
        ms = self.ms(lambda: target.__setitem__(..., source))
        self.copy = 2 * source.nbytes / ms / 1e6

    def ms(
        self, call: Callable[[], Any], before: Callable[[], Any] = lambda: None, repeat: int = 11
    ) -> float:
        """Median of `repeat` calls; those that wait for the host are timed with it."""
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        for _ in range(3):
            before()
            call()
        times = []
        for i in range(repeat):
            before()
            for _ in range(4):  # long enough for the host to queue the call behind it
                self.flush.fill(i)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(self.xp.cuda.get_elapsed_time(start, stop))
        return statistics.median(times)


def agrees(name: str, xp: ModuleType, batch: int, width: int, **more: int) -> str:
    """Whether the op gives what the CPU's gives, on a small batch: "ok", or the largest error."""
    works = [CASES[name][0](where, batch, width, **more) for where in (np, xp)]  # of one seed
    pairs = zip(*(work.call() for work in works), strict=True)
    worst = max(difference(*map(arrays.to_host, pair)) for pair in pairs)
    return "ok" if worst <= tolerance(works[0]) else f"{worst:.1e}"


def tolerance(work: Work) -> float:
    """How far results may lie apart, of the largest value: in float16 by a last bit."""
    return float(np.finfo(np.float16).eps) if work.dtype == "float16" else 1e-5


def difference(expected: np.ndarray, got: np.ndarray) -> float:
    """The largest error over the largest value, or over 1 where all are smaller.

    Infinite where shape, dtype, an integer or a number that is not finite differs.
    """
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return math.inf
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(expected, got) else math.inf
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(got), finite):
        return math.inf
    if not np.array_equal(expected[~finite], got[~finite], equal_nan=True):  # inf, -inf or NaN
        return math.inf
    expected, got = np.float64(expected[finite]), np.float64(got[finite])
    scale = max(1.0, np.abs(expected).max(initial=0.0))
    return float(np.abs(got - expected).max(initial=0.0) / scale)


def timed(timer: Timer, name: str, batch: int, width: int, **more: int) -> dict[str, Any]:
    """The figures of one case, from the GPU."""
    xp = timer.xp
    check = agrees(name, xp, min(batch, CHECKED), width, **more)
    work: Work = CASES[name][0](xp, batch, width, **more)
    with watched() as launched:
        work.call()
    functions = [one.kernel._function(one.macros, one.kernel.geometry(**one.sizes).shared)
                 for one in launched]  # fmt: skip
    ms = timer.ms(work.call, work.before)
    speed = work.ideal / ms / 1e6
    return {
        "kernel": name,
        "shape": work.shape,
        "dtype": work.dtype,
        "ms": ms,
        "gb_per_s": speed,
        "percent_of_copy": 100 * speed / timer.copy,
        "naive_ms": timer.ms(work.naive, repeat=5) if work.naive else None,
        "registers": max(function.num_regs for function in functions),
        "spills": max(function.local_size_bytes for function in functions),
        "check": check,
    }


# Output


def line(columns: dict[str, str], row: dict[str, Any] | None = None) -> str:
    """A line of the table, its head without `row`."""
    cells = []
    for key, form in columns.items():
        wide = int("".join(c for c in form.split(".")[0] if c.isdigit()))
        value = HEADS.get(key, key) if row is None else row[key]
        text = "-" if value is None else str(value) if isinstance(value, str) else f"{value:{form}}"
        cells.append(text.ljust(wide) if form.isdigit() else text.rjust(wide))
    return " ".join(cells).rstrip()


def parse_options() -> argparse.Namespace:
    """The options; whatever would only fail after the run is an error here."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["sim", "cuda"])
    parser.add_argument("--kernel", nargs="+", choices=sorted(CASES), metavar="NAME",
                        help=", ".join(CASES))  # fmt: skip
    parser.add_argument("--shape", metavar="B=256,F=27,D=128", type=str.strip,
                        help="sizes instead of a case's own; without --kernel, of all cases that "
                        "have them; B is 256 on sim and 65536 on cuda")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows, and what they are of")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="a roofline")
    parser.add_argument("--html", type=Path, metavar="FILE",
                        help="the sources, and what each line cost on sim")  # fmt: skip
    options = parser.parse_args()
    try:
        options.shape = kernel_shapes.parsed(options.shape) if options.shape is not None else {}
        options.kernel = options.kernel or kernel_shapes.having(options.shape)
        for name in options.kernel:
            kernel_shapes.shapes(name, options.shape, CHECKED)
        for name in ("json", "plot", "html"):
            path = getattr(options, name)
            if path and (path.is_dir() or not path.parent.is_dir()):
                raise ValueError(
                    f"bench_kernels: '--{name}' must be a file in a folder that is there, "
                    f"got '{path}'."
                )
        if options.html:
            if options.device == "cuda":
                raise ValueError("bench_kernels: '--html' must be of '--device sim', got 'cuda'.")
            options.device = "sim"
        if options.plot:
            kernel_plot.require()
    except (ValueError, ModuleNotFoundError) as error:
        parser.exit(2, f"{error}\n")
    return options


def one_case(
    timer: Timer | None, name: str, shape: kernel_shapes.Shape, plot: bool, launches: list | None
) -> dict[str, Any]:
    """The figures of one case; on a GPU with those of a plot, whose operations `sim` counts."""
    batch, width, more = shape
    if timer is None:
        return counted(name, batch, width, launches, **more)
    row = timed(timer, name, batch, width, **more)
    timer.xp.get_default_memory_pool().free_all_blocks()
    if plot:
        seen = counted(name, min(batch, CHECKED), width, **more)
        row["flop_per_byte"] = seen["flop_per_byte"]
        row["gflop_per_s"] = row["gb_per_s"] * seen["bytes_ratio"] * seen["flop_per_byte"]
    return row


def write(
    options: argparse.Namespace, gpu: str | None, rows: list[dict[str, Any]], launches: list | None
) -> None:
    """Write the files that were asked for."""
    measured_on = {
        "device": gpu or f"simulator, PTX of compute_{figures.ARCH}",
        "nvrtc": "{}.{}".format(*nvrtc.version()),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    title = "{device}, NVRTC {nvrtc}, {date}".format(**measured_on)
    if options.json:
        options.json.write_text(json.dumps(measured_on | {"cases": rows}, indent=2) + "\n")
    if options.plot:
        kernel_plot.draw(rows, title, bool(gpu), options.plot)
    if options.html:
        cases = [f"{row['kernel']} {row['shape']}" for row in rows]
        options.html.write_text(kernel_page.page(launches, cases, title), encoding="utf-8")


def main() -> None:
    options = parse_options()
    logging.basicConfig(format="%(message)s")
    timer = None
    if options.device != "sim":
        try:
            timer = Timer(arrays.module("cuda"))
        except RuntimeError as error:
            if options.device:
                print(error, file=sys.stderr)
                sys.exit(3)
    columns, started = TIMED if timer else COUNTED, time.perf_counter()
    if timer:
        what = f"{timer.gpu}: a copy moves {timer.copy:.0f} GB/s"
    else:
        try:
            what = "counts of sm_90's PTX, by NVRTC {}.{}".format(*nvrtc.version())
        except ModuleNotFoundError as error:
            sys.exit(str(error))
    print(what, file=sys.stderr)
    print(line(columns), file=sys.stderr)
    rows, launches = [], [] if options.html else None
    for name in options.kernel:
        for shape in kernel_shapes.shapes(name, options.shape, FULL_BATCH if timer else CHECKED):
            try:
                row = one_case(timer, name, shape, bool(options.plot), launches)
            except (ValueError, MemoryError) as error:
                if not options.shape:
                    raise
                print(f"bench_kernels: {error}", file=sys.stderr)  # it takes no such size
                sys.exit(2)
            rows.append(row)
            print(line(columns, row), file=sys.stderr, flush=True)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(json.dumps(rows))
    try:
        write(options, timer and timer.gpu, rows, launches)
    except OSError as error:  # the figures stand on stdout
        sys.exit(f"bench_kernels: {error}")
    sys.exit(any(row.get("check", "ok") != "ok" for row in rows))


if __name__ == "__main__":
    main()

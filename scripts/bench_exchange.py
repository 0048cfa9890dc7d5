"""What int8 between ranks saves, and what it costs: one JSON line of figures on stdout.

    python scripts/bench_exchange.py
    python scripts/bench_exchange.py --part link --rate 800

`wire`: bytes, time and relative error of rows and gradients there and back, by codec, width and
number of ranks; `wire_ratio` is int8 rows with their scales over float32 rows, keys apart. `codec`:
float32 bytes a second that int8 takes in and gives back on the CPU, over those of np.copyto.
`link`: training of a DLRM on 4 ranks, 26 tables x 1M ids, width 128, bottom 128-128, top 256-128-1,
batch 16384, Zipf 1.05 ids. Its ranks talk by TCP through the loopback of a network namespace of
their own, limited by `tc`: that needs root and iproute2. The share of communication is 1 - step
time unlimited / step time limited, with the codec that int8 is compared to; a round times both and
int8's limited step, and medians of the rounds' ratios are told. Without --rate the bench seeks the
rate where the share is .53 to .60 with float32 and compares int8 there, then does the same where it
is .24 to .28 with fp16; if no try gives that, the nearest is told. Steps repeat a few batches, all
of whose ids are known. --oneflow tells as well what int8 gains over float32 at the first rate with
OneFlow's MLPs, bottom 512-256-128 and top 1024-1024-512-256-1, at batch 4096 and 16384.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench_train import positive, seconds

import cupyrec
from cupyrec.ops.messages import CODECS, decode, encode

RANKS_SCRIPT = Path(__file__).with_name("bench_exchange_ranks.py")
SHARES = {"none": (0.53, 0.60), "fp16": (0.24, 0.28)}
WIRE = dict(ranks=[1, 2, 4], widths=[16, 128], rows=40_000, ids=100_000, tables=26, repeat=5)
CODEC = dict(rows=65_536, width=128, rounds=9)
LINK = dict(
    ranks=4, tables=26, ids=1_000_000, zipf=1.05, width=128, num_dense=13, bottom=[128],
    top=[256, 128], batch=16_384, batches=3, lr=0.01, steps=3, rounds=3, tries=8,
)  # fmt: skip
ONEFLOW = dict(bottom=[512, 256], top=[1024, 1024, 512, 256])
QUICK = {
    "wire": WIRE | dict(ranks=[1, 2], rows=500, ids=1000, repeat=1),
    "codec": CODEC | dict(rows=4096, rounds=3),
    "link": LINK
    | dict(ranks=2, tables=3, ids=10_000, width=64, bottom=[8], top=[8], batch=4096)
    | dict(batches=1, steps=1, rounds=1, tries=2),
}


def say(*text: Any) -> None:
    print(*text, file=sys.stderr, flush=True)


def mpirun(ranks: int, part: str, case: dict, namespace: str | None = None) -> Any:
    """Run a part of RANKS_SCRIPT on so many ranks, and return what it measured."""
    command = [Path(sys.executable).with_name("mpirun"), "-n", ranks, "--oversubscribe"]
    command += ["--bind-to", "none"]
    if namespace is not None:
        tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include"]
        command = ["ip", "netns", "exec", namespace, *command, *tcp, "lo"]
    command += [sys.executable, RANKS_SCRIPT, part, json.dumps(case)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = subprocess.run(
        list(map(str, command)), env=os.environ | root | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(ended.stdout.splitlines()[-1])


def wire(case: dict, options: argparse.Namespace) -> dict:
    rows = [row for ranks in case["ranks"] for row in mpirun(ranks, "wire", case)]
    say("ranks width codec  row and gradient bytes    keys  to fp32  milliseconds    error")
    ratios: dict[int, list[float]] = {}
    for row in rows:
        if row["codec"] == "none":
            exact = row
        ratio = row["bytes"] / exact["bytes"] if exact["bytes"] else float("nan")
        say(
            f"{row['ranks']:5} {row['width']:5} {row['codec']:5} {row['bytes']:23,} "
            f"{row['keys']:9,} {ratio:7.4f} {row['milliseconds']:13.2f} {row['error']:8.1e}"
        )
        if row["codec"] == "int8" and row["bytes"]:
            ratios.setdefault(row["width"], []).append(ratio)
    narrow, wide = case["widths"]
    return {"wire_ratio": max(ratios[wide]), f"wire_ratio_width_{narrow}": max(ratios[narrow])}


def codec(case: dict, options: argparse.Namespace) -> dict:
    cupyrec.set_num_threads(options.threads)
    x = np.random.default_rng(1).standard_normal((case["rows"], case["width"]), np.float32)
    y, counts, width, result = np.empty_like(x), [len(x)], case["width"], {}
    for name in CODECS:
        message, _ = encode(x, counts, name)
        pairs = []
        for _ in range(case["rounds"] + 1):
            copy = seconds(lambda: np.copyto(y, x), 3)
            to = seconds(lambda c=name, m=message: encode(x, counts, c, out=m), 3)
            back = seconds(lambda c=name, m=message: decode(m, counts, c, width, out=y), 3)
            pairs.append((copy / to, copy / back, x.nbytes / copy / 1e9))
        ratios = list(map(statistics.median, zip(*pairs[1:], strict=True)))  # one round warms up
        say("{}: encodes {:.2f}, decodes {:.2f} of np.copyto, {:.1f} GB/s".format(name, *ratios))
        result[name] = ratios
    return {"encode_ratio": result["int8"][0], "decode_ratio": result["int8"][1]}


@contextlib.contextmanager
def namespace_of_its_own() -> Iterator[str]:
    """A network namespace with nothing but a loopback."""
    name = f"bench-exchange-{os.getpid()}"
    ip = ["ip", "netns"]
    subprocess.run([*ip, "add", name], check=True, capture_output=True, text=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        subprocess.run(["tc", "-n", name, "qdisc", "show"], check=True, stdout=subprocess.DEVNULL)
        yield name
    finally:
        subprocess.run([*ip, "delete", name], check=True)


def told(row: dict[str, float]) -> str:
    return (
        "at {mbit:,.0f} Mbit/s: {limited:.2f} s a step, without limit {unlimited:.2f} s, share "
        "{share:.3f}; int8 {int8:.2f} s, {speedup:.2f} times as fast; bytes and share allow "
        "{allowed:.2f}".format(mbit=row["rate"] / 1e6, **row)
    )


def link(case: dict, options: argparse.Namespace) -> dict:
    rate = None if options.rate is None else options.rate * 1e6
    given = {"steps": options.steps, "rounds": options.rounds}
    case = case | {name: value for name, value in given.items() if value is not None}
    case |= {"rate": rate, "shares": {codec: SHARES[codec] for codec in options.against}}
    with contextlib.ExitStack() as stack:
        try:
            namespace = stack.enter_context(namespace_of_its_own())
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            say(f"link: left out, it needs root and iproute2: {str(why).strip()}")
            return {}
        result = {}
        measured = mpirun(case["ranks"], "link", case, namespace)
        if options.oneflow:
            same = {"rate": measured["none"]["rate"], "shares": {"none": SHARES["none"]}}
            for batch in case["batch"] // 4, case["batch"]:
                beside = case | ONEFLOW | same | {"batch": batch}
                row = mpirun(case["ranks"], "link", beside, namespace)["none"]
                say(f"OneFlow's MLPs, batch {batch}, none", told(row))
                result[f"speedup_int8_vs_fp32_oneflow_{batch}"] = row["speedup"]
    for codec, row in measured.items():
        say(codec, told(row))
        known, ending = ("fp32", "") if codec == "none" else (codec, f"_{codec}")
        result[f"rate_mbit{ending}"] = row["rate"] / 1e6
        result[f"communication_share{ending}"] = row["share"]
        result[f"speedup_int8_vs_{known}"] = row["speedup"]
        result[f"speedup_allowed_vs_{known}"] = row["allowed"]
    return result


PARTS = {"wire": wire, "codec": codec, "link": link}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--threads", type=positive, default=2, help="of `codec`")
    parser.add_argument("--rate", type=float, help="of `link` in Mbit/s; by default it is sought")
    parser.add_argument("--against", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--oneflow", action="store_true", help="its larger MLPs at the same rate")
    parser.add_argument("--steps", type=positive, help="a measurement of `link`")
    parser.add_argument("--rounds", type=positive, help="of `link`")
    options = parser.parse_args()
    if options.oneflow and "none" not in options.against:
        parser.error("argument --oneflow: needs --against none")
    cases = QUICK if options.quick else {"wire": WIRE, "codec": CODEC, "link": LINK}
    result = {}
    for part in options.part:
        result |= PARTS[part](cases[part], options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

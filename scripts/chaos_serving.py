"""Fire what no honest client sends at a server, thousands of each kind; see whether it minds.

    python scripts/chaos_serving.py --each 10000

A small model is trained and served by `cupyrec serve`. Each of KINDS is bytes on a connection of
their own: malformed HTTP, JSON and tensors, numbers that lie about what follows, bodies that never
end, clients that leave in the midst. Each connection must be answered or closed, with a 4xx and a
sentence where there is an answer; then the server must still say what it said before, to the bit,
and have little more memory. The last line of stdout is
{"kinds": ..., "sent": ..., "answers": {"400": ...}, "closed": ..., "dead": ..., "rss_mb": [before,
after], "alive": ..., "seconds": ...}; the exit code is 0 if nothing is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

AT_ONCE = 128  # connections; of those that never end as many as the server takes
MOST = 1000
PATIENCE = 20.0  # seconds until a connection counts as dead
PATH = "/v2/models/lr/infer"


def post(body: bytes, *headers: str, length: object = None, path: str = PATH) -> bytes:
    length = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {length}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def infer(**changes: Any) -> bytes:
    """A request that is right but for what is changed of its first input."""
    first = {"name": "dense", "datatype": "FP32", "shape": [1, 13], "data": [0.5] * 13}
    ids = {"name": "ids", "datatype": "INT64", "shape": [1, 39], "data": [5] * 39}
    first = {key: value for key, value in (first | changes).items() if value is not ...}
    return post(json.dumps({"inputs": [first, ids]}).encode())


def with_ids(data: Any, shape: Any = (1, 39)) -> bytes:
    ids = {"name": "ids", "datatype": "INT64", "shape": list(shape), "data": data}
    dense = {"name": "dense", "datatype": "FP32", "shape": [1, 13], "data": [0.5] * 13}
    return post(json.dumps({"inputs": [dense, ids]}).encode())


def with_binary(size: object, there: int) -> bytes:
    parameters = {"binary_data_size": size}
    entry = {"name": "dense", "datatype": "FP32", "shape": [1, 13], "parameters": parameters}
    text = json.dumps({"inputs": [entry]}).encode()
    return post(text + bytes(there), f"Inference-Header-Content-Length: {len(text)}")


def noise(rng: random.Random, most: int = 600) -> bytes:
    return rng.randbytes(rng.randrange(1, most))


def mutated(rng: random.Random) -> bytes:
    data = bytearray(infer())
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def number(text: str) -> bytes:
    body = infer(data=["@"] + [0] * 12).partition(b"\r\n\r\n")[2]
    return post(body.replace(b'"@"', text.encode()))


LIES = [2**62, 2**31, -1, -(2**63), 10**30, 1.5, True, None, "13", [13], {}]

#: By name: what is sent. "left ..." leave in the midst, "... without end" let the server wait.
KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "noise": noise,
    "noise as a body": lambda rng: post(noise(rng)),
    "mutated": mutated,
    "shape": lambda rng: infer(shape=[rng.choice(LIES), rng.choice([13, *LIES])]),
    "shape that is none": lambda rng: infer(shape=rng.choice([*LIES, [], [1] * 9, [[1, 13]]])),
    "binary size": lambda rng: with_binary(rng.choice([*LIES[:-3], 51, 53]), 52),
    "binary data cut short": lambda rng: with_binary(52, rng.randrange(52)),
    "json length": lambda rng: post(
        b"{}", f"Inference-Header-Content-Length: {rng.choice([*LIES, 3, '0x2', ' '])}"
    ),
    "elements of BYTES": lambda rng: post(
        (text := b'{"inputs":[{"name":"C1","datatype":"BYTES","shape":[1],"parameters":'
         b'{"binary_data_size":8}}]}') + struct.pack("<I", rng.getrandbits(32)) + b"abcd",
        f"Inference-Header-Content-Length: {len(text)}",
    ),
    "nested": lambda rng: post(
        rng.choice([b"[", b'{"inputs":[', b'{"a":']) * rng.choice([999, 9999])
    ),
    "numbers that are none": lambda rng: number(
        rng.choice(["NaN", "Infinity", "-Infinity", "1e999", "1e39", "--1", "0x1", "01", "1_0"])
    ),
    "integers out of range": lambda rng: with_ids([rng.choice([2**63, -(2**63) - 1, 10**40])] * 39),
    "floats for integers": lambda rng: with_ids([rng.choice([1.5, 1.0, 1e300])] * 39),
    "bools and others": lambda rng: with_ids([rng.choice([True, None, "1", [], {}])] * 39),
    "names twice": lambda rng: infer(name="ids"),
    "names that are none": lambda rng: infer(name=rng.choice(["", "x" * 5000, "\x00", 5, None])),
    "datatype": lambda rng: infer(datatype=rng.choice(["BYTES", "FP128", "fp32", 5, None, [1]])),
    "keys that lack": lambda rng: infer(**{rng.choice(["name", "datatype", "shape", "data"]): ...}),
    "columns": lambda rng: infer(name="C1", datatype="BYTES", shape=[1], data=["zz"]),
    "too large": lambda rng: post(b"", length=2**33),
    "content length": lambda rng: post(
        b"{}", length=rng.choice(["-1", "1e3", "abc", "9" * 40, ""])
    ),
    "two content lengths": lambda rng: post(b"{}", "Content-Length: 5"),
    "content encoding": lambda rng: post(b"\x1f\x8b" + noise(rng), "Content-Encoding: gzip"),
    "length and chunks": lambda rng: post(b"0\r\n\r\n", "Transfer-Encoding: chunked"),
    "chunks that are none": lambda rng: post(b"zz\r\n", "Transfer-Encoding: chunked").replace(
        b"Content-Length: 4\r\n", b""
    ),
    "endless header": lambda rng: b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 200_000,
    "many headers": lambda rng: b"GET /v2 HTTP/1.1\r\n" + b"X: a\r\n" * 12_000,
    "long path": lambda rng: b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    "path": lambda rng: f"GET /v2/%ff/../{noise(rng, 30).hex()} HTTP/1.1\r\n\r\n".encode(),
    "method": lambda rng: (
        rng.choice([b"PUT", b"DELETE", b"BREW", b"TRACE"]) + b" /v2 HTTP/1.1\r\n\r\n"
    ),
    "upgrade": lambda rng: post(b"{}", "Connection: Upgrade", "Upgrade: websocket"),
    "load": lambda rng: post(
        rng.choice([noise(rng), b"[]", b'{"parameters":{"config":"{}"}}']),
        path="/v2/repository/models/lr/load",
    ),
    "pipelined": lambda rng: infer(shape=[2, 2]) * rng.randrange(2, 60),
    "left at once": lambda rng: b"",
    "left in the head": lambda rng: post(b"{}")[: rng.randrange(1, 40)],
    "left in the body": lambda rng: post(b"{}", length=1000),
    "left before the answer": lambda rng: infer(),
    "half-closed": lambda rng: post(b"{}", length=1000),
    "head without end": lambda rng: post(b"{}")[: rng.randrange(1, 40)],
    "body without end": lambda rng: post(b'{"inputs": [', length=1000),
    "chunks without end": lambda rng: post(b"5\r\nabcde\r\n", "Transfer-Encoding: chunked").replace(
        b"Content-Length: 10\r\n", b""
    ),
}  # fmt: skip


async def attack(host: str, port: int, kind: str, rng: random.Random) -> str:
    """Return the status of what one connection is answered first, "closed" or "dead"."""
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(KINDS[kind](rng))
        if kind == "half-closed":
            writer.write_eof()
        if kind.startswith("left"):
            await asyncio.sleep(rng.random() * 0.005)
            writer.transport.abort()
            return "left"
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        body = await asyncio.wait_for(reader.readexactly(length), PATIENCE)
        status = head.split()[1].decode()
        told = status == "200" or json.loads(body)["error"].endswith(".")
        return status if told else "no sentence"
    except (asyncio.IncompleteReadError, ConnectionError):
        return "closed"
    except TimeoutError:
        return "dead"
    finally:
        if writer is not None:
            writer.transport.abort()


async def fire(host: str, port: int, kind: str, count: int, seed: int = 0) -> dict[str, int]:
    """Return how often connections of a kind ended in which way."""
    rng, ended = random.Random(f"{kind} {seed}"), collections.Counter()
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            ended[await attack(host, port, kind, rng)] += 1

    at_once = MOST if kind.endswith("without end") else AT_ONCE
    await asyncio.gather(*(one_after_the_other() for _ in range(min(at_once, count))))
    return dict(ended)


def ask(address: str, path: str = PATH, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(f"http://{address}{path}", body)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


def memory(process: subprocess.Popen) -> float:
    """Megabytes that lie in memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1024


def serve(folder: str) -> tuple[subprocess.Popen, str]:
    """Train a model, and serve it; return the process and its address."""
    cupyrec = [sys.executable, "-m", "cupyrec"]
    log = f"{folder}/log.tsv"
    for words in (
        f"data synthetic --rows 2000 --out {log}",
        f"train --model lr --train {log} --out {folder}/run --device cpu",
    ):
        subprocess.run([*cupyrec, *words.split()], check=True, stdout=2)
    options = f"--port 0 --device cpu --timeout 1 --max-connections {MOST + AT_ONCE}".split()
    process = subprocess.Popen(
        [*cupyrec, "serve", f"{folder}/run", *options], stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        print(line, end="", file=sys.stderr)
        if found := re.search(r" at http://(\S+)", line):
            return process, found[1]
    raise SystemExit("the server ended before it served")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=10_000, metavar="N", help="connections a kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server's too
    with tempfile.TemporaryDirectory() as folder:
        process, address = serve(folder)
        try:
            result = fire_all(process, address, options)
        finally:
            process.terminate()
            process.communicate()
    result["alive"] &= process.returncode == 0
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(result))
    fine = {"left", "closed", "200", "503"} | {str(status) for status in range(400, 500)}
    return 0 if result["alive"] and not {*result["answers"]} - fine and not result["dead"] else 1


def fire_all(process: subprocess.Popen, address: str, options: argparse.Namespace) -> dict:
    host, _, port = address.rpartition(":")
    good = infer().partition(b"\r\n\r\n")[2]
    for _ in range(200):
        said = ask(address, body=good)
    before, answers = memory(process), collections.Counter()
    for kind in KINDS:
        start = time.perf_counter()
        ended = asyncio.run(fire(host, int(port), kind, options.each, options.seed))
        answers.update(ended)
        seconds = time.perf_counter() - start
        print(f"{kind}: {ended}, {seconds:.1f} s, {memory(process):.0f} MB", file=sys.stderr)
    closed, dead = answers.pop("closed", 0), answers.pop("dead", 0)
    return {
        "kinds": len(KINDS),
        "sent": options.each * len(KINDS),
        "answers": dict(sorted(answers.items())),
        "closed": closed,
        "dead": dead,
        "rss_mb": [round(before), round(memory(process))],
        "alive": process.poll() is None and ask(address, body=good) == said,
    }


if __name__ == "__main__":
    sys.exit(main())

"""`cupyrec serve` beside FastAPI and PyTorch: one JSON line of its speed and their ratio on stdout.

    python scripts/bench_serving.py
    python scripts/bench_serving.py --case reload

Case `speed`: DLRM, 26 tables x 10k ids, width 16, bottom 64, top 128. Both servers have the same
parameters, and get the same requests of 1 and of 256 rows in the JSON of the Open Inference
Protocol, from 32 connections that ask again as soon as they are answered; ours gets them as binary
tensors too, and as 39 columns of its schema, which it converts. The peer, bench_peer_fastapi.py,
has uvicorn with uvloop and httptools like ours, and one process, as ours has; of PyTorch with one
thread and with two the faster counts in each round. Beside it stands the peer of two processes,
each with a model of its own. Servers take turns; figures are medians over the rounds,
`requests_per_second` and `p99_ms` of one row in JSON. `ratio_vs_fastapi_torch` and
`ratio_vs_2_workers` are the least favourable of 1 and 256 rows. The client shares the cores.

Case `reload`: the server changes to another checkpoint, whole or a delta, 200 times, while clients
ask on. Each answer must be that of the version that it names, bit for bit.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import cupyrec
from cupyrec import checkpoint, models
from cupyrec.data import Batch, criteo_schema
from cupyrec.from_settings import build_model, build_optimizer, default_settings
from cupyrec.serving import Predictor

ROOT = Path(__file__).resolve().parent.parent
PEER_VENV = ROOT / ".bench-venv"
PEER = "torch==2.13.0", "numpy", "fastapi", "uvicorn[standard]"
PATH = "/v2/models/dlrm/infer"
PEERS = ("peer", 1, 1), ("peer, 2 threads", 1, 2), ("peer, 2 workers", 2, 1)
TABLES, WIDTH = 26, 16


def saved(folder: Path, ids: int, seed: int) -> models.DLRM:
    """Save a model whose tables have rows `0` to `ids - 1`, as `cupyrec train` would."""
    settings, schema = default_settings("dlrm"), criteo_schema(buckets=False)
    settings["training"] = settings["training"] | {"seed": seed, "deltas": 100}
    model = build_model(settings, schema, "cpu")
    generator = np.random.default_rng(seed)
    for table in range(TABLES):
        vectors = generator.normal(0, 0.3, (ids, WIDTH)).astype(np.float32)
        model.embedding.import_table(table, np.arange(ids), vectors)
    optimizer = build_optimizer(settings, model)
    checkpoint.save(
        folder, model, optimizer, config={"settings": settings, "schema": schema.to_dict()}
    )
    return model


def rows(count: int, ids: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    dense = generator.exponential(1, (count, 13)).astype(np.float32)
    return dense, np.minimum(generator.zipf(1.2, (count, TABLES)) - 1, ids - 1)


def in_json(dense: np.ndarray, ids: np.ndarray) -> tuple[bytes, str]:
    values = {"dense": (dense, "FP32"), "ids": (ids, "INT64")}
    inputs = [
        {"name": name, "shape": list(a.shape), "datatype": kind, "data": a.ravel().tolist()}
        for name, (a, kind) in values.items()
    ]
    return json.dumps({"inputs": inputs}, separators=(",", ":")).encode(), ""


def as_columns(dense: np.ndarray, ids: np.ndarray) -> dict[str, tuple[str, list]]:
    """Numbers before their logarithm is taken, and ids as texts, by the names of the schema."""
    numbers = {f"I{n + 1}": ("FP32", values.tolist()) for n, values in enumerate(dense.T)}
    texts = {f"C{n + 1}": ("BYTES", [f"{id_:x}" for id_ in own]) for n, own in enumerate(ids.T)}
    return numbers | texts


def in_columns(dense: np.ndarray, ids: np.ndarray) -> tuple[bytes, str]:
    inputs = [
        {"name": name, "shape": [len(data)], "datatype": kind, "data": data}
        for name, (kind, data) in as_columns(dense, ids).items()
    ]
    return json.dumps({"inputs": inputs}, separators=(",", ":")).encode(), ""


def in_binary(dense: np.ndarray, ids: np.ndarray) -> tuple[bytes, str]:
    inputs = [
        {"name": name, "shape": list(a.shape), "datatype": kind,
         "parameters": {"binary_data_size": a.nbytes}}
        for name, a, kind in (("dense", dense, "FP32"), ("ids", ids, "INT64"))
    ]  # fmt: skip
    told = {"inputs": inputs, "outputs": [{"name": "probability",
                                           "parameters": {"binary_data": True}}]}  # fmt: skip
    head = json.dumps(told).encode()
    body = head + dense.tobytes() + ids.tobytes()
    return body, f"Inference-Header-Content-Length: {len(head)}\r\n"


def request(body: bytes, header: str) -> bytes:
    kind = "application/octet-stream" if header else "application/json"
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Type: {kind}\r\n{header}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One that asks, waits, and asks again."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received, self.asked = bytearray(), 0.0

    def ask(self, what: bytes) -> None:
        self.asked = time.perf_counter()
        self.socket.sendall(what)

    def answer(self) -> bytes | None:
        """The body of an answer, once it is there."""
        more = self.socket.recv(1 << 18)
        if not more:
            sys.exit("the server has closed a connection")
        self.received += more
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self.received[:end]).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        if len(self.received) < end + 4 + length:
            return None
        body, self.received = bytes(self.received[end + 4 :]), bytearray()
        if b" 200 " not in head[:14]:
            sys.exit(f"the server answers {head.splitlines()[0].decode()}: {body[:300].decode()}")
        return body


def drive(
    port: int, requests: list[bytes], connections: int, seconds: float
) -> tuple[float, float]:
    """Requests per second and the 99th percentile of their milliseconds, in a closed loop."""
    asks, taken = len(requests), []
    with selectors.EpollSelector() as selector, contextlib.ExitStack() as stack:
        for n in range(connections):
            one = Connection(port)
            stack.enter_context(one.socket)
            selector.register(one.socket, selectors.EVENT_READ, one)
            one.ask(requests[n % asks])
        n, start = connections, time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            for key, _ in selector.select(1):
                if key.data.answer() is not None:
                    taken.append(time.perf_counter() - key.data.asked)
                    key.data.ask(requests[n % asks])
                    n += 1
    if not taken:
        sys.exit(f"the server has answered nothing in {seconds} s")
    return len(taken) / (now - start), 1e3 * float(np.percentile(taken, 99))


@contextlib.contextmanager
def server(command: list[str], ready: str, **environment: str) -> Iterator[int]:
    """A server's port, from when it is ready to the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, cwd=ROOT,
        env=os.environ | environment,
    )  # fmt: skip
    try:
        for _ in range(600):
            if process.poll() is not None:
                sys.exit(f"{command[0]} has ended with {process.returncode}")
            with contextlib.suppress(OSError):
                one = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                one.request("GET", ready)
                if one.getresponse().status == 200:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def ours(folder: Path, *more: str) -> contextlib.AbstractContextManager[int]:
    return server(
        [sys.executable, "-m", "cupyrec", "serve", str(folder), *more], "/v2/health/ready"
    )


def peer(weights: Path, workers: int, threads: int) -> contextlib.AbstractContextManager[int]:
    command = [peer_python(), "-m", "uvicorn", "bench_peer_fastapi:app", "--app-dir", "scripts",
               "--no-access-log", "--log-level", "warning", "--workers", workers]  # fmt: skip
    environment = {"BENCH_WEIGHTS": str(weights), "BENCH_THREADS": str(threads)}
    return server(list(map(str, command)), "/docs", **environment)


def peer_python() -> Path:
    """Make the peer's venv if it isn't there."""
    python, done = PEER_VENV / "bin/python", PEER_VENV / "complete_serving"
    if not done.exists():
        print(f"installing the peer into {PEER_VENV}", file=sys.stderr)
        if not python.exists():
            venv.create(PEER_VENV, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PEER], check=True, stdout=sys.stderr)
        done.touch()
    return python


def asked(port: int, body: bytes, header: str) -> bytes:
    """The body of one answer."""
    one = Connection(port)
    with one.socket:
        one.ask(request(body, header))
        while (answer := one.answer()) is None:
            pass
    return answer


def check(port: int, expected: np.ndarray, given: tuple, tolerance: float) -> None:
    """End unless a server says what the model does."""
    (output,) = json.loads(asked(port, *in_json(*given)))["outputs"]
    got = np.array(output["data"], np.float64).astype(np.float32)
    if not np.allclose(got, expected, rtol=0, atol=tolerance):
        sys.exit(f"the server must say {expected[:4]}, got {got[:4]}")


def speed(options: argparse.Namespace) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = saved(folder / "checkpoint", options.ids, seed=1)
        tables = [model.embedding.export_table(t) for t in range(TABLES)]
        tables = np.stack([vectors[np.argsort(ids)] for ids, vectors in tables])
        np.savez(folder / "weights.npz", tables=tables, **model.state_dict())
        ports = {"ours": stack.enter_context(ours(folder / "checkpoint"))}
        for name, workers, threads in PEERS:
            port = stack.enter_context(peer(folder / "weights.npz", workers, threads))
            ports[name] = port
        given = rows(300, options.ids, seed=2)
        expected, _ = Predictor(folder / "checkpoint").probabilities(*given)
        for name, port in ports.items():
            check(port, expected[:, 0], given, 0 if name == "ours" else 1e-5)
        figures = collections.defaultdict(list)
        for _ in range(options.rounds):
            for batch in options.batches:
                figures_of_round(ports, batch, options, figures)
    result = {name: statistics.median(values) for name, values in figures.items()}
    first = options.batches[0]
    ratios = {
        name: min(result[f"{name}_{batch}"] for batch in options.batches)
        for name in ("ratio_vs_fastapi_torch", "ratio_vs_2_workers")
    }
    headline = {name: result[f"{name}_{first}"] for name in ("requests_per_second", "p99_ms")}
    return headline | ratios | result


def figures_of_round(ports: dict, batch: int, options: argparse.Namespace, figures: dict) -> None:
    some = [rows(batch, options.ids, seed=10 + n) for n in range(64)]
    texts = [request(*in_json(*given)) for given in some]
    others = {
        "ours, binary": [request(*in_binary(*given)) for given in some],
        "ours, columns": [request(*in_columns(*given)) for given in some],
    }
    told = {}
    for name, port in [*ports.items(), *((other, ports["ours"]) for other in others)]:
        what = others.get(name, texts)
        told[name] = drive(port, what, options.connections, options.seconds)
        rate, p99 = told[name]
        print(f"{batch:4} rows, {name:15} {rate:8.0f} requests/s, p99 {p99:7.2f} ms",
              file=sys.stderr)  # fmt: skip
    told["peer"] = max(told["peer"], told["peer, 2 threads"])
    keys = {"ours": "", "ours, binary": "binary_", "ours, columns": "columns_", "peer": "peer_",
            "peer, 2 workers": "peer_2_workers_"}  # fmt: skip
    for name, key in keys.items():
        figures[f"{key}requests_per_second_{batch}"].append(told[name][0])
        figures[f"{key}p99_ms_{batch}"].append(told[name][1])
    for key, name in (("fastapi_torch", "peer"), ("2_workers", "peer, 2 workers")):
        figures[f"ratio_vs_{key}_{batch}"].append(told["ours"][0] / told[name][0])


def versions(folder: Path, ids: int) -> list[Path]:
    """Checkpoints to change between: whole ones, and deltas each based on the one before it."""
    model = saved(folder / "first", ids, seed=1)
    saved(folder / "other", ids, seed=2)
    settings = default_settings("dlrm")
    manifest = checkpoint.read_manifest(folder / "first")
    optimizer = build_optimizer(settings, model)
    checkpoint.load(folder / "first", model, optimizer)
    made = [folder / "first"]
    for n in range(3):
        dense, some = rows(256, ids, seed=50 + n)
        labels = (np.arange(256) % 3 == 0).astype(np.float32)[:, None]
        cupyrec.train_step(model, Batch(dense, some, labels), optimizer)
        made.append(folder / f"delta-{n}")
        checkpoint.save(made[-1], model, optimizer, base=made[-2], config=manifest["config"])
    return [*made, folder / "other"]


def reload(options: argparse.Namespace) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = versions(folder / "checkpoints", options.ids)
        given = rows(100, options.ids, seed=3)
        expected = {}
        for path in made:
            predictor = Predictor(path)
            expected[predictor.version] = predictor.probabilities(*given)[0][:, 0]
            predictor.close()
        run = folder / "run"
        run.mkdir()
        point(run, made[0])
        port = stack.enter_context(ours(run, "--watch", "0"))
        over, seen = threading.Event(), collections.Counter()

        def ask() -> None:
            one = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body, header = in_binary(*given)
            headers = dict([header.strip().split(": ")])
            while not over.is_set():
                seen[judged(one, body, headers, expected)] += 1

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        one, reloads = http.client.HTTPConnection("127.0.0.1", port, timeout=60), 0
        for n in range(1, options.reloads + 1):
            point(run, made[n % len(made)])
            one.request("POST", "/v2/repository/models/dlrm/load")
            answer = one.getresponse()
            answer.read()
            reloads += answer.status == 200
        over.set()
        for thread in threads:
            thread.join()
    told = {version: seen.pop(version) for version in expected}
    print(f"answers by version: {told}, wrong: {dict(seen)}", file=sys.stderr)
    return {
        "reloads": reloads, "answers": sum(told.values()),
        "versions": sum(map(bool, told.values())), "failed_or_mixed": sum(seen.values()),
    }  # fmt: skip


def point(run: Path, made: Path) -> None:
    """Let a run's last checkpoint be another, at once."""
    (run / "next").symlink_to(made)
    (run / "next").rename(run / "last")


def judged(one: http.client.HTTPConnection, body: bytes, headers: dict, expected: dict) -> str:
    """The version of an answer, or what is wrong with it."""
    try:
        one.request("POST", PATH, body, headers)
        answer = one.getresponse()
        text = answer.read()
        if answer.status != 200:
            return f"status {answer.status}"
        length = int(answer.headers["Inference-Header-Content-Length"])
        version = json.loads(text[:length])["model_version"]
        got = np.frombuffer(text[length:], np.float32)
        return version if np.array_equal(got, expected[version]) else f"mixed with {version}"
    except (OSError, http.client.HTTPException) as error:
        one.close()
        return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=["speed", "reload"], default="speed")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256], help="rows a request")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--ids", type=int, default=10_000, help="of each table")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each server in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reloads", type=int, default=200)
    options = parser.parse_args()
    figures = speed(options) if options.case == "speed" else reload(options)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()

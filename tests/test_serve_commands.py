"""``cupyrec serve``: what `cupyrec predict` says, bit for bit, of the run that goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import trial
import tritonclient.http

from cupyrec import cli

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with logs and a run of one epoch."""
    folder = tmp_path_factory.mktemp("served")
    logs = trial.write_logs(folder)
    assert trial.train(logs[:2] + logs[6:], folder / "run", "--set", "training.deltas=3") == 0
    return folder


class Served:
    """The command as a process."""

    def __init__(self, run, *options):
        words = ["serve", run, "--port", "0", "--device", "cpu", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cupyrec", *map(str, words)], stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.said, self.ready = [], threading.Event()
        self._reads = threading.Thread(target=self._read, daemon=True)
        self._reads.start()
        assert self.ready.wait(120)
        self.address = re.search(r" at http://(\S+)$", self.said[-1])[1] if self.said else ""

    def _read(self):
        for line in self.process.stderr:
            self.said.append(line)
            if " at http://" in line:
                self.ready.set()
        self.ready.set()

    def ask(self, inputs, path="/v2/models/dlrm/infer"):
        """Probabilities, and the version they are of."""
        text = json.dumps({"inputs": inputs}).encode()
        with urllib.request.urlopen(f"http://{self.address}{path}", text, timeout=60) as answer:
            said = json.loads(answer.read())
        (output,) = said["outputs"]
        assert output["name"] == "probability"
        return np.array(output["data"], np.float32), said["model_version"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reads.join()
        self.process.stderr.close()
        assert code == 0, self.said


def columns(log):
    """Inputs that say what a log does."""
    rows = [line.split("\t") for line in Path(log).read_text().splitlines()]
    _, price, user, item = zip(*rows, strict=True)
    shape = [len(rows)]
    price = [float(field) if field else None for field in price]
    return [
        {"name": "price", "datatype": "FP64", "shape": shape, "data": price},
        {"name": "user", "datatype": "INT64", "shape": shape, "data": [int(u) for u in user]},
        {"name": "item", "datatype": "BYTES", "shape": shape, "data": list(item)},
    ]


def predicted(run, log, folder):
    output = folder / "predicted.npy"
    words = ["predict", run, "--data", log, "--output", output, "--overwrite", "--device", "cpu"]
    assert cli.main([str(word) for word in words]) == 0
    return np.load(output)


@pytest.mark.parametrize(
    "options",
    [
        [], ["--tier", "cached_host", "--cache-mb", "1"], ["--tier", "cached_ssd"],
        ["--max-delay", "0", "--threads", "1"],
    ],
)  # fmt: skip
def test_answers_are_those_of_predict_bit_for_bit(run, options, tmp_path):
    expected = predicted(run / "run", run / "test.tsv", tmp_path)
    inputs = columns(run / "test.tsv")
    with Served(run / "run", *options) as served:
        assert re.search("device cpu, [0-9]+ thread", "".join(served.said))
        got, version = served.ask(inputs)
        assert got.tobytes() == expected.tobytes()
        for row in (0, 77):
            one = [i | {"shape": [1], "data": i["data"][row : row + 1]} for i in inputs]
            assert served.ask(one) == (expected[row], version)
        with tritonclient.http.InferenceServerClient(served.address) as client:
            sent = []
            for one in inputs:
                array = np.array(one["data"], {"BYTES": object}.get(one["datatype"]))
                array = np.nan_to_num(array.astype(float)) if one["name"] == "price" else array
                sent.append(tritonclient.http.InferInput(one["name"], [200], one["datatype"]))
                sent[-1].set_data_from_numpy(array, binary_data=True)
            rows = [row for row, price in enumerate(inputs[0]["data"]) if price is not None]
            answer = client.infer("dlrm", sent).as_numpy("probability")
            assert answer[rows].tobytes() == expected[rows].tobytes()


def test_the_page_on_serving(run, capsys):
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    (address,) = re.findall(r"^curl (\S+) -d @request.json$", page, re.MULTILINE)
    (text,) = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (python,) = re.findall(r"^```python\n(import numpy.*?)^```$", page, re.DOTALL | re.MULTILINE)
    with Served(run / "run") as served:
        at = "127.0.0.1:8000"
        request = urllib.request.Request(address.replace(at, served.address), text.encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = json.loads(answer.read())["outputs"][0]["data"]
        exec(python.replace(at, served.address), {})
    assert capsys.readouterr().out.split("[")[1].split()[0] == str(np.float32(said[0]))
    parser = cli._parser()
    defaults = vars(parser.parse_args(["serve", "run"]))
    for flag, value in re.findall(r"^\| `--([\w-]+)`.*?\| (\d+) \|", page, re.MULTILINE):
        assert defaults[flag.replace("-", "_")] == int(value)


def test_a_run_that_goes_on_is_followed_without_a_failed_answer(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run / "run", folder, symlinks=True)
    inputs, log = columns(run / "test.tsv"), run / "test.tsv"
    expected = {}
    with Served(folder, "--watch", "0.2", "--name", "clicks") as served:
        path, answers, stop = "/v2/models/clicks/infer", [], threading.Event()

        def client():
            while not stop.is_set():
                answers.append(served.ask(inputs, path))

        clients = [threading.Thread(target=client) for _ in range(4)]
        for one in clients:
            one.start()
        first = served.ask(inputs, path)
        expected[first[1]] = predicted(folder, log, tmp_path)
        for epochs in (2, 3):
            more = ["--resume", folder, "--epochs", epochs, "--train", run / "train.tsv"]
            assert trial.command("train", *more) == 0
            with tritonclient.http.InferenceServerClient(served.address) as other:
                other.load_model("clicks")
            newest = served.ask(inputs, path)
            expected[newest[1]] = predicted(folder, log, tmp_path)
        stop.set()
        for one in clients:
            one.join()
    assert len(expected) == 3
    assert {version for _, version in answers} >= {*expected} - {newest[1]}
    for values, version in answers:
        if version in expected:  # a checkpoint within an epoch may have been served, too
            assert values.tobytes() == expected[version].tobytes()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--name", "a/b"], 2, "serve: --name must be letters, digits"),
        (["--name", ".."], 2, "serve: --name must be letters, digits, _ . -, not dots alone"),
        (["--max-body", "1e-9"], 2, "serve: --max-body must be at least a byte, got 1e-09 MB."),
        (["--tables", "x"], 2, "serve: --tables must come with --tier cached_ssd, got memory."),
        (["--cache-mb", "5"], 2, "serve: --cache-mb must come with a --tier that has a cache"),
        (["--port", "65536"], 2, "must be an integer of 0 to 65535, got '65536'"),
        (["--unseen", "x"], 2, "must be initial, zero or an integer, got 'x'"),
        (["--host", "nowhere.invalid"], 1, "'nowhere.invalid:0'"),
        (["--unseen", "123456789"], 1, "must have a row in each table, got none in"),
    ],
)
def test_what_is_refused(run, words, code, said, capsys):
    words = ["serve", str(run / "run"), "--port", "0", "--device", "cpu", *words]
    try:
        ended = cli.main(words)
    except SystemExit as exit:
        ended = exit.code
    assert ended == code
    assert said in capsys.readouterr().err


def test_what_is_no_checkpoint(tmp_path, capsys):
    assert cli.main(["serve", str(tmp_path), "--port", "0", "--device", "cpu"]) == 1
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("package", ["uvicorn", "uvloop", "orjson"])
def test_packages_that_are_missing_are_told(run, package):
    program = f"import sys; sys.modules[{package!r}] = None; from cupyrec import cli; "
    program += f"sys.exit(cli.main(['serve', {str(run / 'run')!r}]))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        f"cupyrec: serve: the package '{package}' must be installed, by: "
        "pip install 'cupyrec[serve]'.\n"
    )


def test_sighup_before_it_serves_ends_nothing(run):
    program = """
import os, signal, sys
from cupyrec import cli, serve_commands
made = serve_commands.Predictor
def reading(*arguments, **options):
    os.kill(os.getpid(), signal.SIGHUP)
    return made(*arguments, **options)
serve_commands.Predictor = reading
sys.exit(cli.main(sys.argv[1:]))
"""
    words = ["serve", str(run / "run"), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    with process:
        assert any(" at http://" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_refusals_of_requests_name_rows_and_columns(run):
    inputs = columns(run / "test.tsv")
    inputs[2]["data"][5] = "no hex"
    with Served(run / "run") as served:
        with pytest.raises(urllib.error.HTTPError) as told:
            served.ask(inputs)
        said = json.loads(told.value.read())["error"]
    assert said == "inputs, row 5, column 'item': must be 1 to 16 hex digits, got 'no hex'."

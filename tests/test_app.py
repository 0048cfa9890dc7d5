"""What the server answers: predictions, metadata, newer checkpoints, and what it refuses."""

import concurrent.futures
import contextlib
import http.client
import json
import threading
import time

import numpy as np
import pytest
import tritonclient.http
from stand_in import body, serving

from cupyrec import __version__


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, max_batch=100, max_body=100_000, max_queue=150) as one:
        yield one


@pytest.fixture
def ask(server):
    """Ask on one connection; the answer as status and JSON."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)

    def asked(method, path, content=None, **headers):
        content = json.dumps(content) if isinstance(content, (dict, list)) else content
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        text = answer.read()
        asked.headers = dict(answer.getheaders())
        return answer.status, json.loads(text) if "json" in answer.headers["content-type"] else text

    yield asked
    connection.close()


@pytest.fixture
def client(server):
    with tritonclient.http.InferenceServerClient(f"{server.host}:{server.port}") as one:
        yield one


def infer(ask, *rows, path="/v2/models/sums/infer", **more):
    return ask("POST", path, body(*rows, **more))


def test_predictions(ask):
    status, said = infer(ask, (1, 2), (3, 4.5), id="q", ids=[0, 100])
    assert status == 200
    assert said == {
        "model_name": "sums",
        "model_version": "v1",
        "id": "q",
        "outputs": [{"name": "probability", "datatype": "FP32", "shape": [2], "data": [3, 107.5]}],
    }
    assert infer(ask, path="/v2/models/sums/versions/v1/infer")[1]["outputs"][0]["data"] == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/sums/ready", {"ready": True}),
        ("/v2/models/sums/versions/v1/ready", {"ready": True}),
        ("/v2", {"name": "cupyrec", "version": __version__,
                 "extensions": ["binary_tensor_data", "model_repository"]}),
        ("/v2/models/sums/versions/v1", {
            "name": "sums", "versions": ["v1"], "platform": "cupyrec",
            "inputs": [{"name": "dense", "datatype": "FP32", "shape": [-1, 2]},
                       {"name": "ids", "datatype": "INT64", "shape": [-1, 1]}],
            "outputs": [{"name": "probability", "datatype": "FP32", "shape": [-1]}],
        }),
    ],
)  # fmt: skip
def test_what_is_told(ask, path, said):
    assert ask("GET", path) == (200, said)


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/", 404, "path: must be one of the Open Inference Protocol's."),
        ("GET", "/v2/models/sums/infer", 405, "method: must be another here than GET."),
        ("POST", "/v2", 405, "method: must be another here than POST."),
        ("POST", "/v2/models/x/infer", 404, "model: must be 'sums', got 'x'."),
        ("GET", "/v2/models/x", 404, "model: must be 'sums', got 'x'."),
        ("GET", "/v2/models/sums/versions/9", 404, "version: must be 'v1', got '9'."),
        ("POST", "/v2/models/sums/versions/9/infer", 404, "version: must be 'v1', got '9'."),
        ("POST", "/v2/repository/models/x/load", 404, "model: must be 'sums', got 'x'."),
        ("POST", "/v2/repository/models/sums/unload", 404, "path: must be one of the Open"),
        ("GET", "/v2/models/%2e%2e%2fetc", 404, "path: must be one of the Open"),
        ("POST", "/v2/models/sums/infer/", 404, "path: must be one of the Open"),
    ],
)
def test_paths_that_are_none(ask, method, path, status, said):
    told, answer = ask(method, path, {} if method == "POST" else None)
    assert told == status
    assert answer["error"].startswith(said)


@pytest.mark.parametrize(
    ("content", "headers", "status", "said"),
    [
        (body((1, 2)) | {"outputs": [{"name": "y"}]}, {}, 400, "'outputs': must be among"),
        (b"{", {}, 400, "body: must be JSON, got: "),
        (body(*[(1, 2)] * 101), {}, 413, "inputs: must have at most 100 rows, got 101."),
        (body(*[(1, 1e39)] * 101), {}, 413, "inputs: must have at most 100 rows, got 101."),
        (body((1, 1e39), (1, 2)), {}, 400, "input 'dense': must be finite numbers of 32 bits, got"),
        (body((1, 2), ids=["a"]), {}, 400, "input 'ids': 'data' must be integers, got a string."),
        (b" " * 100_001, {}, 413, "body: must have at most 100000 bytes."),
        (body((1, 2)), {"Content-Encoding": "gzip"}, 415, "Content-Encoding: must be identity"),
        (b"{}", {"Inference-Header-Content-Length": "x"}, 400, "Inference-Header-Content-Length"),
        (b"{}", {"Inference-Header-Content-Length": "3"}, 400, "Inference-Header-Content-Length"),
        (body((2000, 1), (1, 2)), {}, 500, "outputs: must be finite, got 1 rows that are not."),
        (body((3000, 1)), {}, 500, "server: failed; its log says why."),
    ],
)  # fmt: skip
def test_requests_that_are_refused(ask, content, headers, status, said):
    told, answer = ask("POST", "/v2/models/sums/infer", content, **headers)
    assert told == status
    assert answer["error"].startswith(said)
    assert infer(ask, (1, 2))[0] == 200  # on the same connection, too


def test_a_failure_stands_in_the_log_alone(server, ask):
    infer(ask, (3000, 1))
    told = server.check_says(r"(?s)a request failed\n(.*?RuntimeError: asked to fail)")[1]
    assert "stand_in.py" in told  # the traceback goes down to where it was raised
    assert told.count("Traceback") == 1


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("output", [None, False, True])
def test_the_public_client_gets_the_same_bits(client, binary, output):
    rng = np.random.default_rng(3)
    dense = rng.standard_normal((50, 2)).astype(np.float32)
    ids = rng.integers(-9, 9, (50, 1))
    inputs = []
    for name, array, kind in (("dense", dense, "FP32"), ("ids", ids, "INT64")):
        inputs.append(tritonclient.http.InferInput(name, array.shape, kind))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    wanted = None
    if output is not None:
        wanted = [tritonclient.http.InferRequestedOutput("probability", binary_data=output)]
    answer = client.infer("sums", inputs, outputs=wanted, request_id="7")
    expected = (dense.sum(axis=1) + ids[:, 0]).astype(np.float32)
    assert answer.as_numpy("probability").tobytes() == expected.tobytes()
    assert answer.get_response()["id"] == "7"


def test_the_public_client_reads_what_is_told(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("sums")
    assert client.is_model_ready("sums", "v1")
    assert not client.is_model_ready("sums", "v2")
    assert client.get_server_metadata()["name"] == "cupyrec"
    assert client.get_model_metadata("sums")["versions"] == ["v1"]
    index = client.get_model_repository_index()
    assert [(model["name"], model["version"], model["state"]) for model in index] == [
        ("sums", "v1", "READY")
    ]
    with pytest.raises(tritonclient.utils.InferenceServerException, match="'parameters': must not"):
        client.load_model("sums", config="{}")


def test_metrics(ask):
    infer(ask, (1, 2), (3, 4))
    status, text = ask("GET", "/metrics")
    assert status == 200
    assert ask.headers["content-type"].startswith("text/plain")
    names = ['requests_total{status="200"}', "rows_total", 'model_info{version="v1"}']
    names += ["batch_rows_count", "waiting_rows 0.0", 'request_seconds_bucket{le="+Inf"}']
    assert all(f"cupyrec_{name}".encode() in text for name in names)


def asks(server, content):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        connection.request("POST", "/v2/models/sums/infer", json.dumps(content))
        answer = connection.getresponse()
        return answer.status, answer.getheader("retry-after"), json.loads(answer.read())
    finally:
        connection.close()


def test_a_full_queue_says_try_again(server):
    rows = [(1, 1)] * 60
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        slow = pool.submit(asks, server, body((1000, 60)))
        server.check_says("computing for 60 s")
        asked = [pool.submit(asks, server, body(*rows)) for _ in "12345"]
        done = concurrent.futures.as_completed(asked, timeout=60)
        answers = [next(done).result() for _ in "123"]
        server.enough()
        answers += [one.result() for one in done]
        assert slow.result()[0] == 200
    assert sorted(status for status, _, _ in answers) == [200, 200, 503, 503, 503]
    for status, after, said in answers:
        if status == 503:
            assert (after, said["error"][-10:]) == ("1", "try again.")


def test_a_batch_has_each_refused_for_its_own(server):
    some = [body((n, 0.5)) for n in range(8)]
    some[2] = body((1, 1e39), (2, 1e39))
    some[5] = body((1, 1), ids=[1.5])
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        slow = pool.submit(asks, server, body((1000, 1)))
        time.sleep(0.3)  # in which the others come to be one batch
        answers = [one.result() for one in [pool.submit(asks, server, one) for one in some]]
        assert slow.result()[0] == 200
    refused = {n: answers[n] for n in (2, 5)}
    assert [status for status, _, _ in refused.values()] == [400, 400]
    assert refused[2][2]["error"].endswith("finite numbers of 32 bits, got 2 that are not.")
    assert refused[5][2]["error"] == "input 'ids': 'data' must be integers, got a float."
    for n in {*range(8)} - {*refused}:
        assert answers[n][0] == 200
        assert answers[n][2]["outputs"][0]["data"] == [n + 0.5]


def test_newer_checkpoints(tmp_path):
    with serving(tmp_path, watch=0.0) as server:
        address = f"{server.host}:{server.port}"
        with tritonclient.http.InferenceServerClient(address) as client:
            client.load_model("sums")
            assert client.get_model_metadata("sums")["versions"] == ["v1"]
            server.file.write_text("v2")
            client.load_model("sums")
            assert client.get_model_metadata("sums")["versions"] == ["v2"]
            server.check_says("serving version v2 instead of v1")
            server.file.write_text("bad")
            with pytest.raises(Exception, match="checkpoint: must be one, got none."):
                client.load_model("sums")
            assert client.is_model_ready("sums", "v2")
            server.file.write_text("worse")
            with pytest.raises(Exception, match="server: failed; its log says why."):
                client.load_model("sums")
            server.check_says("RuntimeError: out of order")
            server.file.write_text("lost")
            client.load_model("sums")
            assert not client.is_server_ready()
            server.file.write_text("v2")
            client.load_model("sums")
            assert client.is_server_ready()
        status, _, said = asks(server, body((1, 2)))
        assert (status, said["model_version"]) == (200, "v2")


def test_a_connection_outlives_a_failure(tmp_path):
    with (
        serving(tmp_path, watch=0.0) as server,
        contextlib.closing(http.client.HTTPConnection(server.host, server.port, 60)) as one,
    ):
        server.file.write_text("worse")
        one.connect()
        there = one.sock
        for _ in range(3):
            one.request("POST", "/v2/repository/models/sums/load")
            answer = one.getresponse()
            assert (answer.status, b"server: failed" in answer.read()) == (500, True)
            one.request("GET", "/v2/health/live")
            assert one.getresponse().read() == b'{"live":true}'
            assert one.sock is there


def test_a_folder_is_watched(tmp_path):
    with serving(tmp_path, watch=0.05) as server:
        server.file.write_text("bad")
        server.check_says("no newer checkpoint is served: checkpoint: must be one, got none.")
        time.sleep(0.5)
        assert server.said.count("no newer checkpoint") == 1
        server.file.write_text("v3")
        server.check_says("serving version v3 instead of v1")
        assert asks(server, body((1, 2)))[2]["model_version"] == "v3"


def test_no_answer_is_lost_or_mixed_while_versions_change(tmp_path):
    with serving(tmp_path) as server:
        started = threading.Barrier(9, timeout=60)

        def client(_):
            versions = []
            connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
            while versions[-1:] != [11]:
                if len(versions) == 1:
                    started.wait()
                connection.request("POST", "/v2/models/sums/infer", json.dumps(body((1, 2))))
                answer = connection.getresponse()
                said = json.loads(answer.read())
                assert answer.status == 200, said
                versions.append(int(said["model_version"][1:]))
            connection.close()
            return versions

        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            clients = pool.map(client, range(8))
            connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
            started.wait()
            for version in range(2, 12):
                server.file.write_text(f"v{version}")
                connection.request("POST", "/v2/repository/models/sums/load")
                assert connection.getresponse().read() == b"{}"
            connection.close()
            for versions in clients:
                assert versions == sorted(versions)
                assert len(set(versions)) > 1


def test_the_access_log(tmp_path):
    with serving(tmp_path, access_log=True) as server:
        asks(server, body((1, 2)))
        server.check_says(r"POST /v2/models/sums/infer 200 in \d+\.\d ms")

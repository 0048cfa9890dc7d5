"""Connections that let the server wait, signals, and what no honest client sends."""

import asyncio
import contextlib
import http.client
import json
import runpy
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from stand_in import StandIn, body, serving

from cupyrec.serving.server import bind, run

SCRIPT = Path(__file__).parents[1] / "scripts" / "chaos_serving.py"
INFER = "/v2/models/sums/infer"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """A server that waits for two seconds."""
    with serving(tmp_path_factory.mktemp("hasty"), timeout=2.0) as one:
        yield one


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A server that waits for clients that are themselves waiting for a core."""
    with serving(tmp_path_factory.mktemp("patient")) as one:
        yield one


def connect(server):
    return socket.create_connection((server.host, server.port), timeout=60)


def post(content, *lines, length=None):
    length = len(content) if length is None else length
    head = [f"POST {INFER} HTTP/1.1", "Host: a", f"Content-Length: {length}", *lines]
    return ("\r\n".join(head) + "\r\n\r\n").encode() + content


def answer(connection):
    """Status line and body of one answer."""
    with connection.makefile("rb") as stream:
        status, length = stream.readline(), 0
        while (line := stream.readline()) != b"\r\n":
            if line.startswith(b"content-length: "):
                length = int(line.split()[1])
        return status, stream.read(length)


def reads(connection):
    """All that comes until the connection is closed."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


GOOD = post(json.dumps(body((1, 2))).encode())
CHUNKED = GOOD.partition(b"\r\n\r\n")[0].replace(b"Content-Length", b"X")


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v2", GOOD[:-1], post(b"{", length=10**15)[:-1],
        CHUNKED + b"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
    ],
)  # fmt: skip
def test_a_request_that_never_ends(hasty, sent):
    with connect(hasty) as connection:
        start = time.monotonic()
        connection.sendall(sent)
        said = reads(connection)
        assert 1.9 < time.monotonic() - start < 60
    status = 413 if b"00000000" in sent else 408
    assert said.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"].endswith(".")


def test_a_request_that_comes_byte_by_byte(hasty):
    with connect(hasty) as connection:
        start = time.monotonic()
        try:
            for byte in GOOD:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        except ConnectionError:
            pass
        assert time.monotonic() - start < 60


@pytest.mark.parametrize("before", [b"", GOOD])
def test_a_client_that_says_nothing(hasty, before):
    with connect(hasty) as connection:
        start = time.monotonic()
        connection.sendall(before)
        said = reads(connection)
        assert 1.9 < time.monotonic() - start < 60
    assert said.count(b"HTTP/1.1 200 ") == bool(before)
    assert said.count(b"HTTP/1.1 ") == bool(before)


def test_a_slow_answer_is_not_cut(hasty):
    with connect(hasty) as connection:
        connection.sendall(post(json.dumps(body((1000, 3.5))).encode()))
        assert answer(connection)[0] == b"HTTP/1.1 200 OK\r\n"


def test_a_client_that_reads_nothing(hasty):
    many = post(json.dumps(body(*[(1, 1)] * 4000)).encode())
    with connect(hasty) as connection:
        connection.settimeout(0.5)
        with pytest.raises(OSError):
            while True:
                connection.sendall(many)
        connection.settimeout(60)
        start = time.monotonic()
        reads(connection)
        assert time.monotonic() - start < 60


def test_a_client_that_closes_its_half(patient):
    with connect(patient) as connection:
        connection.sendall(GOOD[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert reads(connection) == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 100_000, 431),
        (b"GET /v2 HTTP/1.1\r\n" + b"X: a\r\n" * 201 + b"\r\n", 431),
        (b"GET /" + b"a" * 100_000, 431),
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (post(b"{}", length="-1"), 400),
        (post(b"{}", "Content-Length: 3"), 400),
        (post(b"{}", "Transfer-Encoding: chunked"), 400),
        (post(b"{}", "Connection: Upgrade", "Upgrade: h2c"), 400),
        (post(b"{}", length=2**40), 413),
    ],
)
def test_http_that_is_none(patient, sent, status):
    with connect(patient) as connection:
        connection.sendall(sent)
        line, said = answer(connection)
        assert line.startswith(b"HTTP/1.1 %d " % status)
        assert json.loads(said)["error"].endswith(".")


def test_a_client_that_asks_before_it_sends(patient):
    head, _, content = post(GOOD.partition(b"\r\n\r\n")[2], "Expect: 100-continue").partition(
        b"\r\n\r\n"
    )
    with connect(patient) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert answer(connection) == (b"HTTP/1.1 100 Continue\r\n", b"")
        connection.sendall(content)
        assert answer(connection)[0] == b"HTTP/1.1 200 OK\r\n"
    with connect(patient) as connection:
        connection.sendall(post(b"", "Expect: 100-continue", length=2**40))
        assert answer(connection)[0].startswith(b"HTTP/1.1 413 ")


def test_requests_one_behind_the_other(hasty):
    with connect(hasty) as connection:
        connection.sendall(GOOD * 10)
        assert reads(connection).count(b"HTTP/1.1 200 ") == 10
    with connect(hasty) as connection:
        connection.sendall(GOOD * 500)
        assert b'"pipeline: must have at most 16 requests."' in reads(connection)


def test_connections_are_bounded(tmp_path):
    with serving(tmp_path, max_connections=40) as server:
        idle = []
        for _ in range(40):
            idle.append(connect(server))
            idle[-1].sendall(GOOD)
            assert answer(idle[-1])[0] == b"HTTP/1.1 200 OK\r\n"
        with connect(server) as one_more:
            said = reads(one_more)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nconnection: close\r\nretry-after: 1\r\n\r\n{" in said
        idle.pop().close()
        end = time.monotonic() + 60
        status = b""
        while b" 200 " not in status:  # once the server has seen that one is closed
            assert time.monotonic() < end
            with connect(server) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(GOOD)
                status = answer(connection)[0]
        for connection in idle:
            connection.close()


def test_what_no_honest_client_sends(tmp_path, monkeypatch):
    chaos = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(chaos["post"].__globals__, "PATH", INFER)
    fine = {"left", "closed", *map(str, range(400, 500))}
    with serving(tmp_path, timeout=1.0, max_body=1 << 20) as server:
        for kind in chaos["KINDS"]:
            ended = asyncio.run(chaos["fire"](server.host, server.port, kind, 100))
            assert sum(ended.values()) == 100
            assert {*ended} - fine <= ({"200"} if kind == "mutated" else set()), (kind, ended)
        with connect(server) as connection:
            connection.sendall(GOOD)
            assert b'"data":[3.0]' in answer(connection)[1]
        assert "Traceback" not in server.said
        server.send(signal.SIGTERM)
        assert server.code() == 0


# The end


def slowly(server, seconds, answers):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=90)
    connection.request("POST", INFER, json.dumps(body((1000, seconds))))
    try:
        answer = connection.getresponse()
        answers.append((answer.status, json.loads(answer.read())))
    except (http.client.HTTPException, ConnectionError) as error:
        answers.append((0, type(error).__name__))
    connection.close()


def begun(server, seconds):
    """A request that is under way, and where its answer will be."""
    answers = []
    thread = threading.Thread(target=slowly, args=(server, seconds, answers))
    thread.start()
    server.check_says(f"computing for {seconds} s")
    return thread, answers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_under_way_is_answered(tmp_path, number):
    with serving(tmp_path) as server:
        idle = http.client.HTTPConnection(server.host, server.port, timeout=30)
        idle.request("GET", "/v2/health/ready")
        assert idle.getresponse().read() == b'{"ready":true}'
        thread, answers = begun(server, 60)
        server.send(number)
        server.check_says("ending after the requests under way")
        answer, end = None, time.monotonic() + 60
        while answer is None or answer.getheader("connection") != "close":
            assert time.monotonic() < end
            idle.request("GET", "/v2/health/ready")  # which was on its way
            answer = idle.getresponse()
            assert (answer.status, answer.read()) == (503, b'{"ready":false}')
        end = time.monotonic() + 60
        with pytest.raises(ConnectionRefusedError):
            while time.monotonic() < end:
                connect(server).close()
                time.sleep(0.01)
        server.enough()
        thread.join()
        assert [status for status, _ in answers] == [200]
        assert server.code() == 0


def test_connections_that_the_system_has_made_are_taken(tmp_path):
    with serving(tmp_path) as one:
        one.send(signal.SIGSTOP)
        connections = [connect(one) for _ in range(20)]
        for connection in connections:
            connection.sendall(GOOD)
        time.sleep(0.3)
        one.send(signal.SIGTERM)
        one.send(signal.SIGCONT)
        for connection in connections:
            with connection:
                assert answer(connection)[0] == b"HTTP/1.1 200 OK\r\n"
        assert one.code() == 0


def test_a_second_signal_ends_at_once(tmp_path):
    with serving(tmp_path) as server:
        thread, answers = begun(server, 60)
        start = time.monotonic()
        server.send(signal.SIGTERM)
        server.check_says("a second signal ends at once")
        server.send(signal.SIGTERM)
        assert server.code() == 143
        thread.join()
        assert time.monotonic() - start < 30
        assert [status for status, _ in answers] == [0]


def test_no_more_time_than_was_given(tmp_path):
    with serving(tmp_path, drain=0.5) as server:
        thread, answers = begun(server, 60)
        server.send(signal.SIGTERM)
        thread.join()
        assert answers[0][0] == 503
        assert "goes down" in answers[0][1]["error"]
        server.enough()
        assert server.code() == 1
        assert "cut off 1 requests after 0.5 seconds" in server.said


def test_the_end_waits_for_no_checkpoint_that_is_read(tmp_path):
    with serving(tmp_path, drain=0.5) as server:
        server.file.write_text("slow")
        connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
        connection.request("POST", "/v2/repository/models/sums/load", "{}")
        server.check_says("reading what is slow")
        server.send(signal.SIGTERM)
        answer = connection.getresponse()
        assert answer.status == 503
        assert "goes down" in json.loads(answer.read())["error"]
        assert server.code() == 1


def test_a_client_that_is_gone_is_no_request_cut_off(tmp_path):
    with serving(tmp_path) as server:
        thread, answers = begun(server, 60)
        for _ in range(3):
            with connect(server) as connection:
                connection.sendall(GOOD)
                time.sleep(0.1)
        server.enough()
        thread.join()
        assert answers[0][0] == 200
        server.send(signal.SIGTERM)
        assert server.code() == 0
        assert "cut off" not in server.said


def test_sighup_looks_for_a_newer_checkpoint(tmp_path):
    with serving(tmp_path) as server:
        server.file.write_text("v2")
        server.send(signal.SIGHUP)
        server.check_says("serving version v2 instead of v1")


def test_addresses_that_are_none():
    with bind("127.0.0.1", 0) as one:
        one.listen()
        host, port = one.getsockname()
        with pytest.raises(OSError, match=rf"Address already in use: '{host}:{port}'"):
            bind(host, port)
    with pytest.raises(OSError, match=r"'nowhere\.invalid:80'"):
        bind("nowhere.invalid", 80)


def test_of_two_servers_bound_before_either_listens_the_second_is_refused(tmp_path):
    file = tmp_path / "checkpoint"
    file.write_text("v1")
    with bind("127.0.0.1", 0) as one:
        host, port = one.getsockname()
        with bind(host, port) as other:
            one.listen()
            with pytest.raises(OSError, match=rf"Address already in use: '{host}:{port}'"):
                run(StandIn(file), file, other)


def test_pipelines_of_clients_that_are_gone_are_no_errors(patient):
    for _ in range(300):  # of which many go while the first of two requests is worked on
        with connect(patient) as gone:
            gone.sendall(GOOD * 2)
    with connect(patient) as other:
        other.sendall(GOOD)
        assert answer(other)[0] == b"HTTP/1.1 200 OK\r\n"
    assert "Traceback" not in patient.said

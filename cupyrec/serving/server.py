"""The process that serves: its socket, connections, signals and end.

uvicorn does the work. It waits forever for a request that never ends, and keeps as many headers as
come; `Connection` doesn't.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import http
import logging
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import uvicorn
import uvloop  # noqa: F401  # uvicorn would miss it only once the checkpoint is read
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cupyrec.serving.app import App, error_body

__all__ = ["ENDS", "bind", "run"]

logger = logging.getLogger("cupyrec")

_MAX_HEAD = 1 << 16  # bytes of a request line and headers
_MAX_HEADERS = 200
_MAX_PIPELINE = 16  # requests of a connection that wait for the answer to an earlier one
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}
#: Signals that end it, of which mpirun passes the last one on.
ENDS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
_MOMENT = 0.3  # seconds in which a request that is on its way arrives


class Connection(HttpToolsProtocol):
    """A connection that is cut when the client lets the server wait.

    Within `timeout` seconds it must send a request whole, take an answer, and begin the next
    request.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head, self._in_head, self._is_last = 0, False, False
        self._cycles: weakref.WeakSet = weakref.WeakSet()  # requests that somebody works on
        self._refusal = 400, "request: must be one of HTTP/1.1."
        self._take_turns()
        most = self.config.max_connections
        if len(self.connections) > most:
            self._refuse(503, f"server: has {most} connections, as many as it takes; try again.")

    def _take_turns(self) -> None:
        """Note since when it is the client's turn."""
        cycle = self.cycle
        ours = cycle is not None and not cycle.response_complete and not cycle.more_body
        self._since = None if ours and not self.flow.write_paused else self.loop.time()

    def connection_lost(self, error: Exception | None) -> None:
        for cycle in self._cycles:  # uvicorn tells the last one of a pipeline, not the one at work
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head += len(data)
            if self._head > _MAX_HEAD:
                self._refuse(431, f"headers: must have at most {_MAX_HEAD} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head, self._in_head = 0, True
        self._take_turns()
        if len(self.pipeline) >= _MAX_PIPELINE:
            self._refusal = 400, f"pipeline: must have at most {_MAX_PIPELINE} requests."
            raise ValueError(self._refusal)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            self._refusal = 431, f"headers: must be at most {_MAX_HEADERS}."
            raise ValueError(self._refusal)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.should_upgrade():  # httptools would take no body any more
            sentence = "Upgrade: must not be asked for, as HTTP/1.1 is all that is spoken."
            self._refusal = 400, sentence
            raise ValueError(sentence)
        self.scope["cupyrec.is_gone"] = self.transport.is_closing
        super().on_headers_complete()
        self.scope["cupyrec.send_whole"] = functools.partial(self._send_whole, self.cycle)
        self._cycles.add(self.cycle)
        if self._is_last:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._take_turns()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._take_turns()

    def _send_whole(self, cycle: Any, status: int, headers: list, body: bytes) -> bool:
        """Send an answer in one piece, as uvicorn would in two, which become two packets; return
        whether it was done."""
        if cycle.disconnected or self.flow.write_paused or self.transport.is_closing():
            return False
        lines = [_STATUS_LINES[status], *(b"%b: %b\r\n" % header for header in headers)]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        self.transport.write(b"".join([*lines, b"\r\n", body]))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._take_turns()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._take_turns()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._refusal)  # what a callback has raised, if it was one

    def _refuse(self, status: int, sentence: str) -> None:
        body = error_body(sentence)
        again = "retry-after: 1\r\n" if status == 503 else ""
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"connection: close\r\n{again}\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(_STATUS_LINES[status] + head.encode() + body)
            self.transport.close()
        self._since = self.loop.time()

    def cut_if_late(self, timeout: float) -> None:
        """End it if the client has let us wait for longer than `timeout` seconds."""
        if self._since is None or self.loop.time() - self._since < timeout:
            return
        cycle = self.cycle
        is_due = cycle is not None and cycle.more_body and not cycle.response_complete
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()  # it reads nothing, so it would never be closed
        elif self._in_head or is_due:
            self._refuse(408, f"request: must be sent within {timeout:g} seconds.")
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Answer what is on its way, and no more."""
        self._is_last = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(_MOMENT, self._close_if_idle)
        else:
            self.cycle.keep_alive = False

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's, that ends by our rules."""

    def __init__(self, config: uvicorn.Config, app: App, told: str) -> None:
        super().__init__(config)
        self._app, self._told = app, told
        self._tasks: set[asyncio.Task] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        logger.info("%s", self._told)

    async def on_tick(self, counter: int) -> bool:
        for connection in list(self.server_state.connections):
            connection.cut_if_late(self.config.timeout)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, but take first the connections that the system has made already."""
        waiting = select.poll()
        for listening in sockets or []:
            waiting.register(listening, select.POLLIN)
        for _ in range(self.config.backlog):  # in each turn of the loop it takes one
            if not waiting.poll(0):
                break
            await asyncio.sleep(0)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._loop = asyncio.get_running_loop()

        def reload(*_: Any) -> None:
            self._loop.call_soon_threadsafe(self._reload_soon)

        handlers = dict.fromkeys(ENDS, self.handle_exit) | {signal.SIGHUP: reload}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """End after what is under way; at the second signal at once."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = self._app.draining = True
        told = "ending after the requests under way; a second signal ends at once"
        self._loop.call_soon_threadsafe(logger.info, told)  # the log may be in the midst of a line

    def _reload_soon(self) -> None:
        task = self._loop.create_task(self._app.renewal.reload_and_log())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address, which listens once it is served.

    Parameters
    ----------
    host : str
        A name, or an address of IPv4 or IPv6.
    port : int
        0 for any that is free.

    Raises
    ------
    OSError
        There is no such address, or the port is taken.

    Examples
    --------
    >>> with bind("127.0.0.1", 0) as listening:
    ...     listening.getsockname()[1] > 0
    True
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    return listening


def _listen(listening: socket.socket, backlog: int) -> str:
    """The address, which is taken now: another server may have been bound to it, too, and have
    begun to listen since; uvloop would not say so."""
    host, port = listening.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        listening.listen(backlog)
    except OSError as error:
        raise OSError(error.errno, error.strerror, address) from None
    return address


def run(
    predictor: Any,
    checkpoint: str | os.PathLike[str],
    listening: socket.socket,
    *,
    name: str | None = None,
    max_batch: int = 4096,
    max_delay: float = 0.005,
    max_queue: int = 16384,
    max_body: int = 16 << 20,
    max_connections: int = 512,
    timeout: float = 30.0,
    drain: float = 30.0,
    watch: float = 0.0,
    access_log: bool = False,
) -> int:
    """Serve a model until SIGTERM, SIGINT or SIGUSR1; return the exit code.

    At the first of them the server takes no more connections, says that it isn't ready, and answers
    what is under way; at the second the process ends at once. At SIGHUP it looks for a newer
    checkpoint.

    Parameters
    ----------
    predictor : Predictor
        Or anything with its interface; it is left open.
    checkpoint : path
        What is looked at for a newer one: a checkpoint, or a run's folder.
    listening : socket
        Of `bind`.
    name : str, optional
        The model's, in paths; by default the predictor's.
    max_batch, max_queue : int
        Rows of a batch, and of a request; rows that may wait.
    max_delay : float
        Seconds that requests wait for others at most.
    max_body, max_connections : int
        Bytes of a request, and connections.
    timeout : float
        Seconds in which a client must send a request, take its answer, begin the next one.
    drain : float
        Seconds at the end for what is under way.
    watch : float
        Seconds from one look for a newer checkpoint to the next, 0 for none.
    access_log : bool

    Returns
    -------
    int
        0, or 1 if requests had to be cut off.

    Raises
    ------
    OSError
        Another server has begun to listen at the address since `bind`.

    Examples
    --------
    >>> from cupyrec.serving.predictor import Predictor  # doctest: +SKIP
    >>> with bind("127.0.0.1", 8000) as listening:  # doctest: +SKIP
    ...     run(Predictor("runs/a"), "runs/a", listening)
    """
    name = name or predictor.name
    app = App(
        predictor, checkpoint, name=name, max_batch=max_batch, max_delay=max_delay,
        max_queue=max_queue, max_body=max_body, watch=watch, access_log=access_log,
    )  # fmt: skip
    app.warm_up()
    gc.collect()
    gc.freeze()  # what lives as long as the process is not looked through again and again
    config = uvicorn.Config(
        app, http=Connection, ws="none", loop="uvloop", lifespan="on", log_config=None,
        log_level="critical", access_log=False, server_header=False, date_header=False,
        proxy_headers=False, timeout_keep_alive=max(1, round(timeout)),
        timeout_graceful_shutdown=drain, backlog=max_connections,
    )  # fmt: skip
    config.timeout, config.max_connections = timeout, max_connections
    address = _listen(listening, max_connections)
    told = f"serving {name} version {predictor.version} at http://{address}"
    _Server(config, app, told).run(sockets=[listening])
    if app.cut_off:
        logger.warning("cut off %d requests after %g seconds", app.cut_off, drain)
    return 1 if app.cut_off else 0

"""The server as an ASGI application: a request's way from its bytes to those of its answer.

`App._infer` is that of predictions, which goes past Starlette's routes: those cost as much as all
else together. The other paths are told by `App._routes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cupyrec import __version__
from cupyrec.ragged import Bags
from cupyrec.serving import open_inference
from cupyrec.serving.batching import Batcher, Full, Gone
from cupyrec.serving.inputs import Inputs
from cupyrec.serving.monitoring import Monitoring
from cupyrec.serving.renewal import REFUSED, Renewal

__all__ = ["App", "error_body"]

logger = logging.getLogger("cupyrec")

_BODIES = 16  # of the largest size, whose bytes are held at a time
_SMALL = 1 << 16  # bytes of a body that says what to load
_FAILED = "server: failed; its log says why."
_GOES_DOWN = "server: goes down; it had no more time."
_JSON = (b"content-type", b"application/json")


def error_body(sentence: str) -> bytes:
    """Return the body of an answer that tells what is wrong.

    Examples
    --------
    >>> error_body("path: must be known.")
    b'{"error":"path: must be known."}'
    """
    return orjson.dumps({"error": sentence})


class App:
    """Serves one model by the Open Inference Protocol.

    Parameters
    ----------
    predictor : Predictor
        Or anything with its interface.
    checkpoint : path
        What is looked at for a newer one: a checkpoint, or a run's folder.
    name : str
        The model's, in paths.
    max_batch, max_delay, max_queue
        Those of `Batcher`; a request has at most `max_batch` rows.
    max_body : int
        Bytes of a request.
    watch : float
        Seconds from one look for a newer checkpoint to the next, 0 for none but those asked for.
    access_log : bool
        Whether each request is logged.

    Attributes
    ----------
    draining : bool
        Whether the server is about to end, so that it isn't ready any more.
    cut_off : int
        Requests that got no answer, since the server had no more time.
    renewal : Renewal

    Examples
    --------
    See `cupyrec.serving.server.run`.
    """

    def __init__(
        self,
        predictor: Any,
        checkpoint: str | os.PathLike[str],
        *,
        name: str,
        max_batch: int,
        max_delay: float,
        max_queue: int,
        max_body: int,
        watch: float = 0.0,
        access_log: bool = False,
    ) -> None:
        self._predictor, self._name = predictor, name
        self._inputs = Inputs(
            predictor.schema, predictor.num_dense, predictor.num_tables, predictor.has_bags
        )
        self._batching = {"max_batch": max_batch, "max_delay": max_delay, "max_queue": max_queue}
        self._max_rows, self._max_body, self._watch = max_batch, max_body, watch
        self._held = 0  # bytes of bodies
        self._access_log = access_log
        self._batcher: Batcher
        self.draining, self.cut_off = False, 0
        self._metrics = Monitoring()
        self.renewal = Renewal(predictor, checkpoint, self._metrics)
        self._infer_path = f"/v2/models/{name}/infer"
        self._others = Starlette(
            routes=self._routes(),
            exception_handlers={HTTPException: _told, Exception: _failed},
            lifespan=self._lifespan,
        )
        self._others.router.redirect_slashes = False  # to where the client says that we are

    def warm_up(self) -> None:
        """Predict a row, by which loops are compiled: the first request shall not wait for that."""
        dense = np.zeros((1, max(0, self._predictor.num_dense)), np.float32)
        ids = np.zeros((1, self._predictor.num_tables), np.int64)
        if self._predictor.has_bags:
            ids = Bags(ids[0], np.arange(ids.shape[1] + 1), ids.shape[1])
        if self._predictor.num_dense >= 0:  # else it isn't known
            self._predictor.probabilities(dense, ids)
        if self._predictor.schema is not None:
            rows = {}
            for told in self._inputs.metadata():
                shape = (1,) * len(told["shape"])
                rows[told["name"]] = open_inference.Tensor(told["datatype"], shape, [None])
            self._inputs.arrays([rows])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._access_log and scope["type"] == "http":
            send = _logging(scope, send)
        if (
            scope["type"] == "http"
            and scope["path"] == self._infer_path
            and scope["method"] == "POST"
        ):
            with contextlib.suppress(Gone):
                status, headers, body = await self._infer(scope, receive)
                headers = [*headers, (b"content-length", b"%d" % len(body))]
                whole = scope.get("cupyrec.send_whole")
                if whole is not None and not self._access_log and whole(status, headers, body):
                    return
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": body})
        elif scope["type"] == "http":
            with contextlib.suppress(Exception):  # told by `_failed`; else the connection is closed
                await self._others(scope, receive, send)
        else:
            await self._others(scope, receive, send)

    # Predictions

    async def _infer(
        self, scope: Any, receive: Any, version: str | None = None
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body of the answer to an inference request."""
        start, held = time.perf_counter(), 0
        try:
            headers = dict(scope["headers"])
            body = await self._body(headers, receive, self._max_body)
            held = len(body)
            self._held += held
            if self._held > _BODIES * self._max_body:
                raise Full
            request = open_inference.read_request(body, _json_length(headers))
            rows, form = self._inputs.measured(request.inputs)
            if rows > self._max_rows:
                raise HTTPException(
                    413, f"inputs: must have at most {self._max_rows} rows, got {rows}."
                )
            is_gone = scope.get("cupyrec.is_gone", _never)
            values, served = await self._batcher.submit(request.inputs, rows, form, is_gone)
            if version is not None and version != served:
                raise _other_version(version, served)
            if not np.isfinite(values).all():
                raise FloatingPointError(
                    "outputs: must be finite, got "
                    f"{np.count_nonzero(~np.isfinite(values).all(axis=1))} rows that are not."
                )
            names = self._outputs(values.shape[1])
            told, text = open_inference.answer(request, self._name, served, names, values)
            self._metrics.rows.inc(len(values))
            status = 200
        except (ValueError, TypeError) as error:
            status, told, text = 400, [_JSON], error_body(str(error))
        except HTTPException as error:
            status, told, text = error.status_code, [_JSON], error_body(error.detail)
        except Full:
            status, told = 503, [_JSON, (b"retry-after", b"1")]
            text = error_body("server: has as much to do as it takes on; try again.")
        except asyncio.CancelledError:
            self.cut_off += 1
            status, told, text = 503, [_JSON], error_body(_GOES_DOWN)
        except Gone:
            raise
        except FloatingPointError as error:
            status, told, text = 500, [_JSON], error_body(str(error))
        except Exception:
            logger.exception("a request failed")
            status, told, text = 500, [_JSON], error_body(_FAILED)
        finally:
            self._held -= held
        self._metrics.answered(status, time.perf_counter() - start)
        return status, told, text

    def _outputs(self, count: int) -> list[str]:
        """Names of the outputs, as ``cupyrec predict`` has them."""
        if count <= 1:
            return ["probability"]
        tasks = self._predictor.task_names or range(count)
        return [f"probability_{task}" for task in tasks]

    async def _body(self, headers: dict[bytes, bytes], receive: Any, most: int) -> bytes:
        """A request's body; nothing is kept of one that is too large."""
        encoding = headers.get(b"content-encoding", b"identity")
        if encoding.lower() != b"identity":
            raise HTTPException(415, "Content-Encoding: must be identity, as none is taken apart.")
        if int(headers.get(b"content-length", b"0")) > most:
            raise _too_large(most)
        message = await receive()
        body = message.get("body", b"")
        if message.get("more_body"):
            parts, size = [body], len(body)
            self._held += size
            try:
                while message.get("more_body"):
                    message = await receive()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._held += len(parts[-1])
                    if size > most:
                        raise _too_large(most)
                    if self._held > _BODIES * self._max_body:
                        raise Full
            finally:
                self._held -= size
            body = b"".join(parts)
        if message["type"] == "http.disconnect":
            raise Gone
        return body

    # The other paths

    def _routes(self) -> list[Route]:
        model, of_version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        return [
            Route("/v2", self._tell_server),
            Route("/v2/health/live", self._tell_live),
            Route("/v2/health/ready", self._tell_ready),
            *(Route(path, self._tell_model) for path in (model, of_version)),
            *(Route(f"{path}/ready", self._tell_ready) for path in (model, of_version)),
            *(Route(f"{path}/infer", self._infer_by_route, methods=["POST"])
              for path in (model, of_version)),
            Route("/v2/repository/index", self._tell_index, methods=["POST"]),
            Route("/v2/repository/models/{model}/load", self._load, methods=["POST"]),
            Route("/metrics", self._tell_metrics),
        ]  # fmt: skip

    async def _tell_server(self, request: Request) -> Response:
        extensions = ["binary_tensor_data", "model_repository"]
        return _json({"name": "cupyrec", "version": __version__, "extensions": extensions})

    async def _tell_live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _tell_ready(self, request: Request) -> Response:
        self._check_model(request)
        ready = self._predictor.is_open and not self.draining
        return _json({"ready": ready}, 200 if ready else 503)

    async def _tell_model(self, request: Request) -> Response:
        self._check_model(request)
        names = self._outputs(len(self._predictor.task_names))
        outputs = [{"name": name, "datatype": "FP32", "shape": [-1]} for name in names]
        return _json(
            {
                "name": self._name,
                "versions": [self._predictor.version],
                "platform": "cupyrec",
                "inputs": self._inputs.metadata(),
                "outputs": outputs,
            }
        )

    async def _infer_by_route(self, request: Request) -> Response:
        self._check_model(request)
        version = request.path_params.get("version")
        try:
            status, headers, body = await self._infer(request.scope, request.receive, version)
        except Gone:
            return Response(status_code=499)  # which nobody reads
        return Response(body, status, {k.decode(): v.decode() for k, v in headers})

    async def _tell_index(self, request: Request) -> Response:
        await self._small_body(request)
        version = self._predictor.version
        return _json([{"name": self._name, "version": version, "state": "READY", "reason": ""}])

    async def _load(self, request: Request) -> Response:
        self._check_model(request)
        asked = await self._small_body(request)
        if asked.get("parameters"):  # a configuration, or files
            raise HTTPException(
                400, "'parameters': must not be given: the server knows what it looks at."
            )
        try:
            await self.renewal.reload()
        except REFUSED as error:
            raise HTTPException(500, str(error)) from None
        except asyncio.CancelledError:
            self.cut_off += 1
            raise HTTPException(503, _GOES_DOWN) from None
        return _json({})

    async def _tell_metrics(self, request: Request) -> Response:
        self._metrics.waiting.set(self._batcher.rows)
        kind, text = self._metrics.exposition()
        return Response(text, headers={"content-type": kind})

    async def _small_body(self, request: Request) -> dict[str, Any]:
        try:
            body = await self._body(dict(request.scope["headers"]), request.receive, _SMALL)
            asked = orjson.loads(body or b"{}")
        except orjson.JSONDecodeError as error:
            raise HTTPException(400, f"body: must be JSON, got: {error}.") from None
        except Full:
            raise HTTPException(503, "server: has as much to do as it takes on.") from None
        except Gone:
            return {}
        if not isinstance(asked, dict):
            raise HTTPException(400, "body: must be an object.")
        return asked

    def _check_model(self, request: Request) -> None:
        name, version = map(request.path_params.get, ("model", "version"))
        if name not in (None, self._name):
            raise HTTPException(404, f"model: must be '{self._name}', got {name[:60]!r}.")
        if version not in (None, self._predictor.version):
            raise _other_version(version, self._predictor.version)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._batcher = Batcher(
            self._inputs.arrays, self._predictor.probabilities, **self._batching
        )
        self._batcher.observe = self._metrics.batch_rows.observe
        self._metrics.version.info({"version": self._predictor.version})
        watch = asyncio.create_task(self.renewal.watch(self._watch)) if self._watch else None
        yield
        if watch is not None:
            watch.cancel()
        self._batcher.close()


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, {"content-type": "application/json"})


async def _told(request: Request, error: Exception) -> Response:
    """The answer to a request that a route refuses, or that has none."""
    assert isinstance(error, HTTPException)
    sentences = {
        (404, "Not Found"): "path: must be one of the Open Inference Protocol's.",
        (405, "Method Not Allowed"): f"method: must be another here than {request.method[:20]}.",
    }
    sentence = sentences.get((error.status_code, error.detail), error.detail)
    headers = {**(error.headers or {}), "content-type": "application/json"}
    return Response(error_body(sentence), error.status_code, headers)


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    return _json({"error": _FAILED}, 500)


def _json_length(headers: dict[bytes, bytes]) -> int | None:
    text = headers.get(b"inference-header-content-length")
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18:
        raise ValueError("Inference-Header-Content-Length: must be a number of bytes.")
    return int(text)


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"body: must have at most {most} bytes.")


def _other_version(version: str, served: str) -> HTTPException:
    return HTTPException(404, f"version: must be '{served}', got {version[:60]!r}.")


def _never() -> bool:
    return False


def _logging(scope: Any, send: Callable[[Any], Awaitable[None]]) -> Callable:
    start = time.perf_counter()

    async def logged(message: Any) -> None:
        if message["type"] == "http.response.start":
            logger.info(
                "%s %s %d in %.1f ms",
                scope["method"], scope["path"], message["status"],
                1e3 * (time.perf_counter() - start),
            )  # fmt: skip
        await send(message)

    return logged

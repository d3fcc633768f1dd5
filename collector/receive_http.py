"""OTLP/HTTP, and what else may be posted: rewards and flushes."""

import asyncio
import math
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import uvicorn
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.rpc.code_pb2 import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    RESOURCE_EXHAUSTED,
    UNAUTHENTICATED,
    UNAVAILABLE,
    UNIMPLEMENTED,
)
from google.rpc.status_pb2 import Status
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from spanmill.collector import rewards
from spanmill.collector.access import Tls, Tokens
from spanmill.collector.compression import ENCODINGS
from spanmill.collector.http_connection import BoundedConnection
from spanmill.collector.ingest import RETRY_AFTER_S, Answer, Ingest, Lease
from spanmill.collector.journal import Kind

_PROTO: Final = "application/x-protobuf"
JSON: Final = "application/json"
_TRACES: Final = {_PROTO: Kind.TRACES_PROTO, JSON: Kind.TRACES_JSON}
_LOGS: Final = {_PROTO: Kind.LOGS_PROTO, JSON: Kind.LOGS_JSON}
_HTTP_STATUS: Final[Mapping[int, int]] = {
    INVALID_ARGUMENT: 400,
    RESOURCE_EXHAUSTED: 413,
    UNAVAILABLE: 503,
    UNAUTHENTICATED: 401,
}
_CODE: Final[Mapping[int, int]] = {404: NOT_FOUND, 405: UNIMPLEMENTED}
_UPLOAD_TIMEOUT_S: Final = 120
"""A sender that died in the middle of its request does not keep its share of the byte budget for ever."""
_KEEP_ALIVE_S: Final = 75
"""Longer than exporters wait between two requests."""
_OPEN_PATHS: Final = ("/healthz", "/readyz")
"""Need no token: they say nothing but yes or no."""
_INLINE_BYTES: Final = 1 << 18
"""A protobuf body up to here is checked at once: the hop to a thread would cost more."""

Handler = Callable[[Ingest, Request, Lease], Awaitable[Response | Answer]]
"""Answers with a response, or with the answer of a refusal."""
Unknown = Callable[[list[str]], list[str] | None]
"""Those of the rollouts that no span has named so far; None if that cannot be told."""


def build_app(
    ingest: Ingest, unknown: Unknown, routes: Sequence[BaseRoute] = (), tokens: Tokens | None = None
) -> Starlette:
    """The application: OTLP, rewards, flush and health, and the `routes` of others; of `tokens`, senders need one.

    A sender of rewards is told which of their rollouts are `unknown`: those rewards wait.
    """
    handlers: dict[str, Handler] = {
        "/v1/traces": _exporter(_TRACES),
        "/v1/logs": _exporter(_LOGS),
        "/v1/metrics": _ignore,
        "/v1/rewards": _reward_taker(unknown),
        "/v1/flush": _flush,
    }
    own = [Route(path, endpoint(ingest, handler), methods=["POST"]) for path, handler in handlers.items()]
    probes = [
        Route("/healthz", _healthz, methods=["GET"]),
        Route("/readyz", _readiness(ingest), methods=["GET"]),
    ]
    return Starlette(
        routes=[*own, *probes, *routes],
        exception_handlers={HTTPException: _http_error},
        middleware=[Middleware(_Guard, ingest=ingest, tokens=tokens)] if tokens else [],
    )


class _Guard:
    """Turns away who has no token, before anything of the body is received."""

    def __init__(self, app: ASGIApp, ingest: Ingest, tokens: Tokens) -> None:
        self._app = app
        self._ingest = ingest
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if request.url.path in _OPEN_PATHS or self._tokens.allow(request.headers.get("authorization")):
            await self._app(scope, receive, send)
            return
        answer = self._ingest.unauthenticated()
        scheme = 'Basic realm="spanmill: the token is the password", charset="UTF-8"' if _is_look(request) else "Bearer"
        refusal = _error(request, _HTTP_STATUS[answer.code], answer.status(), {"WWW-Authenticate": scheme})
        await refusal(scope, receive, send)


def _is_look(request: Request) -> bool:
    """Whether somebody opens a page in a browser, which asks for the token."""
    return request.method == "GET" and "text/html" in request.headers.get("accept", "")


class HttpServer:
    """Serves an application in a thread of its own, on a socket that listens."""

    def __init__(self, app: Starlette, listener: socket.socket, tls: Tls | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ssl_certfile=tls and tls.cert,
            ssl_keyfile=tls and str(tls.key),
            ssl_ca_certs=tls and tls.client_ca and str(tls.client_ca),
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
        )
        config.load()
        if tls and config.ssl:
            config.ssl.sni_callback = partial(_renew, tls)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="spanmill-http", daemon=True
        )
        self._thread.start()

    def begin_stop(self, timeout: float) -> None:
        """Takes no further request; those in flight have `timeout` seconds to end."""
        self._server.config.timeout_graceful_shutdown = math.ceil(timeout)
        self._server.should_exit = True

    def join(self, timeout: float) -> None:
        """Waits until all have ended."""
        self._thread.join(timeout)


def _renew(tls: Tls, connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
    """Asked at each handshake, whether the client gives a name or not."""
    connection.context = tls.context()


def endpoint(ingest: Ingest, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """A handler as a route's endpoint: within a lease, its errors as answers."""

    async def answer(request: Request) -> Response:
        try:
            with ingest.lease() as lease:
                result = await handler(ingest, request, lease)
        except HTTPException:
            raise
        except ClientDisconnect:
            return Response(status_code=400)  # to nobody
        except Exception as error:
            result = ingest.failed(error)
        if isinstance(result, Response):
            return result
        headers = {"Retry-After": str(RETRY_AFTER_S)} if result.retryable else {}
        return _error(request, _HTTP_STATUS[result.code], result.status(), headers)

    return answer


def _exporter(kinds: Mapping[str, Kind]) -> Handler:
    async def export(ingest: Ingest, request: Request, lease: Lease) -> Response | Answer:
        media = media_type(request, kinds)
        body = await read_body(ingest, request, lease)
        if isinstance(body, Answer):
            return body
        kind = kinds[media]
        if media == _PROTO and len(body) <= _INLINE_BYTES:
            checked, stored = ingest.begin(kind, body)
        else:
            checked, stored = await asyncio.to_thread(ingest.begin, kind, body)
        if stored is not None:
            await asyncio.wrap_future(stored)
        return _message(media, 200, ingest.accepted(kind, checked, body).success())

    return export


async def _ignore(ingest: Ingest, request: Request, lease: Lease) -> Response | Answer:
    media = media_type(request, _TRACES)
    body = await read_body(ingest, request, lease)
    if isinstance(body, Answer):
        return body
    ingest.ignored(body, is_json=media == JSON)
    return _message(media, 200, Answer().success())


def _reward_taker(unknown: Unknown) -> Handler:
    async def take(ingest: Ingest, request: Request, lease: Lease) -> Response | Answer:
        # JSON only: a web page may post other types across sites without asking first.
        media_type(request, [JSON])
        body = await read_body(ingest, request, lease)
        if isinstance(body, Answer):
            return body
        received_ns = time.time_ns()
        posted = await asyncio.to_thread(rewards.parse, body, received_ns)
        if posted:
            await asyncio.wrap_future(ingest.journal.append_async(Kind.REWARDS, rewards.encode(posted), received_ns))
        ingest.count("rewards", len(posted))
        waiting = await asyncio.to_thread(unknown, [reward.rollout_id for reward in posted])
        return JSONResponse({"accepted": len(posted)} | ({} if waiting is None else {"waiting": waiting}))

    return take


async def _flush(ingest: Ingest, request: Request, lease: Lease) -> Response | Answer:
    await asyncio.wrap_future(ingest.journal.append_async(Kind.FLUSH, b"", time.time_ns()))
    return JSONResponse({"accepted": 1}, status_code=202)


def _readiness(ingest: Ingest) -> Callable[[Request], Awaitable[Response]]:
    async def readyz(request: Request) -> Response:
        """503 while requests are refused, or nothing makes rows of them; they are to be sent elsewhere if they can."""
        reason = ingest.refusing or ingest.unready
        return PlainTextResponse(f"{reason or 'ok'}\n", 503 if reason else 200)

    return readyz


async def _healthz(request: Request) -> Response:
    return PlainTextResponse("ok\n")


def media_type(request: Request, known: Sequence[str] | Mapping[str, object]) -> str:
    """The type of a request's body, one of those known; else HTTPException 415."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media not in known:
        raise HTTPException(415, f"Content-Type {media or 'missing'}: expected {' or '.join(known)}")
    return media


async def read_body(ingest: Ingest, request: Request, lease: Lease) -> bytes | Answer:
    """The decompressed body, or why there is none."""
    if (closed := ingest.closed()) is not None:
        return closed
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", *ENCODINGS):
        accepted = ", ".join(ENCODINGS)
        raise HTTPException(415, f"Content-Encoding {encoding}: expected {accepted}", {"Accept-Encoding": accepted})
    length = request.headers.get("content-length", "")
    declared = int(length) if length.isdecimal() else 0
    if declared > ingest.max_message_bytes:
        return ingest.too_large()
    if not lease.grow(declared):
        return ingest.overloaded()
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_UPLOAD_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > ingest.max_message_bytes:
                    return ingest.too_large()
                if not declared and not lease.grow(len(chunk)):
                    return ingest.overloaded()
                chunks.append(chunk)
    except TimeoutError:
        return ingest.stalled(_UPLOAD_TIMEOUT_S)
    body = b"".join(chunks)
    if encoding in ENCODINGS:
        return await asyncio.to_thread(ingest.unpacked, encoding, body, lease)
    return body


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    status = Status(code=_CODE.get(error.status_code, INVALID_ARGUMENT), message=error.detail)
    return _error(request, error.status_code, status, error.headers or {})


def _error(request: Request, http_status: int, status: Status, headers: Mapping[str, str]) -> Response:
    """In the type of the request; JSON if that has none of ours."""
    media = _PROTO if request.headers.get("content-type", "").strip().lower().startswith(_PROTO) else JSON
    return _message(media, http_status, status, headers)


def _message(media: str, http_status: int, message: Message, headers: Mapping[str, str] | None = None) -> Response:
    body = message.SerializeToString() if media == _PROTO else MessageToJson(message, indent=None)
    return Response(body, http_status, headers, media_type=media)

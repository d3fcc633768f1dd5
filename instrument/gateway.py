"""`spanmill gateway`: a model server's front door that records what passes, for clients and engines that cannot.

Requests that generate are asked for token ids and logprobs on their way in, and become spans; what the client did not
ask for is taken out of the answer again. Streams go on chunk by chunk. Every other route passes as it is.
"""

import asyncio
import json
import signal
import socket
import sys
from asyncio import Task
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, cast
from urllib.parse import urlsplit

import uvicorn
from aiohttp import ClientError, ClientResponse, ClientResponseError
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from spanmill.errors import ConfigError, ListenError
from spanmill.instrument import identity, provider
from spanmill.instrument.asking import REFUSED, Object, route_of
from spanmill.instrument.calls import Attributes
from spanmill.instrument.exchange import Exchange
from spanmill.instrument.sglang import GENERATE, is_generate
from spanmill.instrument.sse import Events
from spanmill.instrument.upstream import ClientLeft, Headers, RawHeaders, Upstream, answer_headers, request_headers
from spanmill.instrument.vllm import requests
from spanmill.semconv import REQUEST_RETRY, ROLLOUT_CARRIER

BACKLOG: Final = 2048
EVENT_STREAM: Final = "text/event-stream"


def gateway(upstream: str, listen: str = "127.0.0.1:8800", endpoint: str | None = None) -> int:
    """Pass requests on to the model server at `upstream` until the process is told to end; the exit code.

    Raises ConfigError for an address that is none, ListenError for one that cannot be listened on.
    """
    if urlsplit(upstream).scheme not in ("http", "https"):
        raise ConfigError(f"--upstream: expected a URL such as http://127.0.0.1:8000, found {upstream!r}")
    listening = _listen(listen)
    if endpoint:
        provider.configure(endpoint=endpoint)
    host, port = listening.getsockname()[:2]
    config = configuration(upstream)
    server = uvicorn.Server(config)

    def stop(_: int, __: FrameType | None) -> None:
        server.should_exit = True

    # Until uvicorn has handlers of its own; it hands on what those were told.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    print(f"spanmill gateway: ready listen=http://{host}:{port} upstream={upstream}", flush=True)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve([listening]))
    return 0 if provider.close() else _undelivered()


def _undelivered() -> int:
    print(f"spanmill gateway: spans were lost, no collector answers at {provider.destination()}", file=sys.stderr)
    return 1


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--listen: expected HOST:PORT, found {address!r}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # only a socket that says TCP gets no delay
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host.strip("[]"), int(port)))
        made.listen(BACKLOG)  # before the ready line, so that whoever reads it can connect
    except OSError as error:
        made.close()
        raise ListenError(f"cannot listen on {address}: {error.strerror}") from error
    return made


def configuration(upstream: str) -> uvicorn.Config:
    """How the gateway before the model server at `upstream` is served: answers have that server's headers alone."""
    return uvicorn.Config(
        application(upstream),
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        date_header=False,
    )


def application(upstream: str) -> Starlette:
    """The gateway as an ASGI application, before the model server at `upstream` (with or without `/v1`)."""
    server = Upstream(upstream.rstrip("/").removesuffix("/v1"))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with server:
            yield

    return Starlette(routes=[Route("/{path:path}", _Gateway(server))], lifespan=lifespan)


@dataclass(slots=True)
class _Passage:
    """A request on its way, and the client that waits for its answer."""

    method: str
    path: str
    """With its query, without a rollout."""
    headers: Headers
    content: bytes
    send: Send
    leaving: "Task[None]"
    """Done when the client goes away."""


class _Gateway:
    """The way from the clients to the model server."""

    def __init__(self, server: Upstream) -> None:
        self._server = server
        self._refused: set[str] = set()
        """Fields that the server does not take."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and its answer back, as an ASGI application."""
        content = await _body(receive)
        if content is None:
            return
        in_path, raw_path = requests.read_path(cast("bytes", scope["raw_path"]))
        path, query = raw_path.decode("latin-1"), cast("bytes", scope["query_string"]).decode("latin-1")
        pairs = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in cast("RawHeaders", scope["headers"])]
        leaving = asyncio.ensure_future(_left(receive))
        way = _Passage(
            scope["method"], f"{path}?{query}" if query else path, request_headers(pairs), content, send, leaving
        )
        try:
            exchange, said = None, dict(reversed(pairs))
            if way.method == "POST" and said.get(requests.SKIP) != "1":
                exchange = _open(path, content, requests.read_request(path, said, in_path))
            if exchange is None:
                await self._pass_on(way)
            else:
                await self._record(way, exchange)
        except ClientLeft:
            pass  # and so does its request
        except ClientError as error:
            await _unreachable(error)(scope, receive, send)
        finally:
            leaving.cancel()

    async def _pass_on(self, way: _Passage) -> None:
        answer = await self._server.ask(way.method, way.path, way.headers, way.content, way.leaving)
        await _stream(answer, way, None)

    async def _record(self, way: _Passage, exchange: Exchange) -> None:
        try:
            answer = await self._ask(way, exchange)
            if answer.status == 200 and answer.headers.get("content-type", "").startswith(EVENT_STREAM):
                await _stream(answer, way, exchange)
                return
            whole = await answer.read()
        except BaseException as error:
            exchange.end(error)
            raise
        if answer.ok:
            whole = exchange.whole(whole)
            exchange.end()
        else:
            said = ClientResponseError(answer.request_info, (), status=answer.status, message=str(answer.reason))
            exchange.end(said)
        headers = [*answer_headers(answer, is_whole=False), (b"content-length", str(len(whole)).encode())]
        await way.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await way.send({"type": "http.response.body", "body": whole})

    async def _ask(self, way: _Passage, exchange: Exchange) -> ClientResponse:
        exchange.ask(self._refused)
        ours = {"accept-encoding": "identity", **exchange.headers()}
        headers = [*((name, value) for name, value in way.headers if name not in ours), *ours.items()]
        body = _with(way.content, exchange.body, exchange.added)
        answer = await self._server.ask("POST", way.path, headers, body, way.leaving)
        if answer.status in REFUSED and exchange.added:
            said = (await answer.read()).decode("utf-8", "replace")
            if exchange.refuse(said, self._refused):
                body = _with(way.content, exchange.body, exchange.added)
                answer = await self._server.ask("POST", way.path, headers, body, way.leaving)
        return answer


async def _body(receive: Receive) -> bytes | None:
    """A request's body; None if its client goes away before it is there."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stream(answer: ClientResponse, way: _Passage, exchange: Exchange | None) -> None:
    """Pass an answer back as it comes. One that breaks off breaks off for the client, too."""
    events = None if exchange is None else Events(exchange.event)
    headers = answer_headers(answer, is_whole=events is None)
    await way.send({"type": "http.response.start", "status": answer.status, "headers": headers})
    broken = None
    try:
        async for data in answer.content.iter_any():
            if passed := data if events is None else events.feed(data):
                await way.send({"type": "http.response.body", "body": passed, "more_body": True})
        rest = b"" if events is None else events.close()
        if exchange is not None:
            exchange.end()  # before its client knows that it is over
        await way.send({"type": "http.response.body", "body": rest})
    except ClientError as error:
        broken = None if way.leaving.done() else error
    finally:
        if exchange is not None:
            exchange.end(broken)


def _open(path: str, content: bytes, read: requests.Request) -> Exchange | None:
    """The exchange that a request begins; None if it is none that generates."""
    route = route_of(path) or (GENERATE if path == GENERATE else None)
    if route is None:
        return None
    try:
        body = json.loads(content)
    except ValueError:
        return None  # the server will say so
    if not isinstance(body, dict) or (route == GENERATE and not is_generate(cast("Object", body))):
        return None
    around, others = read.parent, Attributes()
    if read.identity is not None:
        around = identity.to_baggage(read.identity, around)
        others[ROLLOUT_CARRIER] = str(read.carrier)
    if read.retry is not None:
        others[REQUEST_RETRY] = read.retry
    return Exchange(route, cast("Object", body), capture="gateway", around=around, others=others)


def _with(content: bytes, asked: Mapping[str, Any], added: Object) -> bytes:
    """A body that says `asked`, with more fields; the client's own text stays, unless it left one of them null.

    _with(b'{"a": 1}', {"a": 1}, {"b": 2}) == b'{"a": 1,"b":2}'
    """
    if not added:
        return content
    if asked and asked.keys().isdisjoint(added) and json.detect_encoding(content) == "utf-8":
        return content.rstrip()[:-1] + b"," + json.dumps(added, separators=(",", ":")).encode()[1:]
    return json.dumps({**asked, **added}, separators=(",", ":")).encode()


def _unreachable(error: ClientError) -> JSONResponse:
    said = f"spanmill gateway: the model server does not answer: {error!r}"
    return JSONResponse({"error": {"message": said, "type": "bad_gateway"}}, 502)

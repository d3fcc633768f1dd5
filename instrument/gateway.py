"""`spanmill gateway`: a model server's front door that records what passes, for clients and engines that cannot.

Requests that generate are asked for token ids and logprobs on their way in, and become spans; what the client did not
ask for is taken out of the answer again. Streams go on chunk by chunk. Every other route passes as it is.
"""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import Final, cast
from urllib.parse import urlsplit

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from spanmill.errors import ConfigError, ListenError
from spanmill.instrument import identity, provider
from spanmill.instrument.asking import REFUSED, Object, named_in, route_of
from spanmill.instrument.calls import Attributes
from spanmill.instrument.exchange import Exchange
from spanmill.instrument.sse import Events
from spanmill.instrument.vllm import requests
from spanmill.semconv import REQUEST_RETRY, ROLLOUT_CARRIER

METHODS: Final = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
HOP: Final = frozenset(
    (
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""Headers of one connection, or that are made anew for the next."""

TIMEOUT: Final = httpx.Timeout(None, connect=10)
"""An answer may take as long as its client waits."""

LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=256)
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
    config = uvicorn.Config(application(upstream), log_level="warning", access_log=False, lifespan="on")
    server = uvicorn.Server(config)
    print(f"spanmill gateway: ready listen=http://{host}:{port} upstream={upstream}", flush=True)
    signal.signal(signal.SIGTERM, _stop)
    with suppress(KeyboardInterrupt, SystemExit):  # uvicorn ends in peace, then hands the signal on
        asyncio.run(server.serve([listening]))
    return 0 if provider.close() else _undelivered()


def _stop(_: int, __: FrameType | None) -> None:
    sys.exit()


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


def application(upstream: str) -> Starlette:
    """The gateway as an ASGI application, before the model server at `upstream` (with or without `/v1`)."""
    passing = _Gateway(upstream.rstrip("/").removesuffix("/v1"))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await passing.client.aclose()

    return Starlette(routes=[Route("/{path:path}", passing.handle, methods=METHODS)], lifespan=lifespan)


class _Gateway:
    """The connections to the model server, and which fields it refuses."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._refused: set[str] = set()
        self.client = httpx.AsyncClient(timeout=TIMEOUT, limits=LIMITS, follow_redirects=False, trust_env=False)

    async def handle(self, request: Request) -> Response:
        """Pass a request on and its answer back."""
        in_path, raw_path = requests.read_path(cast("bytes", request.scope["raw_path"]))
        query = cast("bytes", request.scope["query_string"])
        url = self._upstream + raw_path.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
        headers = _request_headers(request.headers.items())
        try:
            content = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)
        path = raw_path.decode("latin-1")
        exchange = None
        if request.method == "POST" and headers.get(requests.SKIP) != "1":
            read = requests.read_request(path, dict(request.headers.items()), in_path)
            exchange = _open(path, content, read)
        if exchange is None:
            return await self._pass_on(request, url, headers, content)
        try:
            return await self._record(request, url, headers, content, exchange)
        except BaseException as error:
            exchange.end(error)
            raise

    async def _pass_on(self, request: Request, url: str, headers: dict[str, str], content: bytes) -> Response:
        try:
            answer = await self._send(request, url, headers, content)
        except httpx.TransportError as error:
            return _unreachable(error)
        return _streamed(answer, _raw(answer))

    async def _record(
        self, request: Request, url: str, headers: dict[str, str], content: bytes, exchange: Exchange
    ) -> Response:
        exchange.ask(self._refused)
        body = _with(content, exchange.added)
        headers = {**headers, "accept-encoding": "identity", **exchange.headers()}
        try:
            answer = await self._send(request, url, headers, body)
            if answer.status_code in REFUSED and exchange.added:
                named = named_in((await answer.aread()).decode("utf-8", "replace"), exchange.added)
                if named:
                    self._refused |= named
                    exchange.added = {}
                    answer = await self._send(request, url, headers, content)
        except httpx.TransportError as error:
            exchange.end(error)
            return _unreachable(error)
        if answer.status_code == 200 and answer.headers.get("content-type", "").startswith(EVENT_STREAM):
            return _streamed(answer, _read_along(answer, exchange))
        whole = await answer.aread()
        if answer.is_success:
            whole = exchange.whole(whole)
            exchange.end()
        else:
            exchange.end(httpx.HTTPStatusError(str(answer.status_code), request=answer.request, response=answer))
        passed = Response(whole, answer.status_code)
        passed.raw_headers = [*_answer_headers(answer), (b"content-length", str(len(whole)).encode())]
        return passed

    async def _send(self, request: Request, url: str, headers: dict[str, str], content: bytes) -> httpx.Response:
        """The answer's headers. A client that goes away takes its request with it, so that the engine stops."""
        made = self.client.build_request(request.method, url, headers=headers, content=content)
        sending = asyncio.ensure_future(self.client.send(made, stream=True))
        leaving = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ClientDisconnect
            return sending.result()
        finally:
            sending.cancel()
            leaving.cancel()


def _open(path: str, content: bytes, read: requests.Request) -> Exchange | None:
    """The exchange that a request begins; None if it is none that generates."""
    route = route_of(path)
    if route is None:
        return None
    try:
        body = json.loads(content)
    except ValueError:
        return None  # the server will say so
    if not isinstance(body, dict):
        return None
    around, others = read.parent, Attributes()
    if read.identity is not None:
        around = identity.to_baggage(read.identity, around)
        others[ROLLOUT_CARRIER] = str(read.carrier)
    if read.retry is not None:
        others[REQUEST_RETRY] = read.retry
    return Exchange(route, cast("Object", body), capture="gateway", around=around, others=others)


def _with(content: bytes, added: Object) -> bytes:
    """A body with more fields: the client's own text stays as it is, but for what it left null."""
    if not added:
        return content
    body = cast("Object", json.loads(content))
    return json.dumps({**body, **added}, separators=(",", ":")).encode()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _request_headers(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    """For the server: without those of the connection, and with its own key in place of one that names a rollout."""
    headers = {name: value for name, value in items if name not in HOP}
    for name, prefix in (("authorization", "Bearer "), ("x-api-key", "")):
        key = requests.inner_key(headers.get(name, "").removeprefix(prefix))
        if key is not None:
            headers[name] = prefix + key
    return headers


def _answer_headers(answer: httpx.Response) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in answer.headers.raw if name.lower().decode("latin-1") not in HOP]


def _streamed(answer: httpx.Response, content: AsyncIterator[bytes]) -> Response:
    passed = StreamingResponse(content, answer.status_code)
    passed.raw_headers = _answer_headers(answer)
    return passed


async def _raw(answer: httpx.Response) -> AsyncGenerator[bytes]:
    try:
        async for data in answer.aiter_raw():
            yield data
    finally:
        await answer.aclose()


async def _read_along(answer: httpx.Response, exchange: Exchange) -> AsyncGenerator[bytes]:
    events = Events(exchange.event)
    try:
        async for data in answer.aiter_raw():
            if passed := events.feed(data):
                yield passed
        if passed := events.close():
            yield passed
    except httpx.TransportError as error:
        exchange.end(error)
        raise
    finally:
        exchange.end()
        await answer.aclose()


def _unreachable(error: httpx.TransportError) -> Response:
    said = f"spanmill gateway: the model server does not answer: {error!r}"
    return JSONResponse({"error": {"message": said, "type": "bad_gateway"}}, 502)

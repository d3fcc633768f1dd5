"""The ASGI middleware around vLLM's app: it reads whose rollout a request is, and changes nothing that anyone sees.

It stands outside of vLLM's own middleware, so that the rollout's path prefix is gone before vLLM checks its API key
and finds the route. Of an API key `sk-rollout-<id>:<key>`, vLLM gets `<key>`.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, cast
from urllib.parse import unquote

from spanmill.instrument.reports import guarded
from spanmill.instrument.texts import MAX_TEXT, captures_text
from spanmill.instrument.vllm.policy_route import POLICY, App, Message, Receive, Scope, Send, answer, serve
from spanmill.instrument.vllm.requests import Request, inner_key, read_path, read_request

Headers = list[tuple[bytes, bytes]]

STATUS: Final = "/spanmill/status"

current_request: ContextVar[Request | None] = ContextVar("spanmill_vllm_request", default=None)
"""The request that is being served; None outside of any."""


SEEN: Final = "spanmill"
"""In a scope: a middleware of ours has read this request already."""


class Middleware:
    """An ASGI app around another one, which is vLLM's as soon as its `engine` is there (None before, and elsewhere).

    `status` is what `GET /spanmill/status` answers of an engine.
    """

    def __init__(self, app: App, engine: Callable[[], Any], status: Callable[[Any], dict[str, Any]]) -> None:
        self._app = app
        self._engine = engine
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request with what it says of its rollout in `current_request`."""
        if scope["type"] != "http" or SEEN in scope or (engine := self._engine()) is None:
            await self._app(scope, receive, send)
            return
        if scope["path"] == STATUS and scope["method"] == "GET":
            await answer(send, self._status(engine))
            return
        if scope["path"] == POLICY:
            await serve(self._app, engine, {**scope, SEEN: True}, receive, send)
            return
        scope, request = _read({**scope, SEEN: True})
        token = current_request.set(request)
        try:
            await self._app(scope, receive if request is None else _keeping(receive, request), send)
        finally:
            current_request.reset(token)


def _read(scope: Scope) -> tuple[Scope, Request | None]:
    with guarded("request"):
        return read_scope(scope)
    return scope, None


def read_scope(scope: Scope) -> tuple[Scope, Request]:
    """(the scope as vLLM shall see it, what the request says of rollouts)."""
    raw: bytes = scope.get("raw_path") or str(scope["path"]).encode()
    root = str(scope.get("root_path") or "").rstrip("/")
    at = len(root) if root and raw.startswith(root.encode() + b"/") else 0
    in_path, rest = read_path(raw[at:])
    pairs: Headers = scope["headers"]
    if len(rest) != len(raw) - at:
        inner = raw[:at] + rest
        scope = {**scope, "raw_path": inner, "path": unquote(inner.decode("latin-1"))}
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(pairs)}
    if "sk-rollout-" in headers.get("authorization", "") + headers.get("x-api-key", ""):
        scope = {**scope, "headers": [_for_vllm(name, value) for name, value in pairs]}
    route = str(scope["path"])[at:]
    request = read_request(route, headers, in_path)
    request.body = [] if request.is_recorded and captures_text() else None
    return scope, request


def _for_vllm(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A header with the rollout taken out of an API key that holds a key for vLLM too."""
    if name.lower() not in (b"authorization", b"x-api-key"):
        return name, value
    scheme, space, key = value.decode("latin-1").rpartition(" ")
    inner = inner_key(key)
    return name, value if inner is None else f"{scheme}{space}{inner}".encode("latin-1")


def _keeping(receive: Receive, request: Request) -> Receive:
    """`receive` that keeps the body, up to the length of a text that a span can carry."""
    size = 0

    async def keep() -> Message:
        nonlocal size
        message = await receive()
        if request.body is not None and message["type"] == "http.request":
            chunk = cast("bytes", message.get("body", b""))
            size += len(chunk)
            if size > MAX_TEXT:
                request.body = None
            elif chunk:
                request.body.append(chunk)
        return message

    return keep

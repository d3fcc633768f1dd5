import asyncio
from typing import Any

import pytest

from spanmill.instrument.identity import Identity
from spanmill.instrument.texts import MAX_TEXT
from spanmill.instrument.vllm.middleware import Middleware, current_request, read_scope
from spanmill.instrument.vllm.requests import Request


def _scope(path: str, *headers: tuple[bytes, bytes], **more: Any) -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": list(headers), **more}


class Inner:
    """An app that keeps what it is called with."""

    def __init__(self) -> None:
        self.scope: Any = None
        self.request: Request | None = None
        self.received: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the whole body."""
        self.scope, self.request = scope, current_request.get()
        while True:
            self.received.append(await receive())
            if not self.received[-1].get("more_body"):
                break


def _serve(scope: dict[str, Any], *chunks: bytes, is_vllm: bool = True) -> tuple[Inner, list[Any]]:
    inner = Inner()
    messages = [{"type": "http.request", "body": c, "more_body": i < len(chunks) - 1} for i, c in enumerate(chunks)]
    coming = iter(messages)
    sent: list[Any] = []

    async def receive() -> Any:
        return next(coming)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Middleware(inner, lambda: object() if is_vllm else None, lambda _: {"a": 1})(scope, receive, send))
    assert inner.received in ([], messages)
    return inner, sent


def test_body_is_kept_and_passed_on() -> None:
    """The app gets every message of the body as it came, and a copy stays for the span."""
    inner, _ = _serve(_scope("/v1/messages"), b"ab", b"", b"cd")
    assert inner.request is not None
    assert [b"ab", b"cd"] == inner.request.body


def test_long_bodies_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is longer than a span can carry is passed on and not kept, nor is anything where text is not wanted."""
    inner, _ = _serve(_scope("/v1/messages"), b"x" * MAX_TEXT, b"y")
    assert inner.request is not None
    assert inner.request.body is None
    monkeypatch.setenv("SPANMILL_CAPTURE_TEXT", "0")
    inner, _ = _serve(_scope("/v1/messages"), b"ab")
    assert inner.request is not None
    assert inner.request.body is None


def test_prefix_under_a_root_path() -> None:
    """A server below a root path finds the prefix after it, and keeps the root path."""
    scope, request = read_scope(_scope("/proxy/rollout/a/v1/messages", root_path="/proxy"))
    assert ("/proxy/v1/messages", b"/proxy/v1/messages") == (scope["path"], scope["raw_path"])
    assert ("/v1/messages", Identity("a"), True) == (request.path, request.identity, request.is_recorded)


def test_the_servers_scope_is_left_alone() -> None:
    """What the server logs is what the client asked for: its scope is not changed."""
    scope = _scope("/rollout/a/v1/messages", (b"authorization", b"Bearer sk-rollout-b:secret"))
    before = {**scope, "headers": list(scope["headers"])}
    inner, _ = _serve(scope, b"")
    assert before == scope
    assert ("/v1/messages", [(b"authorization", b"Bearer secret")]) == (inner.scope["path"], inner.scope["headers"])


def test_other_apps_are_left_alone() -> None:
    """An app that is not vLLM's, and a socket, see their own scope and no request."""
    scope = _scope("/rollout/a/v1/messages")
    inner, _ = _serve(scope, b"", is_vllm=False)
    assert (True, None) == (inner.scope is scope, inner.request)
    socket = {**scope, "type": "websocket"}
    inner, _ = _serve(socket, b"")
    assert (True, None) == (inner.scope is socket, inner.request)


def test_a_second_middleware_does_nothing() -> None:
    """Where two stand around one app, the outer one has read the request."""
    inner = Inner()

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(_: Any) -> None: ...

    both = Middleware(Middleware(inner, object, lambda _: {}), object, lambda _: {})
    asyncio.run(both(_scope("/rollout/a/v1/messages"), receive, send))
    assert inner.request is not None
    assert Identity("a") == inner.request.identity


def test_status() -> None:
    """The plugin answers its own route, and the app never sees it."""
    inner, sent = _serve({**_scope("/spanmill/status"), "method": "GET"}, b"")
    assert (None, 200, b'{"a": 1}') == (inner.scope, sent[0]["status"], sent[1]["body"])

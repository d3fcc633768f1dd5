"""`/spanmill/policy_version` on vLLM's server: which weights sample, told by whoever loads them.

    GET                    {"version": "step-7"}, or null if it is not known
    POST {"version": ...}  a text, a number, or null; the same answer

It holds in every API-server process. vLLM from 0.32 on is told to keep track itself, so that also a generation that
runs meanwhile gets each version for its tokens.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, cast

from spanmill.instrument.answers import UNNAMED
from spanmill.instrument.vllm.policy import named_version, set_policy_version

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY: Final = "/spanmill/policy_version"
MAX_BODY: Final = 1 << 16
EXPECTED: Final = '{"version": …} with a text, a number, or null'


async def answer(send: Send, content: dict[str, Any], status: int = 200) -> None:
    """Answer a request with JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def serve(app: App, engine: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request of this route, if vLLM's `app` lets whoever sent it in."""
    if not await _let_in(app, scope, send):
        return
    try:
        match scope["method"]:
            case "GET":
                await answer(send, {"version": await _get(engine)})
            case "POST":
                version = _version(await _body(receive))
                await _set(engine, version)
                await answer(send, {"version": version})
            case _:
                await answer(send, {"error": "expected GET or POST"}, 405)
    except ValueError as error:
        await answer(send, {"error": str(error)}, 400)
    except Exception as error:
        await answer(send, {"error": f"vLLM's engine does not take it: {error!r}"}, 503)


async def _let_in(app: App, scope: Scope, send: Send) -> bool:
    """Whether vLLM's own middleware, its check of API keys among it, lets a request through; else it has answered.

    It is asked for a route that is not there, below the path that it guards: only a 404 comes from behind it.
    """
    root = str(scope.get("root_path") or "").rstrip("/")
    path = f"{root}/v1{POLICY}"
    asked = {**scope, "path": path, "raw_path": path.encode()}
    said: list[Message] = []

    async def nothing() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def keep(message: Message) -> None:
        said.append(message)

    await app(asked, nothing, keep)
    if said and said[0].get("status") == 404:
        return True
    for message in said:
        await send(message)
    return False


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ValueError("the request was cut off")
        body += cast("bytes", message.get("body", b""))
        if len(body) > MAX_BODY:
            raise ValueError(f"more than {MAX_BODY} bytes: expected {EXPECTED}")
        if not message.get("more_body"):
            return body


def _version(body: bytes) -> str | None:
    """The version that a body names. Raises ValueError for anything else."""
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError(f"expected {EXPECTED}")
    version: object = cast("dict[str, object]", content)["version"]
    if version is None:
        return None
    if isinstance(version, bool) or not isinstance(version, str | int) or version in ("", UNNAMED):
        raise ValueError(f"version is {version!r}: expected {EXPECTED}; {UNNAMED!r} is vLLM's name for none")
    return str(version)


async def _set(engine: Any, version: str | None) -> None:
    update = getattr(engine, "update_weight_version", None)
    if update is not None:
        await update(UNNAMED if version is None else version)
    set_policy_version(version)


async def _get(engine: Any) -> str | None:
    get = getattr(engine, "get_weight_version", None)
    said = UNNAMED if get is None else str(await get())
    return named_version() if said == UNNAMED else said

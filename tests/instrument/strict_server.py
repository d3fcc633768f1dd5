"""A real OpenAI-like server: starlette, uvicorn, and a pydantic model of the request that knows few fields."""

import asyncio
import json
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TEXT = "Hello world"


class ChatRequest(BaseModel):
    """A request of chat completions."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[dict[str, Any]]
    stream: bool = False
    logprobs: bool | None = None
    top_logprobs: int | None = None


class Asked(ChatRequest):
    """The same by a server that takes any field, and ignores those that it does not know."""

    model_config = ConfigDict(extra="allow")


def _whole(request: ChatRequest, number: int) -> dict[str, Any]:
    entry = {"token": TEXT, "logprob": -0.5, "bytes": [*TEXT.encode()], "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": TEXT},
        "finish_reason": "stop",
        "logprobs": {"content": [entry]} if request.logprobs else None,
    }
    head = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": request.model}
    return {**head, "choices": [choice]}


def _events(request: ChatRequest, number: int) -> Iterator[str]:
    whole = _whole(request, number)
    choice: dict[str, Any] = whole["choices"][0]
    delta = {"delta": choice["message"], **{name: value for name, value in choice.items() if name != "message"}}
    chunk = {**whole, "object": "chat.completion.chunk", "choices": [delta]}
    yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


@contextmanager
def strict_server(bodies: list[dict[str, Any]], *, is_strict: bool = True) -> Generator[str]:
    """The address of a running server, which puts the bodies of all requests into `bodies`."""

    async def chat(request: Request) -> Response:
        bodies.append(await request.json())
        try:
            asked = (ChatRequest if is_strict else Asked).model_validate(bodies[-1])
        except ValidationError as error:
            return JSONResponse({"detail": json.loads(error.json(include_url=False))}, 422)
        if asked.stream:
            return StreamingResponse(_events(asked, len(bodies)), media_type="text/event-stream")
        return JSONResponse(_whole(asked, len(bodies)))

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()

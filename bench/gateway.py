"""What the gateway costs: answers per second and time to the first token, through it and past it, in the same run.

    bench/gateway.py [--seconds 5] [--clients 16]

The model server is a uvicorn that answers at once: 16 tokens, whole for the rate and streamed for the first token.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from typing import Any

import httpx
import uvicorn
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spanmill.instrument import configure
from spanmill.instrument.gateway import application

PATH = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "word " * 64}]}
TOKENS = 16


def answer(asked: dict[str, Any]) -> bytes:
    """A whole answer, with ids and logprobs for those who ask."""
    ids = asked.get("return_token_ids")
    entries = [{"token": "w", "logprob": -1.25, "bytes": [119], "top_logprobs": []}] * TOKENS
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "w" * TOKENS},
        "logprobs": {"content": entries} if asked.get("logprobs") else None,
        "finish_reason": "stop",
        "token_ids": [*range(TOKENS)] if ids else None,
    }
    whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps({**whole, "prompt_token_ids": [*range(128)] if ids else None}).encode()


CHUNK = {"index": 0, "delta": {"content": "w"}, "logprobs": None, "finish_reason": None}
EVENT = b"data: " + json.dumps({"id": "chatcmpl-1", "choices": [CHUNK]}).encode() + b"\n\n"


async def model_server(scope: Any, receive: Any, send: Any) -> None:
    """The model server, as an ASGI application."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    asked = json.loads(body)
    stream = asked.get("stream")
    kind = b"text/event-stream" if stream else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if stream:
        for _ in range(TOKENS):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
    else:
        await send({"type": "http.response.body", "body": answer(asked)})


def serve(listening: socket.socket, upstream: str | None) -> None:
    """Run the gateway before `upstream`, or the model server itself."""
    app: Any = model_server
    if upstream is not None:
        configure(exporter=InMemorySpanExporter())
        app = application(upstream)
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="auto" if upstream else "off")
    asyncio.run(uvicorn.Server(config).serve([listening]))


async def rate(url: str, seconds: float, clients: int) -> float:
    """Whole answers per second."""
    until = time.perf_counter() + seconds
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=clients), timeout=30) as client:

        async def ask() -> int:
            done = 0
            while time.perf_counter() < until:
                (await client.post(url + PATH, json=CHAT)).raise_for_status()
                done += 1
            return done

        start = time.perf_counter()
        return sum(await asyncio.gather(*(ask() for _ in range(clients)))) / (time.perf_counter() - start)


def first_token(url: str, times: int) -> float:
    """Median milliseconds from request to first chunk, one request at a time."""
    took: list[float] = []
    with httpx.Client(timeout=30) as client:
        for _ in range(times):
            start = time.perf_counter()
            with client.stream("POST", url + PATH, json={**CHAT, "stream": True}) as streamed:
                chunks = streamed.iter_raw()
                next(chunks)
                took.append(time.perf_counter() - start)
                for _ in chunks:
                    pass
    return statistics.median(took) * 1e3


def main() -> None:
    """Print both figures, direct and through the gateway."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    urls: list[str] = []
    processes: list[Any] = []
    for upstream in (None, 0):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        target = None if upstream is None else urls[upstream]
        processes.append(spawn.Process(target=serve, args=(listening, target), daemon=True))
        processes[-1].start()
        urls.append(f"http://127.0.0.1:{listening.getsockname()[1]}")
    try:
        for name, url in zip(("direct", "gateway"), urls, strict=True):
            asyncio.run(rate(url, 1, 2))
            per_second = asyncio.run(rate(url, options.seconds, options.clients))
            print(f"{name:8} {per_second:8.0f} answers/s   first token {first_token(url, 300):6.2f} ms", flush=True)
    finally:
        for process in processes:
            process.terminate()


if __name__ == "__main__":
    main()

"""What the gateway costs: answers per CPU second and time to the first token, through it and past it, in one run.

    bench/gateway.py [--rounds 5] [--seconds 2] [--clients 16]

The model server is a uvicorn that answers at once: 16 tokens, whole for the rate and streamed for the first token. Both
are asked in turns. The CPU time of the process that is asked counts alone, with the export of its spans; what clients
and the receiver of the spans cost does not.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn

from spanmill.instrument import configure
from spanmill.instrument.gateway import configuration

PATH: Final = "/v1/chat/completions"
SPANS: Final = "/v1/traces"
CHAT: Final = {"model": "m", "messages": [{"role": "user", "content": "word " * 64}]}
TOKENS: Final = 16
NAMES: Final = ("direct", "gateway")
GOAL_RATE: Final = 500
"""Answers per CPU second through the gateway."""

GOAL_FIRST_MS: Final = 2.0
"""What it may add to the first token."""


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


CHUNK: Final = {"index": 0, "delta": {"content": "w"}, "logprobs": None, "finish_reason": None}
EVENT: Final = b"data: " + json.dumps({"id": "chatcmpl-1", "choices": [CHUNK]}).encode() + b"\n\n"


async def model_server(scope: Any, receive: Any, send: Any) -> None:
    """The model server, which also takes spans and forgets them, as an ASGI application."""
    if scope["type"] != "http":
        return
    if scope["path"] == SPANS:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
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
    if upstream is None:
        config = uvicorn.Config(model_server, log_level="error", access_log=False, lifespan="off")
    else:
        configure(endpoint=upstream + SPANS)
        config = configuration(upstream)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(uvicorn.Server(config).serve([listening]))


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(url: str, seconds: float, clients: int) -> int:
    """How many whole answers came."""
    until = time.perf_counter() + seconds
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=clients), timeout=30) as client:

        async def ask() -> int:
            done = 0
            while time.perf_counter() < until:
                (await client.post(url + PATH, json=CHAT)).raise_for_status()
                done += 1
            return done

        return sum(await asyncio.gather(*(ask() for _ in range(clients))))


def first_token(client: httpx.Client, url: str) -> float:
    """Milliseconds from a request to its first chunk."""
    start = time.perf_counter()
    with client.stream("POST", url + PATH, json={**CHAT, "stream": True}) as streamed:
        chunks = streamed.iter_raw()
        next(chunks)
        took = time.perf_counter() - start
        for _ in chunks:
            pass
    return took * 1e3


def main() -> None:
    """Print both figures, direct and through the gateway."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
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
    done, used = [0, 0], [0.0, 0.0]
    firsts: tuple[list[float], list[float]] = ([], [])
    try:
        for url in urls:
            asyncio.run(load(url, 1, 2))
        for _ in range(options.rounds):
            for at, url in enumerate(urls):
                before = cpu_s(processes[at].pid)
                done[at] += asyncio.run(load(url, options.seconds, options.clients))
                used[at] += cpu_s(processes[at].pid) - before
        with httpx.Client(timeout=30) as client:
            for _ in range(60 * options.rounds):
                for took, url in zip(firsts, urls, strict=True):
                    took.append(first_token(client, url))
    finally:
        for process in processes:
            process.terminate()
    rates = [answers / seconds for answers, seconds in zip(done, used, strict=True)]
    typical = [statistics.median(took) for took in firsts]
    rarest = [statistics.quantiles(took, n=100)[98] for took in firsts]
    for name, rate, median, p99 in zip(NAMES, rates, typical, rarest, strict=True):
        print(f"{name:8} {rate:8.0f} answers/CPU s   first token {median:6.2f} ms, p99 {p99:6.2f} ms")
    print(
        f"the gateway carries {rates[1]:.0f} answers per CPU second (goal >= {GOAL_RATE}) and adds to the first token "
        f"{typical[1] - typical[0]:.2f} ms (goal <= {GOAL_FIRST_MS:g}), p99 {rarest[1] - rarest[0]:.2f} ms"
    )


if __name__ == "__main__":
    main()

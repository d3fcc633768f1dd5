# pyright: reportMissingImports=false
"""Measures what the plugin costs vLLM: throughput with and without it, and the time that it takes on the event loop.

    VLLM_PYTHON bench/vllm_overhead.py MODEL_DIR [--rounds 7] [--requests 64] [--concurrency 16] [--tokens 128]

Run it with the Python that vLLM is installed for; MODEL_DIR is what tests/vllm/tiny_model.py makes. Two servers stand
beside each other, one with the plugin and one without, and the same load goes to one after the other, the order
swapped from round to round; a figure is the ratio within a round (with / without): median, least, most. A span goes to
a receiver that throws it away. The event loop's time is measured on vLLM's own output objects, without any engine:
2,048 prompt ids and 256 sampled ones, in one piece and in 256.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any, cast

import httpx

PROMPT, ANSWER = 2048, 256


class Sink(BaseHTTPRequestHandler):
    """Takes OTLP requests and throws them away."""

    def do_POST(self) -> None:
        """Read and forget."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to say."""


@contextlib.contextmanager
def server(model: str, sink: str, *, plugin: bool) -> Generator[str]:
    """A running vLLM's base URL."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--max-model-len", "1024", "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--served-model-name", "tiny", "--disable-uvicorn-access-log"]
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "SPANMILL_VLLM": "1" if plugin else "0",
        "OTEL_EXPORTER_OTLP_ENDPOINT": sink,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        if process.poll() is not None:
            sys.exit("vLLM does not start")
        yield url
    finally:
        process.terminate()
        process.wait()


async def drive(url: str, count: int, concurrency: int, body: dict[str, Any]) -> float:
    """Requests a second."""
    todo = iter(range(count))

    async def worker(client: httpx.AsyncClient) -> None:
        for i in todo:
            content = f"the quick brown fox {i}"
            asked = {**body, "messages": [{"role": "user", "content": content}]}
            answer = await client.post("/v1/chat/completions", json=asked)
            answer.raise_for_status()

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        begin = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
        return count / (time.perf_counter() - begin)


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def throughput(options: argparse.Namespace) -> None:
    """Ratios of requests a second, for clients that ask for logprobs and clients that do not, streamed and not."""
    sink = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    base = {"model": "tiny", "max_tokens": options.tokens, "ignore_eos": True}
    asking = {**base, "logprobs": True, "top_logprobs": 0}
    where = f"http://127.0.0.1:{sink.server_port}"
    with server(options.model, where, plugin=True) as with_it, server(options.model, where, plugin=False) as without:

        def run(url: str, body: dict[str, Any]) -> float:
            return asyncio.run(drive(url, options.requests, options.concurrency, body))

        bodies = [(with_it, base), (with_it, asking), (without, base), (without, asking)]
        for url, body in bodies:
            run(url, body)
        rows: dict[str, list[float]] = {}
        for round_ in range(options.rounds):
            found = [0.0] * len(bodies)
            for at in range(len(bodies)) if round_ % 2 else reversed(range(len(bodies))):
                found[at] = run(*bodies[at])
            silent, asked, bare, bare_asked = found
            for name, ratio in (
                ("client asks for logprobs, with / without the plugin", asked / bare_asked),
                ("client asks for nothing, with the plugin / vLLM that computes logprobs", silent / bare_asked),
                ("client asks for nothing, with / without the plugin", silent / bare),
                ("without the plugin, client asks for logprobs / for nothing", bare_asked / bare),
            ):
                rows.setdefault(name, []).append(ratio)
        for name, ratios in rows.items():
            print(f"{spread(ratios)}  {name}")
        print(json.dumps(httpx.get(f"{with_it}/spanmill/status").json()["counters"]))


def event_loop(rounds: int = 300) -> None:
    """Milliseconds a call that the plugin adds to the event loop, beside its own thread."""
    # Where the code is checked there is no vLLM.
    sampling, logprobs, answers = (
        cast("Any", import_module(f"vllm.{name}")) for name in ("sampling_params", "logprobs", "outputs")
    )
    from spanmill.instrument.vllm import hooks, sender

    class Config:
        logprobs_mode = "raw_logprobs"
        served_model_name = "tiny"

    class Engine:
        model_config = Config()

    prompt = list(range(PROMPT))

    def outputs(pieces: int) -> list[Any]:
        made: list[Any] = []
        for piece in range(pieces):
            ids = list(range(ANSWER // pieces))
            flat = logprobs.FlatLogprobs(
                [*ids], [i + 1 for i in ids], [*ids], [-0.5] * len(ids), [1] * len(ids), [None] * len(ids)
            )
            last = piece == pieces - 1
            part = answers.CompletionOutput(0, "", ids, -1.0, flat, finish_reason="stop" if last else None)
            made.append(answers.RequestOutput("r", None, prompt, None, [part], last))
        return made

    async def source(items: list[Any]) -> AsyncGenerator[Any, None]:
        for item in items:
            yield item

    def bare(_: Any, __: Any, ___: Any, items: Any = None) -> Any:
        return source(items)

    async def consume(answer: Any) -> float:
        begin = time.thread_time()
        async for _ in answer():
            pass
        return time.thread_time() - begin

    def emit_nothing(_emitted: object) -> None:
        """The work of the sender's thread is no time of the event loop."""

    setattr(sender, "emit", emit_nothing)  # noqa: B010  # a plain assignment would need the sender's own types
    kinds = sampling.RequestOutputKind
    for pieces, kind in ((1, kinds.FINAL_ONLY), (ANSWER, kinds.DELTA)):
        params = sampling.SamplingParams(max_tokens=ANSWER, output_kind=kind)
        given = ({"prompt_token_ids": prompt}, params, "r")
        with_it: list[float] = []
        without: list[float] = []
        for _ in range(rounds):
            with_it.append(
                asyncio.run(consume(partial(hooks.generate, bare, Engine(), given, {"items": outputs(pieces)})))
            )
            without.append(asyncio.run(consume(partial(bare, *given, items=outputs(pieces)))))
        added = 1000 * (statistics.median(with_it) - statistics.median(without))
        print(f"{added:.3f} ms of event loop a call, {PROMPT} + {ANSWER} tokens in {pieces} piece(s)")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    event_loop()
    throughput(options)


if __name__ == "__main__":
    main()

# pyright: reportMissingImports=false
"""Measures what the plugin costs vLLM: throughput and CPU with and without it, and its time on the event loop.

    VLLM_PYTHON bench/vllm_overhead.py MODEL_DIR [--rounds 7] [--requests 64] [--concurrency 16] [--tokens 128]

Run it with the Python that vLLM is installed for; MODEL_DIR is what tests/vllm/tiny_model.py makes. Two servers stand
beside each other, one with the plugin and one without, and the same load goes to one after the other, the order
swapped from round to round; a figure is the ratio within a round (with / without): median, least, most. A span goes to
a receiver that throws it away, in a process of its own.

Requests a second are those of a machine on which nothing else runs; CPU seconds a request, of vLLM and all its
processes, hold on a busy one too. Of a pair that is the same server twice both say how far they can be trusted. The
event loop's time is measured on vLLM's own output objects, without any engine: 2,048 prompt ids and 256 sampled ones,
in one piece and in 256; so is the CPU of all that the plugin does, its threads and the export included: set against
the CPU of a request without it, that is the plugin's share where nothing else can be trusted.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from multiprocessing import Queue
from typing import Any, Final, NamedTuple, cast

import httpx
import psutil

PROMPT, ANSWER = 2048, 256


class Sink(BaseHTTPRequestHandler):
    """Takes OTLP requests and throws them away."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Read and forget."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to say."""


def serve_sink(port: "Queue[int]") -> None:
    """Run a sink and say at which port."""
    sink = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    port.put(sink.server_port)
    sink.serve_forever()


@contextlib.contextmanager
def running_sink() -> Generator[str]:
    """The base URL of a sink in a process of its own."""
    context = multiprocessing.get_context("spawn")
    port: Queue[int] = context.Queue()
    process = context.Process(target=serve_sink, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get(timeout=30)}"
    finally:
        process.terminate()
        process.join()


class Server(NamedTuple):
    """A running vLLM."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        own = psutil.Process(self.pid)
        times = [p.cpu_times() for p in (own, *own.children(recursive=True))]
        return sum(t.user + t.system for t in times)


@contextlib.contextmanager
def server(model: str, sink: str, *, plugin: bool) -> Generator[Server]:
    """A running vLLM, with or without the plugin."""
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
        yield Server(url, process.pid)
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


class Cost(NamedTuple):
    """What a load came to."""

    requests_per_s: float
    cpu_s: float
    """Of the server, for each request."""


PAIRS: Final = {
    "client asks for logprobs, with / without the plugin": ("with asked", "bare asked"),
    "client asks for logprobs of a stream, with / without": ("with stream", "bare stream"),
    "client asks for nothing, with the plugin / vLLM that computes logprobs": ("with silent", "bare asked"),
    "client asks for nothing, with / without the plugin": ("with silent", "bare silent"),
    "the server without the plugin against itself": ("bare asked again", "bare asked"),
}
"""Which two loads a figure compares."""


def throughput(options: argparse.Namespace, sink: str) -> None:
    """Ratios of requests a second and of CPU seconds a request."""
    silent = {"model": "tiny", "max_tokens": options.tokens, "ignore_eos": True}
    asked = {**silent, "logprobs": True, "top_logprobs": 0}
    stream = {**asked, "stream": True}
    with server(options.model, sink, plugin=True) as with_it, server(options.model, sink, plugin=False) as bare:

        def run(which: Server, body: dict[str, Any]) -> Cost:
            before = which.cpu_s()
            rate = asyncio.run(drive(which.url, options.requests, options.concurrency, body))
            time.sleep(1.5)  # the last spans go out
            return Cost(rate, (which.cpu_s() - before) / options.requests)

        loads = {
            "with asked": (with_it, asked),
            "bare asked": (bare, asked),
            "with stream": (with_it, stream),
            "bare stream": (bare, stream),
            "with silent": (with_it, silent),
            "bare silent": (bare, silent),
            "bare asked again": (bare, asked),
        }
        for which, body in loads.values():
            run(which, body)
        ratios: dict[str, list[Cost]] = {name: [] for name in PAIRS}
        cpu: list[float] = []
        for round_ in range(options.rounds):
            order = list(loads) if round_ % 2 else list(reversed(loads))
            found = {name: run(*loads[name]) for name in order}
            cpu.append(1000 * found["bare asked"].cpu_s)
            for name, (one, other) in PAIRS.items():
                a, b = found[one], found[other]
                ratios[name].append(Cost(a.requests_per_s / b.requests_per_s, a.cpu_s / b.cpu_s))
        print(f"{spread(cpu)} ms of CPU a request of {options.tokens} tokens is what vLLM without the plugin takes")
        print("requests a second        CPU seconds a request")
        for name, costs in ratios.items():
            print(f"{spread([c.requests_per_s for c in costs])}  {spread([c.cpu_s for c in costs])}  {name}")
        print(json.dumps(httpx.get(f"{with_it.url}/spanmill/status").json()["counters"]))


class Config:
    """What the plugin reads of vLLM's."""

    logprobs_mode = "raw_logprobs"
    served_model_name = "tiny"


class Engine:
    """What the plugin reads of an engine."""

    model_config = Config()


def outputs(prompt: int, answer: int, pieces: int) -> list[Any]:
    """What vLLM's engine hands out for one call: so many ids of prompt and answer, in so many pieces."""
    # Where the code is checked there is no vLLM.
    logprobs, answers = (cast("Any", import_module(f"vllm.{name}")) for name in ("logprobs", "outputs"))
    made: list[Any] = []
    asked = list(range(1000, 1000 + prompt))
    for piece in range(pieces):
        ids = list(range(1000, 1000 + answer // pieces))
        at = list(range(len(ids)))
        flat = logprobs.FlatLogprobs(
            at, [i + 1 for i in at], [*ids], [-0.5 - i / 1000 for i in at], [1] * len(at), ["a"] * len(at)
        )
        last = piece == pieces - 1
        part = answers.CompletionOutput(0, "", ids, -1.0, flat, finish_reason="stop" if last else None)
        made.append(answers.RequestOutput("r", None, asked, None, [part], last))
    return made


def bare(_: Any, __: Any, ___: Any, items: Any = None) -> Any:
    """An engine that hands out what it is given."""

    async def source() -> AsyncGenerator[Any, None]:
        for item in items:
            yield item

    return source()


def given(answer: int, pieces: int) -> tuple[Any, Any, str]:
    """The arguments of `AsyncLLM.generate`."""
    sampling = cast("Any", import_module("vllm.sampling_params"))
    kind = sampling.RequestOutputKind.DELTA if pieces > 1 else sampling.RequestOutputKind.FINAL_ONLY
    return {"prompt_token_ids": []}, sampling.SamplingParams(max_tokens=answer, output_kind=kind), "r"


async def consume(answer: Callable[[], Any]) -> None:
    """Take all outputs."""
    async for _ in answer():
        pass


def whole_cost(sink: str, prompt: int, answer: int, pieces: int, calls: int = 400) -> float:
    """CPU milliseconds a call of all that the plugin does in vLLM's process, its threads and the export included."""
    from spanmill.instrument import provider
    from spanmill.instrument.vllm import hooks, sender

    provider.configure(endpoint=sink)
    arguments = given(answer, pieces)

    def run(count: int, *, plugin: bool) -> float:
        answers = [outputs(prompt, answer, pieces) for _ in range(count)]
        made = [
            partial(hooks.generate, bare, Engine(), arguments, {"items": items})
            if plugin
            else partial(bare, *arguments, items=items)
            for items in answers
        ]

        async def all_of_them() -> None:
            for each in made:
                await consume(each)

        begin = time.process_time()
        asyncio.run(all_of_them())
        if plugin and not sender.flush():
            sys.exit("the sink took no spans")
        return 1000 * (time.process_time() - begin) / count

    run(20, plugin=True)
    return statistics.median(run(calls, plugin=True) - run(calls, plugin=False) for _ in range(5))


def event_loop(rounds: int = 300) -> None:
    """Milliseconds a call that the plugin adds to the event loop, beside its own thread."""
    from spanmill.instrument.vllm import hooks, sender

    async def timed(answer: Callable[[], Any]) -> float:
        begin = time.thread_time()
        await consume(answer)
        return time.thread_time() - begin

    def emit_nothing(_emitted: object) -> None:
        """The work of the sender's thread is no time of the event loop."""

    setattr(sender, "emit", emit_nothing)  # noqa: B010  # a plain assignment would need the sender's own types
    for pieces in (1, ANSWER):
        arguments = given(ANSWER, pieces)
        with_it: list[float] = []
        without: list[float] = []
        for _ in range(rounds):
            items = outputs(PROMPT, ANSWER, pieces)
            with_it.append(asyncio.run(timed(partial(hooks.generate, bare, Engine(), arguments, {"items": items}))))
            items = outputs(PROMPT, ANSWER, pieces)
            without.append(asyncio.run(timed(partial(bare, *arguments, items=items))))
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
    os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"
    with running_sink() as sink:
        for prompt, answer, pieces in ((20, options.tokens, 1), (PROMPT, ANSWER, 1), (PROMPT, ANSWER, ANSWER)):
            cost = whole_cost(sink, prompt, answer, pieces)
            print(f"{cost:.3f} ms of CPU a call in all, {prompt} + {answer} tokens in {pieces} piece(s)")
        event_loop()
        if options.rounds:
            throughput(options, sink)


if __name__ == "__main__":
    main()

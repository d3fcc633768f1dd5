"""What spanmill costs an agent's process: CPU time for each call, and to start.

    bench/agent.py [--rounds 7] [--calls 300]

A call is one of the OpenAI client to a model server that answers at once, 2,048 prompt ids and 256 sampled ones, whole;
a start is `opentelemetry-instrument python -c pass`, where no other instrumentor is at work. Both with spanmill and
without, in turns. A process's own CPU time is counted, with the export of its spans.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

PROMPT: Final = 2048
ANSWER: Final = 256
GOAL_CALL_MS: Final = 1.0
GOAL_START_MS: Final = 150.0

INSTRUMENT: Final = [str(Path(sys.executable).parent / "opentelemetry-instrument"), sys.executable]
OTHERS: Final = {entry.name for entry in entry_points(group="opentelemetry_instrumentor")} - {"spanmill"}
ALONE: Final = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": ",".join(OTHERS)}
WITHOUT: Final = {
    "OTEL_PYTHON_DISTRO": "none",
    "OTEL_PYTHON_CONFIGURATOR": "none",
    "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": ",".join([*OTHERS, "spanmill"]),
}

AGENT: Final = """
import gc, resource, sys
from openai import OpenAI

def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

client, calls = OpenAI(), int(sys.argv[1])
messages = [{"role": "user", "content": "word " * 2048}]
for at in range(calls + 10):
    if at == 10:
        if "spanmill" in sys.modules:
            import spanmill

            assert spanmill.flush(30)  # what sends the spans is imported
        gc.collect()  # what the imports left is no part of a call
        before = cpu_s()
    client.chat.completions.create(model="m", messages=messages)
if "spanmill" in sys.modules:
    assert spanmill.flush(30)
print((cpu_s() - before) / calls * 1e3)
"""


def answer(asked: dict[str, Any]) -> bytes:
    """A whole answer, with ids and logprobs for those who ask."""
    ids = asked.get("return_token_ids")
    entries = [{"token": " word", "logprob": -1.25, "bytes": [*b" word"], "top_logprobs": []}] * ANSWER
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " word" * ANSWER},
        "logprobs": {"content": entries} if asked.get("logprobs") else None,
        "finish_reason": "stop",
        "token_ids": [*range(1000, 1000 + ANSWER)] if ids else None,
    }
    usage = {"prompt_tokens": PROMPT, "completion_tokens": ANSWER, "total_tokens": PROMPT + ANSWER}
    whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    prompt_ids = [*range(1000, 1000 + PROMPT)] if ids else None
    return json.dumps({**whole, "usage": usage, "prompt_token_ids": prompt_ids}).encode()


class Server(BaseHTTPRequestHandler):
    """A model server that says it is vLLM, and a receiver that throws spans away."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """`/version`."""
        self._send(b'{"version": "0.32.0"}')

    def do_POST(self) -> None:
        """Answer, or forget."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(b"" if self.path.endswith("/v1/traces") else answer(json.loads(body)))

    def _send(self, content: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self.wfile.write(head.encode() + content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to say."""


@contextmanager
def server() -> Generator[str]:
    """The address of a running server."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()


def call_ms(url: str, calls: int, settings: dict[str, str]) -> float:
    """CPU milliseconds of a call, in a process of its own."""
    addresses = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "x", "OTEL_EXPORTER_OTLP_ENDPOINT": url}
    environ = {**os.environ, **settings, **addresses, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    command = [*INSTRUMENT, "-c", AGENT, str(calls)]
    return float(subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout)


def start_ms(settings: dict[str, str]) -> float:
    """CPU milliseconds of a process that does nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*INSTRUMENT, "-c", "pass"], env={**os.environ, **settings}, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def compare(what: str, goal: float, rounds: int, measure: Callable[[dict[str, str]], float]) -> None:
    """Print both figures and what the second adds, as the median over the rounds."""
    pairs = [(measure(WITHOUT), measure(ALONE)) for _ in range(rounds)]
    without, with_us = (statistics.median(side) for side in zip(*pairs, strict=True))
    added = statistics.median(ours - plain for plain, ours in pairs)
    ratio = statistics.median(ours / plain for plain, ours in pairs)
    print(
        f"{what:28} {without:8.2f} ms without, {with_us:8.2f} ms with: "
        f"+{added:.2f} ms (goal <= {goal:g}), x {ratio:.2f}",
        flush=True,
    )


def main() -> None:
    """Print what a call and a start cost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    with server() as url:
        compare("a call", GOAL_CALL_MS, options.rounds, lambda settings: call_ms(url, options.calls, settings))
    compare("a start", GOAL_START_MS, options.rounds, start_ms)


if __name__ == "__main__":
    main()

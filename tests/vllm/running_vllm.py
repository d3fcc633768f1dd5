"""Starting vLLM in its own environment, asking it, and reading the rows that its spans come to."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import httpx
import numpy as np
import pytest
from otlp_sink import Sink, http_receiver

from spanmill.adapters.adapt import adapt
from spanmill.collector.decode import decode_traces
from spanmill.triplets.records import Rollout, Span, Triplet

Json = Any
Receiver = Callable[[], AbstractContextManager[Sink]]

HERE = Path(__file__).parent
READY_S = 600
MESSAGES = [{"role": "user", "content": "hello world"}]
MODEL = "tiny"


def vllm_python() -> str:
    """The Python that vLLM is installed for, `SPANMILL_VLLM_PYTHON` or what `make test-vllm` makes; else skip."""
    python = os.environ.get("SPANMILL_VLLM_PYTHON", str(HERE.parents[1] / ".vllm" / "bin" / "python"))
    if not Path(python).exists():
        pytest.skip("needs vLLM in an environment of its own: make test-vllm gets it, or set SPANMILL_VLLM_PYTHON")
    return python


def environment(**more: str) -> dict[str, str]:
    """For a process with vLLM in it on a shared machine: no network, little memory, one thread, spans at once."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "SPANMILL_", "VLLM_", "PYTEST_"))}
    return {
        **inherited,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        **more,
    }


def run_in_vllm(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder with vLLM's Python to its end."""
    return subprocess.run(
        [vllm_python(), str(HERE / script), *arguments],
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=READY_S,
        check=False,
    )


def make_model(script: str, folder: Path) -> Path:
    """Make a model with one of the scripts beside this one."""
    done = run_in_vllm(script, str(folder))
    if done.returncode:
        raise RuntimeError(f"{script}: {done.stderr[-2000:]}")
    return folder


def copied_tool_model(folder: Path) -> Path:
    """The model that calls tools, copied to where servers may write; tool_model.py has made it."""
    return shutil.copytree(HERE / "tool_calling_model", folder, dirs_exist_ok=True)


class Sampled(NamedTuple):
    """One choice, as the engine returned it to a client or as a row tells it."""

    response_id: str
    choice: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


class VllmServer:
    """A running vLLM, and what its plugin has emitted."""

    def __init__(self, url: str, sink: Sink, log: Path, process: "subprocess.Popen[bytes]") -> None:
        self.url = url
        self.sink = sink
        self.log = log
        self.process = process
        self.client = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, body: Json, **headers: str) -> httpx.Response:
        """A request; header names with `_` for `-`."""
        return self.client.post(path, json=body, headers=as_headers(headers))

    def stream(self, path: str, body: Json, **headers: str) -> list[Json]:
        """A streamed request: its events, but for the last `[DONE]`."""
        answer = self.post(path, {**body, "stream": True}, **headers)
        assert answer.status_code == 200, answer.text
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(d) for d in data if d != "[DONE]"]

    def spans(self) -> list[Span]:
        """All spans received so far."""
        return [span for body in list(self.sink.bodies) for span in decode_traces(body).spans]

    def rollout(self, rollout_id: str, calls: int, timeout_s: float = 60) -> Rollout:
        """The only attempt of a rollout, as soon as that many calls of it are there."""
        (found,) = self.attempts(rollout_id, calls, timeout_s)
        return found

    def attempts(self, rollout_id: str, calls: int, timeout_s: float = 60) -> list[Rollout]:
        """All attempts of a rollout, as soon as that many calls of it are there."""
        until = time.monotonic() + timeout_s
        while True:
            found = [r for r in adapt(self.spans()).rollouts if r.rollout_id == rollout_id]
            if sum(r.num_calls for r in found) >= calls or time.monotonic() > until:
                assert sum(r.num_calls for r in found) == calls
                return found
            time.sleep(0.05)

    def sampled(self, rollout_id: str, calls: int) -> list[Sampled]:
        """The rows of a rollout, by response id and choice."""
        return sorted(map(from_row, self.rollout(rollout_id, calls).triplets))


def from_row(row: Triplet) -> Sampled:
    """What a row of `triplets` says, all of it recorded."""
    assert row.prompt_token_ids is not None
    assert row.response_token_ids is not None
    assert row.response_logprobs is not None
    return Sampled(
        row.call_id.partition("#")[0],
        row.choice,
        row.prompt_token_ids.tolist(),
        row.response_token_ids.tolist(),
        row.response_logprobs.tolist(),
        row.finish_reason,
    )


def as_headers(names: Mapping[str, str]) -> dict[str, str]:
    """`x_spanmill_mode="val"` as a header."""
    return {name.replace("_", "-"): value for name, value in names.items()}


def as_float32(values: list[float]) -> list[float]:
    """Numbers as a float32 holds them."""
    return np.asarray(values, np.float32).tolist()


def new_rollout() -> str:
    """An id that no other test has."""
    return f"rollout-{uuid4().hex}"


def free_port() -> int:
    """A TCP port that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def running_server(
    model: Path,
    *options: str,
    receiver: Receiver = http_receiver,
    launcher: tuple[str, ...] = ("-m", "vllm.entrypoints.openai.api_server", "--model"),
    **environ: str,
) -> Generator[VllmServer]:
    """VLLM serving `model` that emits to a receiver of ours."""
    python = vllm_python()
    port = free_port()
    command = [python, *launcher, str(model), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--dtype", "bfloat16"]
    command += ["--enforce-eager", *options]
    log = model / f"serve-{port}.log"
    with receiver() as sink, log.open("wb") as out:
        env = environment(**{"OTEL_EXPORTER_OTLP_ENDPOINT": sink.endpoint, **environ})
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=model)
        server = VllmServer(f"http://127.0.0.1:{port}", sink, log, process)
        try:
            _wait_until_ready(server)
            yield server
        finally:
            server.client.close()
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(server: VllmServer) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and server.process.poll() is None:
        try:
            if server.client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM does not start: {server.log.read_text()[-3000:]}")

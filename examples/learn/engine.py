"""The model server of the example: a real vLLM on the CPU, whose weights are exchanged while it runs."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

READY_S = 300


class Engine:
    """A running vLLM."""

    def __init__(self, url: str) -> None:
        self.url = url

    def load(self, weights: Path, version: str) -> None:
        """Exchange the weights for those in a folder, and name what is sampled from now on.

        `reload_weights` copies them into the running model (the server is in its development mode for that); nothing of
        the old ones stays, since prefixes are not cached.
        """
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
        self.name(version)

    def name(self, version: str) -> None:
        """Say which version the weights are: it stands in `policy_versions` of each token that they sample."""
        self._post("/update_weight_version", {"new_version": version})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = Request(f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            answer.read()


@contextmanager
def running(python: str, model: Path, log: Path, collector: str) -> Generator[Engine]:
    """A vLLM of the environment of `python`, serving `model` and sending spans to `collector` (OTLP/gRPC)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "policy",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--dtype", "bfloat16"]
    command += ["--enforce-eager", "--no-enable-prefix-caching", "--logprobs-mode", "processed_logprobs"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        _wait(process, f"http://127.0.0.1:{port}", log)
        yield Engine(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"vLLM does not start: {log.read_text(errors='replace')[-3000:]}")

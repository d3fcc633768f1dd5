"""Real collectors as processes, in front of spanmill and behind it; `tests/peers/get.sh FOLDER` gets them."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from served import EXPORT

FOLDER = os.environ.get("SPANMILL_PEERS")
"""Where they are: outside the repository, since they take minutes to make. Without it their tests are skipped."""
HOW = "tests/peers/get.sh ~/.cache/spanmill-peers, then SPANMILL_PEERS=~/.cache/spanmill-peers"


def otelcol() -> Path:
    """The Go collector; skips without it."""
    return _had("otelcol")


def rotel() -> Path:
    """Rotel, a collector in Rust; skips without it."""
    return _had("rotel/lib/python*/site-packages/rotel/rotel-agent")


def _had(pattern: str) -> Path:
    found = sorted(Path(FOLDER).expanduser().glob(pattern)) if FOLDER else []
    if not found:
        pytest.skip(f"needs {pattern.partition('/')[0]}: {HOW}")
    return found[0]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Peer:
    """A collector that runs, and its log."""

    def __init__(self, command: Sequence[str | Path], log: Path, port: int, http_port: int = 0) -> None:
        """Returns once it listens on `port`, its port of OTLP/gRPC."""
        self.log = log
        self.port = port
        self.http_port = http_port
        with log.open("ab") as output:
            self._process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=output)
        deadline = time.monotonic() + 30
        while not _listens(port):
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.stop()
                raise TimeoutError(f"{command[0]} does not listen: {log.read_text()[-2000:]}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def stop(self) -> None:
        """End it as a user does, else at once."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def dropped(self) -> list[str]:
        """The lines in which a Go collector says that it has lost something."""
        return re.findall(r".*(?:Dropping data|dropped_spans|rejected).*", self.log.read_text())

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def go_collector(folder: Path, exporters: str) -> Peer:
    """A Go collector that passes traces on to exporters (YAML, two spaces in)."""
    grpc_port, http_port = free_ports(2)
    names = re.findall(r"^  (\S+):", exporters, re.MULTILINE)
    config = folder / f"otelcol-{grpc_port}.yaml"
    config.write_text(f"""
receivers:
  otlp:
    protocols:
      grpc: {{endpoint: "127.0.0.1:{grpc_port}", max_recv_msg_size_mib: 64}}
      http: {{endpoint: "127.0.0.1:{http_port}"}}
exporters:
{exporters}
service:
  telemetry:
    metrics: {{level: none}}
  pipelines:
    traces: {{receivers: [otlp], exporters: [{", ".join(names)}]}}
""")
    return Peer([otelcol(), "--config", config], folder / f"otelcol-{grpc_port}.log", grpc_port, http_port)


def exporter(url: str, compression: str = "none", more: str = "") -> str:
    """An exporter for spanmill at grpc://HOST:PORT or http://HOST:PORT, with a queue that loses nothing."""
    scheme, _, address = url.partition("://")
    kind, endpoint = ("otlp_grpc", address) if scheme == "grpc" else ("otlp_http", url)
    return f"""  {kind}/spanmill:
    endpoint: "{endpoint}"
    compression: {compression}
    timeout: 5s
    tls: {{insecure: true}}
    retry_on_failure: {{enabled: true, initial_interval: 200ms, max_interval: 1s, max_elapsed_time: 0}}
    sending_queue: {{enabled: true, queue_size: 10000, num_consumers: 4, block_on_overflow: true}}
{more}"""


def rotel_agent(folder: Path, url: str, compression: str = "none") -> Peer:
    """Rotel that passes on to spanmill."""
    scheme, _, address = url.partition("://")
    grpc_port, http_port = free_ports(2)
    command: list[str | Path] = [rotel(), "start", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc_port}"]
    command += ["--otlp-http-endpoint", f"127.0.0.1:{http_port}", "--exporter", "otlp"]
    command += ["--otlp-exporter-endpoint", f"http://{address}", "--otlp-exporter-protocol", scheme]
    command += ["--otlp-exporter-compression", compression, "--otlp-grpc-max-recv-msg-size-mib", "64"]
    return Peer(command, folder / f"rotel-{grpc_port}.log", grpc_port, http_port)


def send(port: int, request: bytes, seconds: float = 60) -> None:
    """Export a request over gRPC, again and again until it is taken."""
    deadline = time.monotonic() + seconds
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
        while True:
            try:
                export(request, timeout=10)
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

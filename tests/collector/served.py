"""`spanmill serve` as the processes that it is: started, fed over gRPC, killed."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc

from spanmill.collector.config_values import Address

SPANMILL = Path(sys.executable).with_name("spanmill")
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
FREE = Address("127.0.0.1", 0)
"""Any port that is free, on loopback."""
QUICK = ("--settle", "0.2", "--flush-interval", "0.1")


T = TypeVar("T")


class Served:
    """A running service."""

    def __init__(self, out: Path, *options: str) -> None:
        self.errors = out.with_name(f"{out.name}.err")
        command = [
            str(SPANMILL),
            "serve",
            "--out",
            str(out),
            "--grpc",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            *options,
        ]
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        if self.process.stdout is None:
            raise ValueError("the service was started without a pipe")
        self.ready = self.process.stdout.readline()
        """The line that it prints when it is; empty if it ended before."""

    @property
    def address(self) -> str:
        """Of OTLP/gRPC."""
        found = re.search(r"grpc=(\S+)", self.ready)
        if not found:
            raise ValueError(f"the service did not start: {self.errors.read_text()}")
        return found[1]

    @property
    def http_address(self) -> str:
        """Of OTLP/HTTP and all else."""
        return self.ready.partition("http=")[2].partition(" ")[0]

    def indexer(self) -> int:
        """The process id of the running indexer."""
        return wait_for(lambda: self._children("indexer"))[0]

    def workers(self) -> list[int]:
        """The process ids of the workers that run; none if there is but one, which is the service."""
        return self._children("worker")

    def _children(self, module: str) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if f"spanmill.collector.{module}" in _command(int(pid))]

    def send(self, request: bytes) -> None:
        """Export a request; grpc.RpcError if it is not acknowledged."""
        with grpc.insecure_channel(self.address) as channel:
            export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
            export(request, timeout=10)

    def stop(self) -> int:
        """End it as a user does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        """End it as a power failure does, its indexer left to itself."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def wait_for(probe: Callable[[], T], seconds: float = 30) -> T:
    """What the probe gives, as soon as it is true; TimeoutError if it never is."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s")
        time.sleep(0.02)
    return found


def _command(pid: int) -> str:
    """The command line of a process, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False

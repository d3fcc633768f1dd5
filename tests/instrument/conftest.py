"""Receivers, spans in memory, and programs that emit from a process of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_sink import Sink, grpc_receiver, http_receiver

from spanmill.instrument import configure, flush

OURS = ("SPANMILL_", "OTEL_", "TRACEPARENT", "TRACESTATE", "BAGGAGE")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from the environment of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(OURS):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def usual_hangup() -> Generator[None]:
    """SIGHUP ends a process, also where the tests run under nohup: what it starts would ignore the signal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def grpc_sink() -> Generator[Sink]:
    """A gRPC receiver."""
    with grpc_receiver() as sink:
        yield sink


@pytest.fixture
def http_sink() -> Generator[Sink]:
    """An HTTP receiver."""
    with http_receiver() as sink:
        yield sink


@pytest.fixture
def emitted() -> Callable[[], list[ReadableSpan]]:
    """Asked for the spans that the test has emitted so far, in the order of their ends."""
    exporter = InMemorySpanExporter()
    configure(exporter=exporter)

    def spans() -> list[ReadableSpan]:
        assert flush(20)
        return list(exporter.get_finished_spans())

    return spans


@pytest.fixture
def start(clean_environment: None) -> Callable[..., subprocess.Popen[str]]:
    """Starts a Python program with the given environment beside the usual one."""

    def launch(program: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return launch

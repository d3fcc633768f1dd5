"""What real collectors make of each answer: the reason why spanmill answers as it does (docs/collectors.md)."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from made_spans import make_request, make_span
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from peer_processes import Peer, exporter, go_collector, otelcol, rotel, rotel_agent, send
from served import wait_for

pytestmark = pytest.mark.peer

BODY = make_request(make_span("t", "root"))
_grpc: Any = grpc


class Sink:
    """An OTLP/gRPC endpoint that gives its first request a certain answer, and takes all others."""

    def __init__(self, answer: str) -> None:
        self.calls = 0
        self._answer = answer
        self._lock = threading.Lock()
        self._server = _grpc.server(ThreadPoolExecutor(4))
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        handler = _grpc.unary_unary_rpc_method_handler(self._export)
        self._server.add_generic_rpc_handlers([_grpc.method_handlers_generic_handler(service, {"Export": handler})])
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        """End it."""
        self._server.stop(None).wait()

    def _export(self, body: bytes, context: Any) -> bytes:
        with self._lock:
            self.calls += 1
            first = self.calls == 1
        if not first:
            return b""
        if self._answer == "silence":
            time.sleep(7)
            return b""
        if self._answer == "partial":
            response = ExportTraceServiceResponse()
            response.partial_success.rejected_spans = 1
            return response.SerializeToString()
        code, _, retry = self._answer.partition(" ")
        if retry:
            status = Status(code=_grpc.StatusCode[code].value[0], message="later")
            status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=1)))
            context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
        return context.abort(_grpc.StatusCode[code], "no")


@pytest.fixture
def sink(request: pytest.FixtureRequest) -> Iterator[Sink]:
    """A sink with the answer of the test."""
    sink = Sink(request.param)
    yield sink
    sink.stop()


def calls_after(peer: Peer, sink: Sink) -> int:
    """How often a request is sent before its sender is content or gives up; a second request says that it is."""
    with peer:
        send(peer.port, BODY)
        wait_for(lambda: sink.calls >= 1)
        time.sleep(4 if sink.calls == 1 else 0)
    return sink.calls


ANSWERS = ["UNAVAILABLE", "UNAVAILABLE +", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED +", "UNAUTHENTICATED", "INTERNAL"]


@pytest.mark.parametrize(
    ("sink", "times"),
    [*zip(ANSWERS, [2, 2, 1, 2, 1, 1], strict=True), ("partial", 1), ("INVALID_ARGUMENT", 1)],
    indirect=["sink"],
)
def test_the_go_collector(tmp_path: Path, sink: Sink, times: int) -> None:
    """UNAVAILABLE is sent again, with RetryInfo (+) also RESOURCE_EXHAUSTED; all else is lost there at once."""
    otelcol()
    assert times == calls_after(go_collector(tmp_path, exporter(f"grpc://127.0.0.1:{sink.port}")), sink)


@pytest.mark.parametrize(
    ("sink", "times"), [*zip(ANSWERS, [2, 2, 2, 2, 1, 2], strict=True), ("partial", 1)], indirect=["sink"]
)
def test_rotel(tmp_path: Path, sink: Sink, times: int) -> None:
    """RESOURCE_EXHAUSTED and INTERNAL are sent again in any case, so only UNAVAILABLE means the same to everybody."""
    rotel()
    assert times == calls_after(rotel_agent(tmp_path, f"grpc://127.0.0.1:{sink.port}"), sink)


@pytest.mark.parametrize("sink", ["silence"], indirect=True)
def test_an_answer_that_is_late_is_asked_for_again(tmp_path: Path, sink: Sink) -> None:
    """After 5 s, the usual timeout: so spans come twice, and are taken once."""
    otelcol()
    with go_collector(tmp_path, exporter(f"grpc://127.0.0.1:{sink.port}")) as peer:
        send(peer.port, BODY)
        wait_for(lambda: sink.calls == 2)

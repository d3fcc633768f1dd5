import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from google.rpc.code_pb2 import INVALID_ARGUMENT
from made_spans import make_request, make_span
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from served import FREE, wait_for

from spanmill.collector import forward
from spanmill.collector.config import ServeConfig
from spanmill.collector.config_values import Address
from spanmill.collector.forward import Forwarder, Request
from spanmill.collector.ingest import Answer, Ingest
from spanmill.collector.journal import JournalWriter, Kind, read
from spanmill.collector.receive import Receiver, start_receiver

PROTO = {"Content-Type": "application/x-protobuf"}
TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
BODY = make_request(make_span("t", "root"))

_grpc: Any = grpc
Start = Callable[..., Receiver]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that a test has time for."""
    monkeypatch.setattr(forward, "_WAIT_S", (0.05, 0.2))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts receivers, each with a journal of its name."""
    running: list[tuple[Receiver, JournalWriter]] = []

    def start(name: str, **options: Any) -> Receiver:
        journal = JournalWriter(tmp_path / name)
        given: dict[str, Any] = {"grpc": FREE, "http": FREE, **options}
        running.append((start_receiver(ServeConfig(out=tmp_path, journal=tmp_path / name, **given), journal), journal))
        return running[-1][0]

    yield start
    for receiver, journal in reversed(running):
        receiver.stop(2)
        journal.close()


def kept(tmp_path: Path, name: str) -> list[tuple[Kind, bytes]]:
    """What a journal holds."""
    return [(entry.kind, entry.body) for entry in read(tmp_path / name)]


def url_of(receiver: Receiver, scheme: str) -> str:
    """The address of a receiver as an endpoint."""
    return f"{scheme}://{receiver.grpc_address if scheme == 'grpc' else receiver.http_address}"


def as_json(body: bytes) -> bytes:
    """A request in OTLP's JSON."""
    request = MessageToDict(ExportTraceServiceRequest.FromString(body))
    for span, own in (
        (span, own)
        for group, given in zip(
            request["resourceSpans"], ExportTraceServiceRequest.FromString(body).resource_spans, strict=True
        )
        for span, own in zip(group["scopeSpans"][0]["spans"], given.scope_spans[0].spans, strict=True)
    ):
        span |= {"traceId": own.trace_id.hex(), "spanId": own.span_id.hex()}
    return json.dumps(request).encode()


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_every_request_goes_on(start: Start, tmp_path: Path, scheme: str) -> None:
    """However it came: traces, logs and metrics, protobuf and JSON, byte by byte what was received."""
    last = start("last")
    first = start("first", forward=url_of(last, scheme))
    with _grpc.insecure_channel(str(first.grpc_address)) as channel:
        channel.unary_unary(TRACES, _registered_method=False)(BODY, compression=_grpc.Compression.Gzip)
        channel.unary_unary(METRICS)(b"\x0a\x00")
    with httpx.Client(base_url=f"http://{first.http_address}") as client:
        assert 200 == client.post("/v1/traces", content=BODY, headers=PROTO).status_code
        answer = client.post("/v1/traces", content=as_json(BODY), headers={"Content-Type": "application/json"})
        assert (200, {}) == (answer.status_code, answer.json())
        metrics = client.get("/metrics")
    wait_for(lambda: last.counts() == {"requests": 3, "spans": 3, "ignored_metrics": 1})
    assert 'spanmill_forward_requests_total{result="dropped_full"} 0.0' in metrics.text
    as_it_went = Kind.TRACES_JSON if scheme == "http" else Kind.TRACES_PROTO
    expected = [(Kind.TRACES_PROTO, BODY)] * 2
    expected.append((as_it_went, as_json(BODY) if scheme == "http" else BODY))
    assert sorted(expected) == sorted(kept(tmp_path, "last"))


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_an_endpoint_that_is_away_holds_nothing_up(start: Start, tmp_path: Path, scheme: str) -> None:
    """Requests are acknowledged all the same, wait for it within the limit, and go when it is there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    first = start("first", forward=f"{scheme}://127.0.0.1:{port}", forward_queue_mib=1)
    large = make_request(make_span("t", "large", attributes={"x": "x" * 300_000}))
    with httpx.Client(base_url=f"http://{first.http_address}", headers=PROTO) as client:
        for _ in range(5):
            assert 200 == client.post("/v1/traces", content=large).status_code
        assert 5 == len(kept(tmp_path, "first"))
        assert 'result="dropped_full"} 2.0' in client.get("/metrics").text
        last = start("last", **{scheme: Address("127.0.0.1", port)})
        wait_for(lambda: last.counts() == {"requests": 3, "spans": 3})
        assert 200 == client.post("/v1/traces", content=BODY).status_code
    wait_for(lambda: last.counts() == {"requests": 4, "spans": 4})


class Refusing(Ingest):
    """Refuses the first request with an answer."""

    answers: list[Answer]

    def closed(self) -> Answer | None:
        """The next answer that is left."""
        return self.answers.pop(0) if self.answers else None


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_what_is_refused_for_good_is_dropped(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    """And counted; what is refused for now is sent again."""
    monkeypatch.setattr("spanmill.collector.receive.Ingest", Refusing)
    retry = Answer(14, "later")
    monkeypatch.setattr(Refusing, "answers", [Answer(INVALID_ARGUMENT, "never"), retry, retry], raising=False)
    last = start("last")
    forwarder = Forwarder(url_of(last, scheme), 1 << 20, [("authorization", "Bearer a-secret")])
    forwarder.start()
    forwarder.offer(Request("traces", False, BODY))
    wait_for(lambda: forwarder.counts()["dropped_refused"])
    forwarder.offer(Request("traces", False, BODY))
    wait_for(lambda: forwarder.counts()["sent"])
    forwarder.offer(Request("traces", True, b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}'))
    wait_for(lambda: forwarder.counts()["dropped_refused"] == 2 or forwarder.counts()["sent"] == 2)
    forwarder.stop(1)
    counts = forwarder.counts()
    assert (2, 0, 0) == (counts["retried"], counts["dropped_full"], counts["dropped_stopped"])
    assert {"http": (2, 1), "grpc": (1, 2)}[scheme] == (counts["sent"], counts["dropped_refused"])
    assert "a-secret" not in caplog.text


def test_stopping_gives_what_waits_a_last_chance(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Until its time is over; then it says how many were not passed on."""
    last = start("last")
    forwarder = Forwarder(url_of(last, "grpc"), 1 << 20)
    forwarder.start()
    for _ in range(50):
        forwarder.offer(Request("traces", False, BODY))
    forwarder.stop(10)
    assert 50 == forwarder.counts()["sent"]
    away = Forwarder("http://127.0.0.1:9", 1 << 20)
    away.start()
    for _ in range(10):
        away.offer(Request("traces", False, BODY))
    begun = time.monotonic()
    away.stop(0.3)
    assert 10 == away.counts()["dropped_stopped"]
    assert 5 > time.monotonic() - begun
    assert "were not passed on to --forward http://127.0.0.1:9" in caplog.messages[-1]

import gzip
import json
import logging
import os
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from spanmill.collector.config import ServeConfig
from spanmill.collector.config_values import Address
from spanmill.collector.journal import JournalWriter, Kind, read
from spanmill.collector.receive import Receiver, start_receiver
from spanmill.collector.rewards import decode
from spanmill.triplets.records import Reward

PROTO = {"Content-Type": "application/x-protobuf"}
JSON = {"Content-Type": "application/json; charset=utf-8"}


def traces(name: str = "call", span_id: bytes = b"12345678") -> bytes:
    """A request with one span; without a valid id it is rejected."""
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = bytes(range(16)), span_id, name
    return request.SerializeToString()


def traces_json(span_id: str = "0102030405060708") -> bytes:
    """The same in JSON."""
    span = {"traceId": bytes(range(16)).hex(), "spanId": span_id, "name": "call"}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()


def journaled(tmp_path: Path) -> list[tuple[Kind, bytes]]:
    """What stands in the journal."""
    return [(entry.kind, entry.body) for entry in read(tmp_path / "journal")]


@pytest.fixture
def client(receiver: Receiver) -> Iterator[httpx.Client]:
    """A client of the receiver with default limits."""
    with httpx.Client(base_url=f"http://{receiver.http_address}", timeout=30) as client:
        yield client


@pytest.fixture
def small_client(small_receiver: Receiver) -> Iterator[httpx.Client]:
    """A client of the receiver that takes 1 MiB."""
    with httpx.Client(base_url=f"http://{small_receiver.http_address}", timeout=30) as client:
        yield client


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip, Compression.Deflate])
def test_spans_of_the_sdk(receiver: Receiver, tmp_path: Path, compression: Compression) -> None:
    """What the Python SDK exports is in the journal when its exporter returns, decompressed."""
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"http://{receiver.http_address}/v1/traces", compression=compression)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("t").start_span("call", attributes={"text": "x" * 1000}).end()
    found = journaled(tmp_path)
    provider.shutdown()

    ((kind, body),) = found
    (span,) = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert (kind, span.name) == (Kind.TRACES_PROTO, "call")
    assert receiver.counts() == {"requests": 1, "spans": 1}


def test_logs_of_the_sdk(receiver: Receiver, tmp_path: Path) -> None:
    """Log records go the same way."""
    provider = LoggerProvider(shutdown_on_exit=False)
    exporter = OTLPLogExporter(f"http://{receiver.http_address}/v1/logs")
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    provider.get_logger("t").emit(body="hello", event_name="spanmill.reward")
    found = journaled(tmp_path)
    provider.shutdown()

    ((kind, body),) = found
    (record,) = ExportLogsServiceRequest.FromString(body).resource_logs[0].scope_logs[0].log_records
    assert (kind, record.body.string_value) == (Kind.LOGS_PROTO, "hello")


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/traces", Kind.TRACES_JSON, traces_json()),
        ("/v1/logs", Kind.LOGS_JSON, b'{"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": "e"}]}]}]}'),
    ],
)
def test_json(client: httpx.Client, tmp_path: Path, path: str, kind: Kind, body: bytes) -> None:
    """JSON is journaled as it came and answered in JSON."""
    answer = client.post(path, content=body, headers=JSON)
    assert (answer.status_code, answer.headers["content-type"], answer.json()) == (200, "application/json", {})
    assert journaled(tmp_path) == [(kind, body)]


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstandard.compress), ("identity", bytes)],
)
def test_encodings(client: httpx.Client, tmp_path: Path, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    """The journal holds the decompressed body; the answer is in the request's type."""
    body = traces("x" * 3_000_000)
    answer = client.post("/v1/traces", content=pack(body), headers=PROTO | {"Content-Encoding": encoding})
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, "application/x-protobuf", b"")
    assert journaled(tmp_path) == [(Kind.TRACES_PROTO, body)]


@pytest.mark.parametrize(("headers", "body"), [(PROTO, b""), (JSON, b"{}")])
@pytest.mark.parametrize("path", ["/v1/traces", "/v1/logs"])
def test_an_empty_request_succeeds(
    client: httpx.Client, tmp_path: Path, path: str, headers: dict[str, str], body: bytes
) -> None:
    """Nothing is journaled for it."""
    assert client.post(path, content=body, headers=headers).status_code == 200
    assert journaled(tmp_path) == []


def test_rejected_spans_are_a_partial_success(client: httpx.Client, tmp_path: Path) -> None:
    """In either type; the request is journaled as it came."""
    message = "1 spans have no valid trace id and span id; they are quarantined"
    answer = client.post("/v1/traces", content=traces(span_id=b""), headers=PROTO)
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert (answer.status_code, partial.rejected_spans, partial.error_message) == (200, 1, message)
    answer = client.post("/v1/traces", content=traces_json("00"), headers=JSON)
    assert answer.json() == {"partialSuccess": {"rejectedSpans": "1", "errorMessage": message}}
    assert journaled(tmp_path) == [(Kind.TRACES_PROTO, traces(span_id=b"")), (Kind.TRACES_JSON, traces_json("00"))]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (PROTO, b"\xff\xff"),
        (PROTO | {"Content-Encoding": "gzip"}, b"no gzip"),
        (PROTO | {"Content-Encoding": "gzip"}, gzip.compress(traces())[:-1]),
        (PROTO | {"Content-Encoding": "zstd"}, zstandard.compress(traces())[:-1]),
    ],
    ids=["no protobuf", "no gzip", "cut gzip", "cut zstd"],
)
def test_malformed_bytes_are_not_to_be_sent_again(
    client: httpx.Client, tmp_path: Path, headers: dict[str, str], body: bytes
) -> None:
    """400 with a google.rpc.Status; nothing is journaled."""
    answer = client.post("/v1/traces", content=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/x-protobuf")
    assert Status.FromString(answer.content).code == INVALID_ARGUMENT
    assert journaled(tmp_path) == []


def test_malformed_json_is_answered_in_json(client: httpx.Client) -> None:
    """400 with a google.rpc.Status in JSON."""
    answer = client.post("/v1/traces", content=b"[", headers=JSON)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    assert answer.json()["code"] == INVALID_ARGUMENT
    assert answer.json()["message"] != ""


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v1/spans", PROTO, 404),
        ("GET", "/v1/traces", {}, 405),
        ("POST", "/v1/traces", {}, 415),
        ("POST", "/v1/traces", {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/traces", PROTO | {"Content-Encoding": "br"}, 415),
        ("POST", "/v1/metrics", {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/rewards", {"Content-Type": "text/plain"}, 415),
    ],
)
def test_what_is_not_offered(
    client: httpx.Client, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    """The usual codes, with a Status in the request's type, in JSON if that is none of ours."""
    answer = client.request(method, path, content=b"" if method == "POST" else None, headers=headers)
    assert answer.status_code == status
    if headers.get("Content-Type") == PROTO["Content-Type"]:
        message = Status.FromString(answer.content).message
    else:
        message = answer.json()["message"]
    assert message != ""
    if status == 405:
        assert answer.headers["allow"] == "POST"
    if "Content-Encoding" in headers:
        assert answer.headers["accept-encoding"] == "gzip, x-gzip, deflate, zstd"


def test_a_request_of_65_mib_is_too_large(client: httpx.Client, tmp_path: Path) -> None:
    """413, which no sender repeats; one of 63 MiB passes on the same connection."""
    answer = client.post("/v1/traces", content=traces("x" * (65 << 20)), headers=PROTO)
    assert (answer.status_code, Status.FromString(answer.content).code) == (413, RESOURCE_EXHAUSTED)
    assert "retry-after" not in answer.headers
    assert client.post("/v1/traces", content=traces("x" * (63 << 20)), headers=PROTO).status_code == 200
    assert [len(body) >> 20 for _, body in journaled(tmp_path)] == [63]


def test_a_chunked_request_is_bounded_as_it_comes(small_client: httpx.Client, tmp_path: Path) -> None:
    """A body that does not say its length is cut off at the limit, and taken below it."""

    def pieces(body: bytes) -> Iterable[bytes]:
        return (body[start : start + 65536] for start in range(0, len(body), 65536))

    body = traces("x" * 900_000)
    assert small_client.post("/v1/traces", content=pieces(traces("x" * (3 << 20))), headers=PROTO).status_code == 413
    assert small_client.post("/v1/traces", content=pieces(body), headers=PROTO).status_code == 200
    assert journaled(tmp_path) == [(Kind.TRACES_PROTO, body)]


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstandard.compress)]
)
def test_a_bomb_is_too_large(
    small_client: httpx.Client, tmp_path: Path, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    """The limit holds after decompression."""
    bomb = pack(traces("x" * (50 << 20)))
    answer = small_client.post("/v1/traces", content=bomb, headers=PROTO | {"Content-Encoding": encoding})
    assert (answer.status_code, journaled(tmp_path)) == (413, [])


@pytest.mark.parametrize("packed", [False, True])
def test_over_the_byte_budget_is_sent_again(
    small_receiver: Receiver, small_client: httpx.Client, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """503 with Retry-After and RetryInfo while other requests wait for the disk; decompressed bytes count, too."""
    gate = threading.Event()
    waiting = threading.Event()

    def wait(fd: int) -> None:
        waiting.set()
        gate.wait()

    body = traces("b" * 700_000)
    headers = PROTO | ({"Content-Encoding": "gzip"} if packed else {})
    monkeypatch.setattr("spanmill.collector.journal._sync", wait)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(small_client.post, "/v1/traces", content=traces("a" * 700_000), headers=PROTO)
        waiting.wait()
        answer = small_client.post("/v1/traces", content=gzip.compress(body) if packed else body, headers=headers)
        gate.set()
        assert first.result().status_code == 200
    status = Status.FromString(answer.content)
    retry = RetryInfo()
    assert (answer.status_code, answer.headers["retry-after"], status.code) == (503, "1", UNAVAILABLE)
    assert status.details[0].Unpack(retry)
    assert retry == RetryInfo(retry_delay=Duration(seconds=1))
    assert small_receiver.counts() == {"requests": 1, "spans": 1, "overloaded": 1}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_no_loss(tiny_disk: Path) -> None:
    """503 while the disk is full; what was acknowledged is there, and once there is room requests are taken again."""
    (tiny_disk / "ballast").write_bytes(bytes(500_000))
    config = ServeConfig(out=tiny_disk, grpc=Address("127.0.0.1", 0), http=Address("127.0.0.1", 0), min_free_mib=0)
    acknowledged: list[bytes] = []
    with JournalWriter(config.journal_folder) as journal:
        receiver = start_receiver(config, journal)
        with httpx.Client(base_url=f"http://{receiver.http_address}", timeout=30) as client:
            answers: list[int] = []
            for number in range(20):
                body = traces(f"{number}" * 60_000)
                answers.append(client.post("/v1/traces", content=body, headers=PROTO).status_code)
                if answers[-1] == 200:
                    acknowledged.append(body)
            (tiny_disk / "ballast").unlink()
            last = client.post("/v1/traces", content=traces("last"), headers=PROTO).status_code
        receiver.stop(5)
    assert set(answers) == {200, 503}
    assert last == 200
    damage: dict[Any, int] = {}
    kept = [entry.body for entry in read(config.journal_folder, complete=True, damage=damage)]
    assert (kept, damage) == ([*acknowledged, traces("last")], {})


def test_an_unforeseen_error_is_sent_again(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """503, not 500, which no sender repeats; the log has the place, and nothing of the content."""

    def fail(kind: Kind, body: bytes) -> None:
        raise KeyError(body.decode(errors="replace"))

    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG):
        patch.setattr("spanmill.collector.ingest.check", fail)
        answer = client.post("/v1/traces", content=traces("a secret prompt"), headers=PROTO)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "unforeseen KeyError" in caplog.text
    assert "secret" not in caplog.text


def test_a_sender_that_stalls_is_let_go(
    receiver: Receiver, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a request does not keep its share of the byte budget for ever."""
    monkeypatch.setattr("spanmill.collector.receive_http._UPLOAD_TIMEOUT_S", 0.05)
    with socket.create_connection(receiver.http_address) as peer:
        peer.sendall(b"POST /v1/traces HTTP/1.1\r\nHost: h\r\nContent-Type: application/x-protobuf\r\n")
        peer.sendall(b"Content-Length: 100\r\n\r\nhalf")
        assert peer.recv(12) == b"HTTP/1.1 503"
    assert receiver.counts() == {"stalled": 1}


def test_a_sender_that_goes_away_is_no_error(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """Half a request is neither journaled nor logged."""
    with socket.create_connection(receiver.http_address) as peer:
        peer.sendall(b"POST /v1/traces HTTP/1.1\r\nHost: h\r\nContent-Type: application/x-protobuf\r\n")
        peer.sendall(b"Content-Length: 100\r\n\r\nhalf")
        time.sleep(0.1)
    time.sleep(0.1)
    assert (receiver.counts(), caplog.text) == ({}, "")


@pytest.mark.parametrize(("headers", "body"), [(PROTO, b"whatever"), (JSON, b"{}")])
def test_metrics_are_counted_and_dropped(
    receiver: Receiver, client: httpx.Client, tmp_path: Path, headers: dict[str, str], body: bytes
) -> None:
    """A sender of all three signals is not made to fail, or to retry, by its metrics."""
    assert client.post("/v1/metrics", content=body, headers=headers).status_code == 200
    assert (journaled(tmp_path), receiver.counts()) == ([], {"ignored_metrics": 1})


def test_rewards(client: httpx.Client, tmp_path: Path) -> None:
    """One record for all that were posted together, each with the time at which it came."""
    before = time.time_ns()
    answer = client.post("/v1/rewards", json=[{"rollout_id": "a", "value": 1}, {"rollout_id": "b", "value": False}])
    assert (answer.status_code, answer.json()) == (200, {"accepted": 2})
    ((kind, body),) = journaled(tmp_path)
    received_ns = next(read(tmp_path / "journal")).received_ns
    assert before <= received_ns <= time.time_ns()
    assert (kind, decode(body)) == (
        Kind.REWARDS,
        [Reward("a", 1.0, received_ns=received_ns), Reward("b", 0.0, received_ns=received_ns)],
    )


def test_no_rewards(client: httpx.Client, tmp_path: Path) -> None:
    """An empty list is taken, and journals nothing."""
    assert client.post("/v1/rewards", json=[]).json() == {"accepted": 0}
    assert journaled(tmp_path) == []


def test_a_wrong_reward_is_named(client: httpx.Client, tmp_path: Path) -> None:
    """400 with the field; none of the others is taken."""
    answer = client.post("/v1/rewards", json=[{"rollout_id": "a", "value": 1}, {"rollout_id": "b", "value": "1"}])
    assert (answer.status_code, answer.json()) == (
        400,
        {"code": INVALID_ARGUMENT, "message": 'rewards[1].value: expected a number or boolean, found "1"'},
    )
    assert journaled(tmp_path) == []


def test_flush(client: httpx.Client, tmp_path: Path) -> None:
    """A flush stands in the journal behind all that was acknowledged before it."""
    client.post("/v1/traces", content=traces(), headers=PROTO)
    answer = client.post("/v1/flush")
    assert (answer.status_code, answer.json()) == (202, {"accepted": 1})
    assert journaled(tmp_path) == [(Kind.TRACES_PROTO, traces()), (Kind.FLUSH, b"")]


def test_health_and_further_routes(tmp_path: Path, journal: JournalWriter) -> None:
    """The application has room for the routes of others."""

    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    config = ServeConfig(out=tmp_path, grpc=Address("127.0.0.1", 0), http=Address("::1", 0))
    receiver = start_receiver(config, journal, [Route("/hello", hello)])
    answers = [httpx.get(f"http://{receiver.http_address}/{path}").text for path in ("healthz", "hello")]
    receiver.stop(5)
    assert answers == ["ok\n", "hello"]
    assert str(receiver.http_address).startswith("[::1]:")


def test_stopping_loses_nothing(tmp_path: Path, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in flight when the receiver stops is acknowledged and in the journal, or its connection ends."""
    sync = os.fdatasync

    def slow(fd: int) -> None:
        time.sleep(0.02)
        sync(fd)

    monkeypatch.setattr("spanmill.collector.journal._sync", slow)
    config = ServeConfig(out=tmp_path, grpc=Address("127.0.0.1", 0), http=Address("127.0.0.1", 0))
    receiver = start_receiver(config, journal)
    acknowledged: list[bytes] = []
    refused: list[type[Exception]] = []

    def send(sender: int) -> None:
        with httpx.Client(base_url=f"http://{receiver.http_address}") as client:
            for number in range(10_000):
                body = traces(f"{sender}.{number}")
                try:
                    assert client.post("/v1/traces", content=body, headers=PROTO).status_code == 200
                except httpx.TransportError as error:
                    refused.append(type(error))
                    return
                acknowledged.append(body)

    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(send, sender) for sender in range(8)]
        while len(acknowledged) < 20:
            time.sleep(0.005)
        receiver.stop(5)
    assert [done.exception() for done in sent] == [None] * 8
    kept = {body for _, body in journaled(tmp_path)}
    assert [body for body in acknowledged if body not in kept] == []
    assert len(refused) == 8


def test_stopping_does_not_wait_for_ever(
    tmp_path: Path, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a request that does not end, `stop` returns all the same; the request was not acknowledged."""
    gate = threading.Event()
    waiting = threading.Event()

    def wait(fd: int) -> None:
        waiting.set()
        gate.wait()

    monkeypatch.setattr("spanmill.collector.journal._sync", wait)
    config = ServeConfig(out=tmp_path, grpc=Address("127.0.0.1", 0), http=Address("127.0.0.1", 0))
    receiver = start_receiver(config, journal)
    with ThreadPoolExecutor(1) as pool:
        url = f"http://{receiver.http_address}/v1/traces"
        sent = pool.submit(httpx.post, url, content=traces(), headers=PROTO, timeout=20)
        waiting.wait()
        receiver.stop(1)
        gate.set()
        failed = sent.exception() or sent.result().status_code
    assert failed != 200

import gzip
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import INVALID_ARGUMENT, UNAVAILABLE
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from spanmill.collector.config import ServeConfig, load_config
from spanmill.collector.config_values import Address
from spanmill.collector.journal import JournalWriter, Kind, read
from spanmill.collector.receive import Receiver, start_receiver
from spanmill.errors import ListenError

SERVICE = "/opentelemetry.proto.collector.{0}.v1.{1}Service/Export"
TRACES = SERVICE.format("trace", "Trace")

_grpc: Any = grpc


def traces(name: str = "call", span_id: bytes = b"12345678") -> bytes:
    """A request with one span; without a valid id it is rejected."""
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = bytes(range(16)), span_id, name
    return request.SerializeToString()


@contextmanager
def exporting(receiver: Receiver, method: str = TRACES) -> Generator[Callable[..., bytes]]:
    """A raw client of one method."""
    with _grpc.insecure_channel(str(receiver.grpc_address), [("grpc.max_send_message_length", -1)]) as channel:
        yield channel.unary_unary(method)


def journaled(tmp_path: Path) -> list[tuple[Kind, bytes]]:
    """What stands in the journal."""
    return [(entry.kind, entry.body) for entry in read(tmp_path / "journal")]


def refused(export: Callable[..., bytes], body: bytes) -> tuple[Any, Status | None, RetryInfo | None]:
    """The code of a failed export, and what its trailers say."""
    with pytest.raises(grpc.RpcError) as caught:
        export(body, timeout=30)
    error: Any = caught.value
    trailers = dict(error.trailing_metadata())
    status = trailers.get("grpc-status-details-bin")
    retry = trailers.get("google.rpc.retryinfo-bin")
    return error.code(), status and Status.FromString(status), retry and RetryInfo.FromString(retry)


def retry_info(status: Status | None) -> RetryInfo:
    """The RetryInfo among the details of a status."""
    assert status is not None
    info = RetryInfo()
    assert status.details[0].Unpack(info)
    return info


@pytest.mark.parametrize("compression", ["NoCompression", "Gzip", "Deflate"])
def test_spans_of_the_sdk(receiver: Receiver, tmp_path: Path, compression: str) -> None:
    """What the Python SDK exports is in the journal when its exporter returns, decompressed."""
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = OTLPSpanExporter(
        f"http://{receiver.grpc_address}", insecure=True, compression=getattr(_grpc.Compression, compression)
    )
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
    exporter = OTLPLogExporter(f"http://{receiver.grpc_address}", insecure=True)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    provider.get_logger("t").emit(body="hello", event_name="spanmill.reward")
    found = journaled(tmp_path)
    provider.shutdown()

    ((kind, body),) = found
    (record,) = ExportLogsServiceRequest.FromString(body).resource_logs[0].scope_logs[0].log_records
    assert (kind, record.body.string_value) == (Kind.LOGS_PROTO, "hello")
    assert receiver.counts() == {"requests": 1, "log_records": 1}


def test_metrics_are_counted_and_dropped(receiver: Receiver, tmp_path: Path) -> None:
    """A sender of all three signals is not made to fail, or to retry, by its metrics."""
    with exporting(receiver, SERVICE.format("metrics", "Metrics")) as export:
        assert export(b"whatever") == b""
    assert (journaled(tmp_path), receiver.counts()) == ([], {"ignored_metrics": 1})


def test_an_empty_request_succeeds(receiver: Receiver, tmp_path: Path) -> None:
    """Nothing is journaled for it."""
    with exporting(receiver) as export:
        assert export(b"") == b""
    assert journaled(tmp_path) == []


def test_rejected_spans_are_a_partial_success(receiver: Receiver, tmp_path: Path) -> None:
    """They are counted in the answer, and the request is journaled as it came: its spans are for quarantine."""
    body = traces() + traces(span_id=b"")
    with exporting(receiver) as export:
        answer = ExportTraceServiceResponse.FromString(export(body))
    assert answer.partial_success.rejected_spans == 1
    assert answer.partial_success.error_message == "1 spans have no valid trace id and span id; they are quarantined"
    assert journaled(tmp_path) == [(Kind.TRACES_PROTO, body)]


@pytest.mark.parametrize(
    "body",
    [b"\xff\xff", b"\x0a\x05abc", gzip.compress(b"\xff"), gzip.compress(traces())[:-4]],
    ids=["no protobuf", "cut protobuf", "no protobuf in gzip", "cut gzip"],
)
def test_malformed_bytes_are_not_to_be_sent_again(receiver: Receiver, tmp_path: Path, body: bytes) -> None:
    """INVALID_ARGUMENT, with a status that says why and no RetryInfo; nothing is journaled."""
    with exporting(receiver) as export:
        code, status, retry = refused(export, body)
    assert (code, retry) == (_grpc.StatusCode.INVALID_ARGUMENT, None)
    assert status is not None
    assert (status.code, len(status.details)) == (INVALID_ARGUMENT, 0)
    assert (journaled(tmp_path), receiver.counts()) == ([], {"malformed": 1})


def test_a_request_of_65_mib_is_too_large(receiver: Receiver, tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED without RetryInfo, which no sender repeats; one of 63 MiB passes."""
    with exporting(receiver) as export:
        code, _, retry = refused(export, traces("x" * (65 << 20)))
        assert export(traces("x" * (63 << 20))) == b""
    assert (code, retry) == (_grpc.StatusCode.RESOURCE_EXHAUSTED, None)
    assert [len(body) >> 20 for _, body in journaled(tmp_path)] == [63]


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_bomb_is_too_large(small_receiver: Receiver, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    """The limit holds after decompression, too."""
    with exporting(small_receiver) as export:
        code, _, retry = refused(export, pack(traces("x" * (50 << 20))))
    assert (code, retry) == (_grpc.StatusCode.RESOURCE_EXHAUSTED, None)
    assert (journaled(tmp_path), small_receiver.counts()) == ([], {"too_large": 1})


def test_over_the_byte_budget_is_sent_again(
    small_receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UNAVAILABLE with RetryInfo in both trailers while other requests wait for the disk; then it is taken."""
    gate = threading.Event()
    waiting = threading.Event()

    def wait(fd: int) -> None:
        waiting.set()
        gate.wait()

    monkeypatch.setattr("spanmill.collector.journal._sync", wait)
    with exporting(small_receiver) as export, ThreadPoolExecutor(1) as pool:
        first = pool.submit(export, traces("a" * 700_000))
        waiting.wait()
        code, status, retry = refused(export, traces("b" * 700_000))
        gate.set()
        assert first.result() == b""
        assert export(traces("b" * 700_000)) == b""
    assert code == _grpc.StatusCode.UNAVAILABLE
    assert retry == retry_info(status) == RetryInfo(retry_delay=Duration(seconds=1))
    assert small_receiver.counts() == {"requests": 2, "spans": 2, "overloaded": 1}


def test_a_journal_that_cannot_be_written_is_no_loss(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UNAVAILABLE with RetryInfo while the disk is full; once there is room the same request is acknowledged."""

    def full(fd: int, buffers: object) -> int:
        raise OSError(28, os.strerror(28))

    with exporting(receiver) as export:
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            code, status, retry = refused(export, traces())
        assert export(traces()) == b""
    assert code == _grpc.StatusCode.UNAVAILABLE
    assert status is not None
    assert (status.code, retry) == (UNAVAILABLE, retry_info(status))
    assert "No space left on device" in status.message
    assert journaled(tmp_path) == [(Kind.TRACES_PROTO, traces())]


def test_an_unforeseen_error_is_sent_again(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """UNAVAILABLE, never UNKNOWN, which would lose the spans; the log has the place, and nothing of the content."""

    def fail(kind: Kind, body: bytes) -> None:
        raise KeyError(body.decode(errors="replace"))

    with exporting(receiver) as export, monkeypatch.context() as patch, caplog.at_level(logging.DEBUG):
        patch.setattr("spanmill.collector.ingest.check", fail)
        code, _, retry = refused(export, traces("a secret prompt"))
    assert code == _grpc.StatusCode.UNAVAILABLE
    assert retry is not None
    assert "unforeseen KeyError" in caplog.text
    assert "secret" not in caplog.text


def test_many_senders(receiver: Receiver, tmp_path: Path) -> None:
    """32 senders at once: each acknowledged request is in the journal, once."""
    bodies = [[traces(f"{sender}.{number}") for number in range(10)] for sender in range(32)]

    def send(mine: list[bytes]) -> None:
        with exporting(receiver) as export:
            for body in mine:
                assert export(body) == b""

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(send, bodies))
    assert sorted(journaled(tmp_path)) == sorted((Kind.TRACES_PROTO, body) for mine in bodies for body in mine)


def test_stopping_loses_nothing(tmp_path: Path, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in flight when the receiver stops is acknowledged and in the journal, or refused as to be repeated."""
    sync = os.fdatasync

    def slow(fd: int) -> None:
        time.sleep(0.02)
        sync(fd)

    monkeypatch.setattr("spanmill.collector.journal._sync", slow)
    config = ServeConfig(out=tmp_path, grpc=Address("127.0.0.1", 0), http=Address("127.0.0.1", 0))
    receiver = start_receiver(config, journal)
    acknowledged: list[bytes] = []
    codes: list[Any] = []

    def send(sender: int) -> None:
        with exporting(receiver) as export:
            for number in range(10_000):
                try:
                    export(traces(f"{sender}.{number}"))
                except grpc.RpcError as error:
                    raised: Any = error
                    codes.append(raised.code())
                    return
                acknowledged.append(traces(f"{sender}.{number}"))

    with ThreadPoolExecutor(8) as pool:
        for sender in range(8):
            pool.submit(send, sender)
        while len(acknowledged) < 20:
            time.sleep(0.005)
        receiver.stop(5)
    kept = {body for _, body in journaled(tmp_path)}
    assert [body for body in acknowledged if body not in kept] == []
    assert set(codes) <= {_grpc.StatusCode.UNAVAILABLE, _grpc.StatusCode.CANCELLED}
    assert len(codes) == 8


@pytest.mark.parametrize("flag", ["grpc", "http"])
def test_a_busy_port_stops_the_start(tmp_path: Path, journal: JournalWriter, flag: str) -> None:
    """One line with option, address and cause; the other port is free again."""
    other = "http" if flag == "grpc" else "grpc"
    with socket.create_server(("127.0.0.1", 0)) as busy:
        addresses = {flag: Address("127.0.0.1", busy.getsockname()[1]), other: Address("127.0.0.1", 0)}
        with pytest.raises(ListenError) as caught:
            start_receiver(load_config({"out": tmp_path, **addresses}, {}, None), journal)
    assert str(caught.value) == f"--{flag} {addresses[flag]} cannot be listened on: Address already in use"


@pytest.mark.parametrize("flag", ["grpc", "http"])
def test_two_receivers_do_not_share_a_port(
    receiver: Receiver, tmp_path: Path, journal: JournalWriter, flag: str
) -> None:
    """A second one is refused, where SO_REUSEPORT would give each half of the requests."""
    addresses = {"grpc": Address("127.0.0.1", 0), "http": Address("127.0.0.1", 0)}
    addresses[flag] = receiver.grpc_address if flag == "grpc" else receiver.http_address
    with pytest.raises(ListenError, match="Address already in use"):
        start_receiver(load_config({"out": tmp_path, **addresses}, {}, None), journal)


@pytest.mark.parametrize(
    ("host", "cause"),
    [("no-such-host.invalid", "Name or service not known|failure in name"), ("192.0.2.1", "Cannot assign")],
)
def test_an_address_that_is_not_ours_stops_the_start(
    tmp_path: Path, journal: JournalWriter, host: str, cause: str
) -> None:
    """The cause is the system's."""
    config = ServeConfig(out=tmp_path, grpc=Address(host, 4317), http=Address("127.0.0.1", 0))
    with pytest.raises(ListenError, match=f"--grpc {host}:4317 cannot be listened on: .*({cause})"):
        start_receiver(config, journal)


def test_a_stop_ends_whatever_is_just_coming(tmp_path: Path) -> None:
    """New calls are answered or refused until the last, and then nothing is waited for."""
    for number in range(8):
        done = threading.Event()
        with JournalWriter(tmp_path / str(number)) as journal:
            free = Address("127.0.0.1", 0)
            config = ServeConfig(out=tmp_path, journal=journal.directory, grpc=free, http=free)
            receiver = start_receiver(config, journal)

            def send(receiver: Receiver = receiver, done: threading.Event = done) -> None:
                with exporting(receiver) as export:
                    while not done.is_set():
                        with suppress(grpc.RpcError):
                            export(traces("x"))

            threads = [threading.Thread(target=send) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.01 * number)
            begun = time.monotonic()
            receiver.stop(30)
            assert time.monotonic() - begun < 15
            done.set()
            for thread in threads:
                thread.join()

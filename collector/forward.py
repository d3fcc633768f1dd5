"""`--forward`: every acknowledged request goes on to another OTLP endpoint as well.

It has a queue of its own, in memory and bounded, and never holds up an acknowledgement: what finds no room is counted
and not passed on. The journal has it all the same. What the endpoint cannot take now is sent again until it can.
"""

import base64
import json
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spanmill.collector.figures import FORWARDED, Figures

_SENDERS: Final = 4
_TIMEOUT_S: Final = 30.0
_WAIT_S: Final = (0.25, 10.0)
"""The first and the longest wait before a request is sent again."""
_RETRY_STATUS: Final = (429, 502, 503, 504)
_RETRY_CODES: Final = ("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS")
_MESSAGES: Final[Mapping[str, type[Message]]] = {
    "traces": ExportTraceServiceRequest,
    "logs": ExportLogsServiceRequest,
    "metrics": ExportMetricsServiceRequest,
}
_METHODS: Final = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
_IDS: Final = ("traceId", "spanId", "parentSpanId")

_grpc: Any = grpc
"""grpcio has no types."""
_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A request as it was received, without compression."""

    signal: str
    """traces, logs or metrics."""
    is_json: bool
    body: bytes


class Outcome(NamedTuple):
    """What an endpoint said."""

    sent: bool
    retry: bool = False
    after_s: float = 0.0
    """How long the endpoint asks to be left alone."""
    why: str = ""


class Forwarder:
    """Passes requests on to `url`: http(s):// for OTLP/HTTP, grpc(s):// for OTLP/gRPC. Thread-safe.

    `headers` go with every request; what they hold is never logged.
    """

    def __init__(
        self, url: str, max_bytes: int, headers: Sequence[tuple[str, str]] = (), figures: Figures | None = None
    ) -> None:
        self._url = url
        self._max_bytes = max_bytes
        self._headers = headers
        self._figures = figures or Figures()
        self._full = False
        self._waiting: deque[Request] = deque()
        self._bytes = 0
        self._wake = threading.Condition()
        self._stopping = threading.Event()
        self._away = False
        self._senders = [
            threading.Thread(target=self._run, name=f"spanmill-forward-{number}", daemon=True)
            for number in range(_SENDERS)
        ]

    def start(self) -> None:
        """Begin to pass on."""
        for sender in self._senders:
            sender.start()

    def offer(self, request: Request) -> None:
        """Take a request to be passed on, if there is room; never waits."""
        with self._wake:
            if self._bytes + len(request.body) > self._max_bytes:
                self._count("dropped_full")
                if not self._full:
                    _log.warning("--forward %s takes less than comes: requests are not passed on", self._url)
                self._full = True
                return
            self._bytes += len(request.body)
            self._waiting.append(request)
            self._wake.notify()

    def counts(self) -> dict[str, int]:
        """What became of requests that came to this process, by `figures.FORWARDED`."""
        found = self._figures.own([f"forward_{name}" for name in FORWARDED])
        return {name.removeprefix("forward_"): number for name, number in found.items()}

    def _count(self, name: str, number: int = 1) -> None:
        self._figures.add(f"forward_{name}", number)

    def stop(self, timeout: float) -> None:
        """Pass on what waits, for up to `timeout` seconds; the rest is dropped, and said to be."""
        with self._wake:
            done = self._wake.wait_for(lambda: self._bytes == 0, timeout)
            self._stopping.set()
            self._wake.notify_all()
        for sender in self._senders:
            sender.join(1)
        if not done:
            with self._wake:
                self._count("dropped_stopped", len(self._waiting))
                _log.warning("%d requests were not passed on to --forward %s", len(self._waiting), self._url)

    def _run(self) -> None:
        endpoint = _endpoint(self._url, self._headers)
        while (request := self._next()) is not None:
            self._deliver(endpoint, request)
            with self._wake:
                self._bytes -= len(request.body)
                self._wake.notify_all()
        endpoint.close()

    def _next(self) -> Request | None:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._stopping.is_set())
            return self._waiting.popleft() if self._waiting and not self._stopping.is_set() else None

    def _deliver(self, endpoint: "_Http | _Grpc", request: Request) -> None:
        wait_s = _WAIT_S[0]
        while not (outcome := endpoint.send(request)).sent:
            if not outcome.retry:
                self._note("dropped_refused", f"refuses requests for good: {outcome.why}")
                return
            self._note("retried", f"cannot be reached: {outcome.why}; requests wait")
            if self._stopping.wait(max(wait_s, outcome.after_s)):
                self._count("dropped_stopped")
                return
            wait_s = min(2 * wait_s, _WAIT_S[1])
        self._count("sent")
        with self._wake:
            self._away = False

    def _note(self, count: str, line: str) -> None:
        self._count(count)
        with self._wake:
            said, self._away = self._away, True
        if not said:
            _log.warning("--forward %s %s", self._url, line)


def _endpoint(url: str, headers: Sequence[tuple[str, str]]) -> "_Http | _Grpc":
    return _Grpc(url, headers) if url.startswith("grpc") else _Http(url, headers)


class _Http:
    """One connection, opened when needed."""

    def __init__(self, url: str, headers: Sequence[tuple[str, str]]) -> None:
        self._parts = urlsplit(url)
        self._headers = dict(headers)
        self._connection: HTTPConnection | None = None

    def send(self, request: Request) -> Outcome:
        media = "application/json" if request.is_json else "application/x-protobuf"
        path = f"{self._parts.path.rstrip('/')}/v1/{request.signal}"
        try:
            connection = self._connected()
            connection.request("POST", path, request.body, {**self._headers, "Content-Type": media})
            answer = connection.getresponse()
            answer.read()
        except (OSError, HTTPException) as error:
            self.close()
            return Outcome(False, True, why=type(error).__name__)
        if 200 <= answer.status < 300:
            return Outcome(True)
        after = answer.headers.get("Retry-After", "")
        return Outcome(
            False, answer.status in _RETRY_STATUS, float(after) if after.isdecimal() else 0.0, f"status {answer.status}"
        )

    def _connected(self) -> HTTPConnection:
        if self._connection is None:
            cls = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
            self._connection = cls(self._parts.netloc, timeout=_TIMEOUT_S)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Grpc:
    """One channel."""

    def __init__(self, url: str, headers: Sequence[tuple[str, str]]) -> None:
        parts = urlsplit(url)
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        if parts.scheme == "grpcs":
            self._channel = _grpc.secure_channel(parts.netloc, _grpc.ssl_channel_credentials(), options)
        else:
            self._channel = _grpc.insecure_channel(parts.netloc, options)
        self._metadata = [(name.lower(), value) for name, value in headers]
        self._methods = {signal: self._channel.unary_unary(method) for signal, method in _METHODS.items()}

    def send(self, request: Request) -> Outcome:
        try:
            body = _protobuf(request)
        except ValueError as error:
            return Outcome(False, why=f"JSON that cannot be sent over gRPC ({type(error).__name__})")
        try:
            self._methods[request.signal](body, timeout=_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            failed: Any = error
            name, after = failed.code().name, _retry_after(failed)
            retry = name in _RETRY_CODES or (name == "RESOURCE_EXHAUSTED" and after is not None)
            return Outcome(False, retry, after or 0.0, name)
        return Outcome(True)

    def close(self) -> None:
        self._channel.close()


def _retry_after(error: Any) -> float | None:
    trailers: dict[str, bytes] = dict(error.trailing_metadata() or ())
    details = trailers.get("grpc-status-details-bin", b"")
    for detail in Status.FromString(details).details:
        info = RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return None


def _protobuf(request: Request) -> bytes:
    """The request as protobuf. ValueError if it is JSON of another shape."""
    if not request.is_json:
        return request.body
    try:
        found = _with_base64_ids(json.loads(request.body))
        message = json_format.ParseDict(found, _MESSAGES[request.signal](), ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError) as error:
        raise ValueError(type(error).__name__) from error
    return message.SerializeToString()


def _with_base64_ids(value: Any) -> Any:
    """OTLP writes ids in hex where protobuf's JSON has base64."""
    if isinstance(value, list):
        return [_with_base64_ids(one) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode()
        if key in _IDS and isinstance(one, str)
        else _with_base64_ids(one)
        for key, one in fields.items()
    }

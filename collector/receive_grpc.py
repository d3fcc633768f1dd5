"""OTLP/gRPC: services that take raw bytes, so that no message is parsed twice; and the health service.

Requests are checked in the thread of `grpc_calls.py` as they come, and handed to the journal in groups, whose thread
answers. What takes longer to check, a compressed or large request, has threads of its own.
"""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc.code_pb2 import INVALID_ARGUMENT, NOT_FOUND, OK, UNIMPLEMENTED

from spanmill.collector.access import Access, Pems, Tls, Tokens
from spanmill.collector.compression import grpc_encoding
from spanmill.collector.config_values import Address
from spanmill.collector.grpc_calls import Call, CallServer
from spanmill.collector.ingest import RETRY_INFO, Answer, CheckedRequest, Ingest, Lease
from spanmill.collector.journal import Kind
from spanmill.errors import ListenError

_THREADS: Final = 4
_INLINE_BYTES: Final = 1 << 20
"""A plain request up to here is checked at once: the hop to a thread would cost more."""
_GROUP_BYTES: Final = 8 << 20
"""So much is written at once."""
_UPLOAD_TIMEOUT_S: Final = 60.0
"""A sender that stops in the middle of its request does not keep its turn for ever."""
_TURN_S: Final = 3.0
"""So long a request waits for its turn to be received; senders give up after 5 s or more."""
_MOST_WAITING: Final = 1024
"""Requests that wait for their turn."""
_MINUTE_MS: Final = 60_000
OPTIONS: Final[dict[str, int]] = {
    "grpc.per_message_decompression": 0,  # ours is bounded; grpc's decompressed whole messages until 2026
    # Senders that ping often are not sent away, as they are by default for more than a ping in 5 minutes.
    "grpc.http2.max_ping_strikes": 0,
    "grpc.keepalive_permit_without_calls": 1,
    # Connections whose other end has vanished, or says nothing, are given up.
    "grpc.keepalive_time_ms": _MINUTE_MS,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.max_connection_idle_ms": 10 * _MINUTE_MS,
    # Clients connect anew now and then, and so find other receivers behind the same name; requests may end.
    "grpc.max_connection_age_ms": 60 * _MINUTE_MS,
    "grpc.max_connection_age_grace_ms": 2 * _MINUTE_MS,
    # Of a request that waits for its turn little is received: windows do not grow with the speed of the line.
    "grpc.http2.bdp_probe": 0,
    "grpc.max_concurrent_streams": 128,  # further requests of a connection wait at their sender
    "grpc.max_allowed_incoming_connections": 4096,
    "grpc.max_metadata_size": 16 << 10,
    "grpc.absolute_max_metadata_size": 32 << 10,
}
"""Of the server. Reflection is not there: the services are known."""
_PACKAGE: Final = "opentelemetry.proto.collector"
_HEALTH: Final = "grpc.health.v1.Health"
_CHECK: Final = f"/{_HEALTH}/Check"
_SERVING: Final = b"\x08\x01"
"""HealthCheckResponse: field 1, SERVING."""
_NOT_SERVING: Final = b"\x08\x02"
_TRACES: Final = f"/{_PACKAGE}.trace.v1.TraceService/Export"
_LOGS: Final = f"/{_PACKAGE}.logs.v1.LogsService/Export"
_METRICS: Final = f"/{_PACKAGE}.metrics.v1.MetricsService/Export"
_KINDS: Final = {_TRACES: Kind.TRACES_PROTO, _LOGS: Kind.LOGS_PROTO}

_grpc: Any = grpc
"""grpcio has no types."""


def start(ingest: Ingest, address: Address, access: Access, *, shared: bool) -> tuple[CallServer, int]:
    """The running server for traces, logs and metrics, and its port, which may be `shared` with other processes.

    ListenError if `address` cannot be had.
    """
    options = OPTIONS | {"grpc.max_receive_message_length": ingest.max_message_bytes, "grpc.so_reuseport": int(shared)}
    services = _Services(ingest, access.tokens)
    server = CallServer(list(options.items()), services.begin, services.write, services.tick)
    port = server.listen(str(address), access.tls and _credentials(access.tls))
    if not port:
        raise ListenError(f"--grpc {address} cannot be listened on")
    server.start()
    return server, port


def _credentials(tls: Tls) -> Any:
    given = tls.pems()

    def certificates(pems: Pems) -> Any:
        return _grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.client_ca)

    def fetched() -> Any:
        """Asked at each handshake; None for those of before."""
        nonlocal given
        before, given = given, tls.pems()
        return None if before is given else certificates(given)

    return _grpc.dynamic_ssl_server_credentials(certificates(given), fetched, given.client_ca is not None)


class _Services:
    """What becomes of calls. Nothing here waits but for the journal.

    How large a message is shows when it is there. So that memory is bounded, only so many are received at a time as
    would come to twice the byte budget.
    """

    def __init__(self, ingest: Ingest, tokens: Tokens | None) -> None:
        self._ingest = ingest
        self._tokens = tokens
        self._turns = max(4, 2 * ingest.max_inflight_bytes // ingest.max_message_bytes)
        self._uploads = dict[Call, float]()
        """Calls whose message is on its way, and until when it may be."""
        self._waiting = deque[tuple[Call, float]]()
        """Calls that wait for their turn, and until when."""
        self._ready = list[CheckedRequest]()
        self._bytes = 0
        """In `_ready`."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="spanmill-grpc-large")

    def begin(self, call: Call) -> None:
        """A call has come, and nothing of its message yet."""
        if call.method == _CHECK:
            call.receive(self._health)
        elif self._tokens and not self._tokens.allow(_authorization(call)):
            _refuse(call, self._ingest.unauthenticated())
        elif call.method not in (*_KINDS, _METRICS):
            call.refuse(UNIMPLEMENTED, "no such method here")
        elif (closed := self._ingest.closed()) is not None:
            _refuse(call, closed)
        elif len(self._uploads) < self._turns:
            self._receive(call)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append((call, time.monotonic() + _TURN_S))
        else:
            _refuse(call, self._ingest.overloaded())

    def tick(self) -> None:
        """Give up what takes too long; its sender sends it again."""
        now = time.monotonic()
        for call in [call for call, until in self._uploads.items() if until < now]:
            call.cancel()
        while self._waiting and self._waiting[0][1] < now:
            _refuse(self._waiting.popleft()[0], self._ingest.overloaded())

    def write(self) -> None:
        """Hand what is ready to the journal."""
        if self._ready:
            self._ingest.store_all(self._ready)
            self._ready, self._bytes = [], 0

    def _receive(self, call: Call) -> None:
        self._uploads[call] = time.monotonic() + _UPLOAD_TIMEOUT_S
        call.receive(self._received)

    def _received(self, call: Call, message: bytes | None) -> None:
        del self._uploads[call]
        if self._waiting:
            self._receive(self._waiting.popleft()[0])
        if message is None:
            # The sender is gone, took too long, or has been told already that its message is too large.
            self._ingest.count("cancelled")
            call.refuse(INVALID_ARGUMENT, "the request has no message")
            return
        lease = self._ingest.lease()
        try:
            answer = self._taken(call, message, lease)
        except Exception as error:
            answer = self._ingest.failed(error)
        if answer is not None:
            _end(call, lease, answer)

    def _taken(self, call: Call, message: bytes, lease: Lease) -> Answer | None:
        """The answer, or None if it comes later."""
        if call.method == _METRICS and not self._ingest.forwarder:  # then nobody needs to see what is in it
            self._ingest.ignored(message, is_json=False)
            return Answer()
        if not lease.grow(len(message)):
            return self._ingest.overloaded()
        if len(message) > _INLINE_BYTES or grpc_encoding(message):
            self._threads.submit(self._take_long, call, message, lease)
            return None
        if call.method == _METRICS:
            self._ingest.ignored(message, is_json=False)
            return Answer()
        kind = _KINDS[call.method]
        checked = self._ingest.check(kind, message)
        if checked.spans == 0:
            return self._ingest.accepted(kind, checked, message)
        self._ready.append(CheckedRequest(kind, message, checked, partial(_end, call, lease)))
        self._bytes += len(message)
        if self._bytes >= _GROUP_BYTES:
            self.write()
        return None

    def _take_long(self, call: Call, message: bytes, lease: Lease) -> None:
        """In a thread of its own: all the way to the answer."""
        try:
            unpacked = self._ingest.unpacked(grpc_encoding(message), message, lease)
            if isinstance(unpacked, Answer):
                answer = unpacked
            elif call.method == _METRICS:
                self._ingest.ignored(unpacked, is_json=False)
                answer = Answer()
            else:
                answer = self._ingest.store(_KINDS[call.method], unpacked)
        except Exception as error:
            answer = self._ingest.failed(error)
        _end(call, lease, answer)

    def _health(self, call: Call, message: bytes | None) -> None:
        # HealthCheckRequest has one string, field 1, as the StringValue that everybody knows.
        service = StringValue.FromString(message or b"").value
        if service not in ("", _HEALTH, *(method[1:].partition("/")[0] for method in (*_KINDS, _METRICS))):
            call.refuse(NOT_FOUND, "no such service here")
        else:
            call.answer(_NOT_SERVING if self._ingest.refusing or self._ingest.unready else _SERVING)


def _authorization(call: Call) -> str | None:
    return next((str(value) for name, value in call.metadata if name == "authorization"), None)


def _end(call: Call, lease: Lease, answer: Answer) -> None:
    lease.end()
    if answer.code == OK:
        call.answer(answer.success().SerializeToString())
    else:
        _refuse(call, answer)


def _refuse(call: Call, answer: Answer) -> None:
    call.refuse(answer.code, answer.message, _trailers(answer))


def _trailers(answer: Answer) -> list[tuple[str, str | bytes]]:
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", answer.status().SerializeToString())]
    if answer.retryable:
        # The Go collector reads the former, the Python exporter this one.
        trailers.append(("google.rpc.retryinfo-bin", RETRY_INFO.SerializeToString()))
    return trailers

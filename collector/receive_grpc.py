"""OTLP/gRPC: services that take raw bytes, so that no message is parsed twice; and the health service."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import grpc
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc.code_pb2 import INVALID_ARGUMENT, OK

from spanmill.collector.access import Access, Tls, Tokens
from spanmill.collector.compression import grpc_encoding
from spanmill.collector.config import Address
from spanmill.collector.ingest import RETRY_INFO, Answer, Ingest
from spanmill.collector.journal import Kind
from spanmill.errors import ListenError

_THREADS: Final = 96
"""So many requests can wait for one group commit."""
_UPLOAD_TIMEOUT_S: Final = 60.0
"""A sender that stops in the middle of its request does not keep a thread for ever."""
_TURN_S: Final = 3.0
"""So long a request waits for its turn to be received; senders give up after 5 s or more."""
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
    "grpc.max_concurrent_streams": 128,  # further requests of a connection wait at their sender
    "grpc.max_allowed_incoming_connections": 4096,
    "grpc.max_metadata_size": 16 << 10,
    "grpc.absolute_max_metadata_size": 32 << 10,
}
"""Of the server. Reflection is not there: the services are known."""
_PACKAGE: Final = "opentelemetry.proto.collector"
_HEALTH: Final = "grpc.health.v1.Health"
_SERVING: Final = b"\x08\x01"
"""HealthCheckResponse: field 1, SERVING."""
_NOT_SERVING: Final = b"\x08\x02"

_grpc: Any = grpc
"""grpcio has no types."""
_CODES: Final[dict[int, Any]] = {code.value[0]: code for code in _grpc.StatusCode}


def start(ingest: Ingest, address: Address, access: Access, *, shared: bool) -> tuple[Any, int]:
    """The running grpc.Server for traces, logs and metrics, and its port, which may be `shared` with other processes.

    ListenError if `address` cannot be had.
    """
    options = OPTIONS | {"grpc.max_receive_message_length": ingest.max_message_bytes, "grpc.so_reuseport": int(shared)}
    server = _grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="spanmill-grpc"),
        options=list(options.items()),
        interceptors=[_Guard(ingest, access.tokens)] if access.tokens else [],
    )
    uploads = _Uploads(ingest)
    methods = {
        f"{_PACKAGE}.trace.v1.TraceService": {"Export": _exporter(ingest, Kind.TRACES_PROTO, uploads)},
        f"{_PACKAGE}.logs.v1.LogsService": {"Export": _exporter(ingest, Kind.LOGS_PROTO, uploads)},
        f"{_PACKAGE}.metrics.v1.MetricsService": {"Export": _ignore(ingest, uploads)},
    }
    health = _grpc.unary_unary_rpc_method_handler(_health(ingest, ["", _HEALTH, *methods]))
    # On the wire one request is a stream of one. Taken as a stream it is looked at before its message is received.
    server.add_generic_rpc_handlers(
        [
            _grpc.method_handlers_generic_handler(_HEALTH, {"Check": health}),
            *(
                _grpc.method_handlers_generic_handler(
                    service, {name: _grpc.stream_unary_rpc_method_handler(method) for name, method in own.items()}
                )
                for service, own in methods.items()
            ),
        ]
    )
    try:
        port = _bind(server, address, access.tls)
    except RuntimeError as error:
        raise ListenError(f"--grpc {address} cannot be listened on: {error}") from error
    server.start()
    return server, port


def _bind(server: Any, address: Address, tls: Tls | None) -> int:
    if tls is None:
        return server.add_insecure_port(str(address))
    pair = tls.key.read_bytes(), tls.cert.read_bytes()
    client_ca = tls.client_ca.read_bytes() if tls.client_ca else None
    return server.add_secure_port(
        str(address), _grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)
    )


class _Guard(_grpc.ServerInterceptor):
    """Turns away who has no token, before anything of the request is received."""

    def __init__(self, ingest: Ingest, tokens: Tokens) -> None:
        self._ingest = ingest
        self._tokens = tokens
        self._refusal = _grpc.stream_unary_rpc_method_handler(self._refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The handler of a request."""
        offered = next((value for name, value in details.invocation_metadata if name == "authorization"), None)
        if details.method.startswith(f"/{_HEALTH}/") or self._tokens.allow(offered):
            return continuation(details)
        return self._refusal

    def _refuse(self, messages: Iterator[bytes], context: Any) -> bytes:
        answer = self._ingest.unauthenticated()
        return context.abort(_CODES[answer.code], answer.message)  # which raises


class _Uploads:
    """Requests whose message is on its way; cancels those that take too long, which their sender sends again.

    How large a message is shows when it is there. So that memory is bounded, only so many are received at a time as
    would come to twice the byte budget.
    """

    def __init__(self, ingest: Ingest) -> None:
        self._turns = threading.BoundedSemaphore(max(4, 2 * ingest.max_inflight_bytes // ingest.max_message_bytes))
        self._ingest = ingest
        self._lock = threading.Lock()
        self._running: dict[int, tuple[float, Any]] = {}
        threading.Thread(target=self._watch, name="spanmill-grpc-uploads", daemon=True).start()

    def receive(self, messages: Iterator[bytes], context: Any) -> bytes | Answer:
        """The message of a request, or why there is none."""
        if not self._turns.acquire(timeout=_TURN_S):
            return self._ingest.overloaded()
        try:
            with self._timed(context):
                message = next(messages, None)
        except grpc.RpcError:
            message = None
        finally:
            self._turns.release()
        if message is None:
            # The sender is gone, took too long, or has been told already that its message is too large.
            self._ingest.count("cancelled")
            return Answer(INVALID_ARGUMENT, "the request has no message")
        return message

    @contextmanager
    def _timed(self, context: Any) -> Generator[None]:
        with self._lock:
            self._running[id(context)] = time.monotonic() + _UPLOAD_TIMEOUT_S, context
        try:
            yield
        finally:
            with self._lock:
                del self._running[id(context)]

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            with self._lock:
                late = [context for deadline, context in self._running.values() if deadline < time.monotonic()]
            for context in late:
                context.cancel()


def _exporter(ingest: Ingest, kind: Kind, uploads: _Uploads) -> Callable[[Iterator[bytes], Any], bytes]:
    def export(messages: Iterator[bytes], context: Any) -> bytes:
        try:
            answer = ingest.closed() or _received(ingest, kind, messages, context, uploads)
        except Exception as error:
            answer = ingest.failed(error)
        return _answered(answer, context)

    return export


def _received(ingest: Ingest, kind: Kind, messages: Iterator[bytes], context: Any, uploads: _Uploads) -> Answer:
    message = uploads.receive(messages, context)
    return message if isinstance(message, Answer) else _stored(ingest, kind, message)


def _ignore(ingest: Ingest, uploads: _Uploads) -> Callable[[Iterator[bytes], Any], bytes]:
    def export(messages: Iterator[bytes], context: Any) -> bytes:
        try:
            answer = _dropped(ingest, uploads.receive(messages, context))
        except Exception as error:
            answer = ingest.failed(error)
        return _answered(answer, context)

    return export


def _dropped(ingest: Ingest, message: bytes | Answer) -> Answer:
    """Only whoever they are passed on to needs to see what is in them."""
    if isinstance(message, Answer):
        return message
    with ingest.lease() as lease:
        unpacked = ingest.unpacked(grpc_encoding(message), message, lease) if ingest.forwarder else message
        if isinstance(unpacked, Answer):
            return unpacked
        ingest.ignored(unpacked, is_json=False)
    return Answer()


def _answered(answer: Answer, context: Any) -> bytes:
    if answer.code != OK:
        context.set_trailing_metadata(_trailers(answer))
        context.abort(_CODES[answer.code], answer.message)  # which raises
    return answer.success().SerializeToString()


def _health(ingest: Ingest, services: Sequence[str]) -> Callable[[bytes, Any], bytes]:
    def check(body: bytes, context: Any) -> bytes:
        # HealthCheckRequest has one string, field 1, as the StringValue that everybody knows.
        if StringValue.FromString(body).value not in services:
            context.abort(_grpc.StatusCode.NOT_FOUND, "no such service here")
        return _NOT_SERVING if ingest.refusing or ingest.unready else _SERVING

    return check


def _stored(ingest: Ingest, kind: Kind, body: bytes) -> Answer:
    with ingest.lease() as lease:
        if not lease.grow(len(body)):
            return ingest.overloaded()
        unpacked = ingest.unpacked(grpc_encoding(body), body, lease)
        if isinstance(unpacked, Answer):
            return unpacked
        return ingest.store(kind, unpacked)


def _trailers(answer: Answer) -> list[tuple[str, bytes]]:
    trailers = [("grpc-status-details-bin", answer.status().SerializeToString())]
    if answer.retryable:
        # The Go collector reads the former, the Python exporter this one.
        trailers.append(("google.rpc.retryinfo-bin", RETRY_INFO.SerializeToString()))
    return trailers

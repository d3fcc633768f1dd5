"""OTLP/gRPC: services that take raw bytes, so that no message is parsed twice."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from google.rpc.code_pb2 import OK

from spanmill.collector.compression import grpc_encoding
from spanmill.collector.config import Address
from spanmill.collector.ingest import RETRY_INFO, Answer, Ingest
from spanmill.collector.journal import Kind
from spanmill.errors import ListenError

_THREADS: Final = 96
"""So many requests can wait for one group commit."""
_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.so_reuseport", 0),  # a busy port is an error, not a second server that gets half of the requests
    ("grpc.per_message_decompression", 0),  # ours is bounded; grpc's decompressed whole messages until 2026
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # senders that ping often are not sent away
    ("grpc.keepalive_permit_without_calls", 1),
)
_PACKAGE: Final = "opentelemetry.proto.collector"

_grpc: Any = grpc
"""grpcio has no types."""
_CODES: Final[dict[int, Any]] = {code.value[0]: code for code in _grpc.StatusCode}


def start(ingest: Ingest, address: Address) -> tuple[Any, int]:
    """The running grpc.Server for traces, logs and metrics, and its port. ListenError if `address` cannot be had."""
    server = _grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="spanmill-grpc"),
        options=[*_OPTIONS, ("grpc.max_receive_message_length", ingest.max_message_bytes)],
    )
    services = {
        "trace.v1.TraceService": _exporter(ingest, Kind.TRACES_PROTO),
        "logs.v1.LogsService": _exporter(ingest, Kind.LOGS_PROTO),
        "metrics.v1.MetricsService": _ignore(ingest),
    }
    server.add_generic_rpc_handlers(
        [
            _grpc.method_handlers_generic_handler(
                f"{_PACKAGE}.{name}", {"Export": _grpc.unary_unary_rpc_method_handler(behavior)}
            )
            for name, behavior in services.items()
        ]
    )
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise ListenError(f"--grpc {address} cannot be listened on: {error}") from error
    server.start()
    return server, port


def _exporter(ingest: Ingest, kind: Kind) -> Callable[[bytes, Any], bytes]:
    def export(body: bytes, context: Any) -> bytes:
        try:
            answer = _stored(ingest, kind, body)
        except Exception as error:
            answer = ingest.failed(error)
        if answer.code != OK:
            context.set_trailing_metadata(_trailers(answer))
            context.abort(_CODES[answer.code], answer.message)  # which raises
        return answer.success().SerializeToString()

    return export


def _ignore(ingest: Ingest) -> Callable[[bytes, Any], bytes]:
    def export(body: bytes, context: Any) -> bytes:
        ingest.count("ignored_metrics")
        return b""

    return export


def _stored(ingest: Ingest, kind: Kind, body: bytes) -> Answer:
    with ingest.lease() as lease:
        if not lease.grow(len(body)):
            return ingest.overloaded()
        unpacked = ingest.unpacked(grpc_encoding(body), body, lease)
        if isinstance(unpacked, Answer):
            return unpacked
        checked, stored = ingest.begin(kind, unpacked)
        if stored is not None:
            stored.result()
        return ingest.accepted(kind, checked)


def _trailers(answer: Answer) -> list[tuple[str, bytes]]:
    trailers = [("grpc-status-details-bin", answer.status().SerializeToString())]
    if answer.retryable:
        # The Go collector reads the former, the Python exporter this one.
        trailers.append(("google.rpc.retryinfo-bin", RETRY_INFO.SerializeToString()))
    return trailers

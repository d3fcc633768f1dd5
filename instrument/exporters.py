"""Which exporter spans leave by: the standard `OTEL_EXPORTER_OTLP_*` variables, OTLP over gRPC or HTTP.

The exporter's module is imported when it is made, so that a process which emits nothing never loads gRPC.
"""

import os
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from opentelemetry.sdk.trace.export import SpanExporter

from spanmill.errors import ConfigError

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACES_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
HTTP_PORT: Final = 4318
TRACES_PATH: Final = "/v1/traces"
LOGS_PATH: Final = "/v1/logs"


class Target(NamedTuple):
    """Where spans go."""

    protocol: str
    url: str | None
    """None leaves it to the exporter, which reads the environment."""
    host: str
    """Host and port, to tell whether another exporter goes to the same place."""


def with_scheme(endpoint: str) -> str:
    """An endpoint as a URL: `host:port` is meant without TLS."""
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def protocol_of(endpoint: str) -> str:
    """The protocol in which an endpoint is spoken to if nobody says: HTTP on its standard port or path, else gRPC."""
    url = urlsplit(with_scheme(endpoint))
    return HTTP if url.port == HTTP_PORT or url.path.endswith(TRACES_PATH) else GRPC


def target(endpoint: str | None = None) -> Target:
    """Where spans go: `endpoint` (a base URL or the full one), else what the environment says, else localhost."""
    said = endpoint or os.environ.get(TRACES_ENDPOINT) or os.environ.get(ENDPOINT) or ""
    protocol = os.environ.get(TRACES_PROTOCOL) or os.environ.get(PROTOCOL) or protocol_of(said)
    url = with_scheme(said or f"http://localhost:{HTTP_PORT if protocol == HTTP else 4317}")
    host = urlsplit(url).netloc
    if endpoint is None:
        return Target(protocol, None, host)
    if protocol == HTTP and not url.endswith(TRACES_PATH):
        url = url.rstrip("/") + TRACES_PATH
    return Target(protocol, url, host)


def make_exporter(to: Target) -> SpanExporter:
    """An exporter to `to`. Raises ConfigError for a protocol that there is none for."""
    if to.protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=to.url)
    if to.protocol == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=to.url)
    raise ConfigError(f"{PROTOCOL}: expected {GRPC} or {HTTP}, found {to.protocol!r}")


def make_log_exporter(to: Target) -> Any:
    """An exporter of log records to where the spans go. Raises ConfigError for a protocol that there is none for."""
    url = to.url or os.environ.get(TRACES_ENDPOINT) or os.environ.get(ENDPOINT)
    if to.protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcExporter

        return GrpcExporter(endpoint=url)
    if to.protocol == HTTP:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpExporter

        base = with_scheme(url or f"localhost:{HTTP_PORT}").rstrip("/").removesuffix(TRACES_PATH)
        return HttpExporter(endpoint=base + LOGS_PATH)
    raise ConfigError(f"{PROTOCOL}: expected {GRPC} or {HTTP}, found {to.protocol!r}")

import gzip

import pytest
from otlp_sink import Sink

from spanmill.errors import ConfigError
from spanmill.instrument import configure, counters, flush, reward
from spanmill.instrument.exporters import Target, make_exporter, target

E = "OTEL_EXPORTER_OTLP_ENDPOINT"
T = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
P = "OTEL_EXPORTER_OTLP_PROTOCOL"
HTTP = "http/protobuf"


@pytest.mark.parametrize(
    ("environ", "endpoint", "expected"),
    [
        ({}, None, Target("grpc", None, "localhost:4317")),
        ({P: HTTP}, None, Target(HTTP, None, "localhost:4318")),
        ({E: "http://h:9"}, None, Target("grpc", None, "h:9")),
        ({E: "http://h:4318"}, None, Target(HTTP, None, "h:4318")),
        ({E: "http://h:4318", P: "grpc"}, None, Target("grpc", None, "h:4318")),
        ({E: "http://h:9", T: "http://t:8/v1/traces"}, None, Target(HTTP, None, "t:8")),
        ({E: "http://h:9", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": HTTP}, None, Target(HTTP, None, "h:9")),
        ({E: "http://h:9"}, "c:4317", Target("grpc", "http://c:4317", "c:4317")),
        ({}, "http://c:4318", Target(HTTP, "http://c:4318/v1/traces", "c:4318")),
        ({}, "https://c/otlp/v1/traces", Target(HTTP, "https://c/otlp/v1/traces", "c")),
        ({P: HTTP}, "http://c:9/", Target(HTTP, "http://c:9/v1/traces", "c:9")),
    ],
)
def test_where_spans_go(
    environ: dict[str, str], endpoint: str | None, expected: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given wins over the traces variables, those over the general ones, those over localhost."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert expected == target(endpoint)


def test_an_unknown_protocol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what was found and what can be."""
    monkeypatch.setenv(P, "smoke")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: expected grpc or http/protobuf, found 'smoke'"):
        make_exporter(target())


def test_http_with_the_standard_variables(http_sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoint, headers and compression are those of the environment."""
    monkeypatch.setenv(E, http_sink.endpoint)
    monkeypatch.setenv(P, HTTP)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    configure()
    reward(0.5)
    assert flush(20)
    (headers,) = http_sink.headers
    assert ("/v1/traces", "Bearer x", "gzip") == tuple(
        headers[k] for k in ("path", "authorization", "content-encoding")
    )
    http_sink.bodies = [gzip.decompress(body) for body in http_sink.bodies]
    assert [("spanmill.reward", {"spanmill.reward.value": 0.5})] == [
        (span["name"], span["attributes"]) for span in http_sink.spans()
    ]
    assert (1, 0, 0) == counters()[:3]


def test_grpc_with_the_standard_variables(grpc_sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans go by gRPC unless told otherwise; headers go as metadata."""
    monkeypatch.setenv(E, grpc_sink.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    configure()
    reward(0.5)
    assert flush(20)
    assert "abc" == grpc_sink.headers[0]["x-token"]
    assert [("spanmill.reward", {"spanmill.reward.value": 0.5})] == [
        (span["name"], span["attributes"]) for span in grpc_sink.spans()
    ]

"""What the doctor says of an endpoint: `spanmill serve` as it runs, other receivers, and what is none."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from certificates import make_certificates
from otlp_sink import grpc_receiver, http_receiver
from served import Served

from spanmill import read_rollouts
from spanmill.doctor import endpoint as endpoints
from spanmill.doctor.endpoint import LOST, OTHER, examine
from spanmill.doctor.finding import Finding

GRPC = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


def found(monkeypatch: pytest.MonkeyPatch, endpoint: str | None, **environ: str) -> list[Finding]:
    """What is found in an environment, which exporters read as well."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return examine(endpoint, os.environ)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """A service."""
    with Served(tmp_path_factory.mktemp("served") / "data", "--flush-on-exit") as running:
        assert running.ready
        yield running


def test_a_service_over_grpc(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes spans, and its health service shows."""
    health = f"{served.address} has a health service, as `spanmill serve` has"
    assert [
        Finding("ok", f"{served.address} (grpc) takes spans"),
        Finding("ok", health),
        Finding("ok", "its disk and its figures show at its HTTP address: give that as --endpoint"),
    ] == found(monkeypatch, f"http://{served.address}", **GRPC)


def test_a_service_over_http(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes spans, is known for what it is, and its figures are read; the endpoint may stand in the environment."""
    environ = {**HTTP, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{served.http_address}/"}
    first, second, *figures = found(monkeypatch, None, **environ)
    assert (f"{served.http_address} (http/protobuf) takes spans", "it is a `spanmill serve`") == (
        first.text,
        second.text,
    )
    assert ["disk" in finding.text for finding in figures] == [True]


@pytest.mark.parametrize(
    ("scheme", "port", "protocol", "do"),
    [
        ("http", "grpc", HTTP, "set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"),
        ("http", "http", GRPC, "set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"),
        ("https", "grpc", GRPC, "write http:// in the endpoint"),
        ("https", "http", HTTP, "write http:// in the endpoint"),
    ],
)
def test_the_wrong_way_to_a_service(
    served: Served, monkeypatch: pytest.MonkeyPatch, scheme: str, port: str, protocol: dict[str, str], do: str
) -> None:
    """The other protocol's port, and TLS where there is none, are an error that says what to write."""
    address = served.address if port == "grpc" else served.http_address
    (finding,) = found(monkeypatch, f"{scheme}://{address}", **protocol)
    assert ("error", do) == (finding.level, finding.do)


def test_nothing_of_the_question_becomes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that was only examined has an empty dataset."""
    out = tmp_path / "data"
    with Served(out, "--flush-on-exit") as running:
        for address, protocol in ((running.address, GRPC), (running.http_address, HTTP)):
            assert {"ok"} == {f.level for f in found(monkeypatch, f"http://{address}", **protocol)}
        assert 0 == running.stop()
    assert [] == list(out.rglob("*.parquet")) or read_rollouts(out).collect().is_empty()


def test_tokens_and_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing token, a certificate that is not trusted and a missing https are errors; with all three it is well."""
    tls = make_certificates(tmp_path)
    (tmp_path / "tokens").write_text("sesame\n")
    options = ("--tls-cert", str(tls / "server.pem"), "--tls-key", str(tls / "server.key"))
    trusted = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(tls / "ca.pem")}
    token = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20sesame"}
    with Served(tmp_path / "data", *options, "--token-file", str(tmp_path / "tokens")) as running:
        for address, protocol in ((running.address, GRPC), (running.http_address, HTTP)):
            (finding,) = found(monkeypatch, f"http://{address}", **protocol)
            assert ("error", "write https:// in the endpoint") == (finding.level, finding.do)
            (finding,) = found(monkeypatch, f"https://{address}", **protocol)
            assert ("error", True) == (finding.level, "certificates" in finding.do or "CERTIFICATE" in finding.do)
            first, *_ = found(monkeypatch, f"https://{address}", **protocol, **trusted)
            assert ("error", True, False) == (first.level, "refuses our token" in first.text, "sesame" in str(first))
            first, *more = found(monkeypatch, f"https://{address}", **protocol, **trusted, **token)
            assert ("ok", []) == (first.level, [finding for finding in more if finding.level == "error"])
            for name in (*trusted, *token):
                monkeypatch.delenv(name)


def test_a_service_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with too little room is told as it is: nothing lost yet, as senders come again."""
    with Served(tmp_path / "data", "--min-free-mib", str(2**30)) as running:
        first, *_ = found(monkeypatch, f"http://{running.address}", **GRPC)
        assert ("warning", True) == (first.level, "refuses spans for now" in first.text)
        first, *more = found(monkeypatch, f"http://{running.http_address}", **HTTP)
        assert ("warning", True) == (first.level, "refuses spans for now" in first.text)
        assert [True] == ["until there is room" in finding.text for finding in more if "disk" in finding.text]


def test_several_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service of several processes is said to give one gRPC connection to one of them."""
    with Served(tmp_path / "data", "--workers", "2") as running:
        assert [("warning", True)] == [
            (finding.level, "2 workers" in finding.text)
            for finding in found(monkeypatch, f"http://{running.http_address}", **HTTP)
            if finding.level != "ok"
        ]


def test_other_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that is none of ours takes spans, and what it does with them is said to be up to it."""
    with grpc_receiver() as sink:
        assert [OTHER] == found(monkeypatch, sink.endpoint, **GRPC)[1:]
    with http_receiver() as sink:
        assert [OTHER] == found(monkeypatch, sink.endpoint, **HTTP)[1:]


@pytest.mark.parametrize("endpoint", ["http://", "ftp://x:1", "http://x:99999", "http://[::1", "http://:4317"])
def test_what_is_no_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What is no URL is said to be none."""
    (finding,) = found(monkeypatch, endpoint, **GRPC)
    assert ("error", "write http://HOST:PORT") == (finding.level, finding.do)


def test_odd_variables(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Headers and certificates that are none never stop the examination; a path that is not there is told."""
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    for odd in ("a b=c", "authorization=\u20ac", "x=%0A", "=", ",", "a"):
        for address, protocol in ((served.address, GRPC), (served.http_address, HTTP)):
            first, *_ = found(monkeypatch, f"http://{address}", **protocol, OTEL_EXPORTER_OTLP_HEADERS=odd)
            assert "takes spans" in first.text
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_HEADERS")
    first, *_ = found(monkeypatch, None, **HTTP, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"http://{served.http_address}")
    assert ("error", True) == (first.level, "let it end in /v1/traces" in first.do)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    monkeypatch.setattr(endpoints, "TIMEOUT_S", 1.0)
    for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", str(junk))
    for address, protocol in ((served.address, GRPC), (served.http_address, HTTP)):
        assert ["error"] == [f.level for f in found(monkeypatch, f"https://{address}", **protocol)]


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a listener, and with one that never answers, spans are lost."""
    (finding,) = found(monkeypatch, "http://127.0.0.1:9")
    assert ("error", True) == (finding.level, LOST in finding.text)
    import socket

    monkeypatch.setattr(endpoints, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (finding,) = found(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}", **GRPC)
    assert ("error", True) == (finding.level, LOST in finding.text)

"""What answers at an OTLP endpoint: a `spanmill serve` or another collector, and whether it takes spans.

It is asked with a request of no spans, by the protocol, the headers and the certificates that the environment names:
what it says to that it says to spans, and nothing of it becomes a row.
"""

import os
import socket
import ssl
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Final, NamedTuple, cast
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import grpc

from spanmill.doctor.environment import HEADERS, is_header
from spanmill.doctor.finding import Finding, error, ok, warning
from spanmill.doctor.metrics import examine_metrics
from spanmill.instrument.exporters import ENDPOINT, GRPC, HTTP, HTTP_PORT, TRACES_ENDPOINT, TRACES_PATH, Target, target

TIMEOUT_S: Final = 5.0
EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
MAX_ANSWER: Final = 1 << 20

GRPC_PORT: Final = 4317
OTHER: Final = ok(
    "it is another collector than `spanmill serve`: what it passes on is up to its configuration, which "
    "--collector-config examines"
)

LOST: Final = "spans wait in a bounded queue and are lost at the end of their process"


class Answer(NamedTuple):
    """What an endpoint said to a request of no spans."""

    kind: str
    """ok, busy (send it again), unauthenticated, other (an error that drops spans), silent (nobody speaks OTLP)."""
    detail: str = ""


class Place(NamedTuple):
    """An endpoint, and how exporters go there."""

    protocol: str
    url: str
    """The full one, as exporters post to it."""
    host: str
    port: int
    environ: Mapping[str, str]

    @property
    def shown(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_tls(self) -> bool:
        """Whether its URL says so."""
        return self.url.startswith("https:")

    def base(self, port: int) -> str:
        """The URL of a port of the same host."""
        scheme = "https" if self.is_tls else "http"
        return f"{scheme}://{self._replace(port=port).shown}"


def examine(endpoint: str | None, environ: Mapping[str, str]) -> list[Finding]:
    """What there is to say of the endpoint, or of the one that the environment names."""
    try:
        place = _place(endpoint, environ)
    except ValueError:
        said = endpoint or environ.get(TRACES_ENDPOINT) or environ.get(ENDPOINT)
        return [error(f"the endpoint {said} is no URL: nothing is sent", "write http://HOST:PORT")]
    if place.protocol not in (GRPC, HTTP):
        return []  # the environment's fault, said there
    try:
        socket.create_connection((place.host, place.port), TIMEOUT_S).close()
    except OSError as failure:
        why = failure.strerror or failure
        return [error(f"nothing listens at {place.shown} ({why}): {LOST}", "start `spanmill serve`, or set --endpoint")]
    answer = _ask(place)
    if answer.kind == "silent":
        return [_why_silent(place, answer)]
    found = [_said(answer, place)]
    if place.protocol == HTTP:
        return found + _examine_serve(place, said_ok=answer.kind == "ok")
    if not _health(place):
        return [*found, OTHER]
    found.append(ok(f"{place.shown} has a health service, as `spanmill serve` has"))
    figures = _figures(place.base(HTTP_PORT), place.environ) if place.port == GRPC_PORT else None
    if figures is not None:
        return found + examine_metrics(figures)
    return [*found, ok("its disk and its figures show at its HTTP address: give that as --endpoint")]


def _place(endpoint: str | None, environ: Mapping[str, str]) -> Place:
    """Raises ValueError if the endpoint is no URL."""
    to = target(endpoint)
    url = urlsplit(to.url or _url_of(to, environ))
    port = url.port or (443 if url.scheme == "https" else 80)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError
    return Place(to.protocol, url.geturl(), url.hostname, port, environ)


def _url_of(to: Target, environ: Mapping[str, str]) -> str:
    """The full URL that the exporter makes of the environment's."""
    said = environ.get(TRACES_ENDPOINT)
    if said:
        return said if "://" in said else f"http://{said}"
    base = environ.get(ENDPOINT) or f"http://{to.host}"
    base = base if "://" in base else f"http://{base}"
    return base if to.protocol == GRPC or base.endswith(TRACES_PATH) else base.rstrip("/") + TRACES_PATH


def _headers(environ: Mapping[str, str]) -> dict[str, str]:
    """`OTEL_EXPORTER_OTLP_HEADERS`, as exporters read it: without what is no header."""
    said = next((environ[name] for name in HEADERS if environ.get(name)), "")
    pairs = [unquote(pair).partition("=") for pair in said.split(",") if is_header(unquote(pair))]
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _ask(place: Place) -> Answer:
    return _ask_grpc(place) if place.protocol == GRPC else _ask_http(place)


# ------------------------------------------------------------------ gRPC


def _channel(place: Place) -> Any:
    api = cast("Any", grpc)
    if not place.is_tls:
        return api.insecure_channel(place.shown)
    ca, key, chain = (_pem(place.environ, name) for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"))
    return api.secure_channel(place.shown, api.ssl_channel_credentials(ca, key, chain))


def _ask_grpc(place: Place) -> Answer:
    with _channel(place) as channel:
        try:
            channel.unary_unary(EXPORT)(b"", timeout=TIMEOUT_S, metadata=list(_headers(place.environ).items()))
        except grpc.RpcError as failure:
            code, detail = cast("Any", failure).code().name, str(cast("Any", failure).details())
            if code == "UNAUTHENTICATED":
                return Answer("unauthenticated", detail)
            if code == "UNAVAILABLE" and _is_said_by_the_server(failure):
                return Answer("busy", detail)
            silent = code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN")
            return Answer("silent" if silent else "other", f"{code} {detail}".strip())
    return Answer("ok")


def _is_said_by_the_server(failure: grpc.RpcError) -> bool:
    """A server that refuses tells how long to wait; a connection that failed cannot."""
    return any(
        name == "google.rpc.retryinfo-bin" or name.startswith("grpc-status-details") for name, _ in _trailers(failure)
    )


def _trailers(failure: grpc.RpcError) -> list[tuple[str, Any]]:
    return list(cast("Any", failure).trailing_metadata() or ())


def _health(place: Place) -> bool:
    with _channel(place) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return True


# ------------------------------------------------------------------ HTTP


def _open(
    url: str, environ: Mapping[str, str], headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> tuple[int, str]:
    """(status, body) of an answer, asked with the environment's headers. Raises OSError, HTTPException without one."""
    context = ssl.create_default_context(cafile=_path(environ, "CERTIFICATE"))
    chain = _path(environ, "CLIENT_CERTIFICATE")
    if chain:
        context.load_cert_chain(chain, _path(environ, "CLIENT_KEY"))
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    request = Request(url, body, {**_headers(environ), **(headers or {})})
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read(MAX_ANSWER).decode("utf-8", "replace")
    except HTTPError as refused:
        return refused.code, refused.read(MAX_ANSWER).decode("utf-8", "replace")


def _ask_http(place: Place) -> Answer:
    try:
        status, body = _open(place.url, place.environ, {"content-type": "application/x-protobuf"}, b"")
    except (OSError, HTTPException) as failure:
        return Answer("silent", str(getattr(failure, "reason", None) or failure))
    said = f"{status} {_readable(body)}".strip()
    if status in (401, 403):
        return Answer("unauthenticated", said)
    if status in (429, 502, 503, 504):
        return Answer("busy", said)
    return Answer("ok") if status == 200 else Answer("other", said)


def _readable(body: str) -> str:
    """An error's text, which may be a `google.rpc.Status` in protobuf."""
    return "".join(c if c.isprintable() else " " for c in body).strip()[:200]


def _examine_serve(place: Place, *, said_ok: bool) -> list[Finding]:
    """If it is a `spanmill serve`, how it is; else what else it is."""
    base = place.base(place.port)
    try:
        status, ready = _open(f"{base}/readyz", place.environ)
        code, _ = _open(f"{base}/metrics", place.environ)
    except (OSError, HTTPException):
        return [OTHER]
    figures = _figures(base, place.environ)
    if figures is not None:
        found = [ok("it is a `spanmill serve`")]
        if status == 503 and said_ok:
            found.append(warning(f"it is not ready: {ready.strip()}", "see its messages"))
        return found + examine_metrics(figures)
    if code in (401, 403) and status in (200, 503):
        return [warning("its figures need a token", "set OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20TOKEN")]
    return [OTHER]


def _figures(base: str, environ: Mapping[str, str]) -> str | None:
    """The figures of a `spanmill serve`; None if there is none, or it does not show them."""
    try:
        code, figures = _open(f"{base}/metrics", environ)
    except (OSError, HTTPException):
        return None
    return figures if code == 200 and "spanmill_ready" in figures else None


# ------------------------------------------------------------------ what it means


def _said(answer: Answer, place: Place) -> Finding:
    name = f"{place.shown} ({place.protocol})"
    match answer.kind:
        case "ok":
            return ok(f"{name} takes spans")
        case "busy":
            return warning(
                f"{name} refuses spans for now ({answer.detail}): senders send again, those in Python for 10 s",
                "make room on its disk, or see its messages",
            )
        case "unauthenticated":
            return error(
                f"{name} refuses our token ({answer.detail}): every span is dropped",
                "set OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20TOKEN to a token that its --token-file has",
            )
        case _ if answer.detail[:3] in ("404", "405") and not place.url.endswith(TRACES_PATH):
            return error(
                f"{name} has no such path ({answer.detail}): {TRACES_ENDPOINT} is taken as it stands",
                f"let it end in {TRACES_PATH}, or set {ENDPOINT}",
            )
        case _:
            return error(
                f"{name} refuses spans for good ({answer.detail})", "see that it is an OTLP receiver of traces"
            )


def _why_silent(place: Place, answer: Answer) -> Finding:
    """Of an endpoint that is there and answers nothing: it may speak the other protocol, or TLS."""
    shown = place.shown
    if "CERTIFICATE_VERIFY_FAILED" in answer.detail.upper().replace(" ", "_"):
        return error(
            f"{shown}: its certificate is not trusted ({answer.detail}): nothing is sent",
            "set OTEL_EXPORTER_OTLP_CERTIFICATE to the CA's PEM file",
        )
    other, path = (HTTP, TRACES_PATH) if place.protocol == GRPC else (GRPC, "")
    if _ask(place._replace(protocol=other, url=place.base(place.port) + path)).kind != "silent":
        return error(
            f"{shown} speaks {other}, not {place.protocol}: nothing is sent", f"set OTEL_EXPORTER_OTLP_PROTOCOL={other}"
        )
    speaks_tls = _speaks_tls(place)
    if speaks_tls and not place.is_tls:
        return error(f"{shown} speaks TLS, the endpoint says http: nothing is sent", "write https:// in the endpoint")
    if place.is_tls and not speaks_tls:
        return error(
            f"{shown} speaks no TLS, the endpoint says https: nothing is sent", "write http:// in the endpoint"
        )
    return error(
        f"{shown} does not answer as an OTLP receiver does ({answer.detail}): {LOST}",
        "name the address of `spanmill serve` or of a collector; over TLS, also the certificates that it wants",
    )


def _speaks_tls(place: Place) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((place.host, place.port), TIMEOUT_S) as raw, context.wrap_socket(raw):
            return True
    except ssl.SSLError as failure:
        return "CERTIFICATE_REQUIRED" in str(failure.reason or "")
    except OSError:
        return False


def _path(environ: Mapping[str, str], name: str) -> str | None:
    path = environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}")
    return path if path and os.access(path, os.R_OK) else None


def _pem(environ: Mapping[str, str], name: str) -> bytes | None:
    path = _path(environ, name)
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()

import os
import shutil
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from certificates import make_certificates
from google.rpc.code_pb2 import UNAUTHENTICATED
from google.rpc.status_pb2 import Status
from made_spans import make_request, make_span

from spanmill.collector import access
from spanmill.collector.access import Tokens
from spanmill.collector.config import ServeConfig
from spanmill.collector.config_values import Address
from spanmill.collector.journal import JournalWriter, read
from spanmill.collector.receive import Receiver, start_receiver
from spanmill.errors import ConfigError

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
HEALTH = "/grpc.health.v1.Health/Check"
PROTO = {"Content-Type": "application/x-protobuf"}
BODY = make_request(make_span("t", "root"))

_grpc: Any = grpc
Start = Callable[..., Receiver]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def start(tmp_path: Path, journal: JournalWriter) -> Iterator[Start]:
    """Starts a receiver with options."""
    started: list[Receiver] = []

    def start(**options: Any) -> Receiver:
        given: dict[str, Any] = {"grpc": Address("127.0.0.1", 0), "http": Address("127.0.0.1", 0), **options}
        started.append(start_receiver(ServeConfig(out=tmp_path, **given), journal))
        return started[-1]

    yield start
    for receiver in started:
        receiver.stop(5)


def secure(folder: Path, client_ca: bool = False) -> dict[str, Path]:
    """The options of TLS."""
    own = {"tls_cert": folder / "server.pem", "tls_key": folder / "server.key"}
    return own | ({"tls_client_ca": folder / "ca.pem"} if client_ca else {})


def send_grpc(
    receiver: Receiver,
    tls: Path | None = None,
    client: str | None = None,
    method: str = TRACES,
    metadata: Any = (),
    body: bytes = BODY,
) -> str:
    """OK, or the name of the code that an export ended with."""
    if tls is None:
        channel = _grpc.insecure_channel(str(receiver.grpc_address))
    else:
        pair = [(tls / f"{client}.{kind}").read_bytes() for kind in ("key", "pem")] if client else (None, None)
        credentials = _grpc.ssl_channel_credentials((tls / "ca.pem").read_bytes(), *pair)
        channel = _grpc.secure_channel(str(receiver.grpc_address), credentials)
    with channel:
        try:
            channel.unary_unary(method)(body, timeout=5, metadata=metadata)
        except grpc.RpcError as error:
            failed: Any = error
            return failed.code().name
    return "OK"


def http_client(receiver: Receiver, tls: Path, client: str | None = None) -> httpx.Client:
    """A client that trusts the authority of the tests."""
    context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
    if client:
        context.load_cert_chain(tls / f"{client}.pem", tls / f"{client}.key")
    return httpx.Client(base_url=f"https://{receiver.http_address}", verify=context, headers=PROTO)


def test_both_protocols_are_served_over_tls(start: Start, certificates: Path, tmp_path: Path) -> None:
    """With a certificate, and to nobody without TLS."""
    receiver = start(**secure(certificates))
    assert "OK" == send_grpc(receiver, certificates)
    assert "UNAVAILABLE" == send_grpc(receiver)
    with http_client(receiver, certificates) as client:
        assert 200 == client.post("/v1/traces", content=BODY).status_code
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"http://{receiver.http_address}/v1/traces", content=BODY, headers=PROTO)
    assert [BODY, BODY] == [entry.body for entry in read(tmp_path / "journal")]


@pytest.mark.parametrize("part", ["server", "ca"])
def test_certificates_are_exchanged_without_a_restart(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """New connections get the new one, on both ports, once its key has come as well; also the authority of clients."""
    monkeypatch.setattr(access, "_LOOK_S", 0.0)
    old, new = make_certificates(tmp_path), make_certificates(tmp_path / "new")
    receiver = start(**secure(old, client_ca=True))

    def ends(folder: Path) -> list[str]:
        over_http = "OK"
        try:
            with http_client(receiver, folder, "client") as client:
                client.post("/v1/traces", content=BODY)
        except httpx.TransportError:
            over_http = "UNAVAILABLE"
        return [send_grpc(receiver, folder, "client"), over_http]

    def member(name: str, trusted: Path, client: Path) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(trusted / "ca.pem", folder)
        for kind in ("pem", "key"):
            shutil.copy(client / f"client.{kind}", folder)
        return folder

    before = member("before", old, old)
    after = member("after", new, old) if part == "server" else member("after", old, new)
    assert (["OK", "OK"], ["UNAVAILABLE"] * 2) == (ends(before), ends(after))
    if part == "server":
        shutil.copy(new / "server.pem", old)
        assert ["OK", "OK"] == ends(before)  # there is no key for it yet
        assert "are no certificate chain and its key" in caplog.text
        shutil.copy(new / "server.key", old)
    else:
        shutil.copy(new / "ca.pem", old)
    assert (["OK", "OK"], ["UNAVAILABLE"] * 2) == (ends(after), ends(before))
    assert "it counts from now on" in caplog.text


def test_clients_need_a_certificate(start: Start, certificates: Path, tmp_path: Path) -> None:
    """With --tls-client-ca, one by that authority and no other; also for the health service."""
    receiver = start(**secure(certificates, client_ca=True))
    found = [send_grpc(receiver, certificates, client) for client in ("client", "stranger", None)]
    assert ["OK", "UNAVAILABLE", "UNAVAILABLE"] == found
    with http_client(receiver, certificates, "client") as client:
        assert 200 == client.post("/v1/traces", content=BODY).status_code
    for name in ("stranger", None):
        with http_client(receiver, certificates, name) as client, pytest.raises(httpx.TransportError):
            client.post("/v1/traces", content=BODY)
    assert [BODY, BODY] == [entry.body for entry in read(tmp_path / "journal")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls_cert": "server.pem"}, "--tls-cert is given without --tls-key: TLS needs both"),
        ({"tls_client_ca": "ca.pem"}, "--tls-client-ca is given without --tls-cert and --tls-key"),
        ({"tls_cert": "server.pem", "tls_key": "client.key"}, "KEY_VALUES_MISMATCH"),
        ({"tls_cert": "server.pem", "tls_key": "no.key"}, "no.key cannot be read: No such file or directory"),
        ({"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.key"}, "ca.key is no PEM"),
    ],
)
def test_files_that_cannot_work_stop_the_start(
    start: Start, certificates: Path, options: dict[str, str], message: str
) -> None:
    """In one line that names the option."""
    with pytest.raises(ConfigError) as caught:
        start(**{name: certificates / file for name, file in options.items()})
    assert message in str(caught.value)
    assert "--tls-" in str(caught.value)


def token_file(tmp_path: Path, *lines: str) -> Path:
    """A file of tokens."""
    path = tmp_path / "tokens"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_senders_need_a_token(start: Start, tmp_path: Path) -> None:
    """Any of those in the file; health stays open to all. Nothing of a refused request is kept."""
    receiver = start(token_file=token_file(tmp_path, "# senders", "", "old-token", "new token"))
    offers = ["Bearer old-token", "bearer  new token ", "Bearer wrong", "Bearer ", "old-token", "Basic old-token"]
    found = [send_grpc(receiver, metadata=[("authorization", offer)]) for offer in offers]
    assert ["OK", "OK", *["UNAUTHENTICATED"] * 4] == found
    assert ["UNAUTHENTICATED", "OK"] == [send_grpc(receiver), send_grpc(receiver, method=HEALTH, body=b"")]

    url = f"http://{receiver.http_address}"
    for path in ("/v1/traces", "/v1/logs", "/v1/metrics", "/v1/rewards", "/v1/flush", "/nowhere"):
        answer = httpx.post(url + path, content=BODY, headers=PROTO)
        status = Status.FromString(answer.content)
        assert (401, "Bearer", UNAUTHENTICATED) == (
            answer.status_code,
            answer.headers["www-authenticate"],
            status.code,
        )
    assert 401 == httpx.get(f"{url}/metrics").status_code
    assert [200, 200] == [httpx.get(url + path).status_code for path in ("/healthz", "/readyz")]
    named = httpx.post(f"{url}/v1/traces", content=BODY, headers={**PROTO, "Authorization": "Bearer old-token"})
    assert 200 == named.status_code
    assert [BODY] * 3 == [entry.body for entry in read(tmp_path / "journal")]
    assert 12 == receiver.counts()["unauthenticated"]


def test_a_large_body_without_a_token_is_not_received(start: Start, tmp_path: Path) -> None:
    """The answer comes before anything of it was sent."""
    receiver = start(token_file=token_file(tmp_path, "secret"))
    answered = threading.Event()

    def body() -> Iterator[bytes]:
        answered.wait(30)
        yield BODY

    with _grpc.insecure_channel(str(receiver.grpc_address)) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(TRACES)(body(), timeout=20)
    answered.set()
    failed: Any = caught.value
    assert "UNAUTHENTICATED" == failed.code().name


def test_tokens_are_read_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So tokens rotate without a restart; a file that is gone or empty locks nobody out. No token is ever logged."""
    monkeypatch.setattr(access, "_LOOK_S", 0.0)
    path = token_file(tmp_path, "first-secret")
    tokens = Tokens(path)

    def allowed() -> list[bool]:
        return [tokens.allow(f"Bearer {token}") for token in ("first-secret", "second-secret")]

    assert [True, False] == allowed()
    token_file(tmp_path, "first-secret", "second-secret")
    assert [True, True] == allowed()
    token_file(tmp_path, "second-secret")
    assert [False, True] == allowed()
    for change in (lambda: path.write_text("\n# none\n"), path.unlink):
        change()
        assert [False, True] == allowed()
    token_file(tmp_path, "first-secret")
    os.utime(path, ns=(1, 1))
    assert [True, False] == allowed()
    assert 5 == len(caplog.messages)
    assert "-secret" not in caplog.text


@pytest.mark.parametrize("content", [None, "", "# only a comment\n"])
def test_a_file_without_tokens_stops_the_start(start: Start, tmp_path: Path, content: str | None) -> None:
    """Else everybody, or nobody, would be let in."""
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"--token-file .*/tokens (cannot be read|holds no token)"):
        start(token_file=path)


@pytest.mark.parametrize(
    ("host", "token", "warnings"), [("127.0.0.1", False, 0), ("0.0.0.0", True, 0), ("0.0.0.0", False, 1)]
)
def test_an_address_that_is_open_to_the_network_is_warned_of(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, token: bool, warnings: int
) -> None:
    """Once, without TLS and without a token; loopback is nobody's business."""
    options = {"token_file": token_file(tmp_path, "t")} if token else {}
    start(grpc=Address(host, 0), http=Address(host, 0), **options)
    expected = (
        f"anybody who reaches {host}:0 and {host}:0 can send spans: set --tls-cert and --tls-key, and --token-file"
    )
    assert [expected] * warnings == caplog.messages

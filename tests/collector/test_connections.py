import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from made_spans import make_request, make_span
from served import FREE, wait_for

from spanmill.collector import http_connection, receive_grpc
from spanmill.collector.config import ServeConfig
from spanmill.collector.journal import JournalWriter
from spanmill.collector.receive import Receiver, start_receiver

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
BODY = make_request(make_span("t", "root"))
HEAD = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"

_grpc: Any = grpc


@pytest.fixture
def started(tmp_path: Path, journal: JournalWriter) -> Iterator[Callable[[], Receiver]]:
    """Starts a receiver, after a test has changed what it is started with."""
    running: list[Receiver] = []

    def start() -> Receiver:
        running.append(start_receiver(ServeConfig(out=tmp_path, grpc=FREE, http=FREE), journal))
        return running[-1]

    yield start
    for receiver in running:
        receiver.stop(5)


def code_of(call: Callable[[], object]) -> str:
    """The code that a gRPC call ends with."""
    try:
        call()
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code().name
    return "OK"


def told(receiver: Receiver, *sent: bytes) -> bytes:
    """All that comes back over a connection until its other end hangs up."""
    with socket.create_connection(receiver.http_address, timeout=20) as connection:
        for data in sent:
            try:
                connection.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                break
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
    return answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([HEAD + b"X: " + b"x" * 70_000 + b"\r\n\r\n"], b"431"),
        ([HEAD + b"X: 1\r\n" * 20_000 + b"\r\n"], b"431"),
        ([HEAD, *[b"X: " + b"x" * 10_000] * 50], b"431"),
        ([b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n"], b"414"),
        ([b"POST /v1/traces HTTP/1.1\r\nContent-Length: -1\r\n\r\n"], b"400"),
        ([b"\x16\x03\x01 no HTTP at all"], b"400"),
    ],
    ids=["one header", "many headers", "a head without end", "path", "a length below zero", "no HTTP"],
)
def test_heads_have_a_limit(receiver: Receiver, sent: list[bytes], status: bytes) -> None:
    """64 KiB of headers, 8 KiB of path: more is refused, and what follows is not read. The next sender is served."""
    assert b"HTTP/1.1 " + status == told(receiver, *sent)[:12]
    assert 200 == httpx.get(f"http://{receiver.http_address}/healthz").status_code


def test_heads_below_the_limit_pass(receiver: Receiver) -> None:
    """Proxies and browsers send a few KiB."""
    headers = {"Content-Type": "application/x-protobuf", "X": "x" * 40_000}
    with httpx.Client(base_url=f"http://{receiver.http_address}") as client:
        found = [client.post("/v1/traces?" + "x" * 7000, content=BODY, headers=headers).status_code for _ in range(3)]
    assert [200, 200, 200] == found


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"Content-Length: 0\r\n\r\nPOST /v1/tra"])
def test_a_silent_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch, started: Callable[[], Receiver], sent: bytes
) -> None:
    """One that says nothing, or stops within a head, also of its second request."""
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.5)
    begun = time.monotonic()
    answer = told(started(), sent)
    assert (b"HTTP/1.1 200" if sent.endswith(b"tra") else b"") == answer[:12]
    assert 0.4 < time.monotonic() - begun


def test_further_connections_are_answered_503(monkeypatch: pytest.MonkeyPatch, started: Callable[[], Receiver]) -> None:
    """With Retry-After, a reason to come again; once others have gone, the same sender is served."""
    monkeypatch.setattr(http_connection, "MOST_CONNECTIONS", 4)
    receiver = started()
    others = [socket.create_connection(receiver.http_address) for _ in range(4)]
    url = f"http://{receiver.http_address}/v1/traces"
    headers = {"Content-Type": "application/x-protobuf"}
    answer = httpx.post(url, content=BODY, headers=headers)
    assert (503, "1") == (answer.status_code, answer.headers["retry-after"])
    for other in others:
        other.close()
    deadline = time.monotonic() + 10
    while httpx.post(url, content=BODY, headers=headers).status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 200 == httpx.post(url, content=BODY, headers=headers).status_code


@pytest.mark.parametrize("path", ["/v1/traces", "/" + "x" * 10_000], ids=["too large", "no such path"])
def test_a_refusal_reaches_who_still_sends(
    monkeypatch: pytest.MonkeyPatch, started: Callable[[], Receiver], path: str
) -> None:
    """What follows is read and dropped, so that no reset hides the answer; but not for ever."""
    monkeypatch.setattr(http_connection, "DRAIN_BYTES", 200 << 20)
    receiver, body = started(), bytes(100 << 20)
    connection = HTTPConnection(str(receiver.http_address), timeout=30)
    connection.request("POST", path, body, {"Content-Type": "application/x-protobuf"})
    assert (413 if path == "/v1/traces" else 414) == connection.getresponse().status
    connection.close()
    monkeypatch.setattr(http_connection, "DRAIN_BYTES", 10 << 20)
    connection = HTTPConnection(str(receiver.http_address), timeout=30)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        connection.request("POST", path, body * 2, {"Content-Type": "application/x-protobuf"})
    connection.close()
    assert 200 == httpx.get(f"http://{receiver.http_address}/healthz").status_code


def test_health_and_no_reflection(receiver: Receiver) -> None:
    """The standard health service knows ours; what there is to call is not told."""
    with _grpc.insecure_channel(str(receiver.grpc_address)) as channel:
        check = channel.unary_unary(HEALTH)
        service = TRACES[1:].rpartition("/")[0].encode()
        found = [check(b""), check(b"\x0a" + bytes([len(service)]) + service)]
        codes = [code_of(lambda: check(b"\x0a\x01x")), code_of(lambda: channel.unary_unary(REFLECTION)(b""))]
    assert ([b"\x08\x01"] * 2, ["NOT_FOUND", "UNIMPLEMENTED"]) == (found, codes)


def test_large_metadata_is_refused(receiver: Receiver) -> None:
    """By gRPC itself; the connection goes on to serve."""
    with _grpc.insecure_channel(str(receiver.grpc_address)) as channel:
        export = channel.unary_unary(TRACES)
        large = code_of(lambda: export(BODY, metadata=[("x", "x" * 100_000)], timeout=10))
        assert ("RESOURCE_EXHAUSTED", b"") == (large, export(BODY, timeout=10))


def test_a_stalled_upload_is_cancelled(monkeypatch: pytest.MonkeyPatch, started: Callable[[], Receiver]) -> None:
    """A sender that stops within its request is told to send it again, and its thread is free."""
    monkeypatch.setattr(receive_grpc, "_UPLOAD_TIMEOUT_S", 0.2)
    receiver, ended = started(), threading.Event()

    def stalling() -> Iterator[bytes]:
        ended.wait(30)
        yield BODY

    with _grpc.insecure_channel(str(receiver.grpc_address)) as channel:
        code = code_of(lambda: channel.stream_unary(TRACES)(stalling(), timeout=20))
        ended.set()
        assert ("CANCELLED", b"") == (code, channel.unary_unary(TRACES)(BODY, timeout=10))
    assert {"requests": 1, "spans": 1, "cancelled": 1} == receiver.counts()


def test_only_so_many_are_received_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, journal: JournalWriter
) -> None:
    """As many as would come to twice the byte budget; another one is to be sent again, and goes when they are done."""
    monkeypatch.setattr(receive_grpc, "_TURN_S", 0.2)
    config = ServeConfig(out=tmp_path, grpc=FREE, http=FREE, max_message_mib=64, max_inflight_mib=128)
    receiver, ended = start_receiver(config, journal), threading.Event()

    def stalling() -> Iterator[bytes]:
        ended.wait(30)
        yield BODY

    with _grpc.insecure_channel(str(receiver.grpc_address)) as channel:
        stalled = [channel.stream_unary(TRACES).future(stalling(), timeout=30) for _ in range(4)]
        wait_for(lambda: code_of(lambda: channel.unary_unary(TRACES)(BODY, timeout=10)) == "UNAVAILABLE")
        ended.set()
        assert [b""] * 4 == [one.result() for one in stalled]
        assert b"" == channel.unary_unary(TRACES)(BODY, timeout=10)
    receiver.stop(5)


def test_connections_are_counted_on_grpc_too(monkeypatch: pytest.MonkeyPatch, started: Callable[[], Receiver]) -> None:
    """A connection too many is closed, which its client takes as a receiver that is away."""
    monkeypatch.setitem(receive_grpc.OPTIONS, "grpc.max_allowed_incoming_connections", 2)
    receiver = started()
    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [_grpc.insecure_channel(str(receiver.grpc_address), own) for _ in range(3)]
    codes = [code_of(partial(channel.unary_unary(TRACES), BODY, timeout=5)) for channel in channels]
    for channel in channels:
        channel.close()
    assert ["OK", "OK", "UNAVAILABLE"] == codes


def states_while(receiver: Receiver, work: Callable[[Any], None], *options: tuple[str, int]) -> list[str]:
    """The states that a channel goes through while something is done with it."""
    seen: list[str] = []
    with _grpc.insecure_channel(str(receiver.grpc_address), options) as channel:

        def note(state: Any) -> None:
            seen.append(state.name)

        channel.subscribe(note)
        work(channel)
    return seen


def test_clients_that_ping_are_not_sent_away(receiver: Receiver) -> None:
    """Pings every 1.1 s without any request, as load balancers and mobile networks make people configure them."""
    pings = {
        "grpc.keepalive_time_ms": 1100,
        "grpc.keepalive_timeout_ms": 1000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
    }

    def work(channel: Any) -> None:
        export = channel.unary_unary(TRACES)
        export(BODY, timeout=10)
        time.sleep(6)
        export(BODY, timeout=10)

    assert 1 == states_while(receiver, work, *pings.items()).count("READY")


def test_an_aged_connection_is_exchanged_without_a_failure(
    monkeypatch: pytest.MonkeyPatch, started: Callable[[], Receiver]
) -> None:
    """Its client connects anew, to where the name leads by then; no request fails by that."""
    monkeypatch.setitem(receive_grpc.OPTIONS, "grpc.max_connection_age_ms", 300)
    receiver = started()

    def work(channel: Any) -> None:
        export = channel.unary_unary(TRACES)
        for _ in range(100):
            assert b"" == export(BODY, timeout=10)
            time.sleep(0.02)

    assert 2 <= states_while(receiver, work).count("READY")
    assert 100 == receiver.counts()["requests"]

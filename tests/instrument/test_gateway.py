"""The gateway before a server that answers as vLLM does: what is recorded, what the client and the server see."""

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from otlp_sink import Sink
from served_gateway import serving
from stub_vllm import PROMPT, Stub, ids_of, logprobs_of, stub_vllm

from spanmill import adapt
from spanmill.errors import ConfigError, ListenError
from spanmill.instrument.gateway import gateway
from spanmill.triplets.records import Rollout

Spans = Callable[[], list[ReadableSpan]]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
ASKED = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}


@pytest.fixture
def stub() -> Generator[Stub]:
    """The model server."""
    with stub_vllm() as running:
        running.unique_ids = True
        yield running


@pytest.fixture
def client(stub: Stub, emitted: Spans) -> Generator[httpx.Client]:
    """A client of a gateway before the model server."""
    with serving(f"{stub.url}/v1") as found:
        yield found


def rollouts(emitted: Spans) -> list[Rollout]:
    """What the spans come to."""
    return list(adapt(emitted()))


def sampled(rollout: Rollout) -> list[tuple[Any, ...]]:
    """(choice, prompt ids, sampled ids, logprobs, reason, source of the ids) of each row."""
    return sorted(
        (
            row.choice,
            None if row.prompt_token_ids is None else row.prompt_token_ids.tolist(),
            None if row.response_token_ids is None else row.response_token_ids.tolist(),
            None if row.response_logprobs is None else row.response_logprobs.tolist(),
            row.finish_reason,
            row.ids_source,
        )
        for row in rollout.triplets
    )


def truth(choice: int) -> tuple[Any, ...]:
    """The row of a choice."""
    return (choice, PROMPT, ids_of(choice), logprobs_of(choice), "stop", "gateway")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 2])
def test_chat(client: httpx.Client, stub: Stub, emitted: Spans, n: int, stream: bool) -> None:
    """Every choice is a row; the client sees what the server would have told it."""
    body = {**CHAT, "n": n, "stream": stream}
    through = client.post(f"/rollout/a%2Fb/attempt/2{PATH}", json=body)
    stub.answered = 0
    direct = httpx.post(stub.url + PATH, json=body)
    assert (direct.status_code, _parsed(direct)) == (through.status_code, _parsed(through))
    assert [{**body, **ASKED}, body] == stub.sent
    (rollout,) = rollouts(emitted)
    assert ("a/b", 2, "carrier") == (rollout.rollout_id, rollout.attempt, rollout.identity_source)
    assert [truth(choice) for choice in range(n)] == sampled(rollout)


def _parsed(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("prefix", "headers", "carrier"),
    [
        ("/rollout/r", {}, "path"),
        ("", {"x-spanmill-rollout-id": "r"}, "header"),
        ("", {"authorization": "Bearer sk-rollout-r:secret"}, "api_key"),
        ("/rollout/other", {"x-spanmill-rollout-id": "r"}, "header"),
    ],
)
def test_whose_request_it_is(
    client: httpx.Client, stub: Stub, emitted: Spans, prefix: str, headers: dict[str, str], carrier: str
) -> None:
    """By path, header or key, which reaches the server as its own; the server is told the rollout and the span."""
    client.post(prefix + PATH, json=CHAT, headers=headers)
    (received,) = stub.received
    (span,) = emitted()
    attributes = span.attributes or {}
    assert ("r", carrier) == (attributes["spanmill.rollout.id"], attributes["spanmill.rollout.carrier"])
    assert (PATH, "r") == (received.path, received.headers["x-spanmill-rollout-id"])
    assert span.context is not None
    assert f"{span.context.span_id:016x}" == received.headers["traceparent"].split("-")[2]
    if carrier == "api_key":
        assert "Bearer secret" == received.headers["authorization"]


def test_chunks_go_on_as_they_come(client: httpx.Client, stub: Stub, emitted: Spans) -> None:
    """The first chunk is there long before the last; a client that leaves ends the call without a finish reason."""
    stub.delay_s = 0.5
    start = time.monotonic()
    with client.stream("POST", f"/rollout/r{PATH}", json={**CHAT, "stream": True}) as answer:
        first = next(answer.iter_lines())
    assert (True, "chunk") == (time.monotonic() - start < 1.0, json.loads(first[6:])["object"].rpartition(".")[2])
    until = time.monotonic() + 10
    while not emitted() and time.monotonic() < until:
        time.sleep(0.05)
    (span,) = emitted()
    assert "gen_ai.response.finish_reasons" not in (span.attributes or {})


def test_what_the_client_asks_for_it_gets(client: httpx.Client, stub: Stub, emitted: Spans) -> None:
    """Its own options win."""
    answer = client.post(PATH, json={**CHAT, "return_token_ids": True, "logprobs": False}).json()
    assert (ids_of(0), None) == (answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"])
    assert [{**CHAT, "return_token_ids": True, "logprobs": False}] == stub.sent


def test_a_server_that_refuses_a_field(client: httpx.Client, stub: Stub, emitted: Spans) -> None:
    """It is asked once, then never again; the client notices nothing."""
    stub.unknown = ("return_token_ids",)
    assert [200, 200] == [client.post(PATH, json=CHAT).status_code for _ in range(2)]
    assert [True, False, False] == ["return_token_ids" in body for body in stub.sent]


def test_errors_pass_unchanged(client: httpx.Client, stub: Stub, emitted: Spans) -> None:
    """Status and body are the server's; the call failed and is not tried again."""
    stub.fails = 1
    answer = client.post(f"/rollout/r{PATH}", json=CHAT)
    assert (500, {"error": {"message": "try again"}}, 1) == (answer.status_code, answer.json(), len(stub.sent))
    (span,) = emitted()
    assert ("ClientResponseError", False) == ((span.attributes or {})["error.type"], span.status.is_ok)


def test_other_routes_pass(client: httpx.Client, stub: Stub, emitted: Spans) -> None:
    """What generates nothing, and what is to be left alone, makes no span and is not touched."""
    assert (200, {"version": "0.32.0"}) == ((got := client.get("/version")).status_code, got.json())
    client.post("/v1/embeddings?x=1", json={"model": "m", "input": "hi"})
    client.post(PATH, json=CHAT, headers={"x-spanmill-skip": "1"})
    assert (["/v1/embeddings?x=1", PATH], [{"model": "m", "input": "hi"}, CHAT], []) == (
        [request.path for request in stub.received],
        stub.sent,
        emitted(),
    )


@contextmanager
def raw_server(answer: bytes) -> Generator[str]:
    """A server that says the same bytes to every connection, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return  # closed
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def test_answers_pass_byte_for_byte(emitted: Spans) -> None:
    """Packed as they are, with each header as often as it came, and the length of what HEAD would have got."""
    packed = gzip.compress(b"hello")
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Long: "
    head += b"x" * 20_000 + b"\r\nContent-Length: %d\r\n\r\n" % len(packed)
    with raw_server(head + packed) as url, serving(url) as client:
        got = client.get("/anything%2Fodd?x=%20")
    with raw_server(head) as url, serving(url) as client:
        empty = client.head("/")
    assert (b"hello", 20_000, ["a=1", "b=2"]) == (
        got.content,
        len(got.headers["x-long"]),
        got.headers.get_list("set-cookie"),
    )
    assert (b"", str(len(packed))) == (empty.content, empty.headers["content-length"])


@pytest.mark.parametrize("length", [b"Content-Length: 1000\r\n", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
def test_an_answer_that_breaks_off(kind: bytes, length: bytes, emitted: Spans) -> None:
    """It is no whole answer for the client either: 502 where nothing was passed on, else it breaks off, too."""
    data = b'data: {"id": "a", "choices": []}\n\n'
    part = data if b"Length" in length else b"%x\r\n%s\r\n" % (len(data), data)
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n" + length + b"\r\n" + part
    with raw_server(answer) as url, serving(url) as client:
        if kind == b"application/json":
            assert 502 == client.post(PATH, json=CHAT).status_code
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                client.post(PATH, json={**CHAT, "stream": True})
        with pytest.raises(httpx.RemoteProtocolError):
            client.get("/v1/models")
    assert ["ClientPayloadError"] == [(span.attributes or {})["error.type"] for span in emitted()]


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nbroken\r\n\r\n"])
def test_a_server_that_speaks_no_http(answer: bytes, emitted: Spans) -> None:
    """502; the call failed and was sent once."""
    with raw_server(answer) as url, serving(url) as client:
        assert [502, 502] == [client.post(PATH, json=CHAT).status_code, client.post("/v1/x", json={}).status_code]
    assert [False] == [span.status.is_ok for span in emitted()]


def test_a_server_that_is_not_there(emitted: Spans) -> None:
    """502 in the words of an API error; the call failed."""
    with serving("http://127.0.0.1:9") as client:
        answer = client.post(PATH, json=CHAT)
    assert (502, "bad_gateway") == (answer.status_code, answer.json()["error"]["type"])
    assert ["ClientConnectorError"] == [(span.attributes or {})["error.type"] for span in emitted()]


def test_many_at_once_are_never_mixed(client: httpx.Client, stub: Stub, emitted: Spans) -> None:
    """Sixteen clients with a rollout each."""

    def one(name: str) -> None:
        httpx.post(f"{client.base_url}/rollout/{name}{PATH}", json={**CHAT, "model": name, "stream": True})

    names = [f"r{at:02}" for at in range(16)]
    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rollouts(emitted)
    assert [(name, [name], [truth(0)]) for name in names] == [
        (r.rollout_id, [t.model for t in r.triplets], sampled(r)) for r in found
    ]


def test_addresses_that_are_none() -> None:
    """They stop the start."""
    with pytest.raises(ConfigError, match="--upstream"):
        gateway("localhost:8000")
    with pytest.raises(ConfigError, match="--listen"):
        gateway("http://localhost:8000", "8800")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ListenError, match="in use"):
        gateway("http://localhost:8000", f"127.0.0.1:{taken.getsockname()[1]}")


FOREIGN = """
import json, os, urllib.request
url = os.environ["GATEWAY"] + "/rollout/" + os.environ["SPANMILL_ROLLOUT_ID"] + "/v1/chat/completions"
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
urllib.request.urlopen(urllib.request.Request(url, body, {"traceparent": os.environ["TRACEPARENT"]})).read()
"""


def test_an_agent_that_knows_only_its_environment(
    client: httpx.Client, emitted: Spans, grpc_sink: Sink, clean_environment: None
) -> None:
    """In whatever language: `spanmill run` names the rollout, the gateway records its calls; they are one."""
    words = ["run", "--rollout-id", "r", "--reward-from-exit", "--endpoint", grpc_sink.endpoint, "--"]
    command = [str(Path(sys.executable).parent / "spanmill"), *words, sys.executable, "-I", "-c", FOREIGN]
    subprocess.run(command, env={**os.environ, "GATEWAY": str(client.base_url)}, check=True, timeout=60)
    (rollout,) = adapt([*grpc_sink.bodies, *emitted()])
    assert ("r", "succeeded", 1.0, [truth(0)]) == (
        rollout.rollout_id,
        rollout.status,
        rollout.reward,
        sampled(rollout),
    )


def test_the_command(stub: Stub, grpc_sink: Sink, clean_environment: None) -> None:
    """It says where it listens, and on SIGTERM sends what it has and exits 0."""
    words = ["gateway", "--upstream", stub.url, "--listen", "127.0.0.1:0", "--endpoint", grpc_sink.endpoint]
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "spanmill"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    found = re.fullmatch(rf"spanmill gateway: ready listen=(\S+) upstream={stub.url}\n", process.stdout.readline())
    assert found is not None
    assert 200 == httpx.post(f"{found[1]}/rollout/r{PATH}", json=CHAT).status_code
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert (0, "", ["r"]) == (
        process.returncode,
        errors,
        [span["attributes"]["spanmill.rollout.id"] for span in grpc_sink.spans()],
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_gateway_that_is_ended_at_once_ends(number: signal.Signals) -> None:
    """A signal right after the ready line is not lost, whatever of the server has begun by then."""
    words = ["gateway", "--upstream", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"]
    for wait in (0.0, 0.01, 0.05):
        with subprocess.Popen(
            [str(Path(sys.executable).parent / "spanmill"), *words], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(wait)
            process.send_signal(number)
            assert 0 == process.wait(30)

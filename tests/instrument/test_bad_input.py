"""Servers that are no vLLM, and agents that do odd things: nobody notices anything, and nothing is made up or mixed."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from otlp_sink import Sink
from served_gateway import serving
from strict_server import TEXT, strict_server
from stub_vllm import stub_vllm

from spanmill import adapt, rollout
from spanmill.instrument import hosts, injector

Spans = Callable[[], list[ReadableSpan]]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES}
WITHOUT_IDS = (None, None, "stop", False)
FIELDS = {"return_token_ids", "logprobs", "top_logprobs"}


@pytest.fixture(autouse=True)
def injected() -> None:
    """The client is patched, and no server is known."""
    hosts.forget()
    injector.install()


def told(emitted: Spans) -> list[tuple[Any, ...]]:
    """(prompt ids, sampled ids, finish reason, trainable) of each row; nothing else is there."""
    found = list(adapt(emitted()))
    assert [] == [each for r in found for each in r.quarantined]
    return [(t.prompt_token_ids, t.response_token_ids, t.finish_reason, t.trainable) for r in found for t in r.triplets]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("hosts", [None, "*"], ids=["probed", "listed"])
def test_a_strict_server_at_the_client(
    hosts: str | None, stream: bool, emitted: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent does not notice; the server is asked for a field that it refuses once at most."""
    if hosts is not None:
        monkeypatch.setenv("SPANMILL_HOSTS", hosts)
    bodies: list[dict[str, Any]] = []
    with strict_server(bodies) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        for _ in range(3):
            answer: Any = client.chat.completions.create(**CHAT, stream=stream)
            said = [chunk.choices[0].delta.content for chunk in answer] if stream else answer.choices[0].message.content
            assert ([TEXT] if stream else TEXT) == said
    refused = [body for body in bodies if "return_token_ids" in body]
    assert (3 + len(refused), 0 if hosts is None else 1) == (len(bodies), len(refused))
    assert [WITHOUT_IDS] * 3 == told(emitted)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_strict_server_behind_the_gateway(stream: bool, emitted: Spans) -> None:
    """The client gets what the server says to those who ask it directly, also of a field that is its own mistake."""
    bodies: list[dict[str, Any]] = []
    with strict_server(bodies) as url, serving(url) as gateway, httpx.Client(base_url=url) as server:
        path = "/v1/chat/completions"
        body = {**CHAT, "stream": stream}
        direct = server.post(path, json=body)
        through = [gateway.post(path, json=body) for _ in range(2)]
        wrong = [client.post(path, json={**body, "no_such_field": 1}) for client in (server, gateway)]
    assert [(200, parsed(direct))] * 2 == [(answer.status_code, parsed(answer)) for answer in through]
    assert (422, wrong[0].json()) == (wrong[1].status_code, wrong[1].json())
    assert 1 == len([body for body in bodies if "return_token_ids" in body])
    assert [WITHOUT_IDS, WITHOUT_IDS, (None, None, None, False)] == sorted(told(emitted), key=repr)


def parsed(answer: httpx.Response) -> list[Any]:
    """An answer or its events, but for the id."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line and "[DONE]" not in line]
    return [{**json.loads(line), "id": ""} for line in lines]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_server_that_ignores_what_it_does_not_know(
    stream: bool, emitted: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers have no ids: the rows have none, and are not trained on."""
    monkeypatch.setenv("SPANMILL_HOSTS", "*")
    bodies: list[dict[str, Any]] = []
    with (
        strict_server(bodies, is_strict=False) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        answer: Any = client.chat.completions.create(**CHAT, stream=stream)
        last = list(answer)[-1] if stream else answer
        assert last.choices[0].logprobs is None
    assert [True] == [body.keys() > FIELDS for body in bodies]
    assert [WITHOUT_IDS] == told(emitted)


def test_two_event_loops_at_once(emitted: Spans) -> None:
    """In threads of their own, and one after another in one: each call is its own rollout's."""

    async def one(url: str, name: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client, rollout(name):
            stream = await client.chat.completions.create(model=name, messages=MESSAGES, stream=True)
            async for _ in stream:
                await asyncio.sleep(0)

    async def several(url: str, name: str) -> None:
        await asyncio.gather(*(one(url, f"{name}-{at}") for at in range(4)))

    def loops(url: str, name: str) -> None:
        for number in range(2):
            asyncio.run(several(url, f"{name}-{number}"))

    with stub_vllm() as stub:
        stub.unique_ids = True
        threads = [threading.Thread(target=loops, args=(stub.url, name)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    names = [f"{name}-{number}-{at}" for name in ("a", "b") for number in range(2) for at in range(4)]
    assert [(name, [name]) for name in names] == [
        (r.rollout_id, [t.model for t in r.triplets]) for r in adapt(emitted())
    ]


KILLED = """
import os, signal, sys, time
from openai import OpenAI
ask = lambda model: OpenAI().chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
ask("sent")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
ask("lost")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_agent_that_is_killed(grpc_sink: Sink, tmp_path: Path, clean_environment: None) -> None:
    """What was sent before is there, whole, what was not is gone; `spanmill run` says that the rollout failed."""
    script, arrived = tmp_path / "agent.py", tmp_path / "arrived"
    script.write_text(KILLED)
    command = [str(Path(sys.executable).parent / "spanmill"), "run", "--rollout-id", "r", "--endpoint"]
    command += [grpc_sink.endpoint, "--", sys.executable, str(script), str(arrived)]
    with stub_vllm() as stub:
        stub.unique_ids = True
        environ = {**os.environ, "OPENAI_BASE_URL": f"{stub.url}/v1", "OPENAI_API_KEY": "x"}
        environ |= {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "openai"}
        with subprocess.Popen(command, env=environ) as process:
            grpc_sink.wait_for(2, 60)  # the rollout's beginning, and the call
            arrived.touch()
            code = process.wait(60)
    (found,) = adapt(grpc_sink.bodies)
    assert (137, "r", "failed", ["sent"]) == (
        code,
        found.rollout_id,
        found.status,
        [row.model for row in found.triplets],
    )

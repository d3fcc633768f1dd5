"""What a rollout gives to clients, tried with the real OpenAI client; tests/agents has the Anthropic one and vLLM."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from opentelemetry.sdk.trace import ReadableSpan
from stub_vllm import Received, stub_vllm

from spanmill import adapt, rollout
from spanmill.instrument import Rollout
from spanmill.instrument.vllm.requests import Request, inner_key, read_path, read_request

Spans = Callable[[], list[ReadableSpan]]
FORMS = ("url", "key", "headers")


def options(form: str, r: Rollout, url: str) -> dict[str, Any]:
    """The client's options that say whose its requests are."""
    assert r.base_url is not None
    plain = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    return (
        plain
        | {
            "url": {"base_url": r.base_url},
            "key": {"api_key": r.api_key},
            "headers": {"default_headers": r.headers},
        }[form]
    )


def seen_by_server(request: Received) -> Request:
    """What the plugin and the gateway read of a request."""
    in_path, path = read_path(request.path.encode())
    return read_request(path.decode(), request.headers, in_path)


def whose(request: Received) -> tuple[str, int, str | None, str]:
    """(rollout, attempt, carrier, whose its message says it is)."""
    read = seen_by_server(request)
    assert read.identity is not None
    return read.identity.rollout_id, read.identity.attempt, read.carrier, request.body["messages"][0]["content"]


def ask(owner: str) -> dict[str, Any]:
    """A request that says whose it is."""
    return {"model": "m", "messages": [{"role": "user", "content": owner}]}


def test_sixteen_rollouts_at_once_in_one_process(emitted: Spans) -> None:
    """By URL, key or headers, from tasks and from threads that know nothing of rollouts: never mixed."""
    with stub_vllm() as stub:

        def from_afar(client: OpenAI, owner: str) -> None:
            client.chat.completions.create(**ask(owner))

        async def from_here(client: AsyncOpenAI, owner: str) -> None:
            await client.chat.completions.create(**ask(owner))

        async def agent(number: int, afar: ThreadPoolExecutor) -> None:
            form = FORMS[number % 3]
            async with rollout(f"run/{number}.x é", attempt=number % 2, base_url=f"{stub.url}/v1") as r:
                given = options(form, r, stub.url)
                async with AsyncOpenAI(**given) as client:
                    await asyncio.gather(*(from_here(client, r.id) for _ in range(3)))
                with OpenAI(**given) as client:
                    await asyncio.to_thread(from_afar, client, r.id)
                    await asyncio.wrap_future(afar.submit(from_afar, client, r.id))

        async def main() -> None:
            with ThreadPoolExecutor(2) as afar:
                await asyncio.gather(*(agent(number, afar) for number in range(16)))

        asyncio.run(main())
        found = sorted(map(whose, stub.received))
    carriers = {"url": "path", "key": "api_key", "headers": "baggage"}  # é: no header can hold it
    expected = [(f"run/{n}.x é", n % 2, carriers[FORMS[n % 3]], f"run/{n}.x é") for n in range(16) for _ in range(5)]
    assert sorted(expected) == found


ELSEWHERE = """
import sys, threading
from openai import OpenAI
from spanmill import rollout
with rollout("mine", base_url=sys.argv[1], group_id="g") as r:
    plain = {"base_url": sys.argv[1], "api_key": "none"}
    own = {"url": {"base_url": r.base_url}, "key": {"api_key": r.api_key}, "headers": {"default_headers": r.headers}}
    client = OpenAI(**plain | own[sys.argv[2]])
    ask = {"model": "m", "messages": [{"role": "user", "content": "mine"}]}
    with rollout("another"):
        thread = threading.Thread(target=lambda: client.chat.completions.create(**ask))
        thread.start()
        thread.join()
"""


@pytest.mark.parametrize("form", FORMS)
def test_a_client_made_for_one_rollout_names_it_anywhere(form: str) -> None:
    """Also in a thread that was started within another rollout."""
    with stub_vllm() as stub:
        command = [sys.executable, "-c", ELSEWHERE, f"{stub.url}/v1", form]
        subprocess.run(command, env={**os.environ, "SPANMILL_EXIT_TIMEOUT": "0"}, check=True, timeout=60)
        assert ["mine"] == [whose(request)[0] for request in stub.received]


def test_the_servers_own_key_goes_along(emitted: Spans) -> None:
    """A server that checks keys finds its own behind the rollout's."""
    with rollout("a.b/c", attempt=3, api_key="secret:1") as r:
        assert ("sk-rollout-a%2Eb%2Fc.3:secret:1", "secret:1") == (r.api_key, inner_key(r.api_key))
        assert r.base_url is None


def test_before_it_is_entered_a_rollout_has_no_address() -> None:
    """Without an id there is none yet."""
    r = rollout(base_url="http://host/v1")
    for ask_for in (lambda: r.base_url, lambda: r.api_key, lambda: r.headers):
        with pytest.raises(RuntimeError, match="the rollout has not begun"):
            ask_for()


def test_metrics_stand_in_the_rewards_and_count_for_nothing(emitted: Spans) -> None:
    """Numbers by name, sent at the end; a name that is a reward's is refused, what is no number left out."""
    with rollout("a") as r:
        r.reward(0.5)
        r.metrics["steps"] = 3
        r.metrics |= {"ok": True, "text": "no number", "final": 9.0}  # pyright: ignore[reportAttributeAccessIssue]
    (row,) = adapt(emitted())
    assert (0.5, [("", 0.5), ("steps", 3.0), ("ok", 1.0)]) == (row.reward, [(x.name, x.value) for x in row.rewards])


def test_task_input_and_claims_are_in_the_metadata(emitted: Spans) -> None:
    """As they were given; what is no JSON is left out."""
    times = ["2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"]
    with rollout("a", attempt=1, task_input={"q": ["é", 1.5]}, claimed_at=times, resources_id="w"):
        pass
    with rollout("b", task_input={1, 2}, claimed_at="2026"):
        pass
    a, b = (json.loads(row.metadata) for row in adapt(emitted()))
    assert ({"input": {"q": ["é", 1.5]}, "claims": 2, "claimed_at": times}, "w") == (a["task"], a["resources_id"])
    assert "task" not in b

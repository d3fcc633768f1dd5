"""VLLM in other shapes than one small server: several API servers before one engine, a model that calls tools."""

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_vllm import HERE, Sampled, VllmServer, copied_tool_model, from_row, new_rollout, running_server
from told import ASK, ask

pytestmark = pytest.mark.vllm

Json = Any

CHAT = "/v1/chat/completions"


@pytest.mark.slow
def test_several_api_servers(tiny_model: Path) -> None:
    """With `--api-server-count 2` each process records what it serves: no call is missing, none is twice."""
    with running_server(tiny_model, "--api-server-count", "2", launcher=(str(HERE / "vllm_cli.py"), "serve")) as server:

        def run(i: int) -> tuple[str, list[Sampled]]:
            rollout_id = new_rollout()
            body = {**ASK, "messages": [{"role": "user", "content": f"fox {i}"}], "n": 2, "logprobs": True}
            return rollout_id, ask(server, CHAT, body, rollout_id, stream=i % 2 == 0)

        with ThreadPoolExecutor(16) as pool:
            told = dict(pool.map(run, range(64)))
        assert {r: sorted(sampled) for r, sampled in told.items()} == {r: server.sampled(r, 2) for r in told}
        assert 128 == sum(_emitted(server, 2).values())


def _emitted(server: VllmServer, processes: int) -> dict[int, int]:
    """How many spans each process of a server has emitted, by its id; asked until so many have answered."""
    found: dict[int, int] = {}
    until = time.monotonic() + 30
    while len(found) < processes and time.monotonic() < until:
        status = httpx.get(f"{server.url}/spanmill/status").json()
        found[status["pid"]] = status["counters"]["emitted"]
    return found


@pytest.fixture(scope="module")
def tool_vllm(tmp_path_factory: pytest.TempPathFactory) -> Generator[VllmServer]:
    """A model that calls tools by itself."""
    model = copied_tool_model(tmp_path_factory.mktemp("tools"))
    with running_server(model, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as server:
        yield server


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look up the price of an item.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 3])
def test_tools_that_the_model_calls(tool_vllm: VllmServer, n: int, stream: bool) -> None:
    """With `tool_choice` auto, streamed or not, each choice's row has the ids and logprobs that the engine sampled."""
    asking, mine = new_rollout(), new_rollout()
    messages = [{"role": "user", "content": "[task-00000001] How much is fig?"}]
    body = {**ASK, "messages": messages, "tools": TOOLS, "n": n, "seed": 4, "max_tokens": 100}
    told = ask(tool_vllm, CHAT, {**body, "logprobs": True, "top_logprobs": 1}, asking, stream=False)
    if stream:
        events = tool_vllm.stream(CHAT, body, x_spanmill_rollout_id=mine)
    else:
        events = [tool_vllm.post(CHAT, body, x_spanmill_rollout_id=mine).json()]
    assert {"tool_calls"} <= {c["finish_reason"] for e in events for c in e["choices"]}
    engines = {"tool_calls": "stop"}  # what the API makes of it, the engine does not know
    expected = [
        t._replace(response_id=events[0]["id"], finish_reason=engines.get(str(t.finish_reason), t.finish_reason))
        for t in told
    ]
    assert sorted(expected) == sorted(map(from_row, tool_vllm.rollout(mine, n).triplets))

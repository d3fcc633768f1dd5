"""The examples, as they stand, against a real vLLM: their rows are what the engine sampled."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from environments import ROOT, in_environment
from otlp_sink import Sink
from running_vllm import MODEL, Sampled, VllmServer, from_row, new_rollout

from spanmill import Rollout, adapt

pytestmark = [pytest.mark.agents, pytest.mark.vllm]
SPANMILL = str(Path(sys.executable).parent / "spanmill")
QUESTION = "[task-00c0ffee] What do apple and pear cost together?"

ENGINE_WORDS = {"tool_calls": "stop"}
"""What vLLM's API calls a stop after which it found tool calls is a stop for the engine."""

EXAMPLES = [
    *((f"openai{major}", example) for major in (1, 2, 3) for example in ("openai_tools", "openai_stream")),
    ("langgraph", "langgraph_agent"),
    ("openai-agents", "openai_agents_sdk"),
    ("pydantic-ai", "pydantic_ai_agent"),
    ("litellm", "litellm_calls"),
    ("smolagents", "smolagents_agent"),
    ("instrumentors", "openai_tools"),
    ("instrumentors", "openai_stream"),
]


def environment(url: str) -> dict[str, str]:
    """What an agent finds: a model server, and nothing of whoever runs the tests."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "SPANMILL_"))}
    addresses = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
    keys = {
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_API_KEY": "none",
        "MODEL": MODEL,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return {**clean, **addresses, **keys}


def finished(command: list[str], env: dict[str, str]) -> str:
    """What a command that ends well has printed."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert 0 == done.returncode, done.stderr
    return done.stdout


def run_example(where: str, example: str, engine: VllmServer, sink: Sink, rollout_id: str, *options: str) -> str:
    """Run an example under `spanmill run` to its end, and return what it printed."""
    program = ROOT / "examples" / (example if "." in example else f"{example}.py")
    command = [SPANMILL, "run", "--rollout-id", rollout_id, "--endpoint", sink.endpoint, *options, "--"]
    return finished([*command, *in_environment(where, program, QUESTION)], environment(engine.url))


def sampled_by(sink: Sink, rollout_id: str) -> list[Sampled]:
    """The rows of the rollout that the spans received come to, sorted."""
    (rollout,) = adapt(sink.bodies)
    assert (rollout_id, "succeeded", []) == (rollout.rollout_id, rollout.status, rollout.quarantined)
    return sorted(map(from_row, rollout.triplets))


def as_engine_says(rows: list[Sampled]) -> list[Sampled]:
    """The rows of a client in the words of the engine."""
    return [row._replace(finish_reason=ENGINE_WORDS.get(row.finish_reason or "", row.finish_reason)) for row in rows]


@pytest.mark.parametrize(("where", "example"), EXAMPLES)
def test_rows_are_what_the_engine_sampled(where: str, example: str, engine: VllmServer, collected: Sink) -> None:
    """Prompt ids, sampled ids, logprobs and finish reason of every call, read off the client alone."""
    rollout_id = new_rollout()
    assert run_example(where, example, engine, collected, rollout_id).strip()
    ours = sampled_by(collected, rollout_id)
    truth = engine.sampled(rollout_id, len(ours))
    if example == "openai_stream":  # one of its streams is given up: the engine may have gone on for some tokens
        ours, truth = ([row for row in rows if row.finish_reason not in (None, "abort")] for rows in (ours, truth))
    assert truth == as_engine_says(ours)


def test_anthropic_rows_come_from_the_engine(engine: VllmServer, collected: Sink) -> None:
    """The Messages API gives no ids: text of the client's spans and ids of the engine's make one row for each call."""
    rollout_id = new_rollout()
    run_example("anthropic", "anthropic_messages", engine, collected, rollout_id)
    engine.rollout(rollout_id, 2)
    (both,) = [r for r in adapt([*collected.bodies, *engine.sink.bodies]) if r.rollout_id == rollout_id]
    assert [("engine", True)] * 2 == [(row.ids_source, row.trainable) for row in both.triplets]


def test_tasks_of_an_agent_as_it_stands(engine: VllmServer, collected: Sink, tmp_path: Path) -> None:
    """`spanmill run --tasks`: each rollout's rows are what the engine sampled for it, and its group is complete."""
    run = new_rollout()
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(f'{{"id": "a", "input": "{QUESTION}"}}\n{{"id": "b", "input": "What is a melon?"}}\n')
    many = ["--tasks", str(tasks), "--repeat", "3", "--parallel", "4", "--endpoint", collected.endpoint]
    command = in_environment("openai3", ROOT / "examples" / "openai_tools.py", "{input}")
    finished([SPANMILL, "run", "--rollout-id", run, *many, "--", *command], environment(engine.url))
    rollouts = adapt(collected.bodies)
    expected = [(f"{run}/{task}/{k}", f"{run}/{task}", 3, "succeeded") for task in "ab" for k in range(3)]
    assert expected == [(r.rollout_id, r.group_id, r.group_size, r.status) for r in rollouts]
    for rollout in rollouts:
        ours = sorted(map(from_row, rollout.triplets))
        assert engine.sampled(rollout.rollout_id, len(ours)) == as_engine_says(ours)


@contextmanager
def gateway(upstream: str, endpoint: str) -> Generator[str]:
    """The address of a running `spanmill gateway`."""
    command = [SPANMILL, "gateway", "--upstream", upstream, "--listen", "127.0.0.1:0", "--endpoint", endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"listen=(\S+)", process.stdout.readline())
        assert found is not None
        try:
            yield found[1]
        finally:
            process.terminate()


def test_an_agent_on_node_through_the_gateway(engine: VllmServer, collected: Sink) -> None:
    """The Vercel AI SDK: `--base-url` names the rollout in the URL, the gateway's rows are what the engine sampled."""
    rollout_id = f"{new_rollout()}/node/0"
    with gateway(engine.url, collected.endpoint) as url:
        assert run_example("node", "vercel_ai_agent.mjs", engine, collected, rollout_id, "--base-url", url).strip()
    ours = sampled_by(collected, rollout_id)
    assert engine.sampled(rollout_id, len(ours)) == as_engine_says(ours)


def test_an_agent_on_node_by_environment_alone(engine: VllmServer, collected: Sink) -> None:
    """Pointed at vLLM itself: its plugin reads the rollout from the URL, and the run's start and end join its rows."""
    rollout_id = f"{new_rollout()}/node/1"
    said = run_example("node", "vercel_ai_agent.mjs", engine, collected, rollout_id, "--base-url", engine.url)
    calls = int(said.partition(" ")[0]) + 1
    engine.rollout(rollout_id, calls)
    (both,) = [r for r in adapt([*collected.bodies, *engine.sink.bodies]) if r.rollout_id == rollout_id]
    assert ("succeeded", calls, []) == (both.status, len(both.triplets), both.quarantined)
    assert [("engine", True)] * calls == [(row.ids_source, row.trainable) for row in both.triplets]


@pytest.mark.parametrize("recorded", [False, True], ids=["server alone", "client too"])
def test_sixteen_rollouts_in_one_process_are_never_mixed(recorded: bool, engine: VllmServer, collected: Sink) -> None:
    """By URL, key or headers, with the OpenAI and the Anthropic client: each row says the same of whose it is."""
    run = new_rollout()
    command = in_environment("clients", Path(__file__).with_name("many_rollouts.py"), run, engine.url, MODEL)
    if recorded:
        command = [str(Path(command[0]).with_name("opentelemetry-instrument")), *command]
    finished(command, {**environment(engine.url), "OTEL_EXPORTER_OTLP_ENDPOINT": collected.endpoint})
    for number in range(16):
        engine.rollout(f"{run}/{number}", 5)
    rollouts = [r for r in adapt([*collected.bodies, *engine.sink.bodies]) if r.rollout_id.startswith(run)]
    ids = [f"{run}/{number}" for number in range(16)]
    assert sorted(ids) == [r.rollout_id for r in rollouts]
    assert {own: (n % 2, 5, float(n), "succeeded") for n, own in enumerate(ids)} == {
        r.rollout_id: (r.attempt, r.num_calls, r.reward, r.status) for r in rollouts
    }
    assert {own: {own} for own in ids} == {r.rollout_id: askers(r) for r in rollouts}


def askers(rollout: Rollout) -> set[str]:
    """Who the calls of a rollout say that they are of."""
    messages = (json.loads(row.messages or "[]") for row in rollout.triplets)
    return {str(found[0]["content"]).partition(" asks ")[0] for found in messages}

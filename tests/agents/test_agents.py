"""The examples, as they stand, against a real vLLM: their rows are what the engine sampled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT, python_of
from otlp_sink import Sink
from running_vllm import MODEL, Sampled, VllmServer, from_row, new_rollout

from spanmill import adapt

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
    ("instrumentors", "openai_tools"),
    ("instrumentors", "openai_stream"),
]


def run_example(environment: str, example: str, engine: VllmServer, sink: Sink, rollout_id: str) -> str:
    """Run an example under `spanmill run` to its end, and return what it printed."""
    python = python_of(environment)
    if not python.exists():
        pytest.skip(f"needs the environment {environment}: make test-agents makes it")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "SPANMILL_"))}
    addresses = {"OPENAI_BASE_URL": f"{engine.url}/v1", "ANTHROPIC_BASE_URL": engine.url}
    keys = {
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_API_KEY": "none",
        "MODEL": MODEL,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [SPANMILL, "run", "--rollout-id", rollout_id, "--endpoint", sink.endpoint, "--"]
    command += [str(python), str(ROOT / "examples" / f"{example}.py"), QUESTION]
    done = subprocess.run(
        command, env={**clean, **addresses, **keys}, capture_output=True, text=True, timeout=120, check=False
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def sampled_by(sink: Sink, rollout_id: str) -> list[Sampled]:
    """The rows of the rollout that the agent's own spans come to, sorted."""
    (rollout,) = adapt(sink.bodies)
    assert (rollout_id, "succeeded", []) == (rollout.rollout_id, rollout.status, rollout.quarantined)
    return sorted(map(from_row, rollout.triplets))


@pytest.mark.parametrize(("environment", "example"), EXAMPLES)
def test_rows_are_what_the_engine_sampled(environment: str, example: str, engine: VllmServer, collected: Sink) -> None:
    """Prompt ids, sampled ids, logprobs and finish reason of every call, read off the client alone."""
    rollout_id = new_rollout()
    assert run_example(environment, example, engine, collected, rollout_id).strip()
    ours = sampled_by(collected, rollout_id)
    truth = engine.sampled(rollout_id, len(ours))
    if example == "openai_stream":  # one of its streams is given up: the engine may have gone on for some tokens
        ours, truth = ([row for row in rows if row.finish_reason not in (None, "abort")] for rows in (ours, truth))
    assert truth == [
        row._replace(finish_reason=ENGINE_WORDS.get(row.finish_reason or "", row.finish_reason)) for row in ours
    ]


def test_anthropic_rows_come_from_the_engine(engine: VllmServer, collected: Sink) -> None:
    """The Messages API gives no ids: text of the client's spans and ids of the engine's make one row for each call."""
    rollout_id = new_rollout()
    run_example("anthropic", "anthropic_messages", engine, collected, rollout_id)
    engine.rollout(rollout_id, 2)
    (both,) = [r for r in adapt([*collected.bodies, *engine.sink.bodies]) if r.rollout_id == rollout_id]
    assert [("engine", True)] * 2 == [(row.ids_source, row.trainable) for row in both.triplets]

"""VLLM used in process, without a server."""

import json
from pathlib import Path
from typing import Any

import pytest
from otlp_sink import http_receiver
from running_vllm import as_float32, from_row, run_in_vllm

from spanmill.adapters.adapt import adapt
from spanmill.collector.decode import decode_traces

pytestmark = pytest.mark.vllm


def _choices(told: list[list[Any]]) -> list[Any]:
    return sorted([choice, prompt, response, as_float32(logprobs)] for choice, prompt, response, logprobs in told)


def test_generate_and_chat(tiny_model: Path) -> None:
    """`LLM.generate` and `LLM.chat` make rows of what they return; beams and skipped calls make none.

    Who asked for no logprobs gets none, and the rows have them all the same.
    """
    with http_receiver() as sink:
        done = run_in_vllm("offline.py", str(tiny_model), OTEL_EXPORTER_OTLP_ENDPOINT=sink.endpoint)
        assert done.returncode == 0, done.stderr[-3000:]
        spans = [span for body in sink.bodies for span in decode_traces(body).spans]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    told = {line["what"]: line["choices"] for line in lines if "what" in line}
    assert [None] * 4 == [logprobs for *_, logprobs in told["silent"]]
    told["silent"] = [[*silent[:3], asks[3]] for silent, asks in zip(told["silent"], told["asks"], strict=True)]
    rollouts = {r.rollout_id: r for r in adapt(spans).rollouts}
    rows = {name: [from_row(t) for t in r.triplets] for name, r in rollouts.items()}
    found = {
        name: sorted([r.choice, r.prompt_ids, r.response_ids, r.logprobs] for r in of) for name, of in rows.items()
    }
    assert {name: _choices(of) for name, of in told.items()} | {"skipped": [], "beams": []} == found
    versions = {name: {t.policy_version for t in r.triplets} for name, r in rollouts.items()}
    assert (versions["silent"], versions["chat"]) == ({None}, {"7"})
    assert {"emitted": len(spans), "dropped": 0, "failed": 0, "ignored": 0} == lines[-1]

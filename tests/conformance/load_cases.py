"""The conformance cases: OTLP JSON lines and the rows that must come of them.

A case is a folder of `cases/`:

    input.jsonl     OTLP/JSON, one ExportTraceServiceRequest or ExportLogsServiceRequest a line
    rewards.jsonl   optional, given to --rewards
    args.json       optional, a list of further arguments of `spanmill build`
    expect.json     {"rollouts": [row, ...], "triplets": ..., "episodes": ..., "quarantine": ..., "exact": [table]}:
                    tables in "exact" hold no more rows than are listed
    case.md         what is tested, where it comes from, why the expected value is right
"""

import base64
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CASES = Path(__file__).parent / "cases"
THOUSAND_TURNS = "core-thousand-turns"

LEVELS = (("resourceSpans", "scopeSpans", "spans"), ("resourceLogs", "scopeLogs", "logRecords"))


class Case(NamedTuple):
    """One conformance case, read."""

    name: str
    requests: list[dict[str, Any]]
    expect: dict[str, Any]
    rewards: Path | None = None
    arguments: tuple[str, ...] = ()


def case_names() -> list[str]:
    """Every case by name, sorted."""
    return sorted([THOUSAND_TURNS, *(path.parent.name for path in CASES.glob("*/expect.json"))])


def load_case(name: str) -> Case:
    """Read a case from its folder; the one of a thousand turns is generated."""
    if name == THOUSAND_TURNS:
        return thousand_turns()
    folder = CASES / name
    rewards, arguments = folder / "rewards.jsonl", folder / "args.json"
    return Case(
        name,
        [json.loads(line) for line in (folder / "input.jsonl").read_text().splitlines()],
        json.loads((folder / "expect.json").read_text()),
        rewards if rewards.exists() else None,
        tuple(json.loads(arguments.read_text())) if arguments.exists() else (),
    )


def shuffled(case: Case, seed: int) -> list[dict[str, Any]]:
    """The case's requests in another order, and within each the resources, scopes and spans too."""
    rng = random.Random(f"{case.name}/{seed}")
    requests = json.loads(json.dumps(case.requests))
    rng.shuffle(requests)
    for request in requests:
        for outer, inner, leaf in LEVELS:
            rng.shuffle(request.get(outer, []))
            for resource in request.get(outer, []):
                rng.shuffle(resource.get(inner, []))
                for scope in resource.get(inner, []):
                    rng.shuffle(scope.get(leaf, []))
    return requests


def write_lines(requests: list[dict[str, Any]], path: Path) -> Path:
    """Write requests as OTLP JSON lines."""
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


# A chain of a thousand single-token turns: each prompt is the one before plus its answer, so all turns are one Episode
# of 1,001 tokens, all but the first trained. A merge that compares every pair of calls does not get through it.

TURNS = 1000
TRACE_ID, ROOT_ID = "49b2689796e1ea4418347468216126c0", "c2314a7ccb1f6e9d"
STARTED_NS = 1_780_000_000_000_000_000


def thousand_turns() -> Case:
    """A rollout of a thousand turns with one token each, 50 spans a request; its root span comes last, as roots do."""
    answers = [100 + 7 * turn % 50 for turn in range(TURNS)]
    logprobs = [-(token % 8 + 1) / 8 for token in answers]  # eighths are exact as float32
    spans = [_turn_span(turn, [1, *answers[:turn]], answers[turn], logprobs[turn]) for turn in range(TURNS)]
    root = _span(ROOT_ID, "", "rollout", 0, 20_100, {"spanmill.rollout.id": "r1"})
    requests = [_request(spans[i : i + 50]) for i in range(0, TURNS, 50)] + [_request([root])]
    return Case(THOUSAND_TURNS, requests, _thousand_turns_expected(answers, logprobs))


def _thousand_turns_expected(answers: list[int], logprobs: list[float]) -> dict[str, Any]:
    rollout = {"rollout_id": "r1", "attempt": 0}
    return {
        "rollouts": [
            rollout
            | dict.fromkeys(("num_calls", "num_triplets", "tokens_captured", "tokens_trained"), TURNS)
            | {"num_episodes": 1, "tokens_masked": 0}
        ],
        "triplets": [
            rollout
            | {
                "turn": turn,
                "call_id": f"chatcmpl-a{turn}",
                "parent_call_id": f"chatcmpl-a{turn - 1}" if turn else None,
                "prompt_token_ids": [1, *answers[:turn]],
                "response_token_ids": [answers[turn]],
                "trainable": True,
            }
            for turn in (0, 1, 500, 999)
        ],
        "episodes": [
            rollout
            | {
                "episode": 0,
                "input_ids": [1, *answers],
                "loss_mask": [0] + [1] * TURNS,
                "logprobs": [0.0, *logprobs],
                "prompt_length": 1,
                "num_turns": TURNS,
            }
        ],
        "quarantine": [],
        "exact": ["rollouts", "episodes", "quarantine"],
    }


def _turn_span(turn: int, prompt: list[int], answer: int, logprob: float) -> dict[str, Any]:
    attributes: dict[str, str | int | list[str]] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "policy-7b",
        "gen_ai.response.model": "policy-7b",
        "gen_ai.response.id": f"chatcmpl-a{turn}",
        "gen_ai.response.finish_reasons": ["stop"],
        "spanmill.capture": "client",
        "spanmill.prompt.token_ids": _packed("i", prompt),
        "spanmill.prompt.token_count": len(prompt),
        "gen_ai.usage.input_tokens": len(prompt),
        "spanmill.response.token_ids": _packed("i", [answer]),
        "spanmill.response.token_count": 1,
        "gen_ai.usage.output_tokens": 1,
        "spanmill.response.logprobs": _packed("f", [logprob]),
        "spanmill.logprobs.mode": "raw",
    }
    start_ms = 10 + 20 * turn
    return _span(f"{turn + 1:016x}", ROOT_ID, "chat policy-7b", start_ms, start_ms + 10, attributes)


def _span(
    span_id: str, parent_id: str, name: str, start_ms: int, end_ms: int, attributes: dict[str, str | int | list[str]]
) -> dict[str, Any]:
    return {
        "traceId": TRACE_ID,
        "spanId": span_id,
        "parentSpanId": parent_id,
        "name": name,
        "kind": 3 if parent_id else 1,
        "startTimeUnixNano": str(STARTED_NS + start_ms * 1_000_000),
        "endTimeUnixNano": str(STARTED_NS + end_ms * 1_000_000),
        "attributes": list(_attributes(attributes)),
        "status": {},
    }


def _attributes(values: dict[str, str | int | list[str]]) -> Iterator[dict[str, Any]]:
    for key, value in values.items():
        if isinstance(value, list):
            yield {"key": key, "value": {"arrayValue": {"values": [{"stringValue": text} for text in value]}}}
        elif isinstance(value, int):
            yield {"key": key, "value": {"intValue": str(value)}}
        else:
            yield {"key": key, "value": {"stringValue": value}}


def _packed(kind: str, numbers: list[Any]) -> str:
    """Base64 of little-endian int32 (`i`) or float32 (`f`)."""
    return base64.b64encode(struct.pack(f"<{len(numbers)}{kind}", *numbers)).decode()


def _request(spans: list[dict[str, Any]]) -> dict[str, Any]:
    resource = {"attributes": list(_attributes({"service.name": "agent"}))}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "spanmill"}, "spans": spans}]}]}

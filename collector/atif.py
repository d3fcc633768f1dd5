"""ATIF documents as requests: each inference of a trajectory becomes a span that `adapters/dialects/atif` reads.

What `spanmill export --to atif` put under `extra.spanmill` comes back as what it was; of other writers' documents the
session is the rollout. A time that is not recorded stays near 1970, in the order of the steps.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, cast

from spanmill import semconv as sc
from spanmill.collector import rewards
from spanmill.collector.journal import Kind
from spanmill.errors import InputError
from spanmill.triplets.records import Json, Reward

EXTRA: Final = "spanmill"
PROMPT: Final = "gen_ai.response.prompt_token_ids"
RESPONSE: Final = "gen_ai.response.completion_token_ids"
LOGPROBS: Final = "gen_ai.response.logprobs"
SESSION: Final = "atif.session_id"
STEP: Final = "atif.step_id"

Object = dict[str, Json]

_LABELS: Final = {
    "rollout_id": sc.ROLLOUT_ID,
    "attempt": sc.ROLLOUT_ATTEMPT,
    "group_id": sc.GROUP_ID,
    "group_size": sc.GROUP_SIZE,
    "task_id": sc.TASK_ID,
    "mode": sc.MODE,
}
_SAMPLING: Final = {
    "logprobs_mode": sc.LOGPROBS_MODE,
    "temperature": sc.GEN_AI_TEMPERATURE,
    "top_p": sc.GEN_AI_TOP_P,
    "top_k": sc.GEN_AI_TOP_K,
    "max_tokens": sc.GEN_AI_MAX_TOKENS,
    "stop_reason": sc.STOP_REASON,
}


def is_atif(document: Json) -> bool:
    """Whether a JSON value is an ATIF document. Raises InputError for one of a version other than 1."""
    version = cast("Object", document).get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, str) or not version.startswith("ATIF-"):
        return False
    if not version.startswith("ATIF-v1."):
        raise InputError(f"a document of {version:.40} is not understood; this spanmill reads ATIF-v1")
    return True


def records(document: Object) -> Iterator[tuple[Kind, bytes]]:
    """The document as an OTLP/JSON request and, if it has rewards, a record of them."""
    about = _own(document)
    session = (
        _text(about.get("rollout_id")) or _text(document.get("session_id")) or _text(document.get("trajectory_id"))
    )
    trace = _hex(32, session or json.dumps(document), about.get("attempt") or 0)
    spans: dict[str, Object] = {}
    judged: list[Reward] = []
    for number, trajectory in enumerate(_trajectories(document)):
        for span, reward in _calls(trajectory, trace, number):
            if session is not None and reward is not None and span["spanId"] not in spans:
                judged.append(Reward(session, reward, _attempt(about), cast("str", span["spanId"]), source="table"))
            spans.setdefault(cast("str", span["spanId"]), span)
    status, final = about.get("status"), _number(about.get("reward"))
    if status in sc.STATUSES and status != "unknown":
        last = max((int(cast("str", span["endTimeUnixNano"])) for span in spans.values()), default=0)
        spans["end"] = _span(trace, _hex(16, trace, "end"), "rollout", last, last, {sc.ROLLOUT_STATUS: status})
    labels = {attribute: about.get(name) for name, attribute in _LABELS.items()} | {sc.ROLLOUT_ID: session}
    scope = {"resource": {"attributes": _attributes(labels)}, "scopeSpans": [{"spans": list(spans.values())}]}
    yield Kind.TRACES_JSON, json.dumps({"resourceSpans": [scope]}, separators=(",", ":")).encode()
    if session is not None and final is not None:
        judged.append(Reward(session, final, _attempt(about), source="table"))
    if judged:
        yield Kind.REWARDS, rewards.encode(judged)


def _trajectories(document: Object) -> Iterator[Object]:
    yield document
    for below in _objects(document.get("subagent_trajectories")):
        yield from _trajectories(below)


def _calls(trajectory: Object, trace: str, number: int) -> Iterator[tuple[Object, float | None]]:
    """A span and the step reward of each inference, with what was said before it as its prompt."""
    agent = _object(trajectory.get("agent"))
    shared = {
        sc.GEN_AI_OPERATION: "chat",
        sc.GEN_AI_AGENT_NAME: None if agent.get("name") == "unknown" else _text(agent.get("name")),
        sc.GEN_AI_TOOL_DEFINITIONS: _dumped(agent.get("tool_definitions")),
        SESSION: _text(trajectory.get("session_id")),
    }
    told: list[Object] = []
    """The messages so far."""
    fresh = 0
    """Where those after the last inference begin."""
    for place, step in enumerate(_objects(trajectory.get("steps")), 1):
        own = _own(step)
        said = _said(step, own)
        if step.get("source") != "agent":
            told.append(said)
            continue
        call_id = _text(own.get("call_id"))
        copied = step.get("is_copied_context") is True and call_id is None
        if step.get("llm_call_count") != 0 and not copied:
            asked = told[fresh:] if own.get("restart") is True else told
            name = call_id or f"{_text(trajectory.get('trajectory_id')) or number}/{place}"
            start = _nanoseconds(step.get("timestamp"), place)
            attributes = {**shared, **_inference(step, own, asked, said), STEP: place}
            attributes[sc.GEN_AI_REQUEST_MODEL] = _text(step.get("model_name")) or _text(agent.get("model_name"))
            choice = own.get("choice") or None
            attributes[sc.CHOICE_INDEX] = choice
            attributes[sc.GEN_AI_RESPONSE_ID] = call_id.removesuffix(f"#{choice}") if call_id else None
            end = max(start, _nanoseconds(own.get("ended_at"), 0))
            yield _span(trace, _hex(16, trace, name), "chat", start, end, attributes), _number(own.get("reward"))
            fresh = len(told) + 1
        if len(said) > 1:
            told.append(said)
        for result in _objects(_object(step.get("observation")).get("results")):
            told.append(
                {"role": "tool", "tool_call_id": result.get("source_call_id"), "content": result.get("content")}
            )


def _inference(step: Object, own: Object, asked: list[Object], said: Object) -> Object:
    metrics = _object(step.get("metrics"))
    alone = step.get("llm_call_count") in (None, 1)  # else the numbers are sums over several
    counted = metrics if alone else {}
    finish = _text(own.get("finish_reason"))
    return {
        sc.GEN_AI_INPUT_MESSAGES: _dumped(asked or None),
        sc.GEN_AI_OUTPUT_MESSAGES: _dumped([said] if len(said) > 1 else None),
        sc.GEN_AI_FINISH_REASONS: None if finish is None else [finish],
        # What spanmill wrote are lengths of the ids; a usage would be a sum over the choices of a request.
        sc.GEN_AI_INPUT_TOKENS: None if own else counted.get("prompt_tokens"),
        sc.GEN_AI_OUTPUT_TOKENS: None if own else counted.get("completion_tokens"),
        PROMPT: _dumped(counted.get("prompt_token_ids")),
        RESPONSE: _dumped(counted.get("completion_token_ids")),
        LOGPROBS: _dumped(counted.get("logprobs")),
        sc.POLICY_VERSIONS: _dumped(own.get("policy_versions") or None),
        **{attribute: own.get(name) for name, attribute in _SAMPLING.items()},
    }


def _said(step: Object, own: Object) -> Object:
    """The step as a message; of an agent that said nothing only its role."""
    source = step.get("source")
    if source != "agent":
        role = _text(own.get("role")) or ("system" if source == "system" else "user")
        asked = own.get("tool_call_id")
        return {"role": role, "content": step.get("message"), **({} if asked is None else {"tool_call_id": asked})}
    if EXTRA in _object(step.get("extra")) and "response" in own:
        return _object(own["response"]) or {"role": "assistant"}
    called = [
        {
            "id": call.get("tool_call_id"),
            "type": "function",
            "function": {"name": call.get("function_name"), "arguments": json.dumps(call.get("arguments"))},
        }
        for call in _objects(step.get("tool_calls"))
    ]
    found = {
        "content": step.get("message") or None,
        "reasoning_content": step.get("reasoning_content") or None,
        "tool_calls": called or None,
    }
    return {"role": "assistant"} | {name: value for name, value in found.items() if value is not None}


def _nanoseconds(time: Json, otherwise: int) -> int:
    """Since 1970; `otherwise` if there is no time. One without a zone is UTC."""
    try:
        at = datetime.fromisoformat(time) if isinstance(time, str) else None
    except ValueError:
        at = None
    if at is None:
        return otherwise
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0, (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)) * 1000


def _span(trace: str, span: str, name: str, start: int, end: int, attributes: Object) -> Object:
    return {
        "traceId": trace,
        "spanId": span,
        "name": name,
        "kind": 3,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(end),
        "attributes": _attributes(attributes),
    }


def _attributes(values: Object) -> list[Object]:
    return [{"key": name, "value": value} for name, found in values.items() if (value := _value(found)) is not None]


def _value(found: Json) -> Object | None:
    """An OTLP value; None for null and for what is no attribute."""
    match found:
        case bool():
            return {"boolValue": found}
        case int():
            return {"intValue": str(found)}
        case float():
            return {"doubleValue": found}
        case str():
            return {"stringValue": found}
        case list():
            return {"arrayValue": {"values": [_value(one) for one in cast("list[Json]", found)]}}
        case _:
            return None


def _attempt(about: Object) -> int | None:
    attempt = about.get("attempt")
    return attempt if isinstance(attempt, int) and not isinstance(attempt, bool) else None


def _own(found: Object) -> Object:
    """What spanmill wrote beside the format's own fields."""
    return _object(_object(found.get("extra")).get(EXTRA))


def _object(found: Json) -> Object:
    return cast("Object", found) if isinstance(found, dict) else {}


def _objects(found: Json) -> list[Object]:
    items = cast("list[Json]", found) if isinstance(found, list) else []
    return [cast("Object", item) for item in items if isinstance(item, dict)]


def _text(found: Json) -> str | None:
    return found if isinstance(found, str) and found else None


def _number(found: Json) -> float | None:
    """A number; an integer that is no double is infinite, as the reader of rewards says of it."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found)
    except OverflowError:
        return math.inf


def _dumped(found: Json) -> str | None:
    return None if found is None else json.dumps(found, separators=(",", ":"))


def _hex(digits: int, *parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:digits]

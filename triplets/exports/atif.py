"""ATIF v1.7: a document for each rollout. What the format has no field for stands under `extra.spanmill`.

An Episode is a trajectory, the first one the document itself, the others its `subagent_trajectories`. A turn that the
Episode does not train is marked `is_copied_context`, as consumers leave such steps out of training. `spanmill build`
reads these documents again.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from spanmill.triplets.exports.conversations import Message, calls_of, parsed, text_of
from spanmill.triplets.exports.sinks import json_texts
from spanmill.triplets.exports.target import Fill, Target

VERSION: Final = "ATIF-v1.7"
EXTRA: Final = "spanmill"
_UNKNOWN: Final = "unknown"
"""Name and version of an agent are required; where they were not recorded the document says so."""

_ROLLOUT: Final = ("rollout_id", "attempt", "group_id", "group_size", "task_id", "mode", "status")
_CALL: Final = (
    "call_id",
    "choice",
    "trained",
    "trained_tokens",
    "trainable",
    "reward",
    "policy_versions",
    "logprobs_mode",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "finish_reason",
    "stop_reason",
)
_ROLES: Final = {"system": "system", "developer": "system", "user": "user"}

Call = dict[str, Any]


def _documents(rows: Any, fill: Fill) -> Any:
    """One line for each rollout, from its calls in the order of its Episodes."""
    keys = list(zip(*(rows.column(name).to_pylist() for name in ("rollout_id", "attempt")), strict=True))
    texts: list[str] = []
    first = 0
    for _, group in groupby(keys):
        size = len(list(group))
        calls: list[Call] = rows.slice(first, size).to_pylist()
        texts.append(json.dumps(_document(calls), ensure_ascii=False, separators=(",", ":")))
        first += size
    return pa.table({"document": pa.array(texts, pa.string())})


def _document(calls: list[Call]) -> dict[str, Any]:
    first, *others = [_trajectory(list(group)) for _, group in groupby(calls, itemgetter("episode"))]
    about = {name: calls[0][name] for name in _ROLLOUT} | {"reward": calls[0]["final_reward"]}
    return {**first, "extra": {EXTRA: about}, **({"subagent_trajectories": others} if others else {})}


def _trajectory(calls: list[Call]) -> dict[str, Any]:
    last = calls[-1]
    agent = {
        "name": last["agent"] or _UNKNOWN,
        "version": _UNKNOWN,
        "model_name": last["model"],
        "tool_definitions": parsed(last["tools"]) or None,
    }
    steps = [_without_nulls(step) for step in _steps(calls)]
    return {
        "schema_version": VERSION,
        "session_id": last["rollout_id"],
        "trajectory_id": f"{last['rollout_id']}/{last['attempt']}/{last['episode']}",
        "agent": _without_nulls(agent),
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
    }


def _steps(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """A step for each call and each message that came between; where messages do not go on, they are told anew."""
    steps: list[dict[str, Any]] = []
    told: list[Any] = []
    """The roles of the messages so far."""
    for call in calls:
        messages = parsed(call["messages"])
        roles = [message.get("role") for message in messages]
        restart = roles[: len(told)] != told
        for message in messages if restart else messages[len(told) :]:
            _add_message(steps, message)
        told = [*roles, "assistant"]
        steps.append(_inference(call, restart))
    return steps


def _add_message(steps: list[dict[str, Any]], message: Message) -> None:
    """A message that was not sampled by a call of this trajectory; a tool's result joins the step that asked for it."""
    role, content = message.get("role"), text_of(message.get("content")) or ""
    if role == "assistant":
        steps.append(_spoken(message) | {"is_copied_context": True})
        return
    asked = message.get("tool_call_id")
    last = steps[-1] if steps else {}
    if asked is not None and any(call["tool_call_id"] == asked for call in last.get("tool_calls") or ()):
        result = {"source_call_id": asked, "content": content}
        last["observation"] = {"results": [*(last["observation"] or {"results": ()})["results"], result]}
        return
    step: dict[str, Any] = {"source": _ROLES.get(str(role), "user"), "message": content}
    if role not in ("system", "user"):
        step["extra"] = {EXTRA: {"role": role, "tool_call_id": asked}}
    steps.append(step)


def _spoken(message: Message) -> dict[str, Any]:
    """The agent's side of a step as the message shows it."""
    called = [
        {
            "tool_call_id": call["id"] or "",
            "function_name": call["function"]["name"] or "",
            "arguments": _object(call["function"]["arguments"]),
        }
        for call in calls_of(message)
    ]
    return {
        "source": "agent",
        "message": text_of(message.get("content")) or "",
        "reasoning_content": text_of(message.get("reasoning_content")),
        "tool_calls": called or None,
        "observation": None,
    }


def _inference(call: Call, restart: bool) -> dict[str, Any]:
    response = next(iter(parsed(f"[{call['response']}]")), None) if call["response"] else None
    prompt, sampled = call["prompt_token_ids"], call["response_token_ids"]
    return {
        **_spoken(response or {}),
        "timestamp": _iso(call["started_at"]),
        "model_name": call["model"],
        "llm_call_count": 1,
        "is_copied_context": None if call["trained"] else True,
        "metrics": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "prompt_token_ids": prompt,
            "completion_token_ids": sampled,
            **({} if call["response_logprobs"] is None else {"logprobs": call["response_logprobs"]}),
        },
        "extra": {
            EXTRA: {name: call[name] for name in _CALL}
            | {"ended_at": _iso(call["ended_at"]), "response": response, "restart": restart}
        },
    }


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="microseconds")


def _object(text: str | None) -> dict[str, Any]:
    """A tool call's arguments, which ATIF wants as an object; as the model wrote them they stand in `extra`."""
    try:
        found = parsed(f"[{text}]")
    except ValueError:
        return {}
    return found[0] if found else {}


def _without_nulls(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if value is not None}


TARGETS: Final = (
    Target(
        "atif",
        "JSON lines, each an ATIF v1.7 document of a rollout, which `spanmill build` reads again",
        _documents,
        json_texts,
        reads="calls",
        exact=False,
        logprobs=False,
    ),
)

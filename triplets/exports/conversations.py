"""Messages as columns, for trainers that tokenise themselves: whole conversations, and pairs to prefer among."""

import json
from collections.abc import Sequence
from typing import Any, Final, cast

import pyarrow as pa

from spanmill.triplets.exports.sinks import parquet
from spanmill.triplets.exports.target import Fill, Target

_CALL: Final = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    ]
)
MESSAGE: Final = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
    ]
)
"""A message in OpenAI's shape; arguments stay the JSON text that the model wrote."""

Message = dict[str, Any]


def parsed(text: str | None) -> list[Message]:
    """The objects of a JSON text: the messages of a conversation, or tools."""
    return _objects(json.loads(text) if text else None)


def _objects(found: Any) -> list[Message]:
    items = cast("list[Any]", found) if isinstance(found, list) else []
    return [item for item in items if isinstance(item, dict)]


def text_of(content: Any) -> str | None:
    """A message's content as text: parts that are no text are given as the JSON that they are."""
    if content is None or isinstance(content, str):
        return content
    parts = _objects(content)
    if parts and len(parts) == len(content) and all(isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return json.dumps(content, ensure_ascii=False)


def calls_of(message: Message) -> list[Message]:
    """A message's tool calls with all their keys."""
    return [
        {
            "id": call.get("id"),
            "type": call.get("type") or "function",
            "function": {"name": function.get("name"), "arguments": _arguments(function.get("arguments"))},
        }
        for call in _objects(message.get("tool_calls"))
        for function in _objects([call.get("function")]) or [{}]
    ]


def _arguments(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def messages_column(conversations: Sequence[Sequence[Message]]) -> Any:
    """A column of lists of messages."""
    return pa.array([[_row(message) for message in one] for one in conversations], pa.list_(MESSAGE))


def _row(message: Message) -> Message:
    reasoning = message.get("reasoning_content")
    return {
        "role": message.get("role"),
        "content": text_of(message.get("content")),
        "reasoning_content": text_of(reasoning),
        "tool_calls": calls_of(message) or None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


def _sft(rows: Any, fill: Fill) -> Any:
    """One conversation for each Episode; `trained` says which of its calls, in order, its loss mask trains."""
    turns = rows.column("turns").to_pylist()
    return pa.table(
        {
            "messages": messages_column([parsed(text) for text in rows.column("messages").to_pylist()]),
            "tools": rows.column("tools"),
            "trained": pa.array([[turn["trained"] for turn in row] for row in turns], pa.list_(pa.bool_())),
            "reward": rows.column("reward"),
            "group_id": rows.column("group_id"),
            "task_id": rows.column("task_id"),
            "rollout_id": rows.column("rollout_id"),
            "episode": rows.column("episode"),
        }
    )


def _pairs(rows: Any, fill: Fill) -> Any:
    """The best and the worst rollout of each group, by the first Episode of each; the earlier one of equals.

    A group makes no pair if the rewards are equal, or the conversations do not begin with the same prompt.
    """
    names = ("uid", "rollout_id", "reward", "messages", "tools")
    groups: dict[str, dict[str, Message]] = {}
    for uid, rollout, reward, messages, tools in zip(*(rows.column(n).to_pylist() for n in names), strict=True):
        one = {"rollout_id": rollout, "reward": reward, "messages": parsed(messages), "tools": tools}
        groups.setdefault(uid, {}).setdefault(rollout, one)
    found = [pair for uid, members in groups.items() for pair in _pair(uid, list(members.values()))]
    return pa.table([pa.array([pair[n] for pair in found], _PAIR.field(n).type) for n in _PAIR.names], _PAIR.names)


_PAIR: Final = pa.schema(
    [
        ("prompt", pa.list_(MESSAGE)),
        ("chosen", pa.list_(MESSAGE)),
        ("rejected", pa.list_(MESSAGE)),
        ("tools", pa.string()),
        ("chosen_reward", pa.float64()),
        ("rejected_reward", pa.float64()),
        ("group_id", pa.string()),
        ("chosen_rollout_id", pa.string()),
        ("rejected_rollout_id", pa.string()),
    ]
)


def _pair(uid: str, members: list[Message]) -> list[Message]:
    best, worst = max(members, key=lambda m: m["reward"]), min(members, key=lambda m: m["reward"])
    split = _first_answer(best["messages"])
    if best["reward"] == worst["reward"] or best["messages"][:split] != worst["messages"][:split]:
        return []
    if _first_answer(worst["messages"]) != split:
        return []
    return [
        {
            "prompt": [_row(message) for message in best["messages"][:split]],
            "chosen": [_row(message) for message in best["messages"][split:]],
            "rejected": [_row(message) for message in worst["messages"][split:]],
            "tools": best["tools"],
            "chosen_reward": best["reward"],
            "rejected_reward": worst["reward"],
            "group_id": uid,
            "chosen_rollout_id": best["rollout_id"],
            "rejected_rollout_id": worst["rollout_id"],
        }
    ]


def _first_answer(messages: list[Message]) -> int:
    return next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))


TARGETS: Final = (
    Target(
        "sft",
        "Parquet with messages and tools, for SFT trainers that tokenise (TRL, verl, prime-rl)",
        _sft,
        parquet,
        needs=frozenset({"messages"}),
        exact=False,
        logprobs=False,
    ),
    Target(
        "dpo",
        "Parquet with prompt, chosen and rejected messages: the best and worst rollout of each group",
        _pairs,
        parquet,
        reads="groups",
        needs=frozenset({"messages", "reward"}),
        exact=False,
        logprobs=False,
    ),
)

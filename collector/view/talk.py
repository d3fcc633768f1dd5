"""A conversation in OpenAI's chat shape as the pages show it; whatever has another shape is shown as its JSON."""

import json
from dataclasses import dataclass
from typing import Any, Final, cast

MOST_CHARACTERS: Final = 20_000
"""Of one message; the row's JSON has all."""


@dataclass(frozen=True)
class Message:
    """One message."""

    role: str
    texts: list[str]
    tool_calls: list[tuple[str, str]]
    """(name, arguments) of each."""
    tool_call_id: str


def messages_of(text: str | None) -> list[Message]:
    """The messages of a column `messages`, or the one of `response`; none where the column is null."""
    if text is None:
        return []
    found: Any = json.loads(text)
    return [_message(one) for one in (cast("list[Any]", found) if isinstance(found, list) else [found])]


def _message(found: Any) -> Message:
    if not isinstance(found, dict):
        return Message("", [_cut(_text(found))], [], "")
    fields = cast("dict[str, Any]", found)
    content = fields.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    texts = [_part(part) for part in parts if part is not None and part != ""]
    thought = fields.get("reasoning_content") or fields.get("reasoning")
    if isinstance(thought, str):
        texts.insert(0, _cut(thought))
    made = cast("list[Any]", fields["tool_calls"]) if isinstance(fields.get("tool_calls"), list) else []
    return Message(
        _text(fields.get("role") or ""), texts, [_call(one) for one in made], str(fields.get("tool_call_id") or "")
    )


def _part(part: Any) -> str:
    if isinstance(part, dict):
        text = cast("dict[str, Any]", part).get("text")
        if isinstance(text, str):
            return _cut(text)
    return _cut(_text(part))


def _call(call: Any) -> tuple[str, str]:
    function: Any = cast("dict[str, Any]", call).get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "", _cut(_text(call))
    fields = cast("dict[str, Any]", function)
    return str(fields.get("name") or ""), _cut(_text(fields.get("arguments") or ""))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… ({len(text):,} characters)"

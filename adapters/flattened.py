"""Chats flattened name by name, `gen_ai.prompt.0.role` and so on, as OpenLLMetry, AgentOps and LiteLLM write them."""

from collections.abc import Mapping

from spanmill import semconv as sc
from spanmill.adapters.messages import as_list, as_object, as_objects, tool_call, unflatten
from spanmill.adapters.shapes import chat_messages
from spanmill.adapters.values import clean, parse_json
from spanmill.triplets.records import Attributes, Json


def flat_prompt(attributes: Attributes) -> list[dict[str, Json]] | None:
    """The request's messages; None if none were recorded."""
    return [m for item in unflatten(attributes, sc.FLAT_PROMPT) for m in _messages(item)] or None


def flat_answers(attributes: Attributes) -> list[tuple[dict[str, Json] | None, Json]]:
    """(assistant message, finish reason) per completion."""
    made: list[tuple[dict[str, Json] | None, Json]] = []
    for item in unflatten(attributes, sc.FLAT_COMPLETION):
        message = _messages(item)[0]
        said = message if len(message) > 2 or message.get("content") not in (None, "") else None
        made.append(({**message, "role": "assistant"} if said else None, item.get("finish_reason")))
    return made


def flat_tools(attributes: Attributes, prefix: str) -> list[dict[str, Json]] | None:
    """Tool definitions under `PREFIX.0.name`, `.description`, `.parameters`."""
    made: list[dict[str, Json]] = []
    for item in unflatten(attributes, prefix):
        function = {k: item[k] for k in ("name", "description") if item.get(k) is not None}
        if item.get("parameters") is not None:
            function["parameters"] = _value(item["parameters"])
        made.append({"type": "function", "function": function})
    return made or None


def _messages(item: Mapping[str, Json]) -> list[dict[str, Json]]:
    """A flattened message. A role that is missing follows from what the message holds."""
    calls = [_call(c) for c in as_objects(item.get("tool_calls"))]
    single = as_object(item.get("function_call"))
    if single.get("name"):
        calls.append(_call(single))
    role = item.get("role") or ("assistant" if calls else "tool" if item.get("tool_call_id") else "user")
    made: dict[str, Json] = {"role": role, "content": _content(item.get("content"))}
    for name in ("tool_call_id", "name"):
        if item.get(name):
            made[name] = item[name]
    reasoning = item.get("reasoning_content", item.get("reasoning"))
    if isinstance(reasoning, str) and reasoning:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = calls
        made["content"] = made["content"] or None
    return chat_messages(made) if isinstance(made["content"], list) else [made]


def _call(item: Mapping[str, Json]) -> dict[str, Json]:
    function = as_object(item.get("function")) or item
    return tool_call(item.get("id"), function.get("name"), function.get("arguments"))


def _content(value: Json) -> Json:
    """Text, or a list of content parts that stands there as JSON text."""
    if not isinstance(value, str):
        return clean(value)
    if not value.startswith('[{"'):
        return value
    parts = _value(value)
    return parts if all("type" in as_object(p) for p in as_list(parts)) else value


def _value(value: Json) -> Json:
    """JSON text as its value; text that is none as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value

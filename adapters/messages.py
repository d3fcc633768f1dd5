"""OpenAI chat shape: finish reasons, messages, tool calls; and attributes that were flattened name by name."""

from collections.abc import Iterable, Mapping
from typing import Final, cast

from spanmill.adapters.values import clean, dump_json, text
from spanmill.triplets.records import Attributes, Json, Value

FINISH_WORDS: Final = {
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "end": "stop",
    "eos": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_length": "length",
    "incomplete": "length",
    "safety": "content_filter",
    "refusal": "content_filter",
    "aborted": "abort",
    "cancelled": "abort",
    "failed": "error",
}
"""Words of other vendors and conventions for OpenAI's finish reasons."""

MEDIA_TYPES: Final = frozenset(
    {
        "image_url",
        "input_image",
        "image",
        "input_audio",
        "audio",
        "audio_url",
        "video_url",
        "video",
        "blob",
        "uri",
        "file",
    }
)
MAX_DEPTH: Final = 24
"""Steps of a flattened name that are taken apart."""
PAYLOADS: Final = frozenset(
    {"url", "image_url", "audio_url", "video_url", "data", "content", "uri", "file_id", "image"}
)
REDACTED: Final = frozenset({"", "__REDACTED__", "[REDACTED]", "<redacted>", "REDACTED"})


def finish_word(reason: Json) -> str | None:
    """A finish reason in OpenAI's words; an unknown word is kept in lower case."""
    if not isinstance(reason, str) or not reason:
        return None
    word = reason.lower().replace("-", "_")
    return FINISH_WORDS.get(word, word)


def as_object(value: Json) -> dict[str, Json]:
    """The JSON object, or an empty one for anything else."""
    return cast("dict[str, Json]", value) if isinstance(value, dict) else {}


def as_list(value: Json) -> list[Json]:
    """The JSON list, or an empty one for anything else."""
    return cast("list[Json]", value) if isinstance(value, list) else []


def as_objects(value: Json) -> list[dict[str, Json]]:
    """The JSON objects of a list; anything else in it is passed over."""
    return [cast("dict[str, Json]", v) for v in as_list(value) if isinstance(v, dict)]


def arguments_text(arguments: Json) -> str:
    """Tool call arguments as the JSON text that OpenAI uses."""
    return arguments if isinstance(arguments, str) else dump_json({} if arguments is None else arguments)


def tool_call(call_id: Json, name: Json, arguments: Json) -> dict[str, Json]:
    """A tool call in OpenAI shape."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_text(arguments)}}


def tool_call_ids(message: Json) -> tuple[str, ...]:
    """Ids of the tool calls that an assistant message makes."""
    made = as_objects(as_object(message).get("tool_calls"))
    return tuple(i for c in made if isinstance(i := c.get("id"), str) and i)


def unflatten(attributes: Attributes, prefix: str) -> list[dict[str, Json]]:
    """`PREFIX.0.a.b = v` attributes as a list of nested objects, in the order of their indices.

    Indices may start at 0 or 1 and may have gaps; `…calls.0.id` below an object becomes a list there too.
    """
    items: dict[int, dict[str, Json]] = {}
    for name, value in attributes.items():
        if not name.startswith(prefix):
            continue
        index, _, rest = name[len(prefix) :].partition(".")
        if not _is_index(index):
            continue
        item = items.setdefault(int(index), {})
        if "." not in rest and isinstance(value, str):
            item[rest] = value
        else:
            _set(item, rest.split(".", MAX_DEPTH), value)
    return [as_object(_lists(items[i])) for i in sorted(items)]


def unflatten_object(attributes: Attributes, prefix: str) -> dict[str, Json]:
    """`PREFIX.a.0.b = v` attributes as one object."""
    made: dict[str, Json] = {}
    for name, value in attributes.items():
        if name.startswith(prefix):
            _set(made, name[len(prefix) :].split(".", MAX_DEPTH), value)
    return as_object(_lists(made))


def _is_index(step: str) -> bool:
    return step.isdigit() and step.isascii() and len(step) < 10


def _set(into: dict[str, Json], path: list[str], value: Value) -> None:
    for step in path[:-1]:
        below = into.get(step)
        into = into.setdefault(step, {}) if isinstance(below, dict) or below is None else into
    into[path[-1]] = value if isinstance(value, str) else clean(value)


def _lists(value: Json) -> Json:
    """Objects whose keys are all numbers are lists; below the top, which stays an object."""
    if not isinstance(value, dict):
        return value
    made = {k: _lists(v) if isinstance(v, dict) else v for k, v in cast("dict[str, Json]", value).items()}
    numbered = made and _is_index(next(iter(made))) and all(map(_is_index, made))
    return [made[k] for k in sorted(made, key=int)] if numbered else made


def has_media(messages: Json) -> tuple[bool, bool]:
    """(the messages hold images or audio, one of them has no payload)."""
    found = hidden = False
    for message in as_objects(messages):
        for part in as_objects(message.get("content")):
            if str(part.get("type")) in MEDIA_TYPES:
                found = True
                hidden = hidden or not _has_payload(part)
    return found, hidden


def _has_payload(part: Mapping[str, Json]) -> bool:
    return any(isinstance(v, str) and v not in REDACTED for v in _payloads(part))


def _payloads(value: Mapping[str, Json]) -> Iterable[Json]:
    """What a part may hold its image or audio in, or name it by; formats and the like are no payload."""
    for name, held in value.items():
        if name in PAYLOADS and not isinstance(held, dict):
            yield held
        elif isinstance(held, dict):
            yield from _payloads(cast("Mapping[str, Json]", held))


def answer_text(message: Json) -> str | None:
    """The text of an assistant message, for comparing two records of one answer; None if it has none."""
    content = as_object(message).get("content")
    if isinstance(content, list):
        content = "".join(text(p.get("text")) or "" for p in as_objects(content))
    return content if isinstance(content, str) and content else None

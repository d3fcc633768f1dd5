"""What a request must ask of vLLM so that its answer holds token ids and logprobs, and how the answer looks without.

Pure: from bodies to bodies. The client's own options win; what was added for us is taken out of the answer again.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

Object = dict[str, Any]

CHAT: Final = "/chat/completions"
COMPLETIONS: Final = "/completions"
RESPONSES: Final = "/responses"
MESSAGES: Final = "/messages"
ROUTES: Final = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
"""Ends of the paths of requests that generate, the first that fits counts."""

IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
TOP_LOGPROBS: Final = "top_logprobs"
RAW: Final = "enable_response_messages"
"""Of the Responses API: prompt and answer as vLLM saw them, with their ids."""

INCLUDE: Final = "include"
OUTPUT_LOGPROBS: Final = "message.output_text.logprobs"
"""What `include` must name for logprobs in the Responses API."""

FIELDS: Final = (IDS, RAW, INCLUDE, TOP_LOGPROBS, LOGPROBS)

REFUSED: Final = (400, 422)
"""Statuses by which a server says that it does not take a field."""

_NOT_ALONE: Final = ("echo", "use_beam_search", "best_of")
"""Options of completions under which ids and logprobs are not those of the answer alone."""


def route_of(path: str) -> str | None:
    """Which API a request of this path (or URL without a query) speaks; None if none that generates."""
    path = path.rstrip("/")
    return next((route for route in ROUTES if path.endswith(route)), None)


def missing(route: str, body: Mapping[str, Any]) -> Object:
    """The fields to add to a request, with their values; none for the Messages API, which has none.

    missing("/chat/completions", {"logprobs": False}) == {"return_token_ids": True}
    """
    if route == RESPONSES:
        return _missing_of_responses(body)
    if route not in (CHAT, COMPLETIONS) or any(body.get(name) for name in _NOT_ALONE):
        return {}
    added: Object = {}
    if body.get(IDS) is None:
        added[IDS] = True
    if body.get(LOGPROBS) is None:
        added[LOGPROBS] = True if route == CHAT else 0
    if route == CHAT and (LOGPROBS in added or body[LOGPROBS]) and body.get(TOP_LOGPROBS) is None:
        added[TOP_LOGPROBS] = 0  # explicit: without it some versions give no logprobs at all
    return added


def _missing_of_responses(body: Mapping[str, Any]) -> Object:
    included: Any = body.get(INCLUDE) or []
    if body.get("background") or not isinstance(included, list):
        return {}
    added: Object = {RAW: True} if body.get(RAW) is None else {}
    if OUTPUT_LOGPROBS not in included:
        added[INCLUDE] = [*cast("list[Any]", included), OUTPUT_LOGPROBS]
        if body.get(TOP_LOGPROBS) is None:
            added[TOP_LOGPROBS] = 0  # of null vLLM makes no logprobs, and then fails for want of them
    return added


def strip(answer: Object, added: Mapping[str, Any]) -> bool:
    """Take what was added for us out of an answer, a chunk or an event of one; whether it changed.

    Null takes its place (in text deltas of the Responses API an empty list), as it stands in the answers of vLLM to
    those who did not ask.
    """
    if RAW in added or INCLUDE in added:
        return _strip_response(answer, added)
    choices = cast("list[Object]", answer.get("choices") or [])
    fields: list[tuple[Object, str]] = []
    if IDS in added:
        fields = [(answer, "prompt_token_ids"), *((c, n) for c in choices for n in ("prompt_token_ids", "token_ids"))]
    if LOGPROBS in added:
        fields += [(choice, LOGPROBS) for choice in choices]
    return _clear(fields)


def _strip_response(answer: Object, added: Mapping[str, Any]) -> bool:
    """Of a whole answer, or of an event, which may hold the answer so far, an item, a part of one or a delta."""
    whole = cast("Object", answer["response"] if isinstance(answer.get("response"), dict) else answer)
    fields: list[tuple[Object, str]] = []
    if RAW in added:
        fields = [(whole, "input_messages"), (whole, "output_messages")]
    if INCLUDE not in added:
        return _clear(fields)
    if TOP_LOGPROBS in added:
        fields.append((whole, TOP_LOGPROBS))
    items = [*cast("list[Object]", whole.get("output") or []), cast("Object", answer.get("item") or {})]
    parts = [part for item in items for part in cast("list[Object]", item.get("content") or [])]
    parts.append(cast("Object", answer.get("part") or {}))
    changed = _clear([*fields, *((part, LOGPROBS) for part in parts if part.get(LOGPROBS))])
    if answer.get(LOGPROBS):
        answer[LOGPROBS] = []
        return True
    return changed


def _clear(fields: Iterable[tuple[Object, str]]) -> bool:
    """Whether any of these fields held something before."""
    held = [(source, name) for source, name in fields if source.get(name) is not None]
    for source, name in held:
        source[name] = None
    return bool(held)


def is_empty_chunk(chunk: Object, route: str) -> bool:
    """Whether a chunk says nothing: with `return_token_ids` vLLM sends one for tokens that show no text yet."""
    choices = cast("list[Object]", chunk.get("choices") or [])
    if route != CHAT or not choices or chunk.get("usage") is not None:
        return False
    return all(not choice.get("delta") and choice.get("finish_reason") is None for choice in choices)


def named_in(message: str, added: Mapping[str, Any]) -> set[str]:
    """The added fields that an error message names, also by what was included: a server without them says so."""
    said = f"{message} {INCLUDE}" if LOGPROBS in message else message
    return {name for name in FIELDS if name in added and name in said}

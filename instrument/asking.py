"""What a request must ask of vLLM so that its answer holds token ids and logprobs, and how the answer looks without.

Pure: from bodies to bodies. The client's own options win; what was added for us is taken out of the answer again.
"""

from collections.abc import Mapping
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
FIELDS: Final = (IDS, TOP_LOGPROBS, LOGPROBS)

REFUSED: Final = (400, 422)
"""Statuses by which a server says that it does not take a field."""

_NOT_ALONE: Final = ("echo", "use_beam_search", "best_of")
"""Options of completions under which ids and logprobs are not those of the answer alone."""


def route_of(path: str) -> str | None:
    """Which API a request of this path (or URL without a query) speaks; None if none that generates."""
    path = path.rstrip("/")
    return next((route for route in ROUTES if path.endswith(route)), None)


def missing(route: str, body: Mapping[str, Any]) -> Object:
    """The fields to add to a request, with their values; none for APIs that have none.

    missing("/chat/completions", {"logprobs": False}) == {"return_token_ids": True}
    """
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


def strip(answer: Object, added: Mapping[str, Any]) -> bool:
    """Take what was added for us out of an answer or a chunk of one; whether it changed.

    Null takes its place, as it stands in the answers of vLLM to those who did not ask.
    """
    choices = cast("list[Object]", answer.get("choices") or [])
    fields: list[tuple[Object, str]] = []
    if IDS in added:
        fields = [(answer, "prompt_token_ids"), *((c, n) for c in choices for n in ("prompt_token_ids", "token_ids"))]
    if LOGPROBS in added:
        fields += [(choice, LOGPROBS) for choice in choices]
    changed = False
    for source, name in fields:
        if source.get(name) is not None:
            source[name] = None
            changed = True
    return changed


def is_empty_chunk(chunk: Object, route: str) -> bool:
    """Whether a chunk says nothing: with `return_token_ids` vLLM sends one for tokens that show no text yet."""
    choices = cast("list[Object]", chunk.get("choices") or [])
    if route != CHAT or not choices or chunk.get("usage") is not None:
        return False
    return all(not choice.get("delta") and choice.get("finish_reason") is None for choice in choices)


def named_in(message: str, added: Mapping[str, Any]) -> set[str]:
    """The added fields that an error message names: a server that does not know them says so."""
    return {name for name in FIELDS if name in added and name in message}

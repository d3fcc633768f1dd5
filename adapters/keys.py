"""What ties a span to others, and what it says of a rollout's end: all that the index needs to know."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple, cast

from spanmill import semconv as sc
from spanmill.adapters.dialects import READERS, agentlightning, is_call, litellm
from spanmill.adapters.values import identifier
from spanmill.triplets.records import Json, Span

_ID: Final = re.compile(r"""["'](?:id|call_id|toolCallId)["']\s*:\s*["']([^"'\\]{1,256})["']""")
"""An id in a JSON text or in a Python literal."""
_NUMBERED: Final = re.compile(r"(.+)-\d+", re.DOTALL)
_RESPONSE_IDS: Final = (
    sc.GEN_AI_RESPONSE_ID,
    sc.GEN_AI_REQUEST_ID,
    *(name for reader in READERS for name in getattr(reader, "RESPONSE_IDS", ())),
)
_ANSWERS: Final = frozenset(name for reader in READERS for name in getattr(reader, "ANSWERS", ()))
"""Attributes in whose text or structure an answer with its ids may stand."""
_ASKED: Final = ("llm.input_messages.", sc.FLAT_PROMPT, agentlightning.INPUT)
"""What a request repeats of earlier answers ties nothing together."""
_ROLLOUTS: Final = (sc.ROLLOUT_ID, sc.AGL_ROLLOUT_ID)
_CONVERSATIONS: Final = (sc.GEN_AI_CONVERSATION_ID, sc.SESSION_ID)


class _Places(NamedTuple):
    """Where keys may stand among attributes of certain names."""

    conversations: tuple[str, ...]
    responses: tuple[str, ...]
    answers: tuple[str, ...]
    """With ids in their text or structure."""
    ids: tuple[str, ...]


@lru_cache(4096)
def _places(names: tuple[str, ...]) -> _Places:
    answers = tuple(name for name in names if name in _ANSWERS or litellm.holds_answer(name))
    read = {*_ROLLOUTS, *_CONVERSATIONS, *_RESPONSE_IDS, *answers}
    return _Places(
        tuple(name for name in _CONVERSATIONS if name in names),
        tuple(name for name in _RESPONSE_IDS if name in names),
        answers,
        tuple(n for n in names if n.endswith(".id") and n not in read and not n.startswith(_ASKED)),
    )


def keys(span: Span) -> list[tuple[str, str]]:
    """(kind, value) pairs, kinds `trace`, `rollout`, `response` (of an answer or of a tool call in it), `conversation`.

    Two spans with an equal pair may belong to one rollout and are looked at together. More pairs than needed cost time
    alone; a missing one would tear a rollout apart. So JSON texts are searched, not parsed.
    """
    a = span.attributes
    places = _places(tuple(a))
    found = [("trace", span.trace_id)] if span.trace_id else []
    for name in _ROLLOUTS:
        rollout_id = identifier(a.get(name)) or identifier(span.resource.get(name))
        if rollout_id is not None:
            found.append(("rollout", rollout_id))
    proxied = agentlightning.proxied(a)
    if proxied is not None:
        found.append(("rollout", proxied[0]))
    for name in places.conversations:
        conversation = identifier(a.get(name))
        if conversation is not None:
            found.append(("conversation", conversation))
    for name in places.responses:
        response_id = identifier(a.get(name))
        if response_id is not None:
            found.append(("response", response_id))
            numbered = _NUMBERED.fullmatch(response_id)
            if numbered:
                found.append(("response", numbered[1]))
    if span.is_log and span.name.startswith("gen_ai."):
        found += _of_answer(i for value in (span.body, *a.values()) for i in _ids_in(value))
    elif is_call(span):
        found += _of_answer(_in_answer(span, places))
    return list(dict.fromkeys(found))


def _of_answer(ids: Iterable[str]) -> list[tuple[str, str]]:
    """Of an id in an answer nobody knows without parsing whether it is the response's or a tool call's."""
    return [("response", i) for i in ids if identifier(i)]


def _in_answer(span: Span, places: _Places) -> Iterator[str]:
    for name in places.answers:
        yield from _ids_in(span.attributes[name])
    for name in places.ids:
        made = identifier(span.attributes[name])
        if made is not None:
            yield made
    for event in span.events:
        if event.name.startswith("gen_ai."):
            yield from (i for value in event.attributes.values() for i in _ids_in(value))


def _ids_in(value: Json) -> Iterator[str]:
    """Ids in a text, which is searched, or in a structure, which is walked."""
    if isinstance(value, str):
        yield from _ID.findall(value)
    elif isinstance(value, list):
        for item in cast("list[Json]", value):
            yield from _ids_in(item)
    elif isinstance(value, dict):
        for name, item in cast("dict[str, Json]", value).items():
            if name in ("id", "call_id") and isinstance(item, str):
                yield item
            else:
                yield from _ids_in(item)


def signal(span: Span) -> str | None:
    """`end`: reports the rollout's status; `started`: announces that it will; `root`: a root that is no LLM call."""
    if sc.ROLLOUT_STATUS in span.attributes:
        return "end"
    if span.attributes.get(sc.ROLLOUT_STARTED) is True:
        return "started"
    return "root" if not span.is_log and not span.parent_id and not is_call(span) else None

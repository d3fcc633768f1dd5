"""What ties a span to others, and what it says of a rollout's end: all that the index needs to know."""

import re
from collections.abc import Iterator
from typing import Final, cast

from spanmill import semconv as sc
from spanmill.adapters.dialects import is_call, openinference
from spanmill.adapters.values import identifier
from spanmill.triplets.records import Json, Span

_ID: Final = re.compile(r'"id"\s*:\s*"([^"\\]{1,256})"')
_NUMBERED: Final = re.compile(r"(.+)-\d+", re.DOTALL)


def keys(span: Span) -> list[tuple[str, str]]:
    """(kind, value) pairs, kinds `trace`, `rollout`, `response`, `tool_call` and `conversation`.

    Two spans with an equal pair may belong to one rollout and are looked at together. More pairs than needed cost time
    alone; a missing one would tear a rollout apart. So JSON texts are searched, not parsed.
    """
    a = span.attributes
    found = [("trace", span.trace_id)] if span.trace_id else []
    for name in (sc.ROLLOUT_ID, sc.AGL_ROLLOUT_ID):
        rollout_id = identifier(a.get(name)) or identifier(span.resource.get(name))
        if rollout_id is not None:
            found.append(("rollout", rollout_id))
    for name in (sc.GEN_AI_CONVERSATION_ID, sc.SESSION_ID):
        conversation = identifier(a.get(name))
        if conversation is not None:
            found.append(("conversation", conversation))
    for name in (sc.GEN_AI_RESPONSE_ID, sc.GEN_AI_REQUEST_ID):
        response_id = identifier(a.get(name))
        if response_id is not None:
            found.append(("response", response_id))
            numbered = _NUMBERED.fullmatch(response_id)
            if numbered:
                found.append(("response", numbered[1]))
    if is_call(span):
        answer = a.get(openinference.OUTPUT)
        if isinstance(answer, str):
            found += [(kind, i) for i in _ID.findall(answer) for kind in ("response", "tool_call") if identifier(i)]
        found += [("tool_call", i) for i in _tool_calls(span)]
    return list(dict.fromkeys(found))


def _tool_calls(span: Span) -> Iterator[str]:
    output = span.attributes.get(sc.GEN_AI_OUTPUT_MESSAGES)
    if isinstance(output, str):
        yield from _ID.findall(output)
    elif output is not None:
        yield from _ids_in(output)
    for name, value in span.attributes.items():
        if (
            name.endswith(".id")
            and "tool_calls." in name
            and not name.startswith(("llm.input_messages.", "gen_ai.prompt."))
        ):
            made = identifier(value)
            if made is not None:
                yield made


def _ids_in(value: Json) -> Iterator[str]:
    if isinstance(value, list):
        for item in cast("list[Json]", value):
            yield from _ids_in(item)
    elif isinstance(value, dict):
        for name, item in cast("dict[str, Json]", value).items():
            if name == "id" and isinstance(item, str) and identifier(item):
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

"""OpenTelemetry GenAI semantic conventions of every era: content on attributes, span events or log records."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, cast

from spanmill import semconv as sc
from spanmill.adapters.messages import as_object, finish_word, tool_call_ids
from spanmill.adapters.shapes import answer, conversation, tool_definitions
from spanmill.adapters.spans import recorded_agent
from spanmill.adapters.values import identifier, integer, number, strings, structured, text
from spanmill.triplets.records import Attributes, Call, Event, Json, Span, Value

OPERATIONS: Final = frozenset({"chat", "text_completion", "generate_content"})
LEFT_OVER: Final = (sc.GEN_AI_RESPONSE_ID, sc.GEN_AI_FINISH_REASONS, sc.GEN_AI_OUTPUT_MESSAGES)
"""By these a call is known whose older attributes were evicted."""

DETAILS: Final = "gen_ai.client.inference.operation.details"
CHOICE: Final = "gen_ai.choice"
ROLES: Final = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
"""Events of 1.28 to 1.36, one per message; up to 1.27 all messages stood in one event."""
PROMPT_EVENT: Final = ("gen_ai.content.prompt", "gen_ai.prompt")
COMPLETION_EVENT: Final = ("gen_ai.content.completion", "gen_ai.completion")
EVENT_CONTENT: Final = "gen_ai.event.content"
CONTENT: Final = (
    sc.GEN_AI_SYSTEM_INSTRUCTIONS,
    sc.GEN_AI_INPUT_MESSAGES,
    sc.GEN_AI_OUTPUT_MESSAGES,
    sc.GEN_AI_TOOL_DEFINITIONS,
)
REFERENCES: Final = tuple((name, name + end) for name in CONTENT for end in ("_ref", ".ref"))
"""Where uploaded content went."""
ANSWERS: Final = (sc.GEN_AI_OUTPUT_MESSAGES,)
_TELLING: Final = frozenset({*CONTENT, *(at for _, at in REFERENCES), sc.GEN_AI_COMPACTED})
"""A span with none of these and no events tells nothing of the text."""


@dataclass(slots=True)
class Content:
    """The text of a call, read once for all its choices."""

    messages: list[dict[str, Json]] | None = None
    answers: list[dict[str, Json] | None] = field(default_factory=list[dict[str, Json] | None])
    reasons: list[Json] = field(default_factory=list[Json])
    tools: Json = None
    damaged: bool = False
    metadata: dict[str, Json] = field(default_factory=dict[str, Json])


def recognises(span: Span) -> bool:
    """An inference operation, or what a span that lost its oldest attributes still shows of one."""
    a = span.attributes
    operation = text(a.get(sc.GEN_AI_OPERATION))
    if operation is not None:
        return operation in OPERATIONS
    return any(name in a for name in LEFT_OVER) and (sc.GEN_AI_RESPONSE_MODEL in a or sc.GEN_AI_REQUEST_MODEL in a)


def read(span: Span) -> list[Call]:
    """A Call per choice that the span tells of: by its finish reasons, output messages or asked-for count."""
    return read_as(span, "genai", content_of(span))


def read_as(span: Span, dialect: str, content: Content) -> list[Call]:
    """The convention's calls with `content` in place of the text, for dialects that keep theirs elsewhere."""
    a = span.attributes
    reasons = _reasons(a)
    asked = integer(a.get(sc.GEN_AI_CHOICE_COUNT), foreign=True) or 1
    told = max(1, len(content.answers), len(reasons))
    choices = told if told > 1 else max(1, min(asked, MAX_CHOICES))
    return [_call(span, dialect, content, reasons, choice, choice, choices) for choice in range(choices)]


MAX_CHOICES: Final = 1024
"""A span that shows no answer is believed to have had this many at most."""


def one_choice(span: Span, dialect: str, choice: int) -> Call:
    """What the convention says of a span that is about one choice alone, as are its finish reason and its message."""
    choices = integer(span.attributes.get(sc.GEN_AI_CHOICE_COUNT)) or 1
    return _call(span, dialect, content_of(span), _reasons(span.attributes), 0, choice, choices)


def _reasons(attributes: Attributes) -> list[str | None]:
    value = attributes.get(sc.GEN_AI_FINISH_REASONS)
    if isinstance(value, str) and value[:1] == "[":
        value = cast("Value", _loose(value))
    return strings(value)


def _call(
    span: Span, dialect: str, content: Content, reasons: list[str | None], at: int, choice: int, choices: int
) -> Call:
    a = span.attributes
    foreign = dialect != "spanmill"
    said = content.answers[at] if at < len(content.answers) else None
    reason = reasons[at] if at < len(reasons) else None
    if reason is None and at < len(content.reasons):
        reason = content.reasons[at]
    call = Call(
        span=span,
        dialect=dialect,
        source="text",
        choice=choice,
        choices=choices,
        response_id=identifier(a.get(sc.GEN_AI_RESPONSE_ID)),
        tool_call_ids=tool_call_ids(said),
        model=text(a.get(sc.GEN_AI_RESPONSE_MODEL)) or text(a.get(sc.GEN_AI_REQUEST_MODEL)),
        finish_reason=finish_word(reason),
        agent=recorded_agent(a),
        messages=content.messages,
        response=said,
        tools=content.tools,
        # Text is not what is trained on: damage to it informs, while the ids are judged by their own counts.
        flags=_DAMAGED if content.damaged else frozenset(),
        metadata=dict(content.metadata),
    )
    if not _NUMBERS.isdisjoint(a):
        call.usage_prompt = usage(a, sc.GEN_AI_INPUT_TOKENS, sc.GEN_AI_PROMPT_TOKENS, foreign=foreign)
        call.usage_response = usage(a, sc.GEN_AI_OUTPUT_TOKENS, sc.GEN_AI_COMPLETION_TOKENS, foreign=foreign)
        call.temperature = number(a.get(sc.GEN_AI_TEMPERATURE), foreign=foreign)
        call.top_p = number(a.get(sc.GEN_AI_TOP_P), foreign=foreign)
        call.top_k = integer(a.get(sc.GEN_AI_TOP_K), foreign=True)
        call.max_tokens = integer(a.get(sc.GEN_AI_MAX_TOKENS), foreign=foreign)
    return call


_NUMBERS: Final = frozenset(
    {
        sc.GEN_AI_INPUT_TOKENS,
        sc.GEN_AI_PROMPT_TOKENS,
        sc.GEN_AI_OUTPUT_TOKENS,
        sc.GEN_AI_COMPLETION_TOKENS,
        sc.GEN_AI_TEMPERATURE,
        sc.GEN_AI_TOP_P,
        sc.GEN_AI_TOP_K,
        sc.GEN_AI_MAX_TOKENS,
    }
)
_DAMAGED: Final = frozenset({"truncated_attribute"})


def usage(attributes: Attributes, *names: str, foreign: bool = True) -> int | None:
    """The first of several token counts that is there."""
    for name in names:
        if name in attributes and (count := integer(attributes[name], foreign=foreign)) is not None:
            return count
    return None


# ------------------------------------------------------------------ content


def content_of(span: Span) -> Content:
    """The text of a call: from attributes of the span or of its details event, else from events per message."""
    found = Content()
    a = span.attributes
    if not span.events and _TELLING.isdisjoint(a):
        return found
    details = [e.attributes for e in span.events if e.name == DETAILS]
    if details and not any(name in a for name in CONTENT):
        bodies = (as_object(d.get("body")) for d in details)
        a = {k: v for d, body in zip(details, bodies, strict=True) for k, v in {**body, **d}.items()} | dict(a)
    inputs, outputs = _parsed(a, sc.GEN_AI_INPUT_MESSAGES, found), _parsed(a, sc.GEN_AI_OUTPUT_MESSAGES, found)
    found.messages = conversation(inputs, _parsed(a, sc.GEN_AI_SYSTEM_INSTRUCTIONS, found))
    _add_answers(found, outputs)
    found.tools = tool_definitions(_parsed(a, sc.GEN_AI_TOOL_DEFINITIONS, found))
    references = {name: a[at] for name, at in REFERENCES if isinstance(a.get(at), str)}
    if references:
        found.metadata["references"] = references
    if a.get(sc.GEN_AI_COMPACTED) is True:
        found.metadata["compacted"] = True
    if span.events and (found.messages is None or not found.answers):
        _read_events(found, span.events)
    return found


def _add_answers(found: Content, outputs: Json) -> None:
    for output in cast("list[Json]", outputs) if isinstance(outputs, list) else [outputs] if outputs else []:
        found.answers.append(answer(output))
        found.reasons.append(as_object(output).get("finish_reason"))


def _parsed(attributes: Attributes, name: str, found: Content) -> Json:
    value = attributes.get(name)
    if value is None:
        return None
    try:
        return structured(value)
    except ValueError:
        found.damaged = True
        return None


def _read_events(found: Content, events: Iterable[Event]) -> None:
    asked: list[Json] = []
    choices: dict[int, dict[str, Json]] = {}
    for event in sorted(events, key=lambda e: e.time_ns):
        if event.name == PROMPT_EVENT[0]:
            asked += _listed(_parsed(event.attributes, PROMPT_EVENT[1], found))
        elif event.name == COMPLETION_EVENT[0] and not found.answers:
            _add_answers(found, _parsed(event.attributes, COMPLETION_EVENT[1], found))
        elif event.name in ROLES:
            asked.append(_message(event, ROLES[event.name]))
        elif event.name == CHOICE:
            body = _body(event)
            at = integer(body.get("index"), foreign=True)
            choices[len(choices) if at is None else at] = body
    if found.messages is None and asked:
        found.messages = conversation(asked)
    if not found.answers:
        for at in sorted(choices):
            said = choices[at].get("message")
            whole = {
                "role": "assistant",
                **(as_object(said) or {k: choices[at].get(k) for k in ("content", "tool_calls")}),
            }
            found.answers.append(answer(said if isinstance(said, str) else whole))
            found.reasons.append(choices[at].get("finish_reason"))


def _listed(value: Json) -> list[Json]:
    return cast("list[Json]", value) if isinstance(value, list) else [value] if value is not None else []


def _body(event: Event) -> dict[str, Json]:
    """What an event says: the body of a log record, or attributes of a span event, nested values as JSON text."""
    a = event.attributes
    whole = as_object(a.get("body")) or as_object(_loose(a.get(EVENT_CONTENT)))
    own = {k: _loose(v) if k in ("message", "tool_calls", "content") else v for k, v in a.items() if k != "body"}
    return {**own, **whole}


def _message(event: Event, role: str) -> dict[str, Json]:
    body = _body(event)
    made: dict[str, Json] = {"role": text(body.get("role")) or role, "content": body.get("content")}
    if body.get("tool_calls"):
        made["tool_calls"] = body["tool_calls"]
    if role == "tool" and body.get("id"):
        made["tool_call_id"] = body["id"]
    return made


def _loose(value: Value) -> Json:
    """JSON text as its value if it parses to objects; any other text, a user's own JSON say, as it is."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return structured(value) if not isinstance(value, str) else value
    try:
        made = structured(value)
    except ValueError:
        return value
    items = _listed(made)
    return made if all(isinstance(i, str) or as_object(i).keys() & _MESSAGE_KEYS for i in items) else value


_MESSAGE_KEYS: Final = frozenset({"type", "text", "role", "content", "function", "message", "tool_calls", "index"})

"""OpenInference: LLM spans, with the server's raw answer in `output.value`."""

from collections.abc import Mapping
from typing import Final, cast

from spanmill import semconv as sc
from spanmill.adapters.messages import (
    as_object,
    as_objects,
    finish_word,
    has_media,
    tool_call,
    tool_call_ids,
    unflatten,
)
from spanmill.adapters.raw import apply_parameters, is_answer, read_answer
from spanmill.adapters.shapes import answer, conversation, tool_definitions
from spanmill.adapters.spans import recorded_agent
from spanmill.adapters.values import identifier, integer, parse_json, text
from spanmill.triplets.records import Attributes, Call, Json, Span

INPUT: Final = "input.value"
OUTPUT: Final = "output.value"
INPUT_MESSAGES: Final = "llm.input_messages."
OUTPUT_MESSAGES: Final = "llm.output_messages."
PARAMETERS: Final = "llm.invocation_parameters"
REASONING: Final = "metadata.reasoning_content"
"""Harbor's ATIF converter writes OpenInference: texts, the reasoning apart from them, no ids."""
ANSWERS: Final = (OUTPUT,)
RESPONSE_IDS: Final = ("llm.response.id",)


def recognises(span: Span) -> bool:
    """OpenInference says itself what is an LLM call."""
    kind = span.attributes.get(sc.OPENINFERENCE_SPAN_KIND)
    return isinstance(kind, str) and kind.upper() == "LLM"


def read(span: Span) -> list[Call]:
    """A Call per choice of the raw answer; without one, per output message."""
    a = span.attributes
    said, damaged = _json(a, OUTPUT)
    request, _ = _json(a, INPUT)
    body = as_object(request)
    if is_answer(said):
        calls = read_answer(span, "openinference", as_object(said))
    else:
        calls = _from_attributes(span, is_response="input" in body)
    parameters, _ = _json(a, PARAMETERS)
    messages = _messages(a, body) or (conversation(request) if isinstance(request, list) else None)
    tools = tool_definitions(body.get("tools")) or _tools(a)
    _, hidden = has_media(messages)
    for call in calls:
        apply_parameters(call, as_object(parameters))
        apply_parameters(call, body)
        call.model = call.model or text(a.get("llm.response.model_name")) or text(a.get("llm.model_name"))
        call.usage_prompt = _count(call.usage_prompt, a, "llm.token_count.prompt")
        call.usage_response = _count(call.usage_response, a, "llm.token_count.completion")
        call.agent = recorded_agent(a)
        call.messages = messages
        call.tools = tools
        call.hidden_payload = hidden
        if damaged is not None:
            call.faults += (("truncated_attribute", damaged),)
    return calls


def _count(known: int | None, attributes: Attributes, name: str) -> int | None:
    return known if known is not None else integer(attributes.get(name), foreign=True)


def _json(attributes: Attributes, name: str) -> tuple[Json, str | None]:
    """(value, damage). Text that was never JSON is no damage; JSON that does not end is."""
    raw = text(attributes.get(name))
    if raw is None:
        return None, None
    mime = text(attributes.get(name.replace(".value", ".mime_type"))) or ""
    looks_json = "json" in mime or (not mime and raw[:1] == "{" and '"choices"' in raw)
    if not looks_json and raw[:1] not in "{[":
        return None, None
    try:
        return parse_json(raw), None
    except ValueError as e:
        return None, f"{name}: JSON that does not parse ({e})" if looks_json else None


def _from_attributes(span: Span, *, is_response: bool) -> list[Call]:
    a = span.attributes
    said = [_message(m) for m in unflatten(a, OUTPUT_MESSAGES)]
    # Of a response the messages are pieces of one answer, of a chat they are its choices.
    answers = [answer(said)] if len(said) > 1 and is_response else [answer(m) for m in said]
    if not answers:
        texts = (as_object(c.get("completion")).get("text") for c in unflatten(a, "llm.choices."))
        answers = [answer(t) for t in texts]
    said_plainly = text(a.get(OUTPUT))
    if not answers and said_plainly and said_plainly[:1] not in "{[":
        answers = [answer(said_plainly)]
    reasoning = text(a.get(REASONING))
    if reasoning and len(answers) <= 1:
        answers = [
            {"role": "assistant", "content": None, **((answers or [None])[0] or {}), "reasoning_content": reasoning}
        ]
    return [
        Call(
            span=span,
            dialect="openinference",
            source="text",
            choice=choice,
            choices=max(1, len(answers)),
            response_id=identifier(a.get("llm.response.id")),
            tool_call_ids=tool_call_ids(message),
            finish_reason=finish_word(a.get("llm.finish_reason")),
            response=message,
        )
        for choice, message in enumerate(answers or [None])
    ]


def _messages(attributes: Attributes, body: Mapping[str, Json]) -> Json:
    """Request messages: as the request body has them, else from the flattened attributes."""
    for name in ("messages", "input"):
        if isinstance(body.get(name), list):
            return conversation(body[name], body.get("instructions"))
    flat = conversation([_message(m) for m in unflatten(attributes, INPUT_MESSAGES)])
    if flat:
        return flat
    prompts = [as_object(p.get("prompt")).get("text") for p in unflatten(attributes, "llm.prompts.")]
    prompt = body.get("prompt") if isinstance(body.get("prompt"), str) else next((p for p in prompts if p), None)
    return [{"role": "user", "content": prompt}] if prompt else None


def _message(item: Mapping[str, Json]) -> dict[str, Json]:
    """A flattened message in OpenAI shape."""
    flat = as_object(item.get("message"))
    content = flat.get("content")
    parts = [as_object(c.get("message_content")) for c in as_objects(flat.get("contents"))]
    if content is None and parts:
        content = [_part(p) for p in parts]
    made: dict[str, Json] = {"role": flat.get("role"), "content": content}
    if flat.get("tool_call_id"):
        made["tool_call_id"] = flat["tool_call_id"]
    if flat.get("name"):
        made["name"] = flat["name"]
    calls = [as_object(c.get("tool_call")) for c in as_objects(flat.get("tool_calls"))]
    if calls:
        functions = [as_object(c.get("function")) for c in calls]
        made["tool_calls"] = [
            tool_call(c.get("id"), f.get("name"), f.get("arguments")) for c, f in zip(calls, functions, strict=True)
        ]
    return made


def _part(part: Mapping[str, Json]) -> dict[str, Json]:
    if part.get("type") == "text":
        return {"type": "text", "text": part.get("text")}
    url = as_object(as_object(part.get("image")).get("image")).get("url")
    return {"type": "image_url", "image_url": {"url": url}} if part.get("type") == "image" else dict(part)


def _tools(attributes: Attributes) -> Json:
    made: list[Json] = []
    for item in unflatten(attributes, "llm.tools."):
        raw = as_object(item.get("tool")).get("json_schema")
        try:
            made.append(parse_json(raw) if isinstance(raw, str) else raw)
        except ValueError:
            made.append(raw)  # as it was recorded; text is never trained on
    return cast("Json", made) or None

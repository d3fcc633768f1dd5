"""Vercel's AI SDK: the inner `.doGenerate` and `.doStream` spans are the calls; the outer ones repeat them."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.dialects import genai
from spanmill.adapters.messages import as_objects, tool_call_ids
from spanmill.adapters.shapes import answer, conversation, tool_definitions
from spanmill.adapters.values import identifier, integer, number, read_json, text
from spanmill.triplets.records import Attributes, Call, Json, Span

MESSAGES: Final = "ai.prompt.messages"
TOOLS: Final = "ai.prompt.tools"
TEXT: Final = "ai.response.text"
OBJECT: Final = "ai.response.object"
REASONING: Final = "ai.response.reasoning"
TOOL_CALLS: Final = "ai.response.toolCalls"
ID: Final = "ai.response.id"
USAGE: Final = (
    ("ai.usage.promptTokens", "ai.usage.inputTokens"),
    ("ai.usage.completionTokens", "ai.usage.outputTokens"),
)
ANSWERS: Final = (TOOL_CALLS,)
RESPONSE_IDS: Final = (ID,)


def recognises(span: Span) -> bool:
    """The span of one request to a provider."""
    operation = text(span.attributes.get(sc.VERCEL_OPERATION))
    return operation is not None and operation.endswith((".doGenerate", ".doStream"))


def read(span: Span) -> list[Call]:
    """The one answer of a request."""
    a = span.attributes
    content = genai.content_of(span)
    damaged: list[str] = []
    asked = [{**m, "parts": m.get("content")} for m in as_objects(read_json(a, MESSAGES, damaged))]
    content.messages = conversation(asked) or content.messages
    if not content.answers:
        content.answers = [_answer(a, damaged)]
    tools = a.get(TOOLS)
    listed = [read_json({TOOLS: t}, TOOLS, damaged) for t in tools] if isinstance(tools, list) else []
    content.tools = content.tools or tool_definitions(listed)
    content.reasons = [a.get("ai.response.finishReason")]
    content.damaged = content.damaged or bool(damaged)
    calls = genai.read_as(span, "vercel_ai", content)
    for call in calls:
        call.response_id = call.response_id or identifier(a.get(ID))
        call.model = call.model or text(a.get("ai.response.model")) or text(a.get("ai.model.id"))
        if call.usage_prompt is None:
            call.usage_prompt = genai.usage(a, *USAGE[0])
        if call.usage_response is None:
            call.usage_response = genai.usage(a, *USAGE[1])
        if call.temperature is None:
            call.temperature = number(a.get("ai.settings.temperature"), foreign=True)
        if call.max_tokens is None:
            call.max_tokens = integer(a.get("ai.settings.maxOutputTokens"), foreign=True)
        if isinstance(name := a.get("ai.telemetry.functionId"), str):
            call.metadata["function_id"] = name
        call.tool_call_ids = tool_call_ids(call.response)
    return calls


def _answer(attributes: Attributes, damaged: list[str]) -> dict[str, Json] | None:
    said = text(attributes.get(TEXT)) or text(attributes.get(OBJECT))
    calls = as_objects(read_json(attributes, TOOL_CALLS, damaged))
    thought = text(attributes.get(REASONING))
    blocks: list[Json] = [{"type": "reasoning", "text": thought}] if thought else []
    blocks += [{"type": "text", "text": said}] if said else []
    blocks += [{**c, "type": "tool-call"} for c in calls]
    return answer({"role": "assistant", "parts": blocks}) if blocks else None

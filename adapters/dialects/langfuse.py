"""Langfuse: generations with input, output and model as JSON texts. Its scores and token data go elsewhere."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.dialects import genai
from spanmill.adapters.messages import as_object, finish_word
from spanmill.adapters.raw import apply_parameters, is_answer, read_answer
from spanmill.adapters.shapes import answer, conversation, tool_definitions
from spanmill.adapters.values import identifier, read_json, text
from spanmill.triplets.records import Call, Span

INPUT: Final = "langfuse.observation.input"
OUTPUT: Final = "langfuse.observation.output"
MODEL: Final = "langfuse.observation.model.name"
PARAMETERS: Final = "langfuse.observation.model.parameters"
USAGE: Final = "langfuse.observation.usage_details"
METADATA: Final = "langfuse.observation.metadata."
ANSWERS: Final = (OUTPUT,)
RESPONSE_IDS: Final = (METADATA + "response_id",)


def recognises(span: Span) -> bool:
    """An observation of type generation."""
    kind = text(span.attributes.get(sc.LANGFUSE_TYPE))
    return kind is not None and kind.lower() == "generation"


def read(span: Span) -> list[Call]:
    """The one generation of an observation; a Call per choice where the output is a raw answer."""
    a = span.attributes
    damaged: list[str] = []
    asked, said = read_json(a, INPUT, damaged), read_json(a, OUTPUT, damaged)
    content = genai.content_of(span)
    body = as_object(asked)
    content.messages = content.messages or conversation(
        body.get("messages", body.get("input", asked)), body.get("instructions")
    )
    content.tools = content.tools or tool_definitions(body.get("tools"))
    if is_answer(said):
        calls = read_answer(span, "langfuse", as_object(said))
    else:
        content.answers = content.answers or [answer(said)]
        calls = genai.read_as(span, "langfuse", content)
    usage = as_object(read_json(a, USAGE, damaged))
    for call in calls:
        apply_parameters(call, as_object(read_json(a, PARAMETERS, damaged)))
        apply_parameters(call, body)
        call.model = call.model or text(a.get(MODEL))
        call.response_id = call.response_id or identifier(a.get(METADATA + "response_id"))
        call.messages, call.tools = content.messages, content.tools
        if call.usage_prompt is None:
            call.usage_prompt = genai.usage(usage, "input", "prompt_tokens", "input_tokens")
        if call.usage_response is None:
            call.usage_response = genai.usage(usage, "output", "completion_tokens", "output_tokens")
        call.finish_reason = call.finish_reason or finish_word(read_json(a, METADATA + "finish_reason", damaged))
        if damaged:
            call.flags |= {"truncated_attribute"}
    return calls

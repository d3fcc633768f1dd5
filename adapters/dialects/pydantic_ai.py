"""Pydantic AI's model spans, and logfire's OpenAI spans with the request and the answer as JSON texts."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.dialects import genai
from spanmill.adapters.messages import as_object, as_objects
from spanmill.adapters.raw import apply_parameters
from spanmill.adapters.shapes import answer, conversation, tool_definitions
from spanmill.adapters.values import read_json
from spanmill.triplets.records import Attributes, Call, Json, Span

REQUEST: Final = "request_data"
RESPONSE: Final = "response_data"
PARAMETERS: Final = "model_request_parameters"
ANSWERS: Final = (RESPONSE,)
ANSWERED: Final = (RESPONSE, sc.GEN_AI_RESPONSE_ID, sc.GEN_AI_OUTPUT_MESSAGES, sc.GEN_AI_OUTPUT_TOKENS)
FAILED: Final = 2


def recognises(span: Span) -> bool:
    """An inference with logfire's names beside the convention's, or a request as logfire writes it."""
    a = span.attributes
    if genai.recognises(span):
        return any(name in a for name in (REQUEST, PARAMETERS, sc.LOGFIRE_SCHEMA))
    body = as_object(read_json(a, REQUEST, [])) if sc.LOGFIRE_SCHEMA in a else {}
    return "model" in body and any(name in body for name in ("messages", "input", "prompt"))


def read(span: Span) -> list[Call]:
    """The convention's calls; of logfire's, what the request and the answer say.

    Of a streamed request logfire writes two spans: one for the request, without an answer, and one when the stream
    ends, with the same request and the answer. The second is the call.
    """
    a = span.attributes
    if REQUEST in a and span.status != FAILED and not any(name in a for name in ANSWERED):
        return []
    content = genai.content_of(span)
    damaged: list[str] = []
    body, said = as_object(read_json(a, REQUEST, damaged)), as_object(read_json(a, RESPONSE, damaged))
    if content.messages is None:
        content.messages = conversation(body.get("messages", body.get("input", body.get("prompt"))))
    if not content.answers and said:
        content.answers = [answer(said.get("message", said.get("combined_chunk_content", said.get("text"))))]
    content.tools = content.tools or tool_definitions(body.get("tools")) or _function_tools(a, damaged)
    content.damaged = content.damaged or bool(damaged)
    calls = genai.read_as(span, "pydantic_ai", content)
    for call in calls:
        apply_parameters(call, body)
    return calls


def _function_tools(attributes: Attributes, damaged: list[str]) -> Json:
    """Tools as Pydantic AI lists them among its own parameters."""
    tools = as_object(read_json(attributes, PARAMETERS, damaged)).get("function_tools")
    made: list[Json] = []
    for flat in as_objects(tools):
        function = {"name": flat.get("name"), "description": flat.get("description")}
        function["parameters"] = flat.get("parameters_json_schema")
        made.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return made or None

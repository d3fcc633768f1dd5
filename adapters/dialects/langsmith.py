"""LangSmith's exporter: inputs and outputs of a run as JSON texts, LangChain's or a provider's."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.dialects import genai
from spanmill.adapters.messages import as_list, as_object, as_objects
from spanmill.adapters.raw import apply_parameters, is_answer, read_answer
from spanmill.adapters.shapes import answer, conversation, tool_definitions
from spanmill.adapters.values import identifier, read_json, text
from spanmill.triplets.records import Call, Json, Span

PROMPT: Final = "gen_ai.prompt"
COMPLETION: Final = "gen_ai.completion"
METADATA: Final = "langsmith.metadata."
ANSWERS: Final = (COMPLETION,)


def recognises(span: Span) -> bool:
    """A run of type llm."""
    kind = text(span.attributes.get(sc.LANGSMITH_SPAN_KIND))
    return kind is not None and kind.lower() == "llm"


def read(span: Span) -> list[Call]:
    """A Call per choice of a raw answer, else per generation of LangChain's result, else the one message."""
    a = span.attributes
    damaged: list[str] = []
    asked, said = as_object(read_json(a, PROMPT, damaged)), read_json(a, COMPLETION, damaged)
    content = genai.content_of(span)
    content.messages = (
        conversation(_batch(asked.get("messages", asked.get("input", asked.get("prompts"))))) or content.messages
    )
    content.tools = content.tools or tool_definitions(asked.get("tools")) or _tools(asked)
    generations = _generations(said)
    content.damaged = content.damaged or bool(damaged)
    if is_answer(said):
        calls = read_answer(span, "langsmith", as_object(said))
    else:
        told = generations or [said]
        content.answers = [answer(_said(g)) for g in told]
        content.reasons = [_detail(g, "finish_reason") for g in told]
        calls = genai.read_as(span, "langsmith", content)
    chosen = {"temperature": a.get(METADATA + "ls_temperature"), "max_tokens": a.get(METADATA + "ls_max_tokens")}
    for call in calls:
        apply_parameters(call, asked)
        apply_parameters(call, chosen)
        call.messages, call.tools = content.messages, content.tools
        call.response_id = call.response_id or identifier(a.get(sc.GEN_AI_RESPONSE_ID)) or _response_id(generations)
        call.model = call.model or text(a.get(sc.GEN_AI_RESPONSE_MODEL)) or text(a.get(sc.GEN_AI_REQUEST_MODEL))
    return calls


def _batch(messages: Json) -> Json:
    """LangChain runs a batch of one prompt: a list in a list."""
    items = as_list(messages)
    return as_list(items[0]) if len(items) == 1 and isinstance(items[0], list) else messages


def _generations(said: Json) -> list[dict[str, Json]]:
    """The generations of LangChain's `LLMResult`."""
    return as_objects(_batch(as_object(said).get("generations")))


def _said(generation: Json) -> Json:
    whole = as_object(generation)
    return next((whole[k] for k in ("message", "messages", "output", "text") if whole.get(k)), generation)


def _detail(generation: Json, name: str) -> Json:
    """A detail of how a generation ended, in LangChain's two places for it."""
    whole = as_object(generation)
    message = as_object(whole.get("message"))
    fields = as_object(message.get("kwargs")) or message
    places = (whole.get("generation_info"), fields.get("response_metadata"))
    return next((as_object(p)[name] for p in places if as_object(p).get(name)), None)


def _response_id(generations: list[dict[str, Json]]) -> str | None:
    """The server's id; a message's own `run-…` id is LangChain's."""
    return identifier(_detail(generations[0], "id")) if generations else None


def _tools(asked: dict[str, Json]) -> Json:
    return tool_definitions(as_object(asked.get("invocation_params")).get("tools"))

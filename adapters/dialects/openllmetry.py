"""OpenLLMetry: chats flattened name by name, and the current form with the GenAI convention's messages."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.dialects import genai
from spanmill.adapters.flattened import flat_answers, flat_prompt, flat_tools
from spanmill.adapters.values import text
from spanmill.triplets.records import Attributes, Call, Span

REQUEST_TYPES: Final = frozenset({"chat", "completion"})
FUNCTIONS: Final = "llm.request.functions."
OWN: Final = ("llm.is_streaming", "llm.usage.total_tokens", "gen_ai.is_streaming", "gen_ai.openai.api_base")
"""Names that no other instrumentation writes beside the shared ones."""


def recognises(span: Span) -> bool:
    """A request of its types, or one of its own names beside the convention's."""
    a = span.attributes
    if text(a.get(sc.LLM_REQUEST_TYPE)) in REQUEST_TYPES:
        return True
    if _is_flat(a):
        return sc.GEN_AI_REQUEST_MODEL in a or sc.GEN_AI_RESPONSE_MODEL in a
    return any(name in a for name in OWN) and genai.recognises(span)


def read(span: Span) -> list[Call]:
    """A Call per completion; without any, as the convention counts choices."""
    a = span.attributes
    content = genai.content_of(span)
    if content.messages is None:
        content.messages = flat_prompt(a)
    if not content.answers:
        for said, reason in flat_answers(a):
            content.answers.append(said)
            content.reasons.append(reason)
    content.tools = content.tools or flat_tools(a, FUNCTIONS)
    calls = genai.read_as(span, "openllmetry", content)
    for call in calls:
        # Of the Responses API it writes the item's id in the place of the call's, which other spans show.
        call.tool_call_ids = tuple(i for i in call.tool_call_ids if not i.startswith("fc_"))
    return calls


def _is_flat(attributes: Attributes) -> bool:
    return any(name.startswith((sc.FLAT_PROMPT, sc.FLAT_COMPLETION)) for name in attributes)

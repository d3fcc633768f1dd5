"""Readers, one small file per dialect, in one list: `read(span)` gives a Call per choice, or none.

A reader goes by attributes, never by the span's name alone. The first that recognises a span reads it.
"""

from spanmill.adapters.dialects import agentlightning, genai, openinference, spanmill, vllm
from spanmill.adapters.spans import is_container
from spanmill.triplets.records import Call, Span

READERS = (spanmill, vllm, openinference, agentlightning, genai)
"""Modules with `recognises(span) -> bool` and `read(span) -> list[Call]`; dialect is the module's name."""


def is_call(span: Span) -> bool:
    """Whether a span is an LLM call. Agent, chain, workflow and tool spans never are, whatever they repeat."""
    return not span.is_log and not is_container(span) and any(r.recognises(span) for r in READERS)


def read(span: Span) -> list[Call]:
    """The calls that a span describes, one per choice; [] for a span that is no LLM call."""
    if span.is_log or is_container(span):
        return []
    for reader in READERS:
        if reader.recognises(span):
            return reader.read(span)
    return []

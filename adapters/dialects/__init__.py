"""Readers, one small file per dialect, in one list: `read(span)` gives a Call per choice, or none.

A reader goes by attributes, never by the span's name alone. The first that recognises a span reads it.
"""

from typing import Final, Protocol

from spanmill.adapters.dialects import (
    agentlightning,
    atif,
    genai,
    langfuse,
    langsmith,
    litellm,
    mlflow,
    openinference,
    openllmetry,
    pydantic_ai,
    sglang,
    spanmill,
    vercel_ai,
    vllm,
)
from spanmill.adapters.spans import is_container
from spanmill.triplets.records import Call, Span


class Reader(Protocol):
    """A module of this folder; a dialect's name is its module's."""

    __name__: str

    def recognises(self, span: Span) -> bool:
        """Whether the span is an LLM call in this dialect."""
        ...

    def read(self, span: Span) -> list[Call]:
        """A Call per choice of a span that was recognised; a value of a wrong type is None, never an error."""
        ...


READERS: Final[tuple[Reader, ...]] = (
    spanmill,
    vllm,
    openinference,
    langfuse,
    mlflow,
    langsmith,
    litellm,
    agentlightning,
    atif,
    vercel_ai,
    openllmetry,
    pydantic_ai,
    sglang,
    genai,
)
"""Those with names of their own first; the convention that many share last."""


def is_call(span: Span) -> bool:
    """Whether a span is an LLM call. Agent, chain, workflow and tool spans never are, whatever they repeat."""
    return _reader(span) is not None


def read(span: Span) -> list[Call]:
    """The calls that a span describes, one per choice; [] for a span that is no LLM call.

    A span that a reader fails on, against its promise, is a call with the fault `unreadable_span`: it goes to
    quarantine with the error in its detail, and the other spans of its rollout are not lost with it.
    """
    reader = _reader(span)
    if reader is None:
        return []
    try:
        return reader.read(span)
    except Exception as e:
        name = reader.__name__.rpartition(".")[2]
        detail = f"reader {name}: {e!r}"
        # Joined to an engine's span its fault no longer decides; the row then says what was not read.
        metadata = {"unreadable_span": detail}
        return [Call(span, name, "text", choice=0, faults=(("unreadable_span", detail),), metadata=metadata)]


def _reader(span: Span) -> Reader | None:
    if span.is_log or is_container(span):
        return None
    return next((r for r in READERS if r.recognises(span)), None)

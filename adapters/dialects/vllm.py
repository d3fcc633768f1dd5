"""vLLM's built-in `llm_request` spans: counts and times of one finished sequence, no ids, no choice index."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.values import identifier, integer, number
from spanmill.triplets.records import Call, Span

LATENCY: Final = "gen_ai.latency."


def recognises(span: Span) -> bool:
    """An engine's request id beside its latencies."""
    a = span.attributes
    return sc.GEN_AI_REQUEST_ID in a and any(name.startswith(LATENCY) for name in a)


def read(span: Span) -> list[Call]:
    """One sequence. With n > 1 nobody says which choice it is, so it counts for the request alone."""
    a = span.attributes
    n = integer(a.get("gen_ai.request.n")) or 1
    return [
        Call(
            span=span,
            dialect="vllm",
            source="engine",
            choice=0 if n == 1 else None,
            choices=n,
            response_id=identifier(a.get(sc.GEN_AI_REQUEST_ID)),
            usage_prompt=integer(a.get(sc.GEN_AI_PROMPT_TOKENS)),
            usage_response=integer(a.get(sc.GEN_AI_COMPLETION_TOKENS)) if n == 1 else None,
            temperature=number(a.get(sc.GEN_AI_TEMPERATURE)),
            top_p=number(a.get(sc.GEN_AI_TOP_P)),
            max_tokens=integer(a.get(sc.GEN_AI_MAX_TOKENS)),
        )
    ]

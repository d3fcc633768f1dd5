"""SGLang's built-in request spans: counts and finish reason of one request, no ids."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.messages import finish_word
from spanmill.adapters.values import identifier, integer, read_json, strings
from spanmill.triplets.records import Call, Span

RID: Final = "rid"
CACHED: Final = "gen_ai.usage.cached_tokens"
RESPONSE_IDS: Final = (RID,)


def recognises(span: Span) -> bool:
    """The root span of a request: its id beside usage. The spans of threads and stages under it have none."""
    a = span.attributes
    if sc.GEN_AI_OPERATION in a or sc.GEN_AI_REQUEST_MODEL in a:
        return False
    counted = any(name in a for name in (sc.GEN_AI_PROMPT_TOKENS, sc.GEN_AI_COMPLETION_TOKENS, CACHED))
    return counted and (RID in a or sc.GEN_AI_REQUEST_ID in a)


def read(span: Span) -> list[Call]:
    """One request; its id is the response id that the client is sent."""
    a = span.attributes
    reasons = strings(read_json(a, sc.GEN_AI_FINISH_REASONS, []))
    n = max(1, len(reasons))
    return [
        Call(
            span=span,
            dialect="sglang",
            source="engine",
            choice=0 if n == 1 else None,
            choices=n,
            response_id=identifier(a.get(sc.GEN_AI_REQUEST_ID)) or identifier(a.get(RID)),
            usage_prompt=integer(a.get(sc.GEN_AI_PROMPT_TOKENS), foreign=True),
            usage_response=integer(a.get(sc.GEN_AI_COMPLETION_TOKENS), foreign=True),
            finish_reason=finish_word(reasons[0]) if len(reasons) == 1 else None,
        )
    ]

"""ATIF trajectories turned into spans (Harbor's converters), and openJiuwen's names for the same: ids as JSON texts."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.dialects import genai
from spanmill.adapters.dialects.spanmill import policy_runs
from spanmill.adapters.messages import as_object, as_objects
from spanmill.adapters.raw import entries
from spanmill.adapters.values import Fault, Ids, integer, logprobs, parse_json, text, token_ids
from spanmill.triplets.records import Attributes, Call, Json, Logprobs, Span, TokenIds

PROMPT: Final = ("gen_ai.response.prompt_token_ids", "openjiuwen.gen_ai.response.prompt_token_ids")
RESPONSE: Final = ("gen_ai.response.completion_token_ids", "openjiuwen.gen_ai.response.completion_token_ids")
LOGPROBS: Final = ("gen_ai.response.logprobs", "openjiuwen.gen_ai.response.logprobs")
REASONING: Final = "gen_ai.response.reasoning_content"
SESSION: Final = "atif.session_id"
STEP: Final = "atif.step_id"


def recognises(span: Span) -> bool:
    """Its names for ids, or a step of a session that is an inference."""
    a = span.attributes
    return any(name in a for name in (*PROMPT, *RESPONSE)) or (STEP in a and genai.recognises(span))


def read(span: Span) -> list[Call]:
    """The one generation of a step. The converters make up the times, the step's order is right."""
    a = span.attributes
    content = genai.content_of(span)
    prompt, response = _ids(a, PROMPT), _ids(a, RESPONSE)
    probs, faults = _logprobs(a, response.ids)
    calls = genai.read_as(span, "atif", content)
    call = calls[0]
    call.source = "client" if response.ids is not None else "text"
    call.choice = integer(a.get(sc.CHOICE_INDEX)) or call.choice
    call.prompt_token_ids, call.response_token_ids, call.response_logprobs = prompt.ids, response.ids, probs
    runs, runs_fault = policy_runs(a)
    call.policy_versions = runs
    call.logprobs_mode = text(a.get(sc.LOGPROBS_MODE))
    call.stop_reason = text(a.get(sc.STOP_REASON))
    call.faults += tuple(f for f in (prompt.fault, response.fault, runs_fault) if f is not None) + faults
    reasoning = text(a.get(REASONING))
    if reasoning:
        call.response = {"role": "assistant", "content": None, **(call.response or {}), "reasoning_content": reasoning}
    for name in (SESSION, STEP):
        if isinstance(a.get(name), str | int):
            call.metadata[name] = a[name]
    return calls


def _ids(attributes: Attributes, names: tuple[str, ...]) -> Ids:
    name = next((n for n in names if n in attributes), names[0])
    return token_ids(attributes.get(name), name, foreign=True)


def _logprobs(attributes: Attributes, ids: TokenIds | None) -> tuple[Logprobs | None, tuple[Fault, ...]]:
    """Numbers, or OpenAI's objects of token and logprob."""
    name = next((n for n in LOGPROBS if n in attributes), LOGPROBS[0])
    raw = attributes.get(name)
    items: Json = raw
    if isinstance(raw, str) and raw.lstrip()[:1] in ("[", "{"):
        try:
            items = parse_json(raw)
        except ValueError as e:
            return None, (("truncated_attribute", f"{name}: JSON that does not parse ({e})"),)
    items = as_object(items).get("content") if isinstance(items, dict) else items
    if as_objects(items):
        return entries(items, ids)
    probs = logprobs(items, name, foreign=True)
    return probs.values, (probs.fault,) if probs.fault else ()

"""Agent Lightning 0.3: AgentOps spans of the openai client with token ids patched in beside flattened messages."""

from collections.abc import Mapping
from typing import Final, cast

from spanmill import semconv as sc
from spanmill.adapters.messages import as_object, as_objects, finish_word, tool_call, tool_call_ids, unflatten
from spanmill.adapters.raw import entries
from spanmill.adapters.spans import recorded_agent
from spanmill.adapters.values import Fault, identifier, integer, number, parse_json, text, token_ids
from spanmill.triplets.records import Attributes, Call, Json, Span, TokenIds

PROMPT_IDS: Final = "prompt_token_ids"
RESPONSE_IDS: Final = "response_token_ids"
LOGPROBS: Final = "logprobs.content"
PROMPT: Final = "gen_ai.prompt."
COMPLETION: Final = "gen_ai.completion."


def recognises(span: Span) -> bool:
    """Its own names for ids, or a flattened chat of a process that Agent Lightning runs."""
    a = span.attributes
    if RESPONSE_IDS in a or LOGPROBS in a or (PROMPT_IDS in a and sc.GEN_AI_REQUEST_MODEL in a):
        return True
    runs = sc.AGL_ROLLOUT_ID in a or sc.AGL_ROLLOUT_ID in span.resource
    return runs and a.get("gen_ai.request.type") in ("chat", "completion") and sc.GEN_AI_REQUEST_MODEL in a


def read(span: Span) -> list[Call]:
    """A Call per completion; the ids and logprobs are of choice 0."""
    a = span.attributes
    answers = [_message(c) for c in unflatten(a, COMPLETION)]
    prompt = token_ids(a.get(PROMPT_IDS), PROMPT_IDS, foreign=True)
    response = token_ids(a.get(RESPONSE_IDS), RESPONSE_IDS, foreign=True)
    probs, probs_faults = _logprobs(a, response.ids)
    faults = tuple(f for f in (prompt.fault, response.fault) if f is not None) + probs_faults
    messages = [_message(m) for m in unflatten(a, PROMPT)] or None
    made: list[Call] = []
    for choice, answer in enumerate(answers or [None]):
        reason = answer.pop("finish_reason", None) if answer is not None else None
        has_ids = choice == 0 and response.ids is not None
        made.append(
            Call(
                span=span,
                dialect="agentlightning",
                source="client" if has_ids else "text",
                choice=choice,
                choices=max(1, len(answers)),
                response_id=identifier(a.get(sc.GEN_AI_RESPONSE_ID)),
                tool_call_ids=tool_call_ids(answer),
                model=text(a.get(sc.GEN_AI_RESPONSE_MODEL)) or text(a.get(sc.GEN_AI_REQUEST_MODEL)),
                prompt_token_ids=prompt.ids,
                response_token_ids=response.ids if choice == 0 else None,
                response_logprobs=probs if choice == 0 else None,
                usage_prompt=_usage(a, sc.GEN_AI_PROMPT_TOKENS, sc.GEN_AI_INPUT_TOKENS),
                usage_response=_usage(a, sc.GEN_AI_COMPLETION_TOKENS, sc.GEN_AI_OUTPUT_TOKENS),
                temperature=number(a.get(sc.GEN_AI_TEMPERATURE), foreign=True),
                top_p=number(a.get(sc.GEN_AI_TOP_P), foreign=True),
                max_tokens=integer(a.get(sc.GEN_AI_MAX_TOKENS), foreign=True),
                finish_reason=finish_word(reason),
                records_finish=True,
                agent=recorded_agent(a),
                messages=messages,
                response=answer,
                faults=faults if choice == 0 else (),
            )
        )
    return made


def _usage(attributes: Attributes, *names: str) -> int | None:
    return next((n for name in names if (n := integer(attributes.get(name), foreign=True)) is not None), None)


def _logprobs(attributes: Attributes, ids: TokenIds | None) -> tuple[Json, tuple[Fault, ...]]:
    raw = attributes.get(LOGPROBS)
    if raw is None:
        return None, ()
    try:
        items = parse_json(raw) if isinstance(raw, str) else raw
    except ValueError as e:
        return None, (("truncated_attribute", f"{LOGPROBS}: JSON that does not parse ({e})"),)
    return entries(items, ids) if isinstance(items, list) else (None, ())


def _message(item: Mapping[str, Json]) -> dict[str, Json]:
    made: dict[str, Json] = {"role": item.get("role"), "content": item.get("content")}
    for name in ("tool_call_id", "finish_reason"):
        if item.get(name):
            made[name] = item[name]
    calls = as_objects(item.get("tool_calls"))
    if calls:
        made["tool_calls"] = [_call(c) for c in calls]
    return made


def _call(item: Mapping[str, Json]) -> dict[str, Json]:
    function = as_object(item.get("function")) or item
    return tool_call(item.get("id"), function.get("name"), cast("Json", function.get("arguments")))

"""Agent Lightning 0.3: AgentOps spans with token ids patched in, and its Weave tracer's flattened answers."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.dialects import genai
from spanmill.adapters.dialects.litellm import literal
from spanmill.adapters.flattened import flat_answers, flat_prompt, flat_tools
from spanmill.adapters.messages import as_list, as_object, as_objects, unflatten_object
from spanmill.adapters.raw import apply_parameters, entries, is_answer, read_answer
from spanmill.adapters.shapes import conversation, tool_definitions
from spanmill.adapters.values import Fault, identifier, parse_json, text, token_ids
from spanmill.triplets.records import Attributes, Call, Json, Logprobs, Span, TokenIds, Value

PROMPT_TOKENS: Final = "prompt_token_ids"
RESPONSE_TOKENS: Final = "response_token_ids"
LOGPROBS: Final = "logprobs.content"
REQUEST_TYPE: Final = "gen_ai.request.type"
FUNCTIONS: Final = "gen_ai.request.functions."
INPUT: Final = "agentlightning.operation.input."
OUTPUT: Final = "agentlightning.operation.output."
HEADERS: Final = "metadata.requester_custom_headers"
ROLLOUT_HEADER: Final = "x-rollout-id"
ATTEMPT_HEADER: Final = "x-attempt-id"
RESPONSE_IDS: Final = (OUTPUT + "id",)
WEAVE: Final = (OUTPUT + "choices.", OUTPUT + "prompt_token_ids", OUTPUT + "response_token_ids")


def recognises(span: Span) -> bool:
    """Its own names for ids, or a flattened chat of a process that Agent Lightning runs."""
    a = span.attributes
    if RESPONSE_TOKENS in a or LOGPROBS in a or (PROMPT_TOKENS in a and sc.GEN_AI_REQUEST_MODEL in a):
        return True
    if _is_weave(a):
        return True
    return text(a.get(REQUEST_TYPE)) in ("chat", "completion") and sc.GEN_AI_REQUEST_MODEL in a


def _is_weave(attributes: Attributes) -> bool:
    return any(name.startswith(WEAVE) for name in attributes)


def read(span: Span) -> list[Call]:
    """A Call per completion; the ids and logprobs of AgentOps spans are of choice 0."""
    return _read_weave(span) if _is_weave(span.attributes) else _read_agentops(span)


def proxied(attributes: Attributes) -> tuple[str, Value] | None:
    """(rollout id, attempt) from the headers of a request to its LiteLLM proxy, which LiteLLM writes as a literal."""
    raw = attributes.get(HEADERS)
    if not isinstance(raw, str) or ROLLOUT_HEADER not in raw.lower():
        return None
    try:
        headers = {k.lower(): v for k, v in as_object(literal(raw)).items()}
    except ValueError:
        return None
    rollout_id = identifier(headers.get(ROLLOUT_HEADER))
    return None if rollout_id is None else (rollout_id, headers.get(ATTEMPT_HEADER))


def _read_agentops(span: Span) -> list[Call]:
    a = span.attributes
    content = genai.content_of(span)
    content.messages = content.messages or flat_prompt(a)
    content.tools = content.tools or flat_tools(a, FUNCTIONS)
    if not content.answers:
        for said, reason in flat_answers(a):
            content.answers.append(said)
            content.reasons.append(reason)
    calls = genai.read_as(span, "agentlightning", content)
    prompt = token_ids(a.get(PROMPT_TOKENS), PROMPT_TOKENS, foreign=True)
    response = token_ids(a.get(RESPONSE_TOKENS), RESPONSE_TOKENS, foreign=True)
    probs, faults = _logprobs(a, response.ids)
    for call in calls:
        call.prompt_token_ids = prompt.ids
        call.records_finish = True
    first = calls[0]
    first.source = "client" if response.ids is not None else "text"
    first.response_token_ids, first.response_logprobs = response.ids, probs
    first.faults += tuple(f for f in (prompt.fault, response.fault) if f is not None) + faults
    return calls


def _logprobs(attributes: Attributes, ids: TokenIds | None) -> tuple[Logprobs | None, tuple[Fault, ...]]:
    raw = attributes.get(LOGPROBS)
    if raw is None:
        return None, ()
    try:
        items: Json = parse_json(raw) if isinstance(raw, str) else raw
    except ValueError as e:
        return None, (("truncated_attribute", f"{LOGPROBS}: JSON that does not parse ({e})"),)
    return entries(items, ids) if isinstance(items, list) else (None, ())


def _read_weave(span: Span) -> list[Call]:
    """The raw answer, flattened name by name; ids of the first choice may stand beside the choices."""
    a = span.attributes
    asked, said = unflatten_object(a, INPUT), unflatten_object(a, OUTPUT)
    choices = as_objects(said.get("choices")) or [{}]
    beside = as_list(said.get(RESPONSE_TOKENS))
    lists = beside if beside and isinstance(beside[0], list) else [beside or None]
    for choice, own in zip(choices, lists, strict=False):
        nested = as_object(choice.get("provider_specific_fields")).get("token_ids")
        ids = next((i for i in (choice.get("token_ids"), nested, own) if i is not None), None)
        if ids is not None:
            choice["token_ids"] = ids
    said["choices"] = choices
    calls = read_answer(span, "agentlightning", said) if is_answer(said) else []
    for call in calls:
        apply_parameters(call, asked)
        call.messages = conversation(asked.get("messages"))
        call.tools = tool_definitions(asked.get("tools"))
        call.model = call.model or text(asked.get("model"))
        call.response_id = call.response_id or identifier(a.get(sc.GEN_AI_RESPONSE_ID))
    return calls

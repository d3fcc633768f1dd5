"""Our own spans: emitted by the vLLM plugin, the gateway, the injector and the Python API."""

import base64
from typing import Final, cast

import numpy as np

from spanmill import semconv as sc
from spanmill.adapters.dialects import genai
from spanmill.adapters.values import Fault, integer, logprobs, parse_json, structured, text, token_ids
from spanmill.triplets.records import Attributes, Call, Json, PolicyRun, Span

TOKEN_ATTRIBUTES: Final = (sc.CAPTURE, sc.RESPONSE_TOKEN_IDS, sc.PROMPT_TOKEN_IDS, sc.RESPONSE_LOGPROBS)

_SELDOM: Final = frozenset(
    {
        sc.REQUEST_RETRY,
        sc.STOP_REASON,
        sc.ROUTED_EXPERTS,
        sc.POLICY_VERSION,
        sc.POLICY_VERSIONS,
        sc.PROMPT_MULTIMODAL,
    }
)


def recognises(span: Span) -> bool:
    """One of our token attributes stands on the span; it may have lost its operation name."""
    return any(name in span.attributes for name in TOKEN_ATTRIBUTES)


def read(span: Span) -> list[Call]:
    """The one choice that the span is about; names beside the token data are those of the GenAI convention."""
    a = span.attributes
    prompt = token_ids(a.get(sc.PROMPT_TOKEN_IDS), sc.PROMPT_TOKEN_IDS)
    response = token_ids(a.get(sc.RESPONSE_TOKEN_IDS), sc.RESPONSE_TOKEN_IDS)
    probs = logprobs(a.get(sc.RESPONSE_LOGPROBS), sc.RESPONSE_LOGPROBS)
    capture = text(a.get(sc.CAPTURE))
    call = genai.one_choice(span, "spanmill", integer(a.get(sc.CHOICE_INDEX)) or 0)
    call.source = capture if capture in sc.CAPTURES else "client"
    call.prompt_token_ids = prompt.ids
    call.response_token_ids = response.ids
    call.response_logprobs = probs.values
    call.logprobs_mode = text(a.get(sc.LOGPROBS_MODE))
    call.prompt_count = integer(a.get(sc.PROMPT_TOKEN_COUNT))
    call.response_count = integer(a.get(sc.RESPONSE_TOKEN_COUNT))
    call.records_finish = True
    faults = [prompt.fault, response.fault, probs.fault]
    if not _SELDOM.isdisjoint(a):
        call.retry = integer(a.get(sc.REQUEST_RETRY))
        call.stop_reason = text(a.get(sc.STOP_REASON))
        call.routed_experts = _experts(a)
        call.policy_version = text(a.get(sc.POLICY_VERSION))
        call.policy_versions, runs_fault = policy_runs(a)
        call.multimodal, media_fault = _json(a, sc.PROMPT_MULTIMODAL)
        faults += [runs_fault, media_fault]
    call.faults += tuple(f for f in faults if f is not None)
    return [call]


def _experts(attributes: Attributes) -> Json:
    """The experts that the tokens were routed to, as the engine gave them; None if that is not whole."""
    data, shape = attributes.get(sc.ROUTED_EXPERTS), attributes.get(sc.ROUTED_EXPERTS_SHAPE)
    kind = text(attributes.get(sc.ROUTED_EXPERTS_DTYPE))
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except ValueError:
            return None
    if not isinstance(data, bytes) or not isinstance(shape, np.ndarray) or kind is None:
        return None
    return {"data": data, "shape": [int(n) for n in shape], "dtype": kind}


def _json(attributes: Attributes, name: str) -> tuple[Json, Fault | None]:
    try:
        return structured(attributes.get(name)), None
    except ValueError as e:
        return None, ("truncated_attribute", f"{name}: JSON that does not parse ({e})")


def policy_runs(attributes: Attributes) -> tuple[tuple[PolicyRun, ...], Fault | None]:
    """Runs of policy versions over the response; whether they fit it is checked with the ids."""
    raw = text(attributes.get(sc.POLICY_VERSIONS))
    if raw is None:
        return (), None
    try:
        items = parse_json(raw)
        return tuple(
            PolicyRun(str(r["version"]), int(r["start"]), int(r["length"])) for r in cast("list[Json]", items)
        ), None
    except (ValueError, KeyError, TypeError) as e:
        return (), ("truncated_attribute", f"{sc.POLICY_VERSIONS}: no list of runs ({e!r})")

"""From a generation that has ended to spans: one for each of its choices. Runs in the sender's thread."""

import json
import os
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, Final, cast

from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from spanmill import semconv as sc
from spanmill.instrument import identity, provider
from spanmill.instrument.calls import answer_attributes, request_attributes
from spanmill.instrument.packing import keeps_bytes, token_attributes
from spanmill.instrument.vllm.bodies import Asked, read_body
from spanmill.instrument.vllm.generation import Choice, Generation
from spanmill.instrument.vllm.policy import versions
from spanmill.instrument.vllm.requests import Request, is_valid

Attributes = dict[str, AttributeValue]

MODES: Final = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
"""vLLM's logprobs modes that give logprobs. The others give logits, which are none."""

NUMBERED: Final = {
    "/v1/completions": re.compile(r"(.*)-(\d+)", re.DOTALL),
    "/v1/chat/completions/batch": re.compile(r"(.*)_(\d+)", re.DOTALL),
}
"""Routes that take several prompts: the engine sees the client's response id and the number of the prompt."""

SERVED: Final = ("chatcmpl-", "cmpl-", "resp_")
"""How ids begin that vLLM's own APIs give. A program that drives the engine itself often counts from 0."""

FIRST_TURN: Final = {"/v1/responses": "_0"}
"""Routes that may generate several times for one response; the client's id is that of the first."""


def emit(generation: Generation) -> None:
    """Make the spans of a generation and end them, which hands them to the outbox."""
    common = _common(generation)
    operation = str(common[sc.GEN_AI_OPERATION])
    name = f"{operation} {common.get(sc.GEN_AI_REQUEST_MODEL, '')}".rstrip()
    response_id, first_choice = client_id(generation)
    parent = generation.parent
    if generation.request is not None and generation.request.first is not None:
        parent = generation.request.first
    for index, choice in sorted((generation.choices or {0: Choice()}).items()):
        attributes = {
            **common,
            **_sampled(generation, choice, response_id),
            sc.CHOICE_INDEX: first_choice + index,
        }
        span = provider.tracer().start_span(
            name,
            parent,
            SpanKind.SERVER,
            attributes=attributes,
            start_time=generation.start_ns,
        )
        if isinstance(generation.error, Exception) and choice.finish_reason is None:
            span.set_attribute(sc.ERROR_TYPE, type(generation.error).__qualname__)
            span.set_status(Status(StatusCode.ERROR, str(generation.error)))
        span.end(generation.end_ns)
        if not is_valid(parent):  # what belongs to one request shall stand in one trace
            parent = set_span_in_context(NonRecordingSpan(span.get_span_context()), Context())
            if generation.request is not None:
                generation.request.first = parent


def client_id(generation: Generation) -> tuple[str, int]:
    """(the response id that the client sees, the number of this generation's first choice among the client's)."""
    if generation.request is None and not generation.request_id.startswith(SERVED):
        return f"{generation.request_id}-{os.urandom(8).hex()}", 0  # no other engine's request has it
    path = generation.request.path if generation.request else ""
    numbered = NUMBERED[path].fullmatch(generation.request_id) if path in NUMBERED else None
    if numbered is not None:
        return numbered[1], int(numbered[2]) * int(generation.params.n or 1)
    return generation.request_id.removesuffix(FIRST_TURN.get(path, "")), 0


def _common(generation: Generation) -> Attributes:
    """Attributes that all choices share."""
    params, request = generation.params, generation.request
    asked = _asked(request) if request is not None else Asked()
    model = generation.lora_name or generation.model
    found: Attributes = {
        sc.CAPTURE: "engine",
        sc.GEN_AI_OPERATION: (request.operation if request is not None else None) or "text_completion",
        **request_attributes(
            model=asked.model or model,
            messages=asked.messages,
            tools=asked.tools,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            n=params.n,
        ),
    }
    if request is not None and request.identity is not None:
        found |= identity.attributes(request.identity)
        found[sc.ROLLOUT_CARRIER] = str(request.carrier)
    optional: dict[str, AttributeValue | None] = {
        sc.GEN_AI_RESPONSE_MODEL: model,
        sc.GEN_AI_CONVERSATION_ID: generation.session_id,
        sc.GEN_AI_CACHED_TOKENS: generation.cached_tokens,
        sc.REQUEST_RETRY: request.retry if request is not None else None,
        sc.PROMPT_MULTIMODAL: _media(generation.prompt, asked),
    }
    return found | {name: value for name, value in optional.items() if value is not None}


def _asked(request: Request) -> Asked:
    """What the body asks for; read once for all generations of a request."""
    body = request.body
    return _read(request.path, b"".join(body)) if body else Asked()


_read = lru_cache(maxsize=4)(read_body)


def _media(prompt: Any, asked: Asked) -> str | None:
    """Kinds and hashes of the prompt's media: vLLM's own hashes where it gives them, else the body's."""
    hashes = _of_prompt(prompt, "mm_hashes")
    if isinstance(hashes, Mapping) and hashes:
        by_kind = cast("Mapping[str, list[str]]", hashes)
        return json.dumps([{"kind": kind, "hash": str(h)} for kind in by_kind for h in by_kind[kind]])
    return json.dumps(asked.media) if asked.media else None


def _of_prompt(prompt: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", prompt).get(name) if isinstance(prompt, Mapping) else getattr(prompt, name, None)


def _sampled(generation: Generation, choice: Choice, response_id: str) -> Attributes:
    """Attributes of one choice."""
    ids: list[int] = [*chain.from_iterable(choice.token_ids)]
    has_tokens = bool(generation.choices)
    prompt_ids = generation.prompt_token_ids
    if prompt_ids is None:
        prompt_ids = _of_prompt(generation.prompt, "prompt_token_ids")
    mode = MODES.get(generation.logprobs_mode or "")
    logprobs = sampled_logprobs(choice, len(ids)) if mode and has_tokens else None
    version, runs = versions(choice.weight_versions, generation.policy_before, generation.policy_after)
    found: Attributes = {
        **answer_attributes(
            response_id=response_id,
            finish_reason=choice.finish_reason,
            policy_version=version,
            policy_versions=runs,
            logprobs_mode=mode if logprobs is not None else None,
            prompt_tokens=None if prompt_ids is None else len(prompt_ids),
            completion_tokens=len(ids) if has_tokens else None,
        ),
        **cast("Attributes", token_attributes(prompt_ids, ids if has_tokens else None, logprobs)),
        **_experts(choice.routed_experts),
    }
    if choice.stop_reason is not None:
        found[sc.STOP_REASON] = str(choice.stop_reason)
    return found


def sampled_logprobs(choice: Choice, count: int) -> list[float] | None:
    """(R,) the logprob of each sampled token, found by its id; None if one of them is not there."""
    found: list[float | None] = []
    for ids, logprobs in zip(choice.token_ids, choice.logprobs, strict=True):
        if logprobs is None:
            return None
        ends = getattr(logprobs, "end_indices", None)
        found += _from_dicts(ids, logprobs) if ends is None else _from_flat(ids, logprobs, ends)
    return cast("list[float]", found) if len(found) == count and None not in found else None


def _from_dicts(ids: Any, logprobs: Any) -> list[float | None]:
    """From a dict for each position, by token id."""
    return [None if (at := entry.get(i)) is None else at.logprob for i, entry in zip(ids, logprobs, strict=False)]


def _from_flat(ids: Any, flat: Any, ends: list[int]) -> list[float | None]:
    """From vLLM's flat form: at position p, `token_ids[start[p]:end[p]]` have `logprobs[start[p]:end[p]]`."""
    tokens, values = flat.token_ids, flat.logprobs
    if tokens == list(ids) and ends == list(range(1, len(tokens) + 1)):  # nobody asked for more than the sampled ones
        return values
    picked: list[float | None] = []
    for wanted, start, end in zip(ids, flat.start_indices, ends, strict=False):
        at = next((k for k in range(start, end) if tokens[k] == wanted), None)
        picked.append(None if at is None else values[at])
    return picked


def _experts(experts: Any) -> Attributes:
    """The experts that each token was routed to, as the engine returned them."""
    if experts is None:
        return {}
    data = experts.tobytes()
    return {
        sc.ROUTED_EXPERTS: data if keeps_bytes() else b64encode(data).decode("ascii"),
        sc.ROUTED_EXPERTS_SHAPE: [int(n) for n in experts.shape],
        sc.ROUTED_EXPERTS_DTYPE: str(experts.dtype),
    }

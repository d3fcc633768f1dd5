"""Raw answers of OpenAI-compatible servers, as they stand whole inside some instrumentation's spans."""

from collections.abc import Mapping, Sequence
from typing import Final, cast

import numpy as np

from spanmill.adapters.messages import as_object, as_objects, finish_word, tool_call_ids
from spanmill.adapters.values import Fault, identifier, integer, logprobs, number, text, token_ids
from spanmill.triplets.records import Call, Json, Span, TokenIds

TOKEN_ID: Final = "token_id:"
"""How vLLM spells tokens under `return_tokens_as_token_ids`."""


def is_answer(value: Json) -> bool:
    """Whether a JSON value is a chat or text completion."""
    return isinstance(value, dict) and isinstance(cast("Mapping[str, Json]", value).get("choices"), list)


def read_answer(span: Span, dialect: str, answer: Mapping[str, Json]) -> list[Call]:
    """A Call per choice of a chat completion or text completion, streamed ones as instrumentors add them up."""
    usage = as_object(answer.get("usage"))
    usage_prompt = integer(usage.get("prompt_tokens"), foreign=True)
    choices = as_objects(answer.get("choices"))
    prompt = token_ids(answer.get("prompt_token_ids"), "prompt_token_ids", foreign=True)
    whole, repeated, prompt_fault = _one_copy(prompt.ids, len(choices), usage_prompt, streamed=_is_chunk(answer))
    shared = tuple(f for f in (prompt.fault, prompt_fault) if f is not None)
    calls: list[Call] = []
    for position, choice in enumerate(choices):
        own = token_ids(choice.get("prompt_token_ids"), "choices[].prompt_token_ids", foreign=True)
        response = token_ids(choice.get("token_ids"), "choices[].token_ids", foreign=True)
        probs, probs_faults = _logprobs(choice.get("logprobs"), response.ids)
        message = _message(choice)
        call = Call(
            span=span,
            dialect=dialect,
            source="client" if response.ids is not None else "text",
            choice=integer(choice.get("index"), foreign=True) if "index" in choice else position,
            choices=len(choices),
            response_id=identifier(answer.get("id")),
            tool_call_ids=tool_call_ids(message),
            model=text(answer.get("model")),
            prompt_token_ids=whole if own.ids is None else own.ids,
            response_token_ids=response.ids,
            response_logprobs=probs,
            usage_prompt=usage_prompt,
            usage_response=integer(usage.get("completion_tokens"), foreign=True),
            finish_reason=finish_word(choice.get("finish_reason")),
            stop_reason=_stop(choice.get("stop_reason")),
            records_finish=True,
            response=message,
            faults=tuple(f for f in (own.fault, response.fault) if f is not None) + probs_faults + shared,
            flags=frozenset({"prompt_ids_repeated"} if repeated and own.ids is None else ()),
        )
        calls.append(call)
    return calls


def _is_chunk(answer: Mapping[str, Json]) -> bool:
    return str(answer.get("object", "")).endswith(".chunk")


def _one_copy(
    ids: TokenIds | None, n: int, declared: int | None, *, streamed: bool
) -> tuple[TokenIds | None, bool, Fault | None]:
    """(prompt ids, whether they stood there n times, fault).

    vLLM puts the prompt ids on the first chunk of every choice, and instrumentors add chunks up.
    """
    if ids is None or n < 2 or not ids.size or ids.size % n:
        return ids, False, None
    copies = ids.reshape(n, -1)
    if not np.all(copies == copies[0]):
        return ids, False, None
    if declared == copies.shape[1]:
        return copies[0].copy(), True, None
    if declared is None and streamed:
        return (
            ids,
            False,
            (
                "token_count_mismatch",
                f"prompt_token_ids are {n} equal copies, and no usage says how long the prompt is",
            ),
        )
    return ids, False, None


def _logprobs(value: Json, ids: TokenIds | None) -> tuple[np.ndarray | None, tuple[Fault, ...]]:
    """Sampled logprobs of a choice, chat shape (`content`) or completions shape (`token_logprobs`)."""
    holder = as_object(value)
    if isinstance(holder.get("content"), list):
        return entries(holder["content"], ids)
    probs = logprobs(holder.get("token_logprobs"), "logprobs.token_logprobs", foreign=True)
    faults = (probs.fault,) if probs.fault else ()
    tokens = holder.get("tokens")
    if isinstance(tokens, list):
        faults += _shift([{"token": t} for t in cast("list[Json]", tokens)], ids)
    return probs.values, faults


def entries(items: Json, ids: TokenIds | None) -> tuple[np.ndarray | None, tuple[Fault, ...]]:
    """Logprobs from OpenAI's list of `{token, logprob}`; tokens named `token_id:N` are compared with the ids."""
    objects = as_objects(items)
    if len(objects) != len(cast("list[Json]", items)):
        return None, ()
    probs = logprobs([o.get("logprob") for o in objects], "logprobs.content", foreign=True)
    faults = (probs.fault,) if probs.fault else ()
    return probs.values, faults + _shift(objects, ids)


def _shift(objects: Sequence[Mapping[str, Json]], ids: TokenIds | None) -> tuple[Fault, ...]:
    if ids is None or not objects or not str(objects[0].get("token", "")).startswith(TOKEN_ID):
        return ()
    for at, (entry, sampled) in enumerate(zip(objects, ids.tolist(), strict=False)):
        named = str(entry.get("token", ""))
        if named.startswith(TOKEN_ID) and named[len(TOKEN_ID) :] != str(sampled):
            return (("id_logprob_shift", f"position {at}: the logprob is of {named}, the sampled id is {sampled}"),)
    return ()


def _message(choice: Mapping[str, Json]) -> Json:
    """The assistant message; a text completion's text becomes its content."""
    message = choice.get("message")
    if isinstance(message, dict):
        made = {
            k: v for k, v in cast("Mapping[str, Json]", message).items() if v is not None or k in ("role", "content")
        }
        if not made.get("tool_calls", True):
            del made["tool_calls"]
        return made
    if isinstance(choice.get("text"), str):
        return {"role": "assistant", "content": choice["text"]}
    return None


def _stop(reason: Json) -> str | None:
    """VLLM's stop_reason: the stop string, or the id of the stop token."""
    return str(reason) if isinstance(reason, str | int) and not isinstance(reason, bool) else None


def apply_parameters(call: Call, parameters: Mapping[str, Json]) -> None:
    """Fill in sampling parameters from a request body."""
    if call.temperature is None:
        call.temperature = number(parameters.get("temperature"), foreign=True)
    if call.top_p is None:
        call.top_p = number(parameters.get("top_p"), foreign=True)
    if call.top_k is None:
        call.top_k = integer(parameters.get("top_k"), foreign=True)
    if call.max_tokens is None:
        names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        call.max_tokens = next((n for k in names if (n := integer(parameters.get(k), foreign=True)) is not None), None)

"""Raw answers of OpenAI-compatible servers, as they stand whole inside some instrumentation's spans."""

from collections.abc import Mapping, Sequence
from typing import Final, cast

import numpy as np

from spanmill.adapters.messages import as_list, as_object, as_objects, finish_word, tool_call_ids
from spanmill.adapters.shapes import answer as shaped
from spanmill.adapters.values import Fault, identifier, integer, logprobs, number, text, token_ids
from spanmill.triplets.records import Call, Json, Logprobs, PolicyRun, Span, TokenIds

UNNAMED: Final = "default"
"""What vLLM and SGLang call weights that nobody gave a version."""

TOKEN_ID: Final = "token_id:"
"""How vLLM spells tokens under `return_tokens_as_token_ids`."""


def is_answer(value: Json) -> bool:
    """Whether a JSON value is a chat or text completion, or a response of the Responses API."""
    return bool(as_objects(as_object(value).get("choices"))) or is_response(value)


def is_response(value: Json) -> bool:
    """Whether a JSON value is a response of the Responses API."""
    whole = as_object(value)
    return whole.get("object") == "response" and isinstance(whole.get("output"), list)


def read_answer(span: Span, dialect: str, answer: Mapping[str, Json]) -> list[Call]:
    """A Call per choice of a completion, streamed ones as instrumentors add them up; a response is one Call."""
    if is_response(answer):
        return [_read_response(span, dialect, answer)]
    usage = as_object(answer.get("usage"))
    usage_prompt = integer(usage.get("prompt_tokens"), foreign=True)
    choices = as_objects(answer.get("choices"))
    ext, metadata = as_object(answer.get("sglext")), as_object(answer.get("metadata"))
    prompt = token_ids(answer.get("prompt_token_ids", ext.get("input_ids")), "prompt_token_ids", foreign=True)
    whole, repeated, prompt_fault = _one_copy(prompt.ids, len(choices), usage_prompt, streamed=_is_chunk(answer))
    shared = tuple(f for f in (prompt.fault, prompt_fault) if f is not None)
    calls: list[Call] = []
    for position, choice in enumerate(choices):
        own = token_ids(choice.get("prompt_token_ids"), "choices[].prompt_token_ids", foreign=True)
        response = token_ids(_response_ids(choice, position, ext), "choices[].token_ids", foreign=True)
        probs, probs_faults = _sampled_logprobs(choice, response.ids)
        versions = choice.get("weight_versions") or (metadata.get("weight_versions") if position == 0 else None)
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
            policy_version=_named(metadata.get("weight_version")) if position == 0 else None,
            policy_versions=_runs(versions),
            response=message,
            faults=tuple(f for f in (own.fault, response.fault) if f is not None) + probs_faults + shared,
            flags=frozenset({"prompt_ids_repeated"} if repeated and own.ids is None else ()),
        )
        calls.append(call)
    return calls


def _response_ids(choice: Mapping[str, Json], position: int, ext: Mapping[str, Json]) -> Json:
    """Where vLLM has them, else where SGLang does: at the choice, or of streamed answers in `sglext`."""
    for name in ("token_ids", "response_token_ids"):
        if choice.get(name) is not None:
            return choice[name]
    listed = as_list(ext.get("output_ids"))
    return listed[position] if position < len(listed) else None


def _named(version: Json) -> str | None:
    """A version of weights, SGLang's of the first choice; what it calls weights that nobody named is none."""
    return None if version == UNNAMED else text(version)


def _read_response(span: Span, dialect: str, answer: Mapping[str, Json]) -> Call:
    """The one call that a response is, if it is one: with tools of the server's it is several generations.

    vLLM shows ids under `enable_response_messages`: one input message, and the output in one piece or, streamed, in
    many, which are the answer together if they are as many tokens as the usage says.
    """
    usage = as_object(answer.get("usage"))
    output = as_list(answer.get("output"))
    message = shaped(output)
    sampled = integer(usage.get("output_tokens"), foreign=True)
    asked, said = as_objects(answer.get("input_messages")), as_objects(answer.get("output_messages"))
    pieces = [token_ids(m.get("tokens"), "output_messages[].tokens", foreign=True) for m in said]
    prompt = token_ids(asked[0].get("tokens") if len(asked) == 1 else None, "input_messages[].tokens", foreign=True)
    known = [p.ids for p in pieces if p.ids is not None]
    whole = np.concatenate(known) if known and len(known) == len(pieces) else None
    several = len(asked) > 1 or (len(pieces) > 1 and (whole is None or whole.size != sampled))
    ids = None if several else whole
    faults = tuple(p.fault for p in (prompt, *pieces) if p.fault is not None)
    probs, probs_faults = _response_logprobs(output, ids)
    return Call(
        span=span,
        dialect=dialect,
        source="client" if ids is not None else "text",
        choice=0,
        response_id=identifier(answer.get("id")),
        tool_call_ids=tool_call_ids(message),
        model=text(answer.get("model")),
        prompt_token_ids=None if several else prompt.ids,
        response_token_ids=ids,
        response_logprobs=probs,
        usage_prompt=None if several else integer(usage.get("input_tokens"), foreign=True),
        usage_response=None if several else sampled,
        temperature=number(answer.get("temperature"), foreign=True),
        top_p=number(answer.get("top_p"), foreign=True),
        max_tokens=integer(answer.get("max_output_tokens"), foreign=True),
        finish_reason=_response_finish(answer, message),
        records_finish=True,
        response=message,
        faults=faults + probs_faults,
        metadata={"generations": "several in one response"} if several else {},
    )


def _response_finish(answer: Mapping[str, Json], message: Json) -> str | None:
    status = answer.get("status")
    if status == "completed":
        return "tool_calls" if tool_call_ids(message) else "stop"
    reason = as_object(answer.get("incomplete_details")).get("reason")
    return finish_word(reason or status) if status in ("incomplete", "failed", "cancelled") else None


def _response_logprobs(output: Sequence[Json], ids: TokenIds | None) -> tuple[Logprobs | None, tuple[Fault, ...]]:
    """They stand at the text alone: the answer's own only where the text is all that was sampled."""
    texts = [part for item in as_objects(output) for part in as_objects(item.get("content"))]
    lists = [as_list(part.get("logprobs")) for part in texts if part.get("logprobs")]
    if len(lists) != 1 or ids is None or len(lists[0]) != ids.size:
        return None, ()
    return entries(lists[0], ids)


def _runs(value: Json) -> tuple[PolicyRun, ...]:
    """Runs of weights over the answer, from vLLM's `{version, start, end}`."""
    made: list[PolicyRun] = []
    if all(run.get("version") == UNNAMED for run in as_objects(value)):
        return ()
    for run in as_objects(value):
        version, start, end = run.get("version"), integer(run.get("start")), integer(run.get("end"))
        if not isinstance(version, str | int) or start is None or end is None:
            return ()
        made.append(PolicyRun(str(version), start, end - start))
    return tuple(made)


def add_streamed(answer: dict[str, Json], chunks: Sequence[Json]) -> None:
    """Put the token data of a stream's chunks, all of them in order, into the answer that they were added up to."""
    ids: dict[Json, list[Json]] = {}
    ext = next((chunk["sglext"] for chunk in as_objects(chunks) if "sglext" in chunk), None)
    if ext is not None:
        answer.setdefault("sglext", ext)
    entries: dict[Json, list[Json]] = {}
    for chunk in as_objects(chunks):
        if answer.get("prompt_token_ids") is None:
            answer["prompt_token_ids"] = chunk.get("prompt_token_ids")
        for choice in as_objects(chunk.get("choices")):
            at = integer(choice.get("index"))
            ids.setdefault(at, []).extend(as_list(choice.get("token_ids")))
            entries.setdefault(at, []).extend(as_list(as_object(choice.get("logprobs")).get("content")))
    for choice in as_objects(answer.get("choices")):
        at = integer(choice.get("index"))
        if ids.get(at) and choice.get("token_ids") is None:
            choice["token_ids"] = ids[at]
        if entries.get(at) and choice.get("logprobs") is None:
            choice["logprobs"] = {"content": entries[at]}


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


def _sampled_logprobs(choice: Mapping[str, Json], ids: TokenIds | None) -> tuple[Logprobs | None, tuple[Fault, ...]]:
    """Logprobs of a choice in OpenAI's place, else in SGLang's: `[logprob, id, text]` per token.

    SGLang streams none of tokens that show no text: a list that is too short beside ids from `sglext` has holes.
    """
    probs, faults = _logprobs(choice.get("logprobs"), ids)
    streams_holes = "matched_stop" in choice and "token_ids" not in choice and "response_token_ids" not in choice
    if probs is not None and ids is not None and streams_holes and probs.size < ids.size:
        return None, ()
    items = as_list(as_object(choice.get("meta_info")).get("output_token_logprobs"))
    if probs is not None or not items or not all(len(as_list(i)) >= 2 for i in items):
        return probs, faults
    return entries([{"logprob": i[0], "token": f"{TOKEN_ID}{i[1]}"} for i in items], ids)


def _logprobs(value: Json, ids: TokenIds | None) -> tuple[Logprobs | None, tuple[Fault, ...]]:
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


def entries(items: Json, ids: TokenIds | None) -> tuple[Logprobs | None, tuple[Fault, ...]]:
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

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agent_spans import call, span

from spanmill.adapters import adapt, dialects
from spanmill.adapters.dialects import is_call, read
from spanmill.adapters.dialects.litellm import MAX_LITERAL, literal
from spanmill.triplets.records import Call, Event, PolicyRun, Span, Value

CHOICE: dict[str, Any] = {
    "index": 0,
    "message": {"role": "assistant", "content": "it's", "tool_calls": None},
    "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
    "finish_reason": "stop",
    "token_ids": [3, 4],
}
ANSWER: dict[str, Any] = {"id": "r1", "model": "m", "object": "chat.completion", "choices": [CHOICE]}
ANSWER["prompt_token_ids"] = [1, 2]
ANSWER["usage"] = {"prompt_tokens": 2, "completion_tokens": 2}
KIND: dict[str, Value] = {"openinference.span.kind": "LLM"}


def told(call: Call) -> dict[str, Any]:
    """What tests compare of a call: whose it is, what was sampled, and what was said."""
    ids = (call.prompt_token_ids, call.response_token_ids, call.response_logprobs)
    prompt, response, probs = (None if v is None else v.tolist() for v in ids)
    return {
        "dialect": call.dialect,
        "id": call.response_id,
        "ids": (prompt, response, probs),
        "finish": call.finish_reason,
        "faults": [reason for reason, _ in call.faults],
    }


def raw(dialect: str, **changes: Any) -> dict[str, Any]:
    """`told` of the raw answer above."""
    whole: dict[str, Any] = {
        "dialect": dialect,
        "id": "r1",
        "ids": ([1, 2], [3, 4], [-0.5, -0.25]),
        "finish": "stop",
        "faults": [],
    }
    return {**whole, **changes}


# ------------------------------------------------------------------ LiteLLM


def litellm(spell: Callable[[Any], str]) -> Span:
    """A raw request's span, nested values spelled by `spell`."""
    nested = {k: spell(v) if isinstance(v, dict | list) else v for k, v in ANSWER.items()}
    return span(1, {f"llm.hosted_vllm.{k}": v for k, v in nested.items()})


@pytest.mark.parametrize("spell", [json.dumps, str], ids=["json", "literal"])
def test_litellm_spells_answers_in_two_ways(spell: Callable[[Any], str]) -> None:
    """`null` and `None`, quotes of both kinds: JSON and Python literals are the same answer."""
    (call,) = read(litellm(spell))
    assert raw("litellm") == told(call)


def test_cut_literal_is_a_fault() -> None:
    """Token data could have stood in a value that does not end: the call is set aside, not read as text."""
    (call,) = read(litellm(lambda value: str(value)[:40]))
    assert ["truncated_attribute"] == told(call)["faults"]


def test_literal_is_data_within_a_bound() -> None:
    """A literal is parsed and never evaluated, up to a length; what JSON lacks comes out as what it has."""
    assert {"a": [1, None, "x"], "3": True} == literal("{'a': (1, None, 'x'), 3: True}")
    for hopeless in ("__import__('os')", "[" * 3000, "{'a':", "'" + "x" * MAX_LITERAL):
        with pytest.raises(ValueError):
            literal(hopeless)


def test_litellm_writes_its_own_id_where_the_server_gave_none() -> None:
    """A failed request's response id is LiteLLM's id of the call, and so none."""
    failed: dict[str, Value] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "litellm.call_id": "u"}
    (call,) = read(span(1, {**failed, "gen_ai.response.id": "u", "hidden_params": "{}"}, scope="litellm"))
    assert ("litellm", None) == (call.dialect, call.response_id)


# ------------------------------------------------------------------ Agent Lightning


def test_weave_tracer_names() -> None:
    """The Weave tracer's flattened answer, with ids beside the choices or in the provider's own fields."""
    out = "agentlightning.operation.output."
    flat: dict[str, Value] = {
        "agentlightning.operation.input.messages.0.role": "user",
        "agentlightning.operation.input.messages.0.content": "q",
        f"{out}id": "r1",
        f"{out}model": "m",
        f"{out}prompt_token_ids": np.array([1, 2]),
        f"{out}choices.0.index": 0,
        f"{out}choices.0.finish_reason": "stop",
        f"{out}choices.0.message.role": "assistant",
        f"{out}choices.0.message.content": "it's",
        f"{out}choices.0.logprobs.content.0.logprob": -0.5,
        f"{out}choices.0.logprobs.content.1.logprob": -0.25,
    }
    for ids in ("response_token_ids.0", "choices.0.token_ids", "choices.0.provider_specific_fields.token_ids"):
        (call,) = read(span(1, {**flat, out + ids: np.array([3, 4])}))
        assert raw("agentlightning") == told(call)
        assert [{"role": "user", "content": "q"}] == call.messages


def test_rollout_behind_the_proxy_is_foreign() -> None:
    """Agent Lightning's LiteLLM proxy puts rollout and attempt into headers, which LiteLLM writes as a literal."""
    headers = str({"X-Rollout-Id": "ro-1", "x-attempt-id": "at-1", "x-sequence-id": "3"})
    a: dict[str, Value] = {**litellm(str).attributes, "metadata.requester_custom_headers": headers}
    (rollout,) = adapt([span(1, a)]).rollouts
    assert ("ro-1", 0, "foreign") == (rollout.rollout_id, rollout.attempt, rollout.identity_source)
    assert "at-1" == json.loads(rollout.metadata)["attempt_name"]


# ------------------------------------------------------------------ raw answers


def openinference(answer: dict[str, Any]) -> Span:
    """An OpenInference span around a raw answer."""
    return span(1, {**KIND, "output.value": json.dumps(answer), "output.mime_type": "application/json"})


def response(**more: Any) -> dict[str, Any]:
    """A response of the Responses API with ids of vLLM."""
    text = {"type": "output_text", "text": "it's", "logprobs": CHOICE["logprobs"]["content"]}
    return {
        "id": "r1",
        "object": "response",
        "status": "completed",
        "model": "m",
        "output": [{"type": "message", "role": "assistant", "content": [text]}],
        "usage": {"input_tokens": 2, "output_tokens": 2},
        "input_messages": [{"tokens": [1, 2]}],
        "output_messages": [{"tokens": [3, 4]}],
        **more,
    }


def test_response_is_one_call() -> None:
    """A response with ids is a call like a chat's; streamed, its ids come in pieces that add up to the usage."""
    pieces = [{"tokens": [3]}, {"tokens": [4]}]
    for answered in (response(), response(output_messages=pieces)):
        (call,) = read(openinference(answered))
        assert raw("openinference") == told(call)
        assert {"role": "assistant", "content": "it's"} == call.response


def test_response_of_several_generations_has_no_ids() -> None:
    """With the server's own tools a response is several generations; their ids are not passed off as one call's."""
    several = response(output_messages=[{"tokens": [3, 4]}, {"tokens": [1, 2, 3, 4, 5]}, {"tokens": [6]}])
    (call,) = read(openinference(several))
    assert raw("openinference", ids=(None, None, None)) == told(call)
    assert {"generations": "several in one response"} == call.metadata


def test_logprobs_of_a_text_that_is_not_all_of_the_answer_are_left_out() -> None:
    """Reasoning was sampled too and has no logprobs: a list that covers a part is no list."""
    (call,) = read(openinference(response(output_messages=[{"tokens": [9, 3, 4]}], usage={})))
    assert raw("openinference", ids=([1, 2], [9, 3, 4], None)) == told(call)


def test_incomplete_response_stopped_at_the_limit() -> None:
    """A response that ran into its token limit says so in other words than a chat."""
    cut = response(status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    (call,) = read(openinference(cut))
    assert raw("openinference", finish="length") == told(call)


def test_sglang_answers() -> None:
    """SGLang puts the prompt's ids at the choice, logprobs into `meta_info`, the weights' version into `metadata`."""
    choice: dict[str, Any] = {**CHOICE, "logprobs": None, "prompt_token_ids": [1, 2]}
    choice["meta_info"] = {"output_token_logprobs": [[-0.5, 3, "a"], [-0.25, 4, "b"]]}
    whole = {**ANSWER, "prompt_token_ids": None, "choices": [choice], "metadata": {"weight_version": "v7"}}
    (call,) = read(openinference(whole))
    assert raw("openinference") == told(call)
    assert "v7" == call.policy_version


def test_sglang_chats() -> None:
    """Ids stand at the choice of a whole chat, in `sglext` of a streamed one; weights are told of the first choice."""
    bare: dict[str, Any] = {name: value for name, value in CHOICE.items() if name != "token_ids"}
    bare["matched_stop"] = 4
    runs = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    metadata = {"weight_version": "b", "weight_versions": runs}
    choices = [{**bare, "index": at, "prompt_token_ids": [1, 2], "response_token_ids": [3, 4]} for at in (0, 1)]
    usage = {"prompt_tokens": 2, "completion_tokens": 4}
    plain = {name: value for name, value in ANSWER.items() if name != "prompt_token_ids"}
    first, second = read(openinference({**plain, "choices": choices, "metadata": metadata, "usage": usage}))
    assert [raw("openinference")] * 2 == [told(first), told(second)]
    assert ("b", (PolicyRun("a", 0, 1), PolicyRun("b", 1, 1))) == (first.policy_version, first.policy_versions)
    assert (None, ()) == (second.policy_version, second.policy_versions)
    ext = {"input_ids": [1, 2], "output_ids": [[3, 4]]}
    (call,) = read(openinference({**plain, "choices": [bare], "sglext": ext}))
    assert raw("openinference") == told(call)
    cut = {**bare, "logprobs": {"content": bare["logprobs"]["content"][:1]}}
    (call,) = read(openinference({**plain, "choices": [cut], "sglext": ext, "metadata": {"weight_version": "default"}}))
    assert ([3, 4], None, None, ()) == (
        None if call.response_token_ids is None else call.response_token_ids.tolist(),
        call.response_logprobs,
        call.policy_version,
        call.faults,
    )


def test_weights_that_changed_within_an_answer() -> None:
    """VLLM's runs of weight versions over the answer are kept as runs."""
    runs = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    (call,) = read(openinference({**ANSWER, "choices": [{**CHOICE, "weight_versions": runs}]}))
    assert (PolicyRun("a", 0, 1), PolicyRun("b", 1, 1)) == call.policy_versions


@pytest.mark.parametrize("count", [2, 2.0, "2"])
@pytest.mark.parametrize("first", [0, 1])
def test_openinference_counts_and_indices(count: Value, first: int) -> None:
    """Counts come as int, double or text; messages are numbered from 0, or from 1 where 0 is kept for instructions."""
    a: dict[str, Value] = {**KIND, "llm.token_count.prompt": count, "llm.token_count.completion": count}
    for at, (role, content) in enumerate((("user", "q"), ("assistant", "a")), first):
        a |= {f"llm.input_messages.{at}.message.role": role, f"llm.input_messages.{at}.message.content": content}
    (call,) = read(span(1, a))
    assert (2, 2) == (call.usage_prompt, call.usage_response)
    assert [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] == call.messages


# ------------------------------------------------------------------ the others


def mlflow(*chunks: dict[str, Any]) -> Span:
    """A streamed call whose answer was added up without its ids, the chunks beside it."""
    bare = {**CHOICE, "token_ids": None, "logprobs": None}
    a: dict[str, Value] = {"mlflow.spanType": '"CHAT_MODEL"', "mlflow.spanInputs": "{}"}
    a["mlflow.spanOutputs"] = json.dumps({**ANSWER, "prompt_token_ids": None, "choices": [bare]})
    events = [Event(f"mlflow.chunk.item.{c['n']}", 1, {"mlflow.chunk.value": json.dumps(c)}) for c in chunks]
    return span(1, a, events=tuple(events))


def chunk(number: int, ids: list[int], probs: list[float], **more: Any) -> dict[str, Any]:
    """One chunk of a stream."""
    entries = [{"token": "t", "logprob": p} for p in probs]
    return {"n": number, "choices": [{"index": 0, "token_ids": ids, "logprobs": {"content": entries}}], **more}


def test_mlflow_keeps_ids_of_a_stream_in_its_chunks() -> None:
    """Ids and logprobs of a streamed answer are added up from the chunks, if none is missing."""
    first, second = chunk(0, [3], [-0.5], prompt_token_ids=[1, 2]), chunk(1, [4], [-0.25])
    (whole,) = read(mlflow(first, second))
    assert raw("mlflow") == told(whole)
    (gap,) = read(mlflow(first, {**second, "n": 2}))
    assert raw("mlflow", ids=(None, None, None)) == told(gap)


def test_logfire_request_of_a_stream_is_no_second_call() -> None:
    """Logfire writes the streamed request and, at its end, the answer: the second span is the call."""
    a: dict[str, Value] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "request_data": '{"model":"m"}',
    }
    answered: dict[str, Value] = {**a, "gen_ai.response.id": "r1", "gen_ai.output.messages": "[]"}
    assert [] == read(span(1, a))
    assert ["pydantic_ai"] == [c.dialect for c in read(span(2, answered))]
    assert ["pydantic_ai"] == [c.dialect for c in read(span(3, a, status=2))]


def test_logfire_before_the_convention() -> None:
    """Older logfire keeps request and answer as JSON texts of its own."""
    a: dict[str, Value] = {"logfire.json_schema": "{}"}
    a["request_data"] = json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}], "temperature": 0.5})
    a["response_data"] = json.dumps({"message": {"role": "assistant", "content": "a"}, "usage": {}})
    (call,) = read(span(1, a))
    assert ([{"role": "user", "content": "q"}], {"role": "assistant", "content": "a"}, 0.5) == (
        call.messages,
        call.response,
        call.temperature,
    )


def test_sglang_request_span_is_the_engines() -> None:
    """SGLang's own span has counts and the id the client was sent, so it joins the client's call, and no ids."""
    a: dict[str, Value] = {"rid": "r1", "gen_ai.usage.prompt_tokens": 2, "gen_ai.usage.completion_tokens": 2}
    (call,) = read(span(1, {**a, "gen_ai.response.finish_reasons": '["stop"]'}))
    assert raw("sglang", ids=(None, None, None)) == told(call)
    assert ("engine", 2, 2) == (call.source, call.usage_prompt, call.usage_response)


def test_names_of_openjiuwen() -> None:
    """OpenJiuwen writes what ATIF's converters write, under a prefix of its own."""
    of = "openjiuwen.gen_ai.response."
    ids: dict[str, Value] = {f"{of}prompt_token_ids": "[1, 2]", f"{of}completion_token_ids": "[3, 4]"}
    a: dict[str, Value] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", **ids}
    (call,) = read(span(1, {**a, f"{of}logprobs": "[-0.5, -0.25]", "gen_ai.response.id": "r1"}))
    assert raw("atif", finish=None) == told(call)


@pytest.mark.parametrize(
    "attributes",
    [
        {"langsmith.span.kind": "chain", "gen_ai.operation.name": "chat"},
        {"mlflow.spanType": '"AGENT"', "mlflow.spanOutputs": json.dumps(ANSWER)},
        {"langfuse.observation.type": "tool", "langfuse.observation.output": json.dumps(ANSWER)},
        {"ai.operationId": "ai.streamText", "gen_ai.request.model": "m", "gen_ai.response.id": "r1"},
        {"ai.operationId": "ai.toolCall", "ai.toolCall.id": "c"},
        {"traceloop.span.kind": "workflow", "llm.request.type": "chat"},
        {"agentops.span.kind": "agent", "gen_ai.request.type": "chat", "gen_ai.request.model": "m"},
        {"logfire.span_type": "pending_span", "gen_ai.operation.name": "chat", "gen_ai.request.model": "m"},
    ],
    ids=lambda a: next(iter(a)),
)
def test_spans_around_calls_are_no_calls(attributes: dict[str, Value]) -> None:
    """Each dialect says itself what is an agent, chain or tool, or only announces a span; none of these is a call."""
    assert ([], False) == (read(span(1, attributes)), is_call(span(1, attributes)))


# ------------------------------------------------------------------ what no reader foresaw


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of LiteLLM's spans that fails against its promise."""

    def fail(_: Span) -> list[Call]:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(dialects.litellm, "read", fail)


@pytest.mark.usefixtures("failing")
def test_failing_reader_costs_its_span_alone() -> None:
    """The span that no reader foresaw is quarantined with the error; other calls keep their rows."""
    a: dict[str, Value] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.id": "r2"}
    bad = {**litellm(str).attributes, "spanmill.rollout.id": "r"}
    (rollout,) = adapt([span(1, bad), span(2, {**a, "spanmill.rollout.id": "r"}, start=50)]).rollouts
    (quarantined,) = rollout.quarantined
    assert ("unreadable_span", "reader litellm: RuntimeError('unforeseen')", f"{1:016x}") == (
        quarantined.reason,
        quarantined.detail,
        quarantined.span_id,
    )
    assert (2, ["r2"]) == (rollout.num_calls, [t.call_id for t in rollout.triplets])


@pytest.mark.usefixtures("failing")
def test_unreadable_client_does_not_hide_behind_the_engine() -> None:
    """Joined to the engine's span of its call, an unreadable client span leaves its error in the row's metadata."""
    client = span(1, {**litellm(str).attributes, "spanmill.rollout.id": "r"}, end=100)
    (rollout,) = adapt([client, call(2, [1, 2], [3], response_id="", capture="engine", parent=1, start=10)]).rollouts
    (row,) = rollout.triplets
    assert ({"unreadable_span": "reader litellm: RuntimeError('unforeseen')"}, True) == (
        json.loads(row.metadata),
        row.trainable,
    )

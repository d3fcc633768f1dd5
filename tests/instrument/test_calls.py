import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, format_span_id

from spanmill.instrument import call, counters, reward, rollout
from spanmill.instrument.packing import token_attributes

Spans = Callable[[], list[ReadableSpan]]
MESSAGES = [{"role": "user", "content": "2+2? é"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """A span's attributes."""
    return dict(span.attributes or {})


def chat_choice(index: int, ids: list[int], text: str) -> dict[str, Any]:
    """A choice of a chat completion as vLLM returns it."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"token": "t", "logprob": -0.5 * i} for i in ids]},
    }


CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "policy-7b",
    "prompt_token_ids": [5, 6],
    "choices": [chat_choice(0, [1, 2], "four"), chat_choice(1, [3], "4")],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3},
}


def as_object(value: Any) -> Any:
    """JSON as attribute access, as client libraries give it."""
    if isinstance(value, dict):
        return SimpleNamespace(**{k: as_object(v) for k, v in value.items()})  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [as_object(v) for v in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def test_a_call_is_recorded_whole(emitted: Spans) -> None:
    """Request, answer, tokens and counts stand on one client span; a float given as int is a float."""
    with call("m", messages=MESSAGES, tools=TOOLS, temperature=1, top_p=0.9, top_k=40, max_tokens=64) as c:
        c.record(
            prompt_token_ids=[5, 6],
            response_token_ids=[1, 2, 3],
            logprobs=[-0.5, 0.0, -2.0],
            finish_reason="stop",
            response="four",
            response_id="x1",
            policy_version=12,
            logprobs_mode="processed",
            model="m-lora",
        )
    (span,) = emitted()
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.input.messages": json.dumps(MESSAGES),
        "gen_ai.tool.definitions": json.dumps(TOOLS),
        "gen_ai.response.id": "x1",
        "gen_ai.response.model": "m-lora",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "content": "four"}]),
        "spanmill.capture": "client",
        "spanmill.choice.index": 0,
        "spanmill.policy.version": "12",
        "spanmill.logprobs.mode": "processed",
        **token_attributes([5, 6], [1, 2, 3], [-0.5, 0.0, -2.0]),
    } == attributes(span)
    assert ("chat m", SpanKind.CLIENT) == (span.name, span.kind)


def as_dict(value: Any) -> Any:
    """JSON as it is."""
    return value


@pytest.mark.parametrize("form", [as_dict, as_object])
def test_every_choice_of_a_chat_answer_is_a_span(form: Callable[[Any], Any], emitted: Spans) -> None:
    """A span per choice beside each other, each with the request, the prompt and its own answer."""
    with rollout("r"), call("policy-7b", messages=MESSAGES, n=2) as c:
        c.from_response(form(CHAT))
    _, first, second, end = emitted()
    tokens = [token_attributes([5, 6], [1, 2], [-0.5, -1.0]), token_attributes([5, 6], [3], [-1.5])]
    assert [(0, tokens[0]), (1, tokens[1])] == [
        (attributes(s)["spanmill.choice.index"], {k: attributes(s).get(k) for k in tokens[0]}) for s in (first, second)
    ]
    for span in (first, second):
        found = attributes(span)
        assert ("chatcmpl-1", 2, ("stop",), 2, 3, "r", json.dumps(MESSAGES)) == (
            found["gen_ai.response.id"],
            found["gen_ai.request.choice.count"],
            found["gen_ai.response.finish_reasons"],
            found["gen_ai.usage.input_tokens"],
            found["gen_ai.usage.output_tokens"],
            found["spanmill.rollout.id"],
            found["gen_ai.input.messages"],
        )
        assert end.context is not None and span.parent is not None
        assert (end.context.span_id, first.start_time) == (span.parent.span_id, span.start_time)


def test_a_completions_answer(emitted: Spans) -> None:
    """Prompt ids per choice, flat logprobs, text: recorded alike, as a text completion."""
    answer = {
        "id": "cmpl-1",
        "choices": [
            {
                "index": 0,
                "text": " four",
                "token_ids": [1, 2],
                "prompt_token_ids": [9],
                "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["a", "b"]},
                "finish_reason": "length",
                "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
            }
        ],
    }
    with call("m") as c:
        c.from_response(answer)
    (span,) = emitted()
    runs = [{"version": "3", "start": 0, "length": 1}, {"version": "4", "start": 1, "length": 1}]
    assert {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "content": " four"}]),
        "spanmill.capture": "client",
        "spanmill.choice.index": 0,
        "spanmill.policy.versions": json.dumps(runs),
        **token_attributes([9], [1, 2], [-0.5, -0.25]),
    } == attributes(span)


def test_an_answer_without_ids_invents_none(emitted: Spans) -> None:
    """What the engine did not return is not there: no ids, no logprobs, no counts."""
    with call("m") as c:
        c.from_response({"choices": [{"message": {"content": "hi"}, "logprobs": None}]})
    (span,) = emitted()
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.output.messages": '[{"content": "hi"}]',
        "spanmill.capture": "client",
        "spanmill.choice.index": 0,
    } == attributes(span)


def test_a_missing_logprob_leaves_out_all(emitted: Spans) -> None:
    """One null among the logprobs makes the list none; the ids stay."""
    with call("m") as c:
        c.record(response_token_ids=[1, 2], logprobs=[-0.5, None])  # pyright: ignore[reportArgumentType]
    (span,) = emitted()
    assert token_attributes(response_token_ids=[1, 2]).items() <= attributes(span).items()
    assert "spanmill.response.logprobs" not in attributes(span)


@pytest.mark.parametrize("answer", [None, "text", {}, {"choices": 3}, {"choices": [{"index": "x"}]}], ids=str)
def test_an_answer_that_is_none_raises_nothing(answer: Any, emitted: Spans) -> None:
    """Whatever is handed over, the agent goes on and the call stays as it was asked."""
    before = counters().ignored
    with call("m") as c:
        c.from_response(answer)
    asked = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "spanmill.capture": "client"}
    assert ([asked], before + 1) == ([attributes(s) for s in emitted()], counters().ignored)


def test_wrong_parameters_raise_nothing(emitted: Spans) -> None:
    """A parameter that is none (a client's own "not given", say) is left out; everything else is recorded."""
    wrong: Any = object()
    before = counters().ignored
    with call(wrong, temperature=wrong, top_p=0.5, max_tokens=wrong, n=wrong) as c:
        c.record(response_token_ids=[1], response_id=wrong, policy_versions=wrong, logprobs_mode="raw")
    (span,) = emitted()
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.top_p": 0.5,
        "spanmill.capture": "client",
        "spanmill.choice.index": 0,
        "spanmill.logprobs.mode": "raw",
        **token_attributes(response_token_ids=[1]),
    } == attributes(span)
    assert before + 6 == counters().ignored


def test_a_call_that_failed_says_how(emitted: Spans) -> None:
    """An exception before any answer is the call's error; the agent sees it."""
    with pytest.raises(TimeoutError), call("m"):
        raise TimeoutError("slow")
    (span,) = emitted()
    assert ("TimeoutError", "slow") == (attributes(span)["error.type"], span.status.description)


def test_a_later_exception_does_not_spoil_the_answer(emitted: Spans) -> None:
    """A parser that fails on a complete answer leaves it trainable: malformed outputs are what is to be learnt from."""
    with pytest.raises(ValueError), call("m") as c:
        c.record(response_token_ids=[1], finish_reason="stop")
        raise ValueError
    (span,) = emitted()
    assert (True, "error.type" in attributes(span)) == (span.status.is_unset, False)


def test_recording_outside_the_block_is_reported(emitted: Spans) -> None:
    """A call that has not begun or is over takes nothing, counts it and raises nothing."""
    before = counters().ignored
    c = call("m")
    c.record(response_token_ids=[1])
    with c:
        pass
    c.record(response_token_ids=[1])
    assert (before + 2, [0]) == (
        counters().ignored,
        [len([k for k in attributes(s) if k.endswith("token_ids")]) for s in emitted()],
    )


def test_call_ids_name_the_rows(emitted: Spans) -> None:
    """`call_id` is the response id, or without one the span's, with the choice behind it when it is not the first."""
    with call("m") as named:
        named.from_response(CHAT)
    with call("m") as unnamed:
        unnamed.record(response_token_ids=[1])
    span = emitted()[-1]
    assert span.context is not None
    assert ("chatcmpl-1", "chatcmpl-1#1", format_span_id(span.context.span_id), "") == (
        named.call_id(),
        named.call_id(1),
        unnamed.call_id(),
        unnamed.call_id(4),
    )


def test_a_reward_inside_a_call_is_that_calls(emitted: Spans) -> None:
    """A reward in the block stands under the call's span."""
    with rollout("r"), call("m"):
        reward(1)
    _, given, made, _ = emitted()
    assert given.parent is not None and made.context is not None
    assert ("spanmill.reward", made.context.span_id) == (given.name, given.parent.span_id)


def test_async_calls_at_once_keep_their_answers(emitted: Spans) -> None:
    """Twenty calls of one rollout at once: each span has its own tokens."""

    async def one(number: int) -> None:
        async with call(f"m{number}") as c:
            await asyncio.sleep(0.001)
            c.record(response_token_ids=[number], finish_reason="stop")

    async def main() -> None:
        async with rollout("r"):
            await asyncio.gather(*(one(number) for number in range(20)))

    asyncio.run(main())
    calls = {s.name: attributes(s) for s in emitted() if s.name.startswith("chat")}
    ids = "spanmill.response.token_ids"
    assert {f"chat m{i}": token_attributes(response_token_ids=[i])[ids] for i in range(20)} == {
        name: found[ids] for name, found in calls.items()
    }


def test_text_can_be_left_out(emitted: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPANMILL_CAPTURE_TEXT=0 records ids and parameters, and no text."""
    monkeypatch.setenv("SPANMILL_CAPTURE_TEXT", "0")
    with call("m", messages=MESSAGES, tools=TOOLS) as c:
        c.from_response(CHAT)
    texts = {"gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions"}
    assert [set(), set()] == [texts & set(attributes(s)) for s in emitted()]


def test_text_of_more_than_a_mebibyte_is_left_out_whole(emitted: Spans) -> None:
    """Cut JSON is no JSON: too long messages are not recorded, the rest is."""
    with call("m", messages=[{"role": "user", "content": "a" * 2**20}], tools=TOOLS):
        pass
    (span,) = emitted()
    assert (False, True) == ("gen_ai.input.messages" in attributes(span), "gen_ai.tool.definitions" in attributes(span))


def test_a_client_librarys_message_objects_are_read(emitted: Spans) -> None:
    """Objects with `model_dump` say themselves what was set in them."""

    class Message:
        def model_dump(self, *, mode: str, exclude_unset: bool) -> dict[str, Any]:
            assert (mode, exclude_unset) == ("json", True)
            return {"role": "assistant", "content": "hi"}

    with call("m", messages=[Message(), *MESSAGES]):
        pass
    assert [json.dumps([{"role": "assistant", "content": "hi"}, *MESSAGES])] == [
        attributes(s)["gen_ai.input.messages"] for s in emitted()
    ]

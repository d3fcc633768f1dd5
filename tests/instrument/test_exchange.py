"""Requests and answers that pass by: what is added, what is taken out, how chunks become an answer."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from stub_vllm import PROMPT, Stub, chunks, ids_of, logprobs_of

from spanmill.instrument.asking import CHAT, COMPLETIONS, MESSAGES, RESPONSES, missing, named_in, route_of, strip
from spanmill.instrument.chunks import Chunks
from spanmill.instrument.exchange import Exchange
from spanmill.instrument.replies import Reply, request_of
from spanmill.instrument.sse import Events

ASKED = {"return_token_ids": True, "logprobs": True}


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", CHAT),
        ("http://h/rollout/a/v1/chat/completions/", CHAT),
        ("/completions", COMPLETIONS),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
        ("/v1/messages/count_tokens", None),
        ("/v1/embeddings", None),
        ("", None),
    ],
)
def test_route_of(path: str, route: str | None) -> None:
    """The API is told by the end of the path; what generates nothing is none."""
    assert route == route_of(path)


@pytest.mark.parametrize(
    ("route", "body", "added"),
    [
        (CHAT, {}, {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}),
        (
            CHAT,
            {"logprobs": None, "top_logprobs": None},
            {"return_token_ids": True, "logprobs": True, "top_logprobs": 0},
        ),
        (CHAT, {"logprobs": False}, {"return_token_ids": True}),
        (CHAT, {"logprobs": True, "top_logprobs": 5}, {"return_token_ids": True}),
        (CHAT, {"logprobs": True, "return_token_ids": False}, {"top_logprobs": 0}),
        (COMPLETIONS, {}, {"return_token_ids": True, "logprobs": 0}),
        (COMPLETIONS, {"logprobs": 3}, {"return_token_ids": True}),
        (COMPLETIONS, {"echo": True}, {}),
        (
            RESPONSES,
            {},
            {"enable_response_messages": True, "include": ["message.output_text.logprobs"], "top_logprobs": 0},
        ),
        (
            RESPONSES,
            {"include": ["reasoning.encrypted_content"], "top_logprobs": 2},
            {
                "enable_response_messages": True,
                "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            },
        ),
        (RESPONSES, {"include": ["message.output_text.logprobs"], "enable_response_messages": False}, {}),
        (RESPONSES, {"background": True}, {}),
        (MESSAGES, {}, {}),
    ],
)
def test_missing(route: str, body: dict[str, Any], added: dict[str, Any]) -> None:
    """Only what the client left open is added; null leaves it open, false does not."""
    assert added == missing(route, body)


def test_strip() -> None:
    """What was added is null again, what the client asked for stays."""
    choice: dict[str, Any] = {"index": 0, "token_ids": [1], "logprobs": {"content": []}}
    answer: dict[str, Any] = {"choices": [dict(choice)], "prompt_token_ids": [2]}
    assert strip(answer, {"logprobs": True})
    assert {"choices": [{**choice, "logprobs": None}], "prompt_token_ids": [2]} == answer
    assert strip(answer, {"return_token_ids": True})
    assert {"choices": [{"index": 0, "token_ids": None, "logprobs": None}], "prompt_token_ids": None} == answer
    assert not strip(answer, {"return_token_ids": True, "logprobs": True})


def test_named_in() -> None:
    """A refusal counts if it names a field that was added."""
    assert {"return_token_ids"} == named_in("Unknown parameter: 'return_token_ids'", ASKED)
    assert set() == named_in("Unknown parameter: 'return_token_ids'", {"logprobs": True})
    assert {"include"} == named_in("logprobs are not supported with gpt-oss models", {"include": [], "top_logprobs": 0})


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_chunks_become_the_whole_answer(chat: bool, n: int) -> None:
    """Ids, logprobs and texts of each choice in order, prompt ids and usage once."""
    body = {"model": "m", "n": n, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    together = Chunks()
    for chunk in chunks(Stub(), {**body, "logprobs": True if chat else 0}, chat=chat):
        together.add(chunk)
    answer = together.answer()
    assert [ids_of(c) for c in range(n)] == [c["token_ids"] for c in answer["choices"]]
    if chat:
        told = [[entry["logprob"] for entry in c["logprobs"]["content"]] for c in answer["choices"]]
        assert (PROMPT, ["Hello world"] * n) == (
            answer["prompt_token_ids"],
            [c["message"]["content"] for c in answer["choices"]],
        )
    else:
        told = [c["logprobs"]["token_logprobs"] for c in answer["choices"]]
        assert [(PROMPT, "Hello world")] * n == [(c["prompt_token_ids"], c["text"]) for c in answer["choices"]]
    assert [logprobs_of(c) for c in range(n)] == told
    assert (["stop"] * n, 4 * n) == (
        [c["finish_reason"] for c in answer["choices"]],
        answer["usage"]["completion_tokens"],
    )


def test_tool_calls_and_reasoning_in_chunks() -> None:
    """Arguments come in pieces, calls by their index, reasoning beside the text."""
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"reasoning": "Let me "},
        {"reasoning": "look."},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    together = Chunks()
    for delta in deltas:
        together.add({"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    message = {"role": "assistant", "content": None, "reasoning": "Let me look.", "tool_calls": calls}
    assert {"id": "1", "choices": [{"index": 0, "message": message}]} == together.answer()


def test_a_chunk_without_its_logprobs_leaves_none() -> None:
    """A list with a hole is not a list."""
    together = Chunks()
    together.add({"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": [{"logprob": -1.0}]}}]})
    together.add({"choices": [{"index": 0, "token_ids": [2], "logprobs": None}]})
    assert [{"index": 0, "token_ids": [1, 2], "logprobs": None}] == together.answer()["choices"]


STREAM = (
    b'data: {"a": 1}\n\n: comment\n\nevent: x\r\ndata: {"b": 2}\r\n\r\ndata: drop\n\ndata: 1\ndata: 2\n\ndata: rest'
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_pass_however_they_are_cut(cuts: list[int]) -> None:
    """Edited, dropped or left alone, byte for byte, wherever the network cuts the stream."""

    def edit(data: bytes) -> bytes | None:
        seen.append(data)
        return None if data == b"drop" else b'{"B": 3}' if data == b'{"b": 2}' else data

    seen: list[bytes] = []
    events = Events(edit)
    borders = [0, *sorted(cuts), len(STREAM)]
    out = b"".join(events.feed(STREAM[a:b]) for a, b in pairwise(borders)) + events.close()
    assert STREAM.replace(b"data: drop\n\n", b"").replace(b'{"b": 2}', b'{"B": 3}') == out
    assert [b'{"a": 1}', b'{"b": 2}', b"drop", b"rest"] == seen


RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "model": "m",
    "status": "completed",
    "output": [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    ],
    "usage": {"input_tokens": 3, "output_tokens": 4},
}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "role": "assistant",
    "model": "m",
    "stop_reason": "tool_use",
    "content": [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "Hi"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
    ],
    "usage": {"input_tokens": 3, "output_tokens": 4},
}
MESSAGE_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None, "usage": {"input_tokens": 3}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "H"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "i"}},
    {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "c1", "name": "f"}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 4}},
    {"type": "message_stop"},
]


def _as_chat(answer_id: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "Hi", "reasoning": "hm", "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return {
        "id": answer_id,
        "model": "m",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
        "choices": [choice],
    }


def _streamed(route: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    reply = Reply(route)
    for event in events:
        reply.add(event)
    return reply.answer()


def test_responses_and_messages_in_the_words_of_chat() -> None:
    """Whole and streamed come to the same: id, text, reasoning, tool calls, usage, reason."""
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {**RESPONSE, "output": []}}, {"type": "x"}]
    assert _as_chat("resp_1") == Reply(RESPONSES).of(RESPONSE)
    assert _as_chat("resp_1") == _streamed(RESPONSES, [*events, {"type": "response.completed", "response": RESPONSE}])
    assert _as_chat("msg_1") == Reply(MESSAGES).of(MESSAGE)
    assert _as_chat("msg_1") == _streamed(MESSAGES, MESSAGE_EVENTS)
    assert ({}, {}) == (Reply(MESSAGES).of({"type": "error"}), Reply(RESPONSES).of({"error": {}}))


ENTRIES = [{"token": "H", "logprob": -1.0}, {"token": "i", "logprob": -2.0}]
RAW: dict[str, Any] = {
    **RESPONSE,
    "top_logprobs": 0,
    "input_messages": [{"type": "raw_message_tokens", "message": "x", "tokens": [1, 2, 3]}],
    "output_messages": [{"type": "raw_message_tokens", "message": "Hi", "tokens": [4, 5]}],
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "Hi", "logprobs": ENTRIES}]}],
}
"""What vLLM 0.32 gives to those who ask with `missing`."""


def test_ids_of_a_response() -> None:
    """Of its one prompt and answer; logprobs only if there is one for each token."""
    found = Reply(RESPONSES).of(RAW)
    (choice,) = found["choices"]
    assert ([1, 2, 3], [4, 5], {"content": ENTRIES}) == (
        found["prompt_token_ids"],
        choice["token_ids"],
        choice["logprobs"],
    )
    longer = {"type": "raw_message_tokens", "message": "Hi", "tokens": [4, 5, 6]}
    assert Reply(RESPONSES).of({**RAW, "output_messages": [longer]})["choices"][0]["logprobs"] is None
    turns = {**RAW, "output_messages": [longer, longer]}
    assert "token_ids" not in Reply(RESPONSES).of(turns)["choices"][0]


def test_strip_a_response() -> None:
    """Out of a whole answer and of every kind of event, but not what the client asked for."""
    added = missing(RESPONSES, {})
    part = {"type": "output_text", "text": "Hi", "logprobs": None}
    bare: dict[str, Any] = {
        **RAW,
        "top_logprobs": None,
        "input_messages": None,
        "output_messages": None,
        "output": [{"type": "message", "content": [part]}],
    }
    full = {**part, "logprobs": ENTRIES}
    events: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (RAW, bare),
        ({"type": "response.completed", "response": RAW}, {"type": "response.completed", "response": bare}),
        ({"type": "x", "item": {"content": [full]}}, {"type": "x", "item": {"content": [part]}}),
        ({"type": "x", "part": full}, {"type": "x", "part": part}),
        ({"type": "x", "delta": "Hi", "logprobs": ENTRIES}, {"type": "x", "delta": "Hi", "logprobs": []}),
    ]
    for event, expected in events:
        passed = json.loads(json.dumps(event))
        assert (True, expected) == (strip(passed, added), passed)
        assert not strip(passed, added)
    asked = missing(RESPONSES, {"include": ["message.output_text.logprobs"]})
    passed = json.loads(json.dumps(RAW))
    assert (True, {**RAW, "input_messages": None, "output_messages": None}) == (strip(passed, asked), passed)


def test_a_streamed_response_keeps_what_is_stripped() -> None:
    """The event that holds the answer is read before it goes on without its ids."""
    reply, event = Reply(RESPONSES), json.loads(json.dumps({"type": "response.completed", "response": RAW}))
    reply.add(event)
    assert strip(event, missing(RESPONSES, {}))
    assert Reply(RESPONSES).of(RAW) == reply.answer()


def test_a_response_that_was_cut_off() -> None:
    """`max_output_tokens` is a length limit; a stream without its end has no finish reason."""
    cut = {**RESPONSE, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    assert "length" == Reply(RESPONSES).of(cut)["choices"][0]["finish_reason"]
    assert _streamed(MESSAGES, MESSAGE_EVENTS[:6])["choices"][0]["finish_reason"] is None


def test_request_of() -> None:
    """What was asked, out of each API's body."""
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    asked = request_of(MESSAGES, {"model": "m", "max_tokens": 5, "system": "s", "messages": [], "tools": tools})
    function = {"name": "f", "parameters": {"type": "object"}}
    assert ("m", 5, [{"type": "function", "function": function}]) == (
        asked["model"],
        asked["max_tokens"],
        asked["tools"],
    )
    assert [{"role": "system", "parts": [{"type": "text", "content": "s"}]}] == asked["messages"]
    assert 7 == request_of(CHAT, {"max_completion_tokens": 7})["max_tokens"]
    assert "hi" in json.dumps(request_of(RESPONSES, {"input": "hi"})["messages"])


def test_a_chunk_that_says_null_is_the_servers_own(emitted: Callable[[], list[ReadableSpan]]) -> None:
    """Of chunks only those go that the server sends for our sake: a delta that says something, if null, is none."""
    exchange = Exchange(CHAT, {"model": "m", "messages": [], "stream": True})
    exchange.ask(set())
    choice = {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": [5]}
    said = exchange.event(json.dumps({"choices": [{**choice, "delta": {"content": None}}]}).encode())
    assert said is not None
    assert {"choices": [{**choice, "delta": {"content": None}, "token_ids": None}]} == json.loads(said)
    assert exchange.event(json.dumps({"choices": [{**choice, "delta": {}}]}).encode()) is None
    exchange.end()
    assert 1 == len(emitted())

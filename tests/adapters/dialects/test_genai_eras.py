import json

import numpy as np
import pytest
from agent_spans import span

from spanmill.adapters import adapt
from spanmill.adapters.dialects import read
from spanmill.triplets.records import Event, Span, Value

BASE: dict[str, Value] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.id": "r1"}
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+2?"}]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
}
PARTS_IN: list[Value] = [
    {"role": "system", "parts": [{"type": "text", "content": "Be short."}]},
    {"role": "user", "parts": [{"type": "text", "content": "1+2?"}]},
]
PARTS_OUT: list[Value] = [
    {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}],
        "finish_reason": "tool_call",
    }
]
TOOL_CALLS: list[Value] = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]
JSON_IN, JSON_OUT = json.dumps(PARTS_IN), json.dumps(PARTS_OUT)
OLD_OUT = json.dumps([{**CALLED, "finish_reason": "tool_calls"}])
CHOICE = json.dumps({"index": 0, "finish_reason": "tool_calls", "message": {"tool_calls": TOOL_CALLS}})


def event(name: str, **attributes: Value) -> Event:
    """A span event."""
    return Event(name, 1, attributes)


ERAS: dict[str, Span] = {
    "up to 1.27: one event each": span(
        1,
        BASE,
        events=(
            Event(
                "gen_ai.content.prompt",
                1,
                {"gen_ai.prompt": json.dumps(ASKED)},
            ),
            Event(
                "gen_ai.content.completion",
                2,
                {"gen_ai.completion": OLD_OUT},
            ),
        ),
    ),
    "1.28: an event per message, content in attributes": span(
        1,
        BASE,
        events=(
            event("gen_ai.system.message", content="Be short."),
            event("gen_ai.user.message", content="1+2?", role="user"),
            event(
                "gen_ai.choice",
                index=0,
                finish_reason="tool_calls",
                message=json.dumps(CALLED),
            ),
        ),
    ),
    "1.28: an event per message, content as one JSON text": span(
        1,
        BASE,
        events=(
            Event("gen_ai.system.message", 1, {"gen_ai.event.content": '{"content": "Be short."}'}),
            Event("gen_ai.user.message", 2, {"gen_ai.event.content": '{"content": "1+2?"}'}),
            Event(
                "gen_ai.choice",
                3,
                {"gen_ai.event.content": CHOICE},
            ),
        ),
    ),
    "1.28: log records, content in the body": span(
        1,
        BASE,
        events=(
            event("gen_ai.system.message", body={"content": "Be short."}),
            event("gen_ai.user.message", body={"content": "1+2?"}),
            event(
                "gen_ai.choice",
                body={"index": 0, "finish_reason": "tool_calls", "message": {"tool_calls": TOOL_CALLS}},
            ),
        ),
    ),
    "1.37: attributes as JSON text": span(
        1, {**BASE, "gen_ai.input.messages": JSON_IN, "gen_ai.output.messages": JSON_OUT}
    ),
    "1.37: structured attributes": span(
        1, {**BASE, "gen_ai.input.messages": PARTS_IN, "gen_ai.output.messages": PARTS_OUT}
    ),
    "1.37: the details event": span(
        1,
        BASE,
        events=(
            Event(
                "gen_ai.client.inference.operation.details",
                1,
                {"gen_ai.input.messages": PARTS_IN, "gen_ai.output.messages": PARTS_OUT, "body": None},
            ),
        ),
    ),
    "genai 0.1: system instructions apart": span(
        1,
        {
            **BASE,
            "gen_ai.system_instructions": [{"type": "text", "content": "Be short."}],
            "gen_ai.input.messages": PARTS_IN[1:],
            "gen_ai.output.messages": PARTS_OUT,
        },
    ),
}


@pytest.mark.parametrize("era", ERAS)
def test_every_era_gives_the_same_call(era: str) -> None:
    """Wherever an era of the convention puts messages, tool call and finish reason, the call is the same."""
    (call,) = read(ERAS[era])
    assert (ASKED, CALLED, "tool_calls", ("c1",), "genai") == (
        call.messages,
        call.response,
        call.finish_reason,
        call.tool_call_ids,
        call.dialect,
    )


def test_every_kind_of_part_in_openai_shape() -> None:
    """Text, images by reference and as data, reasoning, tool results; a part that OpenAI lacks stays as it is."""
    parts: list[Value] = [
        {"type": "text", "content": "see"},
        {"type": "uri", "modality": "image", "uri": "https://example.com/a.png"},
        {"type": "blob", "mime_type": "image/png", "modality": "image", "content": "AAAA"},
        {"type": "server_tool_call", "name": "search", "server_tool_call": {"q": "x"}},
    ]
    results: list[Value] = [{"type": "tool_call_response", "id": "c1", "response": {"sum": 3}}]
    said: list[Value] = [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "3"}]
    messages: list[Value] = [
        {"role": "user", "parts": parts},
        {"role": "tool", "parts": results},
    ]
    a = {**BASE, "gen_ai.input.messages": messages}
    a["gen_ai.output.messages"] = [{"role": "assistant", "parts": said}]
    (call,) = read(span(1, a))
    assert [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "server_tool_call", "name": "search", "server_tool_call": {"q": "x"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"sum":3}'},
    ] == call.messages
    assert {"role": "assistant", "content": "3", "reasoning_content": "hm"} == call.response


def test_uploaded_content_leaves_its_address() -> None:
    """Content that went to an object store is not in the span: its addresses stand in the metadata."""
    uploaded = {**BASE, "gen_ai.input.messages_ref": "s3://b/in.json", "gen_ai.output.messages_ref": "s3://b/out.json"}
    (call,) = read(span(1, uploaded))
    references = {"gen_ai.input.messages": "s3://b/in.json", "gen_ai.output.messages": "s3://b/out.json"}
    assert (None, None, {"references": references}) == (call.messages, call.response, call.metadata)


def test_cut_messages_are_a_flag_and_no_fault() -> None:
    """Messages that were cut on the way are left out and flagged; no ids stand in them, so nothing is quarantined."""
    (call,) = read(span(1, {**BASE, "gen_ai.input.messages": JSON_IN[:40], "gen_ai.output.messages": JSON_OUT}))
    assert (None, CALLED, frozenset({"truncated_attribute"}), ()) == (
        call.messages,
        call.response,
        call.flags,
        call.faults,
    )


def test_values_of_wrong_types_are_unknown() -> None:
    """A model that is a number, a temperature that is a list, a count that is an array: not recorded, and no error."""
    odd: dict[str, Value] = {**BASE, "gen_ai.request.model": 7, "gen_ai.request.temperature": [1]}
    odd |= {"gen_ai.usage.input_tokens": np.array([1, 2]), "gen_ai.response.id": {"a": 1}}
    (call,) = read(span(1, odd))
    assert (None, None, None, None) == (call.model, call.temperature, call.usage_prompt, call.response_id)


def test_message_that_is_json_itself_stays_text() -> None:
    """A user's message that happens to be JSON is that text, not what it spells."""
    asked = event("gen_ai.user.message", content='{"a": 1}')
    (call,) = read(span(1, BASE, events=(asked,)))
    assert [{"role": "user", "content": '{"a": 1}'}] == call.messages


@pytest.mark.parametrize("operation", ["invoke_agent", "execute_tool", "invoke_workflow", "embeddings", "agent_step"])
def test_steps_around_calls_are_no_calls(operation: str) -> None:
    """Agent, tool and workflow spans repeat messages and usage; they never become rows."""
    around = {**BASE, "gen_ai.operation.name": operation, "gen_ai.output.messages": JSON_OUT}
    (rollout,) = adapt([span(1, {**BASE, "spanmill.rollout.id": "r"}), span(2, around, parent=1)]).rollouts
    assert 1 == rollout.num_calls

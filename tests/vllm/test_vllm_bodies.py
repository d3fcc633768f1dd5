import json
from hashlib import sha256
from typing import Any

import pytest

from spanmill.adapters.shapes import conversation, tool_definitions
from spanmill.instrument.vllm.bodies import Asked, read_body


def _read(path: str, body: Any) -> Asked:
    return read_body(path, json.dumps(body).encode())


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
WANTED = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]


def _without_spaces(messages: Any) -> Any:
    return json.loads(json.dumps(messages).replace('\\"a\\": 1', '\\"a\\":1'))


def test_responses_as_chat() -> None:
    """Instructions, messages, calls and their results come to the same messages as in chat."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]
    asked = _read("/v1/responses", {"model": "m", "instructions": "be brief", "input": items})
    assert ("m", _without_spaces(WANTED)) == (asked.model, _without_spaces(conversation(asked.messages)))


def test_anthropic_as_chat() -> None:
    """System text, tool use and tool results come to the same messages as in chat."""
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "7"}]}],
        },
    ]
    system = [{"type": "text", "text": "be brief"}]
    asked = _read(
        "/v1/messages", {"system": system, "messages": messages, "tools": [{"name": "look", "input_schema": {}}]}
    )
    assert _without_spaces(WANTED) == _without_spaces(conversation(asked.messages))
    assert [{"type": "function", "function": {"name": "look", "parameters": {}}}] == tool_definitions(asked.tools)


def test_chat_stays_as_it_is() -> None:
    """Chat messages and tools are recorded as the client wrote them."""
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert Asked(None, WANTED, tools) == _read("/v1/chat/completions", {"messages": WANTED, "tools": tools})


@pytest.mark.parametrize(("prompt", "text"), [("a", "a"), (["a"], "a"), (["a", "b"], None), ([1, 2], None)])
def test_completions(prompt: Any, text: str | None) -> None:
    """One prompt of text is a message; token ids and several prompts are none."""
    messages = conversation(_read("/v1/completions", {"prompt": prompt}).messages)
    assert (None if text is None else [{"role": "user", "content": text}]) == messages


def test_media() -> None:
    """Each image or sound has its kind and the hash of what the client sent."""
    url = "data:image/png;base64,AAAA"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "input_audio", "input_audio": {"data": "QQ"}}]
    asked = _read("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    hashes = [sha256(data.encode()).hexdigest() for data in (url, "QQ")]
    assert [{"kind": k, "sha256": h} for k, h in zip(("image", "audio"), hashes, strict=True)] == asked.media


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b'{"messages": 3, "tools": "x", "model": 5}'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_strange_bodies(path: str, body: bytes) -> None:
    """A body of any other shape raises nothing and names no model."""
    assert read_body(path, body).model is None

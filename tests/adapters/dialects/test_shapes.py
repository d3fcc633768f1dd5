from typing import Any

import pytest

from spanmill.adapters.shapes import answer, conversation

SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {
            "type": "ai",
            "content": [{"type": "tool_use", "id": "c"}],
            "tool_calls": [{"name": "f", "args": {}, "id": "c"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [("c", "f", "{}")]},
    ),
    (
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "assistant", "content": None, "tool_calls": [("c", "f", '{"a":1}')]},
    ),
    (
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ),
    (
        {"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a.png"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]},
    ),
    (
        {
            "role": "user",
            "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}],
        },
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
    ),
    (
        {
            "lc": 1,
            "id": ["langchain", "schema", "messages", "ToolMessage"],
            "kwargs": {"content": "3", "tool_call_id": "c"},
        },
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ),
]
NAMES = [
    "langchain",
    "anthropic-call",
    "anthropic-result",
    "responses-image",
    "anthropic-image",
    "langchain-serialised",
]


@pytest.mark.parametrize(("message", "wanted"), SHAPES, ids=NAMES)
def test_other_shapes_in_openai_shape(message: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Messages of other vendors come out as a chat completion would have them, arguments as text."""
    (made,) = conversation([message]) or [{}]
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in made.get("tool_calls", [])]
    assert wanted == ({**made, "tool_calls": calls} if calls else made)


def test_pieces_of_a_turn_become_one_message() -> None:
    """The Responses API keeps reasoning, text and calls of one turn apart; a chat has them in one message."""
    pieces: list[dict[str, Any]] = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [call]}
    assert turn == answer(pieces)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "q"}, *pieces]
    asked.append({"type": "function_call_output", "call_id": "c", "output": "3"})
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    assert [{"role": "user", "content": "q"}, turn, result] == conversation(asked)

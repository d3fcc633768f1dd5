"""The Responses and Messages APIs in the words of chat completions: what was asked, and what was answered."""

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from spanmill.instrument import sglang
from spanmill.instrument.asking import CHAT, RESPONSES
from spanmill.instrument.sglang import GENERATE
from spanmill.instrument.texts import plain

Object = dict[str, Any]

_MAX_TOKENS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")

_FINISHED: Final = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
"""Stop reasons of the Messages API in OpenAI's words; others stand as they are."""


def request_of(route: str, body: Mapping[str, Any]) -> Object:
    """What a request's body asks for, as the arguments of `spanmill.call`; None where it does not say."""
    found = {name: body.get(name) for name in ("model", "temperature", "top_p", "top_k", "n", "tools")}
    found["max_tokens"] = next((body[name] for name in _MAX_TOKENS if body.get(name) is not None), None)
    if route == CHAT:
        return {**found, "messages": body.get("messages")}
    if route == GENERATE:
        return sglang.request_of(body)
    from spanmill.instrument.vllm.bodies import read_body  # only who speaks the other APIs pays for it

    asked = read_body(f"/v1{route}", json.dumps(body, default=plain).encode())
    return {**found, "messages": asked.messages, "tools": asked.tools}


class Reply:
    """An answer of the Responses or the Messages API, whole or event by event."""

    def __init__(self, route: str) -> None:
        self._route = route
        self._found: Object = {}
        self._whole: Object = {}
        self._blocks: dict[int, Object] = {}

    def of(self, answer: Object) -> Object:
        """A whole answer as chat completions would give it; without choices if it is none."""
        return _from_response(answer) if self._route == RESPONSES else _from_message(answer)

    def add(self, event: Object) -> None:
        """Add the next event of a streamed answer."""
        kind = str(event.get("type"))
        if self._route == RESPONSES:
            if isinstance(event.get("response"), dict):
                self._found = _from_response(event["response"])  # at once: it is about to be stripped
        elif kind == "message_start":
            self._whole = dict(event.get("message") or {})
        elif kind == "content_block_start":
            self._blocks[int(event["index"])] = dict(event["content_block"])
        elif kind == "content_block_delta":
            _add_delta(self._blocks.setdefault(int(event["index"]), {}), event["delta"])
        elif kind == "message_delta":
            delta = cast("Object", event.get("delta") or {})
            self._whole |= {name: value for name, value in delta.items() if value is not None}
            self._whole["usage"] = {**(self._whole.get("usage") or {}), **(event.get("usage") or {})}

    def answer(self) -> Object:
        """The answer as far as it came, as chat completions would give it."""
        if self._route == RESPONSES:
            return self._found
        return _from_message({**self._whole, "content": [self._blocks[at] for at in sorted(self._blocks)]})


def _add_delta(block: Object, delta: Object) -> None:
    for name in ("text", "thinking", "partial_json"):
        if isinstance(delta.get(name), str):
            block[name] = block.get(name, "") + delta[name]


def _from_response(answer: Object) -> Object:
    if not isinstance(answer.get("output"), list):
        return {}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    for item in cast("list[Object]", answer["output"]):
        content = cast("list[Object]", item.get("content") or [])
        match item.get("type"):
            case "message":
                texts += [str(part.get("text") or part.get("refusal") or "") for part in content]
            case "reasoning":
                thoughts += [str(part.get("text")) for part in content]
            case "function_call":
                calls.append(_tool_call(item.get("call_id"), item.get("name"), item.get("arguments")))
            case _:
                pass  # calls of the server's own tools are no answer of the model to its client
    details = cast("Object", answer.get("incomplete_details") or {})
    reason = {"completed": "tool_calls" if calls else "stop"}.get(str(answer.get("status")))
    if details.get("reason"):
        reason = "length" if details["reason"] == "max_output_tokens" else str(details["reason"])
    found = _answer(answer, _assistant(texts, thoughts, calls), reason)
    prompt, sampled = _tokens(answer.get("input_messages")), _tokens(answer.get("output_messages"))
    if prompt is not None and sampled is not None:
        found["prompt_token_ids"] = prompt
        found["choices"][0] |= {"token_ids": sampled, "logprobs": _logprobs(answer, len(sampled))}
    return found


def _tokens(messages: Any) -> list[int] | None:
    """The ids of the one raw message that vLLM gives for a prompt or an answer; several are turns of its own tools."""
    held = cast("list[Object]", messages) if isinstance(messages, list) else []
    found = held[0].get("tokens") if len(held) == 1 else None
    return cast("list[int]", found) if isinstance(found, list) else None


def _logprobs(answer: Object, tokens: int) -> Object | None:
    """Those of the answer's text, if it has one for each token: what was no text, such as a tool call, has none."""
    items = cast("list[Object]", answer["output"])
    parts = [part for item in items for part in cast("list[Object]", item.get("content") or [])]
    entries = [entry for part in parts for entry in cast("list[Object]", part.get("logprobs") or [])]
    return {"content": entries} if len(entries) == tokens else None


def _from_message(answer: Object) -> Object:
    if answer.get("role") != "assistant":
        return {}
    blocks = cast("list[Object]", answer.get("content") or [])
    texts = [str(block.get("text")) for block in blocks if block.get("type") == "text"]
    thoughts = [str(block.get("thinking")) for block in blocks if block.get("type") == "thinking"]
    calls = [
        _tool_call(b.get("id"), b.get("name"), b.get("partial_json") or json.dumps(b.get("input")))
        for b in blocks
        if b.get("type") == "tool_use"
    ]
    reason = cast("str | None", answer.get("stop_reason"))
    return _answer(answer, _assistant(texts, thoughts, calls), _FINISHED.get(reason or "", reason))


def _tool_call(call_id: Any, name: Any, arguments: Any) -> Object:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _assistant(texts: list[str], thoughts: list[str], calls: list[Object]) -> Object:
    message: Object = {"role": "assistant", "content": "".join(texts) if texts else None}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _answer(answer: Object, message: Object, reason: str | None) -> Object:
    usage = cast("Object", answer.get("usage") or {})
    return {
        "id": answer.get("id"),
        "model": answer.get("model"),
        "usage": {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")},
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }

"""A streamed answer put together again: chunks of chat and completions into what the whole answer would be."""

from typing import Any, cast

Object = dict[str, Any]


class Chunks:
    """The chunks of one answer so far."""

    def __init__(self) -> None:
        self._whole: Object = {}
        self._choices: dict[int, Object] = {}

    def add(self, chunk: Object) -> None:
        """Add the next chunk; what comes twice (usage, prompt ids of each choice) is taken once."""
        if isinstance(chunk.get("sglext"), dict):
            self._whole["sglext"] = {**chunk["sglext"]}  # of the chunk's own it may be taken out again
        for name in ("id", "model", "usage", "prompt_token_ids"):
            if chunk.get(name) is not None and (name == "usage" or name not in self._whole):
                self._whole[name] = chunk[name]
        for delta in cast("list[Object]", chunk.get("choices") or []):
            at = int(delta.get("index") or 0)
            _add_choice(self._choices.setdefault(at, {"index": at}), delta)

    def answer(self) -> Object:
        """The answer as far as it came; a choice that was cut off has no `finish_reason`."""
        return {**self._whole, "choices": [_closed(self._choices[at]) for at in sorted(self._choices)]}


def _add_choice(choice: Object, delta: Object) -> None:
    for name in ("finish_reason", "weight_versions"):
        if delta.get(name) is not None:
            choice[name] = delta[name]
    if delta.get("prompt_token_ids") is not None:
        choice.setdefault("prompt_token_ids", delta["prompt_token_ids"])
    if delta.get("token_ids") is not None:
        choice.setdefault("token_ids", []).extend(delta["token_ids"])
    if delta.get("logprobs") is not None:
        into = choice.setdefault("logprobs", {})
        for name in ("content", "token_logprobs"):
            if (more := delta["logprobs"].get(name)) is not None:
                into.setdefault(name, []).extend(more)
    elif delta.get("token_ids"):
        choice["hole"] = True  # tokens without logprobs: a list with a hole is not a list
    if (text := delta.get("text")) is not None:
        choice["text"] = choice.get("text", "") + text
    if (message := delta.get("delta")) is not None:
        _add_message(choice.setdefault("message", {"role": "assistant"}), message)


def _add_message(message: Object, delta: Object) -> None:
    for name, value in delta.items():
        if value is None:
            message.setdefault(name, None)
        elif name == "tool_calls":
            calls: dict[int, Object] = message.setdefault(name, {})
            for position, call in enumerate(cast("list[Object]", value)):
                _add_tool_call(calls.setdefault(int(call.get("index", position)), {}), call)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        else:
            message[name] = value


def _add_tool_call(call: Object, delta: Object) -> None:
    for name in ("id", "type"):
        if delta.get(name):
            call[name] = delta[name]
    function = cast("Object", delta.get("function") or {})
    into = call.setdefault("function", {"name": "", "arguments": ""})
    for name in ("name", "arguments"):
        into[name] += function.get(name) or ""


def _closed(choice: Object) -> Object:
    closed = {name: value for name, value in choice.items() if name != "hole"}
    if choice.get("hole"):
        closed["logprobs"] = None
    message = cast("Object | None", closed.get("message"))
    if message is not None and isinstance(message.get("tool_calls"), dict):
        calls = cast("dict[int, Object]", message["tool_calls"])
        closed["message"] = {**message, "tool_calls": [calls[at] for at in sorted(calls)]}
    return closed

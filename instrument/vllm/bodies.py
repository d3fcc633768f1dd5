"""What was asked, out of a request's body: messages and tools of each of vLLM's APIs, kinds and hashes of its media.

Chat messages stay as the client wrote them. The others become messages of the GenAI convention (`role`, `parts`).
"""

import json
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, Final, NamedTuple, cast

from spanmill.instrument.reports import report

Json = Any
Object = dict[str, Json]


class Asked(NamedTuple):
    """What a body holds; None where it does not say."""

    model: str | None = None
    messages: Json = None
    tools: Json = None
    media: list[dict[str, str]] | None = None
    """Kind and SHA-256 of each image, sound or video in the messages, in order."""


def read_body(path: str, body: bytes) -> Asked:
    """What the body of a request to this route asks for. A body that is no JSON object asks for nothing."""
    if not body:
        return Asked()
    try:
        content = json.loads(body)
    except ValueError as error:
        report("body", f"a request body that vLLM took is no JSON: {error}; its messages are not recorded")
        return Asked()
    if not isinstance(content, dict) or path not in READERS:
        return Asked()
    whole = cast("Object", content)
    messages = READERS[path](whole)
    model = whole.get("model")
    return Asked(
        model=model if isinstance(model, str) and model else None,
        messages=messages,
        tools=_anthropic_tools(whole) if path == "/v1/messages" else whole.get("tools"),
        media=[{"kind": kind, "sha256": _digest(data)} for kind, data in _media(whole)] or None,
    )


def _object(value: Json) -> Object:
    return cast("Object", value) if isinstance(value, dict) else {}


def _objects(value: Json) -> list[Object]:
    return (
        [cast("Object", v) for v in cast("list[Json]", value) if isinstance(v, dict)] if isinstance(value, list) else []
    )


def _text(content: Json) -> Object:
    return {"type": "text", "content": content}


def _message(role: Json, parts: list[Object]) -> Object:
    return {"role": role, "parts": parts}


def _chat(body: Object) -> Json:
    return body.get("messages")


def _completion(body: Object) -> Json:
    """A prompt that is text; token ids stand on the span anyway, and several prompts are no conversation."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(cast("list[Json]", prompt)) == 1:
        prompt = cast("list[Json]", prompt)[0]
    return [_message("user", [_text(prompt)])] if isinstance(prompt, str) else None


def _responses(body: Object) -> Json:
    """`instructions` and `input` of the Responses API."""
    given = body.get("input")
    instructions = body.get("instructions")
    messages = [_message("system", [_text(instructions)])] if isinstance(instructions, str) and instructions else []
    if isinstance(given, str):
        return [*messages, _message("user", [_text(given)])]
    return messages + [_response_item(item) for item in _objects(given)] or None


def _response_item(item: Object) -> Object:
    match item.get("type", "message"):
        case "message":
            return _message(item.get("role"), _parts(item.get("content"), _response_part))
        case "function_call":
            call = {"type": "tool_call", "id": item.get("call_id"), "name": item.get("name")}
            return _message("assistant", [{**call, "arguments": item.get("arguments")}])
        case "function_call_output":
            result = {"type": "tool_call_response", "id": item.get("call_id"), "response": item.get("output")}
            return _message("tool", [result])
        case "reasoning":
            thoughts = _objects(item.get("content")) or _objects(item.get("summary"))
            return _message("assistant", [{"type": "reasoning", "content": t.get("text")} for t in thoughts])
        case _:
            return _message("assistant", [item])


def _response_part(part: Object) -> Object:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return _text(part.get("text"))
        case "input_image":
            return {"type": "uri", "modality": "image", "uri": part.get("image_url")}
        case _:
            return part


def _parts(content: Json, read: Callable[[Object], Object]) -> list[Object]:
    return [_text(content)] if isinstance(content, str) else [read(part) for part in _objects(content)]


def _anthropic(body: Object) -> Json:
    """`system` and `messages` of the Messages API."""
    system = _parts(body.get("system"), _block) if body.get("system") else []
    first = [_message("system", system)] if system else []
    rest = [_message(m.get("role"), _parts(m.get("content"), _block)) for m in _objects(body.get("messages"))]
    return first + rest or None


def _block(block: Object) -> Object:
    match block.get("type"):
        case "text":
            return _text(block.get("text"))
        case "thinking":
            return {"type": "reasoning", "content": block.get("thinking")}
        case "tool_use":
            call = {"type": "tool_call", "id": block.get("id"), "name": block.get("name")}
            return {**call, "arguments": block.get("input")}
        case "tool_result":
            return {"type": "tool_call_response", "id": block.get("tool_use_id"), "response": _result(block)}
        case "image":
            source = _object(block.get("source"))
            if source.get("type") == "base64":
                kind = {"type": "blob", "modality": "image", "mime_type": source.get("media_type")}
                return {**kind, "content": source.get("data")}
            return {"type": "uri", "modality": "image", "uri": source.get("url")}
        case _:
            return block


def _result(block: Object) -> Json:
    """A tool's result: its text if it is nothing else."""
    content: Json = block.get("content")
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in _objects(content) if part.get("type") == "text"]
    return "\n".join(map(str, texts)) if len(texts) == len(cast("list[Json]", content)) else block["content"]


def _anthropic_tools(body: Object) -> Json:
    tools = _objects(body.get("tools"))
    return [_anthropic_tool(tool) for tool in tools] or None


def _anthropic_tool(tool: Object) -> Object:
    if "input_schema" not in tool:
        return tool
    about = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": {key: value for key, value in about.items() if value is not None}}


READERS: Final[dict[str, Callable[[Object], Json]]] = {
    "/v1/chat/completions": _chat,
    "/v1/chat/completions/batch": lambda _: None,  # several conversations: which is whose stands in no body
    "/v1/completions": _completion,
    "/v1/responses": _responses,
    "/v1/messages": _anthropic,
}

MEDIA: Final = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
}
"""Types of content parts in vLLM's APIs that hold media, and their kinds."""


def _media(body: Object) -> Iterable[tuple[str, Json]]:
    """(kind, what it holds) of every media part of the messages."""
    for message in _objects(body.get("messages")) + _objects(body.get("input")):
        for part in _objects(message.get("content")):
            if (kind := MEDIA.get(str(part.get("type")))) is not None:
                yield kind, part.get("source", part.get(str(part["type"]), part.get("image_url")))


def _digest(data: Json) -> str:
    """Of the URL or the data as the client sent it."""
    inside = _object(data)
    inner = inside.get("url") or inside.get("data") or data
    text = inner if isinstance(inner, str) else json.dumps(inner, sort_keys=True)
    return sha256(text.encode("utf-8", "replace")).hexdigest()

"""Other conventions in OpenAI chat shape: GenAI parts, Responses items, content blocks, LangChain messages."""

from collections.abc import Callable, Mapping
from typing import Final, cast

from spanmill.adapters.messages import as_list, as_object, as_objects, tool_call
from spanmill.adapters.values import dump_json, text
from spanmill.triplets.records import Json

OPENAI_PARTS: Final = frozenset(
    {"text", "image_url", "input_audio", "file", "refusal", "audio_url", "video_url", "image_embeds"}
)
"""Content parts that chat completions have themselves."""
LANGCHAIN_ROLES: Final = {
    "human": "user",
    "humanmessage": "user",
    "humanmessagechunk": "user",
    "ai": "assistant",
    "aimessage": "assistant",
    "aimessagechunk": "assistant",
    "system": "system",
    "systemmessage": "system",
    "tool": "tool",
    "toolmessage": "tool",
    "function": "tool",
    "functionmessage": "tool",
    "chat": "user",
    "chatmessage": "user",
    "developer": "developer",
}
"""What LangChain calls the roles, as `type` or as the class of a serialised message."""


def conversation(messages: Json, instructions: Json = None) -> list[dict[str, Json]] | None:
    """Messages of any shape as OpenAI messages, system instructions first; None if none were recorded.

    A text alone is a user's message. Consecutive pieces of one assistant's turn that another convention keeps apart
    (Responses: reasoning, message, function call) become one message.
    """
    out: list[dict[str, Json]] = []
    if instructions:
        parts = as_list(instructions) or [{"type": "text", "content": instructions}]
        out += chat_messages({"role": "system", "parts": parts})
    if isinstance(messages, str):
        messages = [messages]
    if isinstance(messages, dict):
        messages = [messages]
    open_turn = False
    for message in as_list(messages):
        made = chat_messages(message)
        piece = _is_piece(message)
        if piece and open_turn and made and out:
            _extend(out[-1], made[0])
        else:
            out += made
        open_turn = piece
    return out or None


def answer(message: Json) -> dict[str, Json] | None:
    """What the model said, of any shape, as one assistant message; None if nothing was recorded."""
    if message is None or message == "" or message == []:
        return None
    if isinstance(message, str):
        return {"role": "assistant", "content": message}
    made = conversation(message)
    if made is None:
        return None
    whole = dict(made[0])
    for more in made[1:]:
        _extend(whole, more)
    whole["role"] = text(whole.get("role")) or "assistant"
    whole.pop("finish_reason", None)
    return whole if len(whole) > 2 or whole.get("content") not in (None, "") else None


def chat_messages(message: Json) -> list[dict[str, Json]]:
    """One message of any shape as OpenAI messages: tool results become messages of their own."""
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    if not isinstance(message, dict):
        return []
    found = cast("dict[str, Json]", message)
    if isinstance(found.get("parts"), list):
        return _from_blocks(found, found["parts"])
    if "kwargs" in found and isinstance(found.get("id"), list):
        return _from_langchain(found)
    if "role" not in found and isinstance(found.get("type"), str):
        return _from_item(found)
    content = found.get("content")
    if isinstance(content, list) and any(_is_foreign(p) for p in as_list(content)):
        return _from_blocks(found, content)
    kept = {k: v for k, v in found.items() if v is not None}
    return [{"role": found.get("role"), "content": found.get("content"), **kept}]


def tool_definitions(tools: Json) -> Json:
    """Tool definitions in OpenAI shape: flat functions are nested, anything else comes back as it is."""
    if not isinstance(tools, list):
        return tools
    return [_function(t) for t in as_list(tools)] or None


def _function(tool: Json) -> Json:
    flat = as_object(tool)
    if flat.get("type", "function") != "function" or "function" in flat or "name" not in flat:
        return tool
    made = {k: v for k, v in flat.items() if k != "type" and v is not None}
    for name in ("inputSchema", "input_schema"):
        if name in made:
            made["parameters"] = made.pop(name)
    return {"type": "function", "function": made}


def _is_foreign(part: Json) -> bool:
    kind = as_object(part).get("type")
    return (
        isinstance(part, str) or not isinstance(kind, str) or kind not in OPENAI_PARTS or "content" in as_object(part)
    )


# ------------------------------------------------------------------ content blocks


def _from_blocks(message: Mapping[str, Json], blocks: Json) -> list[dict[str, Json]]:
    """A message whose content is a list of typed blocks: text, reasoning, tool calls, tool results, media."""
    made = _Blocks()
    for block in as_list(blocks):
        if isinstance(block, str):
            made.content.append({"type": "text", "text": block})
        elif isinstance(block, dict):
            part = cast("dict[str, Json]", block)
            _BLOCKS.get(str(part.get("type")), _other)(made, part)
    made.calls += [_call(c) for c in as_objects(message.get("tool_calls"))]
    kept = ("name", "tool_call_id", "reasoning_content", "reasoning")
    return made.messages(message.get("role"), {k: message[k] for k in kept if message.get(k)})


class _Blocks:
    """What the blocks of one message hold."""

    def __init__(self) -> None:
        self.content: list[dict[str, Json]] = []
        self.calls: list[dict[str, Json]] = []
        self.reasoning: list[str] = []
        self.results: list[dict[str, Json]] = []

    def messages(self, role: Json, kept: Mapping[str, Json]) -> list[dict[str, Json]]:
        """OpenAI messages: the message itself unless it was tool results alone, then those."""
        if self.results and not (self.content or self.calls or self.reasoning):
            return self.results
        only_text = [c["text"] for c in self.content if c.get("type") == "text" and len(c) == 2]
        plain = only_text[0] if len(self.content) == len(only_text) == 1 else self.content or None
        made: dict[str, Json] = {"role": role, "content": plain, **kept}
        if self.reasoning:
            made["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            made["tool_calls"] = self.calls
        return [made, *self.results]


def _text(made: _Blocks, part: dict[str, Json]) -> None:
    said = part.get("text", part.get("content"))
    made.content.append({"type": "text", "text": said})


def _reasoning(made: _Blocks, part: dict[str, Json]) -> None:
    said = next((part[k] for k in ("content", "text", "thinking", "reasoning", "summary") if part.get(k)), "")
    if isinstance(said, list):
        said = "".join(text(s.get("text")) or "" for s in as_objects(said))
    if said:
        made.reasoning.append(said if isinstance(said, str) else dump_json(said))


def _tool_call(made: _Blocks, part: dict[str, Json]) -> None:
    made.calls.append(_call(part))


def _call(part: Mapping[str, Json]) -> dict[str, Json]:
    """A tool call of any convention: id, name and arguments under their many names."""
    function = as_object(part.get("function"))
    names = ("arguments", "args", "input", "partial_json")
    arguments = (
        function.get("arguments") if function else next((part[k] for k in names if part.get(k) is not None), None)
    )
    call_id = next((part[k] for k in ("call_id", "toolCallId", "id", "tool_call_id") if part.get(k)), None)
    return tool_call(call_id, function.get("name") or part.get("name") or part.get("toolName"), arguments)


def _tool_result(made: _Blocks, part: dict[str, Json]) -> None:
    said = next((part[k] for k in ("response", "result", "output", "content") if part.get(k) is not None), None)
    whole = as_object(said)
    if whole.keys() == {"type", "value"} and whole["type"] in ("text", "json", "error-text", "error-json"):
        said = whole["value"]
    blocks = as_objects(said)
    if blocks and all(b.get("type") in ("text", "output_text", "input_text") for b in blocks):
        said = "".join(text(b.get("text")) or "" for b in blocks)
    call_id = next(
        (part[k] for k in ("call_id", "toolCallId", "tool_use_id", "tool_call_id", "id") if part.get(k)), None
    )
    content = said if isinstance(said, str) else dump_json(said)
    made.results.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _image(made: _Blocks, part: dict[str, Json]) -> None:
    url = _image_url(part)
    made.content.append({"type": "image_url", "image_url": {"url": url}} if url is not None else part)


def _image_url(part: Mapping[str, Json]) -> str | None:
    """The reference, or the payload as a data URL; None where the block says neither in a known way."""
    source = as_object(part.get("source"))
    inner = part.get("image_url", part.get("image", part.get("url", source.get("url"))))
    url = as_object(inner).get("url", inner)
    if isinstance(url, str) and (":" in url[:16] or url[:1] == "/"):
        return url
    mime = next((v for k in ("mime_type", "mimeType", "mediaType") if isinstance(v := part.get(k), str)), None)
    mime = mime or text(source.get("media_type")) or "image/png"
    data = source.get("data", part.get("data", url))
    return f"data:{mime};base64,{data}" if isinstance(data, str) and data else None


def _media(made: _Blocks, part: dict[str, Json]) -> None:
    """A GenAI part by reference or with its payload: an image in OpenAI's words, else the part as it was recorded."""
    mime = part.get("mime_type", part.get("mediaType", part.get("mimeType", "")))
    modality = part.get("modality") or str(mime).partition("/")[0]
    if modality == "image" and isinstance(part.get("uri"), str):
        part = {"type": "image_url", "image_url": {"url": part["uri"]}}
    elif modality == "image" and isinstance(payload := part.get("content", part.get("data")), str):
        part = {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{payload}"}}
    made.content.append(part)


def _other(made: _Blocks, part: dict[str, Json]) -> None:
    if "type" not in part and isinstance(part.get("text"), str):
        _text(made, part)
    else:
        made.content.append(part)


_BLOCKS: Final[dict[str, Callable[[_Blocks, dict[str, Json]], None]]] = {
    "text": _text,
    "input_text": _text,
    "output_text": _text,
    "reasoning": _reasoning,
    "thinking": _reasoning,
    "tool_call": _tool_call,
    "tool-call": _tool_call,
    "tool_use": _tool_call,
    "function_call": _tool_call,
    "tool_call_response": _tool_result,
    "tool-result": _tool_result,
    "tool_result": _tool_result,
    "image": _image,
    "input_image": _image,
    "uri": _media,
    "blob": _media,
    "file": _media,
}


# ------------------------------------------------------------------ Responses items


def _is_piece(message: Json) -> bool:
    """Whether this is a piece of an assistant's turn, as the Responses API keeps them apart."""
    item = as_object(message)
    kind = item.get("type")
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def _from_item(item: dict[str, Json]) -> list[dict[str, Json]]:
    """An item of the Responses API, or a LangChain message that names its role as its type."""
    kind = str(item["type"])
    made = _Blocks()
    if kind == "reasoning":
        if not item.get("content") and not item.get("summary"):
            return []
        _reasoning(made, item)
        return made.messages("assistant", {})
    if kind == "function_call":
        _tool_call(made, item)
        return made.messages("assistant", {})
    if kind in ("function_call_output", "tool-result", "tool_result"):
        _tool_result(made, item)
        return made.results
    if kind.lower() in LANGCHAIN_ROLES:
        return _from_langchain(item)
    if kind in _BLOCKS:
        _BLOCKS[kind](made, item)
        return made.messages("user", {})
    return [item]


def _extend(turn: dict[str, Json], piece: Mapping[str, Json]) -> None:
    """Add a later piece of the same turn."""
    if piece.get("content") is not None:
        before, more = turn.get("content"), piece["content"]
        if isinstance(before, str) and isinstance(more, str):
            turn["content"] = before + more
        else:
            turn["content"] = more if before in (None, "") else [*_as_parts(before), *_as_parts(more)]
    if piece.get("tool_calls"):
        turn["tool_calls"] = [*as_objects(turn.get("tool_calls")), *as_objects(piece["tool_calls"])]
    if isinstance(piece.get("reasoning_content"), str):
        turn["reasoning_content"] = (text(turn.get("reasoning_content")) or "") + piece["reasoning_content"]


def _as_parts(content: Json) -> list[Json]:
    return as_list(content) or [{"type": "text", "text": content}]


# ------------------------------------------------------------------ LangChain


def _from_langchain(message: dict[str, Json]) -> list[dict[str, Json]]:
    """A LangChain message: serialised (`id`, `kwargs`), or with its role as `type` and maybe its fields in `data`."""
    classes = message.get("id")
    named = as_list(classes)[-1] if as_list(classes) else message.get("type")
    fields = as_object(message.get("kwargs")) or as_object(message.get("data")) or message
    extra = as_object(fields.get("additional_kwargs"))
    role = LANGCHAIN_ROLES.get(str(named).lower(), str(named).lower())
    calls = as_objects(fields.get("tool_calls")) or as_objects(extra.get("tool_calls"))
    flat: dict[str, Json] = {"role": role, "content": fields.get("content")}
    for name in ("name", "tool_call_id"):
        if fields.get(name):
            flat[name] = fields[name]
    if extra.get("reasoning_content"):
        flat["reasoning_content"] = extra["reasoning_content"]
    content = flat["content"]
    if isinstance(content, list):
        blocks = [b for b in as_list(content) if not (calls and as_object(b).get("type") in _CALL_BLOCKS)]
        return _from_blocks({**flat, "tool_calls": cast("Json", calls)}, blocks)
    if calls:
        flat["tool_calls"] = [_call(c) for c in calls]
        flat["content"] = content or None
    return [flat]


_CALL_BLOCKS: Final = ("tool_use", "tool_call", "function_call")

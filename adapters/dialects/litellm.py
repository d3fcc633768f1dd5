"""LiteLLM: the provider's request and answer, key by key, as JSON texts or as Python literals."""

import ast
from collections.abc import Iterator
from typing import Final, cast

from spanmill import semconv as sc
from spanmill.adapters.dialects import genai
from spanmill.adapters.flattened import flat_answers, flat_prompt, flat_tools
from spanmill.adapters.messages import as_objects
from spanmill.adapters.raw import apply_parameters, is_answer, read_answer
from spanmill.adapters.shapes import conversation, tool_definitions
from spanmill.adapters.values import Fault, clean, identifier, parse_json, text
from spanmill.triplets.records import Attributes, Call, Json, Span, Value

PROVIDER: Final = "llm."
TOKEN_KEYS: Final = ("choices", "prompt_token_ids", "response_token_ids")
"""Keys of a provider's answer under which token data stands."""
ANSWER_KEYS: Final = (*TOKEN_KEYS, "id", "object", "model", "usage", "metadata")
REQUEST_KEYS: Final = (
    *("messages", "tools", "temperature", "top_p", "top_k"),
    *("max_tokens", "max_completion_tokens", "extra_body"),
)
REQUEST_TYPES: Final = frozenset({"completion", "acompletion", "text_completion", "atext_completion"})
OWN: Final = (sc.LITELLM_HIDDEN, sc.LITELLM_CALL_ID, "litellm.call_type")
"""Names that LiteLLM alone writes on the spans of a request."""
MAX_LITERAL: Final = 4 << 20
"""Characters of a Python literal that are parsed: parsing takes some 60 bytes a character."""
ANSWERS: Final = (sc.GEN_AI_OUTPUT_MESSAGES,)


def recognises(span: Span) -> bool:
    """A provider's answer with token data in it, or a completion beside LiteLLM's own names."""
    a = span.attributes
    if any(key in TOKEN_KEYS for _, key, _ in _provider(a)):
        return True
    if not any(name in a for name in OWN):
        return False
    operation = text(a.get(sc.GEN_AI_OPERATION)) or text(a.get(sc.LLM_REQUEST_TYPE))
    return operation in REQUEST_TYPES or operation in genai.OPERATIONS


def read(span: Span) -> list[Call]:
    """A Call per choice of the provider's answer, else what the convention and the flattened names say."""
    a = span.attributes
    found: dict[str, Json] = {}
    faults: list[Fault] = []
    for name, key, value in _provider(a):
        if key in ANSWER_KEYS or key in REQUEST_KEYS:
            found[key], fault = _value(value, name)
            if fault is not None and key in TOKEN_KEYS:
                faults.append(fault)
    content = genai.content_of(span)
    content.messages = content.messages or flat_prompt(a) or conversation(found.get("messages"))
    content.tools = content.tools or flat_tools(a, "llm.request.functions.") or tool_definitions(found.get("tools"))
    if not content.answers:
        for said, reason in flat_answers(a):
            content.answers.append(said)
            content.reasons.append(reason)
    _place_ids(found)
    calls = read_answer(span, "litellm", found) if is_answer(found) else genai.read_as(span, "litellm", content)
    for call in calls:
        apply_parameters(call, found)
        call.messages, call.tools = content.messages, content.tools
        call.response_id = _response_id(a) or (call.response_id if is_answer(found) else None)
        call.model = call.model or text(a.get(sc.GEN_AI_RESPONSE_MODEL)) or text(a.get(sc.GEN_AI_REQUEST_MODEL))
        call.faults += tuple(faults)
        call.metadata |= content.metadata
        if content.damaged:
            call.flags |= {"truncated_attribute"}
    return calls


def _response_id(attributes: Attributes) -> str | None:
    """The server's id. A request that failed has LiteLLM's own id of the call in its place."""
    response_id = identifier(attributes.get(sc.GEN_AI_RESPONSE_ID))
    return None if response_id == identifier(attributes.get(sc.LITELLM_CALL_ID)) else response_id


def _provider(attributes: Attributes) -> Iterator[tuple[str, str, Value]]:
    """(name, key, value) of `llm.PROVIDER.KEY` attributes."""
    for name, value in attributes.items():
        if name.startswith(PROVIDER) and name.count(".") == 2:
            yield name, name.rpartition(".")[2], value


def holds_answer(name: str) -> bool:
    """Whether an attribute of this name holds a provider's choices."""
    return name.startswith(PROVIDER) and name.endswith(".choices") and name.count(".") == 2


def _place_ids(found: dict[str, Json]) -> None:
    """Older vLLM, and a patched one, put a list of ids per choice beside the choices."""
    ids = found.get("response_token_ids")
    if not isinstance(ids, list) or not ids:
        return
    lists = cast("list[Json]", ids if isinstance(ids[0], list) else [ids])
    if "choices" not in found:
        found["choices"] = [{"index": i} for i in range(len(lists))]
    for choice, own in zip(as_objects(found["choices"]), lists, strict=False):
        choice.setdefault("token_ids", own)


def literal(raw: str) -> Json:
    """The value of a JSON text or of a Python literal. Raises ValueError if it is neither, or too long a literal."""
    try:
        return parse_json(raw)
    except ValueError:
        pass
    if len(raw) > MAX_LITERAL:
        raise ValueError(f"{len(raw)} characters of Python literal, at most {MAX_LITERAL} are read")
    try:
        return clean(cast("Json", _plain(ast.literal_eval(raw))))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as e:
        raise ValueError(f"neither JSON nor a Python literal ({e})") from e


def _plain(value: object) -> object:
    """Only what JSON has: a literal may hold tuples, sets, complex numbers and bytes."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in cast("dict[object, object]", value).items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in cast("list[object]", value)]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _value(value: Value, name: str) -> tuple[Json, Fault | None]:
    """A structured value, or text as what it spells; text that spells nothing stays text unless it begins a list."""
    if not isinstance(value, str):
        return clean(value), None
    if value[:1] not in ("[", "{"):
        return value or None, None
    try:
        return literal(value), None
    except ValueError as e:
        return None, ("truncated_attribute", f"{name}: {e}")

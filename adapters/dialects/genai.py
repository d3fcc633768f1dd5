"""OpenTelemetry GenAI semantic conventions: content on span attributes, as JSON text or structured."""

from typing import Final, cast

from spanmill import semconv as sc
from spanmill.adapters.messages import conversation, finish_word, tool_call_ids, tool_definitions
from spanmill.adapters.spans import recorded_agent
from spanmill.adapters.values import Fault, identifier, integer, number, strings, structured, text
from spanmill.triplets.records import Attributes, Call, Json, Span

OPERATIONS: Final = frozenset({"chat", "text_completion", "generate_content"})
LEFT_OVER: Final = (sc.GEN_AI_RESPONSE_ID, sc.GEN_AI_FINISH_REASONS, sc.GEN_AI_OUTPUT_MESSAGES)
"""By these a call is known whose older attributes were evicted."""


def recognises(span: Span) -> bool:
    """An inference operation, or what a span that lost its oldest attributes still shows of one."""
    a = span.attributes
    operation = a.get(sc.GEN_AI_OPERATION)
    if operation is not None:
        return operation in OPERATIONS
    return any(name in a for name in LEFT_OVER) and (sc.GEN_AI_RESPONSE_MODEL in a or sc.GEN_AI_REQUEST_MODEL in a)


def read(span: Span) -> list[Call]:
    """A Call per choice that the span tells of: by its finish reasons, output messages or asked-for count."""
    a = span.attributes
    outputs, _ = _structured(a, sc.GEN_AI_OUTPUT_MESSAGES)
    told = len(cast("list[Json]", outputs)) if isinstance(outputs, list) else 0
    choices = max(1, told, len(strings(a.get(sc.GEN_AI_FINISH_REASONS))), integer(a.get(sc.GEN_AI_CHOICE_COUNT)) or 1)
    return [common(span, "genai", choice, choices) for choice in range(choices)]


def common(span: Span, dialect: str, choice: int, choices: int | None = None) -> Call:
    """What the convention says of one choice.

    Without `choices` the span is about this choice alone, and so are its one finish reason and its one message.
    """
    a = span.attributes
    outputs, output_fault = _structured(a, sc.GEN_AI_OUTPUT_MESSAGES)
    inputs, input_fault = _structured(a, sc.GEN_AI_INPUT_MESSAGES)
    instructions, instruction_fault = _structured(a, sc.GEN_AI_SYSTEM_INSTRUCTIONS)
    tools, tool_fault = _structured(a, sc.GEN_AI_TOOL_DEFINITIONS)
    at = choice if choices is not None else 0
    output = _element(outputs, at)
    answers = conversation([output]) if output is not None else None
    answer = answers[0] if answers else None
    reasons = strings(a.get(sc.GEN_AI_FINISH_REASONS))
    reason = _element(reasons, at)
    if reason is None and isinstance(output, dict):
        reason = cast("dict[str, Json]", output).get("finish_reason")
    return Call(
        span=span,
        dialect=dialect,
        source="text",
        choice=choice,
        choices=choices or integer(a.get(sc.GEN_AI_CHOICE_COUNT)) or 1,
        response_id=identifier(a.get(sc.GEN_AI_RESPONSE_ID)),
        tool_call_ids=tool_call_ids(answer),
        model=text(a.get(sc.GEN_AI_RESPONSE_MODEL)) or text(a.get(sc.GEN_AI_REQUEST_MODEL)),
        usage_prompt=_first(a, sc.GEN_AI_INPUT_TOKENS, sc.GEN_AI_PROMPT_TOKENS),
        usage_response=_first(a, sc.GEN_AI_OUTPUT_TOKENS, sc.GEN_AI_COMPLETION_TOKENS),
        temperature=number(a.get(sc.GEN_AI_TEMPERATURE)),
        top_p=number(a.get(sc.GEN_AI_TOP_P)),
        top_k=integer(a.get(sc.GEN_AI_TOP_K), foreign=True),
        max_tokens=integer(a.get(sc.GEN_AI_MAX_TOKENS)),
        finish_reason=finish_word(reason),
        agent=recorded_agent(a),
        messages=conversation(inputs, instructions),
        response=answer,
        tools=tool_definitions(tools),
        # Text is not what is trained on: damage to it informs, while the ids are judged by their own counts.
        flags=frozenset(
            {"truncated_attribute"} if any((output_fault, input_fault, instruction_fault, tool_fault)) else ()
        ),
        metadata={"compacted": True} if a.get(sc.GEN_AI_COMPACTED) is True else {},
    )


def _element(values: Json, index: int) -> Json:
    if not isinstance(values, list):
        return None
    items = cast("list[Json]", values)
    return items[index] if index < len(items) else None


def _first(attributes: Attributes, *names: str) -> int | None:
    return next((n for name in names if (n := integer(attributes.get(name))) is not None), None)


def _structured(attributes: Attributes, name: str) -> tuple[Json, Fault | None]:
    value = attributes.get(name)
    if value is None:
        return None, None
    try:
        return structured(value), None
    except ValueError as e:
        return None, ("truncated_attribute", f"{name}: JSON that does not parse ({e})")

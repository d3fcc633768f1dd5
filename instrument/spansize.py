"""How many bytes a span or a log record takes on the wire, from above, without encoding it."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from opentelemetry.sdk.trace import ReadableSpan

SPAN_BYTES: Final = 160
"""Ids, times, kind, flags, status and counts of a span, with their tags."""

FIELD_BYTES: Final = 16
"""Tags and lengths around an attribute's key and value."""

NUMBER_BYTES: Final = 16
"""A number as an array element: at most ten bytes of varint, and the tags and lengths around it."""

_NUMBERS: Final = frozenset({int, float, bool, type(None)})


def text_size(text: str) -> int:
    """UTF-8 bytes of a string at most: exact for ASCII, at most twice its memory otherwise."""
    return len(text) if text.isascii() else 2 * sys.getsizeof(text)


def value_size(value: object) -> int:
    """Bytes of an attribute's value at most."""
    if isinstance(value, str):
        return FIELD_BYTES + text_size(value)
    if isinstance(value, bytes):
        return FIELD_BYTES + len(value)
    if type(value) in _NUMBERS:
        return NUMBER_BYTES
    if isinstance(value, Mapping):
        return FIELD_BYTES + attributes_size(cast("Mapping[str, object]", value))
    if isinstance(value, Sequence):
        items = cast("Sequence[object]", value)
        if set(map(type, items)) <= _NUMBERS:
            return FIELD_BYTES + NUMBER_BYTES * len(items)
        return FIELD_BYTES + sum(map(value_size, items))
    return NUMBER_BYTES


def attributes_size(attributes: Mapping[str, object] | None) -> int:
    """Bytes of attributes at most."""
    return sum(FIELD_BYTES + text_size(key) + value_size(value) for key, value in (attributes or {}).items())


def span_size(span: ReadableSpan) -> int:
    """Bytes of a span in an OTLP request at most, without its resource and scope."""
    size = SPAN_BYTES + text_size(span.name) + attributes_size(span.attributes)
    if span.status.description:
        size += text_size(span.status.description)
    for event in span.events:
        size += 2 * FIELD_BYTES + text_size(event.name) + attributes_size(event.attributes)
    for link in span.links:
        size += 4 * FIELD_BYTES + attributes_size(link.attributes)
    context = span.get_span_context()
    return size + (sum(len(k) + len(v) + 2 for k, v in context.trace_state.items()) if context else 0)


def log_size(record: Any) -> int:
    """Bytes of a log record (`ReadableLogRecord`) in an OTLP request at most, without its resource and scope."""
    held = record.log_record
    size = SPAN_BYTES + text_size(held.event_name or "") + text_size(held.severity_text or "")
    return size + value_size(held.body) + attributes_size(held.attributes)

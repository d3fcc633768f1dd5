"""A span or log record as OTLP/JSON: what quarantine keeps, and what `spanmill build` can read again."""

import base64
import json
import math

import numpy as np

from spanmill.triplets.records import Attributes, Json, Span, Value


def span_json(span: Span) -> str:
    """A whole export request with this one span (`resourceSpans`) or log record (`resourceLogs`), compact.

    As OTLP/JSON wants it: hex ids, 64-bit integers as strings, bytes as base64, NaN and Infinity as strings. Fields at
    their default are left out and attributes are sorted by name, so that the same span always gives the same text.
    """
    kind, scoped, records, record = ("Logs", "scopeLogs", "logRecords", _log) if span.is_log else _SPANS
    request = {
        f"resource{kind}": [
            {
                "resource": _present(attributes=_key_values(span.resource)),
                scoped: [{"scope": _present(name=span.scope), records: [record(span)]}],
            }
        ]
    }
    return json.dumps(request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _span(span: Span) -> dict[str, Json]:
    return _present(
        traceId=span.trace_id,
        spanId=span.span_id,
        parentSpanId=span.parent_id,
        flags=span.flags,
        name=span.name,
        kind=span.kind,
        startTimeUnixNano=_int64(span.start_ns),
        endTimeUnixNano=_int64(span.end_ns),
        attributes=_key_values(span.attributes),
        droppedAttributesCount=span.dropped_attributes,
        events=[
            _present(timeUnixNano=_int64(event.time_ns), name=event.name, attributes=_key_values(event.attributes))
            for event in span.events
        ],
        links=[
            _present(traceId=link.trace_id, spanId=link.span_id, attributes=_key_values(link.attributes))
            for link in span.links
        ],
        status=_present(message=span.status_message, code=span.status),
    )


def _log(span: Span) -> dict[str, Json]:
    """A log record's `parent_id` is the span it was written in."""
    return _present(
        timeUnixNano=_int64(span.start_ns),
        body=None if span.body is None else _any_value(span.body),
        attributes=_key_values(span.attributes),
        droppedAttributesCount=span.dropped_attributes,
        flags=span.flags,
        traceId=span.trace_id,
        spanId=span.parent_id,
        eventName=span.name,
    )


_SPANS = ("Spans", "scopeSpans", "spans", _span)


def _present(**fields: Json) -> dict[str, Json]:
    """The fields that are not at their default."""
    return {name: value for name, value in fields.items() if value}


def _int64(value: int) -> str | None:
    return str(value) if value else None


def _key_values(attributes: Attributes) -> list[Json]:
    return [{"key": key, "value": _any_value(value)} for key, value in sorted(attributes.items())]


def _any_value(value: Value) -> dict[str, Json]:
    match value:
        case None:
            return {}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": _double(value)}
        case str():
            return {"stringValue": value}
        case bytes():
            return {"bytesValue": base64.b64encode(value).decode()}
        case dict():
            return {"kvlistValue": _present(values=_key_values(value))}
        case list():
            return {"arrayValue": _present(values=[_any_value(element) for element in value])}
        case np.ndarray():
            return _any_value(value.tolist())


def _double(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

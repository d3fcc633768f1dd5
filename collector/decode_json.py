"""OTLP/JSON requests to spans: lowerCamelCase (or snake_case) keys, hex ids, 64-bit ints as text or numbers.

Unknown fields are skipped and null counts as absent, as in protobuf's JSON mapping. Enums may be numbers or names.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Container
from typing import Final, NamedTuple, cast

import numpy as np

from spanmill.collector.decoded import (
    SPAN_ID_BYTES,
    TRACE_ID_BYTES,
    Checked,
    Decoded,
    bad_span_id,
    event_name,
    undecodable,
)
from spanmill.collector.values import MAX_DEPTH, gather, lighten, narrowed
from spanmill.errors import DecodeError
from spanmill.triplets.records import Attributes, Event, Json, Link, Quarantined, Span, Value

_KINDS: Final = {
    f"SPAN_KIND_{name}": number
    for number, name in enumerate(("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"))
}
_STATUSES: Final = {"STATUS_CODE_UNSET": 0, "STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}
_DOUBLES: Final = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_INTEGER: Final = re.compile(r"-?[0-9]+")
_INTEGERS: Final = re.compile(r"-?[0-9]{1,19}(,-?[0-9]{1,19})*")
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_HEX: Final = re.compile("[0-9a-f]*")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_SNAKE: Final = re.compile("_([a-z])")


def decode_traces_json(
    body: bytes, received_ns: int = 0, *, only: Container[str] | None = None, arrays: bool = True
) -> Decoded:
    """The spans of an ExportTraceServiceRequest in JSON; parameters and errors as in `decode.decode_traces`."""
    return _decode(body, _TRACES, _span, received_ns, only, arrays)


def decode_logs_json(
    body: bytes, received_ns: int = 0, *, only: Container[str] | None = None, arrays: bool = True
) -> Decoded:
    """The log records of an ExportLogsServiceRequest in JSON, as spans; otherwise as `decode_traces_json`."""
    return _decode(body, _LOGS, _log_record, received_ns, only, arrays)


def check_traces_json(body: bytes) -> Checked:
    """How many spans the request has, and how many of them have no valid ids. Raises DecodeError."""
    items = [item for _, scopes in _groups(body, _TRACES) for _, items in scopes for item in items]
    return Checked(len(items), sum(not _has_ids(item) for item in items))


def check_logs_json(body: bytes) -> Checked:
    """How many log records the request has; none needs an id, so none is rejected. Raises DecodeError."""
    return Checked(sum(len(items) for _, scopes in _groups(body, _LOGS) for _, items in scopes), 0)


_Groups = list[tuple[Json, list[tuple[Json, list[Json]]]]]
"""By resource, then by scope: the resource with its scopes, a scope with its spans or log records."""


class _Names(NamedTuple):
    """What the levels of a request are called."""

    groups: str
    scopes: str
    items: str


_TRACES: Final = _Names("resourceSpans", "scopeSpans", "spans")
_LOGS: Final = _Names("resourceLogs", "scopeLogs", "logRecords")


def _groups(body: bytes, names: _Names) -> _Groups:
    try:
        request: Json = json.loads(body.decode("utf-8-sig", "replace"))
        if _ESCAPED_SURROGATE.search(body):
            request = _rewritten(request, _without_surrogates, _without_surrogates)
        if request is None:
            raise ValueError("a request is null, not an object")
        if names.groups not in _object(request, "a request"):
            # Names of attributes are no keys here, so they stay.
            request = _rewritten(request, _camel, _same)
        return [
            (
                _object(group.get("resource"), "resource"),
                [
                    (_object(scope.get("scope"), "scope"), _list(scope.get(names.items), names.items))
                    for scope in _objects(group.get(names.scopes), names.scopes)
                ],
            )
            for group in _objects(request.get(names.groups), names.groups)
        ]
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{len(body)} bytes are no OTLP/JSON request with {names.groups}: {error}") from error


def _decode(
    body: bytes,
    names: _Names,
    read: Callable[[Json, Attributes, str, bool, int], Span],
    received_ns: int,
    only: Container[str] | None,
    arrays: bool,
) -> Decoded:
    spans: list[Span] = []
    bad: list[Quarantined] = []
    count = 0
    for resource_json, scopes in _groups(body, names):
        resource: Attributes | None = None
        for scope, items in scopes:
            count += len(items)
            for item in items:
                if only is not None and _id(item, "traceId", TRACE_ID_BYTES) not in only:
                    continue
                try:
                    if resource is None:
                        resource = _attributes(resource_json.get("attributes"), arrays)
                    scope_name = _text(scope.get("name"))
                    span = read(_object(item, "a span or log record"), resource, scope_name, arrays, received_ns)
                except ValueError as error:
                    raw = {
                        names.groups: [
                            {"resource": resource_json, names.scopes: [{"scope": scope, names.items: [item]}]}
                        ]
                    }
                    try:
                        row = undecodable(_raw_id(item, "traceId"), _raw_id(item, "spanId"), error, raw, received_ns)
                    except RecursionError as deep:  # just shallow enough to be parsed
                        raise DecodeError("a span is nested too deep to be written again") from deep
                    bad.append(row)
                    continue
                if names is _LOGS or _has_ids(item):
                    spans.append(span)
                else:
                    bad.append(bad_span_id(span))
    return Decoded(spans, bad, count)


def _span(item: Json, resource: Attributes, scope: str, arrays: bool, received_ns: int) -> Span:
    status = _object(item.get("status"), "status")
    return Span(
        trace_id=_raw_id(item, "traceId"),
        span_id=_raw_id(item, "spanId"),
        parent_id=_id(item, "parentSpanId", SPAN_ID_BYTES),
        name=_text(item.get("name")),
        kind=_enum(item.get("kind"), _KINDS),
        start_ns=_uint64(item.get("startTimeUnixNano")),
        end_ns=_uint64(item.get("endTimeUnixNano")),
        attributes=_attributes(item.get("attributes"), arrays),
        resource=resource,
        scope=scope,
        status=_enum(status.get("code"), _STATUSES),
        status_message=_text(status.get("message")),
        events=tuple(
            Event(
                _text(event.get("name")),
                _uint64(event.get("timeUnixNano")),
                _attributes(event.get("attributes"), arrays),
            )
            for event in _objects(item.get("events"), "events")
        ),
        links=tuple(
            Link(_raw_id(link, "traceId"), _raw_id(link, "spanId"), _attributes(link.get("attributes"), arrays))
            for link in _objects(item.get("links"), "links")
        ),
        dropped_attributes=_uint32(item.get("droppedAttributesCount")),
        flags=_uint32(item.get("flags")),
        received_ns=received_ns,
    )


def _log_record(item: Json, resource: Attributes, scope: str, arrays: bool, received_ns: int) -> Span:
    attributes = _attributes(item.get("attributes"), arrays)
    time_ns = _uint64(item.get("timeUnixNano")) or _uint64(item.get("observedTimeUnixNano"))
    body = _value(item.get("body"))
    return Span(
        trace_id=_id(item, "traceId", TRACE_ID_BYTES),
        span_id="",
        parent_id=_id(item, "spanId", SPAN_ID_BYTES),
        name=_text(item.get("eventName")) or event_name(attributes),
        kind=0,
        start_ns=time_ns,
        end_ns=time_ns,
        attributes=attributes,
        resource=resource,
        scope=scope,
        dropped_attributes=_uint32(item.get("droppedAttributesCount")),
        flags=_uint32(item.get("flags")),
        body=body if arrays else lighten(body),
        received_ns=received_ns,
    )


def _attributes(pairs: Json, arrays: bool) -> dict[str, Value]:
    found = _pairs(pairs, "attributes")
    return found if arrays else {key: lighten(value) for key, value in found.items()}


def _pairs(pairs: Json, what: str, depth: int = 0) -> dict[str, Value]:
    return {_text(pair.get("key")): _value(pair.get("value"), depth) for pair in _objects(pairs, what)}


def _value(value: Json, depth: int = 0) -> Value:
    """An AnyValue; of several members the last one that is known counts."""
    if depth > MAX_DEPTH:
        raise ValueError(f"a value is nested more than {MAX_DEPTH} deep")
    result: Value = None
    for member, raw in _object(value, "a value").items():
        if raw is None:
            continue
        if member == "arrayValue":
            elements = _list(_object(raw, member).get("values"), "values")
            result = _numbers(elements)
            if result is None:
                result = gather([_value(element, depth + 1) for element in elements])
        elif member == "kvlistValue":
            result = _pairs(_object(raw, member).get("values"), "values", depth + 1)
        elif member in _SCALARS:
            result = _SCALARS[member](raw)
    return result


def _numbers(elements: list[Json]) -> Value:
    """The array, if it is ints alone or doubles alone in their usual form; None if it is anything else."""
    for member in ("intValue", "doubleValue"):
        try:
            written = [element[member] for element in elements if len(element) == 1]
        except (KeyError, TypeError):
            continue
        kinds = set(map(type, written))
        if len(written) < len(elements):
            return None
        if member == "doubleValue" and kinds == {float}:
            return np.array(written, np.float64)
        if member == "intValue" and kinds == {str} and _INTEGERS.fullmatch(",".join(written)):
            try:
                return narrowed(np.array(list(map(int, written)), np.int64))
            except OverflowError:  # which one is said where each is read by itself
                return None
    return None


def _bool(value: Json) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"boolValue is {value!r:.80}, not true or false")


def _double(value: Json) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return _float(value)
    if isinstance(value, str):
        if value in _DOUBLES:
            return _DOUBLES[value]
        if _NUMBER.fullmatch(value):
            return _float(value)
    raise ValueError(f"{value!r:.80} is no number")


def _float(value: int | str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{value!r:.80} is too large for a double") from error


def _integer(value: Json, low: int, high: int) -> int:
    """The integer, which is in [low, high); 0 if it is absent."""
    if value is None:
        return 0
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and _INTEGER.fullmatch(value)):
        number = int(value)
    else:
        raise ValueError(f"{value!r:.80} is no integer")
    if not low <= number < high:
        raise ValueError(f"{number} is not in [{low}, {high})")
    return number


def _int64(value: Json) -> int:
    return _integer(value, -(1 << 63), 1 << 63)


def _uint64(value: Json) -> int:
    return _integer(value, 0, 1 << 64)


def _uint32(value: Json) -> int:
    return _integer(value, 0, 1 << 32)


def _enum(value: Json, names: dict[str, int]) -> int:
    if isinstance(value, str) and value in names:
        return names[value]
    return _integer(value, -(1 << 31), 1 << 31)


def _bytes(value: Json) -> bytes:
    """Base64 in the standard or the URL alphabet, with or without padding."""
    if not isinstance(value, str):
        raise ValueError(f"bytesValue is {value!r:.80}, not base64 text")
    standard = value.translate({ord("-"): "+", ord("_"): "/"}).rstrip("=")
    try:
        return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"bytesValue is no base64: {error}") from error


def _text(value: Json) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r:.80} is no text")


_SCALARS: Final[dict[str, Callable[[Json], Value]]] = {
    "stringValue": _text,
    "boolValue": _bool,
    "intValue": _int64,
    "doubleValue": _double,
    "bytesValue": _bytes,
    "stringValueStrindex": lambda _: None,
}


def _has_ids(item: Json) -> bool:
    return bool(_id(item, "traceId", TRACE_ID_BYTES) and _id(item, "spanId", SPAN_ID_BYTES))


def _id(item: Json, name: str, length: int) -> str:
    """The id in lower-case hex, or "" if it is no valid one."""
    written = _raw_id(item, name)
    return written if len(written) == 2 * length and _HEX.fullmatch(written) and written.strip("0") else ""


def _raw_id(item: Json, name: str) -> str:
    """The id as it was written, in lower case; "" if there is none."""
    value = cast("dict[str, Json]", item).get(name) if isinstance(item, dict) else None
    return value.lower() if isinstance(value, str) else ""


def _object(value: Json, what: str) -> dict[str, Json]:
    if value is None:
        return {}
    if isinstance(value, dict):
        return cast("dict[str, Json]", value)
    raise ValueError(f"{what} is {value!r:.80}, not an object")


def _list(value: Json, what: str) -> list[Json]:
    if value is None:
        return []
    if isinstance(value, list):
        return cast("list[Json]", value)
    raise ValueError(f"{what} is {value!r:.80}, not a list")


def _objects(value: Json, what: str) -> list[dict[str, Json]]:
    return [_object(element, f"an element of {what}") for element in _list(value, what)]


def _rewritten(node: Json, key: Callable[[str], str], value: Callable[[str], str]) -> Json:
    """The same JSON with other keys and other texts."""
    if isinstance(node, str):
        return value(node)
    if isinstance(node, list):
        return [_rewritten(element, key, value) for element in cast("list[Json]", node)]
    if isinstance(node, dict):
        members = cast("dict[str, Json]", node).items()
        return {key(name): _rewritten(element, key, value) for name, element in members}
    return node


def _without_surrogates(written: str) -> str:
    """The text with U+FFFD in place of surrogates that have no partner: UTF-8 can not write them."""
    return _SURROGATE.sub("\ufffd", written)


def _camel(name: str) -> str:
    return _SNAKE.sub(lambda match: match[1].upper(), name)


def _same(written: str) -> str:
    return written

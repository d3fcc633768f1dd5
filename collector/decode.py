"""OTLP requests to spans: `decode` for a request of any kind, and the protobuf encoding. No IO, no clock.

A request whose structure is broken raises DecodeError. A single span that is broken inside, or has no valid ids, costs
nothing but itself: it goes to `Decoded.bad`.
"""

import base64
from collections.abc import Callable, Container
from typing import Any

from google.protobuf.message import DecodeError as ProtobufError

from spanmill.collector.decode_json import check_logs_json, check_traces_json, decode_logs_json, decode_traces_json
from spanmill.collector.decoded import (
    SPAN_ID_BYTES,
    TRACE_ID_BYTES,
    Checked,
    Decoded,
    bad_span_id,
    event_name,
    id_or_none,
    undecodable,
)
from spanmill.collector.journal import Kind
from spanmill.collector.otlp_proto import Event as EventMessage
from spanmill.collector.otlp_proto import Link as LinkMessage
from spanmill.collector.otlp_proto import Logs, Traces
from spanmill.collector.values import decode_attributes, decode_value, text
from spanmill.errors import DecodeError
from spanmill.triplets.records import Attributes, Event, Link, Quarantined, Span


def decode(
    kind: Kind, body: bytes, received_ns: int = 0, *, only: Container[str] | None = None, arrays: bool = True
) -> Decoded:
    """The spans or log records of a request of this kind; parameters and errors as in `decode_traces`.

    Raises ValueError for a kind that holds no spans.
    """
    match kind:
        case Kind.TRACES_PROTO:
            return decode_traces(body, received_ns, only=only, arrays=arrays)
        case Kind.LOGS_PROTO:
            return decode_logs(body, received_ns, only=only, arrays=arrays)
        case Kind.TRACES_JSON:
            return decode_traces_json(body, received_ns, only=only, arrays=arrays)
        case Kind.LOGS_JSON:
            return decode_logs_json(body, received_ns, only=only, arrays=arrays)
        case _:
            raise ValueError(f"a journal record of kind {kind.name} holds no spans")


def check(kind: Kind, body: bytes) -> Checked:
    """How many spans or log records a request of this kind has, and how many of them can never be stored.

    Raises DecodeError where `decode` would, and ValueError for a kind that holds no spans.
    """
    match kind:
        case Kind.TRACES_PROTO:
            return check_traces(body)
        case Kind.LOGS_PROTO:
            return check_logs(body)
        case Kind.TRACES_JSON:
            return check_traces_json(body)
        case Kind.LOGS_JSON:
            return check_logs_json(body)
        case _:
            raise ValueError(f"a journal record of kind {kind.name} holds no spans")


def decode_traces(
    body: bytes, received_ns: int = 0, *, only: Container[str] | None = None, arrays: bool = True
) -> Decoded:
    """The spans of an ExportTraceServiceRequest.

    `only` holds the trace ids (hex) that are wanted, "" for no valid trace id; other spans are counted and skipped.
    With `arrays` false, attributes that begin with a number and long bytes are None (`values.decode_attributes`), for
    readers that need small values only. Raises DecodeError if the body is no such request.
    """
    return _decode(Traces, _span, body, received_ns, only, arrays)


def decode_logs(
    body: bytes, received_ns: int = 0, *, only: Container[str] | None = None, arrays: bool = True
) -> Decoded:
    """The log records of an ExportLogsServiceRequest, as spans; parameters and errors as in `decode_traces`."""
    return _decode(Logs, _log_record, body, received_ns, only, arrays)


def check_traces(body: bytes) -> Checked:
    """How many spans an ExportTraceServiceRequest has; parses down to the spans' fields, not into attributes."""
    count = rejected = 0
    for group in _parse(Traces, body).groups:
        for scope in group.scopes:
            count += len(scope.items)
            rejected += sum(not _has_ids(item) for item in scope.items)
    return Checked(count, rejected)


def check_logs(body: bytes) -> Checked:
    """How many log records an ExportLogsServiceRequest has; none needs an id, so none is rejected."""
    return Checked(sum(len(scope.items) for group in _parse(Logs, body).groups for scope in group.scopes), 0)


def _parse(message: Any, body: bytes) -> Any:
    try:
        return message.FromString(body)
    except ProtobufError as error:
        raise DecodeError(
            f"{len(body)} bytes are no OTLP {message.DESCRIPTOR.name.lower()} request: {error}"
        ) from error


def _decode(
    message: Any,
    read: Callable[[Any, Attributes, str, bool, int], Span],
    body: bytes,
    received_ns: int,
    only: Container[str] | None,
    arrays: bool,
) -> Decoded:
    spans: list[Span] = []
    bad: list[Quarantined] = []
    count = 0
    for group in _parse(message, body).groups:
        resource: Attributes | None = None
        for scope in group.scopes:
            scope_name = text(scope.scope.name)
            count += len(scope.items)
            for item in scope.items:
                if only is not None and id_or_none(item.trace_id, TRACE_ID_BYTES) not in only:
                    continue
                try:
                    if resource is None:
                        resource = decode_attributes(group.resource.attributes, arrays)
                    span = read(item, resource, scope_name, arrays, received_ns)
                except ProtobufError as error:
                    raw = {"base64": base64.b64encode(_alone(message, group, scope, item)).decode()}
                    bad.append(undecodable(item.trace_id.hex(), item.span_id.hex(), error, raw, received_ns))
                    continue
                if message is Logs or _has_ids(item):
                    spans.append(span)
                else:
                    bad.append(bad_span_id(span))
    return Decoded(spans, bad, count)


def _alone(message: Any, group: Any, scope: Any, item: Any) -> bytes:
    """A request with this one span or log record."""
    request = message()
    own_group = request.groups.add(resource=group.resource)
    own_group.scopes.add(scope=scope.scope, items=[item])
    return request.SerializeToString()


def _has_ids(item: Any) -> bool:
    return bool(id_or_none(item.trace_id, TRACE_ID_BYTES) and id_or_none(item.span_id, SPAN_ID_BYTES))


def _span(item: Any, resource: Attributes, scope: str, arrays: bool, received_ns: int) -> Span:
    status = item.status if item.HasField("status") else None
    return Span(
        trace_id=item.trace_id.hex(),
        span_id=item.span_id.hex(),
        parent_id=id_or_none(item.parent_span_id, SPAN_ID_BYTES),
        name=text(item.name),
        kind=item.kind,
        start_ns=item.start_time_unix_nano,
        end_ns=item.end_time_unix_nano,
        attributes=decode_attributes(item.attributes, arrays),
        resource=resource,
        scope=scope,
        status=status.code if status else 0,
        status_message=text(status.message) if status else "",
        events=tuple([_event(raw, arrays) for raw in events]) if (events := item.events) else (),
        links=tuple([_link(raw, arrays) for raw in links]) if (links := item.links) else (),
        dropped_attributes=item.dropped_attributes_count,
        flags=item.flags,
        received_ns=received_ns,
    )


def _event(raw: bytes, arrays: bool) -> Event:
    event = EventMessage.FromString(raw)
    return Event(text(event.name), event.time_unix_nano, decode_attributes(event.attributes, arrays))


def _link(raw: bytes, arrays: bool) -> Link:
    link = LinkMessage.FromString(raw)
    return Link(link.trace_id.hex(), link.span_id.hex(), decode_attributes(link.attributes, arrays))


def _log_record(item: Any, resource: Attributes, scope: str, arrays: bool, received_ns: int) -> Span:
    attributes = decode_attributes(item.attributes, arrays)
    time_ns = item.time_unix_nano or item.observed_time_unix_nano
    return Span(
        trace_id=id_or_none(item.trace_id, TRACE_ID_BYTES),
        span_id="",
        parent_id=id_or_none(item.span_id, SPAN_ID_BYTES),
        name=text(item.event_name) or event_name(attributes),
        kind=0,
        start_ns=time_ns,
        end_ns=time_ns,
        attributes=attributes,
        resource=resource,
        scope=scope,
        dropped_attributes=item.dropped_attributes_count,
        flags=item.flags,
        body=decode_value(b"".join(item.body), arrays),
        received_ns=received_ns,
    )

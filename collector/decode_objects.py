"""Spans as a Python program holds them, to Spans: through the SDK's own OTLP encoder and the decoder of requests."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

from google.protobuf.message import Message
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from spanmill.collector.decode import decode
from spanmill.collector.decoded import Decoded
from spanmill.collector.framing import json_kind, request_kind
from spanmill.collector.journal import Kind
from spanmill.errors import DecodeError
from spanmill.triplets.records import Json

EXPECTED: Final = (
    "expected finished SDK spans (ReadableSpan), their to_json() as dict or text, OTLP requests of traces or logs as "
    "bytes, protobuf or JSON, or a list of these"
)
_MESSAGES: Final = {
    "opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest": Kind.TRACES_PROTO,
    "opentelemetry.proto.trace.v1.TracesData": Kind.TRACES_PROTO,
    "opentelemetry.proto.collector.logs.v1.ExportLogsServiceRequest": Kind.LOGS_PROTO,
    "opentelemetry.proto.logs.v1.LogsData": Kind.LOGS_PROTO,
}
"""The data messages have the fields of the requests."""
_BATCH: Final = 256
"""SDK spans encoded at once: far from protobuf's limit of 2 GiB, whatever they hold."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def decode_objects(spans: object, name: str = "spans") -> Decoded:
    """The spans and log records in whatever holds them: see `EXPECTED`; lists may be mixed and stand in lists.

    `to_json()` keeps microseconds and no instrumentation scope, so spans lose the rest in it. Raises TypeError for
    anything else, DecodeError for a request that does not parse; both say where in `name` it stands.
    """
    sdk: list[ReadableSpan] = []
    requests: list[tuple[str, Kind, bytes]] = []
    for where, found in _flat(spans, name):
        if isinstance(found, ReadableSpan):
            sdk.append(found)
        else:
            requests.append((where, *found))
    for start in range(0, len(sdk), _BATCH):
        body = encode_spans(sdk[start : start + _BATCH]).SerializeToString()
        requests.append(("", Kind.TRACES_PROTO, body))
    parts: list[Decoded] = []
    for where, kind, body in requests:
        try:
            parts.append(decode(kind, body))
        except DecodeError as error:
            raise DecodeError(f"{where}{error}") from error
    return Decoded([s for p in parts for s in p.spans], [b for p in parts for b in p.bad], sum(p.count for p in parts))


def _flat(found: object, where: str) -> Iterator[tuple[str, ReadableSpan | tuple[Kind, bytes]]]:
    """Every span and request, with the place where it stands."""
    at = f"{where}: "
    match found:
        case ReadableSpan():
            if found.get_span_context() is None:
                raise TypeError(f"{at}found a span without ids; {EXPECTED}")
            yield at, found
        case bytes() | bytearray() | memoryview():
            body = bytes(cast("bytes", found))
            try:
                kind = request_kind(body)
            except DecodeError as error:
                raise DecodeError(f"{at}{len(body)} bytes are no OTLP request of traces or logs: {error}") from error
            if kind is not None:  # else there is nothing in it
                yield at, (kind, body)
        case Message():
            kind = _MESSAGES.get(found.DESCRIPTOR.full_name)
            if kind is None:
                raise TypeError(f"{at}found a protobuf {found.DESCRIPTOR.full_name}; {EXPECTED}")
            yield at, (kind, found.SerializeToString())
        case str():
            yield at, _of_text(found, at)
        case Mapping():
            yield at, _of_dict(cast("Mapping[str, Json]", found), at)
        case Iterable():
            for number, one in enumerate(cast("Iterable[object]", found)):
                yield from _flat(one, f"{where}[{number}]")
        case _:
            raise TypeError(f"{at}found {type(found).__name__} {found!r:.80}; {EXPECTED}")


def _of_text(found: str, at: str) -> ReadableSpan | tuple[Kind, bytes]:
    try:
        value: Json = json.loads(found)
    except (ValueError, RecursionError) as error:
        raise TypeError(f"{at}found a text that is no JSON, {found!r:.80} ({error}); {EXPECTED}") from error
    if not isinstance(value, dict):
        raise TypeError(f"{at}found JSON that is no object, {found!r:.80}; {EXPECTED}")
    return _of_dict(cast("dict[str, Json]", value), at)


def _of_dict(found: Mapping[str, Json], at: str) -> ReadableSpan | tuple[Kind, bytes]:
    if "context" in found:
        try:
            return _sdk_span(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TypeError(f"{at}found a dict that is no to_json() of a span ({error!r}); {EXPECTED}") from error
    try:
        body = json.dumps(found).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{at}found a dict that is no JSON ({error}); {EXPECTED}") from error
    kind = json_kind(body)
    if kind is None:
        raise TypeError(f"{at}found a dict with the keys {', '.join(map(str, found)) or 'none'}; {EXPECTED}")
    return kind, body


# to_json() of the SDK


def _sdk_span(found: Mapping[str, Json]) -> ReadableSpan:
    """The span that a `to_json()` tells of. Raises KeyError, TypeError, ValueError or AttributeError if it is none."""
    context = _context(found["context"])
    parent = found.get("parent_id")
    status: Mapping[str, Json] = found.get("status") or {}
    resource: Mapping[str, Json] = found.get("resource") or {}
    return ReadableSpan(
        name=str(found["name"]),
        context=context,
        parent=None if parent is None else SpanContext(context.trace_id, int(parent, 16), is_remote=False),
        resource=Resource(dict(resource.get("attributes") or {}), resource.get("schema_url")),
        attributes=_attributes(found),
        events=[Event(e["name"], _attributes(e), _nanoseconds(e["timestamp"])) for e in _list(found, "events")],
        links=[Link(_context(link["context"]), _attributes(link)) for link in _list(found, "links")],
        kind=SpanKind[str(found.get("kind") or "INTERNAL").rpartition(".")[2]],
        status=Status(StatusCode[status.get("status_code") or "UNSET"], status.get("description")),
        start_time=_nanoseconds(found.get("start_time")),
        end_time=_nanoseconds(found.get("end_time")),
    )


def _context(found: Mapping[str, Json]) -> SpanContext:
    return SpanContext(int(found["trace_id"], 16), int(found["span_id"], 16), is_remote=False)


def _attributes(found: Mapping[str, Json]) -> dict[str, Any]:
    return dict(found.get("attributes") or {})


def _list(found: Mapping[str, Json], name: str) -> Sequence[Mapping[str, Json]]:
    return found.get(name) or ()


def _nanoseconds(text: str | None) -> int | None:
    """Nanoseconds since 1970 of an ISO time; None where there is none."""
    return None if text is None else (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1) * 1000

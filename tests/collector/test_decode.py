import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from spanmill.collector.decode import check, check_logs, check_traces, decode, decode_logs, decode_traces
from spanmill.collector.decoded import Checked, Decoded
from spanmill.collector.journal import Kind
from spanmill.errors import DecodeError
from spanmill.triplets.records import Event, IntArray, Json, Link, Quarantined, Span, Value
from spanmill.triplets.span_json import span_json

UNTIMED = settings(suppress_health_check=[HealthCheck.too_slow])
TRACE = bytes(range(16))
SPAN = bytes(range(8))
OTHER_TRACE = bytes(range(16, 32))
RECEIVED_NS = 1_700_000_000_123_456_789


def any_value(value: Value) -> AnyValue:
    """The AnyValue of a Python value."""
    message = AnyValue()
    match value:
        case list():
            message.array_value.SetInParent()
            message.array_value.values.extend(any_value(element) for element in value)
        case dict():
            message.kvlist_value.SetInParent()
            message.kvlist_value.values.extend(attributes(value))
        case bool():
            message.bool_value = value
        case int():
            message.int_value = value
        case float():
            message.double_value = value
        case str():
            message.string_value = value
        case bytes():
            message.bytes_value = value
        case _:
            pass
    return message


def attributes(values: Mapping[str, Value]) -> list[KeyValue]:
    """The KeyValues of a dict."""
    return [KeyValue(key=key, value=any_value(value)) for key, value in values.items()]


def traces(*spans: SpanMessage, resource: Mapping[str, Value] | None = None) -> bytes:
    """A request with these spans in one scope."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(attributes(resource or {}))
    scope = group.scope_spans.add(spans=spans)
    scope.scope.name = "tests"
    return request.SerializeToString()


def logs(*records: LogRecord) -> bytes:
    """A request with these log records in one scope."""
    request = ExportLogsServiceRequest()
    request.resource_logs.add().scope_logs.add(log_records=records)
    return request.SerializeToString()


def otlp_json(request: Message) -> bytes:
    """The request as OTLP/JSON: protobuf's JSON mapping with ids in hex."""

    def hexed(members: dict[str, Json]) -> dict[str, Json]:
        ids = members.keys() & {"traceId", "spanId", "parentSpanId"}
        return members | {name: base64.b64decode(members[name]).hex().upper() for name in ids}

    written = json_format.MessageToJson(request, use_integers_for_enums=True)
    return json.dumps(json.loads(written, object_hook=hexed)).encode()


def plain(value: Any) -> Json:
    """The value in a form whose `==` sees dtypes, and where NaN equals NaN."""
    match value:
        case np.ndarray():
            return repr(cast("IntArray", value).dtype), cast("IntArray", value).tobytes()
        case dict():
            return {key: plain(element) for key, element in cast("dict[str, Json]", value).items()}
        case list() | tuple():
            return [plain(element) for element in cast("list[Json]", value)]
        case Span() | Quarantined():
            return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        case _:
            return repr(value)


def test_a_span_keeps_all_that_it_carried() -> None:
    """Every field of an OTLP span that the records have is decoded: ids in hex, times, events, links, status."""
    message = SpanMessage(
        trace_id=TRACE,
        span_id=SPAN,
        parent_span_id=SPAN[::-1],
        trace_state="a=b",
        flags=0x101,
        name="chat policy",
        kind=SpanMessage.SPAN_KIND_CLIENT,
        start_time_unix_nano=1,
        end_time_unix_nano=2,
        attributes=attributes(
            {"gen_ai.request.model": "policy", "ids": [1, 2, 300], "top_p": 0.5, "packed": b"\0\xff"}
        ),
        dropped_attributes_count=3,
        status=Status(code=Status.STATUS_CODE_ERROR, message="cut"),
    )
    message.events.add(name="reward", time_unix_nano=5, attributes=attributes({"value": 1.5}))
    message.links.add(trace_id=OTHER_TRACE, span_id=SPAN, attributes=attributes({"why": "retry"}))

    decoded = decode_traces(traces(message, resource={"service.name": "agent"}), RECEIVED_NS)

    span = Span(
        trace_id="000102030405060708090a0b0c0d0e0f",
        span_id="0001020304050607",
        parent_id="0706050403020100",
        name="chat policy",
        kind=3,
        start_ns=1,
        end_ns=2,
        attributes={
            "gen_ai.request.model": "policy",
            "ids": np.array([1, 2, 300], np.int32),
            "top_p": 0.5,
            "packed": b"\0\xff",
        },
        resource={"service.name": "agent"},
        scope="tests",
        status=2,
        status_message="cut",
        events=(Event("reward", 5, {"value": 1.5}),),
        links=(Link("101112131415161718191a1b1c1d1e1f", "0001020304050607", {"why": "retry"}),),
        dropped_attributes=3,
        flags=0x101,
        received_ns=RECEIVED_NS,
    )
    assert plain(Decoded([span], [], 1)) == plain(decoded)


def test_a_log_record_is_a_span_without_id() -> None:
    """A log record stands under the span it was written in; its event name, time and body are kept."""
    record = LogRecord(
        time_unix_nano=7,
        observed_time_unix_nano=9,
        event_name="gen_ai.evaluation.result",
        body=any_value({"score": 1, "why": ["a", None]}),
        attributes=attributes({"key": True}),
        dropped_attributes_count=1,
        flags=1,
        trace_id=TRACE,
        span_id=SPAN,
    )

    decoded = decode_logs(logs(record), RECEIVED_NS)

    span = Span(
        trace_id=TRACE.hex(),
        span_id="",
        parent_id=SPAN.hex(),
        name="gen_ai.evaluation.result",
        kind=0,
        start_ns=7,
        end_ns=7,
        attributes={"key": True},
        resource={},
        dropped_attributes=1,
        flags=1,
        body={"score": 1, "why": ["a", None]},
        received_ns=RECEIVED_NS,
    )
    assert plain(Decoded([span], [], 1)) == plain(decoded)


@pytest.mark.parametrize(
    ("record", "name", "time_ns", "trace_id"),
    [
        (LogRecord(observed_time_unix_nano=9, attributes=attributes({"event.name": "old"})), "old", 9, ""),
        (LogRecord(attributes=attributes({"event.name": 5})), "", 0, ""),
        (LogRecord(trace_id=TRACE[:8], span_id=bytes(8)), "", 0, ""),
        (LogRecord(trace_id=bytes(16)), "", 0, ""),
    ],
)
def test_a_log_record_needs_neither_trace_nor_time(record: LogRecord, name: str, time_ns: int, trace_id: str) -> None:
    """Without event name the attribute counts, without time the observed one; ids that are none are empty."""
    (span,) = decode_logs(logs(record)).spans

    assert (name, time_ns, trace_id, "") == (span.name, span.start_ns, span.trace_id, span.parent_id)


@pytest.mark.parametrize("parent", [b"", bytes(8), b"short"])
def test_a_parent_id_that_is_none_makes_a_root(parent: bytes) -> None:
    """A parent id that is empty, zero or of another length counts as no parent, and the span stays."""
    (span,) = decode_traces(traces(SpanMessage(trace_id=TRACE, span_id=SPAN, parent_span_id=parent))).spans

    assert span.parent_id == ""


@pytest.mark.parametrize(
    ("trace_id", "span_id"),
    [(b"", SPAN), (bytes(16), SPAN), (TRACE[:8], SPAN), (TRACE, bytes(8)), (TRACE, SPAN + b"9")],
)
def test_a_span_without_valid_ids_is_set_aside(trace_id: bytes, span_id: bytes) -> None:
    """A span whose ids have another length or are zero goes to quarantine whole, and its neighbours stay."""
    good = SpanMessage(trace_id=TRACE, span_id=SPAN)
    body = traces(SpanMessage(trace_id=trace_id, span_id=span_id, name="lost"), good)

    decoded = decode_traces(body, RECEIVED_NS)

    (bad,) = decoded.bad
    written = Span(trace_id.hex(), span_id.hex(), "", "lost", 0, 0, 0, {}, {}, "tests")
    expected = Quarantined(
        "bad_span_id", bad.detail, trace_id.hex(), span_id.hex(), span_json(written), RECEIVED_NS // 1000
    )
    assert (expected, [SPAN.hex()], 2) == (bad, [span.span_id for span in decoded.spans], decoded.count)
    assert Checked(2, 1) == check_traces(body)


def test_a_span_without_any_id_is_not_written_as_a_log_record() -> None:
    """The quarantined JSON of a span that has no id is a span's: its id is written as zero."""
    (bad,) = decode_traces(traces(SpanMessage(trace_id=TRACE, name="lost", end_time_unix_nano=5))).bad

    span = {"traceId": TRACE.hex(), "spanId": "0" * 16, "name": "lost", "endTimeUnixNano": "5"}
    empty: dict[str, Json] = {}
    group = {"resource": empty, "scopeSpans": [{"scope": {"name": "tests"}, "spans": [span]}]}
    expected = {"resourceSpans": [group]}
    assert ("", expected) == (bad.span_id, json.loads(bad.span))


def broken_span() -> bytes:
    """A Span whose only attribute is no KeyValue."""
    return SpanMessage(trace_id=TRACE, span_id=SPAN).SerializeToString() + b"\x4a\x02\x0a\x7f"


def test_a_span_that_does_not_parse_inside_is_set_aside() -> None:
    """Broken attribute bytes cost their span alone; quarantine holds a request with that span, byte for byte."""
    good = SpanMessage(trace_id=TRACE, span_id=SPAN[::-1]).SerializeToString()
    scope = b"".join(b"\x12" + bytes([len(span)]) + span for span in (broken_span(), good))
    body = b"\x0a" + bytes([len(scope) + 2]) + b"\x12" + bytes([len(scope)]) + scope

    decoded = decode_traces(body, RECEIVED_NS)

    (bad,) = decoded.bad
    kept = base64.b64decode(json.loads(bad.span)["base64"])
    assert ("undecodable_span", TRACE.hex(), SPAN.hex()) == (bad.reason, bad.trace_id, bad.span_id)
    assert ([SPAN[::-1].hex()], 2) == ([span.span_id for span in decoded.spans], decoded.count)
    assert [bad] == decode_traces(kept, RECEIVED_NS).bad


def test_a_broken_resource_sets_its_spans_aside() -> None:
    """A resource whose attributes do not parse makes its spans undecodable, none of them is lost."""
    span = SpanMessage(trace_id=TRACE, span_id=SPAN).SerializeToString()
    group = b"\x0a\x04\x0a\x02\x0a\x7f" + b"\x12" + bytes([len(span) + 2]) + b"\x12" + bytes([len(span)]) + span

    decoded = decode_traces(b"\x0a" + bytes([len(group)]) + group)

    assert ([], ["undecodable_span"]) == (decoded.spans, [bad.reason for bad in decoded.bad])


@pytest.mark.parametrize("kind", [Kind.TRACES_PROTO, Kind.LOGS_PROTO, Kind.TRACES_JSON, Kind.LOGS_JSON])
def test_bytes_that_are_no_request_are_refused(kind: Kind) -> None:
    """A body cut in the middle raises DecodeError when it is checked and when it is decoded."""
    bodies = {
        Kind.TRACES_PROTO: traces(SpanMessage(trace_id=TRACE, span_id=SPAN, name="n"))[:-1],
        Kind.LOGS_PROTO: logs(LogRecord(trace_id=TRACE))[:-1],
        Kind.TRACES_JSON: b'{"resourceSpans":[{"scopeSpans":[',
        Kind.LOGS_JSON: b'{"resourceLogs":[{"scopeLogs":{}}]}',
    }
    with pytest.raises(DecodeError):
        check(kind, bodies[kind])
    with pytest.raises(DecodeError):
        decode(kind, bodies[kind])


@pytest.mark.parametrize("kind", [Kind.REWARDS, Kind.FLUSH])
def test_kinds_without_spans_are_refused(kind: Kind) -> None:
    """Asking for the spans of a record that holds none is a mistake of the caller."""
    with pytest.raises(ValueError, match=kind.name):
        decode(kind, b"")
    with pytest.raises(ValueError, match=kind.name):
        check(kind, b"")


def test_an_empty_request_has_no_spans() -> None:
    """An empty body is a legal request."""
    assert (Decoded([], [], 0), Checked(0, 0)) == (decode_traces(b""), check_traces(b""))
    assert (Decoded([], [], 0), Checked(0, 0)) == (decode_logs(b""), check_logs(b""))


def test_only_the_wanted_traces_are_decoded() -> None:
    """Spans of other traces are counted, not decoded, even if they are broken inside; "" stands for no trace."""
    wanted = SpanMessage(trace_id=OTHER_TRACE, span_id=SPAN)
    nowhere = SpanMessage(trace_id=b"short", span_id=SPAN)
    scope = b"".join(
        b"\x12" + bytes([len(span)]) + span
        for span in (broken_span(), wanted.SerializeToString(), nowhere.SerializeToString())
    )
    body = b"\x0a" + bytes([len(scope) + 2]) + b"\x12" + bytes([len(scope)]) + scope

    some = decode_traces(body, only={OTHER_TRACE.hex()})
    none = decode_traces(body, only={""})

    assert ([OTHER_TRACE.hex()], [], 3) == ([span.trace_id for span in some.spans], some.bad, some.count)
    assert ([], ["bad_span_id"], 3) == (none.spans, [bad.reason for bad in none.bad], none.count)


def test_log_records_outside_any_trace_are_wanted_by_the_empty_id() -> None:
    """A log record without trace has the trace id "", also for `only`."""
    body = logs(LogRecord(event_name="in", trace_id=TRACE), LogRecord(event_name="out"))

    assert ["out"] == [span.name for span in decode_logs(body, only={""}).spans]


def test_without_arrays_all_levels_are_light() -> None:
    """Arrays of numbers are left out of span, event, link, resource and log body alike."""
    message = SpanMessage(trace_id=TRACE, span_id=SPAN, attributes=attributes({"ids": [1, 2], "id": "x"}))
    message.events.add(attributes=attributes({"ids": [1.5]}))
    message.links.add(trace_id=TRACE, span_id=SPAN, attributes=attributes({"ids": [1]}))

    (span,) = decode_traces(traces(message, resource={"ids": [1]}), arrays=False).spans
    (record,) = decode_logs(logs(LogRecord(body=any_value([1, 2]))), arrays=False).spans

    light: dict[str, Value] = {"ids": None}
    assert ({"ids": None, "id": "x"}, light) == (span.attributes, span.resource)
    assert (light, light, None) == (span.events[0].attributes, span.links[0].attributes, record.body)


def listed(value: Value) -> Value:
    """A list of one."""
    return [value]


def keyed(value: Value) -> Value:
    """A dict of one."""
    return {"key": value}


@pytest.mark.parametrize("wrap", [listed, keyed])
@pytest.mark.parametrize(("depth", "reasons"), [(32, []), (33, ["undecodable_span"])])
def test_a_value_may_be_nested_32_deep(wrap: Callable[[Value], Value], depth: int, reasons: list[str]) -> None:
    """Deeper values set their span aside, in both encodings."""
    value: Value = "core"
    for _ in range(depth):
        value = wrap(value)
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    spans.add(trace_id=TRACE, span_id=SPAN, attributes=attributes({"key": value}))

    for decoded in (
        decode(Kind.TRACES_PROTO, request.SerializeToString()),
        decode(Kind.TRACES_JSON, otlp_json(request)),
    ):
        assert (reasons, 1 - len(reasons)) == ([bad.reason for bad in decoded.bad], len(decoded.spans))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.floats().filter(lambda number: str(number) != "-0.0"),  # JSON's integers, which may stand for it, have no -0
        TEXTS,
        st.binary(max_size=80),
        st.lists(st.integers(0, 1 << 20), max_size=60),
        st.lists(st.floats(-50, -0.5), max_size=20),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ATTRIBUTES = st.dictionaries(TEXTS, VALUES, max_size=4).map(attributes)
TRACE_IDS = st.sampled_from([TRACE, OTHER_TRACE, bytes(16), b"", b"short"])
SPAN_IDS = st.binary(min_size=8, max_size=8) | st.sampled_from([bytes(8), b"", b"short"])
NS = st.integers(0, (1 << 64) - 1)
EVENTS = st.builds(SpanMessage.Event, time_unix_nano=NS, name=TEXTS, attributes=ATTRIBUTES)
LINKS = st.builds(SpanMessage.Link, trace_id=TRACE_IDS, span_id=SPAN_IDS, attributes=ATTRIBUTES)
SPANS = st.builds(
    SpanMessage,
    trace_id=TRACE_IDS,
    span_id=SPAN_IDS,
    parent_span_id=SPAN_IDS,
    name=TEXTS,
    kind=st.integers(0, 5),
    start_time_unix_nano=NS,
    end_time_unix_nano=NS,
    attributes=ATTRIBUTES,
    events=st.lists(EVENTS, max_size=2),
    links=st.lists(LINKS, max_size=2),
    dropped_attributes_count=st.integers(0, (1 << 32) - 1),
    flags=st.integers(0, (1 << 32) - 1),
    status=st.none() | st.builds(Status, code=st.integers(0, 2), message=TEXTS),
)
RECORDS = st.builds(
    LogRecord,
    time_unix_nano=NS,
    observed_time_unix_nano=NS,
    event_name=TEXTS,
    body=VALUES.map(any_value),
    attributes=ATTRIBUTES,
    flags=st.integers(0, (1 << 32) - 1),
    trace_id=TRACE_IDS,
    span_id=SPAN_IDS,
)


@UNTIMED
@given(st.lists(SPANS, max_size=3), ATTRIBUTES, TEXTS, st.booleans())
def test_both_encodings_give_the_same_spans(
    spans: list[SpanMessage], resource: list[KeyValue], scope_name: str, arrays: bool
) -> None:
    """The same request in JSON and in protobuf gives equal spans and sets the same spans aside."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(resource)
    scope = group.scope_spans.add(spans=spans)
    scope.scope.name = scope_name
    body = request.SerializeToString()
    as_json = otlp_json(request)

    from_proto = decode(Kind.TRACES_PROTO, body, RECEIVED_NS, arrays=arrays)
    from_json = decode(Kind.TRACES_JSON, as_json, RECEIVED_NS, arrays=arrays)

    assert plain(from_proto) == plain(from_json)
    assert (
        Checked(len(spans), len(from_proto.bad)) == check(Kind.TRACES_PROTO, body) == check(Kind.TRACES_JSON, as_json)
    )


@UNTIMED
@given(st.lists(RECORDS, max_size=3), st.booleans())
def test_both_encodings_give_the_same_log_records(records: list[LogRecord], arrays: bool) -> None:
    """The same log records in JSON and in protobuf are equal, and none is set aside."""
    request = ExportLogsServiceRequest()
    request.resource_logs.add().scope_logs.add(log_records=records)
    body = request.SerializeToString()
    as_json = otlp_json(request)

    from_proto = decode(Kind.LOGS_PROTO, body, RECEIVED_NS, arrays=arrays)

    assert plain(from_proto) == plain(decode(Kind.LOGS_JSON, as_json, RECEIVED_NS, arrays=arrays))
    assert (len(records), []) == (len(from_proto.spans), from_proto.bad)
    assert Checked(len(records), 0) == check(Kind.LOGS_PROTO, body) == check(Kind.LOGS_JSON, as_json)

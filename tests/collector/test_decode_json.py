import json
import math
from typing import Any

import numpy as np
import pytest

from spanmill.collector.decode_json import check_traces_json, decode_logs_json, decode_traces_json
from spanmill.collector.decoded import Checked
from spanmill.errors import DecodeError
from spanmill.triplets.records import Event, Json, Span

TRACE = "0123456789abcdef0123456789abcdef"
SPAN = "0123456789abcdef"


def request(*spans: Any) -> bytes:
    """A request with these spans."""
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()


def decoded_value(value: Any) -> Any:
    """What an attribute with this AnyValue becomes."""
    span = {"traceId": TRACE, "spanId": SPAN, "attributes": [{"key": "key", "value": value}]}
    (decoded,) = decode_traces_json(request(span)).spans
    return decoded.attributes["key"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"intValue": "-9223372036854775808"}, -(1 << 63)),
        ({"intValue": 12}, 12),
        ({"intValue": 12.0}, 12),
        ({"doubleValue": 1}, 1.0),
        ({"doubleValue": "-1.5e-3"}, -0.0015),
        ({"doubleValue": "Infinity"}, math.inf),
        ({"doubleValue": "-Infinity"}, -math.inf),
        ({"boolValue": False}, False),
        ({"bytesValue": "-_8"}, b"\xfb\xff"),
        ({"bytesValue": "+/8="}, b"\xfb\xff"),
        ({"stringValue": ""}, ""),
        ({"stringValue": None}, None),
        ({}, None),
        (None, None),
        ({"someday": 1, "stringValue": "kept"}, "kept"),
        ({"arrayValue": {}}, []),
        ({"arrayValue": {"values": [{"intValue": "1"}, {"doubleValue": 2}]}}, [1, 2.0]),
        ({"arrayValue": {"values": [{"intValue": "1", "stringValue": "one"}]}}, ["one"]),
        ({"arrayValue": {"values": [{"stringValue": "a"}, {}]}}, ["a", None]),
        ({"kvlistValue": {"values": [{"key": "a", "value": {"intValue": "1"}}]}}, {"a": 1}),
    ],
)
def test_values_are_read_as_the_mapping_writes_them(value: Any, expected: Any) -> None:
    """Integers may be text or numbers, doubles may be words, bytes are base64 of either alphabet, null is absent."""
    result = decoded_value(value)

    assert (type(expected), expected) == (type(result), result)


def test_nan_may_be_a_word() -> None:
    """A double that is not a number is written as text."""
    assert math.isnan(decoded_value({"doubleValue": "NaN"}))


def test_an_array_of_ints_is_a_numpy_array() -> None:
    """Token ids, which JSON writes as one object per number, become int32."""
    result = decoded_value({"arrayValue": {"values": [{"intValue": "1"}, {"intValue": 2}]}})

    assert (np.dtype(np.int32), [1, 2]) == (result.dtype, result.tolist())


@pytest.mark.parametrize(
    "value",
    [
        {"intValue": "1_000"},
        {"intValue": "9223372036854775808"},
        {"intValue": 1.5},
        {"intValue": True},
        {"doubleValue": "one"},
        {"doubleValue": 10**400},
        {"boolValue": "true"},
        {"stringValue": 5},
        {"bytesValue": "*"},
        {"arrayValue": [1]},
        {"arrayValue": {"values": [{"intValue": "1"}, {"intValue": "9223372036854775808"}]}},
        {"arrayValue": {"values": [{"intValue": "1"}, {"intValue": "1 "}]}},
        "bare",
    ],
)
def test_a_value_that_is_none_sets_its_span_aside(value: Any) -> None:
    """A value that its member can not hold is never guessed: the span goes to quarantine with its JSON."""
    span = {"traceId": TRACE.upper(), "spanId": SPAN, "attributes": [{"key": "key", "value": value}]}
    good = {"traceId": TRACE, "spanId": SPAN}

    decoded = decode_traces_json(request(span, good), 5_000)

    (bad,) = decoded.bad
    empty: dict[str, Json] = {}
    alone = {"resourceSpans": [{"resource": empty, "scopeSpans": [{"scope": empty, "spans": [span]}]}]}
    assert ("undecodable_span", TRACE, SPAN, 5) == (bad.reason, bad.trace_id, bad.span_id, bad.received_at)
    assert (alone, 1, 2) == (json.loads(bad.span), len(decoded.spans), decoded.count)


@pytest.mark.parametrize("span", [5, "text", [], {"traceId": 7}, {"traceId": "x" * 32, "spanId": SPAN}])
def test_a_span_of_another_shape_is_set_aside(span: Any) -> None:
    """What stands in a list of spans and is none, or has ids that are not hex, is counted and set aside."""
    decoded = decode_traces_json(request(span))

    assert ([], 1, 1) == (decoded.spans, len(decoded.bad), decoded.count)
    assert Checked(1, 1) == check_traces_json(request(span))


def test_ids_are_hex_of_either_case_and_enums_numbers_or_names() -> None:
    """Upper-case ids equal lower-case ones, and the names of kinds and status codes equal their numbers."""
    span = {
        "traceId": TRACE.upper(),
        "spanId": SPAN.upper(),
        "parentSpanId": "",
        "kind": "SPAN_KIND_CLIENT",
        "status": {"code": "STATUS_CODE_ERROR", "message": "no"},
    }

    assert [
        Span(TRACE, SPAN, "", "", 3, 0, 0, {}, {}, status=2, status_message="no"),
    ] == decode_traces_json(request(span)).spans


def test_snake_case_keys_are_accepted() -> None:
    """A writer that kept protobuf's own field names is understood; attribute names are left alone."""
    span = {
        "trace_id": TRACE,
        "span_id": SPAN,
        "start_time_unix_nano": "1",
        "end_time_unix_nano": 2,
        "attributes": [{"key": "my_key", "value": {"string_value": "my_value"}}],
        "events": [{"time_unix_nano": "3", "name": "my_event"}],
    }
    body = json.dumps({"resource_spans": [{"scope_spans": [{"spans": [span]}]}]}).encode()

    expected = Span(TRACE, SPAN, "", "", 0, 1, 2, {"my_key": "my_value"}, {}, events=(Event("my_event", 3, {}),))
    assert [expected] == decode_traces_json(body).spans


def test_a_lone_surrogate_is_replaced() -> None:
    """An escaped surrogate without its partner, which no file can hold, becomes U+FFFD; pairs stay."""
    body = request({"traceId": TRACE, "spanId": SPAN, "name": "a\ud800b", "status": {"message": "\U0001f600"}})

    (span,) = decode_traces_json(body).spans

    assert ("a\ufffdb", "\U0001f600") == (span.name, span.status_message)


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    """Invalid UTF-8 inside a text costs a character, and a byte order mark costs nothing."""
    body = b"\xef\xbb\xbf" + request({"traceId": TRACE, "spanId": SPAN, "name": "a?b"}).replace(b"?", b"\xff")

    (span,) = decode_traces_json(body).spans

    assert span.name == "a\ufffdb"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'{"resourceSpans": {}}',
        b'{"resourceSpans": [5]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": {}}]}]}',
        b'{"resourceSpans": [{"resource": []}]}',
        b"[" * 100_000,
    ],
)
def test_a_body_of_another_shape_is_refused(body: bytes) -> None:
    """JSON that is cut, nested without end or of another shape raises DecodeError."""
    with pytest.raises(DecodeError):
        decode_traces_json(body)


def test_only_and_log_records_work_as_in_protobuf() -> None:
    """Log records outside any trace are wanted by the empty id; others are counted and skipped."""
    records = [{"eventName": "out", "observedTimeUnixNano": "4"}, {"eventName": "in", "traceId": TRACE, "spanId": SPAN}]
    body = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}).encode()

    decoded = decode_logs_json(body, only={""})

    assert ([Span("", "", "", "out", 0, 4, 4, {}, {})], [], 2) == decoded

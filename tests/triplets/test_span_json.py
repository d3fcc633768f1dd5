import base64
import json
import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList

from spanmill.triplets.records import Event, Link, Span
from spanmill.triplets.span_json import span_json

SPAN = Span(
    trace_id="0123456789abcdef" * 2,
    span_id="00ff" * 4,
    parent_id="11" * 8,
    name="chat",
    kind=3,
    start_ns=1_700_000_000_123_456_789,
    end_ns=1_700_000_001_000_000_000,
    attributes={
        "z": True,
        "b": b"\x00\xff",
        "ids": np.array([1, 2**40], np.int64),
        "floats": np.array([0.5, math.inf]),
        "mixed": ["é\n", None, 3, {"k": [], "a": {}}],
        "minus": -math.inf,
        "zero": 0,
        "big": -(2**63),
    },
    resource={"service.name": "vllm"},
    scope="spanmill",
    status=2,
    status_message="no",
    events=(Event("reward", 7, {"v": 1.5}),),
    links=(Link("22" * 16, "33" * 8, {}),),
    dropped_attributes=4,
    flags=257,
)


def _parsed(text: str, message: Any) -> Any:
    """The JSON as protobuf's own parser reads it, which wants ids in base64."""

    def fix(value: Any) -> Any:
        if isinstance(value, list):
            return [fix(element) for element in cast(list[Any], value)]
        if isinstance(value, dict):
            return {
                key: base64.b64encode(bytes.fromhex(child)).decode() if key.endswith(("Id", "eId")) else fix(child)
                for key, child in cast(dict[str, Any], value).items()
            }
        return value

    return json_format.ParseDict(fix(json.loads(text)), message)


def _attribute(key: str, **value: Any) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(**value))


def _array(*values: AnyValue) -> ArrayValue:
    return ArrayValue(values=values)


def test_a_span_is_the_request_that_brought_it():
    """Protobuf's own JSON parser reads every field and kind of value back, attributes sorted by name."""
    expected = ExportTraceServiceRequest()
    resource = expected.resource_spans.add()
    resource.resource.attributes.append(_attribute("service.name", string_value="vllm"))
    scope = resource.scope_spans.add()
    scope.scope.name = "spanmill"
    inner = KeyValueList(
        values=[_attribute("a", kvlist_value=KeyValueList()), _attribute("k", array_value=ArrayValue())]
    )
    span = scope.spans.add(
        trace_id=bytes.fromhex(SPAN.trace_id),
        span_id=bytes.fromhex(SPAN.span_id),
        parent_span_id=bytes.fromhex(SPAN.parent_id),
        name="chat",
        kind=3,
        start_time_unix_nano=SPAN.start_ns,
        end_time_unix_nano=SPAN.end_ns,
        attributes=[
            _attribute("b", bytes_value=b"\x00\xff"),
            _attribute("big", int_value=-(2**63)),
            _attribute("floats", array_value=_array(AnyValue(double_value=0.5), AnyValue(double_value=math.inf))),
            _attribute("ids", array_value=_array(AnyValue(int_value=1), AnyValue(int_value=2**40))),
            _attribute("minus", double_value=-math.inf),
            _attribute(
                "mixed",
                array_value=_array(
                    AnyValue(string_value="é\n"), AnyValue(), AnyValue(int_value=3), AnyValue(kvlist_value=inner)
                ),
            ),
            _attribute("z", bool_value=True),
            _attribute("zero", int_value=0),
        ],
        dropped_attributes_count=4,
        flags=257,
        status={"code": 2, "message": "no"},
    )
    span.events.add(name="reward", time_unix_nano=7, attributes=[_attribute("v", double_value=1.5)])
    span.links.add(trace_id=b"\x22" * 16, span_id=b"\x33" * 8)
    assert _parsed(span_json(SPAN), ExportTraceServiceRequest()) == expected


def test_a_log_record_is_the_request_that_brought_it():
    """A log record keeps its event name, body and the span it was written in."""
    log = Span(
        trace_id="ab" * 16,
        span_id="",
        parent_id="cd" * 8,
        name="spanmill.reward",
        kind=0,
        start_ns=5,
        end_ns=5,
        attributes={"spanmill.reward.value": 0.0},
        resource={},
        body={"text": ""},
    )
    expected = ExportLogsServiceRequest()
    scope = expected.resource_logs.add(resource={}).scope_logs.add(scope={})
    scope.log_records.add(
        time_unix_nano=5,
        trace_id=b"\xab" * 16,
        span_id=b"\xcd" * 8,
        event_name="spanmill.reward",
        attributes=[_attribute("spanmill.reward.value", double_value=0.0)],
        body=AnyValue(kvlist_value=KeyValueList(values=[_attribute("text", string_value="")])),
    )
    assert _parsed(span_json(log), ExportLogsServiceRequest()) == expected


def test_nan_is_written_as_json_can_hold_it():
    """NaN and the infinities are strings, as protobuf's JSON writes them, so that any JSON parser reads the text."""
    values = {"a": math.nan, "b": math.inf, "c": -math.inf}
    text = span_json(replace(SPAN, attributes=values))
    attributes = json.loads(text)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"]
    assert [a["value"]["doubleValue"] for a in attributes] == ["NaN", "Infinity", "-Infinity"]


def test_the_text_is_compact_and_leaves_defaults_out():
    """The smallest span is the smallest text."""
    span = Span("ab" * 16, "cd" * 8, "", "s", 0, 1, 0, {}, {})
    assert span_json(span) == (
        '{"resourceSpans":[{"resource":{},"scopeSpans":[{"scope":{},"spans":[{"traceId":"' + "ab" * 16 + '",'
        '"spanId":"cdcdcdcdcdcdcdcd","name":"s","startTimeUnixNano":"1"}]}]}]}'
    )


def test_the_same_span_is_the_same_text():
    """Attributes in another order, or received at another time, make no difference."""
    other = replace(
        SPAN, attributes={key: SPAN.attributes[key] for key in reversed(list(SPAN.attributes))}, received_ns=9
    )
    assert span_json(other) == span_json(SPAN)

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import Link, SpanContext, TraceFlags, TraceState

from spanmill.instrument.spansize import span_size


def make_span(attributes: dict[str, Any]) -> ReadableSpan:
    """A finished span with these attributes on it, on its event and on its link."""
    link = SpanContext(1, 2, True, TraceFlags(1), TraceState([("vendor", "value")]))
    span = TracerProvider(shutdown_on_exit=False).get_tracer("t").start_span("n" * 40, links=[Link(link, attributes)])
    span.set_attributes(attributes)
    span.add_event("event", attributes)
    span.end()
    assert isinstance(span, ReadableSpan)
    return span


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"k": ""},
        {"ascii": "a" * 300_000},
        {"latin": "é" * 1000, "chinese": "漢" * 1000, "emoji": "😀" * 1000, "one": "a" * 1000 + "😀"},
        {"ids": list(range(0, 2**31, 2**20)), "wide": [2**62, -1] * 500},
        {"floats": [0.1] * 1000, "flags": [True, False] * 300},
        {"texts": ["é" * 100, ""] * 100},
        {"é" * 30: 1, "number": -(2**63), "float": 1e300, "flag": True},
        {f"gen_ai.prompt.{i}.content": "short" for i in range(100)},
    ],
    ids=lambda a: ",".join(a)[:20],
)
def test_size_is_never_below_what_is_sent(attributes: dict[str, Any]) -> None:
    """The estimate bounds the encoded span from above, and not by more than eight times what is sent."""
    span = make_span(attributes)
    sent = len(encode_spans([span]).resource_spans[0].scope_spans[0].spans[0].SerializeToString())
    assert sent <= span_size(span) <= 8 * sent + 500

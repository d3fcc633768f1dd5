"""Requests made for tests: roots, calls with token ids, and what reports the end of a rollout, as OTLP protobuf."""

import hashlib
import random
import struct
from collections.abc import Iterator, Mapping
from typing import cast

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

STARTED_NS = 1_780_000_000_000_000_000
MS = 1_000_000


def trace_id(trace: str) -> str:
    """The id, in hex, of the trace that a test calls so."""
    return hashlib.sha256(trace.encode()).hexdigest()[:32]


def span_id(trace: str, name: str) -> str:
    """The id, in hex, of a span of that trace."""
    return hashlib.sha256(f"{trace}/{name}".encode()).hexdigest()[:16]


def make_span(
    trace: str, name: str, parent: str = "", at_ms: int = 0, attributes: Mapping[str, object] | None = None
) -> Span:
    """A span of 10 ms."""
    return Span(
        trace_id=bytes.fromhex(trace_id(trace)),
        span_id=bytes.fromhex(span_id(trace, name)),
        parent_span_id=bytes.fromhex(span_id(trace, parent)) if parent else b"",
        name=name,
        kind=Span.SPAN_KIND_CLIENT if parent else Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=STARTED_NS + at_ms * MS,
        end_time_unix_nano=STARTED_NS + (at_ms + 10) * MS,
        attributes=[KeyValue(key=key, value=_value(value)) for key, value in (attributes or {}).items()],
    )


def make_call(
    trace: str, name: str, turn: int = 0, parent: str = "root", attributes: Mapping[str, object] | None = None
) -> Span:
    """A call whose prompt of `turn` + 2 tokens repeats the calls before it, and whose answer is one token."""
    prompt = list(range(1, turn + 3))
    given = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "policy",
        "gen_ai.response.id": f"chatcmpl-{trace}-{name}",
        "gen_ai.response.finish_reasons": ["stop"],
        "spanmill.capture": "client",
        "spanmill.prompt.token_ids": struct.pack(f"<{len(prompt)}i", *prompt),
        "spanmill.response.token_ids": struct.pack("<i", turn + 3),
        "spanmill.response.logprobs": struct.pack("<f", -0.5),
        "spanmill.logprobs.mode": "raw",
    }
    return make_span(trace, name, parent, 20 * (turn + 1), {**given, **(attributes or {})})


def make_rollout(name: str, calls: int = 2, root: Mapping[str, object] | None = None) -> list[Span]:
    """A rollout in a trace of its own: its calls, and its root, which comes last and reports success."""
    ended = {"spanmill.rollout.id": name, "spanmill.rollout.status": "succeeded"}
    return [
        *(make_call(name, f"call-{turn}", turn) for turn in range(calls)),
        make_span(name, "root", attributes={**ended, **(root or {})}),
    ]


def endless_requests(rng: random.Random, name: str) -> Iterator[list[Span]]:
    """Requests without end: three rollouts at a time, mixed and cut; some never end, some spans come twice."""
    number = 0
    while True:
        spans: list[Span] = []
        for _ in range(3):
            number += 1
            whole = make_rollout(f"{name}-{number}", calls=rng.randint(1, 4))
            spans += whole if rng.random() < 0.7 else [make_call(f"{name}-t{number}", "call"), *whole[:-1]]
        spans += rng.sample(spans, 2)
        rng.shuffle(spans)
        while spans:
            size = rng.randint(1, 4)
            yield spans[:size]
            spans = spans[size:]


def make_request(*spans: Span) -> bytes:
    """A request with these spans, all of one resource."""
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.extend(spans)
    return request.SerializeToString()


def _value(value: object) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
        case str():
            return AnyValue(string_value=value)
        case list():
            return AnyValue(array_value=ArrayValue(values=map(_value, cast("list[object]", value))))
        case _:
            raise TypeError(f"a test gave an attribute the value {value!r}")

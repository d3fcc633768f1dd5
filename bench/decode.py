"""Measures decoding: CPU microseconds a span for requests of LLM spans, against opentelemetry-proto in the same run.

    bench/decode.py [--spans 100] [--seconds 1]

A span has 15 small attributes, 2,048 prompt ids, 256 response ids and 256 logprobs: as OTLP arrays (17 KB), packed as
bytes of int32 and float32, or packed as base64 text. The peer parses with opentelemetry-proto and builds the same
records with a list comprehension for each array; packed numbers stay packed on both sides. Every decoder's best run
counts, and all are checked to give the same numbers.
"""

import argparse
import base64
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue

from spanmill import semconv
from spanmill.collector.decode import check_traces, decode_traces
from spanmill.collector.decode_json import decode_traces_json
from spanmill.triplets.records import Span

PROMPT, RESPONSE = 2048, 256
DTYPES = {
    semconv.PROMPT_TOKEN_IDS: "<i4",
    semconv.RESPONSE_TOKEN_IDS: "<i4",
    semconv.RESPONSE_LOGPROBS: "<f4",
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=100, help="in a request")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each decoder")
    options = parser.parse_args()

    print(f"{'encoding':10}{'decoder':34}{'us/span':>9}{'spans/s':>10}{'MB/s':>8}{'peer is':>9}")
    for encoding in ("arrays", "packed", "base64"):
        request = load(options.spans, encoding)
        body = request.SerializeToString()
        if numbers(decode_traces(body).spans[-1].attributes) != numbers(peer(body)[-1].attributes):
            raise SystemExit(f"the decoders disagree about {encoding}")
        decoders: dict[str, Callable[[], object]] = {
            "opentelemetry-proto, loops (peer)": lambda body=body: peer(body),
            "opentelemetry-proto, parse only": lambda body=body: ExportTraceServiceRequest.FromString(body),
            "decode_traces": lambda body=body: decode_traces(body),
            "decode_traces, arrays=False": lambda body=body: decode_traces(body, arrays=False),
            "decode_traces, only=()": lambda body=body: decode_traces(body, only=()),
            "check_traces": lambda body=body: check_traces(body),
        }
        if encoding == "arrays":
            text = otlp_json(request)
            decoders["decode_traces_json"] = lambda text=text: decode_traces_json(text)
        reference = 0.0
        for name, decoder in decoders.items():
            took = best(decoder, options.seconds) / options.spans
            reference = reference or took
            rate = len(body) / options.spans / took / 1e6
            print(f"{encoding:10}{name:34}{took * 1e6:9.1f}{1 / took:10,.0f}{rate:8.0f}{reference / took:8.1f}x")


def load(spans: int, encoding: str) -> Any:
    """A request of LLM spans."""
    rng = random.Random(7)
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for _ in range(spans):
        span = scope.spans.add(trace_id=rng.randbytes(16), span_id=rng.randbytes(8), name="chat", kind=3)
        span.start_time_unix_nano, span.end_time_unix_nano = 1, 2
        for number in range(15):
            span.attributes.add(key=f"gen_ai.small.attribute_{number}").value.CopyFrom(small(number))
        for key, count in zip(DTYPES, (PROMPT, RESPONSE, RESPONSE), strict=True):
            values = [
                rng.randrange(152_000) if DTYPES[key] == "<i4" else float(np.float32(-rng.expovariate(1)))
                for _ in range(count)
            ]
            span.attributes.add(key=key).value.CopyFrom(encoded(values, DTYPES[key], encoding))
    return request


def small(number: int) -> AnyValue:
    """One of the attributes that every LLM span has."""
    values = (
        AnyValue(string_value="policy-7b"),
        AnyValue(int_value=number * 100),
        AnyValue(double_value=0.7),
        AnyValue(bool_value=True),
        AnyValue(string_value="x" * 300),
    )
    return values[number % len(values)]


def encoded(values: list[Any], dtype: str, encoding: str) -> AnyValue:
    """Numbers in one of the three encodings."""
    packed = np.array(values, dtype).tobytes()
    if encoding == "packed":
        return AnyValue(bytes_value=packed)
    if encoding == "base64":
        return AnyValue(string_value=base64.b64encode(packed).decode())
    name = "int_value" if dtype == "<i4" else "double_value"
    return AnyValue(array_value=ArrayValue(values=[AnyValue(**{name: value}) for value in values]))


def peer(body: bytes) -> list[Span]:
    """The spans, as straightforward code gets them."""
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Span(
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            name=span.name,
            kind=span.kind,
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes={pair.key: plain(pair.value) for pair in span.attributes},
            resource={pair.key: plain(pair.value) for pair in group.resource.attributes},
            scope=scope.scope.name,
            status=span.status.code,
            status_message=span.status.message,
        )
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def plain(value: AnyValue) -> Any:
    """The Python value of an AnyValue; an array has one kind."""
    kind = value.WhichOneof("value")
    if kind != "array_value":
        return kind and getattr(value, kind)
    elements = value.array_value.values
    if elements[0].WhichOneof("value") == "int_value":
        return np.array([element.int_value for element in elements])
    return np.array([element.double_value for element in elements])


def numbers(attributes: Any) -> list[list[float]]:
    """Ids and logprobs, whatever they are encoded in."""
    found: list[list[float]] = []
    for key, dtype in DTYPES.items():
        value = attributes[key]
        value = base64.b64decode(value) if isinstance(value, str) else value
        found.append((np.frombuffer(value, dtype) if isinstance(value, bytes) else value).tolist())
    return found


def otlp_json(request: Any) -> bytes:
    """The request as OTLP/JSON, with ids in hex."""

    def hexed(members: dict[str, Any]) -> dict[str, Any]:
        ids = members.keys() & {"traceId", "spanId"}
        return members | {name: base64.b64decode(members[name]).hex() for name in ids}

    return json.dumps(json.loads(json_format.MessageToJson(request), object_hook=hexed)).encode()


def best(decoder: Callable[[], object], seconds: float) -> float:
    """The least CPU time of a run, in seconds."""
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.process_time()
        decoder()
        least = min(least, time.process_time() - start)
    return least


if __name__ == "__main__":
    main()

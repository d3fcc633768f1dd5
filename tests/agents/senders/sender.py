"""A program with the OpenTelemetry SDK alone, of any version: a rollout of many calls with token ids, as arrays.

usage: sender.py ROLLOUT CALLS PROTOCOL    the address comes from the OTEL_EXPORTER_OTLP_* variables
"""

import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

ROLLOUT, CALLS, PROTOCOL = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if PROTOCOL == "grpc":
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
else:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
tracer = provider.get_tracer("sender")
with tracer.start_as_current_span("agent", attributes={"spanmill.rollout.id": ROLLOUT}) as root:
    for turn in range(CALLS):
        with tracer.start_as_current_span("chat", kind=trace.SpanKind.CLIENT) as span:
            span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.response.id": f"{ROLLOUT}-{turn}",
                    "gen_ai.response.finish_reasons": ["stop"],
                    "spanmill.prompt.token_ids": list(range(turn + 1)),
                    "spanmill.response.token_ids": [turn, 7],
                    "spanmill.response.logprobs": [-1.0, -0.5 if turn % 2 else 0.0],
                }
            )
    root.set_attribute("spanmill.rollout.status", "succeeded")
provider.shutdown()

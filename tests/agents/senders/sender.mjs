// The same as sender.py with the OpenTelemetry SDK for Node: PROTOCOL is grpc, http/protobuf or http/json.

import { context, SpanKind, trace } from "@opentelemetry/api";
import { OTLPTraceExporter as GrpcExporter } from "@opentelemetry/exporter-trace-otlp-grpc";
import { OTLPTraceExporter as JsonExporter } from "@opentelemetry/exporter-trace-otlp-http";
import { OTLPTraceExporter as ProtoExporter } from "@opentelemetry/exporter-trace-otlp-proto";
import { BatchSpanProcessor, NodeTracerProvider } from "@opentelemetry/sdk-trace-node";

const [rollout, calls, protocol] = process.argv.slice(2);
const Exporter = { grpc: GrpcExporter, "http/json": JsonExporter, "http/protobuf": ProtoExporter }[protocol];
const provider = new NodeTracerProvider({ spanProcessors: [new BatchSpanProcessor(new Exporter())] });
const tracer = provider.getTracer("sender");
const root = tracer.startSpan("agent", { attributes: { "spanmill.rollout.id": rollout } });
const inside = trace.setSpan(context.active(), root);
for (let turn = 0; turn < Number(calls); turn++) {
  const span = tracer.startSpan("chat", { kind: SpanKind.CLIENT }, inside);
  span.setAttributes({
    "gen_ai.operation.name": "chat",
    "gen_ai.response.id": `${rollout}-${turn}`,
    "gen_ai.response.finish_reasons": ["stop"],
    "spanmill.prompt.token_ids": [...Array(turn + 1).keys()],
    "spanmill.response.token_ids": [turn, 7],
    "spanmill.response.logprobs": [-1, turn % 2 ? -0.5 : 0],
  });
  span.end();
}
root.setAttribute("spanmill.rollout.status", "succeeded");
root.end();
await provider.shutdown();

"""OpenTelemetry's own instrumentor of the client, told to put content into events: it reaches the collector."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import in_environment
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from otlp_sink import http_receiver, plain
from stub_vllm import stub_vllm

pytestmark = pytest.mark.agents
SPANMILL = str(Path(sys.executable).parent / "spanmill")
AGENT = """
from openai import OpenAI
OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "hi there"}])
"""
EVENTS_ONLY = {
    "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "event_only",
    "OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT": "true",
}


def test_content_in_events_alone(tmp_path: Path) -> None:
    """Under the rollout, although the program sets no LoggerProvider."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    agent = in_environment("instrumentors", script)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "SPANMILL_"))}
    with stub_vllm() as stub, http_receiver() as sink:
        addresses = {"OPENAI_BASE_URL": f"{stub.url}/v1", "OPENAI_API_KEY": "x"}
        command = [SPANMILL, "run", "--rollout-id", "r", "--endpoint", sink.endpoint]
        done = subprocess.run(
            [*command, "--", *agent],
            env={**clean, **EVENTS_ONLY, **addresses, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert 0 == done.returncode, done.stderr
    (body,) = (b for b, h in zip(sink.bodies, sink.headers, strict=True) if h["path"] == "/v1/logs")
    (group,) = ExportLogsServiceRequest.FromString(body).resource_logs
    (record,) = (record for scope in group.scope_logs for record in scope.log_records)
    told = {a.key: plain(a.value) for a in [*group.resource.attributes, *record.attributes]}
    assert ("gen_ai.client.inference.operation.details", "r", "chatcmpl-1", True) == (
        record.event_name,
        told["spanmill.rollout.id"],
        told["gen_ai.response.id"],
        "hi there" in str(told["gen_ai.input.messages"]),
    )

"""GenAI events, in which instrumentors put what a call said instead of on its span."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import rollouts
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from otlp_sink import Sink, plain
from served import QUICK, Served, wait_for

from spanmill.triplets.reader import read_triplets

RUN = (str(Path(sys.executable).parent / "spanmill"), "run", "--rollout-id", "r", "--")
EVENT = "gen_ai.client.inference.operation.details"
PROGRAM = """
import json, os
from opentelemetry import trace
from opentelemetry._logs import get_logger
{before}
logger, tracer = get_logger("instrumentor"), trace.get_tracer("instrumentor")
{between}
common = {{"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.id": "chatcmpl-1"}}
said = [{{"role": "user", "parts": [{{"type": "text", "content": "hi"}}]}}]
with tracer.start_as_current_span("chat m", attributes={{**common, "gen_ai.response.finish_reasons": ["stop"]}}):
    content = {{**common, "gen_ai.input.messages": said}}
    logger.emit(event_name="gen_ai.client.inference.operation.details", attributes=content)
    logger.emit(event_name="app.click", body="nobody's business")
    logger.emit(body="a line of a log")
"""
OWN = """
from opentelemetry._logs import set_logger_provider
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import ConsoleLogRecordExporter, SimpleLogRecordProcessor
own = LoggerProvider()
set_logger_provider(own)
shown = lambda record: f"{record.log_record.event_name} {sorted(record.log_record.attributes)}\\n"
own.add_log_record_processor(SimpleLogRecordProcessor(ConsoleLogRecordExporter(formatter=shown)))
"""
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch(tmp_path: Path, clean_environment: None) -> Launch:
    """Runs the program under `spanmill run`, with an endpoint."""

    def run(endpoint: str, protocol: str, before: str = "", between: str = "") -> Any:
        script = tmp_path / "program.py"
        script.write_text(PROGRAM.format(before=before, between=between))
        environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        command = [*RUN, sys.executable, str(script)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return run


def logs(sink: Sink) -> list[tuple[str, Any, Any]]:
    """(event name, rollout of the resource or of the record, names of the attributes) of each record that arrived."""
    bodies = [body for body, headers in zip(sink.bodies, sink.headers, strict=True) if headers["path"] == "/v1/logs"]
    found: list[tuple[str, Any, Any]] = []
    for body in bodies:
        for group in ExportLogsServiceRequest.FromString(body).resource_logs:
            resource = {a.key: plain(a.value) for a in group.resource.attributes}
            for record in (record for scope in group.scope_logs for record in scope.log_records):
                own = {a.key: plain(a.value) for a in record.attributes}
                rollout = own.get("spanmill.rollout.id") or resource.get("spanmill.rollout.id")
                names = sorted(name for name in own if name.startswith("gen_ai."))
                found.append((record.event_name, rollout, names))
    return found


NAMES = ["gen_ai.input.messages", "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.response.id"]


def test_a_program_without_a_logger_provider(launch: Launch, http_sink: Sink) -> None:
    """Its GenAI events go to the collector under the rollout, and nothing else of what it logs."""
    done = launch(http_sink.endpoint, "http/protobuf")
    assert (0, "", [(EVENT, "r", NAMES)]) == (done.returncode, done.stderr, logs(http_sink))


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_program_with_its_own(launch: Launch, http_sink: Sink, when: str) -> None:
    """It gets all of them as it would, also by loggers made before it was set; the collector gets a copy."""
    done = launch(http_sink.endpoint, "http/protobuf", **{when: OWN})
    lines = [f"{EVENT} {NAMES}", "app.click []", "None []"]
    assert (0, "", lines) == (done.returncode, done.stderr, done.stdout.splitlines())
    assert [(EVENT, "r", NAMES)] == logs(http_sink)


def test_the_row_has_what_the_event_said(launch: Launch, tmp_path: Path) -> None:
    """Over gRPC to the real service: the call's messages are those of the event."""
    with Served(tmp_path / "data", *QUICK) as service:
        done = launch(f"http://{service.address}", "grpc")
        assert (0, "") == (done.returncode, done.stderr)
        wait_for(
            lambda: (
                any((tmp_path / "data" / "rollouts").glob("*.parquet")) and rollouts(tmp_path / "data", "rollout_id")
            )
        )
    row = read_triplets(tmp_path / "data").collect().row(0, named=True)
    assert ("r", "chatcmpl-1", True) == (row["rollout_id"], row["call_id"], '"hi"' in (row["messages"] or ""))
